"""Tests of figures and of values in records."""

import json
import math
import re

import numpy as np
import pytest
import torch
from parts.results import N, a_long_run, a_run, line, write
from parts.user import simulation
from places import ROOT

from pflcore.results import _run_pictures as pictures
from pflcore.results._export import scalars
from pflcore.results.record import group_runs, read, to_json


def test_plain_turns_everything_into_json(tmp_path):
    for value, want in (
        (torch.ones(2, dtype=torch.long), [1, 1]),
        ((1, 2.5), [1, 2.5]),
        ({3: torch.tensor(math.inf)}, {"3": None}),
        (math.sqrt, "sqrt"),
        ({"a"}, ["a"]),
        ([np.int64(3), np.float32(0.5), np.array(2)], [3, 0.5, 2]),
        ([np.array([1, 2]), np.float64("nan")], [[1, 2], None]),
    ):
        assert json.loads(json.dumps(to_json(value))) == want
    assert (
        read(write(tmp_path / "record.jsonl", a_run(target=np.int64(1))))[0].target == 1
    )


# pictures -------------------------------------------------------------------
def test_every_picture(tmp_path):
    """Figures of weights and mixes show at most a thousand clients."""
    pytest.importorskip("matplotlib")
    lines = [
        *a_run(),
        *a_run(seed=1, shift=0.1),
        *a_run("local"),
        *a_run("feddwa", target=None),
    ]
    names = {p.name for p in pictures.draw(group_runs(lines), tmp_path)}
    assert names == {"curves.png", "weights.png", "clients.png"}
    for name in names:
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    many = group_runs(a_long_run())
    del many[0].rounds[1]["eval"], many[0].rounds[0]["eval"]
    assert (
        pictures.draw(many, tmp_path)
        == pictures.draw(group_runs([{"header": {}}]), tmp_path)
        == []
    )


@pytest.mark.parametrize("partition", ["iid", "a long name of a partition"])
def test_long_names_take_a_place_of_their_own(partition, tmp_path, monkeypatch):
    """Long names stand below the curves, and in lines below the boxes."""
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, _: drawn.append(figure))
    runs = group_runs([*a_run(partition=partition), *a_run(partition="C")])
    pictures.curves(runs, tmp_path)
    pictures.clients(runs, tmp_path)
    curves, boxes = drawn
    long = partition != "iid"
    assert [len(curves.legends), curves.axes[0].get_legend() is None] == [long, long]
    names = [label.get_text() for label in boxes.axes[0].get_xticklabels()]
    assert all(len(line) <= 32 for name in names for line in name.split("\n"))
    assert any("\n" in name for name in names) == long


def test_pictures_of_little(tmp_path):
    pytest.importorskip("matplotlib")
    little = [
        {"header": {"algorithm": "fedavg", "n": 1}},
        line(1, [math.nan]),
        line(2, [0.5]),
    ]
    assert [p.name for p in pictures.draw(group_runs(little), tmp_path)] == [
        "curves.png",
        "clients.png",
    ]
    for one in little[1:]:
        one["eval"] = {"loss": [math.inf], "size": [5]}
    assert len(pictures.draw(group_runs(little), tmp_path)) == 2


def test_a_full_disk_leaves_the_pictures_that_were_there(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    runs = group_runs(a_run())
    path = tmp_path / "curves.png"
    pictures.curves(runs, path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {*before} == {"curves.png", "curves.svg", "curves.pdf"}

    def half(self, file, **_):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", half)
    with pytest.raises(OSError, match="No space"):
        pictures.curves(runs, path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


WRITES = re.compile(
    r'\.write_(text|bytes)\(|\.savefig\(|(?<!safetensors.)torch\.save\(|open\(.*"[aw]b?"'
)
GROWS = 'file = open(path, "ab")', 'self._file = open(self.path, "ab" if goes_on'


def test_every_file_is_written_by_one_mechanism():
    """Each file is written beside its place and then renamed.

    The exceptions are a record, which grows by lines, and a lock.
    """
    folders = "pflcore/cli", "pflcore/results", "pflcore/simulation", "bench"
    texts = [p.read_text() for folder in folders for p in (ROOT / folder).rglob("*.py")]
    found = [
        line.strip()
        for text in texts
        for line in text.splitlines()
        if WRITES.search(line)
    ]
    whole = [line for line in found if "part" in line]
    assert len(whole) >= 5
    others = [line for line in found if line not in whole]
    assert len(others) == 2 and all(line.startswith(GROWS) for line in others), others


def test_weights_by_round():
    (one,) = group_runs(a_run())
    rounds, weights = pictures.weights_by_round(one)
    assert rounds == list(range(1, 13)) and weights.tolist() == [[1 / N] * N] * 12


def test_a_history_as_events(tmp_path):
    history = simulation().run()
    first = history.rounds[0]
    got = scalars(first, clients=True)
    assert got["eval/accuracy/client 1"] == first["eval"]["accuracy"][1]
    assert (
        got["traffic/bytes_up"] == first["bytes_up"]
        and got["train/loss"] == first["train_loss"]
    )
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from pflcore import TensorBoard

    history.to_tensorboard(tmp_path / "after")
    simulation().run(TensorBoard(tmp_path / "during"))
    for name in ("after", "during"):
        events = (
            EventAccumulator(str(tmp_path / name)).Reload().Scalars("eval/accuracy")
        )
        assert [e.step for e in events] == [1, 2, 3]
        assert events[-1].value == pytest.approx(history.series()[1][-1].mean().item())
