"""What a user brings (an algorithm, a loss, metrics, a schedule, callbacks), and what comes out
(tables, events, models, newcomers)."""

import copy
import pickle

import pytest
import torch
from methods import APFL, Ditto, Waffle
from parts.user import TRAINING, simulation
from small import SIX, images, swept, tiny_model
from torch import nn

from pflcore import (
    Evaluation,
    Federation,
    Simulation,
    Training,
    for_everyone,
)
from pflcore.metrics import auc, balanced_accuracy, f1, mae, r2, rmse


def targets():
    gen = torch.Generator().manual_seed(0)
    x = [torch.randn(20, 6, generator=gen) for _ in range(3)]
    return Federation.from_arrays(
        [(v, v @ torch.arange(6.0) / 6 + 0.1 * i) for i, v in enumerate(x)], test_fraction=0.4
    )


def test_metrics_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    gen = torch.Generator().manual_seed(0)
    scores, y = torch.randn(60, 3, generator=gen), torch.randint(0, 3, (60,), generator=gen)
    p, won = scores.softmax(1).double(), scores.argmax(1)
    ovr = metrics.roc_auc_score(y, p, multi_class="ovr")
    assert auc(scores, y) == pytest.approx(ovr) == auc(p, y)
    assert f1(scores, y) == metrics.f1_score(y, won, average="macro")
    assert balanced_accuracy(scores, y) == pytest.approx(metrics.balanced_accuracy_score(y, won))
    two, label = scores[:, :2], (y > 0).long()
    assert auc(two, label) == pytest.approx(metrics.roc_auc_score(label, two.softmax(1)[:, 1]))
    assert f1(two, label) == metrics.f1_score(label, two.argmax(1))
    # one score, labels -1 and 1
    assert auc(two[:, :1], 2 * label - 1) == metrics.roc_auc_score(label, two[:, 0])
    t = torch.randn(60, generator=gen)
    assert mae(scores[:, :1], t) == pytest.approx(metrics.mean_absolute_error(t, scores[:, 0]))
    assert rmse(scores[:, :1], t) == pytest.approx(
        metrics.mean_squared_error(t, scores[:, 0]) ** 0.5
    )
    assert r2(scores[:, :1], t) == pytest.approx(metrics.r2_score(t, scores[:, 0]))


def test_a_metric_without_a_value_is_nan():
    pytest.importorskip("sklearn")
    one_class = torch.zeros(4, dtype=torch.long)
    nans = (
        auc(torch.randn(4, 2), one_class),
        f1(torch.tensor([[1.0, 0.0]] * 4), one_class),
        r2(torch.randn(1), torch.randn(1)),
    )
    assert all(v != v for v in nans)
    scores = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    present = [
        auc(scores.softmax(1)[:, c : c + 1] - 0.5, (torch.tensor([0, 0, 0, 1, 1, 1]) == c).long())
        for c in (0, 1)
    ]
    # class 2, which nobody has, does not count
    assert auc(scores, torch.tensor([0, 0, 0, 1, 1, 1])) == pytest.approx(sum(present) / 2)


@pytest.mark.parametrize("algorithm", ["fedavg", "knnper", "apfl"])
def test_a_run_records_metrics_per_client(algorithm):
    pytest.importorskip("sklearn")

    def share_right(scores, y):
        return (scores.argmax(1) == y).double().mean()

    history = simulation(algorithm, metrics=["auc", share_right]).run()
    seen = history.rounds[-1]["eval"]
    assert seen["share_right"] == pytest.approx(seen["accuracy"]) and len(seen["auc"]) == 3
    assert history.header["metrics"] == ["auc", "share_right"]
    named = simulation(metrics={"zero": lambda s, y: 0}).run()
    assert named.series("zero")[1].tolist() == [[0, 0, 0]] * 3


def test_a_run_records_metrics_of_values():
    pytest.importorskip("sklearn")
    values = Simulation(
        "fedavg",
        nn.Linear(6, 1),
        targets(),
        TRAINING,
        rounds=20,
        evaluation=Evaluation(metrics=["mae", "r2"]),
    )
    assert min(values.run().rounds[-1]["eval"]["r2"]) > 0.5


def test_a_metric_that_breaks_says_for_whom():
    def broken(scores, y):
        return 1 / (len(y) - 20)

    run = simulation(metrics=[broken])
    with pytest.raises(
        ValueError,
        match="metrics: 'broken' failed for client 1 with ZeroDivisionError: division by zero",
    ):
        run.run()


@pytest.mark.parametrize("algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster")))
def test_a_clients_model_is_what_was_evaluated(algorithm):
    run = simulation(algorithm, rounds=2)
    history, data = run.run(), run.data
    for i in range(data.n):
        x, y = data.client(i, "test")
        assert (history.predict(i, x.numpy()) == y).double().mean().item() == pytest.approx(
            history.rounds[-1]["eval"]["accuracy"][i]
        )
    model = history.model(1)
    assert isinstance(model, nn.Module)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


