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

from pflcore import Federation, Hardware, Net, Simulation, Training
from pflcore.nn import Dropout

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


class LeNet(nn.Module):
    """Two convolutions and three linear layers on [1, 16, 16], all sizes small."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.pool = (
            nn.Conv2d(1, 3, 5),
            nn.Conv2d(3, 4, 3),
            nn.MaxPool2d(2, 2),
        )
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 12), nn.Linear(12, 8), nn.Linear(8, 4)

    def top(self, x):
        scores: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return scores


class Functions(LeNet):  # torch's tutorials
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.top(torch.flatten(x, 1))


class Logarithms(LeNet):  # torch's MNIST example
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), kernel_size=2, stride=2)
        x = self.drop(F.max_pool2d(F.relu(self.conv2(x)), 2))
        return F.log_softmax(self.top(torch.flatten(x, 1)), dim=1)


class Quickstart(LeNet):  # Flower's
    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.top(x.view(-1, 16))


class Features(LeNet):  # FL-bench's base and classifier
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(
            self.conv1,
            nn.ReLU(),
            self.pool,
            self.conv2,
            nn.ReLU(inplace=True),
            self.pool,
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.top(self.dropout(F.relu_(self.base(x))))


class Blocks(LeNet):  # PFLlib's
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(1, 3, kernel_size=5, padding=0, stride=1, bias=True),
            nn.ReLU(inplace=True),
            nn.MaxPool2d((2, 2)),
        )
        self.second = nn.Sequential(
            nn.Conv2d(3, 4, kernel_size=3), nn.ReLU(inplace=True), nn.MaxPool2d(kernel_size=(2, 2))
        )
        self.fc = nn.Sequential(nn.Linear(16, 12), nn.ReLU(inplace=True))
        self.out = nn.Linear(12, 4)
        for unused in ("conv1", "conv2", "fc1", "fc2", "fc3"):
            delattr(self, unused)

    def forward(self, x):
        scores: Tensor = self.out(self.fc(torch.flatten(self.second(self.first(x)), 1)))
        return scores


class MLP(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.fc1, self.fc2 = how, nn.Linear(256, 10), nn.Linear(10, 4)
        self.normal = nn.LogSoftmax(dim=-1)

    def forward(self, x):
        if x.ndim == 4:
            x = {
                "view": lambda: x.view(-1, 16 * 16),
                "reshape": lambda: x.reshape(-1, 256),
                "size": lambda: x.view(x.size(0), -1),
                "size[0]": lambda: x.view(x.size()[0], -1),
                "shape": lambda: x.reshape(x.shape[0], 256),
                "len": lambda: x.reshape(len(x), -1),
                "numel": lambda: torch.reshape(x.contiguous(), (-1, x.numel() // len(x))),
                "flatten": lambda: x.flatten(start_dim=1),
                "normal": lambda: torch.flatten(x, start_dim=1),
            }[self.how]()
        x = self.fc2(self.fc1(x).relu_())
        return self.normal(x) if self.how == "normal" else x


WAYS = ("view", "reshape", "size", "size[0]", "shape", "len", "numel", "flatten", "normal")


MODELS = {m.__name__: m for m in (Functions, Logarithms, Quickstart, Features, Blocks)} | {
    w: lambda w=w: MLP(w) for w in WAYS
}


def pictures():
    gen = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(12, 1, 16, 16, generator=gen), torch.arange(12) % 4) for _ in range(3)]
    return Federation.from_clients(pairs, classes=4).split(test=0.25)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_a_chain(name):
    chain, plain = (
        Simulation(
            "fedavg",
            MODELS[name],
            pictures(),
            Training(0.1, 4),
            rounds=2,
            hardware=Hardware(engine=engine),
        )
        for engine in ("auto", "loop")
    )
    assert chain.header()["path"]["form"] == "chain", chain.header()["path"]["why"]
    for got, want in zip(chain.run().rounds, plain.run().rounds, strict=True):
        assert got["eval"]["loss"] == pytest.approx(want["eval"]["loss"], rel=1e-4)
        assert got["eval"]["accuracy"] == want["eval"]["accuracy"]


class Decides(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.fc1, self.fc2 = how, nn.Linear(256, 10), nn.Linear(10, 4)

    def forward(self, x):
        y = F.relu(self.fc1(x.flatten(1)))
        if (
            (self.how == "batch" and len(x) > 2)
            or (self.how == "values" and bool(y.sum() > 1))
            or (self.how == "mode" and self.training)
        ):
            y = torch.tanh(y)
        return self.fc2(y + x.flatten(1)[:, :10] if self.how == "detour" else y)


@pytest.mark.parametrize("how", ["batch", "values", "mode", "detour"])
def test_what_depends_on_more_than_the_layer_before_is_none(how):
    assert (
        Simulation("fedavg", lambda: Decides(how), pictures(), Training(0.1, 4), rounds=1).header()[
            "path"
        ]["form"]
        != "chain"
    )


def test_torchs_dropout_trains_as_ours():
    def model(kind):
        return nn.Sequential(
            nn.Flatten(), nn.Linear(256, 10), kind(0.3), nn.ReLU(), nn.Linear(10, 4)
        )

    for engine in ("auto", "loop", "vmap"):
        theirs, ours = (
            Simulation(
                "ditto",
                lambda kind=kind: model(kind),
                pictures(),
                Training(0.1, 4),
                rounds=2,
                hardware=Hardware(engine=engine),
            ).run()
            for kind in (nn.Dropout, Dropout)
        )
        assert torch.equal(theirs.state.server["x"], ours.state.server["x"])
    given = model(nn.Dropout)
    Simulation("fedavg", given, pictures(), Training(0.1, 4), rounds=1).run()
    assert type(given[2]) is nn.Dropout
