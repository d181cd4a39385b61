"""Reports, records and exports hold the numbers that are computed by hand.

The cases are the bounds of "most", "many" and "last", runs of several rounds, and runs
that evaluate other clients than the first.
"""

import csv
import math

import pytest
from entry_points import sentence
from parts.results import cells, line
from parts.user import simulation
from small import images

from pflcore import Evaluation, History
from pflcore.lab.results.table import table
from pflcore.simulation import record as records
from pflcore.simulation.callbacks import EarlyStopping, Stop


def rounds(*changes, n=4):
    """Quiet rounds 1, 2, ... of all clients, each with these changes."""
    quiet = {"cohort": list(range(n)), "relative_update_norm": [1.0] * n}
    return [
        line(r, [0.5] * n, **{**quiet, **change}) for r, change in enumerate(changes, 1)
    ]


def concerns(*changes):
    return list(History({}, rounds(*changes)).problems())


# problems of a run ------------------------------------------------------------


def test_nothing_is_said_of_a_quiet_run():
    assert concerns({}, {}) == []


@pytest.mark.parametrize("lost, named", [(1, False), (2, False), (3, True)])
def test_half_of_the_rounds_are_not_most(lost, named):
    """A client that was dropped in most of its rounds is named.

    The client took part in four rounds, and it was absent from a fifth.
    """
    dropped = [{"dropped": [2]}] * lost
    quiet = [{}] * (4 - lost)

    problems = concerns(*dropped, *quiet, {"cohort": [0, 1, 3]})

    assert [words[:13] for words in problems] == ["client(s) [2]"] * named


def test_the_last_evaluation_names_infinite_losses():
    inf = {"eval": {"loss": [1.0, math.inf], "clients": [1, 3]}}
    fine = {"eval": {"loss": [1.0, 2.0], "clients": [1, 3]}}

    (problem,) = concerns(fine, inf, {"eval": None})

    assert problem.startswith("the last loss of client(s) [3] is inf")
    assert concerns(inf, fine, {"eval": None}) == []


@pytest.mark.parametrize("ratio, named", [(1e6, False), (1.01e6, True)])
def test_a_runaway_is_named_with_its_round(ratio, named):
    far = {"relative_update_norm": [1.0, 3.0, 1.0, 1.0]}
    farther = {"relative_update_norm": [1.0, 1.0, ratio, None]}

    problems = concerns({}, farther, far)

    want = ["client 2's update was 1.01e+06 times the median"] * named
    assert [words[:47] for words in problems] == want
    assert all("of round 2;" in words for words in problems)


# records ----------------------------------------------------------------------


def run_of(*changes, **header):
    head = {"algorithm": "fedavg", "n": 4, "rounds": len(changes), "seed": 0, **header}
    (run,) = records.group_runs([{"header": head}, *rounds(*changes)])
    return run


def test_outliers_have_their_largest_ratio_and_rounds():
    run = run_of(
        {"cohort": [1, 3], "relative_update_norm": [30.0, 1.0]},
        {"relative_update_norm": [1.0, 50.0, 20.0, None]},
        {"relative_update_norm": [20.5, 21.0, 1.0, 1.0]},
    )

    assert run.outliers() == {1: (50.0, 3), 0: (20.5, 1)}
    assert "client 1 by up to 50 times the median (3 rounds)" in table([run])


def test_values_by_the_names_of_clients():
    run = History({"n": 3, "names": ["a", "b", "c"]})
    assert run.by_name([5, 6, 7]) == {"a": 5, "b": 6, "c": 7}
    assert run.by_name([5, 6], [2, 0]) == {"c": 5, "a": 6}
    assert History({"n": 2}).by_name([5, 6]) == {0: 5, 1: 6}
    with sentence("values: expected 2 of them"):
        run.by_name([5], [0, 1])
    with sentence("ids: expected clients with different names"):
        History({"names": ["a", "a"]}).by_name([5, 6])


def test_a_table_names_the_three_farthest_movers():
    run = run_of({"relative_update_norm": [30.0, 60.0, 40.0, 50.0]})

    (note,) = (text for text in table([run]).splitlines() if "moved far" in text)

    assert note.index("client 1 ") < note.index("client 3 ") < note.index("client 2 ")
    assert "client 0" not in note and "(1 round) and 1 more" in note


def test_bytes_sent_include_the_round_itself():
    run = run_of({"bytes_down": 1}, {"bytes_up": 0}, {})

    assert run.cumulative_bytes() == [425, 1025, 2049]


def test_notes_count_void_rounds_and_dropped_clients():
    run = run_of({"void": True}, {"dropped": [0, 1]}, {"void": True, "dropped": [1]})

    note = cells(table([run]), "fedavg")["note"]

    assert note == "2 void rounds, 3 times a client was dropped"


def test_clipped_clients_are_counted_once():
    run = run_of({"clipped": [0, 1]}, {"clipped": [1]})

    assert (
        cells(table([run]), "fedavg")["note"] == "the updates of 2 clients were clipped"
    )


