"""What the tests of devices share."""

import pytest
import torch
from small import make_setting

from pflcore import Net, Training, ops, step
from pflcore.algorithms import ALGORITHMS
from pflcore.simulation.round import Setup, begin


def rounds(name, model, data, device, epochs):
    """One round after another of everybody, on that device."""
    algorithm = ALGORITHMS[name]()
    net, training = algorithm.prepare(Net(model)).to(device), Training(0.05, 3, epochs)
    setting = make_setting(net, data.to(device), training, 3, "vmap", workers=None)
    state = begin(algorithm, net, data.n)
    while True:
        state, _ = step(Setup(algorithm, setting), state, torch.arange(data.n))
        yield state


def on_two_devices(device):
    """Every op refuses tensors of `device` beside those of the CPU; gives what is on `device`."""
    a, half = torch.ones(3, 4, device=device), torch.full((3, 3), 0.5, device=device)
    cpu, index = torch.ones(3, 4), torch.zeros(3, 3, dtype=torch.int64)
    for call, name in (
        (lambda: ops.pairwise_sqdist(a, cpu), "b"),
        (lambda: ops.aggregate(a, half.to("cpu")), "weight"),
        (lambda: ops.aggregate(a, half, index), "index"),
        (lambda: ops.aggregate(a, half, base=cpu), "base"),
        (lambda: ops.aggregate(a, half, out=cpu), "out"),
        (lambda: ops.waffle_weights(half, torch.zeros(3, dtype=torch.int64), 0.5), "target"),
        (lambda: ops.rank1_linear(a, half, half[0], cpu), "w_b"),
        (lambda: ops.sgd_step_(a, cpu, 0.1), "grad"),
        (lambda: ops.sgd_step_(a, a.clone(), 0.1, mu=torch.ones(3), anchor=a.clone()), "mu"),
    ):
        with pytest.raises(ValueError, match=rf": {name} must be .*cpu"):
            call()
    return a, half, index
