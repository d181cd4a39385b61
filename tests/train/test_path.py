"""An engine trains exactly the module that the user gave.

Some modules may be written out as chains of layers, others must not; the header gives
the reason.
"""

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from parts.path import (
    BODIES,
    Own,
    Rnn,
    body,
    federation,
    mlp,
    played,
    repeated,
    same_as_by_hand,
)
from parts.user import simulation
from small import crossed, images, layers
from torch.nn.utils import parametrizations, spectral_norm

from pflcore import Net, Training
from pflcore.nn import Dropout


def hooked(m, how="register_forward_hook", hook=lambda m, x, y: 2 * y):
    getattr(m, how)(hook)
    return m


class Smooth(nn.ReLU):
    def forward(self, x):
        return F.elu(x, 0.3)


def tied():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4))


def doubled():
    return hooked(
        nn.Linear(6, 4), "register_forward_pre_hook", lambda m, x: (2 * x[0],)
    )


def pools():
    pool = hooked(nn.MaxPool2d(2))
    first = nn.Conv2d(1, 2, 3, padding=1)
    second = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(first, pool, second, pool, nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_models_train_all_at_once(kind):
    data = federation((7, 6))
    assert same_as_by_hand(lambda: Rnn(kind), data, "vmap")[:2] == ("vmap", "vmap")
    fast = "loop" if kind is nn.LSTM else "vmap"
    assert played(Rnn(kind), data).header()["engine"] == fast


def tokens():
    return layers("Embedding 5 6 0, Flatten, Linear 42 4")


def token():
    return layers("Embedding 5 6 0, Linear 6 4")


def projected():
    return Rnn(lambda i, o, **options: nn.LSTM(i, 9, proj_size=o, **options))


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "build, data, why",
    [
        (projected, federation((7, 6)), "with an LSTM"),
        # The row of the padding token is not trained.
        (
            tokens,
            federation((7,), tokens=True),
            "its gradient in training mode is another",
        ),
        (
            token,
            federation((), tokens=True),
            "its gradient in training mode is another",
        ),
    ],
)
def test_what_vmap_cannot_carry_trains_on_threads_and_the_record_says_why(
    build, data, why
):
    engine, _, reason = same_as_by_hand(build, data)
    assert engine == "loop" and why in reason
    no = r"^engine: 'vmap' cannot train this model: .*; take 'auto' or 'loop'\.$"
    with pytest.raises(ValueError, match=no):
        played(build(), data, "vmap")


class Bag(nn.Module):
    def __init__(self, words, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


@pytest.mark.parametrize("words", [9, (1 << 19) // 32])
def test_an_embedding_of_any_size_may_have_padding(words):
    run = played(lambda: Bag(words), federation((7,), tokens=True))
    assert run.header()["engine"] == "loop"
    assert 0 < run.run().rounds[-1]["train_loss"] < 10


def test_a_loss_in_small_units_is_tried_no_less():
    data = federation((7,), tokens=True)

    def loss(s, y):
        return 1e-9 * F.cross_entropy(s, y)

    header = simulation(model=tokens, data=data, loss=loss).header()
    assert header["engine"] == "loop"
    assert "its gradient in training mode is another" in header["path"]["why"]


class Silent(Exception):
    def __str__(self):
        return ""


def test_an_error_without_words_is_an_error():
    def grads_only(m, x):
        if torch._C._functorch.maybe_current_level() is not None:
            raise Silent
        return m.layer(x) + x[:, :4]

    header = played(Own(grads_only)).header()
    assert header["engine"] == "loop"
    assert "vmap cannot train this model: Silent" in header["path"]["why"]


CHAIN = ("vmap", "chain")
VMAP = ("vmap", "vmap")
LOOP = ("loop", "loop")
VECTORS = {  # model, (engine, form), shape of the samples
    "mlp": (mlp, CHAIN),
    "an activation twice": (repeated, CHAIN),
    "batch norm": (lambda: layers("Linear 6 5, BatchNorm1d 5, Linear 5 4"), CHAIN),
    "batch norm of images": (
        lambda: layers(
            "Conv2d 1 4 3, BatchNorm2d 4, ReLU, MaxPool2d 2, Flatten, Linear 36 4"
        ),
        ("loop", "chain"),
        (1, 8, 8),
    ),
    "no running statistics": (
        lambda: Own(lambda m, x: F.batch_norm(m.layer(x), None, None, training=True)),
        VMAP,
    ),
    "a layer twice": (tied, VMAP),
    "a subclass": (lambda: nn.Sequential(nn.Linear(6, 4), Smooth()), VMAP),
    "forward hook": (lambda: nn.Sequential(hooked(nn.Linear(6, 4))), VMAP),
    "pre-hook": (lambda: nn.Sequential(doubled()), VMAP),
    "hook of the whole": (lambda: hooked(nn.Sequential(nn.Linear(6, 4))), VMAP),
    "training only": (
        lambda: Own(lambda m, x: m.relu(m.layer(x)) if m.training else m.layer(x)),
        VMAP,
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4))),
        VMAP,
    ),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(6, 4))), LOOP),
    "if": (
        lambda: Own(lambda m, x: m.layer(x) if x.mean() > 0 else 2 * m.layer(x)),
        LOOP,
    ),
    "a batch's size": (
        lambda: Own(lambda m, x: torch.tanh(m.layer(x)) if len(x) > 2 else m.layer(x)),
        VMAP,
    ),
    "a detour": (lambda: Own(lambda m, x: m.relu(m.layer(x)) + x[:, :4]), VMAP),
    "pooling with a hook, twice": (pools, LOOP, (1, 8, 8)),
    "a mean": (lambda: Own(lambda m, x: m.layer(x).mean(1)), VMAP, (7, 6)),
    "steps, then all": (
        lambda: layers("Linear 6 2, Flatten, Linear 14 4"),
        VMAP,
        (7, 6),
    ),
}


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", VECTORS)
def test_what_trains_is_the_model(name):
    build, path, *shape = VECTORS[name]
    with warnings.catch_warnings():
        # A form that does not apply must not warn that it differs.
        warnings.filterwarnings("error", "pflcore")
        assert same_as_by_hand(build, *map(federation, shape))[:2] == path


