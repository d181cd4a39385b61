"""Which candidate fine-tuning takes, by a table of what they are worth; also where one of them has diverged."""

import math
from types import SimpleNamespace

import pytest
import torch
from methods import FineTune

D64 = torch.float64


@pytest.mark.parametrize(
    ("choose", "val", "zero", "expected"),
    [
        ("client", [[0.80, 0.70], [0.85, 0.72], [0.83, 0.75], [0.82, 0.65], [0.88, 0.60], [0.90, 0.55]], [0.1, 0.1], [6, 3]),
        ("global", [[0.80, 0.70], [0.85, 0.72], [0.83, 0.75], [0.82, 0.65], [0.88, 0.60], [0.90, 0.55]], [0.1, 0.1], [3, 3]),
        ("client", [[0.5, 0.5], [0.7, 0.5], [0.6, 0.5], [0.7, 0.5], [-math.inf, 0.5], [0.7, 0.5]], [0.6, 0.5], [2, 0]),  # ties: the earlier
    ],
)
def test_selection_by_hand(choose, val, zero, expected, monkeypatch):
    """Candidate c = 1 .. 6 (two step sizes, three lengths) is the row of c's; 0 is the untuned model."""
    rows = [torch.full((2, 1), float(c), dtype=D64) for c in range(7)]
    table = torch.tensor([zero, *val], dtype=D64)
    monkeypatch.setattr("pflcore.algorithms.finetune.lengths", lambda *_: ((c > 3, (c - 1) % 3 + 1, rows[c]) for c in range(1, 7)))
    monkeypatch.setattr("pflcore.algorithms.finetune.value", lambda local, w: table[w[:, 0].long(), torch.arange(2)])
    local = SimpleNamespace(buffers=torch.empty(2, 0))
    assert FineTune(choose=choose).chosen(rows[0], local, None)[:, 0].tolist() == expected
