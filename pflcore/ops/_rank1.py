"""A linear layer of rank-1 factors, forward and backward, also under vmap.

The dense weight of the layer would be `sum_f lam_f w_a[:, f] w_b[f, :]`. A factor whose
strength is 0 is off: it counts for nothing, even where its vectors hold NaN. A tensor
either has an axis of clients in front, or is shared by all clients.

On a CPU the kernels skip the factors that are off. On a GPU plain products are quicker,
so there the op is two products of torch.

Symbols: N clients; B samples of a batch; I inputs and O outputs of the layer; F
factors; C columns of either; x the input; w_a, w_b the factors' vectors; lam their
strengths. A hidden value [B, F] is `x w_b^T`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pflcore.check import Words, reject

from ._check import check_like, check_tensor
from ._library import (
    define,
    in_forward_ad,
    lib,
    runs_references,
    warn_of_references,
)

OP = "rank1_linear"
NARROW = (torch.float16, torch.bfloat16)  # dtypes that are computed in float32
CLIENT_DIMS = (2, 2, 1, 2)  # dimensions of x, w_a, lam, w_b without a clients' axis


def rank1_linear(
    x: Tensor,  # [..., B, I]
    w_a: Tensor,  # [O, F] or [..., O, F]
    lam: Tensor,  # [F] or [..., F]
    w_b: Tensor,  # [F, I] or [..., F, I]
) -> Tensor:  # [..., B, O]
    """The linear layer `((x w_b^T) * lam) w_a^T` of F rank-1 factors.

    It is the layer of WAFFLe (Hao et al. 2020, Eqs. 2 to 4). Its dense weight is never
    built. Factors with `lam == 0` are skipped.

    Leading axes, those of clients, broadcast. An input without them is shared, and its
    gradient is summed over the clients.

    The op is differentiable in all four inputs and works under `vmap`. Forward mode and
    `torch.func.grad` run plain torch operations, which read every factor.

    Raises TypeError for a wrong type or dtype, and ValueError for a wrong shape or
    device.

    Args:
        x: Samples in float32, float64, float16 or bfloat16, or one sample [I]. All
            inputs have one dtype; 16-bit ones are computed in float32. Under `autocast`
            all are cast to its dtype, as for `F.linear`.
        w_a: The vectors of the factors on the side of the outputs.
        lam: The strengths of the factors.
        w_b: The vectors of the factors on the side of the inputs.
    """
    if _casts_inputs(x):
        device_type = x.device.type
        x = _cast_input(x, device_type)
        w_a = _cast_input(w_a, device_type)
        lam = _cast_input(lam, device_type)
        w_b = _cast_input(w_b, device_type)
    lead = check_rank1(x, w_a, lam, w_b)
    warn_of_references()
    if x.dim() == 1:
        return rank1_linear(x[None], w_a, lam, w_b).squeeze(-2)
    if in_forward_ad():
        return _plain_rank1(x, w_a, lam, w_b)
    if _has_one_clients_axis(x, w_a, lam, w_b, lead):
        return _differentiable(x, w_a, lam, w_b)
    if w_a.dim() == 2 and lam.dim() == 1 and w_b.dim() == 2:
        # All clients share the layer: their samples are one larger batch.
        y = _differentiable(x.flatten(0, -2), w_a, lam, w_b)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    pairs = zip((x, w_a, lam, w_b), CLIENT_DIMS, strict=True)
    inputs = [_flatten_clients(t, dims, lead) for t, dims in pairs]
    y = _differentiable(*inputs)
    return y.reshape(*lead, *y.shape[1:])


def _casts_inputs(x: Any) -> bool:
    """True where `autocast` is on for the device of x."""
    return (
        torch._C._is_any_autocast_enabled()  # the quickest test
        and isinstance(x, Tensor)
        and torch.is_autocast_enabled(x.device.type)
    )


def _cast_input(t: Any, device_type: str) -> Any:
    """The input in the dtype of `autocast`, if `autocast` casts its dtype."""
    if isinstance(t, Tensor) and t.dtype in (torch.float32, *NARROW):
        return t.to(torch.get_autocast_dtype(device_type))
    return t


def _plain_rank1(x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor) -> Tensor:
    """The layer by plain torch operations, which support forward mode."""
    dtype = x.dtype
    x, w_a, lam, w_b = _widen_inputs(x, w_a, lam, w_b)
    hidden = x @ w_b.mT * lam[..., None, :]
    return (hidden @ w_a.mT).to(dtype)


def _has_one_clients_axis(
    x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor, lead: tuple[int, ...]
) -> bool:
    """True where the op takes the inputs as they are.

    There is at most one leading axis, and no input broadcasts along it.

    Args:
        lead: The leading axes of all inputs after broadcasting.
    """
    if len(lead) > 1:
        return False
    for t, dims in zip((x, w_a, lam, w_b), CLIENT_DIMS, strict=True):
        if t.dim() != dims and t.shape[0] != lead[0]:
            return False
    return True


def _flatten_clients(t: Tensor, dims: int, lead: tuple[int, ...]) -> Tensor:
    """The tensor with one axis of clients in place of `lead`.

    A shared tensor stays as it is.

    Args:
        dims: The number of dimensions without clients.
    """
    if t.dim() == dims:
        return t
    client_shape = t.shape[t.dim() - dims :]
    return t.expand(*lead, *client_shape).flatten(0, len(lead) - 1)


def check_rank1(x: Any, w_a: Any, lam: Any, w_b: Any) -> tuple[int, ...]:
    """The leading axes of the inputs after broadcasting.

    Raises ValueError or TypeError for arguments that the op does not accept.
    """
    for name, t, min_dims, shape in (
        ("x", x, 1, "[..., B, I]"),
        ("w_a", w_a, 2, "[O, F]"),
        ("lam", lam, 1, "[..., F]"),
        ("w_b", w_b, 2, "[F, I]"),
    ):
        check_tensor(OP, name, t)
        if t.dim() < min_dims:
            reject(f"{OP}({name})", shape, t)
        if t is not x:
            check_like(OP, "x", x, name, t)
    inputs = x.shape[-1]
    factors = w_b.shape[-2]
    if w_b.shape[-1] != inputs:
        reject(f"{OP}(w_b)", f"[F, {inputs}] for the inputs of x", w_b)
    if w_a.shape[-1] != factors:
        reject(f"{OP}(w_a)", f"[O, {factors}] for the factors of w_b", w_a)
    if lam.shape[-1] != factors:
        reject(f"{OP}(lam)", f"[..., {factors}] for the factors of w_b", lam)
    leads = (x.shape[:-2], w_a.shape[:-2], lam.shape[:-1], w_b.shape[:-2])
    if not any(leads):
        return ()
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        got = Words(", ".join(str(list(lead)) for lead in leads))
    reject(f"{OP}(x, w_a, lam, w_b)", "leading axes that broadcast", got)


def reference(
    x: Tensor,  # [B, I] or [N, B, I]
    w_a: Tensor,  # [O, F] or [N, O, F]
    lam: Tensor,  # [F] or [N, F]
    w_b: Tensor,  # [F, I] or [N, F, I]
) -> Tensor:  # [B, O] or [N, B, O]
    """The layer `((x w_b^T) * lam) w_a^T`: the specification of the op."""
    scale = lam[..., None, :]
    is_on = scale != 0
    # `where` lets NaN and infinity of a factor that is off count for nothing.
    hidden = torch.where(is_on, x @ w_b.mT * scale, 0.0)  # [.., B, F]
    return hidden @ torch.where(is_on, w_a, 0.0).mT


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
    """The gradients in the inputs' shapes.

    An empty tensor stands for a gradient that is not needed: an op of torch cannot
    return None.
    """
    is_on = lam != 0  # [.., F]
    counted = partial(_without_bad, kept=is_on[..., None, :])  # columns are factors
    counted_rows = partial(_without_bad, kept=is_on[..., None])
    scale = lam[..., None, :]
    counted_b = counted_rows(w_b)
    hidden = counted(x @ counted_b.mT) * scale  # [.., B, F]
    hidden_grad = counted(grad @ counted(w_a)) * scale  # [.., B, F]
    grad_x = grad_a = grad_lam = grad_b = grad.new_empty(0)
    if need_x:
        grad_x = _sum_shared(hidden_grad @ counted_b, x)
    if need_a:
        grad_a = _sum_shared(counted(grad.mT @ hidden), w_a)
    if need_lam:
        grad_lam = _sum_shared((x @ w_b.mT * (grad @ w_a)).sum(-2), lam)
    if need_b:
        grad_b = _sum_shared(counted_rows(hidden_grad.mT @ x), w_b)
    return grad_x, grad_a, grad_lam, grad_b


def _without_bad(t: Tensor, kept: Tensor) -> Tensor:
    """The numbers, 0 where they are not finite and not `kept`.

    A finite number of a factor that is off stays. It has a second derivative with
    respect to `lam`, which a mask would cut off.
    """
    return torch.where(kept | t.isfinite(), t, 0.0)


def _sum_shared(grad: Tensor, t: Tensor) -> Tensor:
    """The gradient of `t`, summed over the clients that share it."""
    return grad.sum_to_size(t.shape).contiguous()


_op = define(f"{OP}(Tensor x, Tensor w_a, Tensor lam, Tensor w_b) -> Tensor", reference)
_op_backward = define(
    "rank1_linear_backward(Tensor grad, Tensor x, Tensor w_a, Tensor lam, Tensor w_b, "
    "bool need_x, bool need_a, bool need_lam, bool need_b) -> (Tensor, Tensor, "
    "Tensor, Tensor)",
    backward_reference,
)


# on a GPU ---------------------------------------------------------------------

# There, torch's batched products are several times faster than kernels that list the
# factors that are on. These kernels, the ops "rank1_listed", serve where torch would
# round the numbers of a product to fewer bits.
_listed_op = define(
    "rank1_listed(Tensor x, Tensor w_a, Tensor lam, Tensor w_b) -> Tensor", reference
)
_listed_backward_op = define(
    "rank1_listed_backward(Tensor grad, Tensor x, Tensor w_a, Tensor lam, Tensor w_b, "
    "bool need_x, bool need_a, bool need_lam, bool need_b) -> (Tensor, Tensor, "
    "Tensor, Tensor)",
    backward_reference,
)


def rounds_factors(dtype: torch.dtype) -> bool:
    """True where torch's products on a GPU round numbers, as TF32 does."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    return dtype != torch.float64 and precision not in ("none", "ieee")


