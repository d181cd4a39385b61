"""Motley's protocol: splits that leak nothing, grids that cannot see test data, records that
resume."""

import pytest
import torch
from methods import FineTune
from parts.tuning import PROTOCOLS, TRAINING, model

from pflcore import evaluate, tune
from pflcore.tuning import candidates, finetuning_curve


# grids ----------------------------------------------------------------------
def test_a_grid_is_every_combination_with_late_options_fastest():
    grid = {"finetune_epochs": [1, 2], "server_lr": [0.5, 1.0], "training.lr": [0.1]}
    found = candidates(FineTune(), TRAINING, grid)
    assert [(c.algorithm.server_lr, c.algorithm.finetune_epochs, c.training.lr) for c in found] == [
        (0.5, 1, 0.1), (0.5, 2, 0.1), (1.0, 1, 0.1), (1.0, 2, 0.1)]  # fmt: skip
    assert (
        found[0].trained == found[1].trained != found[2].trained
        and found[0].training.batch_size == 8
    )
    for bad in (
        {"learning": [1]},
        {"lr": [0.1]},
        {"server_lr": []},
        {"training.size": [1]},
        {"server_lr": "0.1"},
    ):
        with pytest.raises(ValueError, match=r"^grid: .*\.$"):
            candidates(FineTune(), TRAINING, bad)


def test_all_lengths_of_fine_tuning_come_from_one_pass():
    p = PROTOCOLS["device"]()
    grid = {"finetune_lr": [0.05, 0.5], "finetune_epochs": [0, 1, 2, 5]}
    tuned = tune(p, model(), FineTune(), TRAINING, grid, 3)
    setup, state = tuned.states(tuned.trials[0].candidate, 0)
    for t in tuned.trials:
        alone = evaluate(setup._replace(algorithm=t.candidate.algorithm), state, "val", p.choose)[
            "accuracy"
        ]
        assert torch.equal(t.values[0][p.choose], alone[p.choose])
    both = setup._replace(
        algorithm=FineTune(lr_grid=(0.05, 0.5), choose="client", finetune_epochs=5)
    )
    curve = finetuning_curve(both, state, "val", p.choose)
    assert curve.shape == (2, 6, 12) and torch.equal(curve[0, 0].isnan(), curve[1, 3].isnan())
    torch.testing.assert_close(curve[1, 5], tuned.trials[-1].values[0], equal_nan=True)
