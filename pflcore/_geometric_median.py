"""The geometric median, as the weights of a mean of the rows.

Symbols: S rows of P numbers each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.check import warn_caller
from pflcore.ops._directions import cosine_matrix, row_lengths
from pflcore.train._workers import single_threaded

# The search ends after so many steps, or where the slope of the sum of distances is at
# most this for each row.
MAX_STEPS = 100
TOLERANCE = 1e-9
# Rows at this distance or less from a point, in units of the median length, are at it.
COINCIDENT = 1e-8


def geometric_median_weights(rows: Tensor) -> Tensor:
    """The weights [1, S] of the geometric median as a mean of `rows` [S, P].

    The geometric median z has the least sum of distances to the rows. The search knows
    the rows by their lengths and cosines, seen from the median of each coordinate. So
    no row that is very far away takes digits from the others, and a step costs S^3,
    whatever P is. A step goes to the best of the points of `_better_point`.

    z is where the unit vectors from the rows to it cancel. Those of rows at z itself
    have no direction, and each of them holds a sum of the others up to length 1. The
    search ends where the length of what is left is 1e-9 of S at most, or where rounding
    hides a fall of the sum of distances. Warns where it has not ended after `MAX_STEPS`
    steps.
    """
    origin = ops.trimmed_mean(rows, (len(rows) - 1) // 2)
    length = row_lengths(rows, origin).cpu()
    cosine = cosine_matrix(rows, origin=origin).cpu()
    count = len(rows)
    weight = torch.full((count,), 1 / count, dtype=torch.float64)
    if length.any():
        unit = length[length > 0].quantile(0.5)
        # Squares of longer ones overflow, and of a far row only the direction acts. Its
        # weight shrinks with its length, so that the others keep theirs.
        size = (length / unit).clamp(max=1e100)
        with single_threaded():  # sums of several threads have other last digits
            point = _point_of_least_sum(size, cosine)
        is_clamped = length > size * unit
        weight = torch.where(is_clamped, size * unit / length, 1.0) * point.weight
    return to_device(weight[None], rows.device)


def _point_of_least_sum(
    size: Tensor,  # [S]
    cosine: Tensor,  # [S, S]
) -> _PointOfMean:
    """The mean of rows of these lengths and cosines nearest to all of them."""
    count = len(size)
    weight = 1 / size.clamp(min=COINCIDENT)
    point = _PointOfMean(weight / weight.sum(), size, cosine)
    for _ in range(MAX_STEPS):
        if point.excess() <= TOLERANCE * count:
            return point
        better = _better_point(point)
        if better is None:
            return point
        point = better
    # The sum is convex, so it falls by its slope times the way at most. By the triangle
    # inequality with each row, the way is at most 2 / S of the sum.
    gap = 2 * point.excess() / count
    warn_caller(
        f"geometric_median: {MAX_STEPS} steps did not reach the least sum of "
        f"distances; the sum is above it by {gap:.1g} of itself at most.",
        RuntimeWarning,
    )
    return point


class _PointOfMean:
    """A mean of S rows, with its distances from them, and their directions.

    All vectors are known by their coordinates: row i is `size_i` times a vector of
    length 1, and `cosine` are the inner products of these.

    Attributes:
        weight: [S] the weights of the rows, which sum to 1.
        size: [S] the rows' lengths.
        cosine: [S, S] the rows' cosines.
        away: [S, S] row i has the coordinates of the point minus row i.
        distance: [S] the distances from the rows.
        inverse: [S] one over these distances; 0 for rows that coincide with the point.
        is_here: bool [S]: True for rows that coincide with the point.
        directions: [S, S] the inner products of unit vectors from the rows to the
            point; 0 for rows that coincide with it.
    """

    def __init__(self, weight: Tensor, size: Tensor, cosine: Tensor) -> None:
        self.weight = weight
        self.size = size
        self.cosine = cosine
        self.away = (weight - torch.eye(len(weight)).to(weight)) * size
        inner = self.away @ cosine @ self.away.T
        self.distance = inner.diagonal().clamp(min=0).sqrt()
        self.is_here = self.distance <= COINCIDENT
        self.inverse = torch.where(self.is_here, 0.0, 1 / self.distance)
        self.directions = self.inverse[:, None] * inner * self.inverse

    def move(self, weight: Tensor) -> _PointOfMean:
        """The point of other weights [S]."""
        return _PointOfMean(weight, self.size, self.cosine)

    def pull(self) -> float:
        """The length of the sum of unit vectors to the rows that are elsewhere."""
        return float(self.directions.sum().clamp(min=0).sqrt())

    def excess(self) -> float:
        """The part of the pull that the rows at the point itself cannot hold.

        It is 0 at the geometric median, and the slope of the sum of distances at other
        points.
        """
        return max(0.0, self.pull() - int(self.is_here.sum()))

    def rise(self, other: _PointOfMean) -> float:
        """By how much the sum of distances at `other` is above that here.

        `|a| - |b| = (a - b) . (a + b) / (|a| + |b|)` is exact where a distance is so
        long that its difference is lost.
        """
        step = (other.weight - self.weight) * self.size
        product = (self.away + other.away) @ (self.cosine @ step)
        both = self.distance + other.distance
        return float((product / both.clamp(min=COINCIDENT)).sum())


def _better_point(point: _PointOfMean) -> _PointOfMean | None:
    """The point of a smaller sum of distances that a step goes to; None for none.

    It is the best of:

    - Weiszfeld's point, whose weights are one over the distances. From a row that is
      not the geometric median it goes only a part of the way (Vardi and Zhang 2000).
      It always has a smaller sum, but may come on slowly.
    - Newton's point, or one at a quarter or a sixteenth of the way to it, the first
      that has a smaller sum.
    - the nearest row.
    """
    share_here = min(1.0, int(point.is_here.sum()) / max(point.pull(), 1e-300))
    inverse = point.inverse
    elsewhere = inverse / inverse.sum()
    weiszfeld = (1 - share_here) * elsewhere + share_here * point.weight
    nearest = torch.zeros_like(point.weight)
    nearest[point.distance.argmin()] = 1.0
    candidates = [point.move(weiszfeld), point.move(nearest)]
    # Newton's equation for a step that is a sum of the unit vectors.
    count = len(inverse)
    matrix = inverse.sum() * torch.eye(count, dtype=torch.float64)
    matrix -= inverse[:, None] * point.directions
    ones = torch.ones(count, 1, dtype=torch.float64)
    # gelsd: the shortest solution where the system is singular
    factors = torch.linalg.lstsq(matrix, ones, driver="gelsd").solution[:, 0]
    toward = factors * inverse - point.weight * (factors * inverse).sum()
    for part in (1.0, 0.25, 0.0625):
        candidate = point.move(point.weight + part * toward)
        if point.rise(candidate) < 0:
            candidates.append(candidate)
            break
    best = min(candidates, key=point.rise)
    return best if point.rise(best) < 0 else None
