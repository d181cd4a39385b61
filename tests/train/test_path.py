"""The path that trains a model is the model: what may be written out, what must not, and what is
said where it may not."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from parts.path import Own, federation, hooked, same_as_by_hand
from torch import Tensor

from pflcore import Hardware, Net, Simulation, Training

CPU = "loop"


class Rnn(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = kind(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.head = nn.Embedding(5, 6, padding_idx=0), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.e(x).mean(1))


def pools():
    pool = hooked(nn.MaxPool2d(2))
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        pool,
        nn.Conv2d(2, 2, 3, padding=1),
        pool,
        nn.Flatten(),
        nn.Linear(8, 4),
    )


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_models_train_all_at_once(kind):
    run = same_as_by_hand(lambda: Rnn(kind), federation((7, 6)), engine="vmap")
    path = run.header()["path"]
    assert (path["engine"], path["form"]) == ("vmap", "vmap")
    fast = "loop" if kind is nn.LSTM else "vmap"
    assert Simulation("fedavg", Rnn(kind), federation((7, 6))).header()["path"]["engine"] == fast


def test_what_vmap_cannot_carry_trains_on_threads_and_the_record_says_why():
    def build():
        return Rnn(lambda i, o, **options: nn.LSTM(i, 9, proj_size=o, **options))

    run = same_as_by_hand(build, federation((7, 6)))
    assert (
        run.header()["path"]["engine"] == "loop" and "with an LSTM" in run.header()["path"]["why"]
    )
    with pytest.raises(
        ValueError, match=r"^engine: 'vmap' cannot train this model: .*; take 'auto' or 'loop'\.$"
    ):
        Simulation("fedavg", build(), federation((7, 6)), hardware=Hardware(engine="vmap"))


def test_a_padding_row_is_not_trained():
    data = federation((7,), tokens=True)
    run = same_as_by_hand(Tokens, data)
    assert (
        run.header()["path"]["engine"] == "loop"
        and "its gradient is another in training mode" in run.header()["path"]["why"]
    )
    with pytest.raises(ValueError, match=r"^engine: 'vmap' cannot train this model: its gradient"):
        Simulation("fedavg", Tokens(), data, hardware=Hardware(engine="vmap"))


def test_hooks_of_pooling_and_layers_used_twice_stay():
    run = same_as_by_hand(pools, federation((1, 8, 8)))
    path = run.header()["path"]
    assert (path["engine"], path["form"]) == ("loop", "module")


def test_sequences_into_a_linear_layer():
    run = same_as_by_hand(lambda: Own(lambda m, x: m.layer(x).mean(1)), federation((7, 6)))
    assert run.header()["path"]["form"] == "vmap"
    run = same_as_by_hand(
        lambda: nn.Sequential(nn.Linear(6, 2), nn.Flatten(), nn.Linear(14, 4)), federation((7, 6))
    )
    assert run.header()["path"]["form"] == "vmap"


def real(k):
    return lambda gen, n: torch.randn(n, *([] if k is None else [k]), generator=gen)


TARGETS: dict[str, tuple[int, str, Callable[[torch.Generator, int], Tensor]]] = {
    "numbers": (1, "squared", real(None)),
    "[n, 1]": (1, "squared", real(1)),
    "[n, 3]": (3, "squared", real(3)),
    "[n, 3], half": (3, "half_squared", real(3)),
    "several labels": (
        4,
        "binary_cross_entropy",
        lambda gen, n: (torch.rand(n, 4, generator=gen) < 0.5).float(),
    ),
    "several integer labels": (
        4,
        "binary_cross_entropy",
        lambda gen, n: torch.randint(0, 2, (n, 4), generator=gen),
    ),
    "yes or no": (
        1,
        "binary_cross_entropy",
        lambda gen, n: torch.randint(0, 2, (n,), generator=gen),
    ),
    "soft labels": (4, "cross_entropy", lambda gen, n: torch.rand(n, 4, generator=gen).softmax(1)),
}
BODIES: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda k: nn.Linear(6, k), (6,)),
    "mlp": (lambda k: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, k)), (6,)),
    "conv": (
        lambda k: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, k)),
        (1, 4, 4),
    ),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("target", TARGETS)
def test_targets_of_every_kind_on_every_path(target, body):
    (outputs, criterion, y), (build, shape) = TARGETS[target], BODIES[body]
    data = federation(shape, y)
    ends = []
    for engine in ("loop", "vmap"):
        net = Net(lambda: build(outputs), criterion, seed=3)
        run = Simulation(
            "fedavg",
            net,
            data,
            Training(lr=0.1, batch_size=4),
            rounds=2,
            hardware=Hardware(workers=1, engine=engine),
        )
        history = run.run()
        assert all(torch.tensor(history.rounds[-1]["eval"]["loss"]).isfinite())
        ends.append((run.state.server["x"], torch.tensor(history.rounds[-1]["eval"]["loss"])))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


class Average(nn.Module):
    """A running mean of the inputs, put anew into its place by every pass."""

    def __init__(self, how):
        super().__init__()
        self.h, self.how = nn.Linear(6, 4), how
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, x):
        if self.training:
            mean = x.detach().mean(0)
            if self.how == "again":
                self.ema = 0.9 * self.ema + 0.1 * mean
            elif self.how == "data":
                self.ema.data = 0.9 * self.ema + 0.1 * mean
            else:
                self.ema.mul_(0.9).add_(0.1 * mean)
        return self.h(x - self.ema)


@pytest.mark.parametrize("engine", ["auto", "loop", "vmap"])
@pytest.mark.parametrize("how", ["again", "data", "in place"])
@pytest.mark.unless(lambda how, engine: (how, engine) == ("data", "vmap"))
def test_a_buffer_is_what_the_forward_made_of_it(how, engine):
    data, built = federation(), Average(how).double()
    data = dataclasses.replace(data, x=data.x.double())
    history = Simulation(
        "local",
        built,
        data,
        Training(0.1, 100, epochs=3),
        rounds=1,
        hardware=Hardware(engine=engine),
    ).run()
    model, (x, y) = copy.deepcopy(built).train(), data.client(0)
    step = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):  # all samples are one batch
        step.zero_grad()
        F.cross_entropy(model(x), y).backward()
        step.step()
    got = history.models[0].module()
    torch.testing.assert_close(got.ema, model.ema)
    torch.testing.assert_close(got.h.weight, model.h.weight)


class Counted(nn.Module):
    """Its outputs depend on how often it was called."""

    def __init__(self, where):
        super().__init__()
        self.h, self.where, self.k, self.last = nn.Linear(6, 4), where, 0, None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = self.h(x)
        if self.where == "cache":
            y = y if self.last is None else y + 0.1 * self.last
            self.last = y.detach().mean(0)
        elif self.training:
            self.k, self.calls = self.k + 1, self.calls + 1
        return y / (1 + 0.1 * (self.calls if self.where == "buffer" else self.k))


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("where", ["buffer", "attribute", "cache"])
def test_what_one_client_leaves_to_the_next_is_refused(where, engine):
    with pytest.raises(ValueError, match="nothing that another pass has changed"):
        Simulation(
            "fedavg",
            Counted(where),
            federation(),
            Training(0.1, 4),
            rounds=1,
            hardware=Hardware(engine=engine),
        )


def test_sparse_gradients_are_refused():
    built = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(18, 4))
    with pytest.raises(ValueError, match="model: its gradients are sparse"):
        Simulation("fedavg", built, federation(tokens=True), Training(0.1, 4), rounds=1)
