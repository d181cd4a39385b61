"""Partitions of labelled samples among N clients.

A rule is a function `rule(labels, rng, *, options) -> Partition`. `partition` checks
its arguments, seeds `rng`, and calls the rule that has the name.

Symbols and words:

- N clients (`n` in code) and C classes; n_c is a pool's number of samples of class c.
- A pool is one split's samples: "train", and "test" where there are test labels.
- A sample's index counts through all pools, cat(labels, test_labels). Its position
  counts within its own pool.
- A rule's `group` [N] is the group of clients that each client belongs to.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pflcore.check import (
    NonNegativeInt,
    OpenUnitFloat,
    PositiveFloat,
    PositiveInt,
    Seed32,
    UnitFloat,
    checked,
    reject,
    require,
)
from pflcore.data._meaning import ReaderOptions, interpret_targets
from pflcore.data._ragged import (
    Ints,
    Ragged,
    Random,
    class_positions,
    deal,
    deal_shards,
    even_parts,
    interleave_classes,
    proportional_counts,
    seeded_stream,
    split_lists,
)

Floats = NDArray[np.float64]
# Whole numbers and fractions as Python's objects: products and sums of them are exact
# and never overflow.
Exact = NDArray[np.object_]
# The first client's shares of the 10 classes, in any unit (WAFFLE: Beaussart et al.
# 2021, Table 2). The next client's shares are these, shifted by one class.
WAFFLE_BASES: dict[str, list[int]] = {
    "A": [1] * 10,
    "B": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    "C": [0, 0, 0, 1, 2, 4, 2, 1, 0, 0],
}
# The clients' sizes in hundredths of all samples (Beaussart et al. 2021, Table 4).
WAFFLE_SIZES: dict[str, list[int]] = {
    "A": [10] * 10,
    "B": [21, 6, 11, 6, 11, 6, 16, 6, 11, 6],
    "C": [10, 10, 10, 10, 20, 5, 5, 10, 10, 10],
}
Sizes = Literal["A", "B", "C"] | Sequence[PositiveFloat] | None
MAX_DRAWS = 100  # of Dirichlet proportions, until every client has enough samples
# The minority's classes (WAFFLe: Hao et al. 2020, appendix B).
MINORITY_CLASSES = {
    "mnist": (0, 2, 4, 6, 8),  # even digits
    "fashion_mnist": (0, 5, 6, 7, 9),  # footwear and shirts, without the pullover
    "cifar10": (0, 1, 8, 9),  # vehicles
}
TRAIN_FRACTION = 0.8  # of a client's samples, where a rule splits them


@dataclass(frozen=True)
class Partition:
    """The indices of each client's samples, by split."""

    index: Mapping[str, Sequence[Tensor]]  # split -> N lists
    relabel: Tensor | None = None  # [N, C] label that a client sees for each class
    group: Tensor | None = None  # [N], where the rule has groups of clients
    # what was counted on the way
    facts: Mapping[str, Any] = field(default_factory=dict)
    # samples of each pool
    pool_sizes: Mapping[str, int] = field(default_factory=dict)


class Labels(NamedTuple):
    """The labels of each pool, and the number of clients."""

    pools: dict[str, Ints]  # split -> the labels of its samples
    n: int  # clients
    classes: int

    @property
    def train(self) -> Ints:
        return self.pools["train"]

    def class_totals(self, y: Ints) -> Ints:
        """Number of samples of each class, [C]."""
        return np.bincount(y, minlength=self.classes)

    def map_pools(self, cut: Callable[[Ints, str], Ragged]) -> dict[str, Ragged]:
        """N lists of indices for each pool.

        Args:
            cut: makes N lists of positions of a pool's labels and the split's name
        """
        index = {}
        begin = 0
        for split, y in self.pools.items():
            positions = cut(y, split)
            index[split] = Ragged(positions.flat + begin, positions.size)
            begin += len(y)
        return index


