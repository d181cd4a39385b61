"""Records survive damage to files, and tables show their numbers."""

import csv
import json
import math
import os

import pytest
import torch
from entry_points import sentence, spread
from parts.results import N, a_long_run, a_run, cells, line, write
from parts.user import simulation
from places import tabled
from small import images, layers
from torch import nn

from pflcore.lab.results.table import table
from pflcore.simulation import record as records
from pflcore.simulation.record import read


# records --------------------------------------------------------------------
def test_numbers_that_are_not_finite_are_strict_json(tmp_path):
    odd = line(1, [0.5, math.nan, math.inf, None], train_loss=math.nan)
    odd["eval"] |= {"rmse": [1.0, math.inf, 2.0, 3.0]}
    path = write(tmp_path / "deep" / "r.jsonl", [{"header": {"f": math.sqrt}}, odd])
    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (run,) = read(path)
    assert run.rounds[0]["train_loss"] is None and run.header["f"] == "sqrt"
    accuracy = run.last_values("accuracy")
    assert accuracy[0] == 0.5 and accuracy[1:].isnan().all()
    assert math.isinf(run.last_values("rmse")[1])  # a mean does not leave it out


def test_a_file_cut_off_anywhere_is_readable(tmp_path):
    path = write(tmp_path / "r.jsonl", a_run(rounds=3))
    whole = path.read_bytes()
    ends = [i for i, b in enumerate(whole) if b == ord("\n")]
    for cut in range(ends[0] + 1, len(whole), 97):
        path.write_bytes(whole[:cut])
        assert len(read(path)[0].rounds) == sum(e <= cut for e in ends) - 1
    # A whole run follows a run whose last line is cut off.
    path.write_bytes(whole[: ends[1] + 20] + b"\n" + whole)
    with pytest.warns(UserWarning, match=r"1 damaged line\(s\)"):
        assert [len(r.rounds) for r in read(path)] == [1, 3]


def test_an_existing_record_is_kept(tmp_path):
    path = write(tmp_path / "record.jsonl", a_long_run())
    before = path.read_bytes()
    with sentence(".*new file"):
        records.RecordWriter(path)
    assert path.read_bytes() == before
    records.RecordWriter(path, overwrite=True).close()
    assert path.read_bytes() == b""


def test_a_place_without_a_record_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "r.jsonl", tmp_path):
        with sentence("path: .* can be written"):
            records.RecordWriter(path)
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        with sentence("path: .*neither"):
            read(path)


