"""Rows that need not fit memory: files and memory maps.

`RowSource` is anything with a `shape` [N, P] and slices of rows, tensors or numpy
arrays (`numpy.memmap`, `Files`, an HDF5 data set): it can be read again. What comes out
is, on CPUs with the kernels, bit for bit what the ops give for the same rows in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from pflcore.check import checked

from ._aggregate import aggregate as aggregate_op
from ._aggregate import check_aggregate, result_dtypes
from ._check import check_matrix, describe, reject_argument, require_argument
from ._sqdist import pairwise_sqdist as sqdist_op

__all__ = ["Files", "aggregate", "pairwise_sqdist"]

BLOCK_BYTES = 1 << 28  # of rows that are held at a time
FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")  # as files call them
SUM_ROWS = 128  # rows that `aggregate` sums before it adds them to a float64 total


class RowSource(Protocol):
    """N rows of P numbers that can be read again, as a tensor is: `shape` is [N, P], a
    slice of rows gives them as a tensor or a numpy array."""

    @property
    def shape(self) -> Sequence[int]:
        """[N, P]."""
        ...

    def __getitem__(self, rows: slice, /) -> Any:
        """The rows first:last, [last - first, P]."""
        ...


@checked
class Files:
    """Rows from safetensors files, one client's model each: the tensors `keys`,
    flattened and joined in this order.

    `keys` None: all of the first file's floating-point tensors by name. All files must
    have them in one dtype and of the same sizes. Needs the package safetensors
    (ImportError).
    """

    def __init__(
        self, paths: Sequence[str | Path], keys: Sequence[str] | None = None
    ) -> None:
        self.paths = list(paths)
        require_argument(
            len(self.paths) > 0, "Files", "paths", "at least one file", "none"
        )
        first = self._tensors(self.paths[0], keys)
        self.keys = list(first)
        self._kinds = describe_tensors(first)
        dtypes = {str(t.dtype) for t in first.values()}
        require_argument(
            len(dtypes) == 1,
            "Files",
            "keys",
            "tensors of one dtype",
            f"{sorted(dtypes)}",
        )
        self._none = model_row(first)[:0]
        self.shape = (len(self.paths), sum(t.numel() for t in first.values()))

    def _tensors(
        self, path: str | Path, keys: Sequence[str] | None
    ) -> dict[str, Tensor]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                held = {
                    key: file.get_slice(key).get_dtype() for key in sorted(file.keys())
                }
                wanted = keys or [key for key in held if held[key] in FLOAT_DTYPES]
                missing = sorted(set(wanted) - set(held))
                require_argument(
                    not missing,
                    "Files",
                    "keys",
                    f"names of tensors in {path}",
                    f"{missing}",
                )
                return {key: file.get_tensor(key) for key in wanted}
        except (SafetensorError, OSError) as error:
            why = str(error).rstrip(".")
            raise ValueError(
                f"Files: paths: {path} is no whole safetensors file ({why})."
            ) from None

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The models of the files first:last as rows, [last - first, P]."""
        picked = []
        for path in self.paths[rows]:
            tensors = self._tensors(path, self.keys)
            wanted = f"files of {self._kinds} like the first"
            require_argument(
                describe_tensors(tensors) == self._kinds,
                "Files",
                "paths",
                wanted,
                str(path),
            )
            picked.append(model_row(tensors))
        return torch.stack(picked) if picked else self._none.new_empty(0, self.shape[1])


