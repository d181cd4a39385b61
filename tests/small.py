"""Small federations and models with known answers.

They serve the tests of local training and of the algorithms.
"""

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import product
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
copied = deepcopy  # for states
ENGINES = pytest.mark.parametrize("engine", ["loop", "vmap"])


def t(values):
    return torch.tensor(values, dtype=F64)


def near(got, want, rtol=1e-9, atol=1e-12):
    """Asserts equality up to rounding in float64."""
    got, want = (torch.as_tensor(v, dtype=F64) for v in (got, want))
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# Asserts equal bits of tensors, or of lists and dicts of them. Errors name the place.
equals = partial(torch.testing.assert_close, rtol=0, atol=0)


def alike(got, want):
    """Asserts equality up to rounding in float32."""
    near(got, want, 1e-5, 1e-6)


def some(n, round=1, ids=None, size=None, rounds=100):
    """A cohort of n clients.

    Each client has one sample, unless `size` gives the numbers of samples.
    """
    clients = torch.arange(n) if ids is None else torch.tensor(ids)
    return Cohort(
        clients,
        torch.ones_like(clients) if size is None else torch.tensor(size),
        n,
        round,
        rounds,
    )


class Scale(nn.Module):
    """Model with scores = x * m, elementwise.

    With `half_square`, x = sqrt(a) and y = sqrt(a) * b, its loss is f(m) = sum a (m -
    b)^2 / 2.
    """

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
    """A federation of Gaussian classes.

    Half of the clients have their labels turned by one. Test sets have the sizes of the
    training sets.
    """
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
    """A model by the names and numbers of torch.nn's layers.

    An example is "Linear 6 5, Tanh, Linear 5 4".
    """
    modules = []
    for word in words.split(", "):
        kind, *numbers = word.split()
        modules.append(getattr(nn, kind)(*map(json.loads, numbers)))
    return nn.Sequential(*modules)


def tiny_model(features=6, classes=4):
    return lambda: layers(f"Linear {features} 5, Tanh, Linear 5 {classes}")


def normed_model():
    return layers("Linear 6 5, BatchNorm1d 5, Linear 5 4")


def tiny(sizes=(7, 20, 31), engine="loop", rounds=10, **training):
    """Clients of these sizes with Gaussian classes, and a small model."""
    t = Training(**{"lr": 0.1, "batch_size": 8, **training})
    return make_setting(Net(tiny_model()), images(sizes), t, rounds, engine)


def wide(data):
    """The same federation with samples in float64."""
    return replace(data, x=data.x.double())


def double(s):
    """The same setting with model and samples in float64."""
    net = Net(lambda: s.net.build().double(), s.net.loss_fn)
    return replace(s, net=net, data=wide(s.data))


def validated(n=4, **training):
    """Clients of 16, 20, 24 ... training samples.

    They have a fourth as many validation samples.
    """
    s = tiny([20 + 5 * i for i in range(n)], "vmap", **training)
    return replace(s, data=held_out(s.data))


def by_hand(net, clients, lr, engine, **training):
    """Clients that are tested on their own samples (x, y).

    All samples of a client are one batch.
    """
    clients = [dict.fromkeys(("train", "test"), pair) for pair in clients]
    data = Federation.from_clients(clients, dtype=None)
    return make_setting(
        net, data, Training(**{"lr": lr, "batch_size": 100, **training}), 10, engine
    )


def points(targets, lr=0.1, start=0.0, engine="loop", loss=half_square, **training):
    """Clients whose model is one number.

    A client's loss is half the mean square of the distance from its targets, which are
    a number or a list.
    """
    y = [torch.as_tensor(target, dtype=F64).reshape(-1, 1) for target in targets]
    net = Net(Scale([start]), loss=loss)
    return by_hand(
        net,
        [(torch.ones_like(target_values), target_values) for target_values in y],
        lr,
        engine,
        **training,
    )


def lines(n=6, lr=0.3, **training):
    """Clients whose losses are squares around 1 to 2."""
    context = points(torch.linspace(1, 2, n, dtype=F64), lr, **training)
    return replace(context, rounds=100)


