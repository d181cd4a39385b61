"""The ops as torch sees them: schema, default body, fake kernel, autograd, vmap, and the compiled kernels where there are any.

The default body of an op is its reference and the compiled library only adds kernels, so the dispatcher is the fallback.
This is the only file that knows that `pflcore._C` exists.
"""

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference

_lib = torch.library.Library("pflcore", "FRAGMENT")


def _define(schema: str, body: Any, fake: Any) -> None:
    name = schema[: schema.index("(")]
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pflcore::{name}", fake, lib=_lib)


# --- schemas, bodies, fakes -------------------------------------------------------------------------------------------------------


def _fake_sqdist(a: Tensor, b: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], (a if b is None else b).shape[0], dtype=torch.float64)


def _fake_waffle(dist: Tensor, target: Tensor, omega: float, psi: float, uniform_ties: bool) -> Tensor:
    return dist.new_empty(dist.shape, dtype=torch.float64)


def _fake_feddwa(sqdist: Tensor, k: int) -> tuple[Tensor, Tensor]:
    m, n = sqdist.shape
    kept = min(k, n)
    return sqdist.new_empty(m, kept, dtype=torch.float64), sqdist.new_empty(m, kept, dtype=torch.int64)


def _fake_aggregate(updates: Tensor, weight: Tensor, index: Tensor | None, base: Tensor | None, lr: float, precise: bool) -> Tensor:
    return updates.new_empty(weight.shape[0], updates.shape[1], dtype=updates.dtype if base is None else base.dtype)


def _fake_rank1(x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor) -> Tensor:
    batch = next((t.shape[:1] for t, own in ((x, 2), (w_a, 2), (lam, 1), (w_b, 2)) if t.dim() > own), ())
    return x.new_empty(*batch, x.shape[-2], w_a.shape[-2])


def _fake_rank1_backward(
    grad: Tensor, x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor, need_x: bool, need_a: bool, need_lam: bool, need_b: bool
) -> tuple[Tensor, ...]:
    pairs = ((x, need_x), (w_a, need_a), (lam, need_lam), (w_b, need_b))
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in pairs)


def _fake_pool(x: Tensor, average: bool) -> Tensor:
    return x.new_empty(*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2)


def _fake_pool_backward(grad: Tensor, x: Tensor, average: bool) -> Tensor:
    return x.new_empty(x.shape)


def _fake_conv(x: Tensor, weight: Tensor, bias: Tensor | None, pad_h: int, pad_w: int) -> Tensor:
    high, wide = x.shape[2] + 2 * pad_h - weight.shape[2] + 1, x.shape[3] + 2 * pad_w - weight.shape[3] + 1
    return x.new_empty(x.shape[0], weight.shape[0], high, wide)


def _fake_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, pad_h: int, pad_w: int, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = weight.shape[:1] if need_bias else (0,)
    return x.new_empty(x.shape if need_x else (0,)), x.new_empty(weight.shape if need_weight else (0,)), x.new_empty(outputs)


def _fake_linear(w: Tensor, *args: Any) -> Tensor:
    return w.new_empty(w.shape[0], dtype=torch.float64)


def _fake_nothing(*args: Any) -> None:
    return None


