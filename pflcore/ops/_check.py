"""The words of the ops' argument checks: one sentence that names the argument, what was
expected, and what came."""

from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def describe(t: Any) -> str:
    """What a tensor is, in a few words."""
    if not isinstance(t, Tensor):
        shown = " ".join(repr(t).split())
        return (
            f"{shown[:40]}{'...' if len(shown) > 40 else ''} of type {type(t).__name__}"
        )
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def reject_argument(
    op: str,
    name: str,
    wanted: str,
    came: str,
    do: str = "",
    kind: type[Exception] = ValueError,
) -> NoReturn:
    """Raises `kind` with the one form of sentence."""
    raise kind(f"{op}: {name} must be {wanted}, got {came}{'; ' + do if do else ''}.")


def require_argument(
    ok: bool, op: str, name: str, wanted: str, came: str, do: str = ""
) -> None:
    """Refuses unless `ok`; where calls are many ask first, since the words take
    time."""
    if not ok:
        reject_argument(op, name, wanted, came, do)


def is_int(value: Any) -> bool:
    """A whole number, and not a truth value."""
    return isinstance(value, int | torch.SymInt | Integral) and not isinstance(
        value, bool
    )


def check_number(op: str, name: str, value: Any) -> None:
    """`value` is a real number."""
    if type(value) is float or type(value) is int:
        return
    if isinstance(value, bool) or not isinstance(
        value, Real | torch.SymInt | torch.SymFloat
    ):
        do = f"use {name}.item()" if isinstance(value, Tensor) else ""
        reject_argument(op, name, "a number", describe(value), do, TypeError)


def check_floating(op: str, name: str, t: Any) -> None:
    """`t` is a floating-point tensor."""
    if not isinstance(t, Tensor):
        remedy = "use torch.as_tensor, or torch.stack of several"
        reject_argument(op, name, "a tensor", describe(t), remedy, TypeError)
    if t.layout is not torch.strided:
        reject_argument(
            op,
            name,
            "a dense tensor",
            str(t.layout),
            f"use {name}.to_dense()",
            TypeError,
        )
    if t.dtype not in FLOATS:
        wanted = "float32, float64, float16 or bfloat16"
        reject_argument(op, name, wanted, describe(t), f"use {name}.float()", TypeError)


def check_matrix(op: str, name: str, t: Any, wanted: str) -> None:
    """`t` is a floating-point matrix."""
    if (
        type(t) is Tensor
        and t.dtype in FLOATS
        and t.dim() == 2
        and t.layout is torch.strided
    ):
        return
    check_floating(op, name, t)
    require_argument(t.dim() == 2, op, name, f"a matrix {wanted}", describe(t))


def check_same_kind(op: str, name: str, a: Tensor, other: str, b: Tensor) -> None:
    """`a` and `b` have one dtype and one device."""
    if a.dtype is not b.dtype:
        wanted = f"{a.dtype} like {name}"
        remedy = f"use {other}.to({name}.dtype)"
        reject_argument(op, other, wanted, describe(b), remedy, TypeError)
    check_same_device(op, name, a, other, b)


def check_same_device(op: str, name: str, a: Tensor, other: str, b: Tensor) -> None:
    """`b` is on the device of `a`."""
    if a.device != b.device:
        remedy = f"use {other}.to({name}.device)"
        reject_argument(op, other, f"on {a.device} like {name}", describe(b), remedy)


def check_index(op: str, name: str, a: Tensor, other: str, b: Any) -> None:
    """`b` is an int64 tensor on the device of `a`."""
    if not isinstance(b, Tensor) or b.dtype != torch.int64:
        reject_argument(op, other, "an int64 tensor", describe(b), kind=TypeError)
    check_same_device(op, name, a, other, b)


def check_index_range(op: str, name: str, index: Tensor, n: int) -> None:
    """The numbers of `index` are from 0 to n - 1, where they can be looked at."""
    if is_readable(index) and index.numel():
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= n:
            reject_argument(op, name, f"from 0 to {n - 1}", f"{low} to {high}")


def check_writable(op: str, name: str, t: Tensor) -> None:
    """Its rows can be written: contiguous, and none on another's memory."""
    if t.numel() and t.shape[1] > 1 and t.stride(1) != 1:
        came = f"strides {list(t.stride())}"
        reject_argument(
            op, name, "of contiguous rows", came, f"use {name}.contiguous()"
        )
    if t.numel() and t.shape[0] > 1 and t.stride(0) < t.shape[1]:
        came = f"strides {list(t.stride())}"
        reject_argument(
            op, name, "of rows that do not overlap", came, f"use {name}.clone()"
        )


def is_readable(t: Tensor) -> bool:
    """The values can be looked at for free: a CPU tensor, nothing traced, no `vmap` or
    `grad` around it."""
    return (
        not torch.compiler.is_compiling()
        and t.device.type == "cpu"
        and memory_span(t) is not None
    )


def memory_span(t: Tensor | None) -> tuple[int, int] | None:
    """The addresses of the memory that a tensor lies in; None where there is none: a
    fake, meta or empty tensor. Not while compiling."""
    if type(t) is not Tensor and type(t) is not Parameter:
        return None
    try:
        first = t.data_ptr()
    except RuntimeError:  # inside of a `vmap` or `grad`
        return None
    if first == 0 or t.is_contiguous():
        return (first, first + t.nbytes) if first else None
    elements = sum((s - 1) * d for s, d in zip(t.shape, t.stride(), strict=True)) + 1
    return first, first + elements * t.element_size()


def spans_overlap(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    """Two spans overlap. They are addresses, since the owner may differ: two wrappings
    of one numpy array have two storages."""
    return a is not None and b is not None and a[0] < b[1] and b[0] < a[1]


def same_view(a: Tensor, b: Tensor) -> bool:
    """The very same elements in the same places."""
    return (
        a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()
    )
