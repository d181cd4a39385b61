"""The numbers that the papers report, as pure functions of one number per client.

A vector holds one value per client, or per round for a curve. It is unweighted: each
client counts once, however many samples it has (Motley, section 4). NaN stands for a
client without a value, for instance without test samples. It is left out, and the
result is NaN where nothing is left; it is never an error. An infinite value, such as a
loss that diverged, stays in, and makes means and deviations infinite. Standard
deviations over clients are the population's (ddof = 0), as in both papers, so a single
client gives 0. Those over seeds are a sample's (ddof = 1). Means are taken in float64.
A result has the unit of the values: fractions and accuracies are in [0, 1]. Only
functions that say "percent" return percents.

Symbols: N clients in a vector, of which n have a value v_i that is not NaN; S clients
of a cohort. In metrics of one client: n of its samples, B of a batch's samples, C
classes; y are labels or targets, s scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
# The function `vector` raises the error for a value that is no vector.
Vector = Annotated[Tensor | Sequence[float | None], EXPECT_ANYTHING]
Percent = Annotated[float, at.Interval(ge=0, le=100), at.doc("a number in [0, 100]")]
# A number of one client, from its scores [n, ...] and its labels or targets [n, ...].
# Where there is one score for each target, the scores have the shape of the targets.
Metric = Callable[[Tensor, Tensor], Any]


class Point(NamedTuple):
    """A value of a curve, and its position in the curve.

    Attributes:
        value: the value; NaN where the curve has no value
        at: index of the value in the curve, from 0; -1 where the curve has no value
    """

    value: float
    at: int


def vector(values: Vector, name: str = "values", n: int | None = None) -> Tensor:
    """`values` as a float64 vector [N] on the CPU, None as NaN.

    Raises ValueError where the values are no vector of numbers, or of another length.

    Args:
        name: The argument's name in the text of an error.
        n: The length that the vector must have; None for any length.
    """
    try:
        numbers = values
        if not isinstance(values, Tensor):
            numbers = [math.nan if v is None else float(v) for v in values]
        out = torch.as_tensor(numbers, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError):
        out = torch.empty(())
    if out.ndim != 1:
        reject(name, "a vector of numbers, one per client", values)
    fits = n in (None, len(out))
    require(fits, name, f"{n} entries, as the other vector has", values)
    return out


def _present_values(values: Vector) -> Tensor:
    """The values that are not NaN."""
    out = vector(values)
    return out[~out.isnan()]


def count(values: Vector) -> int:
    """n, the number of clients with a value that is not NaN."""
    return len(_present_values(values))


def mean(values: Vector) -> float:
    """Mean over clients, of which each counts once: sum_i v_i / n."""
    return _present_values(values).mean().item()


def std(values: Vector) -> float:
    """Population standard deviation over clients (ddof = 0).

    It is sqrt(sum_i (v_i - mean)^2 / n), at least 0, and infinite where a value is
    infinite. The papers measure fairness by it.
    """
    present = _present_values(values)
    if present.isinf().any():
        return math.inf  # torch gives NaN, which stands for "no client has a value"
    if not len(present):
        return math.nan
    return present.std(correction=0).item()


def std_over_seeds(values: Vector) -> float:
    """Sample standard deviation over seeds (ddof = 1).

    It is NaN for a single seed, and infinite where a value is infinite.
    """
    present = _present_values(values)
    if present.isinf().any():
        return math.inf
    return present.std(correction=1).item() if len(present) > 1 else math.nan


def weighted_mean(values: Vector, weight: Vector) -> float:
    """Mean over clients, weighted: sum_i weight_i v_i / sum_i weight_i.

    Clients without a value or without a positive weight are left out. Raises ValueError
    for a negative weight.

    Args:
        values: one value per client [N]
        weight: weight of each client [N], for instance its number of samples
    """
    v = vector(values)
    w = vector(weight, "weight", len(v))
    require(not (w < 0).any(), "weight", "numbers of samples, at least 0", weight)
    counts = ~v.isnan() & (w > 0)
    v = v[counts]
    w = w[counts]
    return ((v * w).sum() / w.sum()).item()


@checked
def worst_decile(
    values: Vector, share: Fraction = 0.1, higher_is_better: bool = True
) -> float:
    """Mean of the worst values, those of ceil(share * n) clients.

    n is the number of clients that have a value. At least one of them counts.

    Args:
        values: one value per client [N]
        share: fraction of the clients that counts, above 0 and at most 1; a tenth if
            not said
        higher_is_better: True where the lowest values are the worst, False where the
            highest are
    """
    present = _present_values(values)
    # In floating point 0.28 * 25 is 7.000000000000001, which must count 7 clients.
    k = max(1, math.ceil(share * len(present) - 1e-9))
    worst_first = present.sort(descending=not higher_is_better).values
    return worst_first[:k].mean().item()


@checked
def percentile(values: Vector, q: Percent = 10.0) -> float:
    """The q-th percentile over clients, linearly interpolated.

    Of the n values in ascending order, counted from 0, it is the one at position
    (n - 1) q / 100. It is infinite where one of the two values between which it lies is
    infinite.

    Args:
        values: one value per client [N]
        q: the percentile, from 0 (the lowest value) to 100 (the highest)
    """
    present = _present_values(values)
    if not len(present):
        return math.nan
    # Between two infinite values torch interpolates to NaN.
    return present.quantile(q / 100).nan_to_num(math.inf).item()


def hurt(after: Vector, before: Vector, higher_is_better: bool = True) -> float:
    """Percent of clients that are strictly worse `after` than `before`.

    It is in [0, 100]: 100 / n times the number of worse clients (Motley, section 4). n
    is the number of clients that have a value `before`; the others are left out. A
    client whose value `after` is NaN has lost its model, so it is hurt.

    Args:
        after: one value per client [N]
        before: one value per client [N], with which `after` is compared
        higher_is_better: True where a lower value is worse, False where a higher one is
    """
    old = vector(before, "before")
    new = vector(after, "after", len(old))
    had_value = ~old.isnan()
    new = new[had_value]
    old = old[had_value]
    worse = new < old if higher_is_better else new > old
    return 100 * (worse | new.isnan()).double().mean().item()


def best(curve: Vector, higher_is_better: bool = True) -> Point:
    """The best value over rounds, and the first position that has it.

    Where the values are test results, the choice is made on test data. Say so where you
    report it.

    Args:
        curve: one value per round
        higher_is_better: True where the highest value is the best, False where the
            lowest is
    """
    v = vector(curve, "curve")
    if v.isnan().all():
        return Point(math.nan, -1)
    ranked = v if higher_is_better else -v
    places = (~v.isnan()).nonzero()[:, 0]
    i = int(places[ranked[places].argmax()])
    return Point(v[i].item(), i)


def final(curve: Vector) -> float:
    """The last round's value; NaN where that round has no value.

    A run that diverged has no final accuracy, for instance.
    """
    v = vector(curve, "curve")
    if not len(v):
        return math.nan
    return v[-1].item()


@checked
def last_mean(
    curve: Vector, rounds: Vector | None = None, k: PositiveInt = 10
) -> float:
    """Mean of the values of the last k rounds.

    Args:
        curve: One value per evaluation.
        rounds: The round of each value, for evaluations that are not made in every
            round; None for one evaluation per round. With r the last of them, the
            values of rounds later than r - k count.
        k: The number of rounds.
    """
    v = vector(curve, "curve")
    if not len(v):
        return math.nan
    numbers = range(len(v)) if rounds is None else rounds
    round_of_value = vector(numbers, "rounds", len(v))
    is_late = round_of_value > round_of_value[-1] - k
    return mean(v[is_late])


def _check_pair(scores: Tensor, y: Tensor, *, classes: bool = False) -> None:
    """Raises ValueError unless there are scores for each of `y` [B, ...].

    Args:
        classes: True where the scores may have one more axis, of classes.
    """
    has_more_axis = scores.shape[:-1] == y.shape
    if classes and has_more_axis:
        return
    same_samples = scores.shape[:1] == y.shape[:1]
    fits = scores.numel() == y.numel() and (has_more_axis or same_samples)
    shapes = f"shapes {list(scores.shape)} and {list(y.shape)}"
    require(fits, "scores and y", "scores for each of y", shapes)


@checked
def _predicted_classes(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The predicted class and the label of each sample, both like `y` [...].

    Labels count from 0. The class is the one with the largest of the scores [..., C]. A
    single score, [...] or [..., 1], gives class 1 where it is positive, else class 0,
    and the labels become 0 and 1, too. A score that is NaN gives a class below 0, which
    is no label.
    """
    _check_pair(scores, y, classes=True)
    no_class = -(1 << 60)
    if scores.dim() > y.dim() and scores.shape[-1] > 1:
        # `argmax` takes the place of a NaN for that of the largest score.
        has_nan = scores.isnan().any(-1)
        return scores.argmax(-1).masked_fill(has_nan, no_class), y
    single = scores.reshape(y.shape)
    predicted = (single > 0).long().masked_fill(single.isnan(), no_class)
    labels = (y > 0).long()
    return predicted, labels


