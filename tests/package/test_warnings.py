"""A warning names the line of the caller of pflcore."""

import warnings

import pytest
from parts.user import simulation
from small import images
from torch import nn

from pflcore import Simulation, Training

WILD = Training(lr=1e200, batch_size=8)


def momentum():
    training = Training(momentum=0.9)
    return Simulation("pfedme", nn.Linear(6, 4), images(), training, rounds=1).run()


CALLS = {
    "private: the model has no batch_norm": lambda: simulation("fedbn", rounds=1),
    "private: the whole model is private": lambda: simulation(
        "fedper", model=nn.Linear(6, 4), rounds=1
    ),
    "FedAMP: the others' weights exceed 1": lambda: simulation(
        "fedamp", rounds=1
    ).run(),
    "fedavg, seed 0, stopped early": lambda: simulation(rounds=5, training=WILD).run(),
    "PFedMe: its local steps": momentum,
}


@pytest.mark.parametrize("words", CALLS)
def test_a_warning_names_the_callers_line(words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[words]()
    (warning, *_) = [w for w in caught if str(w.message).startswith(words)]
    assert "pflcore/" not in warning.filename.rpartition("/tests/")[2]
    assert "/tests/" in warning.filename
