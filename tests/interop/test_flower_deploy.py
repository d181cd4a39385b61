"""A deployment of Flower on this machine gives the models of a simulation."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr.superlink.grid.http_grid")

from places import ROOT

PROGRAM = ROOT / "examples" / "flower_deploy.py"
ON_PROC = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="/proc")


def start(folder, *options):
    """The program, whose processes have `folder` in their environment."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), "--folder", str(folder), *options],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_of(folder):
    """The ids of the processes that have `folder` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if f"={folder}".encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def end_of(process, timeout):
    """The output of a program that ends in time, and is ended otherwise."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends what it has started
        output = process.communicate(timeout=60)[0]
        raise AssertionError(output[-3000:]) from None


@ON_PROC
@pytest.mark.long("a SuperLink, two SuperNodes and a process for each message")
def test_a_deployment_gives_the_models_of_a_simulation(tmp_path):
    process = start(tmp_path / "flower", "--rounds", "2", "--seed", "3")
    # Each message starts a process, so a busy machine takes minutes.
    output = end_of(process, timeout=900)
    assert process.returncode == 0, output[-3000:]
    for round in (1, 2):
        assert f"round {round}: mean accuracy of the clients' own models" in output
    assert "models are those of pflcore.Simulation, bit by bit" in output
    assert processes_of(tmp_path / "flower") == []


@ON_PROC
@pytest.mark.long("a SuperLink and two SuperNodes")
@pytest.mark.parametrize("how", ["failure", "signal"])
def test_a_deployment_that_fails_leaves_no_process(tmp_path, how):
    folder = tmp_path / "flower"
    process = start(folder, "--algorithm", "nothing")
    if how == "signal":
        while process.poll() is None and len(processes_of(folder)) < 3:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    output = end_of(process, timeout=200)
    assert process.returncode == 1
    words = "ended by SIGTERM" if how == "signal" else "unknown algorithm|nothing"
    assert any(word in output for word in words.split("|")), output[-3000:]
    assert processes_of(folder) == []
