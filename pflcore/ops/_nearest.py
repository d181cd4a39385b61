"""The k nearest rows of each row.

The search by groups spares distances by the triangle inequality. Each row belongs to
the group of its nearest pivot, a row that stands for others. For a guide i, a row j and
a pivot p, |d(i, p) - d(j, p)| <= d(i, j). So the distances of i and of a group's rows
to p give a bound, and no row of the group is nearer to i. Where that bound is above the
k nearest distances so far, the group holds no neighbour.

Symbols: M guides, the rows whose neighbours are searched; N rows; P columns of both; K
neighbours of a guide; G groups of rows, each around a pivot; m, n some of the guides
and rows; d distances of guides to pivots.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pflcore.check import NonNegativeInt, PositiveInt, Words, checked_op, reject

from ._check import check_like, check_tensor, is_readable, same_view
from ._sqdist import pairwise_sqdist
from ._weights import feddwa_weights

# Twice the relative error of a distance; that of its square is at most 1e-6.
DISTANCE_MARGIN = 1e-6
UNDERFLOW_MARGIN = 1e-150  # what float64 squares lose below their range
MAX_PAIRS = 1 << 24  # distances that are in memory at a time
BLOCK_BYTES = 1 << 28  # rows that are copied at a time
SKETCH_COLUMNS = 256  # columns of the sketch that chooses pivots
# With more elements, torch divides an elementwise operation among threads.
SERIAL_MAX_ELEMENTS = 1 << 15


class Nearest(NamedTuple):
    """The K nearest rows of each guide, nearest first.

    Of rows that are equally far, the one of lower index comes first.

    Attributes:
        sqdist: Squared distances [M, K], float64.
        index: Numbers of the rows [M, K], int64.
    """

    sqdist: Tensor
    index: Tensor  # type: ignore[assignment]


@checked_op
def nearest(
    guide: Tensor,  # [M, P]
    rows: Tensor,  # [N, P]
    k: PositiveInt,
    method: Literal["exact", "groups"] = "exact",
    *,
    pivots: NonNegativeInt | None = None,
) -> Nearest:
    """The k nearest rows of each guide, ranked by `pairwise_sqdist` and index.

    The ranks are those of `feddwa_weights`: NaN is infinitely far, and of equal
    distances the lower index is nearer. No gradient flows through the result.

    Raises ValueError or TypeError for a wrong argument.

    Args:
        guide: In float32, float64, float16 or bfloat16. The memory of a CPU tensor may
            be a file's.
        rows: The rows to search in, of the same dtype, device and length. Where they
            are the guides themselves, a CPU computes each pair once.
        k: The number of neighbours; from N on, all rows are returned.
        method: "exact" computes the distances of all pairs. "groups" gives the same
            bits, and spares the pairs that the triangle inequality rules out. That
            pays where rows are clustered. Where less than half of the pairs can be
            spared it computes all of them, and takes about 7 / sqrt(N) longer. On a
            GPU "groups" computes all pairs too: there the choice of groups
            would make the host wait in every turn, and listed pairs share no reads.
        pivots: The number of groups; None for the root of N.
    """
    op = "nearest"
    check_tensor(op, "guide", guide, "[M, P]")
    check_tensor(op, "rows", rows, "[N, P]")
    check_like(op, "guide", guide, "rows", rows)
    n, p = rows.shape
    if guide.shape[1] != p:
        expected = f"P = {guide.shape[1]} columns like guide"
        reject("nearest(rows)", expected, Words(f"{n} rows of {p}"))
    if n == 0:
        reject("nearest(rows)", "at least one row", Words("none"))
    with torch.no_grad():
        search = _Search(guide, rows, min(k, n))
        if method == "exact" or search.device.type != "cpu":
            return search.exact()
        num_pivots = math.isqrt(n - 1) + 1 if pivots is None else pivots
        members, order, bound = _groups(guide, rows, num_pivots)
        return search.groups(members, order, bound)


def _are_same(guide: Tensor, rows: Tensor) -> bool:
    """True where both are one object, or one view of one memory."""
    if guide is rows:
        return True
    return is_readable(guide) and is_readable(rows) and same_view(guide, rows)


def rows_per_block(rows: Tensor) -> int:
    """The number of rows [N, P] that `BLOCK_BYTES` hold, at least one."""
    row_bytes = rows.shape[1] * rows.element_size()
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def take_rows(
    rows: Tensor,  # [N, P]
    index: Tensor,  # [n] int64, ascending, n > 0
) -> Tensor:  # [n, P]
    """The rows of these numbers: a view where they follow one another."""
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return rows[first : last + 1]
    return rows[index]


def _sketch(
    rows: Tensor,  # [N, P]
) -> Tensor:  # [N, SKETCH_COLUMNS]
    """Short rows whose distances are about those of the rows.

    Each column gets a random sign, and strips of `SKETCH_COLUMNS` columns are added, in
    one pass over the rows. The result is float32, and float64 for float64 rows. A row
    that is not finite becomes 0.

    A sketch chooses pivots and nothing else. So it changes the time of a search, and
    never its result.
    """
    p = rows.shape[1]
    dtype = torch.float64 if rows.dtype is torch.float64 else torch.float32
    draws = torch.randint(0, 2, (p,), generator=torch.Generator().manual_seed(0))
    signs = (draws * 2 - 1).to(rows.device, dtype).split(SKETCH_COLUMNS)
    parts = []
    for part in rows.split(max(1, SERIAL_MAX_ELEMENTS // SKETCH_COLUMNS)):
        out = part.new_zeros(len(part), SKETCH_COLUMNS, dtype=dtype)
        for sign, x in zip(signs, part.split(SKETCH_COLUMNS, 1), strict=True):
            out[:, : len(sign)].addcmul_(x.to(dtype), sign)
        parts.append(torch.where(out.isfinite().all(1, keepdim=True), out, 0.0))
    return torch.cat(parts)


def _choose_pivots(rows: Tensor, num_pivots: int) -> list[int]:
    """Numbers of rows that are far from one another, by their sketches.

    Each pivot is the row that is farthest from the pivots before it. So every cluster
    has one pivot before any cluster has two.
    """
    sketch = _sketch(rows)
    pivots = [0]
    # Squared distances to the nearest pivot, [N].
    gap = (sketch - sketch[0]).square().sum(1)
    while len(pivots) < num_pivots and float(gap.max()) > 0:
        pivots.append(int(gap.argmax()))
        gap = torch.minimum(gap, (sketch - sketch[pivots[-1]]).square().sum(1))
    return pivots


def _groups(
    guide: Tensor,  # [M, P]
    rows: Tensor,  # [N, P]
    num_pivots: int,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The rows in groups around pivots, by exact distances.

    Returns:
        The members [n] of each group; the groups of each guide [M, G], that of its
        nearest pivot first; bounds [M, G], which no squared distance of the guide to a
        row of the group goes below.
    """
    numbers = _choose_pivots(rows, num_pivots)
    pivots = rows[numbers]
    to_rows = _distances(rows, pivots)
    to_guides = to_rows if _are_same(guide, rows) else _distances(guide, pivots)
    group = to_rows.argmin(1)
    num_groups = len(numbers)
    members = [torch.nonzero(group == g)[:, 0] for g in range(num_groups)]
    infinite = to_rows.new_full((num_groups, num_groups), math.inf)
    group_index = group[:, None].expand_as(to_rows)
    low = infinite.scatter_reduce(0, group_index, to_rows, "amin")
    high = (-infinite).scatter_reduce(0, group_index, to_rows, "amax")
    return members, to_guides.argsort(1), _lower_bounds(to_guides, low, high)


