"""What the tests of path share."""

import copy

import torch
import torch.nn as nn

from pflcore import Federation, Hardware, Simulation, Training
from pflcore.nn import Dropout

BODIES = {  # layers for so many scores, a sample's shape
    "mlp": (lambda k: (nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, k)), (6,)),
    "linear": (lambda k: (nn.Linear(6, k), nn.Identity()), (6,)),
    "conv": (
        lambda k: (nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, k)),
        (1, 6, 6),
    ),
    "batch norm": (
        lambda k: (nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, k)),
        (6,),
    ),
    "dropout": (
        lambda k: (nn.Linear(6, 8), Dropout(0.5), nn.Tanh(), Dropout(0.25), nn.Linear(8, k)),
        (6,),
    ),
}


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def repeated():
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(6, 5), relu, nn.Linear(5, 5), relu, nn.Linear(5, 4))


def federation(shape=(6,), y=None, tokens=False):
    gen = torch.Generator().manual_seed(0)
    clients = []
    for n in (9, 14, 7):
        x = torch.randn(n, *shape, generator=gen)
        x = torch.randint(0, 5, x.shape, generator=gen) if tokens else x
        target = torch.randint(0, 4, (n,), generator=gen) if y is None else y(gen, n)
        clients.append({"train": (x, target), "test": (x[:4] + 0, target[:4])})
    return Federation.from_clients(clients)


def played(model, data=None, engine="auto", rounds=1, training=None, algorithm="fedavg"):
    """A simulation on one worker, before its first round."""
    hardware, data = Hardware(workers=1, engine=engine), data or federation()
    how = training or Training(lr=0.1, batch_size=20)
    return Simulation(algorithm, model, data, how, rounds=rounds, hardware=hardware)


def same_as_by_hand(build, data=None, engine="auto"):
    """What trained in one FedAvg round of one step of each client, and why: engine, form, why. The
    model is that of the module trained by hand."""
    torch.manual_seed(1)
    model, data = build(), data or federation()
    run = played(model, data, engine)
    want, size = torch.zeros(run.setting.net.size), data.size().double()
    for i in range(data.n):
        mine = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        x, y = data.client(i)
        run.setting.net.criterion(mine(x), y).backward()
        optimizer.step()
        want += run.setting.net.row(mine) * float(size[i] / size.sum())
    run.run()
    torch.testing.assert_close(run.state.server["x"], want, rtol=1e-4, atol=1e-6)
    return tuple(run.header()["path"].values())