_define("pairwise_sqdist(Tensor a, Tensor? b) -> Tensor", reference.pairwise_sqdist, _fake_sqdist)
_define(
    "waffle_weights(Tensor dist, Tensor target, float omega, float psi, bool uniform_ties) -> Tensor",
    reference.waffle_weights,
    _fake_waffle,
)
_define("feddwa_weights(Tensor sqdist, int k) -> (Tensor, Tensor)", reference.feddwa_weights, _fake_feddwa)
_define(
    "aggregate(Tensor updates, Tensor weight, Tensor? index, Tensor? base, float lr, bool precise) -> Tensor",
    reference.aggregate,
    _fake_aggregate,
)
_define(
    "aggregate_out(Tensor updates, Tensor weight, Tensor? index, Tensor? base, float lr, bool precise, Tensor(a!) out) -> ()",
    reference.aggregate_out,
    _fake_nothing,
)
_define("rank1_linear(Tensor x, Tensor w_a, Tensor lam, Tensor w_b) -> Tensor", reference.rank1_linear, _fake_rank1)
_define(
    "rank1_linear_backward(Tensor grad, Tensor x, Tensor w_a, Tensor lam, Tensor w_b, bool need_x, bool need_a, bool need_lam, "
    "bool need_b) -> (Tensor, Tensor, Tensor, Tensor)",
    reference.rank1_linear_backward,
    _fake_rank1_backward,
)
_define(
    "sgd_step_(Tensor(a!) w, Tensor grad, float lr, Tensor? shift, Tensor? mask, float mu, Tensor? mu_rows, Tensor? anchor, "
    "float momentum, Tensor(b!)? buffer, float weight_decay) -> ()",
    reference.sgd_step_,
    _fake_nothing,
)
_define(
    "linear_sgd_(Tensor(a!) w, Tensor x, Tensor y, Tensor? relabel, Tensor order, Tensor size, Tensor steps, int batch_size, "
    "bool drop_last, str criterion, bool bias, float lr, Tensor? shift, Tensor? mask, float mu, Tensor? mu_rows, Tensor? anchor, "
    "float momentum, float weight_decay, Tensor(b!)? grad_sum) -> Tensor",
    reference.linear_sgd_,
    _fake_linear,
)
_define("pool2x2(Tensor x, bool average) -> Tensor", reference.pool2x2, _fake_pool)
_define("pool2x2_backward(Tensor grad, Tensor x, bool average) -> Tensor", reference.pool2x2_backward, _fake_pool_backward)
_define("conv2d(Tensor x, Tensor weight, Tensor? bias, int pad_h, int pad_w) -> Tensor", reference.conv2d, _fake_conv)
_define(
    "conv2d_backward(Tensor grad, Tensor x, Tensor weight, int pad_h, int pad_w, bool need_x, bool need_weight, bool need_bias) "
    "-> (Tensor, Tensor, Tensor)",
    reference.conv2d_backward,
    _fake_conv_backward,
)

pairwise_sqdist: Callable[..., Tensor] = torch.ops.pflcore.pairwise_sqdist.default
waffle_weights: Callable[..., Tensor] = torch.ops.pflcore.waffle_weights.default
feddwa_weights: Callable[..., tuple[Tensor, Tensor]] = torch.ops.pflcore.feddwa_weights.default
aggregate: Callable[..., Tensor] = torch.ops.pflcore.aggregate.default
aggregate_out: Callable[..., None] = torch.ops.pflcore.aggregate_out.default
_rank1_op: Callable[..., Tensor] = torch.ops.pflcore.rank1_linear.default
rank1_linear_backward: Callable[..., tuple[Tensor, ...]] = torch.ops.pflcore.rank1_linear_backward.default
sgd_step_: Callable[..., None] = torch.ops.pflcore.sgd_step_.default
linear_sgd_: Callable[..., Tensor] = torch.ops.pflcore.linear_sgd_.default
conv2d: Callable[..., Tensor] = torch.ops.pflcore.conv2d.default
conv2d_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.pflcore.conv2d_backward.default
pool2x2: Callable[..., Tensor] = torch.ops.pflcore.pool2x2.default
pool2x2_backward: Callable[..., Tensor] = torch.ops.pflcore.pool2x2_backward.default


# --- autograd ---------------------------------------------------------------------------------------------------------------------