def _distances(
    rows: Tensor,  # [N, P]
    pivots: Tensor,  # [G, P]
) -> Tensor:  # [N, G] float64
    """Exact distances, with infinity for those that are not finite."""
    return pairwise_sqdist(rows, pivots).sqrt().nan_to_num(math.inf, math.inf)


def _lower_bounds(
    d: Tensor,  # [M, G] distances of guides to pivots
    low: Tensor,  # [G, G] the least distance of a group's rows to a pivot
    high: Tensor,  # [G, G] the largest one
) -> Tensor:  # [M, G]
    """Bounds, which the squared distances of a group's rows never go below.

    Of the two sides of the triangle inequality one is d(j, p) - d(i, p), at least
    `low - d`. The other is d(i, p) - d(j, p), at least `d - high`. The margins cover
    the rounding of `pairwise_sqdist` and of the distances here. An infinite distance
    gives no bound, and neither does a group without rows, where low > high. Then the
    bound is 0.
    """
    no_bound = -math.inf
    least = torch.where(low.isinf(), no_bound, low * (1 - DISTANCE_MARGIN))
    most = torch.where(low > high, math.inf, high * (1 + DISTANCE_MARGIN))
    near = torch.where(d.isinf(), no_bound, d * (1 - DISTANCE_MARGIN))
    far = d * (1 + DISTANCE_MARGIN)
    bound = d.new_zeros(len(d), len(low))
    for pivot in range(d.shape[1]):
        column = slice(pivot, pivot + 1)
        torch.maximum(bound, least[:, pivot] - far[:, column], out=bound)
        torch.maximum(bound, near[:, column] - most[:, pivot], out=bound)
    bound = (bound - UNDERFLOW_MARGIN).clamp(min=0)
    return bound.square() * (1 - 4 * DISTANCE_MARGIN)


