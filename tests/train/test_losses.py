"""Losses and what scores stand for: one a label, one for each class, a number; in training, in what
is measured, and in what a model predicts."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from doors import sentence
from parts.user import simulation
from small import (
    at_work,
    double,
    equals,
    layers,
    near,
    tiny,
    tiny_model,
    with_test,
)
from torch import nn
from ugly import randn

from pflcore import Federation, Net, Training

X = randn(0, 3, 24, 3, dtype=torch.float32)
COUNTS = (2 * X[:, :, 0].exp()).floor()


def trained(model, data, rounds=20, loss=None, algorithm="fedavg", **options):
    """What was evaluated last, and the first client's model."""
    given = {"model": model, "training": Training(lr=0.5, batch_size=10), "every": 1000}
    run = simulation(algorithm, data, rounds=rounds, loss=loss, **given, **options).run()
    return run.rounds[-1]["eval"], run.model(0)


def evaluated(loss, model, y, **options):
    parts = list(zip(X, y, strict=True))
    data = Federation.from_clients(with_test(parts, parts))
    return trained(model, data, 1, loss, **options)[0]


def column():
    return nn.Linear(3, 1)


def zero():
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    return model


def flat():
    return layers("Linear 3 1, Flatten 0")


@pytest.mark.parametrize(
    "loss",
    [
        nn.PoissonNLLLoss(), F.poisson_nll_loss, nn.KLDivLoss(), nn.HuberLoss(), F.l1_loss,
        partial(F.huber_loss, delta=2.0), lambda s, y: ((s - y) ** 2).mean(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", [column, zero])
def test_no_loss_spreads_a_column_of_scores(loss, model):
    with sentence(r"criterion: .* would spread scores \[\d+, 1\] over targets \[\d+\]; "):
        evaluated(loss, model, COUNTS)


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, y: ((s[:, 0] - y) ** 2).mean(),
        lambda s, y: ((s.view(y.shape) - y) ** 2).mean(),
        F.mse_loss,
        nn.MSELoss(reduction="mean"),
    ],
)
def test_a_loss_that_brings_them_together_itself_is_taken(loss):
    torch.manual_seed(0)
    want = evaluated("squared", column, COUNTS)["loss"]
    assert evaluated(loss, column, COUNTS)["loss"] == pytest.approx(want)


@pytest.mark.parametrize("loss", [nn.PoissonNLLLoss(), F.l1_loss, F.smooth_l1_loss, nn.L1Loss()])
def test_whole_numbers_have_no_accuracy_and_may_have_an_error(loss):
    got = evaluated(loss, flat, COUNTS.long(), metrics=["mae"])
    assert "accuracy" not in got and min(got["mae"]) > 0


@pytest.mark.parametrize(
    "loss, model, classes",
    [
        ("binary_cross_entropy", column, True),
        ("hinge", column, True),
        (lambda s, y: F.cross_entropy(s, y), lambda: nn.Linear(3, 2), True),
        # probabilities have none by their sign
        (
            lambda s, y: F.binary_cross_entropy(s, y.float()),
            lambda: layers("Linear 3 1, Sigmoid, Flatten 0"),
            False,
        ),
    ],
)
def test_scores_of_classes_have_an_accuracy(loss, model, classes):
    assert ("accuracy" in evaluated(loss, model, (COUNTS > 1).long())) is classes


class Steps(nn.Module):
    """Scores of every step: [B, T] or [B, T, 1] of one score, [B, C, T] of C classes."""

    def __init__(self, scores=1, last=False):
        super().__init__()
        self.l, self.last = nn.Linear(4, scores), last

    def forward(self, d):
        out = self.l(d["x"] if isinstance(d, dict) else d)
        return out if self.last else out[..., 0] if out.shape[-1] == 1 else out.transpose(1, 2)


def steps(classes=2, length=5, left_out=""):
    """Sequences; by a "mask", or by "labels" of -100, some of their steps are left out."""
    torch.manual_seed(1)
    clients = []
    for _ in range(3):
        x = torch.randn(40, length, 4)
        y = x[..., :classes].argmax(-1) if classes > 2 else (x[..., 0] > 0).long()
        seen = torch.arange(length) < torch.randint(1, length + 1, (40, 1))
        y = y.masked_fill(~seen, -100) if left_out == "labels" else y
        clients.append(({"x": x, "mask": seen} if left_out == "mask" else x, y))
    return Federation.from_clients(clients).split(test=0.25)


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "hinge"])
@pytest.mark.parametrize("shape", [False, True])
def test_one_score_a_step_is_measured_and_predicted_by_its_sign(loss, shape):
    found, model = trained(lambda: Steps(last=shape), steps(), loss=loss, metrics=["f1"])
    assert min(found["accuracy"]) > 0.9 and min(found["f1"]) > 0.9
    x = torch.randn(7, 5, 4)
    equals(model.predict(x), (model(x).reshape(7, 5) > 0).long())
    assert model.returns == "logits"


