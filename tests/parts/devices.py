"""Runs and checks that real and pretended cards share."""

import pytest
import torch
from parts.user import simulation
from places import tabled
from small import layers, tiny_model
from torch import nn

from pflcore import Training, ops, step


def convolved():
    """Model that is no chain of linear layers.

    The general engine runs it.
    """
    return layers(
        "Conv2d 1 3 3 1 1, BatchNorm2d 3, ReLU, MaxPool2d 2, Flatten, Linear 12 4"
    )


# Model, requested engine, and the form in which a card trains it.
FORMS = {
    "MLP": (tiny_model(), "auto", "chain"),
    "MLP by vmap": (tiny_model(), "vmap", "vmap"),
    "linear": (lambda: nn.Linear(6, 4), "auto", "chain"),
    "convolutions": (convolved, "auto", "vmap"),
}


def rounds(name, model, data, device, training, engine="auto", form="chain"):
    """Yields the state after each round of all clients on a device.

    Asserts that the engine trains the model in this form.
    """
    settings = {"training": training, "engine": engine, "device": str(device)}
    run = simulation(name, data, model=model, **settings)
    assert run.config.engine.kind == form, run.config.engine.reason
    state = run.state
    while True:
        state, _ = step(run.config, state, torch.arange(data.n))
        yield state


def played(name, model, data, training, device, rounds, engine="auto"):
    settings = {"training": training, "engine": engine, "device": str(device)}
    run = simulation(name, data, model=model, rounds=rounds, **settings)
    assert run.run().stopped is None
    return run


def models(run):
    """All tensors of a run's state, on the CPU."""
    state = run.state
    return [
        v.cpu()
        for v in (*state.server.values(), *state.clients.values(), state.buffers)
    ]


def assert_resumed(kind, data, device, folder):
    """Asserts that a resumed run has the bits of an uninterrupted one."""
    model, engine, form = FORMS[kind]
    settings = {
        "training": Training(0.05, 5),
        "engine": engine,
        "device": str(device),
        "rounds": 4,
    }
    runs = [simulation("scaffold", data, model=model, **settings) for _ in range(3)]
    whole, half, rest = runs
    assert whole.config.engine.kind == form, whole.config.engine.reason
    whole.run()
    half.run(lambda round, _: half.save(folder) if round == 2 else None)
    rest.restore(folder).run()
    for one, other, third in zip(*map(models, runs), strict=True):
        assert torch.equal(one, other), "a run does not repeat its bits"
        assert torch.equal(one, third), "a resumed run has other bits"


# Op, arguments, name of the argument that is on the CPU.
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
    """Asserts that every op refuses tensors of two devices.

    Returns a matrix and weights on `device`, and an index on the CPU.
    """
    a = torch.ones(3, 4, device=device)
    half = torch.full((3, 3), 0.5, device=device)
    index = torch.zeros(3, 3, dtype=torch.int64)
    of = {"a": a, "half": half, "half on the cpu": half.to("cpu"), "lam": half[0]}
    of |= {
        "cpu": torch.ones(3, 4),
        "ones": torch.ones(3),
        "index": index,
        "target": index[0],
    }
    for op, arguments, name in tabled(APART):
        with pytest.raises(ValueError, match=rf"\({name}\): expected .*cpu"):
            getattr(ops, op)(**{key: of.get(v, v) for key, v in arguments.items()})
    return a, half, index
