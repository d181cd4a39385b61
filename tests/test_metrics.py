"""Metrics against values by hand and the papers' definitions."""

import json
import math
from dataclasses import replace

import pytest
import torch
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st
from parts.user import simulation
from places import tabled
from small import images
from torch import nn

from pflcore import Federation, metrics

NAN = math.nan
auc, f1, balanced_accuracy, brier, ece, mae, rmse, r2 = metrics.METRICS.values()
LISTS = {
    "BASE": [0.9, 0.8, 0.7, 0.6, 0.95, 0.5, 0.85, 0.75, 0.65, 0.55],
    "PERSONAL": [0.92, 0.8, 0.75, 0.58, 0.97, 0.6, 0.8, 0.9, 0.66, 0.55],
    "SOME": [0.2, NAN, None, 0.4],  # two clients have no value
    "CURVE": [0.1, 0.8, 0.6, 0.8, 0.7],
    "MANY": [*range(25)],
}
# Function, arguments, value, tolerance.
BY_HAND = """\
mean | {"values": PERSONAL} | 0.753 | 1e-12
std | {"values": PERSONAL} | 0.1429020644 | 1e-10
hurt | {"after": PERSONAL, "before": BASE} | 20 | 1e-9
worst_decile | {"values": PERSONAL} | 0.55 | 1e-9
worst_decile | {"values": PERSONAL, "share": 0.2} | 0.565 | 1e-9
percentile | {"values": PERSONAL, "q": 10} | 0.577 | 1e-9
weighted_mean | {"values": [0.5, 1.0], "weight": [10, 30]} | 0.875 | 1e-9
hurt | {"after": [0.1, 0.3], "before": [0.2, 0.2], "higher_is_better": false} | 50 | 0
worst_decile | {"values": [0.1, 0.3, 0.2], "higher_is_better": false} | 0.3 | 1e-9
best | {"curve": [0.3, 0.1, 0.1], "higher_is_better": false} | [0.1, 1] | 0
count | {"values": SOME} | 2 | 0
mean | {"values": SOME} | 0.3 | 1e-9
std | {"values": SOME} | 0.1 | 1e-9
worst_decile | {"values": SOME} | 0.2 | 1e-9
weighted_mean | {"values": SOME, "weight": [1, 5, 5, 3]} | 0.35 | 1e-9
weighted_mean | {"values": [0.5], "weight": [0.0]} | NaN | 0
worst_decile | {"values": [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]} | 0 | 0
worst_decile | {"values": [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]} | 0.5 | 0
worst_decile | {"values": MANY} | 1 | 1e-9
worst_decile | {"values": MANY, "share": 0.28} | 3 | 1e-9
worst_decile | {"values": MANY, "share": 0.29} | 3.5 | 1e-9
worst_decile | {"values": [0.5]} | 0.5 | 0
worst_decile | {"values": []} | NaN | 0
worst_decile | {"values": [NaN]} | NaN | 0
mean | {"values": [0.5]} | 0.5 | 0
mean | {"values": []} | NaN | 0
mean | {"values": [NaN, NaN]} | NaN | 0
std | {"values": [0.5]} | 0 | 0
std | {"values": []} | NaN | 0
std | {"values": [NaN, NaN]} | NaN | 0
std_over_seeds | {"values": [0.5, 0.7, 0.9]} | 0.2 | 1e-9
std_over_seeds | {"values": [0.5, NaN, 0.7]} | 0.1414213562 | 1e-9
std_over_seeds | {"values": [0.5]} | NaN | 0
std_over_seeds | {"values": [0.5, Infinity]} | Infinity | 0
percentile | {"values": [0.5], "q": 90} | 0.5 | 0
percentile | {"values": [], "q": 90} | NaN | 0
percentile | {"values": [NaN, NaN], "q": 90} | NaN | 0
final | {"curve": []} | NaN | 0
final | {"curve": [NaN]} | NaN | 0
last_mean | {"curve": []} | NaN | 0
last_mean | {"curve": [NaN]} | NaN | 0
best | {"curve": []} | [NaN, -1] | 0
best | {"curve": [NaN]} | [NaN, -1] | 0
hurt | {"after": [], "before": []} | NaN | 0
hurt | {"after": [0.5, 0.5], "before": [0.5, 0.5]} | 0 | 0
hurt | {"after": [NaN, 0.6, NaN], "before": [0.5, 0.5, NaN]} | 50 | 0
best | {"curve": CURVE} | [0.8, 1] | 0
best | {"curve": [NaN, 0.1, 0.8, 0.6, 0.8, 0.7]} | [0.8, 2] | 0
final | {"curve": CURVE} | 0.7 | 0
final | {"curve": [0.8, 0.7, NaN]} | NaN | 0
last_mean | {"curve": CURVE, "k": 2} | 0.75 | 1e-9
last_mean | {"curve": CURVE, "k": 100} | 0.6 | 1e-9
last_mean | {"curve": CURVE, "rounds": [5, 10, 15, 20, 25], "k": 10} | 0.75 | 1e-9
percentile | {"values": [1, Infinity, Infinity], "q": 100} | Infinity | 0
percentile | {"values": [1, 2, Infinity], "q": 75} | Infinity | 0
percentile | {"values": [1, 2, 3, Infinity, Infinity], "q": 90} | Infinity | 0
percentile | {"values": [1, 2, Infinity], "q": 50} | 2 | 0
human_bytes | {"size": 0} | "0 B" | 0
human_bytes | {"size": 1023} | "1023 B" | 0
human_bytes | {"size": 1024} | "1.0 KiB" | 0
human_bytes | {"size": 1536} | "1.5 KiB" | 0
human_bytes | {"size": 3221225472} | "3.0 GiB" | 0
human_bytes | {"size": 4503599627370496} | "4096.0 TiB" | 0
"""


