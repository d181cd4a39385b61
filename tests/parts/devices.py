"""What the tests of devices share."""

import pytest
import torch
from parts.user import simulation
from places import tabled
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


def played(name, model, data, training, device, rounds):
    how = {"training": training, "engine": "vmap", "device": str(device)}
    run = simulation(name, data, model=model, rounds=rounds, **how)
    assert run.run().stopped is None
    return run


# an op, its arguments, and which of them is on the CPU
APART = """\
pairwise_sqdist | {"a": "a", "b": "cpu"} | b
aggregate | {"updates": "a", "weight": "half on the cpu"} | weight
aggregate | {"updates": "a", "weight": "half", "index": "index"} | index
aggregate | {"updates": "a", "weight": "half", "base": "cpu"} | base
aggregate | {"updates": "a", "weight": "half", "out": "cpu"} | out
waffle_weights | {"dist": "half", "target": "target", "omega": 0.5} | target
rank1_linear | {"x": "a", "w_a": "half", "lam": "lam", "w_b": "cpu"} | w_b
sgd_step_ | {"w": "a", "grad": "cpu", "lr": 0.1} | grad
sgd_step_ | {"w": "a", "grad": "a", "lr": 0.1, "mu": "ones", "anchor": "a"} | mu
"""


def on_two_devices(device):
    """Every op refuses tensors of `device` beside those of the CPU; gives what is on `device`."""
    a, half = torch.ones(3, 4, device=device), torch.full((3, 3), 0.5, device=device)
    index = torch.zeros(3, 3, dtype=torch.int64)
    of = {"a": a, "half": half, "half on the cpu": half.to("cpu"), "lam": half[0]}
    of |= {"cpu": torch.ones(3, 4), "ones": torch.ones(3), "index": index, "target": index[0]}
    for op, given, name in tabled(APART):
        with pytest.raises(ValueError, match=rf": {name} must be .*cpu"):
            getattr(ops, op)(**{key: of.get(v, v) for key, v in given.items()})
    return a, half, index
