"""Untrainable models and data are refused before anything is written."""

import copy
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from entry_points import sentence
from parts.path import Own
from parts.user import simulation
from places import golden
from small import layers, with_test
from tolerance import F64
from ugly import randn

from pflcore import Federation, Net, Training


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


DATA = {  # names in tests/golden/untrainable.json
    "labels": {},
    "two classes": {"y": torch.arange(24) % 2},
    "two labels": {"y": torch.arange(48).view(24, 2) % 4},
    "labels from 1": {"y": torch.arange(24) % 4 + 1},
    "a column": {"y": (torch.arange(24) % 4)[:, None, None]},
    "numbers": {"y": torch.arange(24.0)},
    "half": {"x": torch.zeros(24, 6).half(), "dtype": None},
}


@pytest.mark.parametrize("words, dtype, loss, data, said", golden("untrainable"))
def test_one_sentence(words, dtype, loss, data, said):
    model = layers(words).to(getattr(torch, dtype))
    refused(said, model if len(model) > 1 else model[0], federation(**DATA[data]), loss)


def refused(said, model, data, loss=None):
    with sentence(said, (ValueError, TypeError)):
        simulation(model=Net(model, loss) if loss else model, data=data)


class Hidden(nn.Module):
    """Model that uses its weight from a list.

    The weight is a registered parameter as well.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.hidden = [self.layer.weight]

    def forward(self, x):
        return F.linear(x, self.hidden[0], self.layer.bias)


IMPURE = "model: as a function of its parameters it is not what the module computes: "
BROKEN = [  # model, error message
    (
        Own(lambda m, x: (m.layer(x), x)),
        r"model: expected a tensor with one row of scores .*, alone or as `logits`",
    ),
    (
        Own(lambda m, x: m.layer(x).sum(0)),
        r"model: expected .* for each of 8 sample\(s\), .* got a tensor \[4\]",
    ),
    (
        Own(lambda m, x: F.dropout(m.layer(x), 0.5, m.training)),
        r"model: its forward pass draws from torch's global "
        r"generator.*pflcore.nn.Dropout",
    ),
    (Own(lambda m, x: m.layer(x) * np.random.rand()), IMPURE),
    (Own(lambda m, x: m.layer(x) * random.random()), IMPURE),
    (Hidden(), IMPURE),
    (hooked(), r"model: parameter 'weight' has a gradient hook"),
    (given(), r"model: Linear was given a forward of its own"),
]


@pytest.mark.parametrize("model, message", BROKEN)
def test_a_model_that_would_train_as_another_is_one_sentence(model, message):
    refused(message, model, federation())


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("draw", [np.random.rand, random.random])
def test_random_numbers_are_never_taken_for_rounding(draw):
    """However they fall: what they change is as large as a rounding may seem."""
    for seed in range(20):
        np.random.seed(seed)
        random.seed(seed)
        refused(IMPURE, Own(lambda m, x: m.layer(x) * draw()), federation())


UNFIT = [  # model, torch's own error, loss
    (nn.Linear(5, 4), r"shapes cannot be multiplied \(8x6 and 5x4\)", None),
    (nn.Linear(6, 4), "implicitly created only for scalar", lambda s, y: s.sum(1)),
    (nn.Linear(6, 4), "size mismatch", lambda s, y: s @ y),
    (Own(lambda m, x: m.layer(x).detach()), "does not require grad", None),
]


@pytest.mark.parametrize("model, words, loss", UNFIT)
def test_what_torch_refuses_is_its_own_error_before_round_1(model, words, loss):
    with pytest.raises(RuntimeError, match=words):
        simulation(model=model, data=federation(), loss=loss)


@pytest.mark.parametrize("loss", [nn.SoftMarginLoss(), F.hinge_embedding_loss])
def test_a_loss_of_signs_takes_no_labels_from_0(loss):
    model = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    y = torch.arange(24) % 2
    message = (
        "loss: .* takes targets of -1 and 1, and these are others; take loss='hinge'"
    )
    for others in (y, y.float()):
        refused(message, model, federation(y=others), loss)
    simulation(model=Net(model, loss), data=federation(y=2.0 * y - 1))


def test_a_default_dtype_of_torch_changes_nothing():
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
            torch.zeros(2, 2).to_sparse(),
            torch.zeros(2).long(),
            {"train": [torch.arange(2)]},
        )
    assert federation(torch.ones(24, 6).int()).x.dtype == torch.int64


# an error names the real cause, and its advice works ---------------------------


def test_autocast_is_named():
    data = federation()
    model = nn.Linear(6, 4)
    run = simulation(model=model, data=data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with sentence(
            "torch: autocast is on, .*; set up and run the simulation outside of it"
        ):
            simulation(model=model, data=data)
        with sentence("torch: autocast is on"):
            run.run()
    assert run.run().rounds
    training = Training(precision="bf16")
    assert simulation(model=model, data=data, training=training).run().rounds


class Annealed(nn.Module):
    """Loss that divides by the number of its calls if `counts`."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.calls = 0

    def forward(self, scores, y):
        self.calls += self.counts
        return F.cross_entropy(scores, y) / (1 + self.calls)


def test_a_loss_that_counts_its_calls_is_named():
    data = federation()
    model = nn.Linear(6, 4)
    with sentence("model: .*its forward and the loss must use .*such as a counter"):
        simulation(model=model, data=data, loss=Annealed(True))
    assert simulation(model=model, data=data, loss=Annealed(False)).run().rounds


def test_batch_norm_over_processes_is_named():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    other = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    with sentence(
        "model: 1 is nn.SyncBatchNorm, .*; give the model before convert_sync_batchnorm"
    ):
        simulation(model=other, data=federation())
    assert simulation(model=model, data=federation()).run().rounds


