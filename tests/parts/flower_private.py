"""What the tests of flower private share."""

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

N, ROUNDS = 4, 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def moved(state, client):
    """What an app calls training: each client pulls everything towards a number of its own."""
    return {k: v if k.endswith("tracked") else v + 0.5 * (client + 1 - v) for k, v in state.items()}


def app(*mods, seen=None, drop=""):
    made = ClientApp(mods=list(mods))

    @made.train()
    def train(message, ctx):
        client = ctx.node_config["partition-id"]
        state = moved(message.content["arrays"].to_torch_state_dict(), client)
        arrays = ArrayRecord({k: v for k, v in state.items() if k != drop})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": client + 1})}),
            reply_to=message,
        )

    @made.evaluate()
    def test(message, ctx):
        if seen is not None:
            seen.setdefault(ctx.node_config["partition-id"], []).append(
                message.content["arrays"].to_torch_state_dict()
            )
        return Message(
            RecordDict({"metrics": MetricRecord({"loss": 0.0, "num-examples": 1})}),
            reply_to=message,
        )

    return made


def run(grid):
    fed = FedAvg(min_train_nodes=N, min_evaluate_nodes=N, min_available_nodes=N)
    return fed.start(grid, ArrayRecord(net().state_dict()), num_rounds=ROUNDS)


def message(**arrays):
    content = {k: ArrayRecord({n: _array(a) for n, a in v.items()}) for k, v in arrays.items()}
    return Message(RecordDict({**content, "config": ConfigRecord()}), 7, "train")


def _array(a):
    from flwr.app import Array

    return Array(np.asarray(a, np.float32))
