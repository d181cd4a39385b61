"""What the papers report, as pure functions on one number per client (or per round).

A vector holds one value per client, unweighted: each client counts once however many samples it has
(Motley, section 4). A NaN is a client without a value, a client without test samples for
instance: it is left out, and a vector with nothing left gives NaN, never an error. An infinite
value, a loss that diverged, stays in: means and deviations are infinite with it. Standard
deviations are the population's (ddof = 0), as in both papers, so N = 1 gives 0. Means are taken in
float64. Shares and accuracies are in [0, 1]; only functions that say "percent" return percents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import annotated_types as at
import torch
from torch import Tensor

from pflcore.check import ANYTHING, Count, Fraction, checked, shown

__all__ = [
    "auc",
    "balanced_accuracy",
    "best",
    "bytes_to_reach",
    "count",
    "f1",
    "final",
    "hurt",
    "largest_share",
    "last_mean",
    "mae",
    "mean",
    "paper_cell",
    "percentile",
    "r2",
    "right",
    "rmse",
    "std",
    "weighted_mean",
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


def vector(values: Vector, name: str = "values") -> Tensor:
    """`values` as a float64 vector on the CPU, `[n]`; None becomes NaN."""
    if isinstance(values, Tensor):
        out = values.detach().to("cpu", torch.float64)
    else:
        try:
            out = torch.tensor(
                [math.nan if v is None else float(v) for v in values], dtype=torch.float64
            )
        except (TypeError, ValueError):
            raise ValueError(
                f"{name}: expected a vector of numbers, got {shown(values)}."
            ) from None
    if out.ndim != 1:
        raise ValueError(
            f"{name}: expected a vector with one value per client, got shape {tuple(out.shape)}; "
            "pass one row of it."
        )
    return out


def _kept(values: Vector, name: str = "values") -> Tensor:
    out = vector(values, name)
    return out[~out.isnan()]


def _same_length(name: str, given: Sequence[int] | Tensor, other_name: str, other: Tensor) -> None:
    if len(given) != len(other):
        raise ValueError(
            f"{name}: expected as many entries as {other_name} has ({len(other)}), got "
            f"{len(given)}; pass vectors that match."
        )


def count(values: Vector) -> int:
    """How many clients have a value (are not NaN)."""
    return len(_kept(values))


def mean(values: Vector) -> float:
    """Mean over clients, each counted once."""
    kept = _kept(values)
    return kept.mean().item() if len(kept) else math.nan


def std(values: Vector) -> float:
    """Population standard deviation over clients (ddof = 0): the papers' measure of fairness."""
    kept = _kept(values)
    if kept.isinf().any():
        return math.inf  # not NaN, which would read as "no clients"
    return kept.std(correction=0).item() if len(kept) else math.nan


def weighted_mean(values: Vector, weight: Vector) -> float:
    """Mean weighted by `weight` (samples per client), over the clients that have both a value and a
    positive weight."""
    v, w = vector(values), vector(weight, "weight")
    _same_length("weight", w, "values", v)
    if (w < 0).any():
        raise ValueError(
            f"weight: expected numbers >= 0, got {w.min().item():g}; pass numbers of samples."
        )
    keep = ~v.isnan() & (w > 0)
    return ((v[keep] * w[keep]).sum() / w[keep].sum()).item() if keep.any() else math.nan


@checked
def worst_decile(values: Vector, share: Fraction = 0.1, higher_is_better: bool = True) -> float:
    """Mean of the worst `ceil(share * n)` clients, at least one (n counts the clients that have a
    value)."""
    kept = _kept(values)
    if not len(kept):
        return math.nan
    # 0.1 * 30 is 3.0000000000000004 in floating point
    k = max(1, math.ceil(share * len(kept) - 1e-9))
    return kept.sort(descending=not higher_is_better).values[:k].mean().item()


@checked
def percentile(values: Vector, q: Percent = 10.0) -> float:
    """The q-th percentile over clients, linearly interpolated; q in [0, 100]."""
    kept = _kept(values)
    if not len(kept):
        return math.nan
    ends = torch.stack(
        [torch.quantile(kept, q / 100, interpolation=side) for side in ("lower", "higher")]
    ).sum()
    # beside an infinite value nothing is interpolated
    return (torch.quantile(kept, q / 100) if ends.isfinite() else ends).item()


def hurt(after: Vector, before: Vector, higher_is_better: bool = True) -> float:
    """Percent of clients that are strictly worse `after` than `before` (Motley, section 4).

    The denominator is the clients with a `before`; one whose `after` is NaN has lost its model, so
    it is hurt.
    """
    a, b = vector(after, "after"), vector(before, "before")
    _same_length("after", a, "before", b)
    keep = ~b.isnan()
    a, b = a[keep], b[keep]
    worse = (a < b if higher_is_better else a > b) | a.isnan()
    return 100 * worse.double().mean().item() if len(b) else math.nan