def is_correct(scores: Tensor, y: Tensor) -> Tensor:
    """Mask of the samples that are classified correctly, like `y` [...].

    The class is that of the largest of `scores` [..., C], or the sign of a single score
    [...] or [..., 1]. A score of 0 means the negative class, whose label is 0 or -1. A
    sample with a score that is NaN is never correct.
    """
    predicted, labels = _predicted_classes(scores, y)
    return predicted == labels


def human_bytes(size: float) -> str:
    """A number of bytes in binary units: 1536 becomes "1.5 KiB"."""
    unit = 0
    while size >= 1024 and unit < 4:
        size = size / 1024
        unit = unit + 1
    if unit == 0:
        return f"{size:.0f} B"
    name = ("KiB", "MiB", "GiB", "TiB")[unit - 1]
    return f"{size:.1f} {name}"


# scores of a user's own losses and metrics -------------------------------------


def has_one_score_each(scores: Tensor, y: Tensor) -> bool:
    """True where there is one score for each target.

    Both [B, ...] then have the same shape, in which axes of length 1 do not count.
    """
    score_axes = [length for length in scores.shape[1:] if length != 1]
    target_axes = [length for length in y.shape[1:] if length != 1]
    return scores.shape[:1] == y.shape[:1] and score_axes == target_axes