for word, values in LISTS.items():
    BY_HAND = BY_HAND.replace(word, json.dumps(values))


@pytest.mark.parametrize("name, given, want, tolerance", tabled(BY_HAND))
def test_values_by_hand(name, given, want, tolerance):
    got = getattr(metrics, name)(**given)
    got = list(got) if isinstance(got, tuple) else got
    assert got == pytest.approx(want, rel=0, abs=tolerance, nan_ok=True)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(-3, 3))
def test_laws_of_any_shares(values, by):
    """Statistics over clients have their properties for any shares.

    The worst decile is between the worst client and the mean, in any order. A shift
    moves the mean and keeps the deviation. No client is hurt by its own baseline.
    """
    mean = metrics.mean(values)
    worst = metrics.worst_decile(values)
    assert min(values) - 1e-12 <= worst <= mean + 1e-12
    assert worst == pytest.approx(metrics.worst_decile(values[::-1]))
    assert metrics.worst_decile(values, share=1) == pytest.approx(mean)
    moved = [v + by for v in values]
    assert metrics.mean(moved) == pytest.approx(mean + by, abs=1e-9)
    assert metrics.std(moved) == pytest.approx(metrics.std(values), abs=1e-9)
    assert metrics.hurt(values, values) == 0


BAD = """\
mean | {"values": [[1, 2]]} | values: expected a vector
hurt | {"after": [1], "before": [1, 2]} | after: expected
worst_decile | {"values": [1], "share": 0} | share: expected
percentile | {"values": [1], "q": 101} | q: expected
weighted_mean | {"values": [1], "weight": [1, 2]} | weight: expected
last_mean | {"curve": [1], "k": 0} | k: expected
last_mean | {"curve": [1], "rounds": [1, 2]} | rounds: expected
"""


@pytest.mark.parametrize("name, given, words", tabled(BAD))
def test_bad_input_is_one_sentence(name, given, words):
    with sentence(words):
        getattr(metrics, name)(**given)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_scores_that_are_not_of_these_samples(shape):
    with sentence("scores and y: expected scores for each of y"):
        metrics.is_correct(torch.ones(shape), torch.ones(4))


