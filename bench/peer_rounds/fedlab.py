"""Rounds of FedLab's servers and clients, by its own code in a checkout."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bench.peer_rounds.problem import LR, ROUNDS, SIZES, client_samples, model, row_of


class FullBatches:
    """The problem's samples in the form of FedLab's partitioned data sets."""

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader[object]:
        """All samples of a client as one batch."""
        x, y = client_samples()[client]
        return DataLoader(TensorDataset(x, y), len(x))


def fednova_model(checkout: Path, epochs: Sequence[int], option: str) -> Tensor:
    """The model [P] of FedLab's FedNova after the rounds.

    Args:
        checkout: The folder of FedLab.
        epochs: Epochs of each client in a round, which are its steps.
        option: The server's option, "weighted_com" for the paper's formula with equal
            shares.
    """
    folder = str(checkout)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module("fedlab.contrib.algorithm.fednova")
    server = module.FedNovaServerHandler(model(), ROUNDS, len(SIZES), 1.0)
    server.setup_optim(option)
    trainer = module.FedNovaSerialClientTrainer(model(), len(SIZES))
    trainer.setup_dataset(FullBatches())
    for _ in range(ROUNDS):
        uploads = []
        for client, count in enumerate(epochs):
            trainer.setup_optim(count, max(SIZES), LR)
            trainer.local_process(server.downlink_package, [client])
            uploads.extend(trainer.uplink_package)
        server.global_update(uploads)
    return row_of(server.model)