def shape_like_targets(scores: Tensor, y: Tensor) -> Tensor:
    """The scores [B, ...], in the shape of `y` where there is one for each target.

    A function that gets scores [B, 1] and targets [B] mostly broadcasts them to [B, B].
    Its value would be wrong without a sign.
    """
    return scores.reshape(y.shape) if has_one_score_each(scores, y) else scores


# metrics by name: one client's scores and labels -> a number -------------------


CALIBRATION_BINS = 15
# Columns of a record, whose names no metric may have.
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
    """Functions of one client's (scores, labels), by name.

    A name is one of `METRICS`. A function of the user's own is recorded under its
    `__name__`, or under its key in a dict. Raises ValueError for an unknown name or for
    one that cannot be recorded, and ImportError where a metric needs a package that is
    not installed.

    Args:
        metrics: Names and functions.
        classes: True for metrics of labels, False for metrics of targets.
    """
    functions: dict[str, Metric] = {}
    pairs: Iterable[tuple[str | Metric, str | Metric]]
    if isinstance(metrics, Mapping):
        pairs = metrics.items()
    else:
        pairs = [(metric, metric) for metric in metrics]
    for key, metric in pairs:
        name = _metric_name(key)
        if name in RECORD_COLUMNS or name in functions:
            fault = "there twice" if name in functions else "recorded anyway"
            raise ValueError(
                f"metrics: {name!r} is {fault}; leave it out or rename it."
            )
        if isinstance(metric, str):
            functions[name] = _metric_by_name(metric, classes)
        else:
            functions[name] = metric
    return functions


