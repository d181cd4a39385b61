"""Means of the clients' updates, as values: how a server joins what clients send.

A server of pflcore takes one as an option, `FedAvg(mean=Krum(num_byzantine=2))`. On
the command line and in files a mean is a text, `--mean krum:2`; see `mean_of`. For a
server of one's own, each robust mean is a function, too: `krum(updates, 2)`. It is the
same code, and so the same bits.

A value gives rows [R, P] and their weights [1, R]; the sum `weights @ rows` is the
mean. All but `WeightedMean` are robust: updates that are bad move them only so far.
All of these but `ClipToMedian` pass over the numbers of samples, about which a client
may lie. Distances between updates are exact, by `ops.pairwise_sqdist`.

Symbols: S clients are in the cohort, f (`num_byzantine`) of them are expected to be
bad; d_i are their updates of P parameters each, in float32, float64, float16 or
bfloat16, on a CPU or a GPU, and all of them finite. Krum chooses m clients.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from pflcore import ops
from pflcore._cohort import Cohort, MixingWeights, Tensors, VoidRound, cohort_size
from pflcore._device import to_device
from pflcore._geometric_median import geometric_median_weights
from pflcore.check import (
    ClientName,
    NonNegativeFloat,
    NonNegativeInt,
    OnCommandLine,
    PositiveFloat,
    PositiveInt,
    Words,
    check_fields,
    checked,
    is_dense,
    known_id,
    reject,
    require,
)
from pflcore.ops._directions import cosine_matrix, length_ratios
from pflcore.train._random import generator_of

__all__ = [
    "Bulyan",
    "CenteredClipping",
    "ClipToMedian",
    "FLTrust",
    "GeometricMedian",
    "Krum",
    "Mean",
    "MeanAroundMedian",
    "MeanInput",
    "Median",
    "MultiKrum",
    "NearestNeighborMixing",
    "Private",
    "TrimmedMean",
    "WeightedMean",
    "bulyan",
    "centered_clipping",
    "clip",
    "clip_to_median",
    "fltrust",
    "geometric_median",
    "krum",
    "mean_around_median",
    "mean_of",
    "median",
    "multi_krum",
    "nearest_neighbor_mixing",
    "trimmed_mean",
]


# values -------------------------------------------------------------------------
class MeanInput(NamedTuple):
    """The updates of one round, and the facts that a mean may look at.

    Attributes:
        rows: [S, P] the updates, one row for each client.
        shares: [1, S] the clients' shares in a plain mean, float64, on the CPU.
        cohort: The clients, in the order of the rows.
        state: What the mean has kept from the last round, by name.
    """

    rows: Tensor
    shares: Tensor
    cohort: Cohort
    state: Mapping[str, Tensor] = {}


# Rows [R, P] and their weights [1, R] in float64: the mean is `weights @ rows`. They
# are the updates with a weight for each client, or the mean itself with weight 1.
Weighed = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Mean:
    """Base class of every mean: a frozen dataclass with the method `weigh`."""

    def __post_init__(self) -> None:
        check_fields(self)

    def weigh(self, up: MeanInput) -> Weighed:
        """The rows [R, P] and their weights [1, R]: the mean is `weights @ rows`."""
        raise NotImplementedError(f"{type(self).__name__} has no weigh.")

    def __call__(
        self,
        updates: Tensor,
        cohort: Cohort,
        weighting: str = "samples",
        state: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, MixingWeights, Tensors]:
        """The rows of a round, their weights, and what the mean keeps of the round.

        Raises VoidRound where a round of this size allows no such mean.

        Args:
            updates: [S, P] the clients' updates.
            cohort: The clients that sent them.
            weighting: The clients' shares in a plain mean: "samples" or "uniform".
            state: The server's state, which has what the mean kept, by name.
        """
        shares = cohort.mean_weights(weighting).weight
        mean = self.fit_to(cohort)
        rows, weight = mean.weigh(MeanInput(updates, shares, cohort, state or {}))
        mix = MixingWeights(weight)
        return rows, mix, self.new_state(rows, mix)

    # what few means differ in ---------------------------------------------------
    # Whether running statistics of batch norm may be mixed as the models are. Beside a
    # robust mean, their plain mean would be a way around it.
    mixes_statistics: ClassVar[bool] = False
    # Whether the mean of no update moves the model: silence would tell that nobody was
    # there.
    acts_without_clients: ClassVar[bool] = False

    @property
    def required_clients(self) -> tuple[int, ...]:
        """The ids of the clients that take part in every round."""
        return ()

    @property
    def clients_needed(self) -> int:
        """The number of clients that a round needs."""
        return 1

    @property
    def length(self) -> float | None:
        """The length to which the mean shortens updates; None where it does not."""
        return None

    def check_rounds(
        self, sampling: str, participation: float, num_eligible: int
    ) -> None:
        """Raises ValueError where the rounds of a run do not fit the mean.

        Args:
            sampling: The rule by which clients are drawn: its name, "weights" or
                "function".
            participation: The fraction of clients in a round, or the chance of each.
            num_eligible: The number of clients that may take part.
        """
        most = num_eligible
        if sampling != "poisson":
            most = cohort_size(participation, num_eligible)
        expected = f"one for rounds of {most} clients or fewer"
        got = Words(f"{self}, which needs {self.clients_needed}")
        remedy = "lower num_byzantine, or raise participation"
        require(self.clients_needed <= most, "mean", expected, got, remedy=remedy)

    def fit_to(self, cohort: Cohort) -> Self:
        """The mean for the clients that are left of a round's cohort."""
        return self

    def init(self, x0: Tensor) -> Tensors:
        """The tensors that the mean keeps before round 1, for models like `x0` [P]."""
        return {}

    def new_state(self, rows: Tensor, mix: MixingWeights) -> Tensors:
        """The tensors that the mean keeps of a round with these rows [R, P]."""
        return {}

    def __str__(self) -> str:
        """The text with all options, which `mean_of` reads for pflcore's own means."""
        words = [mean_name(type(self))]
        others = ""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Mean):
                others = f"/{value}"
            elif value is not None:
                # Quotes keep a name such as "3" apart from a number.
                text = f"{value!r}" if _value_of(str(value)) != value else f"{value}"
                words.append(f"{f.name}={text}")
        return ":".join(words) + others