def test_a_model_of_its_own_class():
    run = simulation(Ditto, rounds=2)
    history = run.run()
    module = history.model(1).module()
    x, _ = run.data.client(1, "test")
    assert (
        isinstance(module, nn.Sequential)
        and torch.equal(module(x), history.model(1)(x))
        and not module.training
    )
    pickle.dumps(module)
    with pytest.raises(ValueError, match="module: APFL predicts with more than one model"):
        simulation(APFL, rounds=1).run().model(0).module()
    for client in (3, -1, "0", True):
        with pytest.raises(ValueError, match="client: expected a number from 0 to 2, got"):
            history.model(client)
    with pytest.raises(ValueError, match=r"x: expected samples \[B, ...\]"):
        history.predict(0, 1.0)


def test_values_are_predicted_as_values():
    data = targets()
    history = Simulation("fedavg", nn.Linear(6, 1), data, TRAINING, rounds=2).run()
    x, y = data.client(0, "test")
    assert history.predict(0, x).shape == y.shape
    labels = Federation.from_arrays([(v, (v[:, 0] > 0).long()) for v in (x, -x)], test_fraction=0.5)
    history = Simulation("fedavg", nn.Linear(6, 1), labels, TRAINING, rounds=9, loss="hinge").run()
    x, y = labels.client(0, "test")
    assert (history.predict(0, x) == y).double().mean() == history.rounds[-1]["eval"]["accuracy"][0]


def test_batch_norm_predicts_with_the_clients_statistics():
    def model():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    data = images()
    history = Simulation("ditto", model, data, TRAINING, rounds=2).run()
    for i in range(3):
        x, y = data.client(i, "test")
        assert (history.predict(i, x) == y).double().mean() == pytest.approx(
            history.rounds[-1]["eval"]["accuracy"][i]
        )
        assert torch.allclose(history.model(i).module()(x), history.model(i)(x))


def test_a_model_for_everyone():
    data = images()
    history = for_everyone(Waffle, tiny_model(), data, TRAINING, rounds=2)
    for i in range(3):
        x, y = data.client(i, "test")
        assert (history.predict(i, x) == y).double().mean() == pytest.approx(
            history.rounds[-1]["eval"]["accuracy"][i]
        )
    with pytest.raises(ValueError, match="client: expected a number from 0 to 2"):
        history.model(3)
    with pytest.raises(ValueError, match="adapt: expected the history that"):
        history.adapt(data.client(0, "train"))


@pytest.mark.parametrize("algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster")))
def test_a_newcomer_leaves_the_run_as_it_was(algorithm):
    everybody = images((7, 20, 31, 24))
    run = simulation(algorithm, everybody.subset([0, 1, 2]), rounds=2)
    history = run.run()
    before = copy.deepcopy(history.state)
    x, y = everybody.client(3, "train")
    model = history.adapt((x, y), rounds=2)
    assert model.predict(x).shape == y.shape and model(x).isfinite().all()
    for part in ("server", "clients"):
        for k, v in getattr(before, part).items():
            assert torch.equal(v, getattr(history.state, part)[k]), (part, k)
    assert torch.equal(history.adapt((x, y), rounds=2)(x), model(x))


def test_a_newcomer_is_personalized_by_the_algorithms_rule():
    everybody = images((40, 40, 40, 40))  # clients 1 and 3 turn their labels
    few, (x, y) = everybody.subset([0, 2, 1]), everybody.client(3, "train")
    test = everybody.client(3, "test")

    def right(algorithm, rounds=5):
        history = Simulation(
            algorithm, tiny_model(), few, Training(lr=0.3, batch_size=8), rounds=8
        ).run()
        return (history.adapt((x, y), rounds).predict(test[0]) == test[1]).double().mean().item()

    shared = right("fedavg")
    assert right("fedavg", 0) == shared < 0.6  # it has no rule: the newcomer gets the shared model
    for algorithm in ("ditto", "local", "finetune", "feddwa", "fedrod"):
        assert right(algorithm) > shared + 0.15, algorithm


def test_a_newcomer_that_does_not_fit_is_one_sentence():
    history = simulation(rounds=1).run()
    with pytest.raises(ValueError, match=r"samples: expected inputs of shape \(6,\)"):
        history.adapt((torch.randn(9, 5), torch.zeros(9, dtype=torch.long)))
    with pytest.raises(
        ValueError, match="samples: expected those of one client, got a federation of 3"
    ):
        history.adapt(images())
    with pytest.raises(ValueError, match="rounds: expected a whole number, at least 0, got -1"):
        history.adapt(images().client(0), rounds=-1)
    with pytest.raises(ValueError, match="model: this history holds no models"):
        type(history)({}).model(0)
