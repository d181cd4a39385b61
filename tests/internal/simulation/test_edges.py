"""The edges of the algorithms: batch norm's statistics, clients who come late or never, draws, step
sizes of 0."""

import pytest
import torch
import torch.nn as nn
from methods import (
    APFL,
    L2C,
    Ditto,
    FedDWA,
    HypCluster,
    LocalOnly,
    Mocha,
    PFedMe,
)
from parts.edges import F64, normal, normed
from small import images, tiny_model

from pflcore import Net, Simulation
from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.adaptation import neighbours
from pflcore.algorithms.clusters import centres
from pflcore.simulation.round import policy


def test_each_method_has_its_policy_and_only_what_it_knows():
    net = normal().net
    served = {n for n, c in ALGORITHMS.items() if c().traits.batch_norm[0] == "average"}
    assert {
        "fedavg",
        "scaffold",
        "waffle",
        "weight_erosion",
        "clustered_fl",
        "finetune",
        "fedrod",
        "sfl",
        "per_fedavg",
    } <= served
    assert {n for n, c in ALGORITHMS.items() if c().traits.batch_norm[0] == "rule"} == {
        "hypcluster",
        "ensemble",
    }
    assert policy(FedDWA(), net) == "local" and policy(FedDWA(), net, "average") == "average"
    for alg in (APFL(), Ditto(), LocalOnly(), PFedMe(), Mocha(), L2C()):
        assert policy(alg, net) == "local"
        with pytest.raises(
            ValueError, match=r"^batch_norm: this \w+ knows 'local' statistics, got 'average'\.$"
        ):
            policy(alg, net, "average")
        assert policy(alg, Net(tiny_model()), "average")  # nothing to average
    with pytest.raises(ValueError, match=r"^batch_norm: this HypCluster knows 'rule'"):
        Simulation(HypCluster(), normed, images(), batch_norm="local")


@pytest.mark.parametrize("k", [1, 3, 5])
def test_ties_among_neighbours_do_not_depend_on_the_padding(k):
    gen = torch.Generator().manual_seed(3)
    store = torch.randint(0, 2, (40, 3), generator=gen).double()
    queries = torch.randint(0, 2, (6, 3), generator=gen).double()
    weight, near = neighbours(queries, store, 40, k)
    d = ((queries[:, None] - store) ** 2).sum(2)
    assert near.tolist() == d.sort(dim=1, stable=True).indices[:, :k].tolist()
    for padded in (64, 200, 999):
        wide = torch.cat([store, torch.zeros(padded - 40, 3, dtype=F64)])
        again = neighbours(queries, wide, 40, k)
        assert torch.equal(again[1], near) and torch.equal(again[0], weight)


def test_no_centre_of_a_zero_started_model_is_zero_and_seeds_follow_the_run():
    class Zero(nn.Linear):
        def reset_parameters(self):
            nn.init.zeros_(self.weight), nn.init.zeros_(self.bias)

    rows = centres(Net(lambda: Zero(5, 3), seed=4), 3)
    assert rows.any(1).all() and len(rows.unique(dim=0)) == 3
    a, b = (
        Simulation(HypCluster(k=2), tiny_model(), images(), seed=seed).state.server["x"]
        for seed in (0, 1)
    )
    assert not torch.equal(a, b)
    assert torch.equal(
        Simulation(HypCluster(k=2, seed=0), tiny_model(), images(), seed=1).state.server["x"], a
    )