class _Search:
    """A search with the nearest rows that it has found so far.

    They are `sqdist` and `index` [M, K]. A neighbour that was not found yet is
    infinitely far, with index N.
    """

    def __init__(self, guide: Tensor, rows: Tensor, k: int) -> None:
        """Begins a search for the k nearest `rows` of each `guide`."""
        self.guide = guide
        self.rows = rows
        self.k = k
        self.m = guide.shape[0]
        self.n = rows.shape[0]
        self.is_symmetric = _are_same(guide, rows)
        self.device = rows.device
        self.sqdist = torch.full(
            (self.m, k), math.inf, dtype=torch.float64, device=self.device
        )
        self.index = torch.full((self.m, k), self.n, device=self.device)

    def merge(
        self,
        guides: Tensor,  # [m] int64
        sqdist: Tensor,  # [m, n] float64
        index: Tensor,  # [n] or [m, n] int64, in ascending order
    ) -> None:
        """Merges the distances of some guides to the rows `index`."""
        index = index.expand_as(sqdist)
        best = feddwa_weights(sqdist, self.k).index
        best_sqdist = sqdist.gather(1, best).nan_to_num(math.inf, math.inf)
        sqdist = torch.cat([self.sqdist[guides], best_sqdist], 1)
        index = torch.cat([self.index[guides], index.gather(1, best)], 1)
        # Of equal distances, `feddwa_weights` takes the one in the lower column. So the
        # columns are sorted by the rows' numbers before.
        order = index.argsort(1)
        nearest = feddwa_weights(sqdist.gather(1, order), self.k).index
        order = order.gather(1, nearest)
        self.sqdist[guides] = sqdist.gather(1, order)
        self.index[guides] = index.gather(1, order)

    def compare(
        self,
        guides: Tensor,  # [m] int64, in ascending order
        rows: Tensor,  # [n] int64, in ascending order
    ) -> None:
        """Merges the exact distances of these guides and rows, tile by tile."""
        if len(guides) == 0 or len(rows) == 0:
            return
        if self.is_symmetric and torch.equal(guides, rows):
            self._compare_with_each_other(rows)
            return
        for tile_guides in self.chunks(self.guide, guides):
            x = take_rows(self.guide, tile_guides)
            for tile_rows in self.chunks(self.rows, rows):
                y = take_rows(self.rows, tile_rows)
                self.merge(tile_guides, pairwise_sqdist(x, y), tile_rows)

    def _compare_with_each_other(
        self,
        rows: Tensor,  # [n] int64, in ascending order
    ) -> None:
        """Merges the exact distances of these rows, which are guides too.

        Only the tiles on and above the diagonal are computed. On a CPU the bits of a
        distance do not depend on the order of its two rows.
        """
        tiles: list[Tensor] = []
        for chunk in self.chunks(self.rows, rows):
            tiles.extend(chunk.split(self.tile_rows()))
        for first, tile in enumerate(tiles):
            x = take_rows(self.rows, tile)
            self.merge(tile, pairwise_sqdist(x, x), tile)
            for later_tile in tiles[first + 1 :]:
                y = take_rows(self.rows, later_tile)
                sqdist = pairwise_sqdist(x, y)
                self.merge(tile, sqdist, later_tile)
                self.merge(later_tile, sqdist.T, tile)

    @staticmethod
    def chunks(
        rows: Tensor,  # [N, P]
        index: Tensor,  # [n] int64
    ) -> tuple[Tensor, ...]:
        """The numbers `index` in parts whose rows fit memory."""
        # All rows are a view, which takes no memory.
        limit = len(index) if len(index) == len(rows) else rows_per_block(rows)
        return tuple(index.split(max(1, min(limit, math.isqrt(MAX_PAIRS)))))

    def fits_cache(self) -> bool:
        """True where small tiles are quicker, as their distances need no new memory.

        So it is where the rows fit the cache.
        """
        return self.n * self.rows.shape[1] <= MAX_PAIRS // 8

    def tile_rows(self) -> int:
        """The rows on either side of a tile of distances within one matrix."""
        max_pairs = MAX_PAIRS // 8 if self.fits_cache() else MAX_PAIRS
        return max(1, math.isqrt(max_pairs))

    def exact(self) -> Nearest:
        """The nearest rows by all pairs."""
        guides = torch.arange(self.m, device=self.device)
        all_rows = torch.arange(self.n, device=self.device)
        if self.device.type != "cpu":
            # One matrix: on a GPU a pair's bits depend on its place in the matrix.
            self.merge(guides, pairwise_sqdist(self.guide, self.rows), all_rows)
            return Nearest(self.sqdist, self.index)
        if self.is_symmetric:
            self._compare_with_each_other(all_rows)
            return Nearest(self.sqdist, self.index)
        step = math.isqrt(MAX_PAIRS)
        if self.fits_cache():
            step = max(1, MAX_PAIRS // 8 // self.n)
        for first in range(0, self.m, step):
            last = min(first + step, self.m)
            self.compare(guides[first:last], all_rows)
        return Nearest(self.sqdist, self.index)

    def groups(
        self,
        members: list[Tensor],  # [n] of each group
        order: Tensor,  # [M, G] groups of a guide, the nearest first
        bound: Tensor,  # [M, G] no squared distance to the group is less
    ) -> Nearest:
        """The nearest rows by the groups that may hold them."""
        size = torch.tensor([len(group) for group in members], device=self.device)
        is_done = self._compare_nearest_groups(members, size, order)
        is_spared = is_done | (bound > self.sqdist[:, -1:])
        if 2 * int((is_spared * size).sum()) < self.m * self.n:
            # There are no clusters. All pairs at once are quicker than most of them in
            # parts.
            self.sqdist.fill_(math.inf)
            self.index.fill_(self.n)
            return self.exact()
        for g, group in enumerate(members):
            may_be_nearer = ~is_done[:, g] & (bound[:, g] <= self.sqdist[:, -1])
            self.compare(torch.nonzero(may_be_nearer)[:, 0], group)
        return Nearest(self.sqdist, self.index)

    def _compare_nearest_groups(
        self,
        members: list[Tensor],  # [n] of each group
        size: Tensor,  # [G] rows of a group
        order: Tensor,  # [M, G] groups of a guide, the nearest first
    ) -> Tensor:  # [M, G] bool
        """Compares each guide with its nearest groups, until it has k neighbours.

        Returns:
            True where a guide was compared with a group.
        """
        is_done = torch.zeros_like(order, dtype=torch.bool)
        for turn in range(len(size)):
            num_neighbours = (is_done * size).sum(1)
            guides = torch.nonzero(num_neighbours < self.k)[:, 0]
            if len(guides) == 0:
                break
            next_group = order[guides, turn]
            for g in next_group.unique().tolist():
                group_guides = guides[next_group == g]
                self.compare(group_guides, members[g])
                is_done[group_guides, g] = True
        return is_done
