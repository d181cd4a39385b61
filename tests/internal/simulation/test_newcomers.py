"""The state of a server after one more client has joined."""

import pytest
import torch
from small import tiny

from pflcore.algorithms import FedDyn, Scaffold
from pflcore.simulation._models import with_new_client
from pflcore.simulation.round import initial_state


@pytest.mark.parametrize("alg, name", [(Scaffold(), "c"), (FedDyn(), "h")])
def test_a_newcomer_counts_in_means_over_all_clients(alg, name):
    """The newcomer's own is 0, so the mean of three becomes one of four."""
    net = tiny().net
    state = initial_state(alg, net, 3)
    state.server[name] += 4

    grown, _ = with_new_client(alg, state, net, 3, torch.arange(3))

    assert grown.server[name].eq(3).all()
    assert torch.equal(grown.server["x"], state.server["x"])
