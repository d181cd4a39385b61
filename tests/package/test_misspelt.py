"""The error of a misspelt name gives the nearest name first.

The list of all names follows.
"""

import pytest
import torch
from entry_points import sentence
from parts.user import simulation
from small import images
from torch import nn

from pflcore import (
    Adversary,
    Hardware,
    Robustness,
    Simulation,
    Training,
    cross_silo,
    personalize,
    tune,
)
from pflcore.data import partition
from pflcore.lab.cli import main
from pflcore.lab.data import federation_of
from pflcore.nn.models import model_for

ROWS = [torch.eye(3)[i] for i in range(3)]
LABELS = torch.arange(40) % 4


def grid(choices):
    protocol = cross_silo(images((20, 20)))
    return tune(protocol, nn.Linear(6, 4), "ditto", Training(), choices, rounds=1)


MISSPELT = [
    (lambda: simulation("fedavgg"), "algorithm: got 'fedavgg', did you mean 'fedavg'"),
    (lambda: simulation("FedDAW"), "algorithm: got 'FedDAW', did you mean 'feddwa'"),
    (
        lambda: personalize(ROWS, "fedamp", sigmma=1),
        "FedAMP: got .'sigmma'., did you mean 'sigma'",
    ),
    (
        lambda: federation_of("fashion-mnist"),
        "data: got .*, did you mean 'fashion_mnist'",
    ),
    (lambda: federation_of("vehicles"), "data: got 'vehicles', did you mean 'vehicle'"),
    (
        lambda: partition("dirichlett", LABELS, 3),
        "partition: got .*, did you mean 'dirichlet'",
    ),
    (
        lambda: partition("dirichlet", LABELS, 3, alfa=1),
        "partition dirichlet: got .*'alpha'",
    ),
    (
        lambda: model_for("linaer", (6,), 3),
        "model: got 'linaer', did you mean 'linear'",
    ),
    (lambda: Hardware(engine="vmapp"), "engine: got 'vmapp', did you mean 'vmap'"),
    (
        lambda: Training(local_optimizer="Adam"),
        "local_optimizer: got .*, did you mean 'adamw'",
    ),
    (
        lambda: Adversary("signflip", [0]),
        "attack: got 'signflip', did you mean 'sign_flip'",
    ),
    (
        lambda: tune(
            cross_silo(images((20, 20))),
            nn.Linear(6, 4),
            "ditto",
            Training(),
            {"la": [1]},
            1,
        ),
        "grid: got 'la', did you mean 'lam'",
    ),
]


@pytest.mark.parametrize("call, words", MISSPELT)
def test_a_misspelt_name_is_told_what_was_meant(call, words):
    with sentence(f"{words}.*[?] Expected "):
        call()


@pytest.mark.parametrize(
    "words, told",
    [
        ("rnu fedavg", "command: got 'rnu', did you mean 'run'?"),
        ("run fedavgg", "algorithm: got 'fedavgg', did you mean 'fedavg'?"),
        ("run fedavg --data mnist5", "data: got 'mnist5', did you mean 'mnist5k'?"),
        ("run fedavg --partition dirichlett", "did you mean 'dirichlet'?"),
        ("run fedavg --model lenet", "model: got 'lenet', did you mean 'lenet5'?"),
    ],
)
def test_the_command_line_says_the_same(words, told, capsys):
    pytest.importorskip("tyro")
    assert main(words.split()) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("given", ["nothing", "x", "", 3])
def test_what_is_like_no_name_gets_the_list_alone(given):
    with sentence("(engine|workers): expected"):
        Hardware(engine=given)


def test_a_noun_has_its_article():
    with sentence("adversary: expected an Adversary, got 3"):
        Robustness(adversary=3)
    with sentence("evaluation: expected an Evaluation, got 3"):
        Simulation("fedavg", nn.Linear(6, 4), images(), evaluation=3)
    with sentence("robustness: expected a Robustness, got 3"):
        Simulation("fedavg", nn.Linear(6, 4), images(), robustness=3)
