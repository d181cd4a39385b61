"""Ops on rows that need not fit memory, as in files.

`RowSource` is any object with a `shape` [N, P] whose slices of rows are tensors or
numpy arrays: `numpy.memmap`, `Files`, an HDF5 data set. It can be read several times.
On CPUs with the kernels, the results have the bits of the ops on the same rows in
memory. For that, `aggregate` adds blocks of 128 rows to a float64 total, as the kernel
does.

Symbols: M rows of `a` or results; N rows of `b` or updates; P columns; K rows that a
result mixes; n rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Words, checked_op, reject, require, summarize_kind

from ._aggregate import aggregate as aggregate_op
from ._aggregate import check_aggregate, result_dtypes
from ._check import check_matrix
from ._sqdist import pairwise_sqdist as sqdist_op

__all__ = ["Files", "aggregate", "pairwise_sqdist"]

BLOCK_BYTES = 1 << 28  # bytes of the rows that are in memory at a time
FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")  # names of dtypes in safetensors files
SUM_ROWS = 128  # rows that `aggregate` sums before it adds them to a float64 total


class RowSource(Protocol):
    """N rows of P numbers that can be read several times.

    A tensor is one. A slice gives rows as a tensor or a numpy array.
    """

    @property
    def shape(self) -> Sequence[int]:
        """The numbers of rows and columns [N, P]."""
        ...

    def __getitem__(self, rows: slice, /) -> Any:
        """The rows first:last [last - first, P]."""
        ...


@checked_op
class Files:
    """Rows from safetensors files, each of which holds one client's model.

    A row is a file's tensors, flattened and joined. Only the first file is read at
    once; the others are read when their rows are.

    Raises ValueError where a file is missing, damaged or of another kind, and
    ImportError without the package safetensors.

    Args:
        paths: The file of each row.
        keys: The names of the tensors of a row, in its order; None for all
            floating-point tensors of the first file, sorted by name. The tensors have
            one dtype, and the same shapes in all files.
    """

    def __init__(
        self, paths: Sequence[str | Path], keys: Sequence[str] | None = None
    ) -> None:
        """Reads the kind of rows from the first file."""
        self.paths = list(paths)
        require(self.paths, "Files(paths)", "at least one file", Words("none"))
        first = self._tensors(self.paths[0], keys)
        self.keys = list(first)
        self._kinds = describe_tensors(first)
        dtypes = sorted({str(t.dtype) for t in first.values()})
        require(len(dtypes) == 1, "Files(keys)", "tensors of one dtype", dtypes)
        self._empty = model_row(first)[:0]  # a tensor of the rows' dtype
        self.shape = (len(self.paths), sum(t.numel() for t in first.values()))

    def _tensors(
        self, path: str | Path, keys: Sequence[str] | None
    ) -> dict[str, Tensor]:
        """The tensors `keys` of a file, or all its floating-point tensors."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                names = sorted(file.keys())
                if not keys:
                    dtypes = {name: file.get_slice(name).get_dtype() for name in names}
                    keys = [name for name in names if dtypes[name] in FLOAT_DTYPES]
                missing = sorted(set(keys) - set(names))
                expected = f"names of tensors in {path}"
                require(not missing, "Files(keys)", expected, missing)
                return {key: file.get_tensor(key) for key in keys}
        except (SafetensorError, OSError) as error:
            got = f"{path} ({str(error).rstrip('.')})"
            raise ValueError(
                f"Files(paths): expected whole safetensors files, got {got}."
            ) from None

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The models of the files first:last as rows [last - first, P]."""
        models = []
        for path in self.paths[rows]:
            tensors = self._tensors(path, self.keys)
            fits = describe_tensors(tensors) == self._kinds
            expected = f"files of {self._kinds} like the first"
            require(fits, "Files(paths)", expected, Words(path))
            models.append(model_row(tensors))
        if not models:
            return self._empty.new_empty(0, self.shape[1])
        return torch.stack(models)


def describe_tensors(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A phrase on the shape and dtype of each tensor."""
    return {key: summarize_kind(t) for key, t in tensors.items()}


def model_row(tensors: dict[str, Tensor]) -> Tensor:
    """A model as a row [P]."""
    return torch.cat([t.flatten() for t in tensors.values()])


