"""Clients that are evaluated together have the results of each alone."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from parts.path import BODIES, body
from parts.user import simulation
from small import crossed, make_setting, near
from ugly import randn

from pflcore import Clients, Federation, Net, Training, evaluate, metrics
from pflcore.algorithms import FedAvg
from pflcore.simulation.round import RunConfig, initial_state

SIZES = [1, 300, 7, 125, 126]
DEEP_MLPS = {
    "rectified": ("Linear 6 5, ReLU, Linear 5 3, ReLU, Linear 3 K", (6,)),
    "squashed": ("Linear 6 5, ReLU, Linear 5 3, Tanh, Linear 3 K", (6,)),
}
MODELS = {**BODIES, "scores per place": ("Conv1d 2 K 1", (2, 3))}


def weighted(scores, y):
    """Weighted cross entropy, which is no mean over a batch's samples."""
    return F.cross_entropy(scores, y, torch.tensor([1.0, 2.0, 3.0, 4.0]))


def at_work(
    engine,
    model="mlp",
    loss="cross_entropy",
    relabel=False,
    ids=range(5),
    empty=None,
):
    """Clients of one round with their own batch norm statistics.

    The statistics differ from the model's. The client `empty` has no test samples.
    """
    n = 2 * sum(SIZES)
    torch.manual_seed(0)
    has_classes = loss in ("cross_entropy", weighted)
    labels = loss not in NUMBERS
    classes = 4 if has_classes else 2
    y = torch.randint(classes, (n, 3) if model == "scores per place" else (n,))
    permutations = torch.rand(5, classes).argsort(1) if relabel else None
    known = (classes, permutations) if labels else (None,)
    train, test = (rows.split(SIZES) for rows in torch.arange(n).view(2, -1))
    test = [rows[: 0 if k == empty else None] for k, rows in enumerate(test)]
    split = {"train": list(train), "test": test}
    words, shape = {**MODELS, **DEEP_MLPS}[model]
    data = Federation(
        torch.randn(n, *shape), y if labels else torch.rand(n), split, *known
    )
    net = Net(body(words, classes if has_classes else 1), loss)
    s = make_setting(net, data, Training(batch_size=5), 3, engine, workers=2)
    return Clients(s, torch.tensor(ids), 1, s.net.b0.repeat(len(ids), 1) + 0.5)


def check(clients, rows):
    """Asserts that losses and accuracies are those of each client's own module."""
    loss, hits = clients.evaluate({"w": rows}, "train")
    net = clients.net
    data = clients.context.data
    for k, i in enumerate(clients.ids.tolist()):
        x, y = data.client(i)
        with torch.no_grad():
            scores = net.load(net.build, rows[k], clients.buffers[k]).eval()(x)
        near(loss[k], net.loss_fn(scores, y), 1e-5, 1e-6)
        assert (hits is None) == (data.classes is None)
        if hits is not None:  # Exact: a share of whole samples.
            near(
                hits[k],
                metrics.is_correct(scores.movedim(1, -1), y).double().mean(),
                0,
                1e-9,
            )
    return loss


