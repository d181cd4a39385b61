"""nearest: the k nearest rows of each row, without all distances where the triangle
inequality spares them."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from pflcore.check import NonNegativeInt, PositiveInt, checked

from . import stream
from ._check import check_same_kind, require_argument
from ._sqdist import pairwise_sqdist
from ._weights import feddwa_weights
from .stream import RowSource, check_rows, read_blocks, take_rows, tensor_of

# twice what a distance may be off: the squared one has a relative error of 1e-6
DISTANCE_MARGIN = 1e-6
MAX_PAIRS = 1 << 24  # distances that are held at a time
SKETCH_COLUMNS = 256  # columns of the sketch that chooses pivots
# elements up to which torch asks no other thread for help
SERIAL_MAX_ELEMENTS = 1 << 15


class Nearest(NamedTuple):
    """The K nearest rows of each guide, nearest first; of equals the lower index."""

    sqdist: Tensor  # [M, K] float64 squared distances
    index: Tensor  # type: ignore[assignment]  # [M, K] int64


@checked
def nearest(
    guide: RowSource,  # [M, P]
    rows: RowSource,  # [N, P]
    k: PositiveInt,
    method: Literal["exact", "groups"] = "exact",
    *,
    pivots: NonNegativeInt | None = None,
) -> Nearest:
    """The k nearest rows of each guide by `(pairwise_sqdist, index)`, as
    `feddwa_weights` ranks: NaN is infinitely far, k >= N gives all.

    Tensors, or rows that can be read again (see `ops.stream`), then on the CPU.
    Constants: no gradient flows through them. "exact" takes all pairs. "groups" gives
    the same, bit for bit: exact distances to `pivots` rows (None: the root of N), then,
    as |d(i, p) - d(j, p)| <= d(i, j), with a margin for rounding, only those to the
    groups that may hold a neighbour. It pays where clients are clustered; where less
    than half can be spared it takes all pairs, after some 7 / sqrt(N). On a GPU
    "groups" is "exact" too: there the choice of groups would make the host wait in
    every turn, and listed pairs share no reads.
    """
    op = "nearest"
    none = check_rows(op, "guide", guide)
    few = check_rows(op, "rows", rows)
    check_same_kind(op, "guide", none, "rows", few)
    n, p = rows.shape
    wanted = f"P = {guide.shape[1]} columns like guide"
    require_argument(guide.shape[1] == p, op, "rows", wanted, f"{n} rows of {p}")
    require_argument(n > 0, op, "rows", "at least one row", "none")
    with torch.no_grad():
        search = _Search(guide, rows, min(k, n))
        if method == "exact" or search.device.type != "cpu":
            return search.exact()
        many = math.isqrt(n - 1) + 1 if pivots is None else pivots
        return search.groups(*_groups(guide, rows, many))


def _sketch(
    rows: RowSource,  # [N, P]
) -> (
    Tensor
):  # [N, WIDTH] float32 (float64 for float64 rows); a row that is not finite is 0
    """In one pass: the strips of WIDTH columns with signs drawn for each column,
    added."""
    none = tensor_of(rows[:0])
    p = rows.shape[1]
    wide = torch.float64 if none.dtype is torch.float64 else torch.float32
    draws = torch.randint(0, 2, (p,), generator=torch.Generator().manual_seed(0))
    signs = (draws * 2 - 1).to(none.device, wide).split(SKETCH_COLUMNS)
    parts = []
    for _, block in read_blocks(rows):
        for part in block.split(max(1, SERIAL_MAX_ELEMENTS // SKETCH_COLUMNS)):
            out = part.new_zeros(len(part), SKETCH_COLUMNS, dtype=wide)
            for sign, x in zip(signs, part.split(SKETCH_COLUMNS, 1), strict=True):
                out[:, : len(sign)].addcmul_(x.to(wide), sign)
            parts.append(torch.where(out.isfinite().all(1, keepdim=True), out, 0.0))
    return torch.cat(parts)


def _groups(
    guide: RowSource, rows: RowSource, many: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The rows in G groups around pivots that are far from one another, by exact
    distances: the members of each group [n]; the groups of each guide [M, G], that of
    its nearest pivot first; and bounds [M, G]: no squared distance of a guide to a
    group's rows is less."""
    near = _sketch(rows)
    chosen = [0]
    gap = (near - near[0]).square().sum(1)
    # farthest first: one in each cluster before there are two in any
    while len(chosen) < many and float(gap.max()) > 0:
        chosen.append(int(gap.argmax()))
        gap = torch.minimum(gap, (near - near[chosen[-1]]).square().sum(1))
    pivots = torch.cat([tensor_of(rows[c : c + 1]) for c in chosen])

    def distances(rows: RowSource) -> Tensor:  # [N, G] float64
        parts = [pairwise_sqdist(block, pivots) for _, block in read_blocks(rows)]
        squares = torch.cat(parts or [near.new_empty(0, len(pivots)).double()])
        return squares.sqrt().nan_to_num(math.inf, math.inf)

    to_rows = distances(rows)
    to_guides = to_rows if guide is rows else distances(guide)
    group = to_rows.argmin(1)
    members = [torch.nonzero(group == g)[:, 0] for g in range(len(chosen))]
    empty = to_rows.new_full((len(chosen), len(chosen)), math.inf)
    at = group[:, None].expand_as(to_rows)
    low = empty.scatter_reduce(0, at, to_rows, "amin")
    high = (-empty).scatter_reduce(0, at, to_rows, "amax")
    return members, to_guides.argsort(1), _lower_bounds(to_guides, low, high)


