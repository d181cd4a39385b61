"""What a run says at its end: who was dropped, whose loss is infinite, who ran away."""

import warnings

import pytest
import torch
from small import grouped
from torch import nn

from pflcore import Adversary, Federation, Simulation, Training

GEN = torch.Generator().manual_seed(0)
PARTS = [(torch.randn(12, 4, generator=GEN), torch.randn(12, generator=GEN)) for _ in range(4)]


def played(scale=1.0, **options):
    parts = [(x * scale if i == 3 else x, y) for i, (x, y) in enumerate(PARTS)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Simulation(
            "fedavg",
            nn.Linear(4, 1),
            Federation.from_arrays(parts, test=parts),
            Training(lr=0.01),
            rounds=3,
            **grouped(options),
        ).run()
    return [str(w.message) for w in said if w.category is RuntimeWarning]


def test_a_quiet_run_says_nothing():
    assert played() == []


def test_a_client_that_is_dropped_in_every_round_is_named_once():
    said, *_ = played(1e25)
    assert "client(s) [3] were dropped in most of their rounds" in said and "lower lr" in said


def test_a_loss_of_infinity_is_named():
    parts = [(x, y * (1e30 if i == 2 else 1)) for i, (x, y) in enumerate(PARTS)]
    data = Federation.from_arrays(PARTS, test=parts)
    with pytest.warns(RuntimeWarning, match=r"the last loss of client\(s\) \[2\] is inf"):
        Simulation("fedavg", nn.Linear(4, 1), data, Training(lr=0.01), rounds=2).run()


def test_a_runaway_update_is_named_once_with_clip():
    (said,) = played(adversary=Adversary("scale", [1], 1e8))
    assert "client 1's update was" in said and "clip" in said
    assert played(adversary=Adversary("scale", [1], 1e3)) == []
