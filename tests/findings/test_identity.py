"""What a run is: other data, models, clients or losses are another run, whatever their names."""

import pytest
import torch
from small import grouped
from torch import nn

from pflcore import Federation, Simulation, Training
from pflcore.results.record import group
from pflcore.results.table import table


def federation(seed):
    gen = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randn(12, 3, generator=gen), torch.randint(0, 2, (12,), generator=gen))
        for _ in range(3)
    ]
    return Federation.from_arrays(parts, test=parts, classes=2)


def lines(data, seed, model=lambda: nn.Linear(3, 2), **options):
    run = Simulation(
        "fedavg", model, data, Training(lr=0.1), rounds=1, seed=seed, **grouped(options)
    )
    return [{"header": run.header()}, *run.run().lines()]


class Rectified(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)


class Squashed(Rectified):
    """Another model of the same size."""


def smoothed(much, seed):
    return lines(federation(0), seed, loss=nn.CrossEntropyLoss(label_smoothing=much))


@pytest.mark.parametrize(
    "runs",
    [
        lambda: lines(federation(0), 0) + lines(federation(1), 1),
        lambda: lines(federation(0), 0) + lines(federation(0), 1, clients=[0]),
        lambda: lines(federation(0), 0) + lines(federation(0), 1, evaluated=[0]),
        lambda: lines(federation(0), 0, Rectified) + lines(federation(0), 1, Squashed),
        lambda: smoothed(0.1, 0) + smoothed(0.3, 1),
    ],
    ids=["data", "clients", "evaluated", "model", "loss"],
)
def test_other_data_clients_or_losses_are_no_other_seeds_of_one_run(runs):
    assert "seeds" not in table(group(runs()))


def test_seeds_of_one_run_are_seeds():
    assert "over 2 seeds" in table(group(lines(federation(0), 0) + lines(federation(0), 1)))