@dataclass(frozen=True)
class WeightedMean(Mean):
    """The mean by the clients' shares: `sum_i share_i d_i` (McMahan et al. 2017)."""

    mixes_statistics = True

    def weigh(self, up: MeanInput) -> Weighed:
        return up.rows, up.shares


@dataclass(frozen=True)
class ClipToMedian(Mean):
    """The mean by shares of updates that are shortened to the median of their lengths.

    It is `sum_i share_i d_i min(1, M / |d_i|)` with M the median of the lengths (Sun et
    al. 2019, with M for their fixed bound, which is `clip` of the run).
    """

    def weigh(self, up: MeanInput) -> Weighed:
        norm = _lengths(up.rows)
        shares = to_device(up.shares, norm.device)
        return up.rows, shares * (norm.quantile(0.5) / norm).clamp(max=1.0)


@dataclass(frozen=True)
class Median(Mean):
    """The median of each coordinate; of an even number, the mean of the middle two.

    Yin et al. 2018, Definition 1.
    """

    def weigh(self, up: MeanInput) -> Weighed:
        return _as_weighed(coordinate_median(up.rows))


@dataclass(frozen=True)
class GeometricMedian(Mean):
    """The row with the least sum of distances to the updates.

    Pillutla et al. 2022, by steps of Weiszfeld and Newton. The sum is above the least
    one by 1e-8 of it at most. Rows coincide where their distance is at most 1e-8 of the
    median length of the rows, seen from the median of each coordinate. Where 100 steps
    do not get there, a RuntimeWarning says so.
    """

    def weigh(self, up: MeanInput) -> Weighed:
        return up.rows, geometric_median_weights(up.rows)


@dataclass(frozen=True)
class FLTrust(Mean):
    """The mean weighted by the updates' cosines with that of a trusted client.

    Cao et al. 2021, eqs. 2 to 4: `sum_i t_i (|r| / |d_i|) d_i / sum_i t_i` with `t_i =
    max(0, cos(d_i, r))`. r is the update of the trusted client, which joins every
    round. Deviation: there the server trains r on data of its own, and r is not part of
    the sum.

    Args:
        trusted_client: Id or name of the client that is trusted.
    """

    trusted_client: ClientName

    @property
    def required_clients(self) -> tuple[int, ...]:
        """The ids of the clients that take part in every round."""
        return (known_id("trusted_client", self.trusted_client),)

    def weigh(self, up: MeanInput) -> Weighed:
        trusted_id = known_id("trusted_client", self.trusted_client)
        row = int((up.cohort.ids == trusted_id).nonzero())
        return up.rows, _trust_weights(up.rows, row)


