"""Tests of the form in which losses and metrics receive single scores.

A model has one score for each target. The form does not depend on the scale of the
scores.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pflcore.metrics import find_argument_form, metrics_of


def elementwise(f):
    return lambda s, y: f(s, y.to(s.dtype)).mean()


LOSSES = {
    "L1": nn.L1Loss(),
    "smooth L1": nn.SmoothL1Loss(),
    "Huber": nn.HuberLoss(),
    "squares": elementwise(lambda s, y: (s - y) ** 2),
    "root of squares": lambda s, y: ((s - y) ** 2).mean().sqrt(),
    "relative": elementwise(lambda s, y: ((s - y) / (y.abs() + 1e-30)).abs()),
    "logarithms": elementwise(lambda s, y: (s.log1p() - y.log1p()) ** 2),
    "log cosh": elementwise(lambda s, y: F.softplus(2 * (s - y)) - (s - y)),
    "quantile": elementwise(lambda s, y: torch.maximum(0.7 * (y - s), -0.3 * (y - s))),
    "Gaussian": lambda s, y: F.gaussian_nll_loss(s, y.to(s.dtype), torch.ones_like(s)),
    "Poisson": nn.PoissonNLLLoss(),
    "divergence": nn.KLDivLoss(),
    "margin": nn.SoftMarginLoss(),
}
GENERATOR = torch.Generator().manual_seed(0)
NORMAL = torch.randn(60, generator=GENERATOR)
UNIFORM = torch.rand(60, generator=GENERATOR)
KINDS = {
    "normal": NORMAL,
    "years": 1990 + 30 * UNIFORM,
    "ages": 20 + 50 * UNIFORM,
    "degrees": 15 + 10 * UNIFORM,
    "counts": (30 * UNIFORM).floor(),
    "prices": 1e5 * (1 + 4 * UNIFORM),
    "large": 1e6 * NORMAL,
    "small": 1e-6 * NORMAL,
    "0 and 1": (UNIFORM > 0.5).float(),
    "shares": UNIFORM,
    "all 50": torch.full((60,), 50.0),
    "all 0": torch.zeros(60),
    "whole numbers": (30 * UNIFORM).floor().long(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_spreads_a_column_of_scores(loss, kind):
    y = KINDS[kind][:8]
    scores = torch.rand(8, 1)

    form = find_argument_form(LOSSES[loss], scores, y, is_loss=True)

    got = LOSSES[loss](*form.convert(scores, y))
    want = LOSSES[loss](scores[:, 0], y if y.is_floating_point() else y.float())
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", LOSSES)
@pytest.mark.unless(
    lambda metric, kind: (metric, kind) == ("divergence", "whole numbers")
)
def test_no_metric_spreads_a_column_of_scores(metric, kind):
    y = KINDS[kind]
    scores = torch.rand(60, 1)
    own = metrics_of({"own": LOSSES[metric]}, False)["own"]

    got = own(scores, y)
    want = LOSSES[metric](scores[:, 0], y)

    torch.testing.assert_close(got, want, equal_nan=True)


def test_what_takes_the_scores_as_they_are_gets_them():
    y = torch.rand(8)
    scores = torch.rand(8, 1)
    for f in (
        lambda s, y: (s[:, 0] - y).abs().mean(),
        lambda s, y: (s.view(-1) - y).abs().mean(),
        lambda s, y: s.mean(),
        lambda s, y: F.binary_cross_entropy(s.squeeze(1), y),
    ):
        assert (
            find_argument_form(f, scores, y, is_loss=True).convert(scores, y)[0]
            is scores
        )


def test_probabilities_are_drawn_between_0_and_1():
    y = (torch.rand(8) > 0.5).float()
    scores = torch.rand(8, 1)
    assert find_argument_form(
        lambda s, y: F.binary_cross_entropy(s, y), scores, y, True
    ).scores_like_targets