@checked
def waffle(
    labels: Labels,
    rng: Random,
    *,
    base: Literal["A", "B", "C"] = "A",
    sizes: Sizes = None,
    shuffle: bool = True,
    shift_seed: Seed32 | None = None,
) -> Partition:
    """Distributions A (uniform), B (four labels) and C (a peak) of WAFFLE.

    Beaussart et al. 2021, section 5.1. A client's share of a class shifts by one class
    from client to client: client i gets of class t the weight `base[(t + i) mod C]`,
    times its entry of `sizes`. A class is divided in proportion to these weights. So
    no sample has two clients, and every sample has one, but for a class whose weights
    are all 0. `base` is a row of the paper's Table 2, which has 10 classes. For another
    number of classes there is only A, whose weights are equal.

    Test samples are never shuffled: every seed gives the same test sets.

    Example: in B with 10 clients, client 0 gets a quarter of each of the classes 0, 1,
    2 and 3, and client 1 of the classes 9, 0, 1 and 2.

    Args:
        sizes: A, B or C of the paper's Table 4, or proportions of the clients' sizes,
            cycled
        shuffle: shuffle the training samples of a class by the seed first
        shift_seed: permute each client's labels by this seed (A* and B*)
    """
    classes = labels.classes
    n = labels.n
    require(
        base == "A" or classes == 10, "partition", f"10 classes for {base}", classes
    )
    first_client = np.array(WAFFLE_BASES[base], dtype=object)
    if classes != 10:
        first_client = np.array([1] * classes, dtype=object)
    shifted = np.add.outer(np.arange(classes), np.arange(n)) % classes  # [C, N]
    weights = first_client[shifted] * _size_weights(sizes, n)

    def cut(y: Ints, split: str) -> Ragged:
        order = rng if shuffle and split == "train" else None
        rows = class_positions(y, classes, order)
        return deal(rows, proportional_counts(labels.class_totals(y), weights))

    unused = np.flatnonzero(weights.sum(1) == 0).tolist()
    relabel = None if shift_seed is None else concept_shift(n, classes, shift_seed)
    facts = {"unused classes": unused} if unused else {}
    return Partition(labels.map_pools(cut), relabel, facts=facts)


def concept_shift(n: int, classes: int, shift_seed: int = 0) -> Tensor:
    """A random permutation of the labels for each client, int64 [N, C].

    Client 0 (Alice in the paper) keeps its labels. Client i's permutation depends only
    on `shift_seed` and i.
    """
    rng = seeded_stream(shift_seed, "shift")
    rows = [np.arange(classes)]
    for _ in range(n - 1):
        rows.append(rng.permutation(classes))
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@checked
def iid(labels: Labels, rng: Random, *, sizes: Sizes = None) -> Partition:
    """The shuffled pool in N parts, equal (to one sample) or in proportions.

    Example: 10 samples among 4 clients are 2, 3, 2 and 3 samples.

    Args:
        sizes: A, B or C of the WAFFLE paper's Table 4, or proportions of the clients'
            sizes, cycled
    """
    weights = _size_weights(sizes, labels.n)[None]

    def cut(y: Ints, split: str) -> Ragged:
        order = rng.permutation(len(y))
        counts = proportional_counts(np.array([len(y)]), weights)
        return deal([order], counts)

    return Partition(labels.map_pools(cut))