def real(*shape):
    return lambda gen, n: torch.randn(n, *shape, generator=gen)


def labels(*shape):
    return lambda gen, n: torch.randint(0, 2, (n, *shape), generator=gen)


TARGETS = {
    "numbers": (1, "squared", real()),
    "[n, 1]": (1, "squared", real(1)),
    "[n, 3]": (3, "squared", real(3)),
    "[n, 3], half": (3, "half_squared", real(3)),
    "several labels": (
        4,
        "binary_cross_entropy",
        lambda gen, n: labels(4)(gen, n).float(),
    ),
    "several integer labels": (4, "binary_cross_entropy", labels(4)),
    "yes or no": (1, "binary_cross_entropy", labels()),
    "soft labels": (4, "cross_entropy", lambda gen, n: real(4)(gen, n).softmax(1)),
}


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("target, model", crossed(TARGETS, ["mlp", "conv"]))
def test_targets_of_every_kind_on_every_path(target, model):
    outputs, loss, y = TARGETS[target]
    words, shape = BODIES[model]
    data = federation(shape, y)
    ends = []
    for engine in ("auto", "loop", "vmap"):
        net = Net(lambda: body(words, outputs), loss, seed=3)
        run = played(net, data, engine, 2, Training(lr=0.1, batch_size=4))
        losses = torch.tensor(run.run().rounds[-1]["eval"]["loss"])
        assert losses.isfinite().all()
        ends.append((run.state.server["x"], losses))
    for end in ends[1:]:
        torch.testing.assert_close(ends[0], end, rtol=1e-4, atol=1e-5)


def test_a_model_that_ends_in_pooling_is_a_chain():
    data = federation((1, 8, 8), real())
    model = layers("Conv2d 1 3 3, ReLU, Conv2d 3 1 2, AvgPool2d 5, Flatten")
    ends = []
    for engine in ("auto", "loop"):
        net = Net(model, "squared", seed=3)
        run = played(net, data, engine, 2, Training(lr=0.1, batch_size=4))
        assert run.header()["engine"] == ("chain" if engine == "auto" else "loop")
        run.run()
        ends.append(run.state.server["x"])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


class Average(nn.Module):
    """A running mean of the inputs.

    Every pass assigns it again, in the way that `how` names.
    """

    def __init__(self, how):
        super().__init__()
        self.h = nn.Linear(6, 4)
        self.how = how
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, x):
        if self.training:
            new = 0.9 * self.ema + 0.1 * x.detach().mean(0)
            if self.how == "again":
                self.ema = new
            elif self.how == "data":
                self.ema.data = new
            else:
                self.ema.copy_(new)
        return self.h(x - self.ema)


