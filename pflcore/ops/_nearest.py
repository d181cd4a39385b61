"""nearest: the k nearest rows of each row, without all distances where the triangle inequality
spares them."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from pflcore.check import Count, Whole, checked

from . import stream
from ._sqdist import pairwise_sqdist
from ._weights import feddwa_weights
from ._words import check_same, expect
from .stream import Rows, check_rows, read, take, tensor_of

MARGIN = 1e-6  # twice what a distance may be off: the squared one has a relative error of 1e-6
PAIRS = 1 << 24  # distances that are held at a time
WIDTH = 256  # columns of the sketch that chooses pivots
SERIAL = 1 << 15  # elements up to which torch asks no other thread for help


class Nearest(NamedTuple):
    """The K nearest rows of each guide, nearest first; of equals the lower index."""

    sqdist: Tensor  # [M, K] float64 squared distances
    index: Tensor  # type: ignore[assignment]  # [M, K] int64


@checked
def nearest(
    guide: Rows,  # [M, P]
    rows: Rows,  # [N, P]
    k: Count,
    method: Literal["exact", "groups"] = "exact",
    *,
    pivots: Whole | None = None,
) -> Nearest:
    """The k nearest rows of each guide by `(pairwise_sqdist, index)`, as `feddwa_weights` ranks:
    NaN is infinitely far, k >= N gives all.

    Tensors, or rows that can be read again (see `ops.stream`), then on the CPU. Constants: no
    gradient flows through them. "exact" takes all pairs. "groups" gives the same, bit for bit:
    exact distances to `pivots` rows (None: the root of N), then, as |d(i, p) - d(j, p)| <= d(i, j),
    with a margin for rounding, only those to the groups that may hold a neighbour. It pays where
    clients are clustered; where less than half can be spared it takes all pairs, after some
    7 / sqrt(N). On a GPU "groups" is "exact" too: there the choice of groups would make the host
    wait in every turn, and listed pairs share no reads.
    """
    op = "nearest"
    none, few = check_rows(op, "guide", guide), check_rows(op, "rows", rows)
    check_same(op, "guide", none, "rows", few)
    (n, p), wanted = rows.shape, f"P = {guide.shape[1]} columns like guide"
    expect(guide.shape[1] == p, op, "rows", wanted, f"{n} rows of {p}")
    expect(n > 0, op, "rows", "at least one row", "none")
    with torch.no_grad():
        search = _Search(guide, rows, min(k, n))
        if method == "exact" or search.device.type != "cpu":
            return search.exact()
        many = math.isqrt(n - 1) + 1 if pivots is None else pivots
        return search.groups(*_groups(guide, rows, many))


def _sketch(
    rows: Rows,  # [N, P]
) -> Tensor:  # [N, WIDTH] float32 (float64 for float64 rows); a row that is not finite is 0
    """In one pass: the strips of WIDTH columns with signs drawn for each column, added."""
    none, p = tensor_of(rows[:0]), rows.shape[1]
    wide = torch.float64 if none.dtype is torch.float64 else torch.float32
    draws = torch.randint(0, 2, (p,), generator=torch.Generator().manual_seed(0))
    signs = (draws * 2 - 1).to(none.device, wide).split(WIDTH)
    parts = []
    for _, block in read(rows):
        for part in block.split(max(1, SERIAL // WIDTH)):
            out = part.new_zeros(len(part), WIDTH, dtype=wide)
            for sign, x in zip(signs, part.split(WIDTH, 1), strict=True):
                out[:, : len(sign)].addcmul_(x.to(wide), sign)
            parts.append(torch.where(out.isfinite().all(1, keepdim=True), out, 0.0))
    return torch.cat(parts)


def _groups(guide: Rows, rows: Rows, many: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """The rows in G groups around pivots that are far from one another, by exact distances: the
    members of each group [n]; the groups of each guide [M, G], that of its nearest pivot first; and
    bounds [M, G]: no squared distance of a guide to a group's rows is less."""
    near = _sketch(rows)
    chosen, gap = [0], (near - near[0]).square().sum(1)
    # farthest first: one in each cluster before there are two in any
    while len(chosen) < many and float(gap.max()) > 0:
        chosen.append(int(gap.argmax()))
        gap = torch.minimum(gap, (near - near[chosen[-1]]).square().sum(1))
    pivots = torch.cat([tensor_of(rows[c : c + 1]) for c in chosen])

    def distances(rows: Rows) -> Tensor:  # [N, G] float64
        parts = [pairwise_sqdist(block, pivots) for _, block in read(rows)]
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
    return members, to_guides.argsort(1), _spared(to_guides, low, high)