def _sqdist_setup(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    a, b = inputs
    ctx.symmetric = b is None
    ctx.save_for_backward(a) if b is None else ctx.save_for_backward(a, b)


def _sqdist_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """d/da_i = 2 sum_j g_ij (a_i - b_j), in float64: the two terms nearly cancel for models that are close."""
    if ctx.symmetric:
        (a,) = ctx.saved_tensors
        both = grad + grad.T
        return 2 * (both.sum(1, keepdim=True) * a.double() - both @ a.double()).to(a.dtype), None
    a, b = ctx.saved_tensors
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = 2 * (grad.sum(1, keepdim=True) * a.double() - grad @ b.double()).to(a.dtype)
    if ctx.needs_input_grad[1]:
        grad_b = 2 * (grad.sum(0)[:, None] * b.double() - grad.T @ a.double()).to(b.dtype)
    return grad_a, grad_b


torch.library.register_autograd("pflcore::pairwise_sqdist", _sqdist_backward, setup_context=_sqdist_setup, lib=_lib)


def _aggregate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    updates, weight, index, base, ctx.lr, _ = inputs
    ctx.sparse, ctx.base_dim, ctx.base_dtype = index is not None, None if base is None else base.dim(), output.dtype
    ctx.save_for_backward(updates, weight, *([index] if ctx.sparse else []))


def _aggregate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    updates, weight, *rest = ctx.saved_tensors
    need_updates, need_weight, _, need_base = ctx.needs_input_grad[:4]
    dense = weight.double()  # [M, N] or [M, K]
    grad64 = grad.double()
    grad_updates = grad_weight = None
    if ctx.sparse:
        index = rest[0]
        if need_weight:
            columns = [(grad64 * updates[index[:, k]].double()).sum(1) for k in range(index.shape[1])]
            grad_weight = torch.stack(columns, 1) if columns else torch.zeros_like(dense)
        dense = torch.zeros(weight.shape[0], updates.shape[0], dtype=torch.float64, device=grad.device).scatter_add(1, index, dense)
    elif need_weight:
        grad_weight = grad64 @ updates.double().T
    if need_updates:
        grad_updates = (ctx.lr * (dense.T @ grad64)).to(updates.dtype)
    if grad_weight is not None:
        grad_weight = (ctx.lr * grad_weight).to(weight.dtype)
    grad_base = (grad if ctx.base_dim == 2 else grad.sum(0)) if need_base else None
    return grad_updates, grad_weight, None, grad_base, None, None


torch.library.register_autograd("pflcore::aggregate", _aggregate_backward, setup_context=_aggregate_setup, lib=_lib)


def _rank1_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _rank1_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w_a, lam, w_b = ctx.saved_tensors
    twice = torch.is_grad_enabled()  # a second derivative is wanted: the same formula in differentiable torch
    backward: Callable[..., tuple[Tensor, ...]] = reference.rank1_linear_backward if twice else rank1_linear_backward
    grads = backward(grad, x, w_a, lam, w_b, *ctx.needs_input_grad)
    return tuple(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=True))


torch.library.register_autograd("pflcore::rank1_linear", _rank1_backward, setup_context=_rank1_setup, lib=_lib)


class _Rank1(torch.autograd.Function):
    """The same formula without the op's registered autograd, which costs as much as a small layer's arithmetic."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _rank1_op(*inputs)

    backward = staticmethod(_rank1_backward)


def rank1_linear(x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor) -> Tensor:
    eager = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())  # these need the op to stand alone
    if eager and torch.is_grad_enabled() and (w_a.requires_grad or w_b.requires_grad or x.requires_grad or lam.requires_grad):
        y: Tensor = _Rank1.apply(x, w_a, lam, w_b)
        return y
    return _rank1_op(x, w_a, lam, w_b)


# --- vmap -------------------------------------------------------------------------------------------------------------------------

_OWN = (2, 2, 1, 2)  # dimensions of x, w_a, lam, w_b without the clients' axis


def _clients_first(size: int, in_dims: Sequence[int | None], args: Sequence[Tensor], own: Sequence[int]) -> list[Tensor]:
    """Each argument with the vmapped axis in front, folded into a clients' axis that is there already: [size * n, ...]."""
    inner = next(
        (t.shape[0 if d is None else int(d == 0)] for t, d, o in zip(args, in_dims, own, strict=True) if t.dim() - (d is not None) > o),
        None,
    )
    out = []
    for t, dim, o in zip(args, in_dims, own, strict=True):
        has_inner = t.dim() - (dim is not None) > o
        if dim is not None:
            t = t.movedim(dim, 0)
        if inner is not None and (dim is not None or has_inner):
            t = t if dim is not None else t[None]
            t = t if has_inner else t[:, None]
            t = t.expand(size, inner, *t.shape[2:]).reshape(size * inner, *t.shape[2:])
        out.append(t)
    return out


