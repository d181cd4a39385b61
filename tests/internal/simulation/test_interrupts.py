"""Signals between the lines of a record."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn

from pflcore import Simulation, Training
from pflcore.data.synthetic import synthetic_clusters
from pflcore.results import record
from pflcore.simulation.interrupts import unbroken

ROUNDS = 5


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def made(**options: Any) -> Simulation:
    torch.manual_seed(0)
    data = synthetic_clusters(n=4, groups=1, samples=20, classes=3, dim=5, held_out=20)
    return Simulation("scaffold", nn.Linear(5, 3), data, Training(lr=0.1, batch_size=10), rounds=ROUNDS, workers=1, **options)


@pytest.mark.parametrize("when", ["before the line", "after the line"])
def test_a_record_says_what_its_stop_says(tmp_path, monkeypatch, when: str):
    write = record.Record.write

    def pressed(self: Any, line: Any) -> None:
        if line.get("round") == 3 and when == "before the line":
            press()
        write(self, line)
        if line.get("round") == 3 and when == "after the line":
            press()

    monkeypatch.setattr(record.Record, "write", pressed)
    simulation, path = made(), tmp_path / "record.jsonl"
    with record.Record(path) as file:
        file.run(simulation.header(), simulation.run)
    (run,) = record.read(path)
    assert [r["round"] for r in run.rounds] == [1, 2, 3] and run.stopped == f"Interrupted after round 3 of {ROUNDS}."


def test_signals_of_a_program_that_answers_them_itself_reach_it():
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with unbroken():
            signal.raise_signal(signal.SIGTERM)
            assert not came
        assert came == [signal.SIGTERM]
        with unbroken():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert came == [signal.SIGTERM] * 2, "the second does not wait"
        assert came == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
