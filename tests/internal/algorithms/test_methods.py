"""Tests of batch-norm policies and of newcomers to a split model."""

import pytest
import torch
from parts.edges import normal, normed
from small import images, tiny_model

from pflcore import Hardware, Net, Simulation
from pflcore.algorithms import (
    ALGORITHMS,
    FedBABU,
    FedBN,
    FedDWA,
    FedPer,
    FedRep,
    HypCluster,
    LGFedAvg,
)
from pflcore.algorithms._feddwa import simplex_qp
from pflcore.simulation._state import batch_norm_policy

SERVED = (
    "fedavg scaffold waffle weight_erosion clustered_fl finetune fedrod sfl per_fedavg"
)
LOCAL = "apfl ditto local pfedme mocha l2c"


def test_each_method_has_its_policy_and_only_what_it_knows():
    net = normal().net
    first = {name: batch_norm_policy(cls(), net) for name, cls in ALGORITHMS.items()}
    assert all(first[name] == "average" for name in SERVED.split())
    assert {n for n, known in first.items() if known == "rule"} == {
        "hypcluster",
        "ensemble",
    }
    assert (
        batch_norm_policy(FedDWA(), net) == "local"
        and batch_norm_policy(FedDWA(), net, "average") == "average"
    )
    for name in LOCAL.split():
        alg = ALGORITHMS[name]()
        assert first[name] == "local"
        with pytest.raises(
            ValueError,
            match=r"^batch_norm: this \w+ knows 'local' statistics, got 'average'\.$",
        ):
            batch_norm_policy(alg, net, "average")
        # A model without batch norm has no statistics, so each policy fits.
        assert batch_norm_policy(alg, Net(tiny_model()), "average")
    with pytest.raises(ValueError, match=r"^batch_norm: this HypCluster knows 'rule'"):
        Simulation(HypCluster(), normed, images(), batch_norm="local")


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("alg", [FedPer(), FedRep(), LGFedAvg(), FedBABU(), FedBN()])
def test_a_newcomer_learns_its_own_part_and_gets_the_others(alg):
    s = normal()
    options = {"rounds": 2, "hardware": Hardware(workers=1)}
    data = s.data.subset([0, 1])
    history = Simulation(alg, normed, data, s.training, **options).run()
    model = history.adapt(s.data.client(2), rounds=3)
    private = alg.private_mask(model.net)
    if alg.order == "body":
        assert (model.view_w != history.model(0).view_w).any()
    else:
        assert torch.equal(model.view_w[~private], history.state.server["x"])
        assert not torch.equal(model.view_w[private], model.net.w0[private])


@pytest.mark.parametrize("by", [1.0, 1e-6, 1e6])
def test_the_ridge_is_a_share_of_the_diagonal(by):
    """The solution is known for a diagonal matrix, at any scale.

    For equal models with a noise of 1 on the first, p_1 / p_2 = ridge / (1 + 2 ridge).
    """
    p = simplex_qp(by * torch.tensor([[2.0, 1.0], [1.0, 1.0]]), ridge=0.5)

    torch.testing.assert_close(p, torch.tensor([0.2, 0.8], dtype=torch.float64))