@pytest.mark.parametrize("planned, note", [(2, ""), (3, "2 of 3 rounds")])
def test_a_run_is_whole_with_its_last_round(planned, note):
    run = run_of({}, {}, rounds=planned)

    assert cells(table([run]), "fedavg")["note"] == note
    assert run.complete is (planned == 2)


def test_a_curve_is_the_clients_own():
    seen = {"loss": [1.0] * 2, "size": [5, 5], "clients": [1, 3]}
    run = run_of(
        {"eval": {"accuracy": [0.1, 0.2], **seen}},
        {"eval": {"accuracy": [0.3, 0.4], **seen}},
    )

    assert run.curve(3) == ([1, 2], [0.2, 0.4])
    assert run.curve(1) == ([1, 2], [0.1, 0.3])
    assert all(map(math.isnan, run.curve(2)[1]))


@pytest.mark.parametrize(
    "every, last, want", [(1, 2, 35.0), (1, 3, 30.0), (2, 2, 40.0)]
)
def test_the_mean_of_the_last_rounds(every, last, want):
    """The mean of the last rounds counts the evaluated ones among them.

    The accuracies are 10, 20, 30 and 40 %. Where every second round is evaluated, only
    the last one counts among the last two.
    """
    lines = [{"eval": {"accuracy": [r / 10] * 4, "size": [5] * 4}} for r in range(1, 5)]
    for record in lines[: 4 * (every - 1) : every]:
        record["eval"] = None

    row = cells(table([run_of(*lines)], last=last), "fedavg")

    assert float(row[f"mean of last {last}"]) == want
    assert row["final"] == row["best\\*"] == "40.00"


# exports ----------------------------------------------------------------------


def exported(tmp_path, evaluated, **options):
    data = images((7, 20, 31, 12))
    evaluation = Evaluation(clients=evaluated, train_loss=True)
    history = simulation(data=data, rounds=2, evaluation=evaluation, **options).run()
    history.to_csv(tmp_path / "clients.csv", per="client")
    with open(tmp_path / "clients.csv") as file:
        return history, list(csv.DictReader(file))


def test_a_table_names_the_evaluated_clients(tmp_path):
    history, rows = exported(tmp_path, 2, participation=0.5)
    drawn = history.rounds[0]["eval"]["clients"]

    assert drawn != [0, 1]
    assert [int(row["client"]) for row in rows] == drawn * 2
    first, second = history.rounds
    records_of_rows = [first, first, second, second]
    for record, row in zip(records_of_rows, rows, strict=True):
        took_part = int(row["client"]) in record["cohort"]
        assert took_part == (row["took_part"] == "True")


def test_each_clients_row_holds_its_own_numbers(tmp_path):
    history, rows = exported(tmp_path, None)

    for key in ("loss", "accuracy", "train_loss", "size"):
        want = [v for r in history.rounds for v in r["eval"][key]]
        assert [float(row[key]) for row in rows] == pytest.approx(want)


def test_events_name_the_evaluated_clients(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history, _ = exported(tmp_path, 2)
    history.to_tensorboard(tmp_path / "events", clients=True)

    seen = history.rounds[-1]["eval"]
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    names = [
        name for name in events.Tags()["scalars"] if name.startswith("eval/loss/client")
    ]
    assert sorted(names) == sorted(f"eval/loss/client {i}" for i in seen["clients"])
    for i, loss in zip(seen["clients"], seen["loss"], strict=True):
        (_, last) = events.Scalars(f"eval/loss/client {i}")
        assert (last.step, last.value) == (2, pytest.approx(loss, rel=1e-6))


# early stopping ---------------------------------------------------------------


def stopped_at(losses, **options):
    """The round in which the losses end a run, and the best."""
    stop = EarlyStopping(**options)
    for round, loss in enumerate(losses, 1):
        try:
            stop(round, {"eval": None if loss is None else {"loss": [loss]}})
        except Stop:
            return round, stop.round
    return None, stop.round


@pytest.mark.parametrize(
    "losses, options, want",
    [
        ([3, 2, 2, 2, 1], {"patience": 2}, (4, 2)),  # an equal loss is not better
        ([3, 2, 2, 1, 1], {"patience": 2}, (None, 4)),  # better: counts anew
        # Only evaluations count, not rounds.
        ([3, 2, None, 2, None, 2], {"patience": 2}, (6, 2)),
        # A loss is better by more than min_delta.
        ([3, 2.5, 2], {"patience": 1, "min_delta": 0.5}, (2, 1)),
        ([3, 2.4, 1.9, 1.8], {"patience": 1, "min_delta": 0.5}, (3, 2)),
        ([math.nan, 3, math.nan, math.nan], {"patience": 2}, (4, 2)),
        ([3, 4], {"patience": 1, "key": "loss"}, (2, 1)),
    ],
)
def test_early_stopping_counts_evaluations_without_gain(losses, options, want):
    assert stopped_at(losses, **options) == want