def _inner(in_dims: Sequence[int | None], args: Sequence[Tensor], own: Sequence[int]) -> bool:
    return any(t.dim() - (d is not None) > o for t, d, o in zip(args, in_dims, own, strict=True))


def _rank1_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
    y = _rank1_op(*_clients_first(info.batch_size, in_dims, args, _OWN))
    return (y.unflatten(0, (info.batch_size, -1)) if _inner(in_dims, args, _OWN) else y), 0


def _rank1_backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    size, own, dims = info.batch_size, (2, *_OWN), in_dims[:5]
    tensors, needs = args[:5], args[5:]
    inner = _inner(dims, tensors, own)
    # a gradient is wanted for each vmapped slice, so a shared input is repeated (without a copy) rather than summed over the slices
    wide = [t if d is not None else t.expand(size, *t.shape) for t, d in zip(tensors, dims, strict=True)]
    grads = rank1_linear_backward(*_clients_first(size, [0 if d is None else d for d in dims], wide, own), *needs)
    out = []
    for g, t, d, o, need in zip(grads, tensors[1:], dims[1:], _OWN, needs, strict=True):
        if not need:
            out.append(g.new_empty(size, 0))
            continue
        if inner:
            g = g.unflatten(0, (size, -1))
            if t.dim() - (d is not None) == o:  # shared by the inner clients
                g = g.sum(1)
        out.append(g)
    return tuple(out), (0, 0, 0, 0)


torch.library.register_vmap("pflcore::rank1_linear", _rank1_vmap, lib=_lib)
torch.library.register_vmap("pflcore::rank1_linear_backward", _rank1_backward_vmap, lib=_lib)


# --- the compiled kernels ---------------------------------------------------------------------------------------------------------

BUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


@dataclass(frozen=True)
class Backend:
    """What runs the ops. `str()` of it is one line."""

    kernels: bool  # compiled kernels are loaded
    isa: str | None  # "plain", "avx2" or "avx512": the path of the CPU kernels
    cuda: bool  # CUDA kernels were built
    threads: int  # torch's intra-op threads
    torch: str
    why: str  # one sentence: why this and not another
    fix: str | None  # the command that mends it, where the kernels could be had

    def __str__(self) -> str:
        what = f"kernels ({self.isa}, {self.threads} threads, {'with' if self.cuda else 'no'} CUDA)" if self.kernels else "references"
        return f"{what}, torch {self.torch}: {self.why}" + (f"; to mend it: {self.fix}" if self.fix else "")


def _load() -> tuple[Any, str, str | None]:
    if os.environ.get("PFLCORE_KERNELS", "1") == "0":
        return None, "PFLCORE_KERNELS=0 leaves the kernels unloaded", None
    if tuple(int("".join(filter(str.isdigit, part)) or 0) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 10):
        return None, "the kernels need torch >= 2.10", None
    try:
        module = importlib.import_module("pflcore._C")
    except ModuleNotFoundError:
        return None, "the kernels are not built (they need a C++ compiler)", BUILD
    except ImportError as error:
        return None, f"the kernels do not load beside this torch ({error})", BUILD
    return module, f"built with {module.compiler} against torch {module.torch_version}", None


_C, _why, _fix = _load()
on_references = _fix is not None  # although kernels could be had: the first op call says so


def backend() -> Backend:
    """What runs the ops and why: compiled kernels or references, the CPU path, threads, CUDA."""
    loaded = _C is not None
    return Backend(loaded, _C.isa() if loaded else None, bool(loaded and _C.cuda), torch.get_num_threads(), torch.__version__, _why, _fix)


def warn_once() -> None:
    """Say, at the first op, that the references run although the kernels could be had."""
    global on_references
    on_references = False
    warnings.warn(f"pflcore runs its pure-PyTorch references: {_why}. To mend it, in pflcore's folder: {BUILD}", stacklevel=3)