def rank1_by_products(
    x: Tensor,  # [B, I] or [N, B, I]
    w_a: Tensor,  # [O, F] or [N, O, F]
    lam: Tensor,  # [F] or [N, F]
    w_b: Tensor,  # [F, I] or [N, F, I]
) -> Tensor:  # [B, O] or [N, B, O]
    """The layer as two products of torch.

    The host never waits for the GPU, as it would to list the factors that are on. A
    factor that is on and not finite makes the outputs that it reaches NaN, for every
    sample.
    """
    dtype = x.dtype
    x, w_a, lam, w_b = _widen_inputs(x, w_a, lam, w_b)
    hidden = _client_einsum("bi,fi->bf", x, w_b, (2, 2))
    hidden = _scale_by_factors(hidden, lam)
    return _masked_product(w_a.mT, lam, hidden).to(dtype)


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
    """The gradients by products, as `backward_reference` returns them."""
    dtype = x.dtype
    x, w_a, lam, w_b = _widen_inputs(x, w_a, lam, w_b)
    grad = grad.to(x.dtype)
    grad_x = grad_a = grad_lam = grad_b = grad.new_empty(0, dtype=dtype)
    if need_a or need_lam:
        hidden = _client_einsum("bi,fi->bf", x, w_b, (2, 2))
    if need_x or need_lam or need_b:
        hidden_grad = _client_einsum("bo,of->bf", grad, w_a, (2, 2))
    if need_x:
        scaled = _scale_by_factors(hidden_grad, lam)
        grad_x = _masked_product(w_b, lam, scaled, sum_clients=x.dim() == 2)
    if need_a:
        scaled = _scale_by_factors(hidden, lam)
        is_shared = w_a.dim() == 2
        grad_a = _client_einsum("bo,bf->of", grad, scaled, (2, 2), is_shared)
    if need_lam:
        grad_lam = _sum_shared((hidden * hidden_grad).sum(-2), lam)
    if need_b:
        scaled = _scale_by_factors(hidden_grad, lam)
        is_shared = w_b.dim() == 2
        grad_b = _client_einsum("bf,bi->fi", scaled, x, (2, 2), is_shared)
    return grad_x.to(dtype), grad_a.to(dtype), grad_lam.to(dtype), grad_b.to(dtype)


