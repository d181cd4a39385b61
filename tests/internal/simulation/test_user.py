"""What a user brings (an algorithm, a loss, metrics, a schedule, callbacks), and what comes out
(tables, events, models, newcomers)."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from methods import Ditto
from parts.user import TRAINING, Mine, simulation
from small import images, tiny_model
from torch import nn

from pflcore import cross_silo, for_everyone, tune
from pflcore.algorithms.lookup import algorithm_of, class_of, name_of
from pflcore.metrics import f1, metrics_of
from pflcore.train.losses import CRITERIA, loss_of, squared


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("mine")
    module.Mine, module.number = Mine, 3
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


# an algorithm ---------------------------------------------------------------


def test_an_algorithm_by_name_class_instance_or_place(package):
    assert isinstance(algorithm_of("ditto"), Ditto) and isinstance(
        algorithm_of(Ditto, lam=0.5), Ditto
    )
    mine = Mine()
    assert (
        algorithm_of(mine) is mine
        and class_of("mine:Mine") is Mine
        and name_of("mine:Mine") == name_of(mine) == "Mine"
    )
    assert name_of(Ditto) == name_of("ditto") == "ditto"
    for given in (Mine, mine, "mine:Mine"):
        assert simulation(given, rounds=1).run().header["algorithm"] == "Mine"
    tuned = tune(
        cross_silo(images((20, 30))),
        tiny_model(),
        Mine,
        TRAINING,
        {"server_lr": [0.5, 1.0]},
        rounds=1,
    )
    assert type(tuned.best.candidate.algorithm) is Mine
    assert len(for_everyone("waffle", tiny_model(), images(), TRAINING, rounds=1).rounds) == 1


def test_torchs_losses_with_default_options_take_the_fast_path():
    assert loss_of(nn.CrossEntropyLoss()) is CRITERIA["cross_entropy"] and loss_of(
        nn.MSELoss()
    ) is squared is loss_of(F.mse_loss)
    for loss in (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.ones(4)),
        nn.CrossEntropyLoss(ignore_index=1),
    ):
        assert loss_of(loss) is loss
    scores, y = torch.randn(5, 1), torch.randn(5)
    assert loss_of(nn.MSELoss())(scores, y) == F.mse_loss(scores[:, 0], y)  # not [5, 1] against [5]


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (["acc"], "for labels there are auc, f1, balanced_accuracy, or a function of .* got 'acc'"),
        (["mae"], "'mae' is for targets"),
        ("auc", r"expected a list such as \['auc', my_function\]"),
        ([3], r"expected a name or a function of \(scores, labels\), got 3"),
        ({"loss": min}, "'loss' is recorded anyway"),
        (["f1", f1], "'f1' is there twice"),
    ],
)
def test_what_is_no_metric_is_one_sentence(metrics, sentence):
    pytest.importorskip("sklearn")
    with pytest.raises((ValueError, TypeError), match=f"^metrics: .*{sentence}"):
        metrics_of(metrics, classes=True)


def test_a_history_as_events(tmp_path):
    from pflcore.results.export import scalars

    history = simulation().run()
    assert (
        scalars(history.rounds[0], clients=True)["eval/accuracy/client 1"]
        == history.rounds[0]["eval"]["accuracy"][1]
    )
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from pflcore import TensorBoard

    history.to_tensorboard(tmp_path / "after")
    simulation().run(TensorBoard(tmp_path / "during"))
    for name in ("after", "during"):
        events = EventAccumulator(str(tmp_path / name)).Reload()
        assert [e.step for e in events.Scalars("eval/accuracy")] == [1, 2, 3]
        assert events.Scalars("eval/accuracy")[-1].value == pytest.approx(
            history.series()[1][-1].mean().item()
        )