def _metric_name(key: str | Metric) -> str:
    """The name in records: the key, or the function's `__name__`."""
    if isinstance(key, str):
        return key
    return str(getattr(key, "__name__", type(key).__name__))


def measured_by(
    name: str,
    metric: Metric,
    pairs: Sequence[tuple[Tensor, Tensor]],
    clients: Sequence[int | str],
) -> Tensor:
    """The metric's value for each client, float64 [S].

    It is NaN where the metric of a client is NaN. Raises ValueError where the metric
    raises an error.

    Args:
        name: The name of the metric, for the text of an error.
        metric: The function of one client's scores and labels.
        pairs: The scores and the labels of each client.
        clients: The names or ids of these clients, for the text of an error.
    """
    values = []
    for (scores, y), client in zip(pairs, clients, strict=True):
        try:
            scores = shape_like_targets(scores.detach(), y)
            values.append(float(metric(scores, y)))
        except Exception as error:
            raise ValueError(
                f"metrics: {name!r} failed for client {client} with "
                f"{type(error).__name__}: {error}."
            ) from error
    return torch.tensor(values, dtype=torch.float64)


def _metric_by_name(name: str, classes: bool) -> Metric:
    """The function in `METRICS` of this name.

    Raises ValueError for an unknown name, and for a metric of labels where there are
    targets, or the reverse.
    """
    known = [k for k in METRICS if (k in FOR_LABELS) is classes]
    if name not in known:
        kind, other_kind = ("labels", "targets") if classes else ("targets", "labels")
        reason = f"got {name!r}"
        nearest = closest_name(name, known)
        if name in METRICS:
            reason = f"and {name!r} is for {other_kind}"
        elif nearest is not None:
            reason += f"; did you mean {nearest!r}"
        if name in FOR_LABELS:
            reason += (
                ", of which one score each is known to be a logit by the loss alone, "
                "such as 'binary_cross_entropy' or nn.BCEWithLogitsLoss(pos_weight=...)"
            )
        raise ValueError(
            f"metrics: for {kind} there are {', '.join(known)}, or a function of "
            f"(scores, labels), {reason}."
        )
    _import_sklearn()  # reports a missing package before the run, not after a round
    return METRICS[name]


def _import_sklearn() -> Any:
    """The module `sklearn.metrics`; raises ImportError where it is missing."""
    return import_optional("sklearn.metrics", "metrics: this one")


