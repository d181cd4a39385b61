"""Rows that need not fit memory: files, memory maps, blocks that come one after the other.

`Rows` is anything with a `shape` [N, P] and slices of rows, tensors or numpy arrays
(`numpy.memmap`, `Files`, an HDF5 data set): it can be read again. What comes out is, on CPUs with
the kernels, bit for bit what the ops give for the same rows in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Kind, Names, are_names, checked, optional

from ._words import expect, matrix, meet, refuse, same_view, shape, span
from .aggregate import aggregate as aggregate_op
from .aggregate import check_aggregate, check_out, dtypes
from .sqdist import pairwise_sqdist as sqdist_op

__all__ = ["Files", "aggregate", "pairwise_sqdist"]

BYTES = 1 << 28  # of rows that are held at a time
FLOATS = ("F16", "BF16", "F32", "F64")  # as files call them
CHUNK = 128  # rows that `aggregate` sums before it adds them to a float64 total

Progress = Callable[[int, int], object]
Bar = Annotated[
    Progress | bool,
    Kind("a function of (done, of), or True for a bar", lambda v: callable(v) or v is True),
]


def meter(progress: Progress | bool | None) -> Progress:
    """The function that a call reports to. True is a bar of tqdm's; ImportError without tqdm."""
    if not isinstance(progress, bool):
        return progress or (lambda done, of: None)
    bar = optional("tqdm", "'pflcore[cli]'", "progress: a bar").tqdm(unit=" rows")

    def show(done: int, of: int) -> None:
        bar.total = of
        bar.update(done - bar.n)
        if done >= of:
            bar.close()

    return show


class Rows(Protocol):
    """N rows of P numbers that can be read again, as a tensor is: `shape` is [N, P], a slice of
    rows gives them as a tensor or a numpy array."""

    @property
    def shape(self) -> Sequence[int]:
        """[N, P]."""
        ...

    def __getitem__(self, rows: slice, /) -> Any:
        """The rows first:last, [last - first, P]."""
        ...


UPDATES = Kind(
    "rows [N, P] or blocks of them",
    lambda v: hasattr(v, "shape") or (hasattr(v, "__iter__") and not (v and are_names(v))),
)


