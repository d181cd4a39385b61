"""What the papers report, as pure functions on one number per client (or per round).

A vector holds one value per client, unweighted: each client counts once however many
samples it has (Motley, section 4). A NaN is a client without a value, a client without
test samples for instance: it is left out, and a vector with nothing left gives NaN,
never an error. An infinite value, a loss that diverged, stays in: means and deviations
are infinite with it. Standard deviations are the population's (ddof = 0), as in both
papers, so N = 1 gives 0. Means are taken in float64. Shares and accuracies are in
[0, 1]; only functions that say "percent" return percents.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import annotated_types as at
import torch
from torch import Tensor

from pflcore.check import (
    EXPECT_ANYTHING,
    Fraction,
    PositiveInt,
    checked,
    closest_name,
    import_optional,
    reject,
    require,
)

__all__ = [
    "hurt",
    "worst_decile",
]
# `vector` says what is none
Vector = Annotated[Tensor | Sequence[float | None], EXPECT_ANYTHING]
Percent = Annotated[float, at.Interval(ge=0, le=100), at.doc("a number in [0, 100]")]
# (scores [n, ...], labels [n, ...]) of one client -> a number
Metric = Callable[[Tensor, Tensor], Any]


class Point(NamedTuple):
    """One value of a curve and the place it was found."""

    value: float
    at: int  # index into the curve, from 0; -1 when the curve has no value


def vector(values: Vector, name: str = "values", n: int | None = None) -> Tensor:
    """`values` as a float64 vector on the CPU, `[n]`; None becomes NaN."""
    try:
        numbers = values
        if not isinstance(values, Tensor):
            numbers = [math.nan if v is None else float(v) for v in values]
        out = torch.as_tensor(numbers, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError):
        out = torch.empty(())
    if out.ndim != 1:
        reject(name, "a vector of numbers, one per client", values)
    require(
        n in (None, len(out)), name, f"{n} entries, as the other vector has", values
    )
    return out


def _present(values: Vector) -> Tensor:
    out = vector(values)
    return out[~out.isnan()]


def count(values: Vector) -> int:
    """How many clients have a value (are not NaN)."""
    return len(_present(values))


def mean(values: Vector) -> float:
    """Mean over clients, each counted once."""
    return _present(values).mean().item()


def std(values: Vector) -> float:
    """Population standard deviation over clients (ddof = 0): the papers' measure of
    fairness."""
    kept = _present(values)
    if kept.isinf().any():
        return math.inf  # not NaN, which would read as "no clients"
    return kept.std(correction=0).item() if len(kept) else math.nan


def weighted_mean(values: Vector, weight: Vector) -> float:
    """Mean weighted by `weight` (samples per client), over the clients that have both a
    value and a positive weight."""
    v = vector(values)
    w = vector(weight, "weight", len(v))
    require(not (w < 0).any(), "weight", "numbers of samples, at least 0", weight)
    keep = ~v.isnan() & (w > 0)
    return ((v[keep] * w[keep]).sum() / w[keep].sum()).item()


@checked
def worst_decile(
    values: Vector, share: Fraction = 0.1, higher_is_better: bool = True
) -> float:
    """Mean of the worst `ceil(share * n)` clients, at least one (n counts the clients
    that have a value)."""
    kept = _present(values)
    # 0.28 * 25 is 7.000000000000001 in floating point
    k = max(1, math.ceil(share * len(kept) - 1e-9))
    return kept.sort(descending=not higher_is_better).values[:k].mean().item()


@checked
def percentile(values: Vector, q: Percent = 10.0) -> float:
    """The q-th percentile over clients, linearly interpolated; q in [0, 100]. Beside an
    infinite value nothing is interpolated."""
    kept = _present(values)
    if not len(kept):
        return math.nan
    # NaN between two infinite values
    return kept.quantile(q / 100).nan_to_num(math.inf).item()


def hurt(after: Vector, before: Vector, higher_is_better: bool = True) -> float:
    """Percent of clients that are strictly worse `after` than `before` (Motley, section
    4).

    The denominator is the clients with a `before`; one whose `after` is NaN has lost
    its model, so it is hurt.
    """
    b = vector(before, "before")
    a = vector(after, "after", len(b))
    keep = ~b.isnan()
    a = a[keep]
    b = b[keep]
    worse = (a < b if higher_is_better else a > b) | a.isnan()
    return 100 * worse.double().mean().item()


def best(curve: Vector, higher_is_better: bool = True) -> Point:
    """Best value over rounds, at the first round that has it. On test data this selects
    on test data: label it so."""
    v = vector(curve, "curve")
    if v.isnan().all():
        return Point(math.nan, -1)
    i = int(
        (v if higher_is_better else -v)
        .nan_to_num(-math.inf, math.inf, -math.inf)
        .argmax()
    )
    return Point(v[i].item(), i)


def final(curve: Vector) -> float:
    """The last round's value; NaN when that round has none (a diverged run has no final
    accuracy)."""
    v = vector(curve, "curve")
    return v[-1].item() if len(v) else math.nan


@checked
def last_mean(
    curve: Vector, rounds: Vector | None = None, k: PositiveInt = 10
) -> float:
    """Mean over the last k rounds. With evaluations every few rounds pass their
    `rounds`: those later than `last - k` count."""
    v = vector(curve, "curve")
    if not len(v):
        return math.nan
    at = vector(range(len(v)) if rounds is None else rounds, "rounds", len(v))
    return mean(v[at > at[-1] - k])


def _check_pair(scores: Tensor, y: Tensor, classes: bool = False) -> None:
    each = scores.shape[:-1] == y.shape
    if not (each and classes):
        fits = scores.numel() == y.numel() and (each or scores.shape[:1] == y.shape[:1])
        shapes = f"shapes {list(scores.shape)} and {list(y.shape)}"
        require(fits, "scores and y", "scores for each of y", shapes)


@checked
def _predicted_classes(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The class [...] that the scores say, below 0 where one is NaN, and the labels
    [...] from 0; by the largest of `scores` [..., C], or of one score by its sign."""
    _check_pair(scores, y, True)
    lost = -(1 << 60)
    if scores.dim() > y.dim() and scores.shape[-1] > 1:
        # of scores with a NaN, argmax takes the NaN's place
        return scores.argmax(-1).masked_fill(scores.isnan().any(-1), lost), y
    one = scores.reshape(y.shape)
    return (one > 0).long().masked_fill(one.isnan(), lost), (y > 0).long()


