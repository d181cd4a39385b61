"""Losses of scores [B, 1] and targets [B], and an accuracy only where classes are scored."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small import grouped
from torch import nn

from pflcore import Federation, Simulation, Training

GEN = torch.Generator().manual_seed(0)
X = torch.randn(3, 24, 3, generator=GEN)
COUNTS = torch.poisson(torch.exp(0.5 * X[:, :, 0] + 0.3), generator=GEN)


def evaluated(loss, model, y, **options):
    parts = [(x, t) for x, t in zip(X, y, strict=True)]
    run = Simulation(
        "fedavg",
        model,
        Federation.from_arrays(parts, test=parts),
        Training(lr=0.1),
        rounds=1,
        loss=loss,
        **grouped(options),
    )
    return run.run().rounds[-1]["eval"]


def column():
    return nn.Linear(3, 1)


def zero():
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def flat():
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


@pytest.mark.parametrize(
    "loss",
    [
        nn.PoissonNLLLoss(), F.poisson_nll_loss, nn.KLDivLoss(), nn.HuberLoss(), F.l1_loss,
        partial(F.huber_loss, delta=2.0), lambda s, y: ((s - y) ** 2).mean(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", [column, zero])
def test_no_loss_spreads_a_column_of_scores(loss, model):
    with pytest.raises(ValueError, match=r"would spread scores \[\d+, 1\] over targets \[\d+\]"):
        evaluated(loss, model, COUNTS)


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, y: ((s[:, 0] - y) ** 2).mean(),
        lambda s, y: ((s.view(y.shape) - y) ** 2).mean(),
        F.mse_loss,
    ],
)
def test_a_loss_that_brings_them_together_itself_is_taken(loss):
    assert evaluated(loss, column, COUNTS)["loss"] == pytest.approx(
        evaluated("squared", column, COUNTS)["loss"]
    )


@pytest.mark.parametrize(
    "loss",
    [
        nn.PoissonNLLLoss(),
        F.l1_loss,
        F.smooth_l1_loss,
        nn.L1Loss(),
        lambda s, y: (s - y).abs().mean(),
    ],
)
def test_whole_numbers_have_no_accuracy_and_may_have_an_error(loss):
    got = evaluated(loss, flat, COUNTS.long(), metrics=["mae"])
    assert "accuracy" not in got and min(got["mae"]) > 0


def test_probabilities_have_no_accuracy_by_their_sign():
    model = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid(), nn.Flatten(0))
    labels = (COUNTS > 1).long()
    assert "accuracy" not in evaluated(
        lambda s, y: F.binary_cross_entropy(s, y.float()), model, labels
    )


@pytest.mark.parametrize(
    "loss", ["binary_cross_entropy", "hinge", lambda s, y: F.cross_entropy(s, y)]
)
def test_scores_of_classes_have_an_accuracy(loss):
    model = nn.Linear(3, 2) if callable(loss) else column()
    assert "accuracy" in evaluated(loss, model, (COUNTS > 1).long())
