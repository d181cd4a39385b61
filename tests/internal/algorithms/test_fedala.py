"""FedALA against a plain torch program of its Algorithm 1 that shares no code with it, and its
laws."""

import pytest
import torch
import torch.nn as nn
from methods import FedALA
from small import images, make_setting, tiny_model

from pflcore import Clients, Net, Simulation, Training
from pflcore.algorithms.mixtures import sampled

# whole batches, so that no shuffle plays a part
TRAINING = Training(lr=0.3, batch_size=64, epochs=2)


def test_w_is_learned_on_a_part_of_the_samples_drawn_anew_each_round():
    s = make_setting(Net(tiny_model()), images((1, 20, 31)), TRAINING, 3)
    drawn = []
    for round, ids in ((1, [0, 1, 2]), (2, [0, 1, 2]), (1, [2, 1])):
        lists = sampled(
            Clients(s, torch.tensor(ids), round, s.net.b0.expand(len(ids), -1)), 0.8
        ).data.lists("train")
        drawn.append([set(lists[i].tolist()) for i in range(3)])
    whole = [set(s.data.lists("train")[i].tolist()) for i in range(3)]
    assert [len(d) for d in drawn[0]] == [1, 16, 24] and all(
        d <= w for d, w in zip(drawn[0], whole, strict=True)
    )
    # whoever else is there
    assert drawn[0][1] != drawn[1][1] and drawn[2] == [set(), *drawn[0][1:]]


@pytest.mark.parametrize(
    ("size", "batch", "drop_last"), [(7, 4, False), (2, 4, False), (12, 8, False), (12, 8, True)]
)
def test_no_batch_of_one_for_batch_norm(size, batch, drop_last):
    """4/5 of 7 samples are 5, which in fours leave one alone: then 4 are taken."""
    model = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))  # noqa: E731
    training = Training(lr=0.1, batch_size=batch, drop_last=drop_last)
    run = Simulation(FedALA(), model, images((size, 8)), training, rounds=3)
    assert run.run().stopped is None
    local = Clients(run.setting, torch.arange(2), 1, run.setting.net.b0.expand(2, -1))
    count = int(sampled(local, 0.8).data.size("train")[0])
    assert 1 < count <= size and (drop_last or count % batch != 1)
