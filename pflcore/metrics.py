"""What the papers report, as pure functions on one number per client (or per round).

A vector holds one value per client, unweighted: each client counts once however many samples it has
(Motley, section 4). A NaN is a client without a value, a client without test samples for
instance: it is left out, and a vector with nothing left gives NaN, never an error. An infinite
value, a loss that diverged, stays in: means and deviations are infinite with it. Standard
deviations are the population's (ddof = 0), as in both papers, so N = 1 gives 0. Means are taken in
float64. Shares and accuracies are in [0, 1]; only functions that say "percent" return percents.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import annotated_types as at
import torch
from torch import Tensor

from pflcore.check import ANYTHING, Count, Fraction, checked, need, optional, refuse

__all__ = [
    "hurt",
    "worst_decile",
]
Vector = Annotated[Tensor | Sequence[float | None], ANYTHING]  # `vector` says what is none
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
        refuse(name, "a vector of numbers, one per client", values)
    need(n in (None, len(out)), name, f"{n} entries, as the other vector has", values)
    return out


def _kept(values: Vector) -> Tensor:
    out = vector(values)
    return out[~out.isnan()]


def count(values: Vector) -> int:
    """How many clients have a value (are not NaN)."""
    return len(_kept(values))


def mean(values: Vector) -> float:
    """Mean over clients, each counted once."""
    return _kept(values).mean().item()


def std(values: Vector) -> float:
    """Population standard deviation over clients (ddof = 0): the papers' measure of fairness."""
    kept = _kept(values)
    if kept.isinf().any():
        return math.inf  # not NaN, which would read as "no clients"
    return kept.std(correction=0).item() if len(kept) else math.nan


def weighted_mean(values: Vector, weight: Vector) -> float:
    """Mean weighted by `weight` (samples per client), over the clients that have both a value and a
    positive weight."""
    v = vector(values)
    w = vector(weight, "weight", len(v))
    need(not (w < 0).any(), "weight", "numbers of samples, at least 0", weight)
    keep = ~v.isnan() & (w > 0)
    return ((v[keep] * w[keep]).sum() / w[keep].sum()).item()


@checked
def worst_decile(values: Vector, share: Fraction = 0.1, higher_is_better: bool = True) -> float:
    """Mean of the worst `ceil(share * n)` clients, at least one (n counts the clients that have a
    value)."""
    kept = _kept(values)
    # 0.1 * 30 is 3.0000000000000004 in floating point
    k = max(1, math.ceil(share * len(kept) - 1e-9))
    return kept.sort(descending=not higher_is_better).values[:k].mean().item()


@checked
def percentile(values: Vector, q: Percent = 10.0) -> float:
    """The q-th percentile over clients, linearly interpolated; q in [0, 100]. Beside an infinite
    value nothing is interpolated."""
    kept = _kept(values)
    if not len(kept):
        return math.nan
    return kept.quantile(q / 100).nan_to_num(math.inf).item()  # NaN between two infinite values


def hurt(after: Vector, before: Vector, higher_is_better: bool = True) -> float:
    """Percent of clients that are strictly worse `after` than `before` (Motley, section 4).

    The denominator is the clients with a `before`; one whose `after` is NaN has lost its model, so
    it is hurt.
    """
    b = vector(before, "before")
    a = vector(after, "after", len(b))
    keep = ~b.isnan()
    a, b = a[keep], b[keep]
    worse = (a < b if higher_is_better else a > b) | a.isnan()
    return 100 * worse.double().mean().item()


def best(curve: Vector, higher_is_better: bool = True) -> Point:
    """Best value over rounds, at the first round that has it. On test data this selects on test
    data: label it so."""
    v = vector(curve, "curve")
    if v.isnan().all():
        return Point(math.nan, -1)
    i = int((v if higher_is_better else -v).nan_to_num(-math.inf, math.inf, -math.inf).argmax())
    return Point(v[i].item(), i)


def final(curve: Vector) -> float:
    """The last round's value; NaN when that round has none (a diverged run has no final
    accuracy)."""
    v = vector(curve, "curve")
    return v[-1].item() if len(v) else math.nan


@checked
def last_mean(curve: Vector, rounds: Vector | None = None, k: Count = 10) -> float:
    """Mean over the last k rounds. With evaluations every few rounds pass their `rounds`: those
    later than `last - k` count."""
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
        need(fits, "scores and y", "scores for each of y", shapes)


