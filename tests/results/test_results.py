"""Records survive what happens to files, and tables say what the records hold."""

import csv
import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from parts.results import N, a_run, cells, line, write
from parts.user import simulation
from small import grouped, with_test
from torch import nn

from pflcore import (
    Federation,
    Simulation,
    Training,
)
from pflcore.results import table as report
from pflcore.results.record import Record, group, read
from pflcore.results.table import table


def test_a_record_comes_back(tmp_path):
    (run,) = read(write(tmp_path / "deep" / "record.jsonl", a_run()))
    assert (
        run.algorithm == "waffle"
        and run.target == 1
        and len(run.rounds) == 12
        and run.stopped is None
    )
    rounds, mean = run.curve()
    assert rounds == list(range(1, 13)) and mean[-1] == pytest.approx(0.27)
    assert run.curve(client=3)[1][0] == pytest.approx(0.31)
    assert run.sent()[-1] == 12 * 1024
    assert run.weights()[1][0].tolist() == [0.25] * 4


def test_numbers_that_are_not_finite_are_strict_json(tmp_path):
    path = write(
        tmp_path / "r.jsonl",
        [
            {"header": {"f": math.sqrt}},
            line(1, [0.5, math.nan, math.inf, None], train_loss=math.nan),
        ],
    )
    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (run,) = read(path)
    assert run.rounds[0]["train_loss"] is None and run.header["f"] == "sqrt"
    values = run.values("accuracy")[1][0]
    assert values[0] == 0.5 and values[1:].isnan().all()


def test_a_file_cut_off_anywhere_is_readable(tmp_path):
    path = write(tmp_path / "r.jsonl", a_run(rounds=3))
    whole = path.read_bytes()
    ends = [i for i, b in enumerate(whole) if b == ord("\n")]
    for cut in range(ends[0] + 1, len(whole), 97):
        path.write_bytes(whole[:cut])
        (run,) = read(path)
        complete = sum(e <= cut for e in ends) - 1
        assert len(run.rounds) == complete
    path.write_bytes(whole[: ends[1] + 20] + b"\n" + whole)  # a second run after a torn one
    assert [len(r.rounds) for r in read(path)] == [1, 3]


@pytest.mark.deep("another process")
def test_a_killed_writer_leaves_every_line_it_wrote(tmp_path):
    code = """
        import os, sys
        from pflcore.results.record import Record
        record = Record(sys.argv[1])
        record.write({"header": {"algorithm": "fedavg"}})
        for r in range(1, 4):
            record.write({"round": r, "eval": {"accuracy": [0.5], "loss": [1.0], "size": [1]}})
        os._exit(9)
    """
    path = tmp_path / "r.jsonl"
    assert (
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(path)], check=False
        ).returncode
        == 9
    )
    assert [r["round"] for r in read(path)[0].rounds] == [1, 2, 3]


def test_an_existing_record_is_kept(tmp_path):
    path = write(tmp_path / "r.jsonl", a_run())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="new file"):
        Record(path)
    assert path.read_bytes() == before
    with Record(path, overwrite=True) as record:
        record.write({"header": {}})
    assert len(read(path)[0].rounds) == 0


def test_an_unwritable_place_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "r.jsonl", tmp_path):
        with pytest.raises(ValueError, match="can be written") as e:
            Record(path)
        assert "\n" not in str(e.value)


def test_reading_nothing_is_one_sentence(tmp_path):
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        with pytest.raises(ValueError, match="neither"):
            read(path)


def test_the_table_of_one_run():
    text = report.table(group(a_run()))
    row = cells(text, "waffle")
    assert row["best\\*"] == "27.00" and row["final"] == "27.00"
    assert row["mean of last 10"] == "22.50"
    assert row["client 1: best\\*"] == "22.00" and row["client 1: mean of last 10"] == "17.50"
    assert row["std over clients"] == "11.18" and row["worst decile"] == "12.00"
    assert row["bytes sent"] == "12.0 KiB" and row["note"] == ""
    assert "selected on test data" in text and "digits, 4 clients, 12 rounds" in text


def test_seeds_become_mean_and_std():
    runs = group([*a_run(seed=0), *a_run(seed=1, shift=0.1), *a_run("fedavg", seed=0)])
    text = report.table(runs)
    assert cells(text, "waffle")["final"] == "32.00 ± 5.00"
    assert cells(text, "fedavg")["final"] == "27.00"
    assert "over 2 seeds" in text