def _size_weights(sizes: Sizes, n: int) -> Exact:
    """Exact proportions [N] of the clients' sizes: 0.1 is a tenth, not its float."""
    values: list[Any] = [1]
    if isinstance(sizes, str):
        values = list(WAFFLE_SIZES[sizes])
    elif sizes is not None:
        values = list(sizes)
    require(len(values) > 0, "sizes", "at least one proportion", values)
    exact = [v if isinstance(v, int) else Fraction(str(v)) for v in values]
    return np.array(exact, dtype=object)[np.arange(n) % len(exact)]


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

    The n_c samples of class c are cut at floor(cumsum(p) n_c). For example, p = (0.5,
    0.3, 0.2) cuts 10 samples into 5, 3 and 2.

    In the mode "same_proportions" the test pool is cut by the same p, and every client
    gets at least one test sample. In "pooled_split" (FedDWA's released code, practical
    setting 2) both pools are cut as one.

    Proportions are drawn until every client has `min_size` samples, at most 100 times.
    Then the draw with the largest smallest client is kept, and single samples move from
    the largest client to the smallest. The facts say min_size, the number of draws, and
    how many samples moved.

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

    p, draws = _draw_proportions(labels, alpha, balance, minimum, rng)
    counts = {
        split: sample_counts(p, labels.class_totals(y))
        for split, y in labels.pools.items()
    }
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
    """Fewest samples of a client.

    Raises ValueError where the pools are too small for that.
    """
    n = labels.n
    samples = len(labels.train)
    if min_size is None:
        min_size = min(20, samples // (2 * n))
    # Of a client's pooled samples, one is for training and one for testing.
    minimum = max(min_size, 2 if pooled else 1)
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
        wanted = int(
            train_fraction * samples + 1e-9
        )  # 0.29 * 100 is 28.999999999999996
        return min(max(1, wanted), samples - 1)

    return split_lists(lists, train_size, rng)


def _draw_proportions(
    labels: Labels, alpha: float, balance: bool, minimum: int, rng: Random
) -> tuple[Floats, int]:  # [C, N], number of draws
    """Proportions that give every client enough samples.

    Enough are `minimum` training samples and one test sample, where there is a test
    pool. If none of `MAX_DRAWS` draws does, the one with the largest smallest client is
    kept.
    """
    totals = {split: labels.class_totals(y) for split, y in labels.pools.items()}
    best = np.zeros((0, labels.n))
    best_smallest = -1
    draws = 0
    while draws < MAX_DRAWS and best_smallest < minimum:
        draws += 1
        p = _proportions(totals["train"], labels.n, alpha, balance, rng)
        smallest = int(sample_counts(p, totals["train"]).sum(0).min())
        if "test" in totals:
            fewest_tests = int(sample_counts(p, totals["test"]).sum(0).min())
            if fewest_tests == 0:  # not enough, however large the training parts are
                smallest = min(smallest, minimum - 1)
        if smallest > best_smallest:
            best = p
            best_smallest = smallest
    return best, draws


def sample_counts(
    p: Floats,  # [C, N]
    totals: Ints,  # [C]
) -> Ints:  # [C, N]
    """Numbers of samples; every row sums to its class's total."""
    ends = np.floor(np.cumsum(p, axis=1)[:, :-1] * totals[:, None]).astype(np.int64)
    ends = ends.clip(0, totals[:, None])
    return np.diff(ends, prepend=0, append=totals[:, None])


def _proportions(
    totals: Ints, n: int, alpha: float, balance: bool, rng: Random
) -> Floats:
    """One draw of proportions [C, N]."""
    sizes = np.zeros(n)
    rows = []
    for total in totals:
        p = rng.dirichlet(np.full(n, alpha))
        # All numbers of a draw can underflow where alpha is small.
        if not np.isfinite(p).all() or p.sum() == 0:
            p = np.eye(n)[rng.randint(n)]
        if balance:
            p = _without_full_clients(p, is_open=sizes < totals.sum() / n)
        rows.append(p)
        sizes += sample_counts(p[None], np.array([total]))[0]
    return np.stack(rows)


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


@checked
def pathological(
    labels: Labels,
    rng: Random,
    *,
    mode: Literal["shards", "exact_k"] = "shards",
    k: PositiveInt = 2,
) -> Partition:
    """A few classes for each client.

    In the mode "shards" (FedDWA's released code) the training pool, sorted by label, is
    cut into k N equal shards, and k shards go to each client. Its test set is made of
    the same shards of the sorted test pool.

    In the mode "exact_k" (the paper's words) each client owns k distinct classes. The
    numbers of a class's owners differ by 1 at most. Every client takes q samples of
    each class that it owns; q is the largest number that every class can give to all
    its owners. The other samples are unused, and the facts count them.

    Example: two clients, k = 1, and 5 samples of class 0 and 3 of class 1. "shards"
    gives 4 samples to each client, so one of them has both classes. "exact_k" gives 3
    samples of one class to each, and 2 samples are unused.

    Args:
        mode: shards deals k shards of the sorted pool to a client; exact_k gives it k
            classes
        k: shards or classes of a client
    """
    if mode == "exact_k":
        return _deal_exact_classes(labels, k, rng)
    shards = labels.n * k
    samples = len(labels.train)
    require(shards <= samples, "k", f"shards of at least one of {samples} samples", k)
    shards_of_client = rng.permutation(shards).reshape(labels.n, k)

    def cut(y: Ints, split: str) -> Ragged:
        by_label = np.concatenate(class_positions(y, labels.classes, rng))
        return deal_shards(by_label, even_parts(len(y), shards), shards_of_client)

    return Partition(labels.map_pools(cut))


def _deal_exact_classes(labels: Labels, k: int, rng: Random) -> Partition:
    """The mode "exact_k" of `pathological`."""
    require(k <= labels.classes, "k", f"at most the {labels.classes} classes", k)
    owned = _assign_classes(labels.n, k, labels.classes, rng)

    def cut(y: Ints, split: str) -> Ragged:
        return _deal_equally(labels, y, split, owned, rng)

    index = labels.map_pools(cut)
    facts = {}
    for split, y in labels.pools.items():
        unused = len(y) - len(index[split].flat)
        if unused:
            facts[f"unused {split} samples"] = unused
    return Partition(index, facts=facts)


def _assign_classes(n: int, k: int, classes: int, rng: Random) -> Ints:
    """Classes of each client, [C, N]: 1 where it owns the class, else 0.

    One client after the other takes the k classes with the fewest owners so far, in
    random order where they have equally many.
    """
    owned = np.zeros((classes, n), dtype=np.int64)
    for i in range(n):
        owners = owned.sum(1)
        random_order = rng.permutation(classes)
        fewest_first = np.lexsort((random_order, owners))  # by its last key first
        owned[fewest_first[:k], i] = 1
    return owned


def _deal_equally(
    labels: Labels,
    y: Ints,
    split: str,
    owned: Ints,  # [C, N]
    rng: Random,
) -> Ragged:
    """The same number of samples of each owned class for every client."""
    classes = np.flatnonzero(owned.any(1))
    samples = labels.class_totals(y)[classes]
    owners = owned.sum(1)[classes]
    samples_per_owner = samples // owners
    poorest = samples_per_owner.argmin()
    quota = samples_per_owner[poorest]
    expected = (
        f"a {split} sample of class {classes[poorest]} for each of its "
        f"{owners[poorest]} owners"
    )
    require(quota > 0, "k and n", expected, int(samples[poorest]))
    return deal(class_positions(y, labels.classes, rng), quota * owned)


@checked
def practical1(
    labels: Labels,
    rng: Random,
    *,
    groups: PositiveInt = 4,
    dominant: PositiveInt | None = None,
    share: UnitFloat = 0.8,
) -> Partition:
    """Groups of clients with dominant classes each, and a common part of all classes.

    FedDWA's practical setting 1. Every client takes floor(total / N) samples: `share`
    of them from its group's dominant classes, as equally as the supply allows, the rest
    from all classes. Where the dominant classes run dry, samples of other classes take
    their place, and the facts count them. The partition has a `group` [N].

    Group j of G owns the q = `dominant` classes floor(j C / G) ... + q - 1 (mod C). For
    example, 10 classes, 4 groups and q = 3 make the groups' classes 0 to 2, 2 to 4, 5
    to 7, and 7 to 9.

    Args:
        groups: groups of clients, each with dominant classes of its own
        dominant: dominant classes of a group; 3 if not said, or a fifth of more than 10
            classes
        share: share of a client's samples that come from its dominant classes
    """
    n = labels.n
    classes = labels.classes
    require(groups <= n, "groups", f"at most the {n} clients", groups)
    expected = f"at most the {classes} classes"
    require((dominant or 1) <= classes, "dominant", expected, dominant)
    if dominant is None:
        dominant = min(3, classes) if classes <= 10 else max(1, classes // 5)
    group = np.arange(n) * groups // n
    owned = []
    for j in group.tolist():
        first = j * classes // groups
        owned.append([(first + d) % classes for d in range(dominant)])
    facts = {}

    def cut(y: Ints, split: str) -> Ragged:
        lists, replaced = _deal_dominant(labels, y, owned, share, rng)
        if replaced:
            facts[f"{split} samples of other classes"] = replaced
        return lists

    index = labels.map_pools(cut)
    return Partition(index, group=torch.from_numpy(group), facts=facts)


def _deal_dominant(
    labels: Labels,
    y: Ints,
    owned: list[list[int]],  # the dominant classes of each client
    share: float,
    rng: Random,
) -> tuple[Ragged, int]:
    """Lists of equal length, and how many samples replace missing dominant ones."""
    n = len(owned)
    size = len(y) // n
    dominant = int(share * size + 0.5)
    rows = class_positions(y, labels.classes, rng)
    # The common part is taken first, in the pool's proportions of classes, so that it
    # finds all of them.
    common = interleave_classes(rows)[: n * (size - dominant)]
    common = rng.permutation(common).reshape(n, size - dominant)
    supply = [positions[~np.isin(positions, common)].tolist() for positions in rows]
    lists = _take_in_turns(supply, owned, dominant)
    left = rng.permutation(list(itertools.chain(*supply))).tolist()
    missing = n * dominant - sum(map(len, lists))
    for samples in lists:
        while len(samples) < dominant:
            samples.append(left.pop())
    from_dominant = np.array(lists, dtype=np.int64).reshape(n, dominant)
    dealt = np.concatenate([from_dominant, common], axis=1)
    return Ragged(torch.from_numpy(dealt.ravel()), torch.full((n,), size)), missing


def _take_in_turns(
    supply: list[list[int]],  # indices of each class, shuffled; those taken are removed
    owned: list[list[int]],  # the classes of each client
    count: int,
) -> list[list[int]]:
    """Up to `count` samples of its classes for each client.

    Each client takes one sample in its turn, so that clients share a scarce class
    fairly. It takes the class of which it has taken the fewest samples so far; of
    several such classes, the one with the largest supply.
    """
    lists: list[list[int]] = [[] for _ in owned]
    counts_taken = [[0] * len(supply) for _ in owned]
    for _ in range(count):
        for samples, counts, classes in zip(lists, counts_taken, owned, strict=True):
            available = [label for label in classes if supply[label]]
            if available:
                label = min(available, key=lambda c: (counts[c], -len(supply[c])))
                samples.append(supply[label].pop())
                counts[label] += 1
    return lists


class ClientGroup(NamedTuple):
    """Some clients, and the classes that they have samples of."""

    classes: Sequence[int]
    n: int  # clients


@checked
def unimodal(
    labels: Labels,
    rng: Random,
    *,
    z: PositiveInt = 2,
    test: OpenUnitFloat = 0.2,
    train: PositiveInt | None = None,
) -> Partition:
    """Shards of single classes, z of them for each client, at random.

    WAFFLe (Hao et al. 2020). Each class is cut into even shards, N z in all. Only the
    training pool is cut; a test pool is not used. The facts count unused samples.

    Example: 10 classes, 10 clients and z = 2 make 20 shards, 2 of each class.

    Args:
        z: shards of a client
        test: share of a client's samples that is held out
        train: use so many of a client's other samples only; the test sets stay
    """
    everyone = ClientGroup(range(labels.classes), labels.n)
    return _deal_groups(labels, [everyone], z, test, train, rng)


@checked
def multimodal(
    labels: Labels,
    rng: Random,
    *,
    z: PositiveInt = 2,
    minority: Literal["mnist", "fashion_mnist", "cifar10"]
    | Sequence[NonNegativeInt] = "mnist",
    minority_clients: PositiveInt = 20,
    test: OpenUnitFloat = 0.2,
    train: PositiveInt | None = None,
) -> Partition:
    """Two groups of clients that have no class in common, each dealt as by `unimodal`.

    WAFFLe (Hao et al. 2020). All shards are of one size, the largest that every class
    can give. The partition has a `group` [N]: 1 for the minority.

    Example: on MNIST with 120 clients and z = 2, the 100 clients of the majority share
    200 shards of the odd digits, and the 20 of the minority 40 shards of the even ones.

    Args:
        z: shards of a client
        minority: classes of the minority, or the paper's for a data set by its name
        minority_clients: clients of the minority, the last ones
        test: share of a client's samples that is held out
        train: use so many of a client's other samples only; the test sets stay
    """
    n = labels.n
    chosen = MINORITY_CLASSES[minority] if isinstance(minority, str) else minority
    minority_classes = sorted(set(chosen))
    majority_classes = [c for c in range(labels.classes) if c not in minority_classes]
    fits = (
        minority_classes and majority_classes and max(minority_classes) < labels.classes
    )
    expected = f"some of the classes 0..{labels.classes - 1}, and not all"
    require(fits, "minority", expected, minority_classes)
    expected = f"fewer than the {n} clients"
    require(minority_clients < n, "minority_clients", expected, minority_clients)
    groups = [
        ClientGroup(majority_classes, n - minority_clients),
        ClientGroup(minority_classes, minority_clients),
    ]
    return _deal_groups(labels, groups, z, test, train, rng)


def _deal_groups(
    labels: Labels,
    groups: Sequence[ClientGroup],  # whose classes are disjoint
    z: int,
    test: float,
    train: int | None,
    rng: Random,
) -> Partition:
    """Partition of the training pool in which each client has z shards of its group.

    A group of n clients has n z shards, as many of each of its classes, to one. A
    single group uses every sample. Several groups get shards of one size.
    """
    totals = labels.class_totals(labels.train)
    shards = np.zeros(labels.classes, dtype=np.int64)
    for group in groups:
        shards[group.classes] = even_parts(group.n * z, len(group.classes))
    expected = "so few clients that each shard has a sample"
    require((totals >= shards).all(), "n", expected, labels.n)

    shard_size = None
    if len(groups) > 1:
        has_shards = shards > 0
        shard_size = int((totals[has_shards] // shards[has_shards]).min())
    parts = [_deal_group(labels, group, shards, shard_size, rng) for group in groups]
    lists = Ragged(
        torch.cat([part.flat for part in parts]),
        torch.cat([part.size for part in parts]),
    )

    def test_size(samples: int) -> int:
        return max(1, int(test * samples + 0.5))

    test_lists, train_lists = split_lists(lists, test_size, rng)
    if train is not None:
        train_lists = Ragged.from_lists([rows[:train] for rows in train_lists])
    group_of_client = None
    if len(groups) > 1:
        sizes = torch.tensor([group.n for group in groups])
        group_of_client = torch.repeat_interleave(sizes)
    unused = len(labels.train) - len(lists.flat)
    facts = {"unused train samples": unused} if unused else {}
    index = {"train": train_lists, "test": test_lists}
    return Partition(index, group=group_of_client, facts=facts)


def _deal_group(
    labels: Labels,
    group: ClientGroup,
    shards: Ints,  # [C] number of shards of each class
    shard_size: int | None,  # None: every sample of a class is in one of its shards
    rng: Random,
) -> Ragged:
    """Samples of a group's clients: each gets equally many shards, at random."""
    rows = class_positions(labels.train, labels.classes, rng)
    samples = []
    sizes = []
    for label in group.classes:
        count = int(shards[label])
        size = np.full(count, shard_size or 0)
        if shard_size is None and count:
            size = even_parts(len(rows[label]), count)
        sizes.append(size)
        samples.append(rows[label][: size.sum()])
    total = sum(map(len, sizes))
    shards_of_client = rng.permutation(total).reshape(group.n, total // group.n)
    return deal_shards(np.concatenate(samples), np.concatenate(sizes), shards_of_client)


class PartitionRule(NamedTuple):
    """A rule under a name, with defaults of its own."""

    stream: str  # seeds the draws: another string is another partition
    rule: Callable[..., Partition]
    defaults: Mapping[str, Any] = {}  # in place of the rule's own


PARTITIONS: dict[str, PartitionRule] = {
    **{name: PartitionRule("waffle", waffle, {"base": name}) for name in "ABC"},
    "A*": PartitionRule("waffle", waffle, {"base": "A", "shift_seed": 0}),
    "B*": PartitionRule("waffle", waffle, {"base": "B", "shift_seed": 0}),
    "iid": PartitionRule("iid", iid),
    "dirichlet": PartitionRule("dirichlet", dirichlet),
    "pathological": PartitionRule("pathological", pathological),
    "practical1": PartitionRule("practical1", practical1),
    "unimodal": PartitionRule("unimodal", unimodal),
    "multimodal": PartitionRule("multimodal", multimodal),
    "practical2": PartitionRule(
        "dirichlet", dirichlet, {"alpha": 0.1, "mode": "pooled_split", "balance": True}
    ),
}


@checked
def partition(
    name: str,
    labels: Any,
    n: PositiveInt,
    *,
    test_labels: Any = None,
    seed: Seed32 = 0,
    classes: PositiveInt | None = None,
    **options: Any,
) -> Partition:
    """The samples of labels [m] (and test_labels [m_test]) among N clients, by a rule.

    `options_of(name)` are the options of the rule with this name. Raises ValueError,
    one sentence, for an unknown name or option, and where a client would have nothing
    to train on.
    """
    _check_options(name, options)
    pools, classes = _read_pools(labels, test_labels, classes)
    samples = len(pools["train"])
    require(n <= samples, "n", f"at most as many as the {samples} training samples", n)
    rule = PARTITIONS[name]
    rng = seeded_stream(seed, rule.stream)
    made = rule.rule(Labels(pools, n, classes), rng, **{**rule.defaults, **options})
    index = {split: list(lists) for split, lists in made.index.items()}
    _check_training_samples(index["train"])
    pool_sizes = {split: len(y) for split, y in pools.items()}
    return replace(made, index=index, pool_sizes=pool_sizes)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    known = options_of(name)
    unknown = sorted(set(options) - set(known))
    expected = ", ".join([*known, "test_labels", "seed", "classes"])
    require(
        not unknown,
        f"partition {name}",
        f"the options {expected}",
        ", ".join(unknown),
        known,
    )


def _read_pools(
    labels: Any, test_labels: Any, classes: int | None
) -> tuple[dict[str, Ints], int]:
    """Labels of each pool, and the number of classes.

    The labels of both pools decide together what they mean, as in `from_partition`.
    """
    pools = {"train": _labels(labels, "labels")}
    if test_labels is not None:
        pools["test"] = _labels(test_labels, "test_labels")
    reader = ReaderOptions("infer" if classes is None else classes)
    y, known_classes = interpret_targets(
        torch.cat(list(pools.values())), reader, torch.float32, name="labels"
    )
    low = int(y.min())
    top = int(y.max())
    count = known_classes or 1
    fits = low >= 0 and top < count
    require(fits, "labels", f"labels in 0..{count - 1}", [low, top])
    parts = y.split([len(pool) for pool in pools.values()])
    arrays = {s: part.numpy() for s, part in zip(pools, parts, strict=True)}
    return arrays, count


def _labels(labels: Any, name: str) -> Tensor:
    """Labels int64 [m] from any array [m] or [m, 1] of whole numbers."""
    array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    fits = array.ndim == 1 and array.size and array.dtype.kind in "iub"
    require(fits, name, "whole numbers [n]", labels)
    return torch.from_numpy(array.astype(np.int64))


def _check_training_samples(lists: Sequence[Tensor]) -> None:
    """Raises ValueError where a client has none."""
    empty = [i for i, samples in enumerate(lists) if not len(samples)]
    if empty:
        expected = f"so few clients that each has a sample (client {empty[0]} has none)"
        reject("n", expected, len(lists))


@checked
def options_of(name: str) -> dict[str, Any]:
    """The options of a partition's rule, with their defaults.

    Every partition also takes ``test_labels``, ``seed`` and ``classes``.
    """
    expected = f"one of {', '.join(PARTITIONS)}"
    require(name in PARTITIONS, "partition", expected, name, PARTITIONS)
    rule = PARTITIONS[name]
    # A partition's name is its base; "A*" and "B*" are those with a shift.
    hidden = {"base"} if name.endswith("*") else {"base", "shift_seed"}
    parameters = inspect.signature(rule.rule).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    options |= rule.defaults
    return {k: default for k, default in options.items() if k not in hidden}