NUMBERS = ("binary_cross_entropy", "squared", "half_squared")
KINDS = [("chain", c) for c in ("cross_entropy", "hinge", *NUMBERS)]


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "kind, relabel", crossed([*KINDS, ("loop", "cross_entropy")], [False, True])
)
def test_side_by_side_is_one_by_one(kind, relabel):
    engine, loss = kind
    for ids in (range(5), [3, 1]):
        clients = at_work(engine, "mlp", loss, relabel, ids)
        check(clients, clients.net.w0 + torch.randn(len(ids), clients.net.size))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "model, scale", crossed([*DEEP_MLPS, "conv"], [1e10, 1e15, 1e25, 1e38])
)
def test_diverged_models_are_evaluated_by_the_module(model, scale):
    """Their scores are infinite or NaN, as the order of a sum's terms has it."""
    clients = at_work("chain", model)
    rows = randn(1, 5, clients.net.size, dtype=torch.float32, scale=scale)
    rows[1] = clients.net.w0  # one that did not diverge
    got_loss, got_accuracy = clients.evaluate({"w": rows}, "test")
    loss, accuracy = at_work("loop", model).evaluate({"w": rows}, "test")

    torch.testing.assert_close(got_loss, loss, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(got_accuracy, accuracy)


@pytest.mark.parametrize(
    "engine, model, relabel", crossed(["loop", "vmap"], MODELS, [False, True])
)
def test_one_model_for_all_is_one_pass_over_all_samples(
    engine, model, relabel, monkeypatch
):
    # One client, number 2, is not evaluated.
    clients = at_work(engine, model, relabel=relabel, ids=[4, 0, 1, 3])
    clients = replace(clients, known_blocks=torch.zeros(4, dtype=torch.int64))
    batches = []
    forward = Net.__call__

    def counted(net, w, x):
        batches.append(len(x))
        return forward(net, w, x)

    monkeypatch.setattr(Net, "__call__", counted)
    row = (clients.net.w0 + torch.randn(clients.net.size)).expand(4, -1)
    loss = check(clients, row)
    n = sum(SIZES) - SIZES[2]
    assert sorted(batches) == sorted(len(c) for c in torch.arange(n).split(125))
    near(clients.loss(row), loss, 1e-5, 1e-6)


@pytest.mark.parametrize("what", ["statistics", "loss"])
def test_what_may_differ_is_looked_at_one_by_one(what):
    clients = at_work(
        "loop", "batch norm", weighted if what == "loss" else "cross_entropy"
    )
    if what == "statistics":
        clients = replace(clients, buffers=clients.buffers + torch.arange(5)[:, None])
    check(clients, clients.net.w0.expand(5, -1))


def evaluated(engine, empty=None):
    s = at_work(engine, empty=empty).context
    return evaluate(RunConfig.of(FedAvg(), s), initial_state(FedAvg(), s.net, 5))


def test_engines_evaluate_alike_and_without_samples_nobody_is_looked_at():
    evaluations = []
    nonempty = [0, 1, 3, 4]
    for engine in ("chain", "vmap", "loop"):
        latest = evaluated(engine, 2)
        evaluations.append(latest)
        assert latest["loss"].isnan().tolist() == [False, False, True, False, False]
        assert latest["size"].tolist() == [1, 300, 0, 125, 126]
    # Where every client has samples, a batch of one shared model holds several clients.
    evaluations.append(evaluated("loop"))
    for key in ("loss", "accuracy"):
        for other in evaluations[1:]:
            near(evaluations[0][key][nonempty], other[key][nonempty], 1e-5, 1e-6)


@pytest.mark.parametrize("engine", ["chain", "loop"])
def test_a_nan_is_no_right_answer_and_spoils_nobody_else(engine):
    """A NaN score is no right answer and affects no other client.

    `argmax` takes NaN for the largest number. If only one class scores NaN, its samples
    would count as right answers.
    """
    clients = at_work(engine)
    rows = clients.net.w0.repeat(5, 1)
    rows[3, -1] = torch.nan  # bias of the last class in the last layer
    loss, accuracy = clients.evaluate({"w": rows}, "train")
    assert loss.isnan().tolist() == [False, False, False, True, False]
    assert accuracy[3] == 0 and (accuracy[[1, 4]] > 0).all()


class Given(torch.nn.Module):
    """Chain of layers whose scores follow from the samples.

    The scores are infinite where they overflow.
    """

    def __init__(self, outputs):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.last = torch.nn.Linear(2, outputs)
        with torch.no_grad():
            for layer in (self.first, self.last):
                layer.weight.copy_(torch.eye(2)[: layer.out_features] * 1e30)
                layer.bias.zero_()

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "loss, outputs",
    [("cross_entropy", 2), ("hinge", 1), ("binary_cross_entropy", 1)],
)
def test_every_engine_and_metric_counts_infinite_scores_alike(loss, outputs):
    # The last sample overflows in the first layer, and 0 times infinity is NaN.
    x = torch.tensor([[a, b] for a in (-1.0, 1e-30, 1.0) for b in (-1.0, 1e-30, 1e10)])
    x = torch.cat([x, x])
    y = torch.arange(len(x)) // 9
    data = Federation.from_clients([{"train": (x / 1e38, y), "test": (x, y)}] * 2)
    evaluations = []
    for engine in ("chain", "loop", "vmap"):
        run = simulation(
            data=data,
            model=Given(outputs),
            loss=loss,
            engine=engine,
            rounds=1,
            training=Training(lr=0.0),
            metrics=["f1", "balanced_accuracy"],
        )
        evaluations.append(run.run().rounds[-1]["eval"])
        predicted = run.history.predict(0, x) == y
        assert evaluations[-1]["accuracy"][0] == pytest.approx(
            float(predicted.float().mean())
        )
        assert evaluations[-1]["balanced_accuracy"][0] == pytest.approx(
            evaluations[-1]["accuracy"][0]
        )
    assert (
        evaluations[0]["accuracy"]
        == evaluations[1]["accuracy"]
        == evaluations[2]["accuracy"]
    )
    assert evaluations[0]["f1"] == evaluations[1]["f1"] == evaluations[2]["f1"]
    assert evaluations[0]["accuracy"][0] > 0