@checked
def _won(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The class [...] that the scores say, below 0 where one is NaN, and the labels [...] from 0;
    by the largest of `scores` [..., C], or of one score by its sign."""
    _check_pair(scores, y, True)
    lost = -(1 << 60)
    if scores.dim() > y.dim() and scores.shape[-1] > 1:
        # of scores with a NaN, argmax takes the NaN's place
        return scores.argmax(-1).masked_fill(scores.isnan().any(-1), lost), y
    one = scores.reshape(y.shape)
    return (one > 0).long().masked_fill(one.isnan(), lost), (y > 0).long()


def right(scores: Tensor, y: Tensor) -> Tensor:
    """Bool like `y` [...]: which samples `scores` [..., C], or one score [..., 1] or [...] by its
    sign, get right; NaN never is.

    A score of 0 says the negative class, be its label 0 or -1.
    """
    won, labels = _won(scores, y)
    return won == labels


def human(size: float) -> str:
    """Bytes in binary units: 1536 -> "1.5 KiB"."""
    unit = 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"


# one client's scores and labels -> a number, by name ------------------------


# columns of a record
RECORDED = ("loss", "accuracy", "size", "train_loss", "client", "clients", "round", "seed")


def metrics_of(
    metrics: Sequence[str | Metric] | Mapping[str, Metric], classes: bool
) -> dict[str, Metric]:
    """Functions of one client's (scores, labels) by name: those of `METRICS` for labels
    (`classes`) or for targets, or one's own, which goes by its `__name__` or by its key. ValueError
    or ImportError in one sentence."""
    out: dict[str, Metric] = {}
    pairs = metrics.items() if isinstance(metrics, Mapping) else zip(metrics, metrics, strict=True)
    for key, metric in pairs:
        name = key if isinstance(key, str) else getattr(key, "__name__", type(key).__name__)
        if name in RECORDED or name in out:
            raise ValueError(
                f"metrics: {name!r} is {'there twice' if name in out else 'recorded anyway'}; "
                "leave it out or rename it."
            )
        out[name] = _by_name(metric, classes) if isinstance(metric, str) else metric
    return out


def measured_by(
    name: str, metric: Metric, pairs: Sequence[tuple[Tensor, Tensor]], clients: Sequence[int]
) -> Tensor:
    """`metric` of each of the `clients`' (scores, labels): float64 [S], NaN where it has no value.
    ValueError where it breaks."""
    values = []
    for (scores, y), i in zip(pairs, clients, strict=True):
        try:
            values.append(float(metric(scores.detach(), y)))
        except Exception as error:
            raise ValueError(
                f"metrics: {name!r} failed for client {i} with {type(error).__name__}: {error}."
            ) from error
    return torch.tensor(values, dtype=torch.float64)


def _by_name(name: str, classes: bool) -> Metric:
    known = [k for k in METRICS if (k in FOR_LABELS) is classes]
    if name not in known:
        kinds = ("labels", "targets") if classes else ("targets", "labels")
        why = f"and {name!r} is for {kinds[1]}" if name in METRICS else f"got {name!r}"
        raise ValueError(
            f"metrics: for {kinds[0]} there are {', '.join(known)}, or a function of (scores, "
            f"labels), {why}."
        )
    _sklearn()
    return METRICS[name]


def _sklearn() -> Any:
    return optional("sklearn.metrics", "metrics: this one")


def auc(scores: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of scores [n] or [n, C] and labels [n]; of several classes the mean
    of one against the rest, over those that some samples have and some lack."""
    labels = _won(scores, y)[1].reshape(-1).cpu()
    scores = scores.detach().reshape(len(labels), -1).double().cpu()
    several = scores.shape[1]
    if several == 2:
        scores = scores[:, 1:] - scores[:, :1]
    elif several > 2 and not (
        (scores >= 0).all() and torch.allclose(scores.sum(1), scores.new_ones(()))
    ):
        # logits of different samples are comparable between samples only as probabilities
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
    """F1 of scores [n] or [n, C] and labels [n]: of class 1 where there are two, else the
    unweighted mean over the classes that samples have or were given."""
    won, labels = (v.reshape(-1).cpu() for v in _won(scores, y))
    single = scores.numel() <= 2 * y.numel()
    classes = [1] if single else [c for c in torch.cat([labels, won]).unique().tolist() if c >= 0]
    how: Any = {"labels": classes, "average": "macro", "zero_division": math.nan}
    return float(_sklearn().f1_score(labels, won, **how)) if len(labels) else math.nan


def balanced_accuracy(scores: Tensor, y: Tensor) -> float:
    """The mean over the classes that samples have of the share of them that is right, by scores [n]
    or [n, C] and labels [n]."""
    won, labels = (v.reshape(-1) for v in _won(scores, y))
    return mean([(won[labels == c] == c).double().mean().item() for c in labels.unique()])


@checked
def _errors(scores: Tensor, y: Tensor) -> Tensor:
    _check_pair(scores, y)
    return scores.detach().reshape(y.shape).double() - y.double()


def mae(scores: Tensor, y: Tensor) -> float:
    """Mean absolute error of scores [n, ...] against targets of as many elements."""
    return _errors(scores, y).abs().mean().item()


def rmse(scores: Tensor, y: Tensor) -> float:
    """Root of the mean squared error of scores [n, ...] against targets of as many elements."""
    return _errors(scores, y).square().mean().sqrt().item()


def r2(scores: Tensor, y: Tensor) -> float:
    """Coefficient of determination of scores [n, ...] for targets of as many elements; NaN for
    fewer than two samples; of several outputs the unweighted mean."""
    finite = bool(_errors(scores, y).isfinite().all())
    if len(y) < 2 or not finite:
        return math.nan
    found, targets = (v.detach().reshape(y.shape).double().cpu() for v in (scores, y))
    return float(_sklearn().r2_score(targets, found))


METRICS: dict[str, Metric] = {f.__name__: f for f in (auc, f1, balanced_accuracy, mae, rmse, r2)}
FOR_LABELS = ("auc", "f1", "balanced_accuracy")  # the others are for targets