@dataclass(frozen=True)
class CenteredClipping(Mean):
    """Steps from a center along the updates, none longer than `clip_norm`.

    Karimireddy et al. 2021, eq. 5: `v <- v + sum_i (d_i - v) min(1, tau / |d_i - v|) /
    S`. The first v is the mean of the last round, and zero in the first one.

    Args:
        clip_norm: tau, the largest distance from v that an update pulls with.
        clip_steps: Number of steps in a round.
    """

    clip_norm: PositiveFloat
    clip_steps: PositiveInt = 1

    @property
    def length(self) -> float | None:
        """The length to which the mean shortens updates."""
        return self.clip_norm

    def init(self, x0: Tensor) -> Tensors:
        return {"center": torch.zeros_like(x0)}

    def weigh(self, up: MeanInput) -> Weighed:
        v = up.rows.new_zeros(1, up.rows.shape[1])
        if "center" in up.state:
            v = up.state["center"].to(up.rows)[None]
        for _ in range(self.clip_steps):
            distance = ops.pairwise_sqdist(up.rows, v)[:, 0].double().sqrt()
            part = self.clip_norm / distance.clamp(min=self.clip_norm) / len(up.rows)
            v = ops.aggregate(up.rows, part[None], None, v * (1 - part.sum()).to(v))
        return _as_weighed(v)

    def new_state(self, rows: Tensor, mix: MixingWeights) -> Tensors:
        return {"center": mix.aggregate(rows)[0]}


@dataclass(frozen=True)
class Private(Mean):
    """The mean of shortened updates with noise on their sum, for differential privacy.

    It is `(sum_i d_i min(1, C / |d_i|) + z C g) / E`, g [P] of independent standard
    normal numbers (McMahan et al. 2018, Algorithm 1, with the fixed-denominator
    estimator of its section 3). The divisor does not tell how many clients took part.
    Deviations: an update is shortened once, after the local training, and all clients
    weigh the same. The noise comes from the run's seed: whoever knows the seed can
    subtract it, so keep it from those who see the models.

    Args:
        clip_norm: C, the largest length of an update in the sum.
        noise_multiplier: z, the noise's standard deviation in units of C.
        expected_clients: E, the expected number of clients of a round: the probability
            of each client times the number of clients. None means all clients with
            training samples.
    """

    clip_norm: PositiveFloat
    noise_multiplier: NonNegativeFloat
    expected_clients: PositiveFloat | None = None
    acts_without_clients = True

    @property
    def length(self) -> float | None:
        """The length to which the mean shortens updates."""
        return self.clip_norm

    def check_rounds(
        self, sampling: str, participation: float, num_eligible: int
    ) -> None:
        joins_always = participation == 1 and sampling == "uniform"
        if sampling != "poisson" and not joins_always:
            reject(
                "sampling",
                "'poisson' with a private mean, or participation=1: its privacy is "
                "that of clients who join independently of each other",
                sampling,
            )
        expected = participation * num_eligible
        given = self.expected_clients or num_eligible
        if not math.isclose(given, expected, rel_tol=1e-6):
            reject(
                "expected_clients",
                f"{expected:g}, participation times the clients that may take part "
                f"(give expected_clients={expected:g})",
                given,
            )

    def weigh(self, up: MeanInput) -> Weighed:
        cohort = up.cohort
        expected = self.expected_clients or cohort.num_trainable
        norm = _norms(up.rows)
        factor = (self.clip_norm / norm.clamp(min=self.clip_norm)) / expected
        # Drawn on the CPU, the noise is the same on every device.
        generator = generator_of(cohort.seed, cohort.round, "noise of the sum")
        shape = (1, up.rows.shape[1])
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        noise = noise.to(up.rows)
        scale = self.noise_multiplier * self.clip_norm / expected
        return _as_weighed(ops.aggregate(up.rows, factor[None], None, noise * scale))