def test_namesakes_are_told_apart_by_what_differs():
    runs = group(
        [*a_run(options={"tie": "closed", "k": 5}), *a_run(options={"tie": "open", "k": 5})]
    )
    assert list(report.label(runs)) == ["waffle (tie=closed)", "waffle (tie=open)"]


def test_other_conditions_are_not_other_seeds():
    runs = group(
        [
            *a_run(participation=1.0),
            *a_run(participation=0.2, seed=1),
            *a_run(participation=0.2, seed=2),
        ]
    )
    assert {k: len(v) for k, v in report.label(runs).items()} == {
        "waffle (participation=1.0)": 1,
        "waffle (participation=0.2)": 2,
    }


@pytest.mark.parametrize("what", ["data_seed", "train_samples", "test_samples", "val"])
def test_other_cuts_of_the_data_are_not_other_seeds(what):
    text = report.table(group([*a_run(**{what: 100}), *a_run(**{what: 200}, seed=1)]))
    assert "±" not in text and f"waffle ({what}=100)" in text


def test_hurt_is_against_the_baseline_of_the_same_seed():
    """Of the same seed nobody is worse off; against the other seed's everybody would be in the
    second run."""
    runs = group(
        [
            line
            for s in (0, 1)
            for name in ("local", "fedavg")
            for line in a_run(name, seed=s, shift=(1 - s) / 10)
        ]
    )
    assert cells(report.table(runs, baseline="local"), "fedavg")["% hurt vs local"] == "0.0 ± 0.0"


def test_selection_on_validation_data_is_called_so():
    text = report.table(group(a_run(eval_split="val")))
    assert "Validation accuracy" in text and "selected on validation data;" in text


def test_a_line_that_was_not_finished_costs_only_itself(tmp_path, monkeypatch):
    record = Record(tmp_path / "r.jsonl")
    record.write({"header": {}})
    honest = record._file

    class Full:
        def write(self, data):
            honest.write(data[:10])
            raise OSError("the disk is full")

    monkeypatch.setattr(record, "_file", Full())
    with pytest.raises(OSError, match="full"):
        record.write(line(1, [0.5] * N))
    monkeypatch.setattr(record, "_file", honest)
    record.write({"stopped": "The disk was full."})
    assert read(record.path)[0].stopped == "The disk was full."


@pytest.mark.parametrize("second", [{"algorithm": "ditto"}, {"seed": 1}, {}])
def test_rounds_whose_header_is_lost_are_no_more_rounds_of_the_run_before(tmp_path, second):
    path = write(tmp_path / "r.jsonl", [*a_run(), *a_run(**second, shift=0.1)])
    whole = read(path)
    lines = path.read_text().splitlines()
    lines[13] = lines[13][:40]  # the second header
    lines[20] = lines[20][:40]
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match=r"2 damaged line\(s\) are left out \(14, 21\)"):
        first, lost = read(path)
    assert first.rounds == whole[0].rounds and len(lost.rounds) == 11 and not lost.header
    assert lost.algorithm == second.get("algorithm", "waffle")
    assert report.table([first]) in report.table([first, lost])


def test_a_run_that_is_here_twice_is_no_second_seed():
    once, twice = (
        group([*a_run(), *a_run("ditto"), *a_run("ditto", seed=1)]),
        group([*a_run(), *a_run(), *a_run("ditto"), *a_run("ditto", seed=1)]),
    )
    assert "over 2 seeds (waffle 1)" in report.table(once)
    assert (
        report.table(twice)
        .replace("\nwaffle, seed 0: the same run is here 2 times, and counts once.", "")
        .split()
        == report.table(once).split()
    )


def test_settings_do_not_share_a_table():
    text = report.table(group([*a_run(), *a_run(data="mnist5k")]))
    assert text.count("### ") == 2


def test_clients_that_are_worse_off_than_with_a_baseline():
    worse = a_run("fedavg")
    for one in worse[1:]:
        one["eval"]["accuracy"] = one["eval"]["accuracy"] - torch.tensor([0.01, 0, -0.01, 0])
    runs = group([*a_run("local"), *worse])
    text = report.table(runs, baseline="local")
    assert (
        cells(text, "fedavg")["% hurt vs local"] == "25.0"
        and cells(text, "local")["% hurt vs local"] == "0.0"
    )
    with pytest.raises(ValueError, match="baseline"):
        report.table(runs, baseline="ditto")


