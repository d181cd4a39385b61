"""Checks of tensors that the ops share, on top of `pflcore.check`.

An error names the argument as the call does, and says what to do where that is known:

    aggregate(out): expected memory of its own, got memory of updates.

An op is called often. So a check tests first, and builds the words of its error only
where it raises it. `op` is the op's name, and `name` that of the argument.

Symbols: N, M rows of a matrix; P its columns.
"""

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pflcore.check import Words, is_dense, reject

# Numbers that Python compares sooner than an op of torch is called.
FEW_NUMBERS = 64
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_INT64 = 2**63 - 1  # torch takes no larger whole number


def is_int(value: Any) -> bool:
    """True for a whole number that is not a truth value."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | torch.SymInt | Integral)


def check_number(op: str, name: str, value: Any) -> None:
    """Raises an error unless `value` is a real number that float64 holds.

    It is TypeError for what is no real number, and ValueError for one that is too
    large.
    """
    if type(value) is float:
        return  # The common case takes the least time.
    is_real = isinstance(value, Real | torch.SymInt | torch.SymFloat)
    if isinstance(value, bool) or not is_real:
        remedy = f"use {name}.item()" if isinstance(value, Tensor) else ""
        reject(f"{op}({name})", "a number", value, remedy=remedy, error=TypeError)
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return
    try:
        float(value)
    except OverflowError:
        reject(f"{op}({name})", "a number that float64 holds", value)


def check_tensor(op: str, name: str, t: Any, matrix: str = "") -> None:
    """Raises an error unless `t` is a dense floating-point tensor.

    It is TypeError for another type, layout or dtype, and ValueError for another shape.

    Args:
        matrix: The shape in the words of the error, such as "[N, P]", where `t` has to
            be a matrix; "" where it may have any shape.
    """
    if not isinstance(t, Tensor):
        remedy = "use torch.as_tensor, or torch.stack of several"
        reject(f"{op}({name})", "a tensor", t, remedy=remedy, error=TypeError)
    if t.layout is not torch.strided or t.is_nested:
        remedy = f"use {name}.to_dense()"
        if t.is_nested:
            remedy = "use torch.stack of its tensors"
        reject(f"{op}({name})", "a dense tensor", t, remedy=remedy, error=TypeError)
    if t.dtype not in FLOATS:
        expected = "float32, float64, float16 or bfloat16"
        remedy = f"use {name}.float()"
        reject(f"{op}({name})", expected, t, remedy=remedy, error=TypeError)
    if matrix and t.dim() != 2:
        remedy = f"use {name}[None] for one row" if t.dim() == 1 else ""
        reject(f"{op}({name})", f"a matrix {matrix}", t, remedy=remedy)


def check_like(
    op: str, name: str, a: Tensor, other: str, b: Tensor, *, dtype: bool = True
) -> None:
    """Raises an error unless `b` has the dtype and device of `a`.

    It is TypeError for another dtype, and ValueError for another device.

    Args:
        name: The name of `a`.
        other: The name of `b`.
        dtype: False where `b` may have another dtype.
    """
    if dtype and a.dtype is not b.dtype:
        expected = f"{str(a.dtype).removeprefix('torch.')} like {name}"
        remedy = f"use {other}.to({name}.dtype)"
        reject(f"{op}({other})", expected, b, remedy=remedy, error=TypeError)
    if a.device != b.device:
        expected = f"a tensor on {a.device} like {name}"
        remedy = f"use {other}.to({name}.device)"
        reject(f"{op}({other})", expected, b, remedy=remedy)


def check_index(op: str, name: str, a: Tensor, other: str, b: Any) -> None:
    """Raises an error unless `b` is dense and int64 on the device of `a`.

    It is TypeError for another type or dtype, and ValueError for another device.

    Args:
        name: The name of `a`.
        other: The name of `b`.
    """
    if not isinstance(b, Tensor) or b.dtype != torch.int64 or not is_dense(b):
        reject(f"{op}({other})", "a dense int64 tensor", b, error=TypeError)
    check_like(op, name, a, other, b, dtype=False)


def check_index_range(op: str, name: str, index: Tensor, n: int) -> None:
    """Raises ValueError where an index is out of range 0 to n - 1.

    An index that cannot be read without waiting for it is not looked at.
    """
    if not is_readable(index) or index.numel() == 0:
        return
    low, high = value_range(index)
    if low < 0 or high >= n:
        expected = f"numbers from 0 to {n - 1}"
        reject(f"{op}({name})", expected, Words(f"{low} to {high}"))


def value_range(index: Tensor) -> tuple[int, int]:
    """The smallest and the largest number of an index that is not empty."""
    if index.numel() <= FEW_NUMBERS and index.dim() == 2:
        rows = index.tolist()
        return min(map(min, rows)), max(map(max, rows))
    smallest, largest = index.aminmax()
    return int(smallest), int(largest)


def check_writable(op: str, name: str, t: Tensor) -> None:
    """Raises ValueError unless rows are contiguous and do not overlap."""
    if t.is_contiguous() or not t.numel():
        return
    if t.shape[1] > 1 and t.stride(1) != 1:
        strides = Words(f"strides {list(t.stride())}")
        remedy = f"use {name}.contiguous()"
        reject(f"{op}({name})", "contiguous rows", strides, remedy=remedy)
    if t.shape[0] > 1 and t.stride(0) < t.shape[1]:
        strides = Words(f"strides {list(t.stride())}")
        remedy = f"use {name}.clone()"
        reject(f"{op}({name})", "rows that do not overlap", strides, remedy=remedy)


def is_readable(t: Tensor) -> bool:
    """True where the values can be read without waiting for them.

    They can in a CPU tensor that nothing traces, without `vmap` or `grad` around it.
    """
    return not torch.compiler.is_compiling() and t.is_cpu and memory_span(t) is not None


def memory_span(t: Tensor | None) -> tuple[int, int] | None:
    """The first address of a tensor's memory, and its end.

    None where there is no memory: for a fake, meta or empty tensor, and inside of
    `vmap` or `grad`. Do not call it while compiling.
    """
    if type(t) is not Tensor and type(t) is not Parameter:
        return None
    try:
        first = t.data_ptr()
    except RuntimeError:
        first = 0  # Inside of a `vmap` or `grad` there is no address.
    if first == 0:
        return None
    if t.is_contiguous():
        # Not `nbytes`: behind a break of its graph torch.compile comes here, too.
        return first, first + t.numel() * t.element_size()
    axes = zip(t.shape, t.stride(), strict=True)
    elements = sum((size - 1) * stride for size, stride in axes) + 1
    return first, first + elements * t.element_size()


def share_memory(
    a: Tensor | None,
    a_span: tuple[int, int] | None,
    b: Tensor | None,
    b_span: tuple[int, int] | None,
) -> bool:
    """True where two tensors may share an element. Other columns of one matrix do not.

    Storages cannot tell: two tensors of one numpy array have two of them.

    Args:
        a_span: The `memory_span` of `a`.
        b_span: That of `b`.
    """
    if a_span is None or b_span is None or a is None or b is None:
        return False
    if a_span[0] >= b_span[1] or b_span[0] >= a_span[1]:
        return False
    stride = a.stride(0)
    if not (a.dim() == b.dim() == 2 and a.dtype == b.dtype and b.stride(0) == stride):
        return True
    if stride == 0 or (a.stride(1), b.stride(1)) != (1, 1):
        return True
    distance, rest = divmod(b_span[0] - a_span[0], a.element_size())
    # Where b's columns begin in a row of a's matrix.
    begin = distance % stride
    return rest != 0 or not a.shape[1] <= begin <= stride - b.shape[1]


def same_view(a: Tensor, b: Tensor) -> bool:
    """True where two tensors are the same elements in the same memory."""
    return (
        a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()
    )
