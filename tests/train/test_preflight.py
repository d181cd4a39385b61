"""What cannot be trained is refused in one sentence before anything is written."""

import random

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from doors import sentence
from parts.path import Own
from parts.user import simulation
from places import golden
from small import layers, with_test
from tolerance import F64

from pflcore import Federation, Net


def federation(x=None, y=None, **options):
    x = torch.randn(24, 6) if x is None else x
    y = torch.arange(24) % 4 if y is None else y
    pairs = list(zip(x.split(8), y.split(8), strict=True))
    return Federation.from_clients(with_test(pairs, pairs), **options)


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
DATA = {  # as tests/golden/untrainable.json names it
    "labels": {},
    "two classes": {"y": torch.arange(24) % 2},
    "two labels": {"y": torch.arange(48).view(24, 2) % 4},
    "labels from 1": {"y": torch.arange(24) % 4 + 1},
    "a column": {"y": (torch.arange(24) % 4)[:, None, None]},
    "numbers": {"y": torch.arange(24.0)},
    "shares": {"y": torch.rand(24)},
    "half": {"x": torch.zeros(24, 6).half(), "dtype": None},
    "words": {"x": WORDS},
}


@pytest.mark.parametrize("words, dtype, loss, data, said", golden("untrainable"))
def test_one_sentence(words, dtype, loss, data, said):
    model = layers(words).to(getattr(torch, dtype))
    refused(said, model if len(model) > 1 else model[0], federation(**DATA[data]), loss)


def refused(said, model, data, loss=None):
    with sentence(said, (ValueError, TypeError)):
        simulation(model=Net(model, loss) if loss else model, data=data)


LINEAR = nn.Linear(6, 4)
BROKEN = [  # model, sentence, loss
    (
        Own(lambda m, x: (m.layer(x), x)),
        r"model: expected its forward pass to give one tensor of scores, got a tuple",
    ),
    (
        Own(lambda m, x: m.layer(x).sum(0)),
        r"model: expected one row of scores for each of 8 samples, got shape \[4\]",
    ),
    (
        LINEAR,
        r"criterion: expected one number for a batch, got shape \[8\]",
        lambda s, y: F.cross_entropy(s, y, reduction="none"),
    ),
    (
        LINEAR,
        r"criterion: it fails on scores of shape \[8, 4\] and targets of shape \[8\]",
        lambda s, y: s @ y,
    ),
    (Own(lambda m, x: m.layer(x).detach()), r"model: the loss depends on no trainable parameter"),
    (
        Own(lambda m, x: F.dropout(m.layer(x), 0.5, m.training)),
        r"model: its forward pass draws from torch's global generator.*pflcore.nn.Dropout",
    ),
    (
        Own(lambda m, x: m.layer(x) * np.random.rand()),
        r"model: as a function of its parameters it is not what the module computes",
    ),
    (
        Own(lambda m, x: m.layer(x) * random.random()),
        r"model: as a function of its parameters it is not what the module computes",
    ),
    (hooked(), r"model: parameter 'weight' has a gradient hook"),
    (given(), r"model: Linear was given a forward of its own"),
    (old_norm, r"build: the model cannot be copied.*parametrizations.weight_norm"),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", BROKEN)
def test_a_model_that_breaks_is_one_sentence(case):
    model, said, *loss = case
    refused(said, model() if model is old_norm else model, federation(), *loss)


@pytest.mark.parametrize("loss", [nn.SoftMarginLoss(), F.hinge_embedding_loss])
def test_a_loss_of_signs_takes_no_labels_from_0(loss):
    model = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    y = torch.arange(24) % 2
    said = "criterion: .* takes targets of -1 and 1, and these are others; take loss='hinge'"
    for others in (y, y.float()):
        refused(said, model, federation(y=others), loss)
    simulation(model=Net(model, loss), data=federation(y=2.0 * y - 1))


def test_modes_of_torch():
    data, model = federation(), nn.Linear(6, 4)
    run = simulation(model=model, data=data)
    for mode, words in (
        (torch.inference_mode(), "inference_mode"),
        (torch.no_grad(), "no_grad"),
        (torch.device("meta"), "the default device is meta; call torch.set"),
    ):
        with mode, sentence(f"torch: .*{words}"):
            simulation(model=model, data=data)
    with torch.inference_mode(), sentence("torch: .*inference_mode"):
        run.run()
    torch.set_default_dtype(F64)
    try:
        wide = federation(torch.randn(24, 6), dtype=F64)
        for algorithm in ("fedavg", "apfl", "feddwa"):
            run = simulation(algorithm, wide, model=lambda: nn.Linear(6, 4)).run()
            assert run.rounds[-1]["train_loss"] > 0
    finally:
        torch.set_default_dtype(torch.float32)


def test_data():
    with sentence("x: expected dense floats or int64"):
        Federation(
            torch.zeros(2, 2).to_sparse(), torch.zeros(2).long(), {"train": [torch.arange(2)]}
        )
    assert federation(WORDS.int()).x.dtype == torch.int64
