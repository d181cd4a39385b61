"""Small federations and models with known answers, for the tests of local training and
of the algorithms."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from entry_points import held_out

from pflcore import (
    Clients,
    Evaluation,
    Federation,
    Hardware,
    Net,
    Objective,
    Robustness,
    Simulation,
    Training,
    step,
)
from pflcore.algorithms import ALGORITHMS, Cohort, FedAvg, apply
from pflcore.simulation.round import RunConfig, initial_state

F64 = torch.float64
copied = deepcopy  # of a state
ENGINES = pytest.mark.parametrize("engine", ["loop", "vmap"])


def t(values):
    return torch.tensor(values, dtype=F64)


def near(got, want, rtol=1e-9, atol=1e-12):
    """Equal but for rounding in float64."""
    got, want = (torch.as_tensor(v, dtype=F64) for v in (got, want))
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# the same to the last bit, of tensors or of lists and dicts of them; what fails says
# where
equals = partial(torch.testing.assert_close, rtol=0, atol=0)


def alike(got, want):
    """Equal but for rounding in float32."""
    near(got, want, 1e-5, 1e-6)


def some(n, round=1, ids=None, size=None, rounds=100):
    """A cohort of clients with one sample each, or so many."""
    who = torch.arange(n) if ids is None else torch.tensor(ids)
    return Cohort(
        who,
        torch.ones_like(who) if size is None else torch.tensor(size),
        n,
        round,
        rounds,
    )


class Scale(nn.Module):
    """scores = x * m, elementwise; with `half_square` and x = sqrt(a), y = sqrt(a) * b
    this is f(m) = sum a (m - b)^2 / 2."""

    def __init__(self, start):
        super().__init__()
        self.m = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x):
        return x * self.m

    def reset_parameters(self):
        nn.init.zeros_(self.m)


def half_square(scores, y):
    return 0.5 * ((scores - y) ** 2).sum(-1).mean()


def images(sizes=(7, 20, 31), shape=(6,), classes=4, seed=0):
    """Gaussian classes, half the clients with their labels turned by one; test sets of
    the training sets' sizes."""
    gen = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    centre = torch.randn(classes, *shape, generator=gen)
    y = torch.randint(0, classes, (2 * total,), generator=gen)
    x = centre[y] + torch.randn(2 * total, *shape, generator=gen)
    index = list(torch.arange(total).split(list(sizes)))
    turn = torch.stack(
        [(torch.arange(classes) + i % 2) % classes for i in range(len(sizes))]
    )
    return Federation(
        x, y, {"train": index, "test": [i + total for i in index]}, classes, turn
    )


def layers(words):
    """A model by the names and numbers of torch.nn's layers: "Linear 6 5, Tanh,
    Linear 5 4"."""
    made = []
    for word in words.split(", "):
        kind, *numbers = word.split()
        made.append(getattr(nn, kind)(*map(json.loads, numbers)))
    return nn.Sequential(*made)


def tiny_model(features=6, classes=4):
    return lambda: layers(f"Linear {features} 5, Tanh, Linear 5 {classes}")


def normed_model():
    return layers("Linear 6 5, BatchNorm1d 5, Linear 5 4")


def tiny(sizes=(7, 20, 31), engine="loop", rounds=10, **training):
    """Clients of these sizes with Gaussian classes, and a small model."""
    t = Training(**{"lr": 0.1, "batch_size": 8, **training})
    return make_setting(Net(tiny_model()), images(sizes), t, rounds, engine)


def wide(data):
    """The same samples in float64."""
    return replace(data, x=data.x.double())


def double(s):
    """The same in float64."""
    net = Net(lambda: s.net.build().double(), s.net.loss_fn)
    return s._replace(net=net, data=wide(s.data))


def validated(n=4, **training):
    """Clients of 16, 20, 24 ... training samples, and a fourth as many to validate
    on."""
    s = tiny([20 + 5 * i for i in range(n)], "vmap", **training)
    return s._replace(data=held_out(s.data))


def by_hand(net, clients, lr, engine, **training):
    """Clients that are tested on their own samples (x, y), whole batches."""
    clients = [dict.fromkeys(("train", "test"), pair) for pair in clients]
    data = Federation.from_clients(clients, dtype=None)
    return make_setting(
        net, data, Training(**{"lr": lr, "batch_size": 100, **training}), 10, engine
    )


def points(targets, lr=0.1, start=0.0, engine="loop", loss=half_square, **training):
    """Clients whose model is one number, and whose losses are half the mean square from
    their targets, a number or a list each."""
    y = [torch.as_tensor(target, dtype=F64).reshape(-1, 1) for target in targets]
    net = Net(Scale([start]), loss=loss)
    return by_hand(
        net, [(torch.ones_like(own), own) for own in y], lr, engine, **training
    )


def lines(n=6, lr=0.3, **training):
    """Clients whose losses are squares around 1 to 2."""
    return points(torch.linspace(1, 2, n, dtype=F64), lr, **training)._replace(
        rounds=100
    )


def quadratics(a, b, lr=0.1, start=None, engine="loop", rows=1, noise=0.0, **training):
    """Client i's loss is `sum_k a_ik (m_k - b_ik)^2 / 2`, float64; with `noise` its
    `rows` samples' b differ, their mean does not. A batch is a sample."""
    a, b = t(a), t(b)
    x = a.sqrt()[:, None].expand(-1, rows, -1)
    y = x * (b[:, None] + noise * torch.linspace(-1, 1, rows, dtype=F64)[:, None])
    net = Net(Scale([0.0] * a.shape[1] if start is None else start), loss=half_square)
    return by_hand(
        net, zip(x, y, strict=True), lr, engine, **{"batch_size": 1, **training}
    )


