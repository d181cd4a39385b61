"""The context in which a forward pass runs."""

from __future__ import annotations

import threading

import torch
import torch.nn as nn
from torch import Tensor

from pflcore import Net
from pflcore.nn.mode import context, forward_mode


class Buffered(nn.Module):
    """Batch norm, a float buffer that training changes, and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("table", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.mean()  # type: ignore[operator]
        return self.out(self.norm(x[:, self.table]))  # type: ignore[no-any-return, index]


def test_buffers_are_a_row_of_their_own() -> None:
    net = Net(Buffered)
    assert net.buffer_names == ["seen", "norm.running_mean", "norm.running_var"]
    assert net.b0.tolist() == [0] + [0] * 4 + [1] * 4  # the integer ones, table and num_batches_tracked, are no model
    x = torch.randn(8, 4) + 2
    with forward_mode(True, net.b0):
        net(net.w0, x)
        after = context.buffers
        assert after is not None
    module = net.load(Buffered(), net.w0, net.b0).train()
    module(x)
    torch.testing.assert_close(after, torch.cat([module.seen, module.norm.running_mean, module.norm.running_var]))  # type: ignore[list-item, union-attr]
    assert net.b0.tolist() == [0] * 5 + [1] * 4 and context.buffers is None
    with forward_mode(False, after):
        scores = net(net.w0, x)
        assert context.buffers is after  # evaluation reads them only
    torch.testing.assert_close(scores, module.eval()(x))
    assert not torch.equal(net(net.w0, x), scores)  # outside: the model's own


def test_modes_nest_and_are_the_threads_own() -> None:
    seen: list[bool] = []
    with forward_mode(True):
        with forward_mode(False):
            assert not context.train
        assert context.train
        other = threading.Thread(target=lambda: seen.append(context.train))
        other.start()
        other.join()
    assert not context.train and seen == [False]
