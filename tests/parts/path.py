"""Models and checks of the tests of training paths."""

import copy

import torch
import torch.nn as nn
from parts.user import simulation
from small import layers

from pflcore import Federation, Training

BODIES = {  # layers for K scores, shape of a sample
    "mlp": ("Linear 6 5, Tanh, Linear 5 K", (6,)),
    "linear": ("Linear 6 K, Identity", (6,)),
    "conv": ("Conv2d 1 2 3, Tanh, AvgPool2d 2, Flatten, Linear 8 K", (1, 6, 6)),
    "batch norm": ("Linear 6 5, BatchNorm1d 5, Tanh, Linear 5 K", (6,)),
    "dropout": ("Linear 6 8, Dropout 0.5, Tanh, Dropout 0.25, Linear 8 K", (6,)),
}


def body(words, scores=4):
    return layers(words.replace("K", str(scores)))


class Own(nn.Module):
    """A linear layer and a forward pass f(module, x)."""

    def __init__(self, f):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.f = f
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.f(self, x)


class Rnn(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body = kind(6, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


def mlp():
    return layers("Linear 6 5, ReLU, Linear 5 4")


def repeated():
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(6, 5), relu, nn.Linear(5, 5), relu, nn.Linear(5, 4))


def federation(shape=(6,), y=None, tokens=False):
    gen = torch.Generator().manual_seed(0)
    clients = []
    for n in (9, 14, 7):
        x = torch.randn(n, *shape, generator=gen)
        if tokens:  # one sample is padding alone; the first few are not
            x = torch.randint(1, 5, x.shape, generator=gen)
            x[5] = 0
        target = torch.randint(0, 4, (n,), generator=gen) if y is None else y(gen, n)
        clients.append({"train": (x, target), "test": (x[:4] + 0, target[:4])})
    return Federation.from_clients(clients)


def played(
    model, data=None, engine="auto", rounds=1, training=None, algorithm="fedavg"
):
    """A simulation on one worker, before its first round."""
    settings = {
        "training": training or Training(lr=0.1, batch_size=20),
        "rounds": rounds,
    }
    return simulation(
        algorithm,
        data or federation(),
        model=model,
        workers=1,
        engine=engine,
        **settings,
    )


def same_as_by_hand(build, data=None, engine="auto"):
    """Compares a FedAvg round of one step with training by hand.

    Returns how autograd computes, the engine, and its reason.
    """
    torch.manual_seed(1)
    model = build()
    data = data or federation()
    run = played(model, data, engine)
    want = torch.zeros(run.config.net.size)
    size = data.size().double()
    for i in range(data.n):
        trained = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        x, y = data.client(i)
        run.config.net.loss_fn(trained(x), y).backward()
        optimizer.step()
        want += run.config.net.row(trained) * float(size[i] / size.sum())
    run.run()
    torch.testing.assert_close(run.state.server["x"], want, rtol=1e-4, atol=1e-6)
    engine = run.config.engine
    assert run.header()["path"] == {"how": engine.words, "why": engine.reason}
    return engine.autograd, run.header()["engine"], engine.reason
