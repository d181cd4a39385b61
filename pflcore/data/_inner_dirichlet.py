"""The partition `inner_dirichlet`: a random mix of classes for each client.

Symbols: N clients (`n` in code), C classes; client i has n_i samples, and draws their
classes with the probabilities p_i.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from pflcore.check import NonNegativeFloat, PositiveFloat, checked, require
from pflcore.data._deal import Random, class_positions, deal, proportional_counts
from pflcore.data._dirichlet import Floats, draw_shares
from pflcore.data._pools import Labels, Partition
from pflcore.data._proportions import Exact, Sizes, size_weights
from pflcore.data._ragged import Ints, Ragged


@checked
def inner_dirichlet(
    labels: Labels,
    rng: Random,
    *,
    alpha: PositiveFloat = 0.5,
    sizes: Sizes = None,
    sigma: NonNegativeFloat = 0.0,
) -> Partition:
    """Sizes of clients, and apart from them each client's classes from Dir(alpha).

    Acar et al. 2021 (FedDyn), as FedLab's and PFLlib's partitions of this kind: client
    i has the probabilities p_i ~ Dir(alpha) of the C classes. One sample after the
    other is dealt: to a client that still has room, of a class that it draws by p_i
    among the classes of which samples are left. So every sample has one client, and
    clients' sizes are exactly those that were asked for. The clients that are served
    last take what is left, so their classes differ from p_i. The test pool is dealt by
    the same p_i and proportions of sizes. (Here a client is drawn in proportion to its
    room, there with equal probabilities.)

    Example: with a small alpha every client has mostly one class, and all clients have
    the same number of samples.

    Args:
        alpha: concentration; the smaller, the fewer classes a client has
        sizes: A, B or C of the WAFFLE paper's Table 4, or proportions of the clients'
            sizes, which are repeated where there are more clients; equal if not said
        sigma: sizes are multiplied by exp(sigma z), z normal; 0 leaves them as they are
    """
    n = labels.n
    for split, y in labels.pools.items():
        expected = f"at most as many as the {len(y)} {split} samples"
        require(n <= len(y), "n", expected, n)
    weights = size_weights(sizes, n)
    if sigma:
        z = rng.normal(size=n)
        factors = np.exp(sigma * (z - z.max()))
        weights = weights * np.array([Fraction(float(f)) for f in factors], object)
    priors = np.stack([draw_shares(labels.classes, alpha, rng) for _ in range(n)])

    def cut(y: Ints, split: str) -> Ragged:
        room = _room_of_clients(len(y), weights)
        counts = _deal_one_by_one(priors, room, labels.class_totals(y), rng)
        return deal(class_positions(y, labels.classes, rng), counts)

    return Partition(labels.map_pools(cut))


def _room_of_clients(total: int, weights: Exact) -> Ints:
    """The number of samples of each client, at least one, [N]."""
    room: Ints = proportional_counts(np.array([total]), weights[None])[0]
    while room.min() == 0:
        room[room.argmax()] -= 1
        room[room.argmin()] += 1
    return room


def _deal_one_by_one(
    priors: Floats,  # [N, C]
    room: Ints,  # [N]
    totals: Ints,  # [C]
    rng: Random,
) -> Ints:  # [C, N]
    """Numbers of samples, which sum to the classes' totals and the clients' room."""
    n, classes = priors.shape
    order = rng.permutation(np.repeat(np.arange(n), room))
    # The largest draw times the sum of a row must not be rounded to that sum.
    draws = rng.random_sample(len(order)) * (1 - 2**-50)
    left = totals.copy()
    cumulative = _cumulative_of_left(priors, left)
    counts = np.zeros((classes, n), dtype=np.int64)
    for client, draw in zip(order.tolist(), draws.tolist(), strict=True):
        row = cumulative[client]
        label = int(row.searchsorted(draw * row[-1], side="right"))
        counts[label, client] += 1
        left[label] -= 1
        if left[label] == 0 and left.any():
            cumulative = _cumulative_of_left(priors, left)
    return counts


def _cumulative_of_left(
    priors: Floats,  # [N, C]
    left: Ints,  # [C]
) -> Floats:  # [N, C]
    """Cumulative probabilities of the classes of which samples are left.

    A client that gives none of them a probability draws in proportion to what is left.
    """
    p = priors * (left > 0)
    has_none = p.sum(1) < np.finfo(np.float64).tiny
    p[has_none] = left / left.sum()
    sums: Floats = np.cumsum(p, axis=1)
    return sums
