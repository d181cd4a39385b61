"""Defences where uploads are lost: who is not finite lowers the number of hostile clients that are
left, who is merely absent does not."""

import pytest
import torch
from small import with_test
from torch import nn

from pflcore import Adversary, Client, Federation, Robustness, Server, Simulation, Training
from pflcore.algorithms import Cohort, FedAvg

GEN = torch.Generator().manual_seed(0)
PARTS = [(torch.randn(12, 4, generator=GEN), torch.arange(12) % 3) for _ in range(5)]
TRAINING = Training(lr=0.1, batch_size=4)


@pytest.mark.parametrize(
    ("defence", "least"), [("krum", 5), ("multi_krum", 5), ("trimmed_mean", 3)]
)
def test_a_client_that_is_not_finite_ends_no_defended_run(defence, least):
    data = Federation.from_clients(with_test(PARTS[:least], PARTS[:least]))
    bad = Robustness(adversary=Adversary("scale", [least - 1], strength=1e39))
    algorithm = FedAvg(defence=defence, hostile=1)
    history = Simulation(algorithm, nn.Linear(4, 3), data, TRAINING, 5, robustness=bad).run()
    assert history.stopped is None
    assert [(r["dropped"], r["void"]) for r in history.rounds] == [([least - 1], False)] * 5


def test_clients_that_were_merely_absent_lower_no_defence():
    server = Server(FedAvg(defence="krum", hostile=1), nn.Linear(4, 3), 5)
    clients = [Client(server.algorithm, nn.Linear(4, 3), part, TRAINING) for part in PARTS]
    for count in (4, 5):
        ups = {i: clients[i].train(server.download(i)) for i in range(count)}
        assert server.aggregate(ups).void is (count == 4)


@pytest.mark.parametrize(
    ("count", "lost", "f"),
    [
        (11, 0, 4),
        (10, 1, 3),
        (9, 2, 3),
        (9, 1, 3),
        (8, 1, None),
        (8, 2, 2),
        (4, 4, 0),
        (2, 4, None),
    ],
)
def test_as_many_may_be_hostile_as_those_who_are_left_allow(count, lost, f):
    """Krum with f = 4: of models on a line it takes the one in the middle of the N - f - 2
    nearest."""
    alg = FedAvg(defence="krum", hostile=4)
    delta = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    size = torch.ones(count, dtype=torch.long)
    cohort = Cohort(torch.arange(count), size, 20, 1, 1, lost=lost)
    if f is None:
        words = "defence: krum against 4 hostile clients needs 11 in a round, and round 1 has"
        with pytest.raises(Exception, match=words):
            alg.defended(delta, cohort)
        return
    square = torch.cdist(delta.double(), delta.double()).square().fill_diagonal_(torch.inf)
    score = square.sort(1).values[:, : count - f - 2].sum(1)
    assert alg.defended(delta, cohort)[1].weight.argmax() == score.argmin()
