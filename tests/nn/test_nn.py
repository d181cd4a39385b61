"""Dropout that draws from each client's own random numbers."""

from itertools import product

import torch
import torch.nn as nn
from small import ENGINES, F64, Scale, at_work, equals, make_setting

from pflcore import Federation, Net, Training
from pflcore.nn import Dropout


def test_outside_pflcore_it_is_plain_dropout():
    torch.manual_seed(0)
    ours = Dropout(0.3).train()(torch.ones(50))
    torch.manual_seed(0)
    equals(ours, nn.Dropout(0.3).train()(torch.ones(50)))


@ENGINES
def test_masks_differ_between_steps_clients_rounds_and_runs(engine):
    """Every step of every client, round and seed draws its own mask.

    The gradient of scores = dropout(1) * m shows the mask.
    """
    net = Net(nn.Sequential(Dropout(0.5), Scale([0.0] * 64)), loss=lambda s, y: s.sum())
    ones = torch.ones(8, 64, dtype=F64)
    data = Federation.from_clients([{"train": (ones, ones)}] * 2, dtype=None)
    masks = []

    def update(rows, grad, k):
        masks.extend(grad(rows["w"]).tolist())
        return rows

    for seed, round in product((0, 1), (1, 2)):
        s = make_setting(
            net, data, Training(batch_size=4, epochs=2), engine=engine, seed=seed
        )
        at_work(s, round=round).each_batch({"w": net.w0.repeat(2, 1)}, update)
    assert len({tuple(mask) for mask in masks}) == len(masks) == 2 * 2 * 2 * 4
