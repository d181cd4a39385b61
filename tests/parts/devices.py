"""What the tests of devices share."""

import pytest
import torch
from parts.user import simulation
from places import tabled
from small import layers, tiny_model
from torch import nn

from pflcore import Training, ops, step


def convolved():
    """No chain of linear layers, so that the general engine runs it."""
    return layers(
        "Conv2d 1 3 3 1 1, BatchNorm2d 3, ReLU, MaxPool2d 2, Flatten, Linear 12 4"
    )


# a model, the engine that is asked for, and the form that trains it on a card
FORMS = {
    "MLP": (tiny_model(), "auto", "chain"),
    "MLP by vmap": (tiny_model(), "vmap", "vmap"),
    "linear": (lambda: nn.Linear(6, 4), "auto", "chain"),
    "convolutions": (convolved, "auto", "vmap"),
}


def rounds(name, model, data, device, training, engine="auto", form="chain"):
    """One round after another of everybody, on that device, by this engine, which
    has this form."""
    how = {"training": training, "engine": engine, "device": str(device)}
    run = simulation(name, data, model=model, **how)
    assert run.context.engine.form == form, run.context.engine.reason
    state = run.state
    while True:
        state, _ = step(run.config, state, torch.arange(data.n))
        yield state


def played(name, model, data, training, device, rounds, engine="auto"):
    how = {"training": training, "engine": engine, "device": str(device)}
    run = simulation(name, data, model=model, rounds=rounds, **how)
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
    """A run that went on from its checkpoint has the bits of one that was not
    broken."""
    model, engine, form = FORMS[kind]
    how = {
        "training": Training(0.05, 5),
        "engine": engine,
        "device": str(device),
        "rounds": 4,
    }
    made = [simulation("scaffold", data, model=model, **how) for _ in range(3)]
    whole, half, rest = made
    assert whole.context.engine.form == form, whole.context.engine.reason
    whole.run()
    half.run(lambda round, _: half.save(folder) if round == 2 else None)
    rest.restore(folder).run()
    for one, other, third in zip(*map(models, made), strict=True):
        assert torch.equal(one, other), "a run does not repeat its bits"
        assert torch.equal(one, third), "a resumed run has other bits"


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
    """Every op refuses tensors of `device` beside those of the CPU; gives what is on
    `device`."""
    a, half = torch.ones(3, 4, device=device), torch.full((3, 3), 0.5, device=device)
    index = torch.zeros(3, 3, dtype=torch.int64)
    of = {"a": a, "half": half, "half on the cpu": half.to("cpu"), "lam": half[0]}
    of |= {
        "cpu": torch.ones(3, 4),
        "ones": torch.ones(3),
        "index": index,
        "target": index[0],
    }
    for op, given, name in tabled(APART):
        with pytest.raises(ValueError, match=rf"\({name}\): expected .*cpu"):
            getattr(ops, op)(**{key: of.get(v, v) for key, v in given.items()})
    return a, half, index
