"""Shared settings of the tests of separate servers and clients."""

import io

import torch
from small import layers, near

from pflcore import Evaluation, Hardware, Simulation, Training, testing
from pflcore.algorithms import ALGORITHMS, FedAvg

ROUNDS = 3
SEED = 5
TRAINING = Training(
    lr=0.05, batch_size=7, epochs=1, schedule=lambda round, rounds: 1 / round
)
SETTING = {"hardware": Hardware("loop", 1), "seed": SEED}
DATA = testing.Case(FedAvg()).data
OPTIONS = {"knnper": {"k": 3}, "clustered_fl": {"first": 0, "eps1": 10.0, "eps2": 0.0}}


def algorithm(name):
    return ALGORITHMS[name](**OPTIONS.get(name, {}))


def model():
    return layers("Linear 6 5, ReLU, Linear 5 3").double()


def bn_model():
    return layers("Linear 6 5, BatchNorm1d 5, ReLU, Linear 5 3").double()


def again(what):
    """The same object after saving and loading."""
    file = io.BytesIO()
    torch.save(what, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def agree(one, other, x=None):
    """Asserts that two models agree, with their scores on x if given."""
    if x is not None:
        near(other(x), one(x))
    if "view_w" in one.state_dict():
        near(other.state_dict()["view_w"], one.state_dict()["view_w"])


def whole(alg, model, participation=1.0, **options):
    """The simulation whose results separate servers and clients must give."""
    options = {"evaluation": Evaluation(every=0), **SETTING, **options}
    return Simulation(alg, model, DATA, TRAINING, ROUNDS, participation, **options)