def describe_tensors(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Shapes and dtypes in words."""
    return {key: describe(t) for key, t in tensors.items()}


def model_row(tensors: dict[str, Tensor]) -> Tensor:
    """A model as a row [P]."""
    return torch.cat([t.flatten() for t in tensors.values()])


def tensor_of(part: Any) -> Tensor:
    """A tensor as it is, an array of any memory as a tensor, where that can be
    without a copy."""
    if isinstance(part, Tensor):
        return part
    array = np.asarray(part)
    # torch takes neither, and warns of memory that it must not write
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)


def take_rows(
    rows: RowSource,  # [N, P]
    index: Tensor,  # [n] int64, n > 0
) -> Tensor:  # [n, P]
    """These rows as a tensor: a view or one slice where they are neighbours, else slice
    by slice."""
    cuts = torch.nonzero(index.diff() != 1)[:, 0] + 1
    if len(cuts) and isinstance(rows, Tensor):
        return rows[index]
    runs = index.tensor_split(cuts.tolist())
    parts = [tensor_of(rows[int(run[0]) : int(run[-1]) + 1]) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def check_rows(op: str, name: str, rows: Any) -> Tensor:
    """`rows` is a matrix or something with a shape [N, P] and slices; a tensor of its
    dtype, device and P."""
    if not isinstance(rows, Tensor):
        if not hasattr(rows, "__getitem__") or len(getattr(rows, "shape", ())) != 2:
            wanted = "a tensor, or rows with a shape [N, P] and slices"
            reject_argument(op, name, wanted, describe(rows), kind=TypeError)
        rows = tensor_of(rows[:0])
    check_matrix(op, name, rows, "[N, P]")
    return cast(Tensor, rows)


def rows_per_block(rows: RowSource) -> int:
    """How many rows are BYTES."""
    return BLOCK_BYTES // max(1, rows.shape[1] * tensor_of(rows[:0]).element_size())


def read_blocks(
    rows: RowSource,  # [N, P]
    first: int = 0,
    step: int | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """The rows from `first` on in blocks of `step`, by default of BYTES but at least a
    row: the place of each block, and its rows [n, P]."""
    n = rows.shape[0]
    step = step or max(1, rows_per_block(rows))
    for start in range(first, n, step):
        place = slice(start, min(start + step, n))
        yield place, tensor_of(rows[place])


def pairwise_sqdist(
    a: RowSource,  # [M, P]
    b: RowSource | None = None,  # [N, P]; None: b = a
) -> Tensor:  # [M, N] float64
    """`pflcore.pairwise_sqdist` over rows that can be read again, tile by tile."""
    other = a if b is None else b
    for name, rows in (("a", a), ("b", other)):
        check_rows("pairwise_sqdist", name, rows)
    out = torch.zeros(a.shape[0], other.shape[0], dtype=torch.float64)
    for some, x in read_blocks(a):
        if b is None:
            out[some, some] = sqdist_op(x)
        for others, y in read_blocks(other, some.stop if b is None else 0):
            out[some, others] = sqdist_op(x, y)
            if b is None:
                out[others, some] = out[some, others].T
    return out


@checked
def aggregate(
    updates: RowSource,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [P] or [M, P]
    lr: float = 1.0,
    out: Any = None,  # [M, P]: a tensor, or what takes slices of rows (numpy.memmap)
    precise: bool = False,
) -> Any:  # [M, P]
    """`pflcore.aggregate` over rows that can be read again.

    With `index`, `out` is written while `updates` and `base` are still read: it must
    not be their memory, which is seen of two tensors and of two arrays, nor their file.
    Dense, it holds 128 rows and, where there are more, a float64 total [M, P]; with
    `index`, the rows that so many results need as 256 MB hold. Errors are those of
    `pflcore.aggregate`.
    """
    first = check_rows("aggregate", "updates", updates)
    n, p = updates.shape
    check_matrix("aggregate", "weight", weight, "[M, N]" if index is None else "[M, K]")
    require_argument(
        n > 0 or index is not None, "aggregate", "updates", "at least one row", "none"
    )
    # what the checks look at takes no room
    like = (
        updates if isinstance(updates, Tensor) else first.new_empty(1, 1).expand(n, p)
    )
    check_aggregate(
        like, weight, index, base, lr, out if isinstance(out, Tensor) else None
    )
    wanted = [len(weight), p]
    if out is not None and not isinstance(out, Tensor):
        kind = np.dtype(getattr(out, "dtype", int)).kind
        fits = list(getattr(out, "shape", ())) == wanted and kind == "f"
        require_argument(
            fits, "aggregate", "out", f"{wanted} of floating point", describe(out)
        )
    if index is None:
        result = _dense(updates, like, weight, base, lr, precise)
        if out is None:
            return result
        out[:] = result
        return out
    arrays = isinstance(out, np.ndarray) and isinstance(updates, np.ndarray)
    same = out is updates or (arrays and np.may_share_memory(out, cast(Any, updates)))
    require_argument(
        not same, "aggregate", "out", "memory of its own", "memory of updates"
    )
    out = (
        torch.empty(wanted, dtype=result_dtypes(like, base, precise)[0])
        if out is None
        else out
    )
    _by_index(updates, like, weight, index, base, lr, precise, out)
    return out


def _by_index(
    rows: RowSource,
    like: Tensor,
    weight: Tensor,
    index: Tensor,
    base: Tensor | None,
    lr: float,
    precise: bool,
    out: Any,  # [M, P]
) -> None:
    """As many results at a time as BYTES hold the rows of."""
    step = max(1, rows_per_block(rows) // max(1, index.shape[1]))
    for first in range(0, len(weight), step):
        some = slice(first, first + step)
        # what has no weight is not read
        used = index[some][(lr * weight[some].double()) != 0].unique()
        part = take_rows(rows, used) if len(used) else like.new_zeros(1, like.shape[1])
        place = torch.searchsorted(used, index[some].contiguous()).clamp(
            max=len(part) - 1
        )
        start = base[some] if base is not None and base.dim() == 2 else base
        out[some] = aggregate_op(part, weight[some], place, start, lr, precise=precise)


def _dense(
    rows: RowSource,
    like: Tensor,
    weight: Tensor,
    base: Tensor | None,
    lr: float,
    precise: bool,
) -> Tensor:  # [M, P]
    """The sum of the blocks' sums, in float64 where there are several, as the kernel
    takes them."""
    n, p = like.shape
    if n <= SUM_ROWS:  # few large models: a total would be twice their mixes
        return aggregate_op(
            tensor_of(rows[0:n]), weight, None, base, lr, precise=precise
        )
    dtype, wide = result_dtypes(like, base, precise)
    zero = like.new_zeros(p, dtype=wide)
    total = like.new_zeros(len(weight), p, dtype=torch.float64)
    for some, block in read_blocks(rows, step=SUM_ROWS):
        total += aggregate_op(block, weight[:, some], None, zero, lr, precise=precise)
    total = total.to(wide)
    return (total if base is None else base.to(wide) + total).to(dtype)
