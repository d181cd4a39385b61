"""A history gives its series, tables, problems and a short repr."""

import pytest
import torch
from entry_points import sentence
from parts.user import simulation
from small import images
from torch import nn

from pflcore import Evaluation, Federation, Simulation


def unheld():
    return Federation.from_clients([(torch.ones(8, 6), torch.arange(8) % 3)] * 2)


@pytest.mark.parametrize(
    "key, words",
    [
        (
            "acuracy",
            "key: got 'acuracy', did you mean 'accuracy'[?] Expected one of",
        ),
        ("Loss", "key: got 'Loss', did you mean 'loss'"),
        ("auc", "key: expected one of loss, accuracy, f1, size, got 'auc'"),
    ],
)
def test_a_misspelt_series_is_refused(key, words):
    pytest.importorskip("sklearn")
    history = simulation(rounds=1, evaluation=Evaluation(metrics=("f1",))).run()
    with sentence(words):
        history.series(key)


def test_a_series_of_what_no_round_has_yet_is_empty():
    history = simulation(rounds=2, evaluation=Evaluation(every=0)).run()
    rounds, values = history.series("accuracy")
    assert rounds == [] and len(values) == 0


@pytest.mark.parametrize("per", ["", "clients", "Round"])
def test_rows_are_of_rounds_or_clients(per, tmp_path):
    history = simulation(rounds=1).run()
    with sentence("per: "):
        history.to_csv(tmp_path / "x.csv", per=per)
    assert not (tmp_path / "x.csv").exists()


def test_a_history_and_its_models_are_a_line_each():
    history = simulation("ditto", rounds=2).run()
    assert len(repr(history)) < 200 and repr(history).startswith("History(ditto, data ")
    assert "3 clients, 2 rounds, accuracy 0." in repr(history)
    named = simulation(data=images().standardize(), rounds=1).run().model(1)
    assert repr(named) == "Personalized(fedavg, 59 weights, logits, of raw features)"
    history.stopped = "That will do."
    assert repr(history).endswith("stopped: 'That will do.')")
    assert repr(type(history)({})) == "History(0 rounds)"


def test_concerns_are_a_list():
    assert simulation(rounds=1).run().problems() == []
    data = images((10,) * 8)
    data.x[data.index["train"][5]] *= 200
    history = simulation(data=data, model=nn.Linear(6, 4), rounds=1).run()
    history.rounds[0]["eval"]["loss"][2] = float("inf")
    (problem,) = history.problems()
    assert problem.startswith("the last loss of client(s) [2] is inf")


# the split for the evaluation -----------------------------------------------------
@pytest.mark.parametrize("clients", [None, 1, [0]])
def test_a_run_that_is_never_evaluated_needs_no_split_for_it(clients):
    never = Evaluation(every=0, clients=clients)
    run = simulation(data=unheld(), rounds=2, evaluation=never)
    history = run.run()
    assert [r["eval"] for r in history.rounds] == [None, None]
    assert run.evaluate("train")["accuracy"].isfinite().sum() == (
        2 if clients is None else 1
    )
    with sentence("split: expected one of train, got 'test'"):
        run.evaluate("test")


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_split_that_lacks_is_the_one_that_is_advised(split):
    with sentence(
        f"evaluation.split: .*[(]hold samples out with split[(]{split}=0.2[)][)]"
    ):
        simulation(data=unheld(), evaluation=Evaluation(split=split))
    data = eval(f"data.split({split}=0.2)", {"data": unheld()})
    simulation(data=data, rounds=1, evaluation=Evaluation(split=split)).run()


def test_a_misspelt_split_is_no_reason_to_hold_samples_out():
    with sentence(
        "evaluation.split: got 'tets', did you mean 'test'[?] Expected one of"
    ):
        simulation(evaluation=Evaluation(split="tets"))
    with sentence("evaluation.split: expected one of train, test, got 'dev'"):
        Simulation(
            "fedavg", nn.Linear(6, 4), images(), evaluation=Evaluation(split="dev")
        )