def _lower_bounds(
    d: Tensor,  # [M, G] distances of guides to pivots
    low: Tensor,  # [n, G] the least and the largest distance to a pivot
    high: Tensor,
) -> Tensor:  # [M, n]
    """What `pairwise_sqdist` gives is not less, its rounding and that of the distances
    here counted; 0 where nothing is known.

    Infinities say nothing, nor does a group without rows (low > high). 1e-150 is what
    float64 squares lose below their range.
    """
    none = -math.inf
    least = torch.where(low.isinf(), none, low * (1 - DISTANCE_MARGIN))
    most = torch.where(low > high, math.inf, high * (1 + DISTANCE_MARGIN))
    near = torch.where(d.isinf(), none, d * (1 - DISTANCE_MARGIN))
    far = d * (1 + DISTANCE_MARGIN)
    bound = d.new_zeros(len(d), len(low))
    for p in range(d.shape[1]):
        torch.maximum(bound, least[:, p] - far[:, p : p + 1], out=bound)
        torch.maximum(bound, near[:, p : p + 1] - most[:, p], out=bound)
    return (bound - 1e-150).clamp(min=0).square() * (1 - 4 * DISTANCE_MARGIN)


class _Search:
    """The nearest rows so far: sqdist and index [M, K]; a place that nothing has taken
    yet is infinitely far, with index N."""

    def __init__(self, guide: RowSource, rows: RowSource, k: int) -> None:
        self.guide = guide
        self.rows = rows
        self.k = k
        self.m = guide.shape[0]
        self.n = rows.shape[0]
        self.device = tensor_of(rows[:0]).device
        self.sqdist = torch.full(
            (self.m, k), math.inf, dtype=torch.float64, device=self.device
        )
        self.index = torch.full((self.m, k), self.n, device=self.device)

    def merge(self, guides: Tensor, sqdist: Tensor, index: Tensor) -> None:
        """Merge distances [m, n] of guides [m] to rows `index` [n] or [m, n], in
        ascending order."""
        index = index.expand_as(sqdist)
        best = feddwa_weights(sqdist, self.k).index
        found = sqdist.gather(1, best).nan_to_num(math.inf, math.inf)
        d = torch.cat([self.sqdist[guides], found], 1)
        index = torch.cat([self.index[guides], index.gather(1, best)], 1)
        order = index.argsort(1)
        order = order.gather(1, feddwa_weights(d.gather(1, order), self.k).index)
        self.sqdist[guides], self.index[guides] = (
            d.gather(1, order),
            index.gather(1, order),
        )

    def compare(self, guides: Tensor, rows: Tensor) -> None:
        """Take the exact distances of these guides and rows, both ascending, tile by
        tile."""
        if len(guides) == 0 or len(rows) == 0:
            return
        for some in self.chunks(self.guide, guides):
            x = take_rows(self.guide, some)
            for others in self.chunks(self.rows, rows):
                self.merge(
                    some, pairwise_sqdist(x, take_rows(self.rows, others)), others
                )

    @staticmethod
    def chunks(rows: RowSource, index: Tensor) -> tuple[Tensor, ...]:
        """The numbers of rows, as many at a time as may be held."""
        whole = isinstance(rows, Tensor) and len(index) == len(rows)  # a view
        limit = len(index) if whole else stream.rows_per_block(rows)
        return tuple(index.split(max(1, min(limit, math.isqrt(MAX_PAIRS)))))

    def exact(self) -> Nearest:
        """All pairs."""
        guides, everybody = (
            torch.arange(n, device=self.device) for n in (self.m, self.n)
        )
        # there a pair's bits are those of its place in the matrix
        if self.device.type != "cpu":
            guide, rows = cast(tuple[Tensor, Tensor], (self.guide, self.rows))
            self.merge(guides, pairwise_sqdist(guide, rows), everybody)
            return Nearest(self.sqdist, self.index)
        # rows in the cache: then distances that need no new memory are quicker
        few = self.n * self.rows.shape[1] <= MAX_PAIRS >> 3
        step = max(1, (MAX_PAIRS >> 3) // self.n) if few else math.isqrt(MAX_PAIRS)
        for first in range(0, self.m, step):
            last = min(first + step, self.m)
            self.compare(guides[first:last], everybody)
        return Nearest(self.sqdist, self.index)

    def groups(self, members: list[Tensor], home: Tensor, bound: Tensor) -> Nearest:
        """The groups nearest to each guide until k rows were seen, then all that may
        hold a nearer one."""
        size = torch.tensor([len(group) for group in members], device=self.device)
        seen = torch.zeros_like(home, dtype=torch.bool)
        for turn in range(len(size)):
            todo = torch.nonzero((seen * size).sum(1) < self.k)[:, 0]
            if len(todo) == 0:
                break
            for g in home[todo, turn].unique().tolist():
                guides = todo[home[todo, turn] == g]
                self.compare(guides, members[g])
                seen[guides, g] = True
        spared = (seen | (bound > self.sqdist[:, -1:])) * size
        # there are no clusters to speak of, and all at once is quicker than most in
        # parts
        if 2 * int(spared.sum()) < self.m * self.n:
            self.sqdist.fill_(math.inf)
            self.index.fill_(self.n)
            return self.exact()
        for g, group in enumerate(members):
            near = ~seen[:, g] & (bound[:, g] <= self.sqdist[:, -1])
            self.compare(torch.nonzero(near)[:, 0], group)
        return Nearest(self.sqdist, self.index)