def test_a_run_that_stopped_says_so():
    lines = [*a_run(rounds=3), {"stopped": "Everybody diverged three rounds in a row."}]
    lines[2]["void"] = True
    lines[3]["dropped"] = [0, 2]
    text = report.table(group(lines))
    assert (
        cells(text, "waffle")["note"]
        == "stopped after round 3, 1 void rounds, 2 times a client was dropped"
    )
    assert "Everybody diverged three rounds in a row." in text


def test_what_a_method_held_out_stands_in_its_row():
    lines = a_run("fedfomo", facts={"held out for validation": 0.2})
    text = report.table(group([*a_run(), *lines]))
    assert (
        cells(text, "fedfomo")["note"] == "20% of its training samples held out"
        and cells(text, "waffle")["note"] == ""
    )


def test_a_regression_is_told_by_its_loss():
    lines = a_run("mocha", target=None)
    for one in lines[1:]:
        one["eval"] = {"accuracy": None, "loss": [0.01 / one["round"]] * N, "size": [1] * N}
    text = report.table(group(lines))
    assert cells(text, "mocha")["best\\*"] == "0.00083" and "Test loss" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 52, "4096.0 TiB"),
    ],
)
def test_bytes_for_people(size, text):
    assert report.human(size) == text


def test_other_models_are_not_other_seeds():
    runs = group(
        a_run("fedavg", 0, parameters=36)
        + a_run("fedavg", 0, shift=0.1, parameters=836)
        + a_run("fedavg", 1, shift=0.1, parameters=836)
    )
    text = report.table(runs)
    assert cells(text, "fedavg (parameters=36)")["final"] == "27.00"
    assert (
        cells(text, "fedavg (parameters=836)")["final"] == "37.00 ± 0.00"
        and "the same run" not in text
    )


def test_a_whole_run_counts_before_one_that_was_interrupted():
    runs = group(
        [*a_run(rounds=1), {"stopped": "Interrupted.", "unfinished": True}, *a_run(rounds=12)]
    )
    text = report.table(runs)
    assert cells(text, "waffle")["final"] == "27.00" and "is here 2 times, and counts once" in text


def test_nobody_is_compared_with_somebody_else():
    def run(seed, clients, **more):
        lines = a_run(seed=seed, rounds=1, target=None, **more)
        lines[1]["eval"]["clients"] = clients
        return lines

    def hurt(*lines):
        text = report.table(group([one for some in lines for one in some]), baseline="local")
        return cells(text, "waffle")["% hurt vs local"]

    assert hurt(run(0, [0, 1, 2, 3]), run(0, [0, 1, 2, 3], algorithm="local", shift=0.5)) == "100.0"
    assert hurt(run(0, [0, 1, 2, 3]), run(0, [1, 2, 3, 4], algorithm="local", shift=0.5)) == "-"
    assert hurt(run(0, [0, 1, 2, 3]), run(1, [0, 1, 2, 3], algorithm="local", shift=0.5)) == "-"


def test_names_with_dots_have_side_files_of_their_own(tmp_path):
    for name, value in (("run.0.1", 1.0), ("run.0.2", 2.0)):
        lines = a_run(rounds=1)
        lines[1]["eval"] = {"accuracy": torch.full((1500,), value), "size": torch.ones(1500)}
        write(tmp_path / f"{name}.jsonl", lines)
    assert [
        read(tmp_path / f"run.0.{i}.jsonl")[0].last("accuracy").mean().item() for i in (1, 2)
    ] == [1.0, 2.0]


def test_blocks_of_a_matrix_are_means_over_rows():
    weights = torch.full((5, 5), 0.2)
    (run,) = group([a_run()[0], line(1, torch.zeros(4), report={"weights": weights})])
    (blocks,) = run.weights(most=2)[1]
    assert blocks.sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_an_error_that_is_not_finite_is_left_out_of_no_mean():
    lines = a_run(rounds=1)
    lines[1]["eval"] |= {"rmse": [1.0, math.inf, 2.0, 3.0], "auc": [0.5, math.nan, 0.5, 0.5]}
    (run,) = group(lines)
    assert math.isinf(run.last("rmse")[1]) and math.isnan(run.last("auc")[1])


