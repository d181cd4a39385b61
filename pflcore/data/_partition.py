"""Who gets which sample: the papers' ways to cut a labelled pool among N clients, by
name.

A rule is `rule(labels, rng, *, its options) -> Partition`; `partition` checks, seeds
and calls it. Indices count through cat(labels, test_labels), so that one pool holds
both.
"""

import inspect
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
# WAFFLE paper, section 5.1: agent 0's share of each label
WAFFLE_BASES: dict[str, list[int]] = {
    "A": [1] * 10,
    "B": [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    "C": [0, 0, 0, 1, 2, 4, 2, 1, 0, 0],
}
WAFFLE_SIZES: dict[str, list[int]] = {  # WAFFLE paper, Table 4, in hundredths
    "A": [10] * 10,
    "B": [21, 6, 11, 6, 11, 6, 16, 6, 11, 6],
    "C": [10, 10, 10, 10, 20, 5, 5, 10, 10, 10],
}
Sizes = Literal["A", "B", "C"] | Sequence[PositiveFloat] | None
MAX_DRAWS = 100
MINORITY_CLASSES = {  # WAFFLe (Hao et al. 2020), appendix B: the minority's classes
    "mnist": (0, 2, 4, 6, 8),  # even digits
    "fashion_mnist": (0, 5, 6, 7, 9),  # footwear and shirts, without the pullover
    "cifar10": (0, 1, 8, 9),  # vehicles
}


@dataclass(frozen=True)
class Partition:
    """Who holds which sample, counted through cat(labels, test_labels)."""

    index: Mapping[str, Sequence[Tensor]]  # split -> N lists
    relabel: Tensor | None = None  # [N, C]
    group: Tensor | None = None  # [N], where the recipe has groups of clients
    # what was counted on the way
    facts: Mapping[str, Any] = field(default_factory=dict)
    # the labels that it was made of
    pool_sizes: Mapping[str, int] = field(default_factory=dict)


class Labels(NamedTuple):
    """The labels [n] of each pool, and for how many clients they are."""

    pools: dict[str, Ints]  # split -> labels
    n: int
    classes: int

    @property
    def train(self) -> Ints:
        return self.pools["train"]

    def class_totals(self, y: Ints) -> Ints:
        """How many samples of each class: [C]."""
        return np.bincount(y, minlength=self.classes)

    def map_pools(self, cut: Callable[[Ints, str], Ragged]) -> dict[str, Ragged]:
        """Every pool cut by `cut(labels, split)`, counted through all pools."""
        index = {}
        first = 0
        for split, y in self.pools.items():
            lists = cut(y, split)
            index[split], first = Ragged(lists.flat + first, lists.size), first + len(y)
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
    """Distributions A (uniform), B (four labels), C (a peak): Beaussart et al. 2021,
    section 5.1.

    Agent i's share of the samples of class t is base[(t + i) mod C] of C classes, times
    its entry of `sizes`, over the class's sum. `base` is a row of the paper's Table 2
    for its 10 classes; for another number of classes there is A alone, whose shares are
    all equal. So the cut is disjoint and, but for a class with no share at all,
    exhaustive for any N. Test samples are never shuffled: every seed has the same test
    sets.

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
    row = np.array(WAFFLE_BASES[base] if classes == 10 else [1] * classes, dtype=object)
    weights = row[np.add.outer(np.arange(classes), np.arange(n)) % classes] * _weights(
        sizes, n
    )

    def cut(y: Ints, split: str) -> Ragged:
        rows = class_positions(
            y, classes, rng if shuffle and split == "train" else None
        )
        return deal(rows, proportional_counts(labels.class_totals(y), weights))

    unused = np.flatnonzero(weights.sum(1) == 0).tolist()
    relabel = None if shift_seed is None else concept_shift(n, classes, shift_seed)
    facts = {"unused classes": unused} if unused else {}
    return Partition(labels.map_pools(cut), relabel, facts=facts)


def concept_shift(n: int, classes: int, shift_seed: int = 0) -> Tensor:
    """A random permutation of the labels per client, int64 [N, C]; client 0 (Alice)
    keeps hers.

    Client i's depends on `shift_seed` and i alone.
    """
    rng = seeded_stream(shift_seed, "shift")
    rows = [np.arange(classes)] + [rng.permutation(classes) for _ in range(n - 1)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@checked
def iid(labels: Labels, rng: Random, *, sizes: Sizes = None) -> Partition:
    """The shuffled pool in N parts, equal (to one sample) or in proportions.

    Args:
        sizes: A, B or C of the WAFFLE paper's Table 4, or proportions of the clients'
            sizes, cycled
    """
    weights = _weights(sizes, labels.n)[None]

    def cut(y: Ints, split: str) -> Ragged:
        return deal(
            [rng.permutation(len(y))], proportional_counts(np.array([len(y)]), weights)
        )

    return Partition(labels.map_pools(cut))


def _weights(sizes: Sizes, n: int) -> NDArray[np.object_]:
    """Weights [N], exactly in the proportions `sizes`: 0.1 is a tenth, not its
    float."""
    values = (
        WAFFLE_SIZES[sizes]
        if isinstance(sizes, str)
        else [1]
        if sizes is None
        else list(sizes)
    )
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
    train_fraction: OpenUnitFloat = 0.8,
) -> Partition:
    """For every class a draw p [N] from Dir(alpha), cut at floor(cumsum(p) n_c).

    In the mode "same_proportions" the test pool is cut by the same p, and every client
    gets at least one test sample. In "pooled_split" (FedDWA's released code, practical
    setting 2) both pools are one. Draws are repeated until every client has `min_size`
    samples, at most `MAX_DRAWS` times; then the best is kept, and single samples move
    from the largest client to the smallest. facts: min_size, draws, and how many
    samples moved.

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
    n = labels.n
    fits = pooled or train_fraction == 0.8
    require(fits, "train_fraction", "0.8 outside pooled_split", train_fraction)
    # the pools that are cut by one draw
    pools = (
        {"train": np.concatenate([*labels.pools.values()])} if pooled else labels.pools
    )
    samples = len(pools["train"])
    least = 2 if pooled else 1  # to train on, and to be tested on
    floor = max(least, min(20, samples // (2 * n)) if min_size is None else min_size)
    require(
        floor * n <= samples, "min_size", f"enough for {n} of {samples} samples", floor
    )
    if not pooled and "test" in pools:
        tests = len(pools["test"])
        require(n <= tests, "n", f"at most as many as the {tests} test samples", n)

    p, draws = _draw_proportions(
        [*map(labels.class_totals, pools.values())], n, alpha, balance, floor, rng
    )
    held = {
        split: sample_counts(p, labels.class_totals(y)) for split, y in pools.items()
    }
    moved = _raise_to_minimum(held["train"], floor)
    if "test" in held:
        moved += _raise_to_minimum(held["test"], 1, like=held["train"])

    def cut(y: Ints, split: str) -> Ragged:
        return deal(class_positions(y, labels.classes, rng), held[split])

    index = labels._replace(pools=pools).map_pools(cut)
    if pooled:
        size = lambda k: min(max(1, int(train_fraction * k + 1e-9)), k - 1)  # noqa: E731
        index["train"], index["test"] = split_lists(index["train"], size, rng)
    return Partition(
        index, facts={"min_size": floor, "draws": draws, "moved samples": moved}
    )


def _draw_proportions(
    totals: list[Ints], n: int, alpha: float, balance: bool, floor: int, rng: Random
) -> tuple[Floats, int]:
    """The first draw [C, N] with `floor` samples for every client and one of each other
    pool, or the best; how many draws."""
    best = np.zeros((0, n))
    least = -1
    draws = 0
    while draws < MAX_DRAWS and least < floor:
        draws += 1
        p = _proportions(totals[0], n, alpha, balance, rng)
        smallest, *tested = (
            int(sample_counts(p, some).sum(0).min()) for some in totals
        )
        if 0 in tested:  # a client without a test sample
            smallest = min(smallest, floor - 1)
        if smallest > least:
            best = p
            least = smallest
    return best, draws


def sample_counts(p: Floats, totals: Ints) -> Ints:
    """Samples [C, N] for proportions p [C, N]; the rows add up to totals [C]."""
    at = np.floor(np.cumsum(p, axis=1)[:, :-1] * totals[:, None]).astype(np.int64)
    at = at.clip(0, totals[:, None])
    return np.diff(at, prepend=0, append=totals[:, None])


def _proportions(
    totals: Ints, n: int, alpha: float, balance: bool, rng: Random
) -> Floats:
    size = np.zeros(n)
    rows = []
    for total in totals:
        p = rng.dirichlet(np.full(n, alpha))
        # alpha so small that all draws underflow
        if not np.isfinite(p).all() or p.sum() == 0:
            p = np.eye(n)[rng.randint(n)]
        if balance:
            room = (size < totals.sum() / n).astype(np.float64)
            kept = p * room
            kept = kept if kept.sum() else room if room.sum() else np.ones(n)
            p = kept / kept.sum()
        rows.append(p)
        size += sample_counts(p[None], np.array([total]))[0]
    return np.stack(rows)


def _raise_to_minimum(held: Ints, floor: int, like: Ints | None = None) -> int:
    """Moves single samples, in place, until every client has `floor`; returns how many.

    held [C, N]. The largest client gives one of its most frequent class; with `like`
    [C, N] it is the class that the receiver has most of there, so that it is tested on
    what it trains on.
    """
    moved = 0
    while True:
        size = held.sum(0)
        to = int(size.argmin())
        if size[to] >= floor:
            return moved
        able = np.where(size > floor, held, 0)  # [C, N] what may be given
        if like is None:
            giver = int(size.argmax())
            c = int(able[:, giver].argmax())
        else:
            c = int(np.where(able.sum(1) > 0, like[:, to], -1).argmax())
            giver = int(able[c].argmax())
        held[c, giver] -= 1
        held[c, to] += 1
        moved += 1


@checked
def pathological(
    labels: Labels,
    rng: Random,
    *,
    mode: Literal["shards", "exact_k"] = "shards",
    k: PositiveInt = 2,
) -> Partition:
    """A few classes per client.

    mode "shards" (FedDWA's released code): the label-sorted pool in k N equal shards, k
    to a client; the same shards of the sorted test pool are its test set. mode
    "exact_k" (the paper's words): k distinct classes per client, owners per class
    within one; every client takes q samples of each, q = min over owned classes of n_c
    // owners. The rest is unused, and counted in the facts.

    Args:
        mode: shards deals k shards of the sorted pool to a client; exact_k gives it k
            classes
        k: shards or classes of a client
    """
    n, number, samples = labels.n, labels.n * k, len(labels.train)
    if mode == "exact_k":
        require(k <= labels.classes, "k", f"at most the {labels.classes} classes", k)
        owned = _assign_classes(n, k, labels.classes, rng)
        index = labels.map_pools(
            lambda y, split: _deal_equally(labels, y, split, owned, rng)
        )
        unused = {s: len(y) - len(index[s].flat) for s, y in labels.pools.items()}
        return Partition(
            index, facts={f"unused {s} samples": m for s, m in unused.items() if m}
        )
    require(number <= samples, "k", f"shards of at least one of {samples} samples", k)
    table = rng.permutation(number).reshape(n, k)

    def cut(y: Ints, split: str) -> Ragged:
        rows = np.concatenate(class_positions(y, labels.classes, rng))
        return deal_shards(rows, even_parts(len(y), number), table)

    return Partition(labels.map_pools(cut))


def _assign_classes(n: int, k: int, classes: int, rng: Random) -> Ints:
    """k distinct classes per client, those with the fewest owners so far: 0 or 1,
    [C, N]."""
    owned = np.zeros((classes, n), dtype=np.int64)
    for i in range(n):
        owned[np.lexsort((rng.permutation(classes), owned.sum(1)))[:k], i] = 1
    return owned


def _deal_equally(
    labels: Labels, y: Ints, split: str, owned: Ints, rng: Random
) -> Ragged:
    """The same number of samples of each owned class for every client."""
    classes = np.flatnonzero(owned.any(1))
    have = labels.class_totals(y)[classes]
    owners = owned.sum(1)[classes]
    quota = (have // owners).min()
    poorest = (have // owners).argmin()
    few = (
        f"a {split} sample of class {classes[poorest]} for each of its "
        f"{owners[poorest]} owners"
    )
    require(quota > 0, "k and n", few, int(have[poorest]))
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
    """`share` of a client's data from its group's dominant classes, the rest from all;
    `group` [N].

    Group j of G owns the q = `dominant` classes floor(j C / G) ... + q - 1 (mod C),
    q = 3 for C <= 10, else C / 5. Every client takes floor(total / N) samples, as
    equally from its dominant classes as the supply allows; where they run dry, what is
    left elsewhere (counted in the facts).

    Args:
        groups: groups of clients, each with dominant classes of its own
        dominant: dominant classes of a group; 3 if not said, or a fifth of more than 10
            classes
        share: share of a client's samples that come from its dominant classes
    """
    n = labels.n
    classes = labels.classes
    require(groups <= n, "groups", f"at most the {n} clients", groups)
    require(
        (dominant or 1) <= classes,
        "dominant",
        f"at most the {classes} classes",
        dominant,
    )
    group = np.arange(n) * groups // n
    facts = {}
    q = dominant or (min(3, classes) if classes <= 10 else max(1, classes // 5))
    owned = [
        [(j * classes // groups + d) % classes for d in range(q)]
        for j in group.tolist()
    ]

    def cut(y: Ints, split: str) -> Ragged:
        lists, short = _deal_dominant(labels, y, owned, share, rng)
        facts.update({f"{split} samples of other classes": short} if short else {})
        return lists

    return Partition(labels.map_pools(cut), group=torch.from_numpy(group), facts=facts)


def _deal_dominant(
    labels: Labels, y: Ints, owned: list[list[int]], share: float, rng: Random
) -> tuple[Ragged, int]:
    """Equal lists, and how many samples came from other classes than the dominant
    ones."""
    n = len(owned)
    size = len(y) // len(owned)
    own = int(share * size + 0.5)
    rows = class_positions(y, labels.classes, rng)
    # The common part first, in the pool's class proportions, so that no class is used
    # up before.
    common = rng.permutation(interleave_classes(rows)[: n * (size - own)]).reshape(
        n, size - own
    )
    supply = [r[~np.isin(r, common)].tolist() for r in rows]
    mine: list[list[int]] = [[] for _ in owned]
    taken = np.zeros((n, labels.classes), dtype=np.int64).tolist()
    # one sample each per pass, so that a scarce class is shared fairly
    for _ in range(own):
        for samples, held, classes in zip(mine, taken, owned, strict=True):
            able = [
                (held[c], -len(supply[c]), at)
                for at, c in enumerate(classes)
                if supply[c]
            ]
            if able:
                c = classes[min(able)[2]]
                samples.append(supply[c].pop())
                held[c] += 1
    left = rng.permutation([v for s in supply for v in s]).tolist()
    short = n * own - sum(map(len, mine))
    for samples in mine:
        samples += [left.pop() for _ in range(own - len(samples))]
    dealt = np.concatenate(
        [np.array(mine, dtype=np.int64).reshape(n, own), common], axis=1
    )
    return Ragged(torch.from_numpy(dealt.ravel()), torch.full((n,), size)), short


@checked
def unimodal(
    labels: Labels,
    rng: Random,
    *,
    z: PositiveInt = 2,
    test: OpenUnitFloat = 0.2,
    train: PositiveInt | None = None,
) -> Partition:
    """WAFFLe: each class in even shards, N z in all, z dealt to a client at random.

    Cuts the training pool alone; a test pool is not used. Unused samples are counted in
    the facts.

    Args:
        z: shards of a client
        test: share of a client's samples that is held out
        train: use so many of a client's other samples only; the test sets stay
    """
    return _deal_modes(labels, [(range(labels.classes), labels.n)], z, test, train, rng)


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
    """WAFFLe: `unimodal` within two groups of classes and clients; `group` [N]: 1 for
    the minority.

    All shards are of one size, the largest that every class can give.

    Args:
        z: shards of a client
        minority: classes of the minority, or the paper's for a data set by its name
        minority_clients: clients of the minority, the last ones
        test: share of a client's samples that is held out
        train: use so many of a client's other samples only; the test sets stay
    """
    n = labels.n
    few = sorted(
        set(MINORITY_CLASSES[minority] if isinstance(minority, str) else minority)
    )
    some = [c for c in range(labels.classes) if c not in few]
    both = few and some and max(few) < labels.classes
    require(
        both,
        "minority",
        f"some of the classes 0..{labels.classes - 1}, and not all",
        few,
    )
    require(
        minority_clients < n,
        "minority_clients",
        f"fewer than the {n} clients",
        minority_clients,
    )
    modes = [(some, n - minority_clients), (few, minority_clients)]
    return _deal_modes(labels, modes, z, test, train, rng)


def _deal_modes(
    labels: Labels,
    modes: Sequence[tuple[Sequence[int], int]],
    z: int,
    test: float,
    train: int | None,
    rng: Random,
) -> Partition:
    """For each mode, classes and a number of clients, shards of its classes, z to each
    client at random: even ones where there is one mode, else all of the largest size
    that every class has."""
    have = labels.class_totals(labels.train)
    shards = np.zeros(labels.classes, dtype=np.int64)
    for classes, n in modes:
        shards[classes] = even_parts(n * z, len(classes))
    few = "so few clients that each shard has a sample"
    require((have >= shards).all(), "n", few, labels.n)
    size = int((have[shards > 0] // shards[shards > 0]).min())
    parts = []
    for classes, n in modes:
        every = class_positions(labels.train, labels.classes, rng)
        sizes = [
            even_parts(have[c], shards[c])
            if len(modes) == 1 and shards[c]
            else np.full(shards[c], size)
            for c in classes
        ]
        rows = [every[c][: s.sum()] for c, s in zip(classes, sizes, strict=True)]
        table = rng.permutation(n * z).reshape(n, z)
        parts.append(deal_shards(np.concatenate(rows), np.concatenate(sizes), table))
    lists = Ragged(
        torch.cat([p.flat for p in parts]), torch.cat([p.size for p in parts])
    )
    held, rest = split_lists(lists, lambda k: max(1, int(test * k + 0.5)), rng)
    unused = len(labels.train) - len(lists.flat)
    rest = rest if train is None else Ragged.from_lists([r[:train] for r in rest])
    group = (
        torch.repeat_interleave(torch.tensor([n for _, n in modes]))
        if len(modes) > 1
        else None
    )
    facts = {"unused train samples": unused} if unused else {}
    return Partition({"train": rest, "test": held}, group=group, facts=facts)


class PartitionRule(NamedTuple):
    """A rule under a name. `stream` seeds its draws: another string is another
    partition."""

    stream: str
    rule: Callable[..., Partition]
    defaults: Mapping[str, Any] = {}  # other ones than the rule's own


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
    """The samples of labels [n] (and test_labels [n_test]) among N clients, by the name
    of a way; `options_of(name)` are its own options. ValueError in one sentence for an
    unknown name or option, and where a client would have nothing to train on."""
    own = options_of(name)
    unknown = sorted(set(options) - set(own))
    takes = ", ".join([*own, "test_labels", "seed", "classes"])
    require(
        not unknown,
        f"partition {name}",
        f"the options {takes}",
        ", ".join(unknown),
        own,
    )
    given = {"train": _labels(labels, "labels")}
    if test_labels is not None:
        given["test"] = _labels(test_labels, "test_labels")
    # what they mean is decided for all of them, as `from_partition` does
    reading = ReaderOptions("infer" if classes is None else classes)
    y, known = interpret_targets(
        torch.cat([*given.values()]), reading, torch.float32, name="labels"
    )
    low = int(y.min())
    top = int(y.max())
    classes = known or 1
    require(
        low >= 0 and top < classes, "labels", f"labels in 0..{classes - 1}", [low, top]
    )
    size = len(given["train"])
    require(n <= size, "n", f"at most as many as the {size} training samples", n)
    pools = dict(
        zip(given, map(Tensor.numpy, y.split([*map(len, given.values())])), strict=True)
    )
    way = PARTITIONS[name]
    part = way.rule(
        Labels(pools, n, classes),
        seeded_stream(seed, way.stream),
        **{**way.defaults, **options},
    )
    index = {s: list(lists) for s, lists in part.index.items()}
    none = [i for i, rows in enumerate(index["train"]) if not len(rows)][:1]
    require(
        not none,
        "n",
        f"so few clients that each has a sample (client {none} has none)",
        n,
    )
    return replace(part, index=index, pool_sizes={s: len(y) for s, y in pools.items()})


def _labels(labels: Any, name: str) -> Tensor:
    a = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    a = a[:, 0] if a.ndim == 2 and a.shape[1] == 1 else a
    require(
        a.ndim == 1 and a.size and a.dtype.kind in "iub",
        name,
        "whole numbers [n]",
        labels,
    )
    return torch.from_numpy(a.astype(np.int64))


@checked
def options_of(name: str) -> dict[str, Any]:
    """A partition's own options and their defaults (every partition takes
    ``test_labels``, ``seed`` and ``classes`` besides)."""
    require(
        name in PARTITIONS,
        "partition",
        f"one of {', '.join(PARTITIONS)}",
        name,
        PARTITIONS,
    )
    way = PARTITIONS[name]
    hidden = {"base"} if name.endswith("*") else {"base", "shift_seed"}
    own = inspect.signature(way.rule).parameters.values()
    options = {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY} | dict(
        way.defaults
    )
    return {k: v for k, v in options.items() if k not in hidden}
