"""Tests of modules as functions of flat rows."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn

from pflcore import Net
from pflcore.nn._context import forward_context, forward_state
from pflcore.train._losses import LOSSES


class Buffered(nn.Module):
    """Batch norm, a float buffer that training changes, and an integer one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("table", torch.arange(4))

    def forward(self, x):
        if self.training:
            self.seen += x.mean()
        return self.out(self.norm(x[:, self.table]))


def test_buffers_are_a_row_of_their_own():
    net = Net(Buffered)
    assert net.buffer_names == ["seen", "norm.running_mean", "norm.running_var"]
    # The integer buffers, table and num_batches_tracked, are not in the row.
    assert net.b0.tolist() == [0] + [0] * 4 + [1] * 4
    x = torch.randn(8, 4) + 2
    with forward_context(True, net.b0):
        net(net.w0, x)
        after = forward_state.buffers
    module = net.load(Buffered(), net.w0, net.b0).train()
    module(x)
    torch.testing.assert_close(
        after,
        torch.cat([module.seen, module.norm.running_mean, module.norm.running_var]),
    )
    assert net.b0.tolist() == [0] * 5 + [1] * 4 and forward_state.buffers is None
    with forward_context(False, after):
        scores = net(net.w0, x)
        # Evaluation only reads the buffers.
        assert forward_state.buffers is after
    torch.testing.assert_close(scores, module.eval()(x))
    # Outside of a context, the model uses its own buffers.
    assert not torch.equal(net(net.w0, x), scores)


def test_modes_nest_and_are_the_threads_own():
    with forward_context(True):
        with forward_context(False):
            assert not forward_state.train
        assert forward_state.train
        with ThreadPoolExecutor() as other:
            assert not other.submit(lambda: forward_state.train).result()
    assert not forward_state.train


def test_hinge():
    scores = torch.tensor([[0.5], [-2.0], [0.25]])
    y = torch.tensor([1, 0, 0])
    for labels in (y, 2 * y - 1):
        assert LOSSES["hinge"](scores, labels).item() == pytest.approx((0.5 + 1.25) / 3)


def test_reference_models_have_neither_gradient_nor_dropout():
    net = Net(
        lambda: nn.Sequential(
            nn.Linear(6, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 4)
        )
    )
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    row = net.w0.clone().requires_grad_()
    with forward_context(train=False, buffers=net.b0):
        want = net(row, x)

    with forward_context(train=True, buffers=net.b0, seed=torch.tensor(3)):
        with net.as_reference():
            got = net(row, x)
        assert forward_state.buffers is net.b0 and forward_state.train
        trained = net(row, x)

    assert torch.equal(got, want) and not got.requires_grad
    assert trained.requires_grad and not torch.equal(trained, want)