@checked
class Files:
    """Rows from safetensors files, one client's model each: the tensors `keys`, flattened and
    joined in this order.

    `keys` None: all of the first file's floating-point tensors by name. All files must have them in
    one dtype and of the same sizes. Needs the package safetensors (ImportError).
    """

    def __init__(self, paths: Sequence[str | Path], keys: Names | None = None) -> None:
        self.paths = list(paths)
        self.keys = [keys] if isinstance(keys, str) else keys and list(keys)
        expect(len(self.paths) > 0, "Files", "paths", "at least one file", "none")
        self._first, self._shapes = self._row(0)
        self.shape = (len(self.paths), len(self._first))

    def _row(self, number: int) -> tuple[Tensor, list[Any]]:
        """One file's row and the shapes of its tensors."""
        from safetensors import SafetensorError, safe_open

        path = self.paths[number]
        try:
            with safe_open(path, "pt") as file:
                held = {key: file.get_slice(key).get_dtype() for key in sorted(file.keys())}
                if self.keys is None:
                    self.keys = [key for key in held if held[key] in FLOATS]
                missing = ", ".join(sorted(set(self.keys) - set(held)))
                expect(not missing, "Files", "keys", f"names of tensors in {path}", missing)
                parts = [file.get_tensor(key) for key in self.keys]
        except (SafetensorError, OSError) as error:
            why = str(error).rstrip(".")
            raise ValueError(
                f"Files: paths: {path} is no whole safetensors file ({why})."
            ) from None
        expect(len(parts) > 0, "Files", "paths", "files with floating-point tensors", str(path))
        kinds = sorted({str(t.dtype).removeprefix("torch.") for t in parts})
        wanted = f"tensors of one dtype in {path}"
        expect(len(kinds) == 1, "Files", "keys", wanted, ", ".join(kinds), "choose keys")
        return torch.cat([t.flatten() for t in parts]), [list(t.shape) for t in parts]

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The models of the files first:last as rows, [last - first, P]."""
        picked = []
        for number in range(len(self.paths))[rows]:
            row, shapes = self._row(number)
            if shapes != self._shapes or row.dtype is not self._first.dtype:
                wanted = f"files of {self._first.dtype} {self._shapes} like the first"
                refuse("Files", "paths", wanted, f"{row.dtype} {shapes} in {self.paths[number]}")
            picked.append(row)
        return torch.stack(picked) if picked else self._first.new_empty(0, self.shape[1])


def tensor_of(part: Any) -> Tensor:
    """A tensor as it is, an array of any memory as a tensor, where that can be without a copy."""
    if isinstance(part, Tensor):
        return part
    array = np.asarray(part)
    # torch takes neither, and warns of memory that it must not write
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)


def take(
    rows: Rows,  # [N, P]
    index: Tensor,  # [n] int64, n > 0
) -> Tensor:  # [n, P]
    """These rows as a tensor: a view or one slice where they are neighbours, else slice by
    slice."""
    cuts = torch.nonzero(index.diff() != 1)[:, 0] + 1
    if len(cuts) and isinstance(rows, Tensor):
        return rows[index]
    runs = index.tensor_split(cuts.tolist())
    parts = [tensor_of(rows[int(run[0]) : int(run[-1]) + 1]) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def check_rows(op: str, name: str, rows: Any) -> Tensor:
    """`rows` is a matrix or something with a shape [N, P] and slices; a tensor of its dtype, device
    and P."""
    if not isinstance(rows, Tensor):
        if not hasattr(rows, "__getitem__") or len(getattr(rows, "shape", ())) != 2:
            wanted = "a tensor, or rows with a shape [N, P] and slices"
            refuse(op, name, wanted, shape(rows), kind=TypeError)
        rows = tensor_of(rows[:0])
    matrix(op, name, rows, "[N, P]")
    return cast(Tensor, rows)


def at_once(rows: Rows) -> int:
    """How many rows are BYTES."""
    return BYTES // max(1, rows.shape[1] * tensor_of(rows[:0]).element_size())


def read(
    rows: Rows,  # [N, P]
    first: int = 0,
    step: int | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """The rows from `first` on in blocks of `step`, by default of BYTES but at least a row: the
    place of each block, and its rows [n, P]."""
    n, step = rows.shape[0], step or max(1, at_once(rows))
    for start in range(first, n, step):
        place = slice(start, min(start + step, n))
        yield place, tensor_of(rows[place])


@checked
def pairwise_sqdist(
    a: Rows,  # [M, P]
    b: Rows | None = None,  # [N, P]; None: b = a
    progress: Bar | None = None,
) -> Tensor:  # [M, N] float64
    """`pflcore.pairwise_sqdist` over rows that can be read again, tile by tile; `progress(done,
    of)` counts the rows of a, and `progress=True` shows a bar."""
    report = meter(progress)
    other = a if b is None else b
    for name, rows in (("a", a), ("b", other)):
        check_rows("pairwise_sqdist", name, rows)
    out = torch.zeros(a.shape[0], other.shape[0], dtype=torch.float64)
    for some, x in read(a):
        if b is None:
            out[some, some] = sqdist_op(x)
        for others, y in read(other, some.stop if b is None else 0):
            out[some, others] = sqdist_op(x, y)
            if b is None:
                out[others, some] = out[some, others].T
        report(some.stop, a.shape[0])
    return out


@checked
def aggregate(
    # [N, P], or blocks [n, P] of N rows in all
    updates: Annotated[Rows | Iterable[Any], UPDATES],
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [P] or [M, P]
    lr: float = 1.0,
    out: Any = None,  # [M, P]: a tensor, or what takes slices of rows (numpy.memmap)
    precise: bool = False,
    progress: Bar | None = None,
) -> Any:  # [M, P]
    """`pflcore.aggregate` over rows that can be read again or, without `index`, over blocks of rows
    that come but once.

    `out` is written while `updates` are still read: with `index` it must not be their memory, nor
    their file, which other Rows do not show. Dense, it holds 128 rows and, where there are more, a
    float64 total [M, P]; with `index`, the rows that so many results need as 256 MB hold.
    `progress(done, of)` counts rows of updates, with `index` those of the result; True shows a bar.
    Errors are those of `pflcore.aggregate`.
    """
    report, rows = meter(progress), cast(Any, updates)
    matrix("aggregate", "weight", weight, "[M, N]" if index is None else "[M, K]")
    if hasattr(updates, "shape"):
        first, n = check_rows("aggregate", "updates", rows), rows.shape[0]
        expect(n > 0 or index is not None, "aggregate", "updates", "at least one row", "none")
        blocks: Iterator[Tensor] = (block for _, block in read(rows, step=CHUNK))
    else:
        wanted = "rows that can be read again where index is given"
        expect(index is None, "aggregate", "updates", wanted, type(updates).__name__)
        n = weight.shape[1]
        blocks = _blocks(rows, n)
        first = next(blocks)
        blocks = itertools.chain([first], blocks)
    # what the checks look at takes no room
    p, first = first.shape[1], first.new_empty(1, 1, requires_grad=first.requires_grad)
    like = rows if isinstance(rows, Tensor) else first.expand(n, p)
    check_aggregate(like, weight, index, base, lr, None)
    check_result(rows, like, weight, index, base, out)
    if index is not None:
        return _by_index(rows, like, weight, index, base, lr, out, precise, report)
    result = _dense(blocks, like, weight, base, lr, precise, report)
    if out is None:
        return result
    out[:] = result
    return out


def _by_index(
    rows: Rows,
    like: Tensor,
    weight: Tensor,
    index: Tensor,
    base: Tensor | None,
    lr: float,
    out: Any,
    precise: bool,
    report: Progress,
) -> Any:  # [M, P]
    """As many results at a time as BYTES hold the rows of."""
    m, p = len(weight), like.shape[1]
    if out is None:
        out = torch.empty(m, p, dtype=dtypes(like, base, precise)[0])
    step = max(1, at_once(rows) // max(1, index.shape[1]))
    for first in range(0, m, step):
        some = slice(first, first + step)
        # what has no weight is not read
        used = index[some][(lr * weight[some].double()) != 0].unique()
        part = take(rows, used) if len(used) else like.new_zeros(1, p)
        place = torch.searchsorted(used, index[some].contiguous()).clamp(max=len(part) - 1)
        start = base[some] if base is not None and base.dim() == 2 else base
        out[some] = aggregate_op(part, weight[some], place, start, lr, precise=precise)
        report(min(first + step, m), m)
    return out


def check_result(
    rows: Any, like: Tensor, weight: Tensor, index: Tensor | None, base: Tensor | None, out: Any
) -> None:
    """The `out` of `aggregate`: as the op wants it where it is a tensor, else of that shape and
    floating point; with `index` it has memory of its own."""
    if isinstance(out, Tensor):
        check_out(like, weight, index, base, out)
    elif out is not None:
        wanted, kind = [len(weight), like.shape[1]], getattr(out, "dtype", np.dtype(float)).kind
        fits = list(getattr(out, "shape", ())) == wanted and kind == "f"
        expect(fits, "aggregate", "out", f"{wanted} of floating point", shape(out))
    if out is None or index is None:
        return
    others = [("updates", rows)]
    if isinstance(out, np.ndarray) and base is not None:
        own = out.flags.writeable and same_view(base, tensor_of(out))
        others += [] if own else [("base", base)]
    for name, other in others:
        file = getattr(out, "filename", None)
        again = (
            file is not None
            and getattr(other, "filename", None) == file
            and getattr(other, "_mmap", None) is not out._mmap
        )
        meets = any(meet(a, b) for a in _memory(out) for b in _memory(other))
        shared = out is other or again or meets
        expect(not shared, "aggregate", "out", "memory of its own", f"memory of {name}")


def _memory(rows: Any) -> list[tuple[int, int] | None]:
    """The addresses of the memory that rows lie in; of what is neither a tensor nor an array, those
    of its first row and its last."""
    if isinstance(rows, Tensor):
        return [span(rows)]
    if isinstance(rows, np.ndarray):
        first = rows.__array_interface__["data"][0]
        (n, p), (down, across) = rows.shape, rows.strides
        corners = [first + i * down + j * across for i in (0, n - 1) for j in (0, p - 1)]
        return [(min(corners), max(corners) + rows.itemsize)] if rows.size else []
    ends = (rows[i : i + 1] for i in (0, rows.shape[0] - 1))
    return [where for end in ends if isinstance(end, Tensor | np.ndarray) for where in _memory(end)]


def _blocks(updates: Iterable[Any], n: int) -> Iterator[Tensor]:
    """The rows in blocks of CHUNK, whatever blocks they come in."""
    held: list[Tensor] = []
    done, wanted = 0, f"{n} rows in all, as weight has columns"
    for part in updates:
        rows = tensor_of(part)
        matrix("aggregate", "updates", rows, "[n, P] in each block")
        done += len(rows)
        expect(done <= n, "aggregate", "updates", wanted, f"at least {done}")
        same = not held or (rows.shape[1] == held[0].shape[1] and rows.dtype is held[0].dtype)
        expect(same, "aggregate", "updates", "blocks of one P and one dtype", shape(rows))
        held = [torch.cat([*held, rows])]
        while len(held[0]) >= CHUNK:
            yield held[0][:CHUNK]
            held = [held[0][CHUNK:]]
    expect(done == n and held != [], "aggregate", "updates", wanted, str(done))
    if len(held[0]):
        yield held[0]


def _dense(
    blocks: Iterator[Tensor],
    like: Tensor,
    weight: Tensor,
    base: Tensor | None,
    lr: float,
    precise: bool,
    report: Progress,
) -> Tensor:  # [M, P]
    """The sum of the blocks' sums, in float64 where there are several, as the kernel takes them."""
    (n, p), done = like.shape, 0
    if n <= CHUNK:  # few large models: a total would be twice their mixes
        (rows,) = blocks
        report(n, n)
        return aggregate_op(rows, weight, None, base, lr, precise=precise)
    dtype, wide = dtypes(like, base, precise)
    zero = like.new_zeros(p, dtype=wide)
    total = like.new_zeros(len(weight), p, dtype=torch.float64)
    for rows in blocks:
        some = weight[:, done : done + len(rows)]
        total += aggregate_op(rows, some, None, zero, lr, precise=precise)
        done += len(rows)
        report(done, n)
    total = total.to(wide)
    return (total if base is None else base.to(wide) + total).to(dtype)
