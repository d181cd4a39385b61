"""What cannot be trained is refused in one sentence before anything is written."""

import random

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from doors import sentence
from small import with_test
from tolerance import F64

from pflcore import Federation, Net, Simulation, Training


def federation(x=None, y=None, **options):
    x = torch.randn(24, 6) if x is None else x
    y = torch.arange(24) % 4 if y is None else y
    pairs = list(zip(x.split(8), y.split(8), strict=True))
    return Federation.from_clients(with_test(pairs, pairs), **options)


class Own(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.layer, self.f = nn.Linear(6, 4), f

    def forward(self, x):
        return self.f(self.layer(x), self.training)


def hooked():
    m = nn.Linear(6, 4)
    m.weight.register_hook(lambda g: 2 * g)
    return m


def given():
    m = nn.Linear(6, 4)
    before = m.forward
    m.forward = lambda x: 2 * before(x)
    return m


def old_norm():
    m = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)))
    m(torch.zeros(1, 6))
    return m


WORDS = torch.arange(24 * 6).view(24, 6) % 9
BINARY = torch.arange(24) % 2
REFUSED = [  # model, sentence, data
    (nn.Linear(6, 3), r"model: it has 3 output\(s\), and the labels go from 0 to 3; give it 4"),
    (
        nn.Linear(6, 1),
        r"model: it has 1 output.*loss='binary_cross_entropy' or 'hinge'",
        {"y": BINARY},
    ),
    (nn.Linear(5, 4), r"model: Linear has in_features=5, and got an input of shape \[8, 6\]"),
    (
        nn.Sequential(nn.Linear(6, 5), nn.Linear(4, 4)),
        r"model: layer '1' \(Linear\) has in_features=4",
    ),
    (nn.Conv2d(1, 2, 3), r"model: Conv2d has in_channels=1"),
    (
        nn.Linear(6, 4).double(),
        r"data: x is torch.float32 and the model's parameters are torch.float64",
    ),
    (
        nn.Linear(6, 4).half(),
        r"model: its parameters are torch.float16, in which",
        {"x": torch.zeros(24, 6).half(), "dtype": None},
    ),
    (
        nn.Linear(6, 4),
        r"data: x is torch.float16 and the model",
        {"x": torch.zeros(24, 6).half(), "dtype": None},
    ),
    (
        nn.Linear(6, 4),
        r"data: x holds integers \(torch.int64\), and Linear takes numbers",
        {"x": WORDS},
    ),
    (
        nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(18, 4)),
        r"data: x holds tokens from 0 to 8, .* knows 0 to 4",
        {"x": WORDS},
    ),
    (
        nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(18, 4)),
        r"data: layer '0' \(Embedding\) takes integers",
    ),
    (
        Own(lambda z, t: (z, z)),
        r"model: expected its forward pass to give one tensor of scores, got a tuple",
    ),
    (
        Own(lambda z, t: z.sum(0)),
        r"model: expected one row of scores for each of 8 samples, got shape \[4\]",
    ),
    (
        Own(lambda z, t: z),
        r"model: 'cross_entropy' takes scores \[B, C\]",
        {"y": torch.arange(48).view(24, 2) % 4},
    ),
    (
        Net(nn.Linear(6, 4), "squared"),
        r"criterion: 'squared' compares outputs and targets one by one, and the model gives 4 for "
        r"1",
    ),
    (
        Net(nn.Linear(6, 4)),
        r"criterion: 'cross_entropy' takes int64 labels, or probabilities",
        {"y": torch.rand(24)},
    ),
    (
        Net(nn.Linear(6, 1), "binary_cross_entropy"),
        r"criterion: 'binary_cross_entropy' takes targets from 0 to 1",
        {"y": torch.arange(24.0)},
    ),
    (
        Net(nn.Linear(6, 1), "hinge"),
        r"criterion: 'hinge' takes two classes, and these labels go from 0 to 3; take",
    ),
    (
        Net(nn.Linear(6, 4), lambda s, y: F.cross_entropy(s, y, reduction="none")),
        r"criterion: expected one number for a batch, got shape \[8\]",
    ),
    (
        Net(nn.Linear(6, 4), lambda s, y: s @ y),
        r"criterion: it fails on scores of shape \[8, 4\] and targets of shape \[8\]",
    ),
    (Own(lambda z, t: z.detach()), r"model: the loss depends on no trainable parameter"),
    (
        Own(lambda z, t: F.dropout(z, 0.5, t)),
        r"model: its forward pass draws from torch's global generator.*pflcore.nn.Dropout",
    ),
    (
        Own(lambda z, t: z * np.random.rand()),
        r"model: as a function of its parameters it is not what the module computes",
    ),
    (
        Own(lambda z, t: z * random.random()),
        r"model: as a function of its parameters it is not what the module computes",
    ),
    (
        nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(18, 4)),
        r"model: its gradients are sparse",
        {"x": WORDS},
    ),
    (hooked(), r"model: parameter 'weight' has a gradient hook"),
    (given(), r"model: Linear was given a forward of its own"),
    (old_norm, r"build: the model cannot be copied.*parametrizations.weight_norm"),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_one_sentence(case):
    model, words, *data = case
    model = model() if model is old_norm else model
    with sentence(words, (ValueError, TypeError)):
        Simulation("fedavg", model, federation(**dict(*data)), Training(batch_size=8))


def test_modes_of_torch():
    data, model = federation(), nn.Linear(6, 4)
    run = Simulation("fedavg", model, data, rounds=1)
    for mode, words in (
        (torch.inference_mode(), "inference_mode"),
        (torch.no_grad(), "no_grad"),
        (torch.device("meta"), "the default device is meta; call torch.set"),
    ):
        with mode, sentence(f"torch: .*{words}"):
            Simulation("fedavg", model, data)
    with torch.inference_mode(), sentence("torch: .*inference_mode"):
        run.run()
    torch.set_default_dtype(F64)
    try:
        wide = federation(torch.randn(24, 6), dtype=F64)
        for algorithm in ("fedavg", "apfl", "feddwa"):
            run = Simulation(algorithm, lambda: nn.Linear(6, 4), wide, rounds=2).run()
            assert run.rounds[-1]["train_loss"] > 0
    finally:
        torch.set_default_dtype(torch.float32)


def test_data():
    with sentence("x: expected dense floats or int64"):
        Federation(
            torch.zeros(2, 2).to_sparse(), torch.zeros(2).long(), {"train": [torch.arange(2)]}
        )
    assert federation(WORDS.int()).x.dtype == torch.int64
