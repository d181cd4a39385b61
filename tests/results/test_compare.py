"""Two runs are compared in their descriptions and in their numbers."""

import copy
from dataclasses import replace

import pytest
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st
from parts.user import TRAINING, simulation
from small import images

from pflcore import Evaluation, Hardware
from pflcore.lab.results import read
from pflcore.simulation import record as records

PLAYED = simulation(rounds=3).run()


def written(history, path):
    """The history, written into a record and read again."""
    with records.RecordWriter(path) as record:
        for line in history.lines():
            record.write(line)
    (run,) = read(path)
    return run


def test_a_repeated_run_has_equal_bits(tmp_path):
    """A run that is repeated has equal bits, also where one is read from a record."""
    again = simulation(rounds=3).run()
    for other in (again, written(again, tmp_path / "r.jsonl")):
        comparison = PLAYED.compare(other)
        assert comparison.equal and comparison.description == {}
        assert comparison.round is None and comparison.num_rounds == 3
        assert "Equal bits in all 3 rounds" in repr(comparison)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"algorithm": "feddwa"}, "algorithm"),
        ({"seed": 1}, "seed"),
        ({"participation": 0.5}, "participation"),
        ({"training": replace(TRAINING, lr=0.2)}, "training.lr"),
        ({"data": images((20, 21, 22))}, "size"),
    ],
)
def test_another_argument_is_another_run(other, field):
    comparison = PLAYED.compare(simulation(rounds=3, **other).run())
    assert not comparison.equal and comparison.round == 1
    assert field in comparison.description
    assert f"{field}: " in str(comparison)


def test_the_number_of_rounds():
    comparison = PLAYED.compare(simulation(rounds=5).run())
    assert comparison.round is None and not comparison.equal
    assert comparison.num_rounds == 3 and comparison.extra_rounds == ([], [4, 5])
    assert comparison.description["rounds"] == (3, 5)
    assert "2 round(s), from 4 on, only in" in str(comparison)


def test_evaluation_changes_no_bit_of_training():
    """Rounds that one run does not evaluate are compared by their other numbers."""
    evaluation = Evaluation(every=2, clients=[1], metrics=("f1",))
    other = simulation(rounds=3, evaluation=evaluation).run()
    comparison = PLAYED.compare(other)
    assert comparison.equal
    assert {"eval_clients", "metrics"} <= {*comparison.description}


def test_another_engine_is_named():
    runs = [
        simulation(rounds=3, hardware=Hardware(engine=engine)).run()
        for engine in ("loop", "vmap")
    ]
    comparison = runs[0].compare(runs[1])
    assert comparison.description["engine"] == ("loop", "vmap")


@given(
    round=st.integers(1, 3),
    client=st.integers(0, 2),
    key=st.sampled_from(["loss", "accuracy"]),
    distance=st.floats(0.001, 10),
)
def test_the_first_number_that_differs_is_named(round, client, key, distance):
    """The round, the client and the key of a changed number are told."""
    other = copy.deepcopy(written_once())
    for line in other.rounds[round - 1 :]:
        line["eval"][key][client] += distance
    comparison = PLAYED.compare(other)
    assert comparison.round == round and comparison.description == {}
    name = f"eval.{key} of client {client}"
    (pair,) = [comparison.differences.pop(name)]
    assert pair[1] - pair[0] == pytest.approx(distance, rel=1e-9)
    assert comparison.differences == {}


def test_a_client_with_a_name_is_called_by_it():
    one, other = written_once(), written_once()
    one.header["names"] = ["north", "east", "south"]
    other.rounds[0]["eval"]["loss"][1] += 1.0
    text = str(one.compare(other))
    assert "eval.loss of client east" in text


def written_once():
    """The played run as plain lists and numbers, as a record has it."""
    (run,) = records.group_runs(PLAYED.lines())
    return run


def test_a_number_that_is_not_finite_differs():
    other = copy.deepcopy(written_once())
    other.rounds[1]["train_loss"] = None
    assert [*PLAYED.compare(other).differences] == ["train_loss"]


def test_cohorts_that_differ_are_told_first():
    others = [simulation(rounds=1, seed=s, participation=0.5).run() for s in range(4)]
    cohorts = {tuple(run.rounds[0]["cohort"]) for run in others}
    assert len(cohorts) > 1
    other = next(
        r for r in others if r.rounds[0]["cohort"] != others[0].rounds[0]["cohort"]
    )
    assert next(iter(others[0].compare(other).differences)) == "cohort"


def test_only_a_history_can_be_compared():
    with sentence("other: expected a History"):
        PLAYED.compare("o/record.jsonl")
