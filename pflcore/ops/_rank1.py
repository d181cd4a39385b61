"""rank1_linear: a linear layer made of rank-1 factors, forward and backward, under
vmap too."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._check import check_floating, check_same_kind, describe, reject_argument
from ._library import define, in_forward_ad, lib, save_inputs, warn_of_references

NARROW = (torch.float16, torch.bfloat16)  # computed in float32
_OWN = (2, 2, 1, 2)  # dimensions of x, w_a, lam, w_b without the clients' axis


def rank1_linear(  # noqa: PLR0911 (a path each)
    x: Tensor,  # [..., B, I]
    w_a: Tensor,  # [O, F] or [..., O, F]
    lam: Tensor,  # [F] or [..., F]
    w_b: Tensor,  # [F, I] or [..., F, I]
) -> Tensor:  # [..., B, O]
    """`((x w_b^T) * lam) w_a^T`: a linear layer made of F rank-1 factors, whose dense
    weight is never built (WAFFLe, Hao et al.).

    Leading axes, the clients', broadcast; an input without them is shared, and its
    gradient summed. Factors with `lam == 0` are skipped. One dtype for all inputs,
    16-bit ones computed in float32; under `autocast` all are cast to its dtype, as for
    `F.linear`. Differentiable in all four; works under `vmap`. In forward mode it is
    plain torch, which reads every factor.
    """
    if (
        torch._C._is_any_autocast_enabled()
        and isinstance(x, Tensor)
        and torch.is_autocast_enabled(x.device.type)
    ):
        low = torch.get_autocast_dtype(x.device.type)
        x, w_a, lam, w_b = (
            t.to(low)
            if isinstance(t, Tensor) and t.dtype in (torch.float32, *NARROW)
            else t
            for t in (x, w_a, lam, w_b)
        )
    lead = check_rank1(x, w_a, lam, w_b)
    warn_of_references()
    if x.dim() == 1:
        return rank1_linear(x[None], w_a, lam, w_b).squeeze(-2)
    if in_forward_ad():
        z, a, scale, b = (
            t.float() if t.dtype in NARROW else t for t in (x, w_a, lam, w_b)
        )
        return (z @ b.mT * scale[..., None, :] @ a.mT).to(x.dtype)
    inputs = ((x, 2), (w_a, 2), (lam, 1), (w_b, 2))
    if len(lead) <= 1 and all(
        t.dim() == own or t.shape[0] == lead[0] for t, own in inputs
    ):
        return _differentiable(x, w_a, lam, w_b)
    # nothing but a larger batch
    if w_a.dim() == 2 and lam.dim() == 1 and w_b.dim() == 2:
        y = _differentiable(x.flatten(0, -2), w_a, lam, w_b)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    y = _differentiable(*[_flat(t, own, lead) for t, own in inputs])
    return y.reshape(*lead, *y.shape[1:])


def _flat(t: Tensor, own: int, lead: tuple[int, ...]) -> Tensor:
    """`t` with one axis of clients for the axes `lead`; as it is where it has none."""
    if t.dim() == own:
        return t
    return t.expand(*lead, *t.shape[t.dim() - own :]).flatten(0, len(lead) - 1)


def check_rank1(x: Any, w_a: Any, lam: Any, w_b: Any) -> tuple[int, ...]:
    """The arguments of rank1_linear; returns the broadcast leading axes."""
    op = "rank1_linear"
    for name, t, own, wanted in (
        ("x", x, 1, "[..., B, I]"),
        ("w_a", w_a, 2, "[O, F]"),
        ("lam", lam, 1, "[..., F]"),
        ("w_b", w_b, 2, "[F, I]"),
    ):
        check_floating(op, name, t)
        if t.dim() < own:
            reject_argument(op, name, wanted, describe(t))
        if t is not x:
            check_same_kind(op, "x", x, name, t)
    if w_b.shape[-1] != x.shape[-1]:
        reject_argument(
            op, "w_b", f"[F, {x.shape[-1]}] for the inputs of x", describe(w_b)
        )
    if w_a.shape[-1] != w_b.shape[-2]:
        reject_argument(
            op, "w_a", f"[O, {w_b.shape[-2]}] for the factors of w_b", describe(w_a)
        )
    if lam.shape[-1] != w_b.shape[-2]:
        reject_argument(
            op, "lam", f"[..., {w_b.shape[-2]}] for the factors of w_b", describe(lam)
        )
    leads = (x.shape[:-2], w_a.shape[:-2], lam.shape[:-1], w_b.shape[:-2])
    if not any(leads):
        return ()
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        came = ", ".join(str(list(lead)) for lead in leads)
        raise ValueError(
            f"{op}: the leading axes of x, w_a, lam and w_b must broadcast, got {came}."
        ) from None


def reference(
    x: Tensor,  # [B, I] or [N, B, I]
    w_a: Tensor,  # [O, F] or [N, O, F]
    lam: Tensor,  # [F] or [N, F]
    w_b: Tensor,  # [F, I] or [N, F, I]
) -> Tensor:  # [B, O] or [N, B, O]
    """((x w_b^T) * lam) w_a^T: a linear layer of weight sum_f lam_f w_a[:, f]
    w_b[f, :], which is never built."""
    scale = lam[..., None, :]
    hidden = torch.where(scale != 0, x @ w_b.mT * scale, 0.0)  # [.., B, F]
    # a factor that is off is off, whatever it holds
    return hidden @ torch.where(scale != 0, w_a, 0.0).mT


def backward_reference(
    grad: Tensor,  # [B, O] or [N, B, O]
    x: Tensor,
    w_a: Tensor,
    lam: Tensor,
    w_b: Tensor,
    need_x: bool,
    need_a: bool,
    need_lam: bool,
    need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of rank1_linear in its inputs' shapes; an empty tensor where one is
    not needed."""
    scale = lam[..., None, :]
    hidden = x @ w_b.mT  # [.., B, F] both
    back = grad @ w_a
    none = grad.new_empty(0)

    def scaled(t: Tensor) -> Tensor:
        """A factor that is off is skipped; where this is differentiated once more, by
        lam too, the plain product has the derivative."""
        return (
            t * scale
            if torch.is_grad_enabled()
            else torch.where(scale != 0, t * scale, 0.0)
        )

    def like(t: Tensor, g: Tensor) -> Tensor:
        """Clients that share an input add up."""
        return g.sum_to_size(t.shape).contiguous()

    return (
        like(x, scaled(back) @ w_b) if need_x else none,
        like(w_a, grad.mT @ scaled(hidden)) if need_a else none,
        like(lam, (hidden * back).sum(-2)) if need_lam else none,
        like(w_b, scaled(back).mT @ x) if need_b else none,
    )