def subpopulations(values: Vector, group: Tensor | Sequence[int]) -> dict[str, float]:
    """ "majority", "minority" (means over the clients whose `group` [n] is 0 and 1), "gap", and
    "variance" over all (ddof = 0).

    For accuracies in percent the gap is in points and the variance in percent squared (Hao et al.
    2020, Table 2).
    """
    v, g = vector(values), vector(group, "group")
    _same_length("group", g, "values", v)
    major, minor = mean(v[g == 0]), mean(v[g == 1])
    return {"majority": major, "minority": minor, "gap": major - minor, "variance": std(v) ** 2}


def largest_share(cluster: Tensor | Sequence[int]) -> float:
    """Share of the clients in the largest cluster; `cluster [n]` holds each client's cluster id,
    negative for none."""
    ids = vector(cluster, "cluster").long()
    ids = ids[ids >= 0]
    return ids.unique(return_counts=True)[1].max().item() / len(ids) if len(ids) else math.nan


def best(curve: Vector, higher_is_better: bool = True) -> Point:
    """Best value over rounds, at the first round that has it. On test data this selects on test
    data: label it so."""
    v = vector(curve, "curve")
    have = (~v.isnan()).nonzero()[:, 0]
    if not len(have):
        return Point(math.nan, -1)
    i = int(have[v[have].argmax() if higher_is_better else v[have].argmin()])
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
    at = torch.arange(len(v), dtype=torch.float64) if rounds is None else vector(rounds, "rounds")
    _same_length("rounds", at, "curve", v)
    return mean(v[at > at[-1] - k])


@checked
def bytes_to_reach(
    curve: Vector, sent: Sequence[int] | Tensor, goal: float, higher_is_better: bool = True
) -> int | None:
    """Bytes sent up to the first value that reaches `goal` (at least, or at most where lower is
    better); None if never.

    `sent` [T] is cumulative and has one entry per value of `curve` [T].
    """
    v = vector(curve, "curve")
    _same_length("sent", sent, "curve", v)
    reached = (v >= goal if higher_is_better else v <= goal).nonzero()
    return int(sent[int(reached[0])]) if len(reached) else None


def truncate_percent(share: float) -> float:
    """A share as a percent cut off (not rounded) after two decimals, as the WAFFLE paper's tables
    do: 0.97999 -> 97.99.

    The tolerance of 1e-9 percent keeps a share such as 0.29, whose percent is 28.999999999999996 in
    floating point, at 29.00.
    """
    return math.floor(share * 1e4 + 1e-7) / 100 if math.isfinite(share) else share


def paper_cell(shares: Vector) -> str:
    """`"97.99 ± 0.26"`: mean and population standard deviation over seeds in percent, both
    truncated (WAFFLE paper, Table 1)."""
    shares = vector(shares, "shares")
    return f"{truncate_percent(mean(shares)):.2f} ± {truncate_percent(std(shares)):.2f}"


def _check_pair(scores: Tensor, y: Tensor, classes: bool = False) -> None:
    if not (isinstance(scores, Tensor) and isinstance(y, Tensor)):
        raise ValueError(f"scores and y: expected two tensors, got {shown(scores)} and {shown(y)}.")
    one_each = scores.numel() == y.numel() and (
        scores.shape[:1] == y.shape[:1] or scores.shape[:-1] == y.shape
    )
    if not one_each and not (classes and scores.shape[:-1] == y.shape):
        raise ValueError(
            f"scores and y: expected scores for each of y, got shapes {list(scores.shape)} and "
            f"{list(y.shape)}."
        )


def right(scores: Tensor, y: Tensor) -> Tensor:
    """Bool like `y` [...]: which samples `scores` [..., C], or one score [..., 1] or [...] by its
    sign, get right; NaN never is.

    A score of 0 says the negative class, be its label 0 or -1.
    """
    _check_pair(scores, y, True)
    if scores.dim() > y.dim() and scores.shape[-1] > 1:
        # of scores with a NaN, argmax takes the NaN's place
        return (scores.argmax(-1) == y) & ~scores.isnan().any(-1)
    one = scores.reshape(y.shape)
    return ((one > 0) == (y > 0)) & ~one.isnan()


def human(size: float) -> str:
    """Bytes in binary units: 1536 -> "1.5 KiB"."""
    unit = 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"


# one client's scores and labels -> a number, by name through scikit-learn
# -----------------------------------------------------------


# columns of a record
RECORDED = ("loss", "accuracy", "size", "train_loss", "client", "clients", "round", "seed")


