"""Dropout from the client's own numbers."""

import pytest
import torch
import torch.nn as nn
from small import images, make_setting

from pflcore import Clients, Net, Training
from pflcore.nn import Dropout


def test_outside_pflcore_it_is_plain_dropout():
    torch.manual_seed(0)
    ours = Dropout(0.3).train()(torch.ones(50))
    torch.manual_seed(0)
    assert torch.equal(ours, nn.Dropout(0.3).train()(torch.ones(50)))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_masks_differ_between_steps_clients_rounds_and_runs(engine):
    """A model whose gradient shows its mask: scores = dropout(x) * w."""

    class Show(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(64))
            self.drop = Dropout(0.5)

        def forward(self, x):
            return self.drop(torch.ones(64)) * self.w

        def reset_parameters(self): ...

    net = Net(Show, criterion=lambda s, y: s.sum())
    data = images((8, 8))
    masks: set[tuple[float, ...]] = set()
    count = 0
    for seed in (0, 1):
        for round in (1, 2):
            local = Clients(
                make_setting(net, data, Training(batch_size=4, epochs=2), engine=engine, seed=seed),
                torch.arange(2),
                round,
                net.b0.expand(2, -1),
            )

            def update(rows, grad, k):
                g = grad(rows["w"])
                masks.update(tuple(row.tolist()) for row in g)
                return {"w": rows["w"] - g}

            local.each_batch({"w": net.w0.repeat(2, 1)}, update)
            count += 2 * 4
    assert len(masks) == count