_op = define(
    "rank1_linear(Tensor x, Tensor w_a, Tensor lam, Tensor w_b) -> Tensor", reference
)
_op_backward = define(
    "rank1_linear_backward(Tensor grad, Tensor x, Tensor w_a, Tensor lam, Tensor w_b, "
    "bool need_x, "
    "bool need_a, bool need_lam, bool need_b) -> (Tensor, Tensor, Tensor, Tensor)",
    backward_reference,
)


# --- on a card --------------------------------------------------------------

# Batched products of torch are several times faster there than kernels that list the
# factors that are on. Those kernels serve where torch would round the factors of a
# product to fewer bits.
_listed_op = define(
    "rank1_listed(Tensor x, Tensor w_a, Tensor lam, Tensor w_b) -> Tensor", reference
)
_listed_backward_op = define(
    "rank1_listed_backward(Tensor grad, Tensor x, Tensor w_a, Tensor lam, Tensor w_b, "
    "bool need_x, "
    "bool need_a, bool need_lam, bool need_b) -> (Tensor, Tensor, Tensor, Tensor)",
    backward_reference,
)


def rounds_factors(dtype: torch.dtype) -> bool:
    """Whether torch's products on a card round factors of this dtype, as TF32 does."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    return dtype != torch.float64 and precision not in ("none", "ieee")


def rank1_by_products(
    x: Tensor,  # [B, I] or [N, B, I]
    w_a: Tensor,  # [O, F] or [N, O, F]
    lam: Tensor,  # [F] or [N, F]
    w_b: Tensor,  # [F, I] or [N, F, I]
) -> Tensor:  # [B, O] or [N, B, O]
    """The layer as two products. It asks nothing of the host.

    A factor that is on and not finite makes every sample's outputs that it reaches NaN.
    """
    x, w_a, lam, w_b, back_to = _widen_inputs(x, w_a, lam, w_b)
    hidden = _scale_by_factors(_client_einsum("bi,fi->bf", x, w_b, (2, 2)), lam)
    return _masked_product(w_a.mT, lam, hidden).to(back_to)


def rank1_by_products_backward(
    grad: Tensor,  # [B, O] or [N, B, O]
    x: Tensor,
    w_a: Tensor,
    lam: Tensor,
    w_b: Tensor,
    need_x: bool,
    need_a: bool,
    need_lam: bool,
    need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients as products; an empty tensor where one is not needed."""
    x, w_a, lam, w_b, back_to = _widen_inputs(x, w_a, lam, w_b)
    grad = grad.to(x.dtype)
    none = grad.new_empty(0, dtype=back_to)
    gx = ga = glam = gb = none
    if need_a or need_lam:
        hidden = _client_einsum("bi,fi->bf", x, w_b, (2, 2))
    if need_x or need_lam or need_b:
        back = _client_einsum("bo,of->bf", grad, w_a, (2, 2))
    if need_x:
        gx = _masked_product(
            w_b, lam, _scale_by_factors(back, lam), sum_clients=x.dim() == 2
        ).to(back_to)
    if need_a:
        scaled = _scale_by_factors(hidden, lam)
        ga = _client_einsum("bo,bf->of", grad, scaled, (2, 2), w_a.dim() == 2).to(
            back_to
        )
    if need_lam:
        glam = (hidden * back).sum(-2)
        glam = glam.sum_to_size(lam.shape).contiguous().to(back_to)
    if need_b:
        scaled = _scale_by_factors(back, lam)
        gb = _client_einsum("bf,bi->fi", scaled, x, (2, 2), w_b.dim() == 2).to(back_to)
    return gx, ga, glam, gb


