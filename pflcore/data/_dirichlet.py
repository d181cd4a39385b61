"""The partition `dirichlet`: every class is divided in random proportions.

Proportions are drawn until every client has enough samples. Where no draw gives them,
single samples move from large clients to small ones.

Symbols: N clients (`n` in code), C classes; n_c is a pool's number of samples of class
c; p are a class's proportions [N], or those of all classes [C, N].
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pflcore.check import (
    OpenUnitFloat,
    PositiveFloat,
    PositiveInt,
    checked,
    require,
)
from pflcore.data._deal import Random, class_positions, deal, split_lists
from pflcore.data._pools import Labels, Partition
from pflcore.data._ragged import Ints, Ragged

Floats = NDArray[np.float64]
MAX_DRAWS = 100  # of proportions, until every client has enough samples
TRAIN_FRACTION = 0.8  # of a client's samples, in the mode "pooled_split"


@checked
def dirichlet(
    labels: Labels,
    rng: Random,
    *,
    alpha: PositiveFloat = 0.5,
    mode: Literal["same_proportions", "pooled_split"] = "same_proportions",
    balance: bool = False,
    min_size: PositiveInt | None = None,
    train_fraction: OpenUnitFloat = TRAIN_FRACTION,
) -> Partition:
    """Every class divided by proportions p [N] that are drawn from Dir(alpha).

    The n_c samples of class c are cut at floor(cumsum(p) n_c).

    In the mode "same_proportions" the test pool is cut by the same p, and every client
    gets at least one test sample. In "pooled_split" (FedDWA's released code, practical
    setting 2) both pools are cut as one, and each client's samples are then split into
    training and test samples.

    Proportions are drawn until every client has `min_size` samples, at most 100 times.
    Then the draw with the largest smallest client is kept, and single samples move from
    the largest client to the smallest. The facts say min_size, the number of draws, and
    how many samples moved.

    Example: two classes have 5 samples each, and two clients the proportions (0.8, 0.2)
    of class 0 and (0.4, 0.6) of class 1. Client 0 gets 4 samples of class 0 and 2 of
    class 1, and client 1 gets 1 and 3.

    Args:
        alpha: concentration; the smaller, the fewer classes a client has
        mode: same_proportions cuts the test pool as the training pool; pooled_split
            cuts both as one and then each client's share in two
        balance: clients that hold total / N samples get none of the next class
        min_size: fewest samples of a client; 20 if not said, or half of the mean share
            of a client where that is less
        train_fraction: of a client's samples for training, in pooled_split
    """
    pooled = mode == "pooled_split"
    fits = pooled or train_fraction == TRAIN_FRACTION
    expected = f"{TRAIN_FRACTION} outside pooled_split"
    require(fits, "train_fraction", expected, train_fraction)
    if pooled:
        joined = np.concatenate(list(labels.pools.values()))
        labels = labels._replace(pools={"train": joined})
    minimum = _minimum_size(labels, min_size, pooled)

    p, draws = _draw_until_enough(labels, alpha, balance, minimum, rng)
    counts = {}
    for split, y in labels.pools.items():
        counts[split] = sample_counts(p, labels.class_totals(y))
    moved = _raise_to_minimum(counts["train"], minimum)
    if "test" in counts:
        moved += _raise_to_minimum(counts["test"], 1, like=counts["train"])

    def cut(y: Ints, split: str) -> Ragged:
        return deal(class_positions(y, labels.classes, rng), counts[split])

    index = labels.map_pools(cut)
    if pooled:
        train, test = _split_each_client(index["train"], train_fraction, rng)
        index = {"train": train, "test": test}
    facts = {"min_size": minimum, "draws": draws, "moved samples": moved}
    return Partition(index, facts=facts)


def _minimum_size(labels: Labels, min_size: int | None, pooled: bool) -> int:
    """The fewest samples that a client must have, at least one.

    They are at least two where the pools are joined. Raises ValueError where the
    training pool has fewer for all clients, or where the test pool has fewer samples
    than there are clients.
    """
    n = labels.n
    samples = len(labels.train)
    if min_size is None:
        min_size = min(20, samples // (2 * n))
    # Of a client's pooled samples, one is for training and one for testing.
    least = 2 if pooled else 1
    minimum = max(min_size, least)
    expected = f"enough for {n} of {samples} samples"
    require(minimum * n <= samples, "min_size", expected, minimum)
    if "test" in labels.pools:
        tests = len(labels.pools["test"])
        require(n <= tests, "n", f"at most as many as the {tests} test samples", n)
    return minimum


def _split_each_client(
    lists: Ragged, train_fraction: float, rng: Random
) -> list[Ragged]:
    """Training and test samples, at least one of each for every client."""

    def train_size(samples: int) -> int:
        # In floating point 0.29 * 100 is 28.999999999999996, which must count 29.
        wanted = int(train_fraction * samples + 1e-9)
        return min(max(1, wanted), samples - 1)

    return split_lists(lists, train_size, rng)


def _draw_until_enough(
    labels: Labels, alpha: float, balance: bool, minimum: int, rng: Random
) -> tuple[Floats, int]:  # [C, N], number of draws
    """Proportions that give every client enough samples, and the number of draws.

    Enough are `minimum` training samples and one test sample, where there is a test
    pool. If none of `MAX_DRAWS` draws gives them, the one with the largest smallest
    client is kept.
    """
    totals = {split: labels.class_totals(y) for split, y in labels.pools.items()}
    best: Floats | None = None
    best_smallest = 0
    draws = 0
    while draws < MAX_DRAWS and best_smallest < minimum:
        draws += 1
        p = _draw_proportions(totals["train"], labels.n, alpha, balance, rng)
        smallest = _smallest_client(p, totals["train"])
        if "test" in totals and _smallest_client(p, totals["test"]) == 0:
            # The draw is not enough, however large the training parts are.
            smallest = min(smallest, minimum - 1)
        if best is None or smallest > best_smallest:
            best = p
            best_smallest = smallest
    assert best is not None  # `minimum` is at least 1, so there is a first draw
    return best, draws


def _smallest_client(p: Floats, totals: Ints) -> int:
    """The number of samples of the client that gets the fewest."""
    return int(sample_counts(p, totals).sum(0).min())


def sample_counts(
    p: Floats,  # [C, N]
    totals: Ints,  # [C]
) -> Ints:  # [C, N]
    """Numbers of samples; every row sums to its class's total."""
    row_totals = totals[:, None]  # [C, 1]
    cumulative = np.cumsum(p, axis=1)
    # Sums of floats can miss 1, so the last end is the total itself.
    ends = np.floor(cumulative[:, :-1] * row_totals).astype(np.int64)
    ends = ends.clip(0, row_totals)
    return np.diff(ends, prepend=0, append=row_totals)


