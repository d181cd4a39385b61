"""Last batches of one sample, numpy's numbers, and advice in error messages."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from entry_points import sentence
from parts.user import simulation
from small import ENGINES, equals, images, normed_model
from torch import nn

import pflcore
from pflcore import Federation, Training

FIVES = images((5, 5, 5))


def linear():
    return nn.Linear(6, 4)


def losses(model=normed_model, data=None, engine="auto", **training):
    options = {"model": model, "training": Training(**training), "engine": engine}
    return (
        simulation("local", data or FIVES, rounds=2, **options)
        .run()
        .series("loss")[1][-1]
    )


# batch norm -----------------------------------------------------------------
@ENGINES
def test_a_last_batch_of_one_joins_the_one_before_for_batch_norm(engine):
    """Batches of four and one sample become one of five."""
    four, five = (losses(batch_size=b, epochs=2, engine=engine) for b in (4, 5))
    equals(four, five)
    sizes = images((9, 8, 13))
    assert losses(data=sizes, batch_size=4, engine=engine).isfinite().all()


def test_other_models_take_a_last_batch_of_one():
    with sentence(
        r"data: client 1 \(1 samples, batch_size 4\) has a batch of one sample"
    ):
        losses(data=images((5, 1, 5)), batch_size=4)
    named = replace(images((5, 1, 5)), names=["north", "east", "south"])
    with sentence(r"data: client east \(1 samples"):
        losses(data=named, batch_size=4)
    assert not torch.equal(losses(linear, batch_size=4), losses(linear, batch_size=5))
    left_out = losses(data=images((8, 9, 7)), batch_size=4, drop_last=True)
    assert left_out.isfinite().all()


def test_a_newcomers_last_sample_joins_too():
    options = {"model": normed_model, "training": Training(batch_size=4)}
    run = simulation("ditto", images((8, 8)), rounds=1, **options).run()
    x = torch.randn(5, 6)
    y = torch.arange(5) % 4
    assert run.adapt((x, y))(x).isfinite().all()
    with sentence(
        r"samples: client 2 \(1 samples, batch_size 4\) has a batch of one sample"
    ):
        run.adapt((x[:1], y[:1]))


# numbers --------------------------------------------------------------------
def test_numpys_numbers_are_numbers(tmp_path):
    half = np.float32(0.5)
    one = np.int64(1)
    training = Training(half, np.int64(4), one, schedule=lambda r, n: np.float32(1))
    options = {
        "clip": half,
        "evaluated": np.int64(2),
        "seed": np.int64(3),
        "participation": half,
    }
    alg = pflcore.FedAvg(server_lr=half)
    run = simulation(
        alg, FIVES, model=normed_model, training=training, rounds=one, **options
    )
    json.dumps(run.run().header)
    run.save(tmp_path)
    again = simulation(
        alg, FIVES, model=normed_model, training=training, rounds=one, **options
    )
    assert again.restore(tmp_path).state.round == 1
    assert pflcore.Server(pflcore.FedAvg(), nn.Linear(2, 2), 2).join(one) == 1


# error messages -------------------------------------------------------------
PAIRS = [(torch.randn(8, 6), torch.arange(8) % 4)] * 2


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: pflcore.ops.pairwise_sqdist([torch.ones(3)]), "torch.stack"),
        (lambda: losses(data=Federation.from_clients(PAIRS)), r"split\(test=0\.2\)"),
        (
            lambda: simulation().run().predict(0, torch.randn(3, 7)),
            r"x: expected samples \[B",
        ),
        (lambda: simulation("FedDAW"), "did you mean 'feddwa'"),
        (
            lambda: pflcore.pack([{1: torch.ones(2)}]),
            "client 0: expected .* a dict of tensors by name",
        ),
        (lambda: losses(torch.compile(linear())), "give its _orig_mod"),
    ],
)
def test_what_messages_advise(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_algorithms_in_any_spelling():
    assert simulation("FedDWA").header()["algorithm"] == "feddwa"
    assert simulation("LG-FedAvg").header()["algorithm"] == "lg_fedavg"
