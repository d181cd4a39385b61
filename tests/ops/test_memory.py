"""The memory that a call takes beside its arguments, as docs/ops.md says it."""

from functools import partial
from pathlib import Path

import pytest
import torch
from parts.memory import in_a_process, resident

from pflcore import ops

N, P = 20, 1_000_000
ROWS = 4 * N * P  # bytes
NEIGHBOURS = 5
MB = 1e6


def weights():
    return torch.full((N, N), 1 / N)


def near(n=N):
    index = torch.arange(n)[:, None] + torch.arange(1, NEIGHBOURS + 1)
    return torch.full((n, NEIGHBOURS), 1 / NEIGHBOURS), index % n


def gradient(op, *inputs):
    """A call that computes the gradients of all inputs."""
    inputs = [t.requires_grad_() for t in inputs]
    y = op(*inputs)
    return partial(torch.autograd.grad, y, inputs, torch.ones_like(y))


def models(dtype=torch.float32):
    return torch.randn(N, P).to(dtype)


def layer():
    """The inputs of 40 clients' layers."""
    return (
        torch.randn(40, 512, 784),
        torch.randn(800, 300),
        torch.rand(40, 300),
        torch.randn(300, 784),
    )


def step():
    w, grad, buffer = models(), models(), models()
    return partial(ops.sgd_step_, w, grad, 0.1, momentum=0.9, buffer=buffer)


# The name of a call: what makes it, and the bytes that it takes with its result.
CALLS = {
    "distances": (lambda: partial(ops.pairwise_sqdist, models()), 0),
    "distances of 16 bits": (
        lambda: partial(ops.pairwise_sqdist, models(torch.half)),
        0,
    ),
    "gradient of distances": (
        lambda: gradient(ops.pairwise_sqdist, models()),
        10 * ROWS,
    ),
    "nearest": (lambda: partial(ops.nearest, models(), models(), 3), 0),
    "WAFFLE's weights": (
        lambda: partial(ops.waffle_weights, torch.rand(2000, 2000), 0, 0.6),
        8 * 2000**2,
    ),
    "FedDWA's weights": (
        lambda: partial(ops.feddwa_weights, torch.rand(2000, 2000), 32),
        16 * 2000 * 32,
    ),
    "sums": (lambda: partial(ops.aggregate, models(), weights()), ROWS),
    "sums by index": (lambda: partial(ops.aggregate, models(), *near()), ROWS),
    "sums into a given memory": (
        lambda: partial(ops.aggregate, models(), *near(), out=models()),
        0,
    ),
    "gradient of sums": (
        lambda: gradient(ops.aggregate, models(), weights()),
        6 * ROWS,
    ),
    "trimmed mean": (lambda: partial(ops.trimmed_mean, models(), 4), 4 * P),
    "trimmed mean of many rows": (
        lambda: partial(ops.trimmed_mean, torch.rand(50_000, 3), 24_999),
        128 * 50_000,
    ),
    "around median": (lambda: partial(ops.mean_around_median, models(), 4), 4 * P),
    "layer": (lambda: partial(ops.rank1_linear, *layer()), 4 * 40 * 512 * 800),
    "gradient of a layer": (
        lambda: gradient(ops.rank1_linear, *layer()),
        4 * 40 * 512 * 784,
    ),
    "step": (step, 0),
}


def peaks():
    """The growth of the process's peak memory in each call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A first gradient starts a thread of torch's.
    gradient(ops.pairwise_sqdist, torch.rand(2, 3))()
    return {name: peak_of(make()) for name, (make, _) in CALLS.items()}


def peak_of(call):
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident()
    call()
    return resident("VmHWM") - before


@pytest.mark.deep("another process")
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="/proc does not tell a process's peak",
)
@pytest.mark.skipif(
    not ops.backend().kernels, reason="the figures are those of the kernels"
)
def test_an_op_takes_what_its_page_says():
    """The peaks agree up to 5 % and what an allocator or a product keeps."""
    for name, got in in_a_process(peaks).items():
        want = CALLS[name][1]
        assert abs(got - want) <= 36 * MB + 0.05 * want, (name, got / ROWS)