def test_a_score_that_is_not_a_number_wins_no_class():
    lost = torch.full((4, 3), NAN)
    y = torch.tensor([0, 0, 1, 2])
    assert f1(lost, y) == 0.0 and balanced_accuracy(lost, y) == 0.0
    one_lost = torch.eye(3)[y]
    one_lost[0] = NAN
    assert balanced_accuracy(one_lost, y) == pytest.approx((0.5 + 1 + 1) / 3)
    assert f1(one_lost, y) == pytest.approx((2 / 3 + 1 + 1) / 3)
    single = torch.tensor([NAN, -1.0, 1.0, NAN])
    binary = torch.tensor([0, 0, 1, 1])
    # One right answer and one NaN in class 1: precision 1, recall 1/2.
    assert f1(single, binary) == pytest.approx(2 / 3)
    assert balanced_accuracy(single, binary) == pytest.approx(0.5)
    assert math.isnan(f1(torch.empty(0, 3), torch.empty(0, dtype=torch.int64)))


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_score_of_zero_says_the_negative_class(shape):
    """A score of zero predicts the negative class.

    The label of that class is 0 or -1.
    """
    assert metrics.is_correct(
        torch.zeros(shape), torch.tensor([0, 1, -1])
    ).tolist() == [
        True,
        False,
        True,
    ]


