"""Argument checks of the ops.

An error is one sentence that names the argument, what was expected, and what came.
"""

from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

MAX_REPR_LENGTH = 40  # characters of a wrong value that an error shows
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def describe(t: Any) -> str:
    """A phrase on a tensor's shape, dtype and device, or on another value's type."""
    if not isinstance(t, Tensor):
        text = " ".join(repr(t).split())
        if len(text) > MAX_REPR_LENGTH:
            text = f"{text[:MAX_REPR_LENGTH]}..."
        return f"{text} of type {type(t).__name__}"
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def reject_argument(
    op: str,
    name: str,
    expected: str,
    actual: str,
    remedy: str = "",
    kind: type[Exception] = ValueError,
) -> NoReturn:
    """Raises `kind` with the one form of sentence."""
    text = f"{op}: {name} must be {expected}, got {actual}"
    if remedy:
        text = f"{text}; {remedy}"
    raise kind(f"{text}.")


def require_argument(
    ok: bool, op: str, name: str, expected: str, actual: str, remedy: str = ""
) -> None:
    """Raises ValueError unless `ok`.

    Making the phrases takes time: in an op that is called often, test first and then
    call `reject_argument`.
    """
    if not ok:
        reject_argument(op, name, expected, actual, remedy)


def is_int(value: Any) -> bool:
    """Whether a value is a whole number, and not a truth value."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | torch.SymInt | Integral)


def check_number(op: str, name: str, value: Any) -> None:
    """Checks that `value` is a real number."""
    if type(value) is float or type(value) is int:
        return  # the common case takes the least time
    is_real = isinstance(value, Real | torch.SymInt | torch.SymFloat)
    if isinstance(value, bool) or not is_real:
        remedy = f"use {name}.item()" if isinstance(value, Tensor) else ""
        reject_argument(op, name, "a number", describe(value), remedy, TypeError)


def check_floating(op: str, name: str, t: Any) -> None:
    """Checks that `t` is a dense floating-point tensor."""
    if not isinstance(t, Tensor):
        remedy = "use torch.as_tensor, or torch.stack of several"
        reject_argument(op, name, "a tensor", describe(t), remedy, TypeError)
    if t.layout is not torch.strided:
        remedy = f"use {name}.to_dense()"
        reject_argument(op, name, "a dense tensor", str(t.layout), remedy, TypeError)
    if t.dtype not in FLOATS:
        expected = "float32, float64, float16 or bfloat16"
        remedy = f"use {name}.float()"
        reject_argument(op, name, expected, describe(t), remedy, TypeError)


def check_matrix(op: str, name: str, t: Any, shape_text: str) -> None:
    """Raises TypeError or ValueError unless `t` is a floating-point matrix.

    `shape_text`, such as "[N, P]", stands in the error.
    """
    if (
        type(t) is Tensor
        and t.dtype in FLOATS
        and t.dim() == 2
        and t.layout is torch.strided
    ):
        return  # a fast path for the common case
    check_floating(op, name, t)
    require_argument(t.dim() == 2, op, name, f"a matrix {shape_text}", describe(t))


def check_same_kind(op: str, name: str, a: Tensor, other: str, b: Tensor) -> None:
    """Checks that `a` and `b` have one dtype and one device."""
    if a.dtype is not b.dtype:
        expected = f"{a.dtype} like {name}"
        remedy = f"use {other}.to({name}.dtype)"
        reject_argument(op, other, expected, describe(b), remedy, TypeError)
    check_same_device(op, name, a, other, b)


def check_same_device(op: str, name: str, a: Tensor, other: str, b: Tensor) -> None:
    """Checks that `b` is on the device of `a`."""
    if a.device != b.device:
        remedy = f"use {other}.to({name}.device)"
        reject_argument(op, other, f"on {a.device} like {name}", describe(b), remedy)


def check_index(op: str, name: str, a: Tensor, other: str, b: Any) -> None:
    """Checks that `b` is an int64 tensor on the device of `a`."""
    if not isinstance(b, Tensor) or b.dtype != torch.int64:
        reject_argument(op, other, "an int64 tensor", describe(b), kind=TypeError)
    check_same_device(op, name, a, other, b)


def check_index_range(op: str, name: str, index: Tensor, n: int) -> None:
    """Checks that an index is from 0 to n - 1, where its values can be read."""
    if not is_readable(index) or index.numel() == 0:
        return
    smallest, largest = index.aminmax()
    low = int(smallest)
    high = int(largest)
    if low < 0 or high >= n:
        reject_argument(op, name, f"from 0 to {n - 1}", f"{low} to {high}")


def check_writable(op: str, name: str, t: Tensor) -> None:
    """Checks that rows can be written: contiguous, and none in another's memory."""
    if t.numel() and t.shape[1] > 1 and t.stride(1) != 1:
        actual = f"strides {list(t.stride())}"
        remedy = f"use {name}.contiguous()"
        reject_argument(op, name, "of contiguous rows", actual, remedy)
    if t.numel() and t.shape[0] > 1 and t.stride(0) < t.shape[1]:
        actual = f"strides {list(t.stride())}"
        remedy = f"use {name}.clone()"
        reject_argument(op, name, "of rows that do not overlap", actual, remedy)


def is_readable(t: Tensor) -> bool:
    """Whether the values can be read without waiting for them.

    They can in a CPU tensor that nothing traces, without `vmap` or `grad` around it.
    """
    return (
        not torch.compiler.is_compiling()
        and t.device.type == "cpu"
        and memory_span(t) is not None
    )


def memory_span(t: Tensor | None) -> tuple[int, int] | None:
    """The first address of a tensor's memory, and the one behind its last.

    None where there is no memory: for a fake, meta or empty tensor, and inside of
    `vmap` or `grad`. Do not call it while compiling.
    """
    if type(t) is not Tensor and type(t) is not Parameter:
        return None
    try:
        first = t.data_ptr()
    except RuntimeError:  # inside of a `vmap` or `grad`
        return None
    if first == 0 or t.is_contiguous():
        return (first, first + t.nbytes) if first else None
    axes = zip(t.shape, t.stride(), strict=True)
    elements = sum((size - 1) * stride for size, stride in axes) + 1
    return first, first + elements * t.element_size()


def spans_overlap(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    """Whether two spans of addresses overlap.

    Storages cannot tell: two tensors of one numpy array have two of them.
    """
    if a is None or b is None:
        return False
    return a[0] < b[1] and b[0] < a[1]


def same_view(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements in the same memory."""
    return (
        a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()
    )