def auc(scores: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of scores [n] or [n, C] and labels [n], in [0, 1].

    It is the fraction of pairs, of a sample of class 1 and one of class 0, in which the
    first has the higher score; equal scores count half. Of three classes or more it is
    the mean over classes of the area of one class against the rest. Classes that no
    sample has, or that all samples have, are left out. Several yes-or-no labels of a
    sample count as samples of one label (a micro average). The result is NaN where no
    class is left, or where a score is not finite.
    """
    labels = _predicted_classes(scores, y)[1].reshape(-1).cpu()
    if not len(labels):
        return math.nan
    scores = scores.detach().reshape(len(labels), -1).double().cpu()
    num_scores = scores.shape[1]
    if num_scores == 2:
        scores = scores[:, 1:] - scores[:, :1]
    elif num_scores > 2 and not _are_probabilities(scores):
        # Logits can be compared between samples only as probabilities.
        scores = scores.softmax(1)
    if not scores.isfinite().all():
        return math.nan
    scores_by_class = {1: scores}
    if num_scores > 2:
        scores_by_class = dict(enumerate(scores.T))
    areas = []
    for label, class_scores in scores_by_class.items():
        is_class = labels == label
        if 0 < int(is_class.sum()) < len(labels):
            areas.append(_import_sklearn().roc_auc_score(is_class, class_scores))
    return mean(areas)


def _are_probabilities(scores: Tensor) -> bool:
    """True where the rows of scores [..., C] are probabilities that sum to 1."""
    if not (scores >= 0).all():
        return False
    return torch.allclose(scores.sum(-1), scores.new_ones(()))


def f1(scores: Tensor, y: Tensor) -> float:
    """F1 score of scores [n] or [n, C] and labels [n], in [0, 1].

    The score of a class is 2 TP / (2 TP + FP + FN). TP are its samples that are
    predicted correctly, FN its other samples, and FP samples of other classes that are
    predicted as it. Of two classes the result is the score of class 1. Of more classes
    it is the unweighted mean over those that are a label or a prediction of a sample.
    Several yes-or-no labels of a sample count as samples of one label (a micro
    average). It is NaN without samples, and for two classes where class 1 is no label
    and no prediction.
    """
    predicted, labels = _predicted_classes(scores, y)
    predicted = predicted.reshape(-1).cpu()
    labels = labels.reshape(-1).cpu()
    if not len(labels):
        return math.nan
    classes = [1]
    if scores.numel() > 2 * y.numel():
        present = torch.cat([labels, predicted]).unique().tolist()
        classes = [label for label in present if label >= 0]
    score = _import_sklearn().f1_score(
        labels, predicted, labels=classes, average="macro", zero_division=math.nan
    )
    return float(score)


def balanced_accuracy(scores: Tensor, y: Tensor) -> float:
    """Mean over classes of the accuracy on each class, in [0, 1].

    The accuracy on a class is the fraction of its samples that are classified
    correctly, by scores [n] or [n, C] and labels [n]. Classes that no sample has are
    left out; the result is NaN without samples.
    """
    predicted, labels = _predicted_classes(scores, y)
    predicted = predicted.reshape(-1)
    labels = labels.reshape(-1)
    fractions = []
    for label in labels.unique():
        is_right = predicted[labels == label] == label
        fractions.append(is_right.double().mean().item())
    return mean(fractions)


def _probabilities(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities [n, C] of the classes, and the labels [n], on the CPU."""
    labels = _predicted_classes(scores, y)[1].reshape(-1).cpu()
    num_scores = scores.shape[-1] if scores.dim() > y.dim() else 1
    scores = scores.detach().double().cpu().reshape(len(labels), num_scores)
    return class_probabilities(scores), labels


def class_probabilities(scores: Tensor) -> Tensor:
    """The probabilities [..., C] of the classes, of scores [..., C] or [..., 1].

    Scores are logits, or probabilities that sum to 1. A single score is the logit of
    class 1 of two.
    """
    if scores.shape[-1] == 1:
        return torch.cat([(-scores).sigmoid(), scores.sigmoid()], -1)
    return scores if _are_probabilities(scores) else scores.softmax(-1)


def brier(scores: Tensor, y: Tensor) -> float:
    """Brier score of scores [n] or [n, C] and labels [n], as scikit-learn scales it.

    With probabilities p it is the mean over samples of sum_c (p_c - [y = c])^2, from 0
    to 2, and for two classes half of it, which is (p_1 - y)^2. It is NaN without
    samples, and where a score is NaN.
    """
    probabilities, labels = _probabilities(scores, y)
    num_classes = probabilities.shape[1]
    is_class = torch.nn.functional.one_hot(labels, num_classes)
    by_sample = (probabilities - is_class).square().sum(1)
    score = by_sample.mean().item()
    return score / 2 if num_classes == 2 else score


def ece(scores: Tensor, y: Tensor) -> float:
    """Expected calibration error of scores [n] or [n, C] and labels [n], in [0, 1].

    It is sum_b n_b / n |accuracy_b - confidence_b| over 15 bins of equal width, into
    which a sample falls by the probability of its predicted class (Guo et al. 2017). It
    is NaN without samples, and where a score is NaN.
    """
    probabilities, labels = _probabilities(scores, y)
    if not len(labels) or probabilities.isnan().any():
        return math.nan
    confidence, predicted = probabilities.max(1)
    gap = (predicted == labels).double() - confidence
    bins = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, gap)
    return gaps.abs().sum().item() / len(labels)


