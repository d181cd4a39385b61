"""A simulation in ten lines: one's own model, one Dataset per client, one's own
logger."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pflcore import Federation, Simulation, Training


def my_clients() -> list[TensorDataset]:
    """Eight clients; the last four name the two classes the other way round, so that
    one model for all must fail."""
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(200, 2, generator=generator) for _ in range(8)]
    return [
        TensorDataset(x, ((x[:, 0] * x[:, 1] > 0) ^ (i >= 4)).long())
        for i, x in enumerate(points)
    ]


def my_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


def my_logger(round: int, record: dict[str, Any]) -> None:
    if record["eval"] and round % 10 == 0:
        print(
            f"round {round:2}: accuracy of client 0 "
            f"{record['eval']['accuracy'][0]:.2f}, {record['bytes_up']} bytes sent up"
        )


data = Federation.from_clients(my_clients()).split(test=0.25)
for name in ("fedavg", "waffle"):
    simulation = Simulation(
        name, my_model, data, Training(lr=0.5, batch_size=16, epochs=2), rounds=30
    )
    history = simulation.run(on_round=my_logger)
    rounds, accuracy = history.series("accuracy")  # [T], [T, N]
    print(f"{name}: client 0 ends at {accuracy[-1, 0]:.2f}")
