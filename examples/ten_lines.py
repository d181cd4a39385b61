"""Simulates federated learning with your own model, data and logger.

The data are one `Dataset` for each client. The simulation itself is the last ten lines.

Symbols: T evaluated rounds, N clients.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pflcore import Federation, Simulation, Training


def my_clients() -> list[TensorDataset]:
    """Datasets of eight clients.

    The last four clients swap the labels of the two classes. Therefore no single model
    is right for all clients.
    """
    generator = torch.Generator().manual_seed(0)
    datasets = []
    for i in range(8):
        x = torch.randn(200, 2, generator=generator)
        same_sign = x[:, 0] * x[:, 1] > 0
        swapped = i >= 4
        y = (same_sign ^ swapped).long()
        datasets.append(TensorDataset(x, y))
    return datasets


def my_model() -> nn.Module:
    """A small network for points of two coordinates."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


def my_logger(round: int, record: dict[str, Any]) -> None:
    """Prints client 0's accuracy and the uploaded bytes every ten rounds."""
    if record["eval"] and round % 10 == 0:
        accuracy = record["eval"]["accuracy"][0]
        print(
            f"round {round:2}: accuracy of client 0 {accuracy:.2f}, "
            f"{record['bytes_up']} bytes sent up"
        )


data = Federation.from_clients(my_clients()).split(test=0.25)
training = Training(lr=0.5, batch_size=16, epochs=2)
for name in ("fedavg", "waffle"):
    simulation = Simulation(name, my_model, data, training, rounds=30)
    history = simulation.run(on_round=my_logger)
    rounds, accuracy = history.series("accuracy")  # [T], [T, N]
    print(f"{name}: client 0 ends at {accuracy[-1, 0]:.2f}")
