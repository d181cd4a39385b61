"""The part of the samples that FedALA learns its W on."""

import pytest
import torch
import torch.nn as nn
from methods import FedALA
from small import images, make_setting, tiny_model

from pflcore import Clients, Net, Simulation, Training
from pflcore.algorithms.mixtures import sampled


def of(setting, ids, round=1):
    net = setting.net
    clients = Clients(setting, torch.tensor(ids), round, net.b0.expand(len(ids), -1))
    return sampled(clients, 0.8).data.lists("train")


def test_w_is_learned_on_a_part_of_the_samples_drawn_anew_each_round():
    s = make_setting(Net(tiny_model()), images((1, 20, 31)), Training(batch_size=64), 3)
    one, two, few, whole = (
        [set(lists[i].tolist()) for i in range(3)]
        for lists in (of(s, [0, 1, 2]), of(s, [0, 1, 2], 2), of(s, [2, 1]), s.data.lists("train"))
    )
    assert [len(d) for d in one] == [1, 16, 24]
    assert all(d <= w for d, w in zip(one, whole, strict=True))
    assert one[1] != two[1] and few == [set(), *one[1:]]  # the others play no part


@pytest.mark.parametrize(
    ("size", "batch", "drop_last"), [(7, 4, False), (2, 4, False), (12, 8, False), (12, 8, True)]
)
def test_no_batch_of_one_for_batch_norm(size, batch, drop_last):
    """4/5 of 7 samples are 5, which in fours leave one alone: then 4 are taken."""
    model = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))  # noqa: E731
    training = Training(lr=0.1, batch_size=batch, drop_last=drop_last)
    run = Simulation(FedALA(), model, images((size, 8)), training, rounds=3)
    assert run.run().stopped is None
    count = int(of(run.setting, [0, 1]).size[0])
    assert 1 < count <= size and (drop_last or count % batch != 1)