@pytest.mark.parametrize("engine", ["auto", "loop", "vmap"])
@pytest.mark.parametrize("how", ["again", "data", "in place"])
@pytest.mark.unless(lambda how, engine: (how, engine) == ("data", "vmap"))
def test_a_buffer_is_what_the_forward_made_of_it(how, engine):
    data = federation()
    built = Average(how).double()
    data = dataclasses.replace(data, x=data.x.double())
    run = played(built, data, engine, 1, Training(0.1, 100, epochs=3), "local")
    model = copy.deepcopy(built).train()
    x, y = data.client(0)
    step = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):  # all samples are one batch
        step.zero_grad()
        F.cross_entropy(model(x), y).backward()
        step.step()
    got = run.run().models[0].module()
    torch.testing.assert_close((got.ema, got.h.weight), (model.ema, model.h.weight))


class Counted(nn.Module):
    """Model whose outputs depend on the number of its calls."""

    def __init__(self, where):
        super().__init__()
        self.h = nn.Linear(6, 4)
        self.where = where
        self.k = 0
        self.last = None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = self.h(x)
        if self.where == "cache":
            y = y if self.last is None else y + 0.1 * self.last
            self.last = y.detach().mean(0)
        elif self.training:
            self.k = self.k + 1
            self.calls = self.calls + 1
        return y / (1 + 0.1 * (self.calls if self.where == "buffer" else self.k))


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("where", ["buffer", "attribute", "cache"])
def test_what_one_client_leaves_to_the_next_is_refused(where, engine):
    with pytest.raises(ValueError, match="nothing that another pass has changed"):
        played(Counted(where), engine=engine)


class LeNet(nn.Module):
    """Two convolutions and three linear layers on [1, 16, 16], all small."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 5)
        self.conv2 = nn.Conv2d(3, 4, 3)
        self.fc1 = nn.Linear(16, 12)
        self.fc2 = nn.Linear(12, 8)
        self.fc3 = nn.Linear(8, 4)
        self.pool = nn.MaxPool2d(2, 2)
        self.drop = nn.Dropout(0.25)

    def top(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Functions(LeNet):  # the style of torch's tutorials and MNIST example
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = self.drop(F.max_pool2d(F.relu(self.conv2(x)), kernel_size=2, stride=2))
        return F.log_softmax(self.top(torch.flatten(x, 1)), dim=1)


class Means(nn.Module):  # the style of large networks: images end as their means
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 5)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.adaptive_max_pool2d(F.leaky_relu(self.norm(self.conv(x)), 0.1), (6, 4))
        return self.head(F.leaky_relu_(x).mean((-2, -1)))


class Features(LeNet):  # the style of FL-bench: base and classifier
    def __init__(self):
        super().__init__()
        first = (self.conv1, nn.ReLU(), self.pool)
        second = (self.conv2, nn.ReLU(True), self.pool)
        self.base = nn.Sequential(*first, *second, nn.Flatten())
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.top(self.dropout(F.relu_(self.base(x))))


WAYS = {
    "view": lambda x: x.view(-1, 16 * 16),
    "size": lambda x: x.view(x.size(0), -1),
    "size[0]": lambda x: x.view(x.size()[0], -1),
    "shape": lambda x: x.reshape(x.shape[0], 256),
    "len": lambda x: x.reshape(len(x), -1),
    "numel": lambda x: torch.reshape(x.contiguous(), (-1, x.numel() // len(x))),
    "flatten": lambda x: x.flatten(start_dim=1),
    "normal": lambda x: torch.flatten(x, start_dim=1),
}


class MLP(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.fc1 = nn.Linear(256, 10)
        self.fc2 = nn.Linear(10, 4)
        self.normal = nn.LogSoftmax(dim=-1)

    def forward(self, x):
        if x.ndim == 4:
            x = WAYS[self.how](x)
        x = self.fc2(self.fc1(x).relu_())
        return self.normal(x) if self.how == "normal" else x


MODELS = {
    **{m.__name__: m for m in (Functions, Means, Features)},
    **{w: lambda w=w: MLP(w) for w in WAYS},
}


PICTURES = images((12,) * 3, (1, 16, 16))


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_a_chain(name):
    chain, plain = (
        played(MODELS[name], PICTURES, engine, 2, Training(0.1, 4))
        for engine in ("auto", "loop")
    )
    assert chain.header()["engine"] == "chain", chain.header()["path"]["why"]
    for got, want in zip(chain.run().rounds, plain.run().rounds, strict=True):
        assert got["eval"]["loss"] == pytest.approx(want["eval"]["loss"], rel=1e-4)
        assert got["eval"]["accuracy"] == want["eval"]["accuracy"]


def test_torchs_dropout_trains_as_ours():
    model = layers("Linear 6 4, Dropout 0.3")
    for build in (model, lambda: copy.deepcopy(model)):
        ours = Net(build).module[1]
        assert type(ours) is Dropout and ours.p == 0.3
    assert type(model[1]) is nn.Dropout
