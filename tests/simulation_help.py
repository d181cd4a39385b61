"""Small things that several tests of runs need."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pflcore.data import Federation
from pflcore.results.record import Record, Run, read

SIX = ("fedavg", "scaffold", "ditto", "apfl", "waffle", "factorized_waffle")  # together they see every branch of a round


def swept(names: Iterable[str], quick: Iterable[str] = SIX) -> list[Any]:
    """The names, of which all but the representatives are for the deep suite."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.deep("a sweep over all algorithms")) for n in names]


def held_out(data: Federation) -> Federation:
    """A fifth of each client's training samples is for validation."""
    return data.split_samples({"train": 0.8, "val": 0.2}, pool=("train",))


def group(lines: Iterable[Mapping[str, Any]]) -> list[Run]:
    """A history's lines, written to a record and read again."""
    with tempfile.TemporaryDirectory() as folder:
        with Record(Path(folder) / "record.jsonl") as record:
            for line in lines:
                record.write(line)
        return read(folder)