def quadratics(a, b, lr=0.1, start=None, engine="loop", rows=1, noise=0.0, **training):
    """Clients with a quadratic loss in float64.

    It is `sum_k a_ik (m_k - b_ik)^2 / 2`. With `noise`, the b of a client's `rows`
    samples differ, and their mean stays. A batch is one sample.
    """
    a = t(a)
    b = t(b)
    x = a.sqrt()[:, None].expand(-1, rows, -1)
    y = x * (b[:, None] + noise * torch.linspace(-1, 1, rows, dtype=F64)[:, None])
    net = Net(Scale([0.0] * a.shape[1] if start is None else start), loss=half_square)
    return by_hand(
        net, zip(x, y, strict=True), lr, engine, **{"batch_size": 1, **training}
    )


class Line(nn.Module):
    """Model y = w x that starts at `w0`."""

    def __init__(self, w0=(0.0,), dtype=F64):
        super().__init__()
        self.head = nn.Linear(len(w0), 1, bias=False, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([w0]))

    def forward(self, x):
        return self.head(x)


def regression(clients, w0=(0.0,), lr=0.1, engine="vmap", **training):
    """Clients with samples (x, y) and half the mean square as loss.

    The model is y = w x. Without `w0`, it is a linear layer of one input.
    """
    model = (lambda: nn.Linear(1, 1, dtype=F64)) if w0 is None else lambda: Line(w0)
    pairs = [(t(x).reshape(len(y), -1), t(y)[:, None]) for x, y in clients]
    return by_hand(Net(model, half_square), pairs, lr, engine, **training)


def normed(clients, w0, **training):
    """The same clients with batch norm between two linear layers.

    `w0` holds the first parameters of the model.
    """

    def model():
        module = layers("Linear 1 2, BatchNorm1d 2, Linear 2 1").double()
        nn.utils.vector_to_parameters(t(w0), module.parameters())
        return module

    s = regression(clients, **training)
    return replace(s, net=Net(model, half_square))


def two_layers(clients, start, lr=0.1, **training):
    """Clients of a model of two layers without biases, by samples and labels.

    `start` holds its first parameters.
    """

    def model():
        module = layers("Linear 2 2 false, Tanh, Linear 2 3 false").double()
        nn.utils.vector_to_parameters(t(start), module.parameters())
        return module

    pairs = [(t(x), torch.tensor(y)) for x, y in clients]
    return by_hand(Net(model), pairs, lr, **training)


def classed(clients, w0, **training):
    """Clients with samples (x, y) of classes, and a hidden layer of two features.

    x are numbers, and `w0` holds the first parameters of the model.
    """
    classes = (len(w0) - 4) // 3

    def model():
        module = layers(f"Linear 1 2, Tanh, Linear 2 {classes}").double()
        nn.utils.vector_to_parameters(t(w0), module.parameters())
        return module

    pairs = [(t(x)[:, None], torch.tensor(y)) for x, y in clients]
    return by_hand(Net(model), pairs, **{"engine": "loop", "lr": 0.1, **training})


def make_setting(net, data, training, rounds=1, engine="loop", workers=2, seed=0):
    """The context of a run, made without the checks before round 1.

    The chain of kernels is found by a whole `Simulation`.
    """
    if engine == "chain":
        last = Evaluation(split=next(reversed(data.index)))
        hardware = Hardware(engine=engine, workers=workers)
        run = Simulation(
            FedAvg(),
            net,
            data,
            training,
            rounds,
            seed=seed,
            hardware=hardware,
            evaluation=last,
        )
        return run.config
    context = other_context(engine, workers, seed)
    return replace(context, net=net, data=data, training=training, rounds=rounds)


@cache
def other_context(engine, workers, seed):
    """The context of a run of another model on other data."""
    x = torch.ones(2, 1).double()
    data = Federation(x, x, {"train": [torch.arange(1)], "test": [torch.arange(1, 2)]})
    net = Net(Scale([0.0]), half_square)
    hardware = Hardware(engine=engine, workers=workers)
    return Simulation(FedAvg(), net, data, seed=seed, hardware=hardware).config


def play(alg, s, rounds=None, ids=None):
    """A list of the state (copied) and the outcome of each round.

    `ids(round)` gives the cohort, by default all clients.
    """
    state = None
    history = []
    for r in range(1, (s.rounds if rounds is None else rounds) + 1):
        state, done = after(alg, s, 1 if ids is None else [ids(r)], state)
        history.append((copied(state), done))
    return history


