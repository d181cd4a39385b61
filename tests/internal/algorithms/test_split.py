"""Split models against a plain torch program of each paper's algorithm, which shares no code with
them, and their laws."""

import pytest
import torch
from methods import FedBABU, FedBN, FedPer, FedRep, LGFedAvg
from parts.split import TRAINING, federation, normed
from small import copied

from pflcore import Hardware, Simulation
from pflcore.simulation.personal import grown


@pytest.mark.parametrize("alg", [FedPer(), FedRep(), LGFedAvg(), FedBABU(), FedBN()])
def test_a_newcomer_learns_its_own_part_and_gets_the_others(alg):
    data = federation()
    history = Simulation(
        alg, normed, data.subset([0, 1]), TRAINING, rounds=2, hardware=Hardware(workers=1)
    ).run()
    state, everybody = grown(alg, copied(history.state), history.model(0).net, 2)
    assert not everybody and len(state.clients.get("h", state.batch_norm)) == 3
    model = history.adapt(data.client(2), rounds=3)
    private = alg.columns(model.net)
    if alg.order == "body":
        assert (model.view_w != history.model(0).view_w).any()
    else:
        assert torch.equal(model.view_w[~private], history.state.server["x"])
        assert not torch.equal(model.view_w[private], model.net.w0[private])
