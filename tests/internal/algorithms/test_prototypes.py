"""Rules of the methods that share features, by their laws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import F64, near, t

from pflcore.algorithms._fedas import trace_shares
from pflcore.algorithms._fedpac import head_weights
from pflcore.algorithms._prototypes import mean_prototypes


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32), st.floats(-3, 3))
def test_fedpacs_heads_have_the_least_error(clients, width, seed, log_scale):
    """P is optimal if and only if no corner e_j of the simplex is lower.

    The gradient of p . G p at an optimum has (e_j - p) . G p >= 0 for all j.
    """
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(clients, width, generator=generator, dtype=F64)
    variance = torch.rand(clients, generator=generator, dtype=F64) * 10**log_scale

    weight = head_weights(h, variance)

    assert (weight >= 0).all()
    near(weight.sum(1), torch.ones(clients), 1e-12)
    for p, center in zip(weight, h, strict=True):
        away = center - h
        slope = away @ (p @ away) + variance * p
        scale = away.square().sum(1).max() + variance.max()
        assert (slope - p @ slope).min() >= -1e-8 * scale


def test_fedpacs_heads_of_equal_clients_are_weighed_by_their_certainty():
    variance = t([1.0, 2.0, 4.0])
    want = (1 / variance) / (1 / variance).sum()
    near(head_weights(torch.ones(3, 5, dtype=F64), variance), want.expand(3, 3), 1e-8)
    # A client that is certain of itself takes no other head.
    certain = head_weights(t([[0.0], [1.0]]), t([0.0, 1.0]))
    near(certain[0], [1.0, 0.0], atol=1e-8)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_fedass_shares_sum_to_one(traces):
    share = trace_shares(t(traces))
    near(share.sum(), 1.0, 1e-12)
    if not any(traces):
        near(share, [[1 / len(traces)] * len(traces)])


@pytest.mark.parametrize(
    ("weighting", "first"), [("samples", [2.5, 0.0]), ("uniform", [2.0, 0.0])]
)
def test_a_class_that_nobody_showed_keeps_its_prototype(weighting, first):
    state = {"prototypes": t([[9.0, 9.0], [7.0, 7.0], [0.0, 0.0]])}
    state["known"] = t([1.0, 1.0, 0.0])
    up = {
        "prototypes": t([[[1.0, 0.0], [0, 0], [0, 0]], [[3.0, 0.0], [0, 0], [0, 0]]]),
        "counts": t([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0]]),
    }
    changes = mean_prototypes(state, up, weighting)
    near(changes["prototypes"], [first, [7.0, 7.0], [0.0, 0.0]])
    assert changes["known"].tolist() == [1.0, 1.0, 0.0]


def test_a_negative_variance_counts_as_none():
    """Rounding, or a client that lies, makes one."""
    statistics = t([[0.0, 1.0], [0.5, 0.0], [1.0, 1.0]])
    got = head_weights(statistics, t([-5.0, 0.2, -1e-9]))
    near(got, head_weights(statistics, t([0.0, 0.2, 0.0])))
