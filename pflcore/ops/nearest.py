"""nearest: the k nearest rows of each row, without all distances where the triangle inequality
spares them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pflcore.check import Count, Whole, checked

from . import stream
from ._words import check_same, expect
from .sqdist import pairwise_sqdist
from .stream import Bar, Dense, Progress, Rows, block, check_rows, meter, spans, take
from .weights import feddwa_weights

MARGIN = 1e-6  # twice what a distance may be off: the squared one has a relative error of 1e-6
PAIRS = 1 << 24  # distances that are held at a time
SERIAL = 1 << 15  # elements up to which torch asks no other thread for help
WIDTH = 256  # columns of the sketch that chooses pivots


class Nearest(NamedTuple):
    """The K nearest rows of each guide, nearest first; of equals the lower index."""

    sqdist: Tensor  # [M, K] float64 squared distances
    index: Tensor  # type: ignore[assignment]  # [M, K] int64


@checked
def nearest(
    guide: Dense,  # [M, P]
    rows: Dense,  # [N, P]
    k: Count,
    method: Literal["exact", "groups"] = "exact",
    *,
    pivots: Whole | None = None,
    progress: Bar | None = None,
) -> Nearest:
    """The k nearest rows of each guide by `(pairwise_sqdist, index)`, as `feddwa_weights` ranks:
    NaN is infinitely far, k >= N gives all.

    Tensors, or rows that can be read again (`stream.Rows`, then on the CPU). Constants: no gradient
    flows through them. "exact" takes all pairs. "groups" gives the same, bit for bit: exact
    distances to `pivots` rows (None: the root of N), then, as |d(i, p) - d(j, p)| <= d(i, j), with
    a margin for rounding, only those to the groups that may hold a neighbour. It pays where clients
    are clustered; where less than half can be spared it takes all pairs, after some 7 / sqrt(N).
    `progress(done, of)` counts guides, True shows a bar.
    """
    op = "nearest"
    none, few = check_rows(op, "guide", guide), check_rows(op, "rows", rows)
    check_same(op, "guide", none, "rows", few)
    (n, p), wanted = rows.shape, f"P = {guide.shape[1]} columns like guide"
    expect(guide.shape[1] == p, op, "rows", wanted, f"{n} rows of {p}")
    expect(n > 0, op, "rows", "at least one row", "none")
    with torch.no_grad():
        search = _Search(guide, rows, min(k, n), none.device, meter(progress))
        if method == "exact":
            return search.exact()
        many = min(n, math.isqrt(n - 1) + 1 if pivots is None else pivots)
        return search.groups(_Pivots(guide, rows, max(many, 1)))


def _sketch(
    rows: Tensor | Rows,  # [N, P]
) -> Tensor:  # [N, WIDTH] float32 (float64 for float64 rows); a row that is not finite is 0
    """In one pass: the strips of WIDTH columns with signs drawn for each column, added."""
    none, p = block(rows, 0, 0), rows.shape[1]
    wide = torch.float64 if none.dtype is torch.float64 else torch.float32
    draws = torch.randint(0, 2, (p,), generator=torch.Generator().manual_seed(0))
    signs = (draws * 2 - 1).to(none.device, wide).split(WIDTH)
    parts = [none.new_zeros(0, WIDTH, dtype=wide)]
    for first, last in spans(rows):
        for part in block(rows, first, last).split(max(1, SERIAL // WIDTH)):
            out = part.new_zeros(len(part), WIDTH, dtype=wide)
            for sign, x in zip(signs, part.split(WIDTH, 1), strict=True):
                out[:, : len(sign)].addcmul_(x.to(wide), sign)
            parts.append(torch.where(out.isfinite().all(1, keepdim=True), out, 0.0))
    return torch.cat(parts)


class _Pivots:
    """Rows far from one another, the groups of those nearest to each, and exact distances to
    them."""

    def __init__(self, guide: Tensor | Rows, rows: Tensor | Rows, many: int) -> None:
        near = _sketch(rows)
        chosen, gap = [0], (near - near[0]).square().sum(1)
        # farthest first: one in each cluster before there are two in any
        while len(chosen) < many and float(gap.max()) > 0:
            chosen.append(int(gap.argmax()))
            gap = torch.minimum(gap, (near - near[chosen[-1]]).square().sum(1))
        pivots = torch.cat([block(rows, c, c + 1) for c in chosen])
        self.rows = self._distances(rows, pivots)  # [N, G]
        self.guide = self.rows if guide is rows else self._distances(guide, pivots)  # [M, G]
        group = self.rows.argmin(1)
        self.members = [torch.nonzero(group == g)[:, 0] for g in range(len(chosen))]
        # [M, G] the groups of each guide, the nearest pivot first
        self.home = self.guide.argsort(1)
        empty = self.rows.new_full((len(chosen), len(chosen)), math.inf)
        at = group[:, None].expand_as(self.rows)
        low = empty.scatter_reduce(0, at, self.rows, "amin")
        high = (-empty).scatter_reduce(0, at, self.rows, "amax")
        # [M, G] no squared distance of a guide to a group's rows is less
        self.bound = _spared(self.guide, low, high)

    @staticmethod
    def _distances(rows: Tensor | Rows, pivots: Tensor) -> Tensor:  # [N, G] float64
        parts = [pairwise_sqdist(block(rows, *ends), pivots) for ends in spans(rows)]
        parts = parts or [pairwise_sqdist(pivots[:0], pivots)]
        return torch.cat(parts).sqrt().nan_to_num(math.inf, math.inf)


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

    def __init__(
        self,
        guide: Tensor | Rows,
        rows: Tensor | Rows,
        k: int,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self.guide, self.rows, self.k, self.progress, self.device = guide, rows, k, progress, device
        self.m, self.n = guide.shape[0], rows.shape[0]
        self.sqdist = torch.full((self.m, k), math.inf, dtype=torch.float64, device=device)
        self.index = torch.full((self.m, k), self.n, device=device)

    def report(self, done: int) -> None:
        """Tell the caller how many guides are done."""
        if self.progress:
            self.progress(done, self.m)

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
        if self.device.type != "cpu":  # a pair's bits are those of a place in the whole matrix
            if isinstance(self.guide, Tensor) and isinstance(self.rows, Tensor):
                pairs = torch.full((self.m, len(rows)), -1, device=self.device)
                pairs[guides] = rows
                self.keep(guides, pairwise_sqdist(self.guide, self.rows, pairs)[guides], rows)
            return
        for some, x in self.read(self.guide, guides):
            for others, y in self.read(self.rows, rows):
                self.keep(some, pairwise_sqdist(x, y), others)

    @staticmethod
    def read(rows: Tensor | Rows, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """These rows and their numbers, as many at a time as may be held."""
        limit = stream.at_once(rows)
        if isinstance(rows, Tensor) and len(index) == rows.shape[0]:  # a view
            limit = len(index)
        for some in index.split(max(1, min(limit, math.isqrt(PAIRS)))):
            yield some, take(rows, some)

    def exact(self) -> Nearest:
        """All pairs."""
        everybody = torch.arange(self.n, device=self.device)
        guide, rows = self.guide, self.rows
        if self.device.type != "cpu" and isinstance(guide, Tensor) and isinstance(rows, Tensor):
            guides = torch.arange(self.m, device=self.device)
            self.keep(guides, pairwise_sqdist(guide, rows), everybody)
        else:
            # rows in the cache: then distances that need no new memory are quicker
            few = self.n * self.rows.shape[1] <= PAIRS >> 3
            step = max(1, (PAIRS >> 3) // self.n) if few else math.isqrt(PAIRS)
            for first in range(0, self.m, step):
                last = min(first + step, self.m)
                self.compare(torch.arange(first, last), everybody)
                self.report(last)
        return Nearest(self.sqdist, self.index)

    def groups(self, pivots: _Pivots) -> Nearest:
        """The groups nearest to each guide until k rows were seen, then all that may hold a nearer
        one."""
        size = torch.tensor([len(members) for members in pivots.members], device=self.device)
        seen = torch.zeros(self.m, len(size), dtype=torch.bool, device=self.device)
        for turn in range(len(size)):
            todo = torch.nonzero((seen * size).sum(1) < self.k)[:, 0]
            if len(todo) == 0:
                break
            for g in pivots.home[todo, turn].unique().tolist():
                guides = todo[pivots.home[todo, turn] == g]
                self.compare(guides, pivots.members[g])
                seen[guides, g] = True
        spared = (seen | (pivots.bound > self.sqdist[:, -1:])) * size
        # there are no clusters to speak of, and all at once is quicker than most in parts
        if 2 * int(spared.sum()) < self.m * self.n:
            self.sqdist.fill_(math.inf)
            self.index.fill_(self.n)
            return self.exact()
        for g, members in enumerate(pivots.members):
            near = ~seen[:, g] & (pivots.bound[:, g] <= self.sqdist[:, -1])
            self.compare(torch.nonzero(near)[:, 0], members)
            self.report((g + 1) * self.m // len(size))
        return Nearest(self.sqdist, self.index)