def test_scores_may_be_a_column_and_of_any_dtype():
    assert metrics.is_correct(torch.tensor([1.0]), torch.tensor(1))
    scores = torch.tensor([[[3.0, 1, 2], [0, 1, 0]], [[1.0, 0, 0], [0, 2, 1]]])
    assert metrics.is_correct(scores, torch.tensor([[0, 1], [2, 1]])).tolist() == [
        [True] * 2,
        [False, True],
    ]
    assert metrics.is_correct(
        torch.tensor([0.5, -0.5]), torch.tensor([1.0, -1.0])
    ).all()
    assert not metrics.is_correct(torch.tensor([NAN, NAN]), torch.tensor([0, 1])).any()
    assert metrics.is_correct(torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])).all()
    pytest.importorskip("sklearn")
    numbers = torch.arange(6.0, requires_grad=True)
    assert r2(numbers.bfloat16(), torch.arange(6.0)) == 1.0
    assert auc(numbers - 2.5, torch.arange(6) // 3) == 1.0


def test_metrics_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    scores = torch.randn(60, 3)
    y = torch.randint(0, 3, (60,))
    p = scores.softmax(1).double()
    won = scores.argmax(1)
    ovr = metrics.roc_auc_score(y, p, multi_class="ovr")
    assert auc(scores, y) == pytest.approx(ovr) == auc(p, y)
    assert f1(scores, y) == metrics.f1_score(y, won, average="macro")
    assert balanced_accuracy(scores, y) == pytest.approx(
        metrics.balanced_accuracy_score(y, won)
    )
    two = scores[:, :2]
    label = (y > 0).long()
    assert auc(two, label) == pytest.approx(
        metrics.roc_auc_score(label, two.softmax(1)[:, 1])
    )
    assert f1(two, label) == metrics.f1_score(label, two.argmax(1))
    # One score for labels of -1 and 1.
    assert auc(two[:, :1], 2 * label - 1) == metrics.roc_auc_score(label, two[:, 0])
    t = torch.randn(60)
    assert mae(scores[:, :1], t) == pytest.approx(
        metrics.mean_absolute_error(t, scores[:, 0])
    )
    assert rmse(scores[:, :1], t) == pytest.approx(
        metrics.mean_squared_error(t, scores[:, 0]) ** 0.5
    )
    assert r2(scores[:, :1], t) == pytest.approx(metrics.r2_score(t, scores[:, 0]))
    folded = (flat.view(-1, 2, 1) for flat in (scores[:, :2], scores[:, 1:]))
    assert r2(*folded) == pytest.approx(r2(scores[:, :2], scores[:, 1:]))


def test_the_brier_score_is_that_of_scikit_learn():
    loss = pytest.importorskip("sklearn.metrics").brier_score_loss
    scores = torch.randn(60, 3)
    label = torch.randint(0, 2, (60,))
    logit = scores[:, 0]
    want = loss(label, logit.double().sigmoid())

    assert brier(logit, label) == pytest.approx(want)
    assert brier(torch.stack([-logit / 2, logit / 2], 1), label) == pytest.approx(want)
    y = torch.randint(0, 3, (60,))
    p = scores.double().softmax(1)
    by_class = [loss(y == c, p[:, c]) for c in range(3)]
    assert brier(scores, y) == brier(p, y) == pytest.approx(sum(by_class))


def test_the_calibration_error_is_the_gap_of_each_bin():
    # Ten samples with confidence .9, of which eight are right, and ten with .55 and
    # five: gaps of .1 and .05, each of half of the samples.
    p = torch.tensor([[0.9, 0.1]] * 10 + [[0.45, 0.55]] * 10, dtype=torch.float64)
    y = torch.tensor([0] * 8 + [1] * 2 + [1] * 5 + [0] * 5)

    assert ece(p, y) == pytest.approx(0.075)
    logit = (p[:, 1] / p[:, 0]).log()
    assert ece(logit, y) == ece(logit[:, None], y) == pytest.approx(0.075)


def test_a_metric_without_a_value_is_nan():
    pytest.importorskip("sklearn")
    one_class = torch.zeros(4, dtype=torch.long)
    certain = torch.tensor([[1.0, 0.0]] * 4)
    values = (
        auc(certain, one_class),
        auc(certain[:0], one_class[:0]),
        f1(certain, one_class),
        r2(torch.ones(1), torch.ones(1)),
        *(metric(certain[:0], one_class[:0]) for metric in (brier, ece)),
        *(metric(certain * NAN, one_class) for metric in (brier, ece)),
    )
    assert all(map(math.isnan, values))
    scores = torch.randn(6, 3)
    y = torch.tensor([0, 0, 0, 1, 1, 1])
    shares = scores.softmax(1)
    present = [auc(shares[:, c : c + 1] - 0.5, (y == c).long()) for c in (0, 1)]
    # Class 2, which has no samples, does not count.
    assert auc(scores, y) == pytest.approx(sum(present) / 2)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("algorithm", ["fedavg", "knnper", "apfl"])
def test_a_run_records_metrics_per_client(algorithm):
    pytest.importorskip("sklearn")

    def share_right(scores, y):
        return (scores.argmax(1) == y).double().mean()

    history = simulation(algorithm, metrics=["auc", share_right]).run()
    seen = history.rounds[-1]["eval"]
    assert (
        seen["share_right"] == pytest.approx(seen["accuracy"]) and len(seen["auc"]) == 3
    )
    assert history.header["metrics"] == ["auc", "share_right"]
    named = simulation(metrics={"zero": lambda s, y: 0}).run()
    assert named.series("zero")[1].tolist() == [[0, 0, 0]] * 3


def test_a_run_records_metrics_of_values():
    pytest.importorskip("sklearn")
    x = torch.randn(3, 20, 6)
    y = x @ torch.arange(6.0) / 6 + torch.tensor([[0.0], [0.1], [0.2]])
    data = Federation.from_clients(list(zip(x, y, strict=True))).split(test=0.4)
    look = {"model": nn.Linear(6, 1), "rounds": 20, "metrics": ["mae", "r2"]}
    run = simulation(data=data, **look).run()
    assert min(run.rounds[-1]["eval"]["r2"]) > 0.5


def test_a_metric_that_breaks_says_for_whom():
    def broken(scores, y):
        return 1 / (len(y) - 20)

    run = simulation(metrics=[broken])
    with sentence(
        "metrics: 'broken' failed for client 1 with ZeroDivisionError: division by zero"
    ):
        run.run()
    named = replace(images(), names=["north", "east", "south"])
    with sentence("metrics: 'broken' failed for client east with"):
        simulation(data=named, metrics=[broken]).run()


@pytest.mark.parametrize(
    "metrics, said",
    [
        (
            ["acc"],
            "for labels there are auc, .* brier, ece, or a function of .* got 'acc'",
        ),
        (["mae"], "'mae' is for targets"),
        ("auc", "expected a list, .* got 'auc'"),
        ([3], r"expected a list, each a string or a function .* got \[3\]"),
        ({"loss": min}, "'loss' is recorded anyway"),
        (["f1", f1], "'f1' is there twice"),
    ],
)
def test_what_is_no_metric_is_one_sentence(metrics, said):
    pytest.importorskip("sklearn")
    with sentence(f"metrics: .*{said}", (ValueError, TypeError)):
        simulation(metrics=metrics)


@pytest.mark.parametrize("higher_is_better", [True, False])
@pytest.mark.parametrize("worst", [math.inf, -math.inf])
def test_no_round_without_a_value_is_the_best(worst, higher_is_better):
    point = metrics.best([math.nan, worst], higher_is_better)
    assert point == (worst, 1)
