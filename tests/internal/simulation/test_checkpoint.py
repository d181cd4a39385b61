"""Checkpoints: when they are written, their format, and runs that break off inside."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from small import images, tiny_model

from pflcore import Checkpoint, History, Simulation, Stop, Training, cli
from pflcore.results import pictures
from pflcore.results.record import Record
from pflcore.simulation import checkpoint

DATA = images((8, 20, 30, 9, 12))


TRAINING = Training(lr=0.1, batch_size=5)


OPTIONS: dict[str, Any] = {"rounds": 4, "participation": 0.6}


def make(name: Any = "fedavg", **options: Any) -> Simulation:
    return Simulation(name, tiny_model(), DATA, **{"training": TRAINING, **OPTIONS, **options})


def broken_off(simulation: Simulation, after: int) -> History:
    """Plays so many rounds and stops."""

    def stop(round: int, _: object) -> None:
        if round == after:
            raise Stop("Enough.")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulation.run(stop)


def saved(folder: Path, after: int = 2, **options: Any) -> Path:
    simulation = make(**options)
    broken_off(simulation, after)
    simulation.save(folder)
    return folder


def sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text and text.endswith(".") and "Traceback" not in text
    return text


def test_a_run_leaves_checkpoints_as_it_was_told(tmp_path, monkeypatch):
    at = []
    monkeypatch.setattr("pflcore.simulation.kept.save", lambda run, keeper: at.append(run.state.round))
    make(rounds=7).run(checkpoint=Checkpoint(tmp_path, every=3, minutes=0))
    assert at == [0, 3, 6, 7]  # the beginning and the end in any case
    at.clear()
    clock = iter(range(0, 10**6, 40))
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: float(next(clock)))  # 40 seconds a look
    keeper = Checkpoint(tmp_path, minutes=2)
    keeper._since = 0.0
    make(rounds=9).run(checkpoint=keeper)
    assert at[0] == 0 and at[-1] == 9 and 3 <= len(at) <= 6
    for wrong in ({"every": -1}, {"every": 1.5}, {"minutes": -1.0}, {"minutes": math.nan}):
        with pytest.raises(ValueError, match=r"every|minutes") as e:
            Checkpoint(tmp_path, **wrong)
        sentence(e)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("whole"), name="waffle")


def test_one_of_a_later_format_is_refused(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(ValueError, match="expected format 2, got 1") as e:
        checkpoint.load(tmp_path)
    sentence(e)


SMALL = ["--data", "synthetic_linear", "--n", "5", "--lr", "0.01", "--quiet"]


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tyro")
    monkeypatch.setattr(pictures, "draw", lambda *_: [])


def lines_of(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("damage", ["checkpoint", "record"])
def test_a_damaged_folder_is_left_as_it_is(damage, tmp_path, no_pictures, capsys, monkeypatch):
    argv = ["run", "fedavg", *SMALL, "--rounds", "9", "--out", str(tmp_path), "--resume", "--checkpoint-every", "2"]
    interrupt(monkeypatch, 5)
    assert cli.main(argv) == 130
    (path,) = tmp_path.glob("checkpoint-*") if damage == "checkpoint" else [tmp_path / "record.jsonl"]
    path.write_bytes(path.read_bytes().replace(b"0", b"1"))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.undo()
    monkeypatch.setattr(pictures, "draw", lambda *_: [])
    capsys.readouterr()
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and ("damaged" if damage == "checkpoint" else "not the record") in err, err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def interrupt(monkeypatch: pytest.MonkeyPatch, round: int) -> None:
    """Ctrl-C when the record gets the line of this round."""
    write = Record.write

    def break_off(self: Record, line: Any) -> None:
        if line.get("round") == round:
            raise KeyboardInterrupt
        write(self, line)

    monkeypatch.setattr(Record, "write", break_off)


def test_ctrl_c_and_a_run_for_each_client_go_on(tmp_path, no_pictures, monkeypatch):
    argv = ["run", "waffle", *SMALL, "--target", "all", "--rounds", "4", "--checkpoint-every", "1", "--resume"]
    assert cli.main([*argv, "--out", str(tmp_path / "whole")]) == 0
    from pflcore import step as real

    calls = iter(range(10**6))

    def step(*a: Any, **k: Any) -> Any:
        if next(calls) == 10:
            raise KeyboardInterrupt
        return real(*a, **k)

    monkeypatch.setattr("pflcore.simulation.loop.step", step)
    assert cli.main([*argv, "--out", str(tmp_path / "broken")]) == 130
    assert cli.main([*argv, "--out", str(tmp_path / "broken")]) == 0
    assert next(calls) == 11 + 4 * 5 - 10, "what had been played was played again"
    assert lines_of(tmp_path / "broken") == lines_of(tmp_path / "whole")
    assert not (tmp_path / "broken" / "checkpoint-targets").exists()
