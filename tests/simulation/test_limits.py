"""What a machine may do to a run: folders that cannot be written, two runs in one, a full disk, a
clock that jumps, hours of rounds."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from doors import synthetic_clusters
from places import ROOT
from small import grouped
from torch import nn

from pflcore import Checkpoint, Simulation, Training
from pflcore.simulation.checkpoint import lock

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
COMMAND = ["run", "fedavg", "--data", "synthetic_clusters", "--rounds", "3", "--quiet", "--out"]


@pytest.fixture(scope="module")
def data():
    return synthetic_clusters(n=4, groups=1, samples=20, classes=3, dim=5, held_out=20)


def make(data, algorithm="fedavg", **options):
    return Simulation(
        algorithm,
        lambda: nn.Linear(5, 3),
        data,
        Training(lr=0.1, batch_size=10),
        **grouped({"workers": 1, "rounds": 3, **options}),
    )


def sentence(text):
    assert (
        text.endswith(".")
        and text.count(". ") == 0
        and "\n" not in text
        and "Traceback" not in text
    ), text


def command(capsys, *argv):
    pytest.importorskip("tyro")
    from pflcore.cli import main

    code = main(list(argv))
    return code, capsys.readouterr().err.strip()


# folders --------------------------------------------------------------------
def unwritable(tmp_path):
    """Below a file; below the kernel's own files, where not even root may make one; and, but for
    root, in a folder without the right."""
    (tmp_path / "file").write_text("mine")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    return [
        tmp_path / "file" / "run",
        *([Path("/proc/run")] if os.path.isdir("/proc/self") else []),
        *([closed] if os.getuid() else []),
    ]


@pytest.mark.skipif(os.name == "nt", reason="no such rights")
def test_a_folder_that_cannot_be_written(data, tmp_path, capsys):
    for folder in unwritable(tmp_path):
        played: list[int] = []
        with pytest.raises(ValueError, match=r"^out: expected a folder that can be written") as e:
            make(data).run(lambda r, record, played=played: played.append(r), Checkpoint(folder))
        sentence(str(e.value))
        assert not played  # it is said before the first round
        code, said = command(capsys, *COMMAND, str(folder))
        assert code == 2 and "expected a folder that can be written" in said
        sentence(said)
    assert (tmp_path / "file").read_text() == "mine"


def test_two_runs_in_one_folder(data, tmp_path, capsys):
    before = make(data)
    before.run(checkpoint=tmp_path)
    kept = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with lock(tmp_path):
        with pytest.raises(ValueError, match=r"^out: another run is writing into") as e:
            make(data).run(checkpoint=tmp_path)
        sentence(str(e.value))
        code, said = command(capsys, *COMMAND, str(tmp_path))
        assert code == 2 and "another run is writing" in said
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == kept


# a full disk ----------------------------------------------------------------
def test_a_disk_that_becomes_full_ends_a_command_with_one_sentence(tmp_path, capsys):
    """By a limit on the size of files, which the kernel answers as it answers on a full disk."""
    resource = pytest.importorskip("resource")
    pytest.importorskip("tyro")
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, kept[1]))
        code, said = command(
            capsys,
            *COMMAND[:4],
            "--rounds",
            "400",
            "--quiet",
            "--checkpoint-minutes",
            "0",
            "--out",
            str(tmp_path),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    last = said.splitlines()[-1]
    assert (
        code == 1
        and "failed: File too large; the record up to there is" in last
        and "--resume" in last
    ), said
    sentence(last)
    lines = (tmp_path / "record.jsonl").read_text().split("\n")
    # all but the one that the disk cut off
    assert len(lines) > 3 and all(json.loads(line) for line in lines[:-1])


@pytest.mark.deep("another process")
@linux
def test_nowhere_to_print_to(tmp_path):
    """A pipe or terminal that takes nothing loses the text, not the files."""
    pytest.importorskip("tyro")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pflcore", *COMMAND, str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert (
        done.returncode != 0 and "Traceback" not in done.stderr and "No space left" in done.stderr
    ), done.stderr
    assert (tmp_path / "table.md").read_text().startswith("### ")


# time -----------------------------------------------------------------------
def test_a_clock_that_jumps_changes_nothing(data, tmp_path, monkeypatch):
    plain = make(data).run()
    now = [2e9]

    def backwards():
        now[0] -= 3600.0
        return now[0]

    monkeypatch.setattr(time, "time", backwards)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * backwards()))
    history = make(data).run(checkpoint=Checkpoint(tmp_path, minutes=1e-9))
    assert all(0 <= r["seconds"] < 60 for r in history.rounds) and len(history.rounds) == 3
    assert (
        history.state is not None
        and plain.state is not None
        and torch.equal(history.state.server["x"], plain.state.server["x"])
    )
    assert (tmp_path / "checkpoint.json").exists()


def test_nothing_measures_a_duration_by_a_clock_that_can_jump():
    jumping = {
        ("time", "time"),
        ("time", "time_ns"),
        ("datetime", "now"),
        ("datetime", "utcnow"),
        ("datetime", "today"),
    }
    used = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "pflcore").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", getattr(node.value, "attr", "")), node.attr) in jumping
    ]
    assert used == []


# hours ----------------------------------------------------------------------
def anonymous():
    """This process' own memory, bytes: RssAnon."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


@pytest.mark.deep("another process")
@linux
@pytest.mark.parametrize("name", ["fedavg", "waffle"])
def test_memory_does_not_grow_with_rounds(data, name):
    """1,500 rounds that nobody keeps the records of: at a round a minute they are a day and
    more."""
    seen = {}
    for record in make(data, name, rounds=1500, every=50).iterate():
        if record.get("round") in (300, 1500):
            seen[record["round"]] = anonymous()
    assert seen[1500] - seen[300] < 1.2e6, seen  # a leak of a kilobyte a round