class Line(nn.Module):
    """y = w x, in float64, starting at `w0`."""

    def __init__(self, w0=(0.0,), dtype=F64):
        super().__init__()
        self.head = nn.Linear(len(w0), 1, bias=False, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([w0]))

    def forward(self, x):
        return self.head(x)


def regression(clients, w0=(0.0,), lr=0.1, engine="vmap", **training):
    """Clients' samples x and y, by y = w x, or where there is no w0 by a layer of one
    x, and half the mean square."""
    model = (lambda: nn.Linear(1, 1, dtype=F64)) if w0 is None else lambda: Line(w0)
    pairs = [(t(x).reshape(len(y), -1), t(y)[:, None]) for x, y in clients]
    return by_hand(Net(model, half_square), pairs, lr, engine, **training)


def normed(clients, w0, **training):
    """The same by a layer of two, batch norm and a head, whose parameters are `w0`
    at first."""

    def model():
        made = layers("Linear 1 2, BatchNorm1d 2, Linear 2 1").double()
        nn.utils.vector_to_parameters(t(w0), made.parameters())
        return made

    s = regression(clients, **training)
    return s._replace(net=Net(model, half_square))


def make_setting(net, data, training, rounds=1, engine="loop", workers=2, seed=0):
    """What a run keeps the same, with nothing looked at beforehand; a chain is found by
    a whole `Simulation`."""
    where = {"seed": seed, "hardware": Hardware(engine=engine, workers=workers)}
    if engine == "chain":
        last = Evaluation(split=next(reversed(data.index)))
        run = Simulation(
            FedAvg(), net, data, training, rounds, **where, evaluation=last
        )
        return run.context
    x = torch.ones(2, 1).double()
    other = Federation(x, x, {"train": [torch.arange(1)], "test": [torch.arange(1, 2)]})
    made = Simulation(FedAvg(), Net(Scale([0.0]), half_square), other, **where).context
    return made._replace(net=net, data=data, training=training, rounds=rounds)


def play(alg, s, rounds=None, ids=None):
    """The states after each round (copies) and what happened; `ids(round)` names the
    cohort (default: everybody)."""
    state, found = None, []
    for r in range(1, (s.rounds if rounds is None else rounds) + 1):
        state, done = after(alg, s, 1 if ids is None else [ids(r)], state)
        found.append((copied(state), done))
    return found


def after(alg, s, cohorts=1, state=None):
    """The state after so many rounds of everybody, or of these cohorts, and the last
    outcome."""
    state, done = initial_state(alg, s.net, s.data.n) if state is None else state, None
    for ids in [range(s.data.n)] * cohorts if isinstance(cohorts, int) else cohorts:
        state, done = step(RunConfig(alg, s), state, torch.tensor(ids))
    return state, done


def at_work(s, ids=None, round=1):
    """What a hook of that round is given."""
    ids = torch.arange(s.data.n) if ids is None else torch.tensor(ids)
    return Clients(s, ids, round, s.net.b0.repeat(len(ids), 1))


def joined(alg, s):
    """The state in which everybody took part already, and nothing has come of it."""
    state, everybody = initial_state(alg, s.net, s.data.n), torch.arange(s.data.n)
    cohort = Cohort(everybody, s.data.size("train"), s.data.n)
    for key, rows in alg.init_client(
        alg.send(state.server, cohort), s.net, s.data.n
    ).items():
        state.clients[key][:] = rows
    state.participated[:] = True
    return state


# no state, server's and clients' state, two models, two streams, a target, parameters
# of its own
SIX = ("fedavg", "scaffold", "ditto", "apfl", "waffle", "factorized_waffle")


def swept(names=ALGORITHMS, quick=SIX):
    """The algorithms' names as parameters: six in the quick suite, all in the deep
    one."""
    return [
        n if n in quick else pytest.param(n, marks=pytest.mark.deep("all algorithms"))
        for n in sorted(names)
    ]


def without_twins(*hooks):
    """One algorithm's name for each way to do these hooks, such as "train"."""
    first = {}
    for name, cls in ALGORITHMS.items():
        first.setdefault(tuple(getattr(cls, hook) for hook in hooks), name)
    return sorted(first.values())


GROUPS: dict[str, Any] = {
    "hardware": (
        Hardware,
        ("engine", "workers", "device", "storage", "clients_per_block", "graphs"),
    ),
    "evaluation": (
        Evaluation,
        ("every", "split", "evaluated", "train_loss", "metrics"),
    ),
    "robustness": (Robustness, ("clip", "adversary")),
}


def grouped(options):
    """A simulation's options with those of `Hardware`, `Evaluation` (its clients
    "evaluated") and `Robustness` in their groups."""
    rest = dict(options)
    for name, (group, keys) in GROUPS.items():
        given = {k: rest.pop(k) for k in keys if k in rest}
        if given:
            rest[name] = group(
                **{"clients" if k == "evaluated" else k: v for k, v in given.items()}
            )
    return rest


def served(alg, state, up, cohort):
    """The server's state after a round's uploads, by hand; `state` stays as it is."""
    return apply(copied(state), alg.update(state, up, cohort)[0])


def lead(alg, x0, n, uploads):
    """The server's state after each round of these uploads and cohorts, and whose
    went where."""
    state, found = alg.init(x0, n), []
    for up, cohort in uploads:
        changes, mix = alg.update(state, up, cohort)
        state = apply(copied(state), changes)
        found.append((state, mix))
    return found


def fit(clients, start, **options):
    """`clients.fit` with the terms of its objective among the options."""
    terms = {k: options.pop(k) for k in Objective._fields if k in options}
    return clients.fit(start, Objective(**terms), **options)


def with_test(train, test):
    """Clients' samples to train on, and those to be tested on."""
    return [{"train": a, "test": b} for a, b in zip(train, test, strict=True)]