def _widen_inputs(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs in the dtype of the computation: float32 for 16-bit ones."""
    if inputs[0].dtype in NARROW:
        return tuple(t.float() for t in inputs)
    return inputs


def _client_einsum(
    formula: str,
    a: Tensor,
    b: Tensor,
    client_dims: tuple[int, int],
    sum_clients: bool = False,
) -> Tensor:
    """`einsum` with an axis "n" of clients wherever a tensor has one.

    Args:
        formula: The formula without the clients' axis.
        client_dims: The numbers of dimensions of `a` and `b` without that axis.
        sum_clients: True for the sum over the clients.
    """
    operands, result = formula.split("->")
    first, second = operands.split(",")
    first_has_clients = a.dim() > client_dims[0]
    second_has_clients = b.dim() > client_dims[1]
    if first_has_clients:
        first = f"n{first}"
    if second_has_clients:
        second = f"n{second}"
    if (first_has_clients or second_has_clients) and not sum_clients:
        result = f"n{result}"
    return torch.einsum(f"{first},{second}->{result}", a, b).contiguous()


def _scale_by_factors(t: Tensor, lam: Tensor) -> Tensor:
    """The product `t * lam` [.., B, F], 0 where a factor is off."""
    scale = lam[..., None, :]
    return torch.where(scale != 0, t * scale, 0.0)


def _masked_product(
    w: Tensor,  # [F, C] or [N, F, C]
    lam: Tensor,  # [F] or [N, F]
    t: Tensor,  # [B, F] or [N, B, F]; 0 where a factor is off
    sum_clients: bool = False,  # True for the sum over the clients
) -> Tensor:  # [B, C] or [N, B, C]
    """The product `t @ w`, in which factors that are off count for nothing."""
    if w.dim() == 3 or lam.dim() == 1:
        masked = torch.where(lam[..., None] != 0, w, 0.0)
        return _client_einsum("bf,fc->bc", t, masked, (2, 2), sum_clients)
    # The clients share the factors, and each client has others of them on. A masked
    # copy for each client would take much memory. Instead the numbers that are not
    # finite are replaced by 0, and the outputs that they reach are set to NaN.
    finite = w.nan_to_num(0.0, 0.0, 0.0)
    is_on = (lam != 0).to(w.dtype)
    is_bad = (w != finite).to(w.dtype)
    num_bad = _client_einsum("f,fc->c", is_on, is_bad, (1, 2), sum_clients)
    out = _client_einsum("bf,fc->bc", t, finite, (2, 2), sum_clients)
    return out.masked_fill_(num_bad[..., None, :] > 0, torch.nan)


def rank1_on_gpu(x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor) -> Tensor:
    """The op's body for tensors on a GPU.

    `autocast` is off in it, because the inputs were cast before.
    """
    if rounds_factors(x.dtype):
        return _listed_op(x, w_a, lam, w_b)
    with torch.autocast(x.device.type, enabled=False):
        return rank1_by_products(x, w_a, lam, w_b)


def rank1_on_gpu_backward(grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """The gradients of `rank1_on_gpu`."""
    if rounds_factors(x.dtype):
        return _listed_backward_op(grad, x, *others)
    with torch.autocast(x.device.type, enabled=False):
        return rank1_by_products_backward(grad, x, *others)


lib.impl(OP, rank1_on_gpu, "CUDA")
lib.impl(f"{OP}_backward", rank1_on_gpu_backward, "CUDA")


# autograd ---------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    """Saves what the backward pass needs."""
    ctx.save_for_backward(*inputs)
    ctx.runs_reference = runs_references()  # the backward pass runs outside of it


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs; None for those that need none."""
    x, w_a, lam, w_b = ctx.saved_tensors
    needs = ctx.needs_input_grad
    # Where a second derivative follows, the formula runs in differentiable torch.
    is_plain = torch.is_grad_enabled() or ctx.runs_reference
    backward = backward_reference if is_plain else _op_backward
    grads = backward(grad, x, w_a, lam, w_b, *needs)
    results: list[Tensor | None] = []
    for input_grad, is_needed in zip(grads, needs, strict=True):
        results.append(input_grad if is_needed else None)
    return tuple(results)


torch.library.register_autograd(
    f"pflcore::{OP}", _backward, setup_context=_setup, lib=lib
)


class _Rank1(torch.autograd.Function):
    """The op with a lighter autograd than the registered one.

    The registered one takes as long as the arithmetic of a small layer.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        """The layer; its inputs are saved for `backward`."""
        _setup(ctx, inputs, None)
        return _op(*inputs)

    backward = staticmethod(_backward)


def _differentiable(x: Tensor, w_a: Tensor, lam: Tensor, w_b: Tensor) -> Tensor:
    """The op, by `_Rank1` where a gradient is wanted."""
    requires_grad = (
        w_a.requires_grad or w_b.requires_grad or x.requires_grad or lam.requires_grad
    )
    if not requires_grad or not torch.is_grad_enabled():
        return _op(x, w_a, lam, w_b)
    # A compiler and the transforms of functorch need the registered op itself.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _op(x, w_a, lam, w_b)
    y: Tensor = _Rank1.apply(x, w_a, lam, w_b)
    return y


# vmap -------------------------------------------------------------------------


def _fold_slices(
    slices: int,
    in_dims: Sequence[int | None],  # the vmapped axis of each argument, or None
    args: Sequence[Tensor],
    client_dims: Sequence[int],  # dimensions of each argument without clients and vmap
) -> tuple[list[Tensor], list[bool]]:
    """The arguments of one call of the op, for all slices.

    An op has one axis of clients. The vmapped axis takes that place where no argument
    has clients. Otherwise it is folded into the clients' axis: [slices * clients, ...].

    Returns:
        The arguments, and for each argument True where it has clients.
    """
    has_clients = []
    moved = []
    for t, in_dim, dims in zip(args, in_dims, client_dims, strict=True):
        is_vmapped = in_dim is not None
        has_clients.append(t.dim() - is_vmapped > dims)
        if in_dim is not None:
            t = t.movedim(in_dim, 0)
        moved.append(t)
    if not any(has_clients):
        return moved, has_clients
    # All arguments with clients have the same number of them.
    first = has_clients.index(True)
    clients_axis = 0 if in_dims[first] is None else 1
    lead = (slices, moved[first].shape[clients_axis])
    folded = []
    for i, t in enumerate(moved):
        if in_dims[i] is not None and not has_clients[i]:
            t = t[:, None]  # one slice's tensor is shared by its clients
        folded.append(_flatten_clients(t, client_dims[i], lead))
    return folded, has_clients


def _vmap(
    info: Any, in_dims: tuple[int | None, ...], *args: Tensor
) -> tuple[Tensor, int]:
    """The result for all slices, and its vmapped axis."""
    slices = info.batch_size
    inputs, has_clients = _fold_slices(slices, in_dims, args, CLIENT_DIMS)
    y = _op(*inputs)
    if any(has_clients):
        y = y.unflatten(0, (slices, -1))
    return y, 0


def _backward_vmap(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The gradients for all slices, and their vmapped axes."""
    slices = info.batch_size
    tensors = args[:5]  # grad, x, w_a, lam, w_b
    needs = args[5:]
    # Each slice needs a gradient of its own, so a shared input is repeated (without a
    # copy): otherwise its gradient would be summed over the slices.
    repeated = []
    repeated_dims = []
    for t, in_dim in zip(tensors, in_dims[:5], strict=True):
        if in_dim is None:
            t = t.expand(slices, *t.shape)
            in_dim = 0
        repeated.append(t)
        repeated_dims.append(in_dim)
    client_dims = (2, *CLIENT_DIMS)
    inputs, has_clients = _fold_slices(slices, repeated_dims, repeated, client_dims)
    grads = []
    results = zip(_op_backward(*inputs, *needs), has_clients[1:], needs, strict=True)
    for grad, input_has_clients, is_needed in results:
        if not is_needed:
            grad = grad.new_empty(slices, 0)
        elif any(has_clients):
            grad = grad.unflatten(0, (slices, -1))
            if not input_has_clients:
                grad = grad.sum(1)  # the slice's clients share the input
        grads.append(grad)
    return tuple(grads), (0, 0, 0, 0)


torch.library.register_vmap(f"pflcore::{OP}", _vmap, lib=lib)
torch.library.register_vmap(f"pflcore::{OP}_backward", _backward_vmap, lib=lib)