def test_a_line_that_a_full_disk_cut_off_is_finished_before_the_next(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with records.RecordWriter(tmp_path / "r.jsonl") as record:
        record.write({"header": {}})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
            with pytest.raises(OSError, match="large"):
                record.write(line(1, [0.5] * N))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert record.path.stat().st_size == 40
        record.write({"stopped": "The disk was full."})
    (run,) = read(record.path)
    assert len(run.rounds) == 1 and run.stopped == "The disk was full."


@pytest.mark.parametrize("second", [{"algorithm": "ditto"}, {"seed": 1}, {}])
def test_rounds_whose_header_is_lost_are_no_more_rounds_of_the_run_before(
    tmp_path, second
):
    path = write(tmp_path / "r.jsonl", [*a_run(), *a_run(**second, shift=0.1)])
    whole = read(path)
    lines = path.read_text().splitlines()
    lines[13] = lines[13][:40]  # the second header
    lines[20] = lines[20][:40]
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(
        UserWarning, match=r"2 damaged line\(s\) are left out \(14, 21\)"
    ):
        first, lost = read(path)
    assert first.rounds == whole[0].rounds
    assert len(lost.rounds) == 11 and not lost.header
    assert lost.algorithm == second.get("algorithm", "waffle")


def test_long_lists_come_back_as_they_were(tmp_path):
    (run,) = read(write(tmp_path / "record.jsonl", a_long_run()))
    head, first, _ = a_long_run()
    got = run.rounds[1]
    assert run.header == head["header"]
    for key in ("cohort", "relative_update_norm", "dropped"):
        assert got[key] == first[key]
    assert got["eval"]["loss"] == [None if v != v else v for v in first["eval"]["loss"]]
    report = first["report"]
    want = spread(report["weight"], report["index"], 1500)
    torch.testing.assert_close(run.weights([2])[1][0], want)


def test_a_record_that_goes_on_has_the_bytes_of_one_that_never_stopped(tmp_path):
    lines = [*a_long_run(), {"stopped": "It was enough.", "unfinished": False}]
    whole = write(tmp_path / "whole.jsonl", lines)
    path = tmp_path / "record.jsonl"
    write(path, lines[:2])
    with records.RecordWriter(path, goes_on=True) as record:
        for one in lines[2:]:
            record.write(one)
    assert path.read_bytes() == whole.read_bytes()
    again = write(tmp_path / "again.jsonl", read(whole)[0].lines())
    assert again.read_bytes() == whole.read_bytes()


# tables ---------------------------------------------------------------------
def tell(*runs, **options):
    """The table of these runs, each a list of its lines."""
    all_lines = [line for lines in runs for line in lines]
    return table(records.group_runs(all_lines), **options)


ONE = r"""best\* | 27.00
final | 27.00
mean of last 10 | 22.50
client 1: best\* | 22.00
client 1: mean of last 10 | 17.50
std over clients | 11.18
worst decile | 12.00
bytes sent | 12.0 KiB
note | """


def test_the_table_of_one_run():
    text = tell(a_run())
    for row in ONE.splitlines():
        column, value = row.split(" | ")
        assert cells(text, "waffle")[column] == value
    assert "selected on test data" in text and "digits, 4 clients, 12 rounds" in text
    cut = a_run(eval_split="val")
    cut[0]["header"]["rounds"] = 150
    text = tell(cut)
    assert "| 12 of 150 rounds" in text and "of 12" not in text
    assert "Validation accuracy" in text and "selected on validation data;" in text
    assert tell(a_run(), a_run(data="mnist5k")).count("### ") == 2


@pytest.mark.parametrize("rounds, last, named", [(2, 10, 2), (12, 10, 10), (12, 3, 3)])
def test_the_mean_of_the_last_rounds_names_how_many_they_are(rounds, last, named):
    text = tell(a_run(rounds=rounds), last=last)
    want = sum(range(rounds - named + 1, rounds + 1)) / named + 15
    assert cells(text, "waffle")[f"mean of last {named}"] == f"{want:.2f}"
    assert text.count("mean of last") == 2  # of all clients, and of the target


def test_a_run_of_fewer_rounds_has_no_mean_of_more():
    """A run of fewer rounds has no mean of the last ones.

    The same holds for several seeds of which one has fewer rounds.
    """
    text = tell(
        a_run(), a_run("ditto", rounds=4), a_run("local"), a_run("local", 1, rounds=3)
    )
    for algorithm, value in (("waffle", "22.50"), ("ditto", "-"), ("local", "-")):
        assert cells(text, algorithm)["mean of last 10"] == value
    assert cells(text, "ditto")["final"] == "19.00"


def test_seeds_become_mean_and_std():
    text = tell(a_run(), a_run(seed=1, shift=0.1), a_run("fedavg"))
    assert cells(text, "waffle")["final"] == "32.00 ± 7.07"
    assert (
        cells(text, "fedavg")["final"] == "27.00" and "over 2 seeds (fedavg 1)" in text
    )


# Each line: the headers of the runs, and the names' additions that tell the rows of two
# runs apart. An entry without "=" stands for rows that need no addition.
NAMESAKES = """\
[{"options": {"tie": "a", "k": 5}}, {"options": {"tie": "b", "k": 5}}] | tie=a | tie=b
[{"parameters": 36}, {"parameters": 836}] | parameters=36 | parameters=836
[{"batch_norm": "a"}, {"batch_norm": "b", "seed": 1}, {"batch_norm": "b", "seed": 2}] | batch_norm=a | batch_norm=b
[{"data_seed": 1}, {"data_seed": 2, "seed": 1}] | data_seed=1 | data_seed=2
[{"train_samples": 1}, {"train_samples": 2, "seed": 1}] | train_samples=1 | train_samples=2
[{"test_samples": 1}, {"test_samples": 2, "seed": 1}] | test_samples=1 | test_samples=2
[{"val": 1}, {"val": 2, "seed": 1}] | val=1 | val=2
[{"stream": 1}, {"stream": 3, "seed": 1}] | stream=1 | stream=3
[{"partition": "A", "seed": 1}, {"partition": "C", "seed": 1}] | a table | a table
[{"parameters": 7}, {"algorithm": "local", "parameters": 8}] | another name | another name
[{"data_seed": 0}, {"algorithm": "local", "data_seed": 7}] | data_seed=0 | data_seed=7
"""  # noqa: E501


@pytest.mark.parametrize("runs, one, other", tabled(NAMESAKES))
def test_namesakes_are_told_apart_by_what_differs(runs, one, other):
    """Runs of one algorithm under different conditions have rows of their own.

    They are not seeds of one run.
    """
    text = tell(*(a_run(**run) for run in runs)).splitlines()
    named = [
        row.split(" | ")[0]
        for row in text
        if row[:2] == "| " and "algorithm" not in row
    ]
    additions = [name.partition("(")[2].rstrip(") ") for name in named]
    assert additions == [words if "=" in words else "" for words in (one, other)]


def test_a_run_that_is_here_twice_is_no_second_seed():
    two_seeds = [*a_run("ditto"), *a_run("ditto", seed=1)]
    words = "the same run is here 2 times, and counts once"
    once = tell(a_run(), two_seeds)
    twice = tell(a_run(), a_run(), two_seeds)
    assert "over 2 seeds (waffle 1)" in once and words not in once
    assert twice.replace(f"\nwaffle, seed 0: {words}.", "").split() == once.split()
    stopped = {"stopped": "Interrupted.", "unfinished": True}
    # Of an unfinished run and a whole one, the whole one counts.
    text = tell(a_run(rounds=1), [stopped], a_run())
    assert cells(text, "waffle")["final"] == "27.00" and words in text


def test_two_runs_of_a_seed_that_differ_are_not_said_to_be_the_same():
    text = tell(a_run(), a_run(), a_run(shift=0.1))
    assert cells(text, "waffle")["final"] == "27.00"
    assert "waffle, seed 0: the same run is here 2 times, and counts once." in text
    words = "another run has this seed and other numbers, and does not count"
    assert f"waffle, seed 0: {words}; `pflcore diff` says why." in text


def test_clients_that_are_worse_off_than_with_a_baseline():
    """A client is hurt where its accuracy is below the baseline's.

    The two runs have the same seed, the same clients and the same data.
    """

    def hurt(*runs):
        return cells(tell(*runs, baseline="local"), "fedavg")["% hurt vs local"]

    def run_evaluating(algorithm, clients, **more):
        lines = a_run(algorithm, rounds=1, target=None, **more)
        lines[1]["eval"]["clients"] = clients
        return lines

    worse = a_run("fedavg", target=None)
    for one in worse[1:]:
        one["eval"]["accuracy"] = one["eval"]["accuracy"] - torch.tensor(
            [0.01, 0, -0.01, 0]
        )
    assert hurt(a_run("local"), worse) == "25.0"
    # Against the baseline of the other seed, all clients of seed 1 would be hurt.
    two = [a_run(n, s, shift=(1 - s) / 10) for s in (0, 1) for n in ("local", "fedavg")]
    assert hurt(*two) == "0.0 ± 0.0"
    first = [0, 1, 2, 3]
    fedavg = run_evaluating("fedavg", first)
    assert hurt(fedavg, run_evaluating("local", first, shift=0.5)) == "100.0"
    assert hurt(fedavg, run_evaluating("local", [1, 2, 3, 4], shift=0.5)) == "-"
    assert hurt(fedavg, run_evaluating("local", first, shift=0.5, seed=1)) == "-"
    other_data = [a_run("fedavg", data_seed=0, shift=-0.1), a_run("local", data_seed=7)]
    text = tell(*other_data, baseline="local")
    assert cells(text, "fedavg (data_seed=0)")["% hurt vs local"] == "-"
    with sentence("baseline: "):
        tell(worse, baseline="ditto")


def test_a_model_for_one_client_is_compared_on_this_client():
    waffle = a_run("waffle", target=2)
    for one in waffle[1:]:
        one["eval"]["accuracy"] = one["eval"]["accuracy"] - torch.tensor(
            [0.5, 0.5, -0.1, 0.5]
        )
    row = cells(tell(a_run("local"), waffle, baseline="local"), "waffle")
    assert row["final - local"] == "10.00" and row["% hurt vs local"] == "0.0"


def test_notes_stand_in_the_row():
    lines = [*a_run(rounds=3), {"stopped": "Everybody diverged three rounds in a row."}]
    lines[2]["void"] = True
    lines[2]["dropped"] = [0]
    lines[3]["dropped"] = [2]
    text = tell(
        lines, a_run("fedfomo", facts={"held out for validation": 0.2}), a_run("local")
    )
    want = "stopped after round 3, 1 void rounds, 2 times a client was dropped"
    assert cells(text, "waffle")["note"] == want and cells(text, "local")["note"] == ""
    assert "Everybody diverged three rounds in a row." in text
    assert cells(text, "fedfomo")["note"] == "20% of its training samples held out"


def test_a_regression_is_told_by_its_loss():
    """The table of a regression shows the loss, not the accuracy.

    The first run has no round and therefore no evaluation.
    """
    lines = a_run("mocha", target=None)
    for one in lines[1:]:
        one["eval"] = {"loss": [0.01 / one["round"]] * N, "size": [1] * N}
    text = tell(
        a_run("a")[:1], [{"stopped": "Interrupted.", "unfinished": True}], lines
    )
    assert cells(text, "mocha")["best\\*"] == "0.00083" and "Test loss" in text
    assert cells(text, "a")["final"] == "-"


def test_a_diverged_client_never_improves_a_table(tmp_path):
    rounds = [[1.0, 3.0, math.nan], [1.0, math.inf, math.nan]]
    seen = [
        {"round": i, "eval": {"loss": v, "size": [5, 5, 0]}}
        for i, v in enumerate(rounds, 1)
    ]
    header = {"header": {"algorithm": "fedavg", "n": 3, "rounds": 2, "seed": 0}}
    (got,) = read(write(tmp_path / "r.jsonl", [header, *seen]))
    # The client without samples is left out.
    assert got.curve() == ([1, 2], [2.0, math.inf])
    row = cells(table([got]), "fedavg")
    assert list(row.values())[1:6] == ["2.00000", "-", "-", "-", "-"]
    assert row["note"] == "1 client has no finite loss"


# histories ------------------------------------------------------------------


def played(seed, data=0, model="Linear 6 4, ReLU", smoothing=0.1, **options):
    options |= {"loss": nn.CrossEntropyLoss(label_smoothing=smoothing), "seed": seed}
    run = simulation(data=images(seed=data), model=layers(model), rounds=1, **options)
    return run.run().lines()


OTHERS = """\
{}
{"data": 1}
{"clients": [0]}
{"evaluated": [0]}
{"model": "Linear 6 4, Tanh"}
{"smoothing": 0.3}
"""


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(["other"], tabled(OTHERS))
def test_other_data_clients_or_losses_are_no_other_seeds_of_one_run(other):
    assert ("over 2 seeds" in tell(played(0), played(1, **other))) is (not other)


def test_a_history_as_a_table(tmp_path):
    history = simulation(every=2, participation=0.7).run()
    tables = []
    for per in ("round", "client"):
        history.to_csv(tmp_path / per, per=per)
        with open(tmp_path / per) as file:
            tables.append(list(csv.DictReader(file)))
    rounds, clients = tables
    seen = history.series()[1]
    counts = [(r["round"], r["clients"]) for r in rounds]
    assert counts == [("1", "2"), ("2", "2"), ("3", "2")]
    # Every second round is evaluated, and the last one.
    assert rounds[0]["mean_accuracy"] == ""
    assert [int(rounds[0][k]) for k in ("bytes_down", "bytes_up")] == [2 * 59 * 4] * 2
    assert float(rounds[1]["mean_accuracy"]) == pytest.approx(seen[0].mean().item())
    keys = [(int(c["round"]), int(c["client"])) for c in clients]
    assert keys == [(r, i) for r in (2, 3) for i in range(3)]
    took_part = [int(c["client"]) for c in clients[:3] if c["took_part"] == "True"]
    assert took_part == history.rounds[1]["cohort"]
    with sentence("per: expected 'round' or 'client', got 'seed'"):
        history.to_csv(tmp_path / "x.csv", per="seed")
    with sentence("path: expected a file that can be written"):
        history.to_csv(tmp_path / "nowhere" / "x.csv")
    pytest.importorskip("pandas")
    frame = history.to_pandas("client")
    assert frame.groupby("round")["accuracy"].mean()[3] == pytest.approx(
        seen[1].mean().item()
    )


def test_a_full_disk_leaves_the_csv_that_was_there(tmp_path):
    resource = pytest.importorskip("resource")
    history = simulation().run()
    path = tmp_path / "x.csv"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with sentence("path: expected a file that can be written, got .*large"):
            history.to_csv(path, per="client")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]


@pytest.mark.skipif(os.name == "nt", reason="no links, no pipes: not POSIX")
def test_a_link_or_a_pipe_gets_the_csv(tmp_path):
    history = simulation().run()
    target = tmp_path / "here.csv"
    link = tmp_path / "link.csv"
    link.symlink_to(target)
    history.to_csv(link)
    assert link.is_symlink() and target.read_text().startswith("algorithm,seed,round")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    history.to_csv(tmp_path / "pipe")
    assert os.read(reader, 1 << 16) == target.read_bytes()
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