@pytest.mark.parametrize("classes, length", [(4, 4), (3, 5), (3, 1)])
def test_metrics_of_steps_are_those_of_their_labels(classes, length):
    names = ["auc", "f1", "balanced_accuracy"]
    data = steps(classes, length)
    found, model = trained(lambda: Steps(classes), data, 40, metrics=names)
    assert all(min(found[k]) > 0.85 for k in ("accuracy", *names)), found
    assert model.predict(torch.randn(6, length, 4)).shape == (6, length)


@pytest.mark.parametrize("loss", ["squared", "half_squared", "hinge"])
def test_steps_that_a_mask_leaves_out_count_in_no_loss(loss):
    with sentence(r"criterion: '\w+' would count the steps that the mask leaves out; "):
        trained(Steps, steps(left_out="mask"), loss=loss)


def test_labels_that_are_left_out_need_no_mask():
    one, other = (
        trained(lambda: Steps(3), steps(3, left_out=how), 2)[0]["loss"]
        for how in ("mask", "labels")
    )
    assert one == pytest.approx(other)


def test_what_a_model_predicts_is_what_its_targets_were():
    x = torch.randn(80, 3)
    several, ratings = (x > 0).long(), (3 * x[:, 0]).round().clamp(-9, 9).long() + 9
    data = Federation.from_clients([(x, several)]).split(test=0.25)
    found, model = trained(nn.Linear(3, 3), data, loss="binary_cross_entropy")
    equals(model.predict(x), (model(x) > 0).long())
    assert min(found["accuracy"]) > 0.8
    data = Federation.from_clients([(x, ratings)]).split(test=0.25)
    found, model = trained(nn.Linear(3, 1), data, loss="squared", metrics=["mae"])
    torch.testing.assert_close(model.predict(x), model(x)[:, 0])
    assert model.returns == "values" and found["mae"][0] < 1
    assert model.predict(x.numpy()[::-1]).shape == (80,)
    assert model.double().predict(x.double()).dtype == torch.float64
    with sentence(
        r"x: expected samples \[B, ...\], got shape \[3\]; for one sample give x\[None\]"
    ):
        model.predict(x[0])
    with sentence("x: expected numbers in one array .*, got 'a'"):
        model.predict("a")


def test_neighbours_vote_with_one_label_a_sample():
    with sentence("data: kNN-Per's neighbours vote .* or one for each step"):
        trained(lambda: Steps(3), steps(3), 1, algorithm="knnper")
    x = torch.randn(60, 3)
    data = Federation.from_clients([(x, x[:, 0])] * 2).split(test=0.25)
    assert trained(nn.Linear(3, 1), data, 1, algorithm="knnper")[1].returns == "values"


def test_losses_of_double_models_are_double():
    s = double(tiny(engine="vmap"))
    losses = at_work(s).loss(s.net.w0.expand(3, -1))
    want = [s.net.loss(s.net.w0, *s.data.client(i)).item() for i in range(3)]
    near(losses, want, 1e-13, 1e-15)


def test_a_loss_is_a_name_a_function_or_a_module():
    def played(loss=None):
        run = simulation(loss=loss)
        return run.run().series("loss")[1], run.header()["criterion"]

    want, name = played()
    assert name == "cross_entropy"
    for loss in (
        "cross_entropy",
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        lambda scores, y: F.cross_entropy(scores, y),
    ):
        assert torch.allclose(played(loss)[0], want, rtol=1e-5)
    weighted, name = played(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 1.0, 1.0])))
    assert not torch.allclose(weighted, want, rtol=1e-2) and name.startswith("CrossEntropyLoss ")


@pytest.mark.parametrize(
    "loss, words",
    [
        ("entropy", "expected one of cross_entropy, .* got 'entropy'"),
        (
            nn.CrossEntropyLoss,
            r"expected a loss, got the class CrossEntropyLoss; write CrossEntropyLoss\(\)",
        ),
        (
            nn.CrossEntropyLoss(reduction="none"),
            r"expected the mean over a batch, got CrossEntropyLoss\(reduction='none'\)",
        ),
        (nn.Linear(2, 1), "Linear has parameters, which nothing would train"),
        (0.5, "expected one of cross_entropy, .* got 0.5"),
    ],
)
def test_what_is_no_loss_is_one_sentence(loss, words):
    with sentence(f"criterion: {words}", (ValueError, TypeError)):
        Net(tiny_model(), loss)
    with sentence(f"(loss|criterion): {words}", (ValueError, TypeError)):
        simulation(loss=loss)


def test_a_net_has_its_own_loss():
    with sentence("loss: this Net has a loss of its own"):
        simulation(model=Net(tiny_model()), loss="cross_entropy")