@checked
def _errors(scores: Tensor, y: Tensor) -> Tensor:
    """Differences between scores and targets, float64 like `y` [n, ...].

    Raises ValueError unless there is one score for each target.
    """
    _check_pair(scores, y)
    return scores.detach().reshape(y.shape).double() - y.double()


def mae(scores: Tensor, y: Tensor) -> float:
    """Mean absolute error of scores s for targets y, [n, ...] each.

    It is mean(|s - y|) over samples and outputs, in the unit of the targets.
    """
    return _errors(scores, y).abs().mean().item()


def rmse(scores: Tensor, y: Tensor) -> float:
    """Root mean squared error of scores s for targets y, [n, ...] each.

    It is sqrt(mean((s - y)^2)) over samples and outputs, in the unit of the targets.
    """
    return _errors(scores, y).square().mean().sqrt().item()


def r2(scores: Tensor, y: Tensor) -> float:
    """Coefficient of determination of scores s for targets y, [n, ...] each.

    It is 1 - sum((s - y)^2) / sum((y - mean(y))^2), at most 1, and negative where the
    mean of the targets would be the better prediction. Of several outputs it is the
    unweighted mean. Where all targets are equal, it is 1 for scores without an error
    and 0 for others. It is NaN for fewer than two samples, and where an error is not
    finite.
    """
    is_finite = bool(_errors(scores, y).isfinite().all())
    if len(y) < 2 or not is_finite:
        return math.nan
    predictions = scores.detach().reshape(y.shape).double().cpu()
    targets = y.detach().double().cpu()
    # Several axes of outputs are one for scikit-learn.
    pair = (t.flatten(1) if t.dim() > 1 else t for t in (targets, predictions))
    return float(_import_sklearn().r2_score(*pair))


METRICS: dict[str, Metric] = {
    "auc": auc,
    "f1": f1,
    "balanced_accuracy": balanced_accuracy,
    "brier": brier,
    "ece": ece,
    "mae": mae,
    "rmse": rmse,
    "r2": r2,
}
# The others are for targets.
FOR_LABELS = ("auc", "f1", "balanced_accuracy", "brier", "ece")
# True for metrics of which a higher value is better; others have no known direction.
HIGHER_IS_BETTER = {
    "accuracy": True,
    "auc": True,
    "f1": True,
    "balanced_accuracy": True,
    "r2": True,
    "loss": False,
    "train_loss": False,
    "brier": False,
    "ece": False,
    "mae": False,
    "rmse": False,
}


def is_higher_better(
    name: str, higher_is_better: bool | None = None, argument: str = "key"
) -> bool:
    """True for a metric of which a higher value is better.

    Raises ValueError for a metric without a known direction, if `higher_is_better` does
    not say it.

    Args:
        name: The name of the metric.
        higher_is_better: The answer, if the caller gives it; None for the direction
            that is known of the metric.
        argument: The name of the argument that holds the metric, in the error's text.
    """
    if higher_is_better is not None:
        return higher_is_better
    words = (
        f"one of {', '.join(HIGHER_IS_BETTER)}, or a metric of your own with "
        "higher_is_better=True or False"
    )
    require(name in HIGHER_IS_BETTER, argument, words, name)
    return HIGHER_IS_BETTER[name]
