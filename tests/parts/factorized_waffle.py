"""What the tests of factorized waffle share."""

import torch
import torch.nn as nn
from small import make_setting

from pflcore import Federation, Net, Training, step
from pflcore.nn import factorize
from pflcore.simulation.round import Setup, begin

D = torch.float64


def model():
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def federation(sizes=(9, 20, 31), seed=4):
    """Gaussian classes, every second client with its labels turned."""
    gen = torch.Generator().manual_seed(seed)
    centre = 2 * torch.randn(3, 6, generator=gen, dtype=D)
    clients = []
    for i, n in enumerate(sizes):
        y = torch.randint(0, 3, (2 * n,), generator=gen)
        x = centre[y] + torch.randn(2 * n, 6, generator=gen, dtype=D)
        clients.append(
            {"train": (x[:n], (y[:n] + i % 2) % 3), "test": (x[n:], (y[n:] + i % 2) % 3)}
        )
    return Federation.from_clients(clients, classes=3, dtype=None)


def setting(data=None, engine="vmap", ranks=(4, 3), **training):
    t = Training(**{"lr": 0.1, "batch_size": 8, "epochs": 2, **training})
    return make_setting(
        Net(lambda: factorize(model(), ranks), seed=1),
        federation() if data is None else data,
        t,
        6,
        engine=engine,
        workers=1,
    )


def play(alg, s, rounds=2, ids=None):
    state = begin(alg, s.net, s.data.n)
    for _ in range(rounds):
        state, done = step(
            Setup(alg, s), state, torch.tensor(range(s.data.n) if ids is None else ids)
        )
        assert not done.dropped
    return state
