"""Long lists and matrices of a record are in a file beside it."""

import json

import pytest
import torch
from parts.side_file import lines, written

from pflcore.results import pictures
from pflcore.results.record import LONG, read


def test_short_lists_stay_in_the_line(tmp_path):
    path = written(
        tmp_path / "r.jsonl",
        [
            {
                "round": 1,
                "cohort": list(range(LONG)),
                "report": {"weights": [[1.0, 0.0], [0.0, 1.0]]},
            }
        ],
    )
    assert (
        not (tmp_path / "r.arrays").exists()
        and json.loads(path.read_text())["cohort"][-1] == LONG - 1
    )
    assert torch.equal(read(path)[0].weights()[1][0], torch.eye(2, dtype=torch.float64))


def test_pictures_of_many_clients(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "MOST", 50)
    run = read(written(tmp_path / "record.jsonl", lines()))
    assert (
        pictures.similarity(run, tmp_path / "s.png") and (tmp_path / "s.png").stat().st_size > 1000
    )
    assert pictures.weights(run, tmp_path / "w.png") is None