def metrics_of(
    metrics: Sequence[str | Metric] | Mapping[str, Metric], classes: bool
) -> dict[str, Metric]:
    """Functions of one client's (scores, labels) by name: of `CLASS_METRICS` for labels
    (`classes`), of `VALUE_METRICS` for targets, or one's own, which goes by its `__name__` or by
    its key. ValueError, TypeError or ImportError in one sentence."""
    if isinstance(metrics, str) or not isinstance(metrics, Mapping | Sequence):
        raise TypeError(
            "metrics: expected a list such as ['auc', my_function] or a dict of functions by "
            f"name, got {metrics!r}."
        )
    out: dict[str, Metric] = {}
    for key, metric in (
        metrics.items() if isinstance(metrics, Mapping) else ((None, m) for m in metrics)
    ):
        name = str(
            key
            or (
                metric
                if isinstance(metric, str)
                else getattr(metric, "__name__", type(metric).__name__)
            )
        )
        if name in RECORDED or name in out:
            raise ValueError(
                f"metrics: {name!r} is {'there twice' if name in out else 'recorded anyway'}; "
                "leave it out or rename it."
            )
        out[name] = _by_name(metric, classes) if isinstance(metric, str) else metric
        if not callable(out[name]):
            raise TypeError(
                f"metrics: expected a name or a function of (scores, labels), got {metric!r}."
            )
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
    known, other = (CLASS_METRICS, VALUE_METRICS) if classes else (VALUE_METRICS, CLASS_METRICS)
    if name not in known:
        what = "labels" if classes else "continuous targets"
        why = (
            f", and {name!r} is for {'targets' if classes else 'labels'}"
            if name in other
            else f", got {name!r}"
        )
        raise ValueError(
            f"metrics: for {what} there are {', '.join(known)}, or a function of (scores, "
            f"labels){why}."
        )
    _sklearn()
    return known[name]


def _sklearn() -> Any:
    try:
        import sklearn.metrics
    except ImportError:
        raise ImportError(
            "metrics: these are scikit-learn's, which is not installed; get it with: pip install "
            "scikit-learn."
        ) from None
    return sklearn.metrics


def _classes(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scores of class 1 [n] or of each class [n, C], the class that wins [n], -1 where a score is
    NaN, labels from 0 [n]), samples and positions in one row."""
    _check_pair(scores, y, True)
    scores = scores.detach()
    if scores.dim() > y.dim() and scores.shape[-1] > 1:
        scores, y = scores.reshape(-1, scores.shape[-1]).double().cpu(), y.reshape(-1).cpu()
        won = scores.argmax(1).masked_fill(scores.isnan().any(1), -1)
        return (scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores), won, y
    scores, y = scores.reshape(-1).double().cpu(), (y.reshape(-1) > 0).long().cpu()
    return scores, (scores > 0).long().masked_fill(scores.isnan(), -1), y


def auc(scores: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of scores [n] or [n, C] and labels [n]; of several classes the mean
    of one against the rest, over those that some samples have and some lack."""
    scores, _, y = _classes(scores, y)
    if scores.dim() > 1 and not (
        (scores >= 0).all() and torch.allclose(scores.sum(1), scores.new_ones(()))
    ):
        # logits of different samples are comparable between samples only as probabilities
        scores = scores.softmax(1)
    if not scores.isfinite().all():
        return math.nan
    columns = {1: scores} if scores.dim() == 1 else dict(enumerate(scores.T))
    areas = [
        _sklearn().roc_auc_score(y == c, s)
        for c, s in columns.items()
        if 0 < int((y == c).sum()) < len(y)
    ]
    return float(sum(areas) / len(areas)) if areas else math.nan


def f1(scores: Tensor, y: Tensor) -> float:
    """F1 of scores [n] or [n, C] and labels [n]: of class 1 where there are two, else the
    unweighted mean over the classes that samples have or were given."""
    scores, won, y = _classes(scores, y)
    labels = (
        [1] if scores.dim() == 1 else [c for c in torch.cat([y, won]).unique().tolist() if c >= 0]
    )
    return (
        float(_sklearn().f1_score(y, won, labels=labels, average="macro", zero_division=math.nan))
        if len(y)
        else math.nan
    )


def balanced_accuracy(scores: Tensor, y: Tensor) -> float:
    """The mean over the classes that samples have of the share of them that is right, by scores [n]
    or [n, C] and labels [n]."""
    _, won, y = _classes(scores, y)
    return mean([(won[y == c] == c).double().mean().item() for c in y.unique()])


def mae(scores: Tensor, y: Tensor) -> float:
    """Mean absolute error of scores [n, ...] against targets of as many elements."""
    _check_pair(scores, y)
    return (scores.reshape(y.shape).double() - y.double()).abs().mean().item()


def rmse(scores: Tensor, y: Tensor) -> float:
    """Root of the mean squared error of scores [n, ...] against targets of as many elements."""
    _check_pair(scores, y)
    return (scores.reshape(y.shape).double() - y.double()).square().mean().sqrt().item()


def r2(scores: Tensor, y: Tensor) -> float:
    """Coefficient of determination of scores [n, ...] for targets of as many elements; NaN for
    fewer than two samples; of several outputs the unweighted mean."""
    _check_pair(scores, y)
    y, scores = y.double().cpu(), scores.detach().reshape(y.shape).double().cpu()
    return (
        float(_sklearn().r2_score(y, scores))
        if len(y) > 1 and scores.isfinite().all()
        else math.nan
    )


CLASS_METRICS: dict[str, Metric] = {"auc": auc, "f1": f1, "balanced_accuracy": balanced_accuracy}
VALUE_METRICS: dict[str, Metric] = {"mae": mae, "rmse": rmse, "r2": r2}