def is_correct(scores: Tensor, y: Tensor) -> Tensor:
    """Bool like `y` [...]: which samples `scores` [..., C], or one score [..., 1] or
    [...] by its sign, get right; NaN never is.

    A score of 0 says the negative class, be its label 0 or -1.
    """
    won, labels = _predicted_classes(scores, y)
    return won == labels


def human_bytes(size: float) -> str:
    """Bytes in binary units: 1536 -> "1.5 KiB"."""
    unit = 0
    while size >= 1024 and unit < 4:
        size = size / 1024
        unit = unit + 1
    return (
        f"{size:.0f} B"
        if unit == 0
        else f"{size:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"
    )


# what a function of one's own is handed ---------------------------------------


class ArgumentForm(NamedTuple):
    """The form in which a function of (scores, targets) takes one score a target."""

    scores_like_targets: bool = False  # scores in the targets' shape
    targets_as_floats: bool = False  # whole numbers as targets become floats

    def convert(self, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The scores and targets [B, ...] in this form; others than one score a target
        as they are."""
        if (self.scores_like_targets or self.targets_as_floats) and has_one_score_each(
            scores, y
        ):
            scores = scores.reshape(y.shape) if self.scores_like_targets else scores
            y = (
                y.to(scores.dtype)
                if self.targets_as_floats and not y.is_floating_point()
                else y
            )
        return scores, y


def has_one_score_each(scores: Tensor, y: Tensor) -> bool:
    """Whether the shapes of scores and targets [B, ...] are the same, but for axes
    of length 1."""
    own, others = ([n for n in t.shape[1:] if n != 1] for t in (scores, y))
    return scores.shape[:1] == y.shape[:1] and own == others


def find_argument_form(
    f: Metric, scores: Tensor, y: Tensor, is_loss: bool = False
) -> ArgumentForm | None:
    """The form that `f` takes, tried on drawn scores; None where two forms give two
    values, and neither shows that it is the wrong one.

    Scores [B, 1] beside targets [B] are spread to [B, B] by most functions, and then it
    does not matter which sample has which target. The scores are drawn between targets
    of other samples: so a function that pairs each score with its own target gives
    another value by as much as the targets differ, whatever their scale. A loss
    (`is_loss`) is tried with its slopes, and may take whole numbers as floats.
    """
    for as_floats in (False, True)[: 2 if is_loss and not y.is_floating_point() else 1]:
        for dtype in dict.fromkeys((torch.float64, scores.dtype)):
            tried = _FormProbe(f, scores.shape[1:], y, dtype, as_floats, is_loss)
            if tried.original_values or tried.reshaped_values:
                form = tried.find_form()
                return form and form._replace(targets_as_floats=as_floats)
    return ArgumentForm()  # it fails on its own


PROBE_DRAWS = 2
PROBE_SAMPLES = 7  # an odd number, so that of two labels one is more frequent
DrawValues = dict[int, float]  # by the number of the draw, where the function gives one


class _FormProbe:
    """The values of a function for drawn scores in both shapes, where it gives any."""

    def __init__(
        self,
        f: Metric,
        shape: tuple[int, ...],  # of one sample's scores
        y: Tensor,
        dtype: torch.dtype,
        as_floats: bool,
        with_gradient: bool,
    ) -> None:
        self.f = f
        self.with_gradient = with_gradient
        self.shape = (PROBE_SAMPLES, *shape)
        pairs = list(_draw_pairs(y))
        floats = as_floats or y.is_floating_point()
        # torch makes float32 of whole numbers
        self.relative_tolerance = 1e-9 if floats and dtype == torch.float64 else 1e-5
        self.pairs = [
            (s.to(dtype), t.to(dtype) if floats else t.to(y.dtype)) for s, t in pairs
        ]
        each = enumerate(self.pairs)
        self.original_values = self.evaluate_draws(
            (k, s.view(self.shape), t) for k, (s, t) in each
        )
        self.reshaped_values = self.evaluate_draws(
            (k, *pair) for k, pair in enumerate(self.pairs)
        )

    def evaluate_draws(self, draws: Iterable[tuple[int, Tensor, Tensor]]) -> DrawValues:
        found = {}
        for k, scores, y in draws:
            try:
                with torch.enable_grad():
                    given = scores.clone().requires_grad_(self.with_gradient)
                    value: Any = self.f(given, y)
                    if self.with_gradient:
                        torch.autograd.grad(value.sum(), given, allow_unused=True)
                found[k] = float(value)
            except Exception:  # outside of its domain, or not in this shape
                continue
        return found

    def find_form(self) -> ArgumentForm | None:
        if not self.reshaped_values:
            return ArgumentForm()
        both = self.original_values.keys() & self.reshaped_values.keys()
        known = [
            k
            for k in both
            if self.are_finite(self.original_values[k], self.reshaped_values[k])
        ]
        other = [
            k
            for k in known
            if not self.is_close(self.original_values[k], self.reshaped_values[k])
        ]
        if known and not other:
            return ArgumentForm()
        # the same once more, and with targets of other samples
        again = self.evaluate_draws(
            (k, self.pairs[k][0].view(self.shape), self.pairs[k][1]) for k in other
        )
        if again != {k: self.original_values[k] for k in other}:
            return ArgumentForm()  # it changes from call to call
        moved = self.evaluate_draws(
            (k, self.pairs[k][0].view(self.shape), self.pairs[k][1].roll(1, 0))
            for k in other
        )
        spread = all(
            self.is_close(moved.get(k, math.nan), self.original_values[k])
            for k in other
        )
        return ArgumentForm(scores_like_targets=True) if spread else None

    def is_close(self, one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=self.relative_tolerance)

    @staticmethod
    def are_finite(*values: float) -> bool:
        return all(map(math.isfinite, values))


def _draw_pairs(y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and targets [ROWS, ...] float64 at the scale of the targets `y` [B, ...]:
    between the smallest and the largest, between 0 and 1, and on both sides of 0."""
    known = y.detach().reshape(-1)[:4096].double().unique()
    if len(known) < 2:  # targets that are all the same show nothing
        c = float(known[0]) if len(known) else 0.0
        half = c / 2 if y.is_floating_point() else c // 2
        known = torch.tensor(
            [c, half if c else 1.0], device=y.device, dtype=torch.float64
        )
    draws = torch.Generator().manual_seed(0)
    count = PROBE_SAMPLES * y[:1].numel()
    for _ in range(PROBE_DRAWS):
        order = torch.randperm(count, generator=draws)
        place = torch.linspace(0, len(known) - 1, count).long()[order]
        targets = known[place.to(known.device)].view(PROBE_SAMPLES, *y.shape[1:])
        share = (0.05 + 0.4 * torch.rand(targets.shape, generator=draws)).to(targets)
        scores = targets.roll(2, 0).lerp(targets.roll(3, 0), share)
        low, high = scores.aminmax()
        yield scores, targets
        yield 0.1 + 0.8 * (scores - low) / (high - low).clamp(min=1e-300), targets
        # a mean of 0 would hide what is multiplied by it
        yield scores - scores.median(), targets


class CustomMetric:
    """A metric of one's own, handed one score a target in the form that it takes."""

    def __init__(self, name: str, metric: Metric) -> None:
        self.name = name
        self.metric = metric
        self._argument_form: ArgumentForm | None = None

    def __call__(self, scores: Tensor, y: Tensor) -> Any:
        if scores.shape != y.shape and has_one_score_each(scores, y) and len(y):
            if self._argument_form is None:
                self._argument_form = find_argument_form(self.metric, scores, y)
            if self._argument_form is None:
                raise ValueError(
                    f"it gives another value for scores {list(scores.shape)} than in "
                    "the shape of "
                    f"the targets, {list(y.shape)}; let it begin with "
                    "scores.reshape(y.shape)"
                )
            scores, y = self._argument_form.convert(scores, y)
        return self.metric(scores, y)


# one client's scores and labels -> a number, by name ------------------------


# columns of a record
RECORD_COLUMNS = (
    "loss",
    "accuracy",
    "size",
    "train_loss",
    "client",
    "clients",
    "round",
    "seed",
)


def metrics_of(
    metrics: Sequence[str | Metric] | Mapping[str, Metric], classes: bool
) -> dict[str, Metric]:
    """Functions of one client's (scores, labels) by name: those of `METRICS` for labels
    (`classes`) or for targets, or one's own, which goes by its `__name__` or by its
    key. ValueError or ImportError in one sentence."""
    out: dict[str, Metric] = {}
    pairs = (
        metrics.items()
        if isinstance(metrics, Mapping)
        else zip(metrics, metrics, strict=True)
    )
    for key, metric in pairs:
        name = (
            key
            if isinstance(key, str)
            else getattr(key, "__name__", type(key).__name__)
        )
        if name in RECORD_COLUMNS or name in out:
            raise ValueError(
                f"metrics: {name!r} is "
                f"{'there twice' if name in out else 'recorded anyway'}; "
                "leave it out or rename it."
            )
        out[name] = (
            _by_name(metric, classes)
            if isinstance(metric, str)
            else CustomMetric(name, metric)
        )
    return out


def measured_by(
    name: str,
    metric: Metric,
    pairs: Sequence[tuple[Tensor, Tensor]],
    clients: Sequence[int],
) -> Tensor:
    """`metric` of each of the `clients`' (scores, labels): float64 [S], NaN where it
    has no value. ValueError where it breaks."""
    values = []
    for (scores, y), i in zip(pairs, clients, strict=True):
        try:
            values.append(float(metric(scores.detach(), y)))
        except Exception as error:
            raise ValueError(
                f"metrics: {name!r} failed for client {i} with {type(error).__name__}: "
                f"{error}."
            ) from error
    return torch.tensor(values, dtype=torch.float64)


def _by_name(name: str, classes: bool) -> Metric:
    known = [k for k in METRICS if (k in FOR_LABELS) is classes]
    if name not in known:
        kinds = ("labels", "targets") if classes else ("targets", "labels")
        why = f"and {name!r} is for {kinds[1]}" if name in METRICS else f"got {name!r}"
        near = None if name in METRICS else closest_name(name, known)
        why += f"; did you mean {near!r}" if near is not None else ""
        if name in FOR_LABELS:
            why += (
                ", of which one score each is known to be a logit by the loss alone, "
                "such as "
                "'binary_cross_entropy' or nn.BCEWithLogitsLoss(pos_weight=...)"
            )
        raise ValueError(
            f"metrics: for {kinds[0]} there are {', '.join(known)}, or a function of "
            "(scores, "
            f"labels), {why}."
        )
    _sklearn()
    return METRICS[name]


def _sklearn() -> Any:
    return import_optional("sklearn.metrics", "metrics: this one")


def auc(scores: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of scores [n] or [n, C] and labels [n]; of several
    classes the mean of one against the rest, over those that some samples have and some
    lack."""
    labels = _predicted_classes(scores, y)[1].reshape(-1).cpu()
    scores = scores.detach().reshape(len(labels), -1).double().cpu()
    several = scores.shape[1]
    if several == 2:
        scores = scores[:, 1:] - scores[:, :1]
    elif several > 2 and not (
        (scores >= 0).all() and torch.allclose(scores.sum(1), scores.new_ones(()))
    ):
        # logits of different samples are comparable between samples only as
        # probabilities
        scores = scores.softmax(1)
    if not scores.isfinite().all():
        return math.nan
    columns = {1: scores} if several < 3 else dict(enumerate(scores.T))
    areas = [
        _sklearn().roc_auc_score(labels == c, s)
        for c, s in columns.items()
        if 0 < int((labels == c).sum()) < len(labels)
    ]
    return mean(areas)


def f1(scores: Tensor, y: Tensor) -> float:
    """F1 of scores [n] or [n, C] and labels [n]: of class 1 where there are two, else
    the unweighted mean over the classes that samples have or were given."""
    won, labels = (v.reshape(-1).cpu() for v in _predicted_classes(scores, y))
    single = scores.numel() <= 2 * y.numel()
    classes = (
        [1]
        if single
        else [c for c in torch.cat([labels, won]).unique().tolist() if c >= 0]
    )
    how: Any = {"labels": classes, "average": "macro", "zero_division": math.nan}
    return float(_sklearn().f1_score(labels, won, **how)) if len(labels) else math.nan


def balanced_accuracy(scores: Tensor, y: Tensor) -> float:
    """The mean over the classes that samples have of the share of them that is right,
    by scores [n] or [n, C] and labels [n]."""
    won, labels = (v.reshape(-1) for v in _predicted_classes(scores, y))
    return mean(
        [(won[labels == c] == c).double().mean().item() for c in labels.unique()]
    )


@checked
def _errors(scores: Tensor, y: Tensor) -> Tensor:
    _check_pair(scores, y)
    return scores.detach().reshape(y.shape).double() - y.double()


def mae(scores: Tensor, y: Tensor) -> float:
    """Mean absolute error of scores [n, ...] against targets of as many elements."""
    return _errors(scores, y).abs().mean().item()


def rmse(scores: Tensor, y: Tensor) -> float:
    """Root of the mean squared error of scores [n, ...] against targets of as many
    elements."""
    return _errors(scores, y).square().mean().sqrt().item()


def r2(scores: Tensor, y: Tensor) -> float:
    """Coefficient of determination of scores [n, ...] for targets of as many elements;
    NaN for fewer than two samples; of several outputs the unweighted mean."""
    finite = bool(_errors(scores, y).isfinite().all())
    if len(y) < 2 or not finite:
        return math.nan
    found, targets = (v.detach().reshape(y.shape).double().cpu() for v in (scores, y))
    return float(_sklearn().r2_score(targets, found))


METRICS: dict[str, Metric] = {
    f.__name__: f for f in (auc, f1, balanced_accuracy, mae, rmse, r2)
}
FOR_LABELS = ("auc", "f1", "balanced_accuracy")  # the others are for targets
# what is recorded by name, and whether more of it is better
HIGHER_IS_BETTER = {
    **dict.fromkeys(("accuracy", "auc", "f1", "balanced_accuracy", "r2"), True),
    **dict.fromkeys(("loss", "train_loss", "mae", "rmse"), False),
}


def is_higher_better(
    name: str, higher_is_better: bool | None = None, argument: str = "key"
) -> bool:
    """Whether more of a metric is better: as `higher_is_better` says, else as its name
    says.

    ValueError for a metric of one's own of which nobody said it.
    """
    words = (
        f"one of {', '.join(HIGHER_IS_BETTER)}, or a metric of your own with "
        "higher_is_better=True or False"
    )
    require(
        higher_is_better is not None or name in HIGHER_IS_BETTER, argument, words, name
    )
    return HIGHER_IS_BETTER[name] if higher_is_better is None else higher_is_better
