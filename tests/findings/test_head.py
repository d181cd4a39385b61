"""The head is the layer that gives the scores, in whatever order layers are registered."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflcore import Federation, Net, Server, Simulation, Training


class HeadFirst(nn.Module):
    """The classifier (36 parameters) is registered before the encoder (56)."""

    def __init__(self, logarithms=False):
        super().__init__()
        self.logarithms = logarithms
        self.classifier, self.encoder = nn.Linear(8, 4), nn.Sequential(nn.Linear(6, 8), nn.ReLU())

    def forward(self, x):
        scores: Tensor = self.classifier(self.encoder(x))
        return F.log_softmax(scores, 1) if self.logarithms else scores


class HeadLast(HeadFirst):
    """The same in the usual order."""

    def __init__(self):
        super().__init__()
        first = self._modules.pop("classifier")
        self._modules["classifier"] = first


class Stem(HeadFirst):
    """An attribute `head` that is not the head."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        return super().forward(self.head(x))


def federation():
    gen = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(20, 6, generator=gen), torch.arange(20) % 4) for _ in range(4)]
    return Federation.from_arrays(pairs, classes=4, test_fraction=0.2)


@pytest.mark.parametrize(
    ("algorithm", "sent"), [("fedper", 56), ("fedrep", 56), ("fedbabu", 56), ("lg_fedavg", 36)]
)
@pytest.mark.parametrize("model", [HeadFirst, HeadLast, lambda: HeadFirst(True)])
def test_the_part_that_travels(algorithm, sent, model):
    simulation = Simulation(algorithm, model, federation(), Training(), rounds=1)
    assert simulation.run().rounds[0]["bytes_up"] == 4 * 4 * sent
    private = "encoder" if algorithm == "lg_fedavg" else "classifier"
    assert all(name.startswith(private) for name in simulation.header()["private"])


@pytest.mark.parametrize("algorithm", ["knnper", "fedrod"])
def test_methods_with_features_give_one_result_in_any_order(algorithm):
    def copied(build):
        model = build()
        for n, p in model.named_parameters():
            nn.init.constant_(p, 0.01 * len(n)) if p.dim() == 1 else nn.init.eye_(p)
        return model

    results = [
        Simulation(algorithm, copied(build), federation(), Training(), rounds=2)
        .run()
        .rounds[-1]["eval"]
        for build in (HeadFirst, HeadLast)
    ]
    assert results[0] == results[1]


def test_an_attribute_of_that_name_is_believed_only_until_the_model_has_met_data():
    assert Simulation("fedper", Stem, federation(), Training(), rounds=1).run().rounds[0][
        "bytes_up"
    ] == 4 * 4 * (56 + 42)


def test_without_data_it_is_asked_for():
    with pytest.raises(
        ValueError, match=r"^model: .* head.*name it with Net\(..., head='name'\)\.$"
    ):
        Server("fedper", HeadFirst(), 4)
    assert Net(HeadFirst, head="classifier").head_slice == slice(0, 36)
