"""Rounds of fluke's servers and clients, by its own code in a checkout."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.peer_rounds.problem import CLASSES, LR, ROUNDS, client_samples, model, row_of


def global_model_after(
    checkout: Path,
    name: str,
    method: str,
    epochs: Sequence[int],
    momentum: float = 0.0,
    **options: Any,
) -> Tensor:
    """The server's model [P] after the rounds, weighed by samples.

    Args:
        checkout: The folder of fluke.
        name: The module below fluke.algorithms.
        method: The name that its classes begin with, "FedNova".
        epochs: Epochs of each client in a round, which are its steps.
        momentum: The momentum of the clients' SGD.
        options: Options of the clients.
    """
    folder = str(checkout)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(f"fluke.algorithms.{name}")
    optimizer = {"name": torch.optim.SGD, "lr": LR, "momentum": momentum}
    clients = []
    for i, (x, y) in enumerate(client_samples()):
        samples = module.FastDataLoader(x, y, num_labels=CLASSES, batch_size=len(x))
        client = getattr(module, f"{method}Client")(
            index=i,
            train_set=samples,
            test_set=None,
            optimizer_cfg=module.OptimizerConfigurator(optimizer),
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=epochs[i],
            persistency=False,
            **options,
        )
        clients.append(client)
    server = getattr(module, f"{method}Server")(model(), None, clients, weighted=True)
    for client in clients:
        client.set_channel(server.channel)
    for round_number in range(1, ROUNDS + 1):
        server.broadcast_model(clients)
        for client in clients:
            client.local_update(round_number)
        models = list(server.receive_client_models(clients, state_dict=False))
        server.aggregate(clients, models)
    return row_of(server.model)