def _draw_proportions(
    totals: Ints,  # [C]
    n: int,
    alpha: float,
    balance: bool,
    rng: Random,
) -> Floats:  # [C, N]
    """One draw of proportions for every class.

    With `balance`, a client whose samples of the earlier classes reach the mean share
    of a client gets none of the class.
    """
    sizes = np.zeros(n)
    rows = []
    for total in totals:
        p = draw_shares(n, alpha, rng)
        if balance:
            p = _without_full_clients(p, is_open=sizes < totals.sum() / n)
        rows.append(p)
        sizes += sample_counts(p[None], np.array([total]))[0]
    return np.stack(rows)


def draw_shares(count: int, alpha: float, rng: Random) -> Floats:
    """Proportions [count] from Dir(alpha), which sum to 1."""
    p: Floats = rng.dirichlet(np.full(count, alpha))
    # All numbers of a draw can underflow where alpha is small.
    if not np.isfinite(p).all() or p.sum() == 0:
        p = np.eye(count)[rng.randint(count)]
    return p


def _without_full_clients(
    p: Floats,  # [N]
    is_open: NDArray[np.bool_],  # [N]
) -> Floats:  # [N]
    """The proportions of open clients, which sum to 1.

    They are equal where p is 0 for every open client, or no client is open.
    """
    kept = p * is_open
    if kept.sum() == 0:
        kept = is_open.astype(np.float64)
    if kept.sum() == 0:
        kept = np.ones(len(p))
    normalized: Floats = kept / kept.sum()
    return normalized


def _raise_to_minimum(counts: Ints, minimum: int, like: Ints | None = None) -> int:
    """Moves samples, in place, until every client has `minimum`; returns how many.

    Args:
        counts: [C, N]. The largest client gives a sample of its most frequent class.
        like: [C, N]. The sample's class is then the one of which the receiver has most
            in `like`, so that a client is tested on what it trains on.
    """
    moved = 0
    while True:
        sizes = counts.sum(0)
        receiver = int(sizes.argmin())
        if sizes[receiver] >= minimum:
            return moved
        available = np.where(sizes > minimum, counts, 0)
        if like is None:
            giver = int(sizes.argmax())
            label = int(available[:, giver].argmax())
        else:
            has_samples = available.sum(1) > 0
            label = int(np.where(has_samples, like[:, receiver], -1).argmax())
            giver = int(available[label].argmax())
        counts[label, giver] -= 1
        counts[label, receiver] += 1
        moved += 1