class Squeezed(nn.Module):
    def __init__(self, axis=None):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.axis = axis

    def forward(self, x):
        x = self.layer(x)[:, :, None]
        return x.squeeze() if self.axis is None else x.squeeze(self.axis)


NO_AXIS = (
    r"model: expected .* one row of scores for each of 1 sample\(s\), .* \[4\] .*; "
    r"keep the batch as the first axis, as squeeze\(-1\)"
)


def clients(train, test):
    def samples(n):
        return torch.randn(n, 6), torch.arange(n) % 4

    return Federation.from_clients(
        [{"train": samples(n), "test": samples(test)} for n in (train, 9)]
    )


def test_an_axis_of_the_batch_that_is_lost_is_named():
    with sentence(rf"data: client 0 .* cannot train \(MismatchError, {NO_AXIS}"):
        simulation(model=Squeezed(), data=clients(1, 4))
    with sentence(NO_AXIS):
        simulation("local", model=Squeezed(), data=clients(5, 1)).run()
    history = simulation(model=Squeezed(), data=clients(5, 4)).run()
    x = torch.randn(3, 6)
    assert history.predict(0, x).shape == (3,)
    with sentence(NO_AXIS):
        history.predict(0, x[:1])
    with sentence(r"x: expected samples \[B, ...\], got shape \[6\]"):
        history.predict(0, x[0])
    history = simulation("local", model=Squeezed(-1), data=clients(1, 1)).run()
    assert history.predict(0, x[:1]).shape == (1,)


def test_what_fails_on_one_sample_is_named():
    def apart(scores, y):
        if len(y) < 2:
            raise ValueError("two samples at least")
        return F.cross_entropy(scores, y)

    with sentence(
        r"data: client 0 \(1 samples, .* cannot train \(ValueError, two samples"
    ):
        simulation(model=nn.Linear(6, 4), data=clients(1, 4), loss=apart)
    assert (
        simulation(model=nn.Linear(6, 4), data=clients(5, 4), loss=apart).run().rounds
    )


def test_whole_numbers_as_targets_are_named_where_classes_are_none():
    y = torch.arange(24) + 3
    data = replace(federation(y=y), classes=None)
    with sentence(
        "model: it has 1 output.*, or take loss='squared', as classes is None"
    ):
        simulation(model=nn.Linear(6, 1), data=data)
    assert simulation(model=nn.Linear(6, 1), data=data, loss="squared").run().rounds


def test_a_function_of_the_round_alone_is_named():
    def one(round):
        return 0.99**round

    message = "schedule: .*TypeError.*of the round alone write lambda round, rounds: "
    with sentence(message):
        simulation(training=Training(schedule=one))
    with sentence(message):
        simulation(training=Training(schedule=lambda round: 0.5))
    assert (
        simulation(training=Training(schedule=lambda round, rounds: one(round)))
        .run()
        .rounds
    )


@pytest.mark.deep("it takes a second")
def test_metrics_of_labels_need_a_loss_that_says_what_one_score_means():
    data = federation(y=torch.arange(24) % 2)
    names = ["f1", "auc"]
    weight = torch.tensor(3.0)
    with sentence(
        "metrics: for targets .* and 'f1' is for labels, .*nn.BCEWithLogitsLoss"
    ):
        simulation(
            model=nn.Linear(6, 1),
            data=data,
            metrics=names,
            loss=lambda s, y: F.binary_cross_entropy_with_logits(s, y),
        )
    for loss in (
        "binary_cross_entropy",
        nn.BCEWithLogitsLoss(pos_weight=weight),
        partial(F.binary_cross_entropy_with_logits, pos_weight=weight),
    ):
        history = simulation(
            model=nn.Linear(6, 1), data=data, metrics=names, loss=loss
        ).run()
        assert {"accuracy", "f1", "auc"} <= set(history.rounds[-1]["eval"])


class WithSpare(nn.Module):
    """A model with a layer that its forward pass does not use."""

    def __init__(self, train_spare=True):
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.spare = nn.Linear(6, 4).requires_grad_(train_spare)

    def forward(self, x):
        return self.head(x)


def spare_weights_after(training, engine="loop", **options):
    """The spare layer's weights after a round, and before."""
    model = WithSpare(**options)
    x = randn(0, 16, 6)
    y = torch.arange(16) % 4
    data = Federation.from_clients([(x[:9], y[:9]), (x[9:], y[9:])])
    config = {"training": training, "rounds": 1, "engine": engine}
    run = simulation("fedavg", data.split(test=0.5), model=model, **config)
    trained = run.run().model(0).module().spare.weight
    return trained, model.spare.weight


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_decay_of_unused_weights_is_told(engine, optimizer):
    training = Training(0.1, 99, weight_decay=0.1, local_optimizer=optimizer)
    text = r"weight_decay: it shrinks \['spare\.weight', 'spare\.bias'\] of the model"
    with pytest.warns(UserWarning, match=text):
        got, before = spare_weights_after(training, engine)

    # What the sentence says: the decay alone moves them.
    torch.testing.assert_close(got, before * (1 - 0.1 * 0.1))


def test_frozen_weights_do_not_decay(recwarn):
    training = Training(0.1, 99, weight_decay=0.1)
    got, before = spare_weights_after(training, train_spare=False)

    assert torch.equal(got, before)
    assert not [w for w in recwarn if "weight_decay" in str(w.message)]


def test_unused_weights_without_decay_are_no_matter(recwarn):
    got, before = spare_weights_after(Training(0.1))

    assert torch.equal(got, before)
    assert not [w for w in recwarn if "weight_decay" in str(w.message)]
