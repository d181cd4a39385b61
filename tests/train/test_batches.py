"""A last batch of one sample, numbers of numpy, and what messages advise."""

import json

import numpy as np
import pytest
import torch
from doors import sentence
from small import ENGINES, equals, grouped, images, normed_model
from torch import nn

import pflcore
from pflcore import Federation, Simulation, Training

FIVES = images((5, 5, 5))


def linear():
    return nn.Linear(6, 4)


def losses(model=normed_model, data=None, engine="auto", **training):
    data, how, hardware = data or FIVES, Training(**training), pflcore.Hardware(engine)
    run = Simulation("local", model, data, how, rounds=2, hardware=hardware).run()
    return run.series("loss")[1][-1]


# batch norm -----------------------------------------------------------------
@ENGINES
def test_a_last_batch_of_one_joins_the_one_before_for_batch_norm(engine):
    """Of five samples four and one are one batch of five."""
    four, five = (losses(batch_size=b, epochs=2, engine=engine) for b in (4, 5))
    equals(four, five)
    sizes = images((9, 8, 13))
    assert losses(data=sizes, batch_size=4, engine=engine).isfinite().all()


def test_torchs_way_is_an_option_and_stays_that_of_other_models():
    with sentence(r"data: client 0 \(5 samples, batch_size 4\) has a batch of one sample"):
        losses(batch_size=4, join_last=False)
    with sentence(r"data: client 1 \(1 samples, batch_size 4\) has a batch of one sample"):
        losses(data=images((5, 1, 5)), batch_size=4)
    one, other = (losses(linear, batch_size=4, join_last=join) for join in (True, False))
    equals(one, other)
    assert not torch.equal(one, losses(linear, batch_size=5))
    left_out = losses(data=images((8, 9, 7)), batch_size=4, drop_last=True, join_last=False)
    assert left_out.isfinite().all()


def test_a_newcomers_last_sample_joins_too():
    run = Simulation("ditto", normed_model, images((8, 8)), Training(batch_size=4), rounds=1).run()
    x, y = torch.randn(5, 6), torch.arange(5) % 4
    assert run.adapt((x, y))(x).isfinite().all()
    with sentence(r"samples: client 2 \(1 samples, batch_size 4\) has a batch of one sample"):
        run.adapt((x[:1], y[:1]))


# numbers --------------------------------------------------------------------
def test_numpys_numbers_are_numbers(tmp_path):
    half, one = np.float32(0.5), np.int64(1)
    how = Training(half, np.int64(4), one, schedule=lambda r, n: np.float32(1))
    options = {"clip": half, "evaluated": np.int64(2), "seed": np.int64(3), "participation": half}
    alg = pflcore.FedAvg(server_lr=half)
    run = Simulation(alg, normed_model, FIVES, how, rounds=one, **grouped(options))
    json.dumps(run.run().header)
    run.save(tmp_path)
    again = Simulation.load(tmp_path, model=normed_model, data=FIVES, training=how)
    assert again.state.round == 1
    assert pflcore.Server(pflcore.FedAvg(), nn.Linear(2, 2), 2).join(one) == 1


# sentences ------------------------------------------------------------------
X, Y = torch.randn(8, 6), torch.arange(8) % 4


def clients(y, test=0.5):
    data = Federation.from_clients([(X, y)] * 2)
    return data.split(test=test) if test else data


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: pflcore.ops.pairwise_sqdist([torch.ones(3)]), "torch.stack"),
        (lambda: losses(data=clients(Y, 0)), r"split\(test=0\.2\)"),
        (lambda: losses(data=clients(Y + 1)), "count them from 0"),
        (lambda: losses(data=clients(Y[:, None])), "make labels of one"),
        (
            lambda: Simulation("fedavg", normed_model, FIVES).run().predict(0, torch.randn(3, 7)),
            r"x: expected samples \[B",
        ),
        (lambda: Simulation("FedDAW", normed_model, FIVES), "did you mean 'feddwa'"),
        (
            lambda: pflcore.pack([{1: torch.ones(2)}]),
            "client 0: expected .* a dict of tensors by name",
        ),
        (lambda: losses(torch.compile(linear())), "give its _orig_mod"),
        (lambda: losses(torch.jit.script(linear())), "scripted or traced"),
    ],
)
def test_what_messages_advise(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_algorithms_in_any_spelling():
    assert Simulation("FedDWA", normed_model, FIVES).name == "feddwa"
    assert Simulation("LG-FedAvg", normed_model, FIVES).name == "lg_fedavg"