def after(alg, s, cohorts=1, state=None):
    """The state after several rounds, and the last outcome.

    `cohorts` is a number of rounds of all clients, or the cohort of each round.
    """
    state = initial_state(alg, s.net, s.data.n) if state is None else state
    done = None
    for ids in [range(s.data.n)] * cohorts if isinstance(cohorts, int) else cohorts:
        state, done = step(RunConfig.of(alg, s), state, torch.tensor(ids))
    return state, done


def at_work(s, ids=None, round=1):
    """The clients that a hook of this round receives."""
    ids = torch.arange(s.data.n) if ids is None else torch.tensor(ids)
    return Clients(s, ids, round, s.net.b0.repeat(len(ids), 1))


def joined(alg, s):
    """The initial state with all clients marked as participated.

    The server's state is as before any round.
    """
    state = initial_state(alg, s.net, s.data.n)
    everybody = torch.arange(s.data.n)
    cohort = Cohort(everybody, s.data.size("train"), s.data.n)
    for key, rows in alg.init_client(
        alg.send(state.server, cohort), s.net, s.data.n
    ).items():
        state.clients[key][:] = rows
    state.participated[:] = True
    return state


# Algorithms without state, with state of server and clients, with two models, with two
# random streams, with a target, and with parameters of their own.
SIX = ("fedavg", "scaffold", "ditto", "apfl", "waffle", "factorized_waffle")


def swept(names=ALGORITHMS, quick=SIX, one_in=3):
    """The algorithms' names as parameters.

    Six are in the quick suite, one in `one_in` of the others in the deep one, and the
    rest in the long one. Which these are differs from test to test.
    """
    deep = pytest.mark.deep("all algorithms", one_in=one_in)
    return [n if n in quick else pytest.param(n, marks=deep) for n in sorted(names)]


def crossed(*lists, one_in=3):
    """All combinations of values of these lists, as parameters.

    The quick suite has as many as name each value at least once, the deep one one in
    `one_in` of the others, and the long one the rest.
    """
    values = [[*values] for values in lists]
    longest = max(map(len, values))
    quick = [[some[i % len(some)] for some in values] for i in range(longest)]
    deep = pytest.mark.deep("all combinations", one_in=one_in)
    return [
        pytest.param(*combination, marks=() if [*combination] in quick else deep)
        for combination in product(*values)
    ]


def without_twins(*hooks):
    """Names of algorithms that implement these hooks differently.

    `hooks` are names such as "train". Of algorithms with the same hooks, the first is
    taken.
    """
    first = {}
    for name, cls in ALGORITHMS.items():
        first.setdefault(tuple(getattr(cls, hook) for hook in hooks), name)
    return sorted(first.values())


GROUPS: dict[str, Any] = {
    "hardware": (
        Hardware,
        ("engine", "workers", "device", "clients_per_block", "graphs"),
    ),
    "evaluation": (
        Evaluation,
        ("every", "split", "evaluated", "train_loss", "metrics"),
    ),
    "robustness": (Robustness, ("clip", "adversary")),
}


def grouped(options):
    """A simulation's options, in their groups.

    The groups are `Hardware`, `Evaluation` and `Robustness`. The option "evaluated"
    becomes `Evaluation`'s `clients`.
    """
    rest = dict(options)
    for name, (group, keys) in GROUPS.items():
        members = {k: rest.pop(k) for k in keys if k in rest}
        if members:
            rest[name] = group(
                **{"clients" if k == "evaluated" else k: v for k, v in members.items()}
            )
    return rest


def served(alg, state, up, cohort):
    """The server's state after a round's uploads.

    `state` itself does not change.
    """
    return apply(copied(state), alg.update(state, up, cohort)[0])


def lead(alg, x0, n, uploads):
    """The server's state and the mixing after each round.

    A round is given by its uploads and its cohort.
    """
    state = alg.init(x0, n)
    history = []
    for up, cohort in uploads:
        changes, mix = alg.update(state, up, cohort)
        state = apply(copied(state), changes)
        history.append((state, mix))
    return history


def fit(clients, start, **options):
    """`clients.fit` with the terms of its objective among the options."""
    terms = {k: options.pop(k) for k in Objective._fields if k in options}
    return clients.fit(start, Objective(**terms), **options)


def with_test(train, test):
    """Clients' training samples and test samples, as dicts."""
    return [{"train": a, "test": b} for a, b in zip(train, test, strict=True)]
