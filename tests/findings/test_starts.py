"""Where a method starts, and how much of a client's own model it leaves."""

import pytest
import torch
from methods import Ensemble
from torch import nn

from pflcore import Federation, Simulation, Training, personalize

GEN = torch.Generator().manual_seed(0)
PARTS = [
    (torch.randn(8, 3, generator=GEN), torch.randint(0, 2, (8,), generator=GEN)) for _ in range(4)
]


def at_zero():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_an_ensemble_starts_where_fedavg_does():
    """A model that starts at zero does so in each of the k runs."""
    data = Federation.from_arrays(PARTS, test=PARTS, classes=2)
    assert (
        not Simulation(Ensemble(k=3), at_zero, data, Training(), rounds=1).state.server["x"].any()
    )


@pytest.mark.parametrize("method", ["fedamp", "heurfedamp"])
def test_personalize_leaves_a_client_at_least_half_of_its_own(method):
    models = torch.randn(5, 40, generator=GEN)
    others = [
        personalize(torch.cat([models[:1] + 1, models[1:]]), method)[0],
        personalize(models, method)[0],
    ]
    assert float((others[0] - others[1]).mean()) >= 0.5
