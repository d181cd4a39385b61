"""Motley's protocol: splits that leak nothing, grids that cannot see test data, records that
resume."""

import pytest
import torch
from doors import synthetic_clusters
from methods import FineTune
from parts.tuning import PROTOCOLS, TRAINING, model
from torch import nn

from pflcore import ALGORITHMS, Training, cross_silo, evaluate, tune
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


@pytest.fixture(scope="module")
def data():
    return synthetic_clusters(n=4, groups=1, samples=20, classes=3, dim=5, held_out=20)


def sentence(error):
    text = str(error.value)
    assert text.count(". ") == 0 and "\n" not in text
    return text


def test_tuning_takes_names_and_functions_and_refuses_what_changes_nothing(data):
    p = cross_silo(data, val=0.2, test=0.2)
    tuned = tune(
        p,
        lambda: nn.Linear(5, 3),
        "fedavg",
        Training(batch_size=10),
        {"training.lr": [0.1, 1e-6]},
        2,
    )
    assert tuned.best.candidate.training.lr == 0.1
    with pytest.raises(TypeError, match=r"^protocol: .*cross_silo") as e:
        tune(data, lambda: nn.Linear(5, 3), "fedavg", Training(), {}, 2)
    sentence(e)
    for key, word in (("server_lr", "is no option of LocalOnly"), ("lr", "training.lr")):
        with pytest.raises(ValueError, match=word) as e:
            candidates(ALGORITHMS["local"](), Training(), {key: [0.1, 0.2]})
        sentence(e)