def tensor_of(part: Any) -> Tensor:
    """The tensor itself, or the array as a tensor.

    An array is copied only where torch cannot use its memory.
    """
    if isinstance(part, Tensor):
        return part
    array = np.asarray(part)
    # Torch takes neither negative strides nor the byte order of another machine.
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    if array.flags.writeable:
        return torch.from_numpy(array)
    # `from_numpy` warns of memory that is not writeable, so this is a copy.
    return torch.tensor(array)


def take_rows(
    rows: RowSource,  # [N, P]
    index: Tensor,  # [n] int64, n > 0
) -> Tensor:  # [n, P]
    """The rows of these numbers as a tensor.

    Numbers that follow one another are read in one slice, which is a view of a tensor.
    """
    cuts = torch.nonzero(index.diff() != 1)[:, 0] + 1
    if len(cuts) and isinstance(rows, Tensor):
        return rows[index]
    runs = index.tensor_split(cuts.tolist())
    parts = [tensor_of(rows[int(run[0]) : int(run[-1]) + 1]) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def check_rows(op: str, name: str, rows: Any) -> Tensor:
    """No rows [0, P] of the dtype and device of `rows`.

    Raises TypeError or ValueError unless `rows` are a matrix, or have a shape [N, P]
    and slices.
    """
    if not isinstance(rows, Tensor):
        if not hasattr(rows, "__getitem__") or len(getattr(rows, "shape", ())) != 2:
            expected = "a tensor, or rows with a shape [N, P] and slices"
            reject(f"{op}({name})", expected, rows, error=TypeError)
        rows = tensor_of(rows[:0])
    check_matrix(op, name, rows, "[N, P]")
    return cast(Tensor, rows)


def rows_per_block(rows: RowSource) -> int:
    """The number of rows that `BLOCK_BYTES` hold."""
    row_bytes = rows.shape[1] * tensor_of(rows[:0]).element_size()
    return BLOCK_BYTES // max(1, row_bytes)


def read_blocks(
    rows: RowSource,  # [N, P]
    first: int = 0,
    step: int | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """The rows from `first` on, in blocks.

    Args:
        step: The number of rows of a block; None for as many as `BLOCK_BYTES` hold, but
            at least one.

    Returns:
        An iterator of the slice of each block, with its rows [n, P].
    """
    n = rows.shape[0]
    if step is None:
        step = max(1, rows_per_block(rows))
    for start in range(first, n, step):
        block = slice(start, min(start + step, n))
        yield block, tensor_of(rows[block])


def pairwise_sqdist(
    a: RowSource,  # [M, P]
    b: RowSource | None = None,  # [N, P]; None: b = a
) -> Tensor:  # [M, N] float64
    """Squared distances between rows that can be read several times.

    It is `pflcore.pairwise_sqdist`, tile by tile. `BLOCK_BYTES` of `a` and of `b` are
    in memory at a time. Errors are those of `pflcore.pairwise_sqdist`.
    """
    other = a if b is None else b
    check_rows("pairwise_sqdist", "a", a)
    check_rows("pairwise_sqdist", "b", other)
    out = torch.zeros(a.shape[0], other.shape[0], dtype=torch.float64)
    for rows, x in read_blocks(a):
        first = 0
        if b is None:
            out[rows, rows] = sqdist_op(x)
            # The tiles above the diagonal are computed, and those below are copies.
            first = rows.stop
        for columns, y in read_blocks(other, first):
            out[rows, columns] = sqdist_op(x, y)
            if b is None:
                out[columns, rows] = out[rows, columns].T
    return out


@checked_op
def aggregate(
    updates: RowSource,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [P] or [M, P]
    lr: float = 1.0,
    out: Any = None,  # [M, P]: a tensor, or what takes slices of rows (numpy.memmap)
    precise: bool = False,
) -> Any:  # [M, P]
    """Weighted sums of updates that can be read several times.

    It is `pflcore.aggregate`, with its errors.

    - Without `index`, 128 rows are in memory at a time and, where there are more rows,
      a float64 total [M, P].
    - With `index`, 256 MB of rows are in memory at a time. `out` is written while
      `updates` and `base` are still read.

    Args:
        updates: Rows that can be read several times, or a tensor.
        weight: As in `pflcore.aggregate`.
        index: As in `pflcore.aggregate`.
        base: As in `pflcore.aggregate`.
        lr: The factor of the sums.
        out: A tensor for the result, or an object that takes slices of rows, such as
            numpy.memmap. With `index` it shares neither memory nor a file with
            `updates` and `base`. The memory is checked for two tensors and for two
            arrays; a file is not.
        precise: True for sums in float64.

    Returns:
        The result [M, P], which is `out` where that is given.
    """
    like = _check_arguments(updates, weight, index, base, lr, out)
    if index is None:
        result = _dense(updates, like, weight, base, lr, precise)
        if out is None:
            return result
        out[:] = result
        return out
    if out is None:
        dtype, _ = result_dtypes(like, base, precise)
        out = torch.empty(len(weight), like.shape[1], dtype=dtype)
    _by_index(updates, like, weight, index, base, lr, precise, out)
    return out


def _check_arguments(
    updates: Any, weight: Any, index: Any, base: Any, lr: Any, out: Any
) -> Tensor:
    """A tensor [N, P] of the updates' kind, which takes no memory.

    Raises ValueError or TypeError for arguments that `aggregate` does not accept.
    """
    op = "aggregate"
    no_rows = check_rows(op, "updates", updates)
    n, p = updates.shape
    shape_text = "[M, N]" if index is None else "[M, K]"
    check_matrix(op, "weight", weight, shape_text)
    has_rows = n > 0 or index is not None
    require(has_rows, "aggregate(updates)", "at least one row", Words("none"))
    like = no_rows.new_empty(1, 1).expand(n, p)
    if isinstance(updates, Tensor):
        like = updates
    tensor_out = out if isinstance(out, Tensor) else None
    check_aggregate(like, weight, index, base, lr, tensor_out)
    if out is not None and tensor_out is None:
        shape = [len(weight), p]
        kind = np.dtype(getattr(out, "dtype", int)).kind
        fits = list(getattr(out, "shape", ())) == shape and kind == "f"
        require(fits, "aggregate(out)", f"{shape} of floating point", out)
    if index is not None:
        is_shared = out is not None and out is updates
        if isinstance(out, np.ndarray) and isinstance(updates, np.ndarray):
            is_shared = is_shared or np.may_share_memory(out, updates)
        got = Words("memory of updates")
        require(not is_shared, "aggregate(out)", "memory of its own", got)
    return like


def _by_index(
    rows: RowSource,
    like: Tensor,  # [N, P], takes no memory
    weight: Tensor,  # [M, K]
    index: Tensor,  # [M, K]
    base: Tensor | None,  # [P] or [M, P]
    lr: float,
    precise: bool,
    out: Any,  # [M, P]
) -> None:
    """Writes the results in blocks whose updates `BLOCK_BYTES` hold."""
    step = max(1, rows_per_block(rows) // max(1, index.shape[1]))
    for first in range(0, len(weight), step):
        block = slice(first, first + step)
        block_index = index[block].contiguous()
        block_weight = weight[block]
        # A row without weight is not read from its file.
        has_weight = (lr * block_weight.double()) != 0
        used = block_index[has_weight].unique()
        if len(used):
            block_rows = take_rows(rows, used)
        else:
            block_rows = like.new_zeros(1, like.shape[1])
        # Where a row without weight would be, any row serves.
        place = torch.searchsorted(used, block_index).clamp(max=len(block_rows) - 1)
        block_base = base
        if base is not None and base.dim() == 2:
            block_base = base[block]
        out[block] = aggregate_op(
            block_rows, block_weight, place, block_base, lr, precise=precise
        )


def _dense(
    rows: RowSource,
    like: Tensor,  # [N, P], takes no memory
    weight: Tensor,  # [M, N]
    base: Tensor | None,  # [P] or [M, P]
    lr: float,
    precise: bool,
) -> Tensor:  # [M, P]
    """The results without an index, as the sum of the blocks' sums.

    The total is float64 where there are several blocks, as in the kernel.
    """
    n, p = like.shape
    if n <= SUM_ROWS:
        # One block needs no float64 total, which is twice as large as the result.
        all_rows = tensor_of(rows[0:n])
        return aggregate_op(all_rows, weight, None, base, lr, precise=precise)
    dtype, wide = result_dtypes(like, base, precise)
    # A sum has the dtype of its base.
    zero_base = like.new_zeros(p, dtype=wide)
    total = like.new_zeros(len(weight), p, dtype=torch.float64)
    for columns, block in read_blocks(rows, step=SUM_ROWS):
        block_weight = weight[:, columns]
        total += aggregate_op(block, block_weight, None, zero_base, lr, precise=precise)
    total = total.to(wide)
    if base is not None:
        total = base.to(wide) + total
    return total.to(dtype)