def _spared(
    d: Tensor,  # [M, G] distances of guides to pivots
    low: Tensor,  # [n, G] the least and the largest distance to a pivot
    high: Tensor,
) -> Tensor:  # [M, n]
    """What `pairwise_sqdist` gives is not less, its rounding and that of the distances here
    counted; 0 where nothing is known.

    Infinities say nothing, nor does a group without rows (low > high). 1e-150 is what float64
    squares lose below their range.
    """
    none = -math.inf
    least = torch.where(low.isinf(), none, low * (1 - MARGIN))
    most = torch.where(low > high, math.inf, high * (1 + MARGIN))
    near, far = torch.where(d.isinf(), none, d * (1 - MARGIN)), d * (1 + MARGIN)
    bound = d.new_zeros(len(d), len(low))
    for p in range(d.shape[1]):
        torch.maximum(bound, least[:, p] - far[:, p : p + 1], out=bound)
        torch.maximum(bound, near[:, p : p + 1] - most[:, p], out=bound)
    return (bound - 1e-150).clamp(min=0).square() * (1 - 4 * MARGIN)


class _Search:
    """The nearest rows so far: sqdist and index [M, K]; a place that nothing has taken yet is
    infinitely far, with index N."""

    def __init__(self, guide: Rows, rows: Rows, k: int) -> None:
        self.guide, self.rows, self.k = guide, rows, k
        self.m, self.n = guide.shape[0], rows.shape[0]
        self.device = tensor_of(rows[:0]).device
        self.sqdist = torch.full((self.m, k), math.inf, dtype=torch.float64, device=self.device)
        self.index = torch.full((self.m, k), self.n, device=self.device)

    def keep(self, guides: Tensor, sqdist: Tensor, index: Tensor) -> None:
        """Merge distances [m, n] of guides [m] to rows `index` [n] or [m, n], in ascending
        order."""
        index = index.expand_as(sqdist)
        best = feddwa_weights(sqdist, self.k).index
        found = sqdist.gather(1, best).nan_to_num(math.inf, math.inf)
        d = torch.cat([self.sqdist[guides], found], 1)
        index = torch.cat([self.index[guides], index.gather(1, best)], 1)
        order = index.argsort(1)
        order = order.gather(1, feddwa_weights(d.gather(1, order), self.k).index)
        self.sqdist[guides], self.index[guides] = d.gather(1, order), index.gather(1, order)

    def compare(self, guides: Tensor, rows: Tensor) -> None:
        """Take the exact distances of these guides and rows, both ascending, tile by tile."""
        if len(guides) == 0 or len(rows) == 0:
            return
        for some in self.parts(self.guide, guides):
            x = take(self.guide, some)
            for others in self.parts(self.rows, rows):
                self.keep(some, pairwise_sqdist(x, take(self.rows, others)), others)

    @staticmethod
    def parts(rows: Rows, index: Tensor) -> tuple[Tensor, ...]:
        """The numbers of rows, as many at a time as may be held."""
        whole = isinstance(rows, Tensor) and len(index) == len(rows)  # a view
        limit = len(index) if whole else stream.at_once(rows)
        return tuple(index.split(max(1, min(limit, math.isqrt(PAIRS)))))

    def exact(self) -> Nearest:
        """All pairs."""
        guides, everybody = (torch.arange(n, device=self.device) for n in (self.m, self.n))
        if self.device.type != "cpu":  # there a pair's bits are those of its place in the matrix
            guide, rows = cast(tuple[Tensor, Tensor], (self.guide, self.rows))
            self.keep(guides, pairwise_sqdist(guide, rows), everybody)
            return Nearest(self.sqdist, self.index)
        # rows in the cache: then distances that need no new memory are quicker
        few = self.n * self.rows.shape[1] <= PAIRS >> 3
        step = max(1, (PAIRS >> 3) // self.n) if few else math.isqrt(PAIRS)
        for first in range(0, self.m, step):
            last = min(first + step, self.m)
            self.compare(guides[first:last], everybody)
        return Nearest(self.sqdist, self.index)

    def groups(self, members: list[Tensor], home: Tensor, bound: Tensor) -> Nearest:
        """The groups nearest to each guide until k rows were seen, then all that may hold a nearer
        one."""
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
        # there are no clusters to speak of, and all at once is quicker than most in parts
        if 2 * int(spared.sum()) < self.m * self.n:
            self.sqdist.fill_(math.inf)
            self.index.fill_(self.n)
            return self.exact()
        for g, group in enumerate(members):
            near = ~seen[:, g] & (bound[:, g] <= self.sqdist[:, -1])
            self.compare(torch.nonzero(near)[:, 0], group)
        return Nearest(self.sqdist, self.index)