def test_a_regression_whose_first_run_has_no_evaluation():
    lines = [a_run("a")[0], {"stopped": "Interrupted.", "unfinished": True}, *a_run("b", rounds=1)]
    del lines[-1]["eval"]["accuracy"]
    assert cells(report.table(group(lines)), "b")["final"] == "1.00000"


def test_runs_of_other_data_share_no_curve_and_no_comparison():
    runs = group([*a_run("fedavg", partition="A"), *a_run("fedavg", partition="C", seed=1)])
    assert set(report.label(runs)) == {"fedavg (partition=A)", "fedavg (partition=C)"}
    runs = group([*a_run("fedavg", data_seed=0, shift=-0.1), *a_run("local", data_seed=7)])
    assert set(report.label(runs)) == {"fedavg (data_seed=0)", "local (data_seed=7)"}
    assert (
        cells(report.table(runs, baseline="local"), "fedavg (data_seed=0)").get(
            "% hurt vs local", "-"
        )
        == "-"
    )
    assert set(report.label(group([*a_run("fedavg"), *a_run("local", parameters=7)]))) == {
        "fedavg",
        "local",
    }


def federation(seed):
    gen = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randn(12, 3, generator=gen), torch.randint(0, 2, (12,), generator=gen))
        for _ in range(3)
    ]
    return Federation.from_clients(with_test(parts, parts), classes=2)


def lines(data, seed, model=lambda: nn.Linear(3, 2), **options):
    run = Simulation(
        "fedavg", model, data, Training(lr=0.1), rounds=1, seed=seed, **grouped(options)
    )
    return [{"header": run.header()}, *run.run().lines()]


class Rectified(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)


class Squashed(Rectified):
    """Another model of the same size."""


def smoothed(much, seed):
    return lines(federation(0), seed, loss=nn.CrossEntropyLoss(label_smoothing=much))


@pytest.mark.parametrize(
    "runs",
    [
        lambda: lines(federation(0), 0) + lines(federation(1), 1),
        lambda: lines(federation(0), 0) + lines(federation(0), 1, clients=[0]),
        lambda: lines(federation(0), 0) + lines(federation(0), 1, evaluated=[0]),
        lambda: lines(federation(0), 0, Rectified) + lines(federation(0), 1, Squashed),
        lambda: smoothed(0.1, 0) + smoothed(0.3, 1),
    ],
    ids=["data", "clients", "evaluated", "model", "loss"],
)
def test_other_data_clients_or_losses_are_no_other_seeds_of_one_run(runs):
    assert "seeds" not in table(group(runs()))


def test_seeds_of_one_run_are_seeds():
    assert "over 2 seeds" in table(group(lines(federation(0), 0) + lines(federation(0), 1)))


def test_a_history_as_a_table(tmp_path):
    history = simulation(every=2, participation=0.7).run()
    history.to_csv(tmp_path / "rounds.csv")
    history.to_csv(tmp_path / "clients.csv", per="client")
    with open(tmp_path / "rounds.csv") as file:
        rounds = list(csv.DictReader(file))
    with open(tmp_path / "clients.csv") as file:
        clients = list(csv.DictReader(file))
    assert (
        [r["round"] for r in rounds] == ["1", "2", "3"]
        and rounds[0]["mean_accuracy"] == ""
        and rounds[0]["clients"] == "2"
    )
    assert float(rounds[1]["mean_accuracy"]) == pytest.approx(history.series()[1][0].mean().item())
    assert [(c["round"], c["client"]) for c in clients] == [
        (str(r), str(i)) for r in (2, 3) for i in range(3)
    ]
    assert [c["took_part"] == "True" for c in clients[:3]] == [
        i in history.rounds[1]["cohort"] for i in range(3)
    ]
    with pytest.raises(ValueError, match="per: expected 'round' or 'client', got 'seed'"):
        history.to_csv(tmp_path / "x.csv", per="seed")
    with pytest.raises(ValueError, match="path: expected a file that can be written"):
        history.to_csv(tmp_path / "nowhere" / "x.csv")
    pandas = pytest.importorskip("pandas")
    frame = history.to_pandas("client")
    assert isinstance(frame, pandas.DataFrame) and frame.groupby("round")["accuracy"].mean()[
        3
    ] == pytest.approx(history.series()[1][1].mean().item())