@dataclass(frozen=True)
class ByzantineMean(Mean):
    """Base class of the means that are told the number f of bad clients.

    A round needs `factor * f + margin` clients. Where clients were left out of it, they
    count as bad ones, and f goes down by as many if it must.

    Args:
        num_byzantine: Number f of bad clients that are expected in a round.
    """

    num_byzantine: NonNegativeInt = 1
    factor: ClassVar[int] = 2
    margin: ClassVar[int] = 1

    @property
    def clients_needed(self) -> int:
        """The number of clients that a round needs."""
        return self.factor * self.num_byzantine + self.margin

    def fit_to(self, cohort: Cohort) -> Self:
        f = self.num_byzantine
        clients = len(cohort.ids)
        allowed = min(f, (clients - self.margin) // self.factor)
        if allowed < max(0, f - cohort.num_dropped):
            raise VoidRound(
                f"mean: {self} needs {self.clients_needed} clients in a round, and "
                f"round {cohort.round} has {clients}; lower num_byzantine, or raise "
                "participation."
            )
        return replace(self, num_byzantine=allowed)


@dataclass(frozen=True)
class TrimmedMean(ByzantineMean):
    """The mean of each coordinate without the f least and f largest numbers.

    Yin et al. 2018, Definition 2. A round needs 2 f + 1 clients.
    """

    def weigh(self, up: MeanInput) -> Weighed:
        return _as_weighed(ops.trimmed_mean(up.rows, self.num_byzantine))


@dataclass(frozen=True)
class MeanAroundMedian(ByzantineMean):
    """The mean of the S - f numbers of each coordinate nearest to its median.

    Xie et al. 2018. Of two equally near numbers the smaller one is taken. A round needs
    2 f + 1 clients.
    """

    def weigh(self, up: MeanInput) -> Weighed:
        count = len(up.rows) - self.num_byzantine
        return _as_weighed(ops.mean_around_median(up.rows, count))


@dataclass(frozen=True)
class Krum(ByzantineMean):
    """The update with the least sum of squared distances to its S - f - 2 nearest.

    Blanchard et al. 2017, section 4. Of equal sums the earlier update is taken. A round
    needs 2 f + 3 clients.
    """

    margin = 3

    def weigh(self, up: MeanInput) -> Weighed:
        count = self.num_chosen(len(up.rows))
        best = choose_by_krum(ops.pairwise_sqdist(up.rows), self.num_byzantine, count)
        device = up.rows.device
        weight = torch.zeros(1, len(up.rows), dtype=torch.float64, device=device)
        return up.rows, weight.index_fill_(1, to_device(best, device), 1 / count)

    def num_chosen(self, num_clients: int) -> int:
        """The number m of updates whose mean is taken."""
        return 1


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the updates with the least sums of `Krum`.

    Args:
        num_selected: Number of these updates; None for all but f. A round of fewer
            clients, as some stayed away or were left out, takes all but f, too.
    """

    num_selected: PositiveInt | None = None

    @property
    def clients_needed(self) -> int:
        """The number of clients that a round needs."""
        selected = self.num_selected or 0
        return max(super().clients_needed, self.num_byzantine + selected)

    def num_chosen(self, num_clients: int) -> int:
        most = num_clients - self.num_byzantine
        return most if self.num_selected is None else min(self.num_selected, most)


@dataclass(frozen=True)
class Bulyan(ByzantineMean):
    """The mean of the S - 4 f nearest to the median, of S - 2 f that Krum selects.

    El Mhamdi et al. 2018: Krum selects one update after another. A round needs 4 f + 3
    clients.
    """

    factor = 4
    margin = 3

    def weigh(self, up: MeanInput) -> Weighed:
        f = self.num_byzantine
        selected = bulyan_selection(ops.pairwise_sqdist(up.rows), f)
        rows = up.rows[to_device(selected, up.rows.device)]
        return _as_weighed(ops.mean_around_median(rows, len(up.rows) - 4 * f))


@dataclass(frozen=True)
class NearestNeighborMixing(ByzantineMean):
    """Another robust mean, of updates that are mixed with their nearest ones first.

    Each update is replaced by the mean of its S - f nearest, itself included (Allouah
    et al. 2023, Algorithm 2).

    Args:
        then: The robust mean of the mixed updates.
    """

    then: Mean = Median()

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = not isinstance(self.then, WeightedMean | FLTrust | Private)
        require(fits, "then", "a robust mean by the updates alone", self.then)

    @property
    def length(self) -> float | None:
        """The length to which the mean shortens updates."""
        return self.then.length

    @property
    def clients_needed(self) -> int:
        """The number of clients that a round needs."""
        return max(super().clients_needed, self.then.clients_needed)

    def fit_to(self, cohort: Cohort) -> Self:
        return replace(super().fit_to(cohort), then=self.then.fit_to(cohort))

    def init(self, x0: Tensor) -> Tensors:
        return self.then.init(x0)

    def weigh(self, up: MeanInput) -> Weighed:
        mixed = mix_neighbors(up.rows, self.num_byzantine)
        rows, weight = self.then.weigh(up._replace(rows=mixed))
        # These weights would not be the clients' own.
        return _as_weighed(ops.aggregate(rows, to_device(weight, rows.device)))

    def new_state(self, rows: Tensor, mix: MixingWeights) -> Tensors:
        return self.then.new_state(rows, mix)


# texts --------------------------------------------------------------------------
MEANS: dict[str, type[Mean]] = {
    "mean": WeightedMean,
    "clip_to_median": ClipToMedian,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "fltrust": FLTrust,
    "geometric_median": GeometricMedian,
    "mean_around_median": MeanAroundMedian,
    "bulyan": Bulyan,
    "centered_clipping": CenteredClipping,
    "private": Private,
    "nearest_neighbor_mixing": NearestNeighborMixing,
}
# An option of an algorithm that is a mean.
MeanOption = Annotated[Mean, OnCommandLine(str)]


def mean_in(options: Any) -> Mean | None:
    """The option `mean` of an algorithm; None where it has none."""
    mean = getattr(options, "mean", None)
    return mean if isinstance(mean, Mean) else None


def mean_name(cls: type[Mean]) -> str:
    """The name of a mean in texts; that of the class for one of your own."""
    return next((name for name, known in MEANS.items() if known is cls), cls.__name__)


def mean_of(mean: Mean | str) -> Mean:
    """The mean of a text; a mean is returned as it is.

    A text is the name and the options, in their order or with their names. A mean that
    goes before another one ends with "/" and the other one.

    >>> mean_of("krum:2")
    Krum(num_byzantine=2)
    >>> mean_of("nearest_neighbor_mixing:2/centered_clipping:clip_norm=0.5").then
    CenteredClipping(clip_norm=0.5, clip_steps=1)

    Raises ValueError for an unknown name or option, and for a value that does not fit.
    """
    if not isinstance(mean, str):
        return mean
    first, slash, rest = mean.partition("/")
    name, *words = first.split(":")
    require(name in MEANS, "mean", f"one of {', '.join(MEANS)}", name, MEANS)
    cls = MEANS[name]
    names = [f.name for f in fields(cls)]
    options: dict[str, Any] = {}
    for place, word in enumerate(words):
        option, equals, value = word.rpartition("=")
        if not equals:
            option = names[place] if place < len(names) else word
        require(option in names, "mean", f"options of {name}: {names}", option, names)
        options[option] = _value_of(value)
    if slash:
        expected = "a mean that goes before another one, nearest_neighbor_mixing"
        require("then" in names, "mean", expected, name)
        options["then"] = mean_of(rest)
    missing = {f.name for f in fields(cls) if f.default is MISSING} - {*options}
    wanted = f"{name} with {', '.join(sorted(missing))}, as {name}:VALUE"
    require(not missing, "mean", wanted, Words(mean))
    return cls(**options)


def _value_of(word: str) -> Any:
    """The number that a word stands for; a client's name is a word."""
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word


# arithmetic -----------------------------------------------------------------------
def _as_weighed(row: Tensor) -> Weighed:
    """A row [P] or [1, P] as rows with weights."""
    one = torch.ones(1, 1, dtype=torch.float64, device=row.device)
    return row.reshape(1, -1), one


def _norms(rows: Tensor) -> Tensor:
    """The lengths [S] of the rows, float64, as exact as `ops.pairwise_sqdist`."""
    return ops.pairwise_sqdist(rows, torch.zeros_like(rows[:1]))[:, 0].sqrt()


def _lengths(rows: Tensor) -> Tensor:
    """The lengths [S] of the rows, float64, none of them 0."""
    return _norms(rows).clamp(min=1e-150)


def coordinate_median(rows: Tensor) -> Tensor:
    """The median [P] of each column of `rows` [S, P]."""
    return ops.trimmed_mean(rows, (len(rows) - 1) // 2)


def choose_by_krum(
    sqdist: Tensor,  # [S, S]
    f: int,
    m: int,
) -> Tensor:  # [m] int64
    """The `m` clients [m] of the least Krum score, best first.

    A client's score is the sum of its squared distances to its S - f - 2 nearest others
    (Blanchard et al. 2017, section 4). Of equal scores the earlier client comes first.

    Args:
        sqdist: [S, S] squared distances between the clients' updates.
        f: The number of bad clients among the S.
        m: The number of clients to choose.
    """
    to_others = sqdist.double().cpu().clone().fill_diagonal_(torch.inf)
    nearest = to_others.sort(1).values[:, : len(to_others) - f - 2]
    return nearest.sum(1).sort(stable=True).indices[:m]


def bulyan_selection(sqdist: Tensor, f: int) -> Tensor:
    """The S - 2 f clients that Bulyan selects, int64, ascending.

    Krum's choice among the clients that are left is taken out, again and again (El
    Mhamdi et al. 2018, section 4). Where fewer than f + 3 are left, Krum's score is the
    distance to the nearest other: there the paper's number of neighbours, |left| - f -
    2, is 0.
    """
    left = torch.arange(len(sqdist))
    selected = []
    for _ in range(len(sqdist) - 2 * f):
        of_left = sqdist.double().cpu()[left][:, left]
        best = int(choose_by_krum(of_left, min(f, len(left) - 3), 1))
        selected.append(int(left[best]))
        left = torch.cat([left[:best], left[best + 1 :]])
    return torch.tensor(sorted(selected))


def mix_neighbors(delta: Tensor, f: int) -> Tensor:
    """Each update [S, P] replaced by the mean of its S - f nearest, itself included.

    This is nearest neighbour mixing (Allouah et al. 2023, Algorithm 2), which goes
    before a defence. Of equally near updates the earlier one is taken.
    """
    count = len(delta) - f
    sqdist = ops.pairwise_sqdist(delta).double().cpu().clone().fill_diagonal_(-1.0)
    nearest = sqdist.sort(dim=1, stable=True).indices[:, :count]
    index = to_device(nearest.sort(1).values, delta.device)
    weight = torch.full(index.shape, 1 / count, dtype=torch.float64)
    return ops.aggregate(delta, to_device(weight, delta.device), index)


def _trust_weights(
    delta: Tensor,  # [S, P]
    trusted_row: int,
) -> Tensor:  # [1, S]
    """FLTrust's weights [1, S]: cosines with the trusted update, by ratios of lengths.

    The ratios bring each update to the length of the trusted one. An update that is
    1e12 times as short has no weight: it is zero, or what rounding left of one.
    """
    trusted = delta[trusted_row : trusted_row + 1]
    trust = cosine_matrix(delta, trusted)[:, 0].clamp(min=0)
    trust[trusted_row] = 1.0
    ratio = length_ratios(delta, trusted_row)
    is_nothing = ratio > 1e12
    trust = torch.where(is_nothing, 0.0, trust)
    ratio = torch.where(is_nothing, 0.0, ratio)
    return (trust / trust.sum() * ratio)[None]


# functions ------------------------------------------------------------------------
def _row_of(
    mean: Mean, updates: Tensor, shares: Tensor | None = None, **state: Tensor
) -> Tensor:
    """The mean [P] of updates [S, P], with equal shares where none are given."""
    _check_rows(updates, mean.clients_needed, mean)
    count = len(updates)
    size = torch.ones(count, dtype=torch.float64)
    if shares is not None:
        fits = shares.shape == (count,)
        fits = fits and bool((shares >= 0).all() and shares.sum() > 0)
        require(fits, "shares", f"{count} numbers >= 0, not all 0", shares)
        size = shares.double().cpu()
    cohort = Cohort(torch.arange(count), size, count)
    shares = cohort.mean_weights().weight
    rows, weight = mean.weigh(MeanInput(updates, shares, cohort, state))
    return ops.aggregate(rows, to_device(weight, rows.device))[0]


def _check_rows(updates: Tensor, needed: int = 1, mean: Mean | None = None) -> None:
    """Raises ValueError where the updates are no rows of numbers, or too few."""
    fits = isinstance(updates, Tensor) and is_dense(updates)
    fits = fits and updates.is_floating_point()
    fits = fits and updates.dim() == 2 and len(updates) > 0
    expected = "rows [S, P] of floating point numbers, one for each client"
    require(fits, "updates", expected, updates)
    expected = f"at least {needed} rows for {mean}"
    require(len(updates) >= needed, "updates", expected, len(updates))


def median(updates: Tensor) -> Tensor:
    """The row of `Median` [P] for updates [S, P]."""
    return _row_of(Median(), updates)


def trimmed_mean(updates: Tensor, num_byzantine: int) -> Tensor:
    """The row of `TrimmedMean` [P] for updates [S, P]."""
    return _row_of(TrimmedMean(num_byzantine), updates)


def mean_around_median(updates: Tensor, num_byzantine: int) -> Tensor:
    """The row of `MeanAroundMedian` [P] for updates [S, P]."""
    return _row_of(MeanAroundMedian(num_byzantine), updates)


def krum(updates: Tensor, num_byzantine: int) -> Tensor:
    """The row of `Krum` [P] for updates [S, P]."""
    return _row_of(Krum(num_byzantine), updates)


def multi_krum(updates: Tensor, num_byzantine: int) -> Tensor:
    """The row of `MultiKrum` [P] for updates [S, P]."""
    return _row_of(MultiKrum(num_byzantine), updates)


def bulyan(updates: Tensor, num_byzantine: int) -> Tensor:
    """The row of `Bulyan` [P] for updates [S, P]."""
    return _row_of(Bulyan(num_byzantine), updates)


def geometric_median(updates: Tensor) -> Tensor:
    """The row of `GeometricMedian` [P] for updates [S, P]."""
    return _row_of(GeometricMedian(), updates)


def centered_clipping(
    updates: Tensor,
    clip_norm: float,
    center: Tensor | None = None,
    clip_steps: int = 1,
) -> Tensor:
    """The row of `CenteredClipping` [P] for updates [S, P], from a center [P] or 0."""
    mean = CenteredClipping(clip_norm, clip_steps)
    if center is None:
        return _row_of(mean, updates)
    _check_rows(updates)
    expected = f"[{updates.shape[-1]}]"
    require(center.shape == updates.shape[-1:], "center", expected, center.shape)
    return _row_of(mean, updates, center=center)


@checked
def clip(updates: Tensor, clip_norm: PositiveFloat) -> Tensor:
    """The updates [S, P], each shortened to at most the length `clip_norm`."""
    _check_rows(updates)
    norm = torch.linalg.vector_norm(updates, dim=1, keepdim=True, dtype=torch.float64)
    factor = (clip_norm / norm.clamp(min=clip_norm)).to(updates.dtype)
    shortened: Tensor = updates * factor
    return shortened


def clip_to_median(updates: Tensor, shares: Tensor | None = None) -> Tensor:
    """The row of `ClipToMedian` [P] for updates [S, P].

    Args:
        updates: [S, P] one row for each client.
        shares: [S] the clients' shares in the mean, such as their numbers of samples;
            they are divided by their sum. None means equal shares.
    """
    return _row_of(ClipToMedian(), updates, shares)


@checked
def fltrust(updates: Tensor, trusted: NonNegativeInt) -> Tensor:
    """The row of `FLTrust` [P] for updates [S, P], of which it trusts one row."""
    _check_rows(updates)
    expected = f"a row of the {len(updates)} updates"
    require(trusted < len(updates), "trusted", expected, trusted)
    return _row_of(FLTrust(trusted), updates)


def nearest_neighbor_mixing(updates: Tensor, num_byzantine: int) -> Tensor:
    """The updates [S, P] that `NearestNeighborMixing` hands on."""
    mean = NearestNeighborMixing(num_byzantine)
    _check_rows(updates, mean.clients_needed, mean)
    return mix_neighbors(updates, num_byzantine)
