"""sgd_step_: one pass of SGD on flat rows, against torch.optim.SGD; which memory it may have."""

import pytest
import torch
from laws import stepped
from tolerance import F32, F64
from ugly import intact, lay, randn, refuses

from pflcore import ops


@pytest.mark.usefixtures("isa")
def test_like_torch_optim():
    """Three steps with momentum and weight decay."""
    ours = randn(0, 3, 1001, dtype=F32)
    theirs, buffer = torch.nn.Parameter(ours.clone()), torch.zeros_like(ours)
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01)
    for k in range(3):
        grad = randn(1 + k, 3, 1001, dtype=F32)
        ops.sgd_step_(ours, grad, 0.1, momentum=0.9, buffer=buffer, weight_decay=0.01)
        theirs.grad = grad
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("gapped", range(6))
def test_one_row_stride_unlike_the_others(gapped):
    t = [randn(k, 3, 37, dtype=F32) for k in range(6)]
    wide = [x.double() for x in t]
    t[gapped] = lay(t[gapped], "wide rows")
    w, grad, shift, mask, anchor, buffer = t
    ops.sgd_step_(w, grad, 0.1, shift, mask, 0.5, anchor, 0.9, buffer, 0.01)
    want = stepped(*wide[:2], 0.1, *wide[2:4], 0.5, wide[4], 0.9, wide[5], 0.01)
    for got, value in zip((w, buffer), want, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=1e-5)
        assert intact(got)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_proximal_steps_end_at_the_proximal_point(dtype):
    """argmin |w - c|^2 / 2 + mu |w - a|^2 / 2 = (c + mu a) / (1 + mu), a mu for each client."""
    c, a = randn(1, 4, 13, dtype=dtype), randn(2, 4, 13, dtype=dtype)
    mu = torch.tensor([0.0, 0.5, 1.0, 4.0], dtype=dtype)
    w = torch.zeros(4, 13, dtype=dtype)
    for _ in range(200):
        ops.sgd_step_(w, w - c, 0.15, mu=mu, anchor=a)
    torch.testing.assert_close(w, (c + mu[:, None] * a) / (1 + mu[:, None]), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_row_alone_takes_the_same_step(dtype):
    """Bit for bit: a client's training does not depend on who trains beside it."""
    w, grad, shift, anchor, buffer = (randn(n, 5, 131, dtype=dtype) for n in range(5))
    mu = torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=F64)
    together, memory = w.clone(), buffer.clone()
    ops.sgd_step_(together, grad, 0.1, shift, None, mu, anchor, 0.9, memory, 1e-3)
    for i in range(5):
        one = slice(i, i + 1)
        alone, own = w[one].clone(), buffer[one].clone()
        ops.sgd_step_(alone, grad[one], 0.1, shift[one], None, mu[one], anchor[one], 0.9, own, 1e-3)
        assert torch.equal(alone, together[one]) and torch.equal(own, memory[one])


def test_shared_rows_are_read():
    """An expanded anchor or shift is one row for all clients."""
    w, one = torch.zeros(4, 50), torch.ones(1, 50).expand(4, 50)
    ops.sgd_step_(w, torch.zeros(4, 50), 1.0, shift=one, mu=1.0, anchor=2 * one)
    assert (w == 1).all()  # 0 - (1 + (0 - 2))


# --- memory -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["grad", "shift", "mask", "anchor", "mu", "buffer"])
def test_memory_that_meets_is_refused(name):
    """A part of w, or of the buffer, that moves while it is read."""
    home = randn(0, 7, 9)

    def step(first, buffer, refused):
        part = home[first, 1:4] if name == "mu" else home[first - 1 : first + 2]
        others = {"grad": home.new_zeros(3, 9), "anchor": home.new_zeros(3, 9), "buffer": buffer}
        with refuses("sgd_step_", refused):
            ops.sgd_step_(home[:3], lr=0.1, momentum=0.9, **{**others, name: part})

    step(2, home.new_zeros(3, 9), name)
    if name != "buffer":
        step(5, home[4:], "buffer")


def test_the_row_itself_may_be_read_too():
    w = randn(1, 3, 9)
    want = w - 0.5 * w
    ops.sgd_step_(w, w, 0.5, anchor=w, mu=3.0)
    assert torch.equal(w, want)
