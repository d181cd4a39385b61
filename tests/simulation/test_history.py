"""A history gives its series, tables, problems and a short repr."""

import math

import pytest
import torch
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st
from parts.user import simulation
from small import images
from torch import nn

from pflcore import (
    Evaluation,
    Federation,
    History,
    Simulation,
    Training,
    cross_silo,
    tune,
)
from pflcore.lab.results import RunEnd, read
from pflcore.lab.results.table import table
from pflcore.simulation import record as records


def regression():
    """A federation whose targets are numbers."""
    gen = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(3):
        x = torch.randn(12, 6, generator=gen)
        clients.append({"train": (x, x.sum(1)), "test": (x, x.sum(1))})
    return Federation.from_clients(clients)


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
    history.end = RunEnd("stopped", "That will do.")
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


# a run that was played, and the same run read from its file ---------------------------
def read_again(history, path):
    """The history of the same run, read from a file."""
    with records.RecordWriter(path) as record:
        for one in history.lines():
            record.write(one)
    (run,) = read(path)
    return run


def same(got, want):
    """Asserts that numbers are equal, NaN to NaN."""
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


PLAYED = {
    "classes": {"algorithm": "feddwa", "evaluation": Evaluation(every=2)},
    "numbers": {"data": regression(), "model": lambda: nn.Linear(6, 1)},
    "clients": {"evaluation": Evaluation(clients=[0, 2])},
}


@pytest.mark.parametrize("options", PLAYED.values(), ids=PLAYED)
def test_a_run_read_from_its_file_tells_the_same(options, tmp_path):
    history = simulation(**options).run()

    run = read_again(history, tmp_path / "record.jsonl")

    assert type(run) is History and repr(run) == repr(history)
    assert run.keys == history.keys and run.main_metric == history.main_metric
    for key in (None, *history.keys):
        rounds, values = history.series(key)
        again = run.series(key)
        assert again[0] == rounds
        same(again[1], values)
        same(run.curve(0, key)[1], history.curve(0, key)[1])
        same(run.last_values(key), history.last_values(key))
    for one, other in zip(history.weights()[1], run.weights()[1], strict=True):
        assert torch.equal(one.double(), other)
    assert run.cumulative_bytes() == history.cumulative_bytes()
    assert run.problems() == history.problems()
    assert (run.complete, run.unfinished) == (history.complete, history.unfinished)
    assert table([run]) == table([history])
    run.to_csv(tmp_path / "a.csv")
    history.to_csv(tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


@given(st.lists(st.lists(st.floats(), min_size=2, max_size=2), min_size=1, max_size=3))
def test_losses_that_are_not_finite_read_as_they_were(losses):
    rounds = []
    for round, loss in enumerate(losses, 1):
        rounds.append({"round": round, "eval": {"loss": loss, "size": [5, 0]}})
    history = History({"n": 2}, rounds)

    (run,) = records.group_runs(history.lines())

    before = history.series("loss")[1]
    after = run.series("loss")[1]
    # A client with samples whose loss is NaN or infinite has diverged.
    assert (before[:, 0] == after[:, 0]).all() or (before[:, 0] == -math.inf).any()
    assert not after[:, 0].isnan().any()


@pytest.mark.parametrize("kind", ["stopped", "interrupted", "failed"])
def test_the_way_in_which_a_run_ended_is_read_again(kind, tmp_path):
    history = simulation(rounds=1).run()
    history.end = RunEnd(kind, "That will do.")
    run = read_again(history, tmp_path / "record.jsonl")
    for name in ("end", "interrupted", "failed", "unfinished", "stopped", "complete"):
        assert getattr(run, name) == getattr(history, name), name


def test_what_a_file_does_not_hold_is_one_sentence(tmp_path):
    run = read_again(simulation(rounds=1).run(), tmp_path / "record.jsonl")
    words = "model: expected a history with models, .* a record of a run holds no model"
    with sentence(words):
        run.model(0)
    with sentence(words):
        run.predict(0, torch.zeros(1, 6))
    with sentence(words):
        run.export(tmp_path / "models")
    with sentence("adapt: expected a history with models"):
        run.adapt(images().client(0))
    with sentence("state: expected a history with the run's state, .* a checkpoint"):
        print(run.state)
    with sentence("key: got 'acuracy', did you mean 'accuracy'"):
        run.curve(key="acuracy")
    assert not (tmp_path / "models").exists()


def test_what_was_tuned_is_a_line():
    protocol = cross_silo(images((20, 20)))
    grid = {"lam": [0.1, 1.0]}
    tuned = tune(protocol, nn.Linear(6, 4), "ditto", Training(), grid, rounds=1)
    one, two = (trial.score for trial in tuned.trials)
    tie = ", a tie with 1 more" if one == two else ""
    best = "lam 0.1" if one >= two else "lam 1.0"
    score = f"{max(one, two):.4g}"
    assert repr(tuned) == f"Tuned(2 candidates, best: {best}, score {score}{tie})"


def test_values_without_ids_are_those_of_all_clients():
    run = simulation().run()
    n = run.header["n"]
    assert list(run.by_name(range(n)).values()) == list(range(n))
    with sentence(f"values: expected one for each of the {n} clients, or their ids"):
        run.by_name(range(n - 1))
