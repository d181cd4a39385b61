"""LeNet-5 and an MLP in the spellings that people have are chains of layers, and train to what the
plain module trains to."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflcore import Federation, Hardware, Simulation, Training
from pflcore.nn import Dropout


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


def federation():
    gen = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(12, 1, 16, 16, generator=gen), torch.arange(12) % 4) for _ in range(3)]
    return Federation.from_arrays(pairs, classes=4, test_fraction=0.25)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_a_chain(name):
    chain, plain = (
        Simulation(
            "fedavg",
            MODELS[name],
            federation(),
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
        Simulation(
            "fedavg", lambda: Decides(how), federation(), Training(0.1, 4), rounds=1
        ).header()["path"]["form"]
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
                federation(),
                Training(0.1, 4),
                rounds=2,
                hardware=Hardware(engine=engine),
            ).run()
            for kind in (nn.Dropout, Dropout)
        )
        assert torch.equal(theirs.state.server["x"], ours.state.server["x"])
    given = model(nn.Dropout)
    Simulation("fedavg", given, federation(), Training(0.1, 4), rounds=1).run()
    assert type(given[2]) is nn.Dropout
