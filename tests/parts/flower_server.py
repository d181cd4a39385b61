"""What the tests of flower server share."""

from torch import nn

from pflcore import Client, Hardware, Training
from pflcore.algorithms import FedAvg
from pflcore.testing import Case

DATA, ROUNDS, SEED = Case(FedAvg()).data, 3, 5
N = DATA.n
TRAINING = Training(lr=0.05, batch_size=7)


def model():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def maker(alg, net=model):
    return lambda context: Client(
        alg,
        net,
        DATA.subset([int(context.node_config["partition-id"])]),
        TRAINING,
        seed=SEED,
        hardware=Hardware("loop", 1),
    )
