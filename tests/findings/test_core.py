"""Findings that wait for the one description of a run, and for fields of a federation that say how it was made."""

import numpy as np
import pytest
import torch
from torch import nn

from pflcore import Federation, Simulation, Training
from pflcore.results.record import group
from pflcore.results.table import table


def federation(seed):
    gen = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(12, 3, generator=gen), torch.randint(0, 2, (12,), generator=gen)) for _ in range(3)]
    return Federation.from_arrays(parts, test=parts, classes=2)


def lines(data, seed, model=lambda: nn.Linear(3, 2), **options):
    run = Simulation("fedavg", model, data, Training(lr=0.1), rounds=1, seed=seed, **options)
    return [{"header": run.header()}, *run.run().lines()]


def smoothed(much, seed):
    return lines(federation(0), seed, loss=nn.CrossEntropyLoss(label_smoothing=much))


@pytest.mark.xfail(strict=True, reason="core")
@pytest.mark.parametrize(
    "runs",
    [
        lambda: lines(federation(0), 0) + lines(federation(1), 1),
        lambda: lines(federation(0), 0) + lines(federation(0), 1, clients=[0]),
        lambda: lines(federation(0), 0) + lines(federation(0), 1, eval_clients=[0]),
        lambda: smoothed(0.1, 0) + smoothed(0.3, 1),
    ],
    ids=["data", "clients", "eval_clients", "loss"],
)
def test_other_data_clients_or_losses_are_no_other_seeds_of_one_run(runs):
    assert "seeds" not in table(group(runs()))


@pytest.mark.xfail(strict=True, reason="core")
def test_what_standardized_data_were_scaled_by_is_kept():
    data = federation(0).standardized()
    x = federation(0).client(0)[0]
    scaling = data.scaling  # type: ignore[attr-defined]
    torch.testing.assert_close((x - scaling.mean[0]) / scaling.deviation[0], data.client(0)[0])


@pytest.mark.xfail(strict=True, reason="core")
def test_clients_keep_their_names():
    data = Federation.from_table(np.eye(4, dtype=np.float32), np.arange(4) % 2, ["north", "south", "north", "south"])
    assert list(data.names) == ["north", "south"]  # type: ignore[attr-defined]
