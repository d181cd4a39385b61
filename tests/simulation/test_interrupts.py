"""Ctrl-C at any time: what was played has its record everywhere, and the run goes on from there."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from doors import synthetic_clusters
from small import grouped
from torch import nn

from pflcore import Evaluation, Simulation, Training
from pflcore.results import record
from pflcore.results.record import read
from pflcore.simulation.checkpoint import Checkpoint

ROUNDS = 5


def press():
    signal.raise_signal(signal.SIGINT)


def made(**options):
    torch.manual_seed(0)
    data = synthetic_clusters(n=4, groups=1, samples=20, classes=3, dim=5, held_out=20)
    training, options = Training(lr=0.1, batch_size=10), grouped({"workers": 1, **options})
    return Simulation("scaffold", nn.Linear(5, 3), data, training, rounds=ROUNDS, **options)


def same(simulation):
    whole = made()
    whole.run()
    return all(torch.equal(v, simulation.state.server[k]) for k, v in whole.state.server.items())


def test_every_callback_sees_the_round_in_which_ctrl_c_came():
    simulation, seen = made(), []

    def first(round, _):
        if round == 3:
            press()
        seen.append(("first", round))

    history = simulation.run([first, lambda round, _: seen.append(("second", round))])
    assert history.interrupted and history.stopped == f"Interrupted after round 3 of {ROUNDS}."
    assert seen == [(who, round) for round in (1, 2, 3) for who in ("first", "second")]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [r["round"] for r in simulation.run().rounds] == [4, 5] and same(simulation)


def test_a_second_ctrl_c_does_not_wait():
    seen = []

    def stuck(round, _):
        press()
        seen.append(round)
        press()
        seen.append("never")

    history = made().run(stuck)
    assert history.interrupted and seen == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_round_whose_evaluation_broke_off_is_a_round(error):
    calls = iter(range(10**6))

    def metric(scores, y):
        if next(calls) == 2 * 4 + 1:  # in round 3, for the second of four clients
            raise error
        return 1.0

    simulation = made(metrics={"m": metric})
    try:
        history = simulation.run()
    except Exception as e:
        history = e.history
    assert [r["round"] for r in history.rounds] == [1, 2, 3] and history.rounds[-1]["eval"] is None
    assert "3" in history.stopped and history.rounds[1]["eval"]["m"] == [1.0] * 4
    assert [r["round"] for r in simulation.run().rounds] == [4, 5] and same(simulation)


@pytest.mark.parametrize("round", [3, ROUNDS])
def test_no_checkpoint_is_left_without_its_evaluation(tmp_path, round):
    calls = iter(range(10**6))

    def metric(scores, y):
        if next(calls) == (round - 1) * 4 + 1:
            press()
        return 1.0

    simulation = made(metrics={"m": metric})
    assert simulation.run(checkpoint=Checkpoint(tmp_path, every=1, minutes=0)).interrupted
    looked = Evaluation(metrics={"m": metric})
    rest = Simulation.load(tmp_path, model=nn.Linear(5, 3), data=simulation.data, evaluation=looked)
    rounds = rest.run().rounds
    assert [r["round"] for r in rounds] == [1, 2, 3, 4, 5]
    assert all(r["eval"]["m"] == [1.0] * 4 for r in rounds)


@pytest.mark.parametrize("when", ["before the line", "after the line"])
def test_a_record_says_what_its_stop_says(tmp_path, monkeypatch, when):
    write = record.Record.write

    def pressed(self, line):
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
    assert [r["round"] for r in run.rounds] == [1, 2, 3]
    assert run.stopped == f"Interrupted after round 3 of {ROUNDS}."


def test_another_thread_gets_no_signals_and_may_run():
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(made().run()))
    thread.start()
    thread.join()
    assert len(found[0].rounds) == ROUNDS


@pytest.mark.deep("another process")
@pytest.mark.skipif(os.name == "nt", reason="no such signals")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_other_signals_end_a_run_like_ctrl_c(tmp_path, number):
    pytest.importorskip("tyro")
    words = "run fedavg --data synthetic_clusters --rounds 1000000 --eval-every 1000 --quiet --out"
    argv = [*words.split(), str(tmp_path)]
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); from pflcore.cli "
        "import main; sys.exit(main())"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code, *argv], **pipes)
    record = tmp_path / "record.jsonl"
    deadline = time.monotonic() + 60
    while not (record.is_file() and record.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(getattr(signal, number))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "of 1000000 rounds" in out
    assert (tmp_path / "table.md").read_text() == out.removesuffix("\n")
    assert "Interrupted" in err and read(tmp_path)[0].stopped.startswith("Interrupted after round")