def _widen_inputs(*inputs: Tensor) -> tuple[Any, ...]:
    """The inputs as they are computed, 16-bit ones in float32; and the dtype they
    came in."""
    dtype = inputs[0].dtype
    if dtype in NARROW:
        inputs = tuple(t.float() for t in inputs)
    return *inputs, dtype


def _client_einsum(
    formula: str,  # without the clients' axis
    a: Tensor,
    b: Tensor,
    client_dims: tuple[int, int],  # dimensions of a and b without it
    sum_clients: bool = False,  # over the clients
) -> Tensor:
    """`einsum` with a clients' axis wherever a tensor has one."""
    operands, out = formula.split("->")
    first, second = operands.split(",")
    has = [t.dim() > dims for t, dims in zip((a, b), client_dims, strict=True)]
    first = "n" * has[0] + first
    second = "n" * has[1] + second
    out = "n" * (any(has) and not sum_clients) + out
    return torch.einsum(f"{first},{second}->{out}", a, b).contiguous()


def _scale_by_factors(t: Tensor, lam: Tensor) -> Tensor:
    """`t * lam` along the last axis [.., B, F], 0 where a factor is off, whatever it
    holds."""
    scale = lam[..., None, :]
    return torch.where(scale != 0, t * scale, 0.0)


def _masked_product(
    w: Tensor,  # [F, C] or [N, F, C]
    lam: Tensor,  # [F] or [N, F]
    t: Tensor,  # [B, F] or [N, B, F]; 0 where a factor is off
    sum_clients: bool = False,  # over the clients
) -> Tensor:  # [B, C] or [N, B, C]
    """`t @ w`, in which a factor that is off counts for nothing, also where it is
    not finite."""
    if w.dim() == 3 or lam.dim() == 1:
        return _client_einsum(
            "bf,fc->bc",
            t,
            torch.where(lam[..., None] != 0, w, 0.0),
            (2, 2),
            sum_clients,
        )
    # Clients share the factors, each has some of them on: no copy of the factors for
    # each client. What is not finite is taken out, and what it reaches is marked.
    finite = w.nan_to_num(0.0, 0.0, 0.0)
    on = (lam != 0).to(w.dtype)
    reached = _client_einsum(
        "f,fc->c", on, (w != finite).to(w.dtype), (1, 2), sum_clients
    )
    out = _client_einsum("bf,fc->bc", t, finite, (2, 2), sum_clients)
    return out.masked_fill_(reached[..., None, :] > 0, torch.nan)


