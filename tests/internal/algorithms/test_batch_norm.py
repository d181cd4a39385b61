"""What a method may do with batch norm's running statistics."""

import pytest
from methods import FedDWA, HypCluster
from parts.edges import normal, normed
from small import images, tiny_model

from pflcore import Net, Simulation
from pflcore.algorithms import ALGORITHMS
from pflcore.simulation.round import policy

SERVED = "fedavg scaffold waffle weight_erosion clustered_fl finetune fedrod sfl per_fedavg"
LOCAL = "apfl ditto local pfedme mocha l2c"


def test_each_method_has_its_policy_and_only_what_it_knows():
    net = normal().net
    first = {name: policy(cls(), net) for name, cls in ALGORITHMS.items()}
    assert all(first[name] == "average" for name in SERVED.split())
    assert {n for n, known in first.items() if known == "rule"} == {"hypcluster", "ensemble"}
    assert policy(FedDWA(), net) == "local" and policy(FedDWA(), net, "average") == "average"
    for name in LOCAL.split():
        alg = ALGORITHMS[name]()
        assert first[name] == "local"
        with pytest.raises(
            ValueError, match=r"^batch_norm: this \w+ knows 'local' statistics, got 'average'\.$"
        ):
            policy(alg, net, "average")
        assert policy(alg, Net(tiny_model()), "average")  # nothing to average
    with pytest.raises(ValueError, match=r"^batch_norm: this HypCluster knows 'rule'"):
        Simulation(HypCluster(), normed, images(), batch_norm="local")
