"""What a method may do with batch norm's running statistics."""

import pytest
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
from parts.edges import normal, normed
from small import images, tiny_model

from pflcore import Net, Simulation
from pflcore.algorithms import ALGORITHMS
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