def rank1_on_gpu(x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor) -> Tensor:
    """The op where tensors are on a card. Autocast has cast the inputs already."""
    if rounds_factors(x.dtype):
        return _listed_op(x, w_a, lam, w_b)
    with torch.autocast(x.device.type, enabled=False):
        return rank1_by_products(x, w_a, lam, w_b)


def rank1_on_gpu_backward(grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Its gradients there."""
    if rounds_factors(x.dtype):
        return _listed_backward_op(grad, x, *others)
    with torch.autocast(x.device.type, enabled=False):
        return rank1_by_products_backward(grad, x, *others)


lib.impl("rank1_linear", rank1_on_gpu, "CUDA")
lib.impl("rank1_linear_backward", rank1_on_gpu_backward, "CUDA")


# --- autograd ---------------------------------------------------------------


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w_a, lam, w_b = ctx.saved_tensors
    # a second derivative is wanted: the same formula in differentiable torch
    twice = torch.is_grad_enabled()
    backward = backward_reference if twice else _op_backward
    grads = backward(grad, x, w_a, lam, w_b, *ctx.needs_input_grad)
    return tuple(
        g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=True)
    )


torch.library.register_autograd(
    "pflcore::rank1_linear", _backward, setup_context=save_inputs, lib=lib
)


class _Rank1(torch.autograd.Function):
    """The same formula without the op's registered autograd, which costs as much as a
    small layer's arithmetic."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _op(*inputs)

    backward = staticmethod(_backward)


def _differentiable(x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor) -> Tensor:
    # these need the op to stand alone
    eager = not (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    )
    wanted = (
        w_a.requires_grad or w_b.requires_grad or x.requires_grad or lam.requires_grad
    )
    run = _Rank1.apply if eager and wanted and torch.is_grad_enabled() else _op
    return run(x, w_a, lam, w_b)


# --- vmap -------------------------------------------------------------------


def _clients_first(
    size: int, in_dims: Sequence[int | None], args: Sequence[Tensor], own: Sequence[int]
) -> tuple[list[Tensor], list[bool]]:
    """Each argument with the vmapped axis in front, folded into a clients' axis that is
    there already: [size * n, ...]; and which of them had one."""
    has = [
        t.dim() - (d is not None) > o
        for t, d, o in zip(args, in_dims, own, strict=True)
    ]
    out = [
        t if d is None else t.movedim(d, 0) for t, d in zip(args, in_dims, strict=True)
    ]
    if any(has):
        at = has.index(True)
        lead = size, out[at].shape[in_dims[at] is not None]
        wide = [
            t if d is None or h else t[:, None]
            for t, d, h in zip(out, in_dims, has, strict=True)
        ]
        out = [_flat(t, o, lead) for t, o in zip(wide, own, strict=True)]
    return out, has


def _vmap(
    info: Any, in_dims: tuple[int | None, ...], *args: Tensor
) -> tuple[Tensor, int]:
    given, has = _clients_first(info.batch_size, in_dims, args, _OWN)
    y = _op(*given)
    return (y.unflatten(0, (info.batch_size, -1)) if any(has) else y), 0


def _backward_vmap(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    size = info.batch_size
    dims = in_dims[:5]
    needs = args[5:]
    # a gradient is wanted for each vmapped slice, so a shared input is repeated
    # (without a copy) rather than summed over the slices
    wide = [
        t.expand(size, *t.shape) if d is None else t
        for t, d in zip(args, dims, strict=False)
    ]
    given, has = _clients_first(size, [d or 0 for d in dims], wide, (2, *_OWN))
    out = []
    for g, own, need in zip(_op_backward(*given, *needs), has[1:], needs, strict=True):
        if not need:
            g = g.new_empty(size, 0)
        elif any(has):
            g = g.unflatten(0, (size, -1))
            g = g if own else g.sum(1)  # shared by the inner clients
        out.append(g)
    return tuple(out), (0, 0, 0, 0)


torch.library.register_vmap("pflcore::rank1_linear", _vmap, lib=lib)
torch.library.register_vmap("pflcore::rank1_linear_backward", _backward_vmap, lib=lib)
