"""Ctrl-C at any time: what was played has its record everywhere, and the run goes on from there."""

import signal

import pytest
import torch
from parts.user import simulation
from small import images, tiny_model

from pflcore import Evaluation, Simulation
from pflcore.results import record
from pflcore.simulation.checkpoint import Checkpoint

ROUNDS = 5


def press():
    signal.raise_signal(signal.SIGINT)


def made(**options):
    return simulation("scaffold", images((20,) * 4), rounds=ROUNDS, workers=1, **options)


def goes_on(run):
    """To the state of a run that nothing broke."""
    assert [r["round"] for r in run.run().rounds] == [4, 5]
    whole = made().run().state.server
    assert all(torch.equal(v, run.state.server[k]) for k, v in whole.items())


def test_every_callback_sees_the_round_in_which_ctrl_c_came():
    run, seen = made(), []

    def first(round, _):
        if round == 3:
            press()
        seen.append(("first", round))

    history = run.run([first, lambda round, _: seen.append(("second", round))])
    assert history.interrupted and history.stopped == f"Interrupted after round 3 of {ROUNDS}."
    assert seen == [(who, round) for round in (1, 2, 3) for who in ("first", "second")]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    goes_on(run)


def test_a_second_ctrl_c_does_not_wait():
    seen = []

    def stuck(round, _):
        press()
        seen.append(round)
        press()
        seen.append("never")

    history = made().run(stuck)
    assert history.interrupted and seen == [1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_round_whose_evaluation_broke_off_is_a_round(error):
    calls = iter(range(10**6))

    def metric(scores, y):
        if next(calls) == 2 * 4 + 1:  # in round 3, for the second of four clients
            raise error
        return 1.0

    run = made(metrics={"m": metric})
    try:
        history = run.run()
    except Exception as e:
        history = e.history
    assert [r["round"] for r in history.rounds] == [1, 2, 3] and history.rounds[-1]["eval"] is None
    assert "3" in history.stopped and history.rounds[1]["eval"]["m"] == [1.0] * 4
    goes_on(run)


@pytest.mark.parametrize("round", [3, ROUNDS])
def test_no_checkpoint_is_left_without_its_evaluation(tmp_path, round):
    calls = iter(range(10**6))

    def metric(scores, y):
        if next(calls) == (round - 1) * 4 + 1:
            press()
        return 1.0

    run = made(metrics={"m": metric})
    assert run.run(checkpoint=Checkpoint(tmp_path, every=1, minutes=0)).interrupted
    looked = Evaluation(metrics={"m": metric})
    rest = Simulation.load(tmp_path, model=tiny_model(), data=run.data, evaluation=looked)
    values = [(r["round"], r["eval"]["m"]) for r in rest.run().rounds]
    assert values == [(r, [1.0] * 4) for r in range(1, 6)]


@pytest.mark.parametrize("before", [True, False])
def test_a_record_says_what_its_stop_says(tmp_path, monkeypatch, before):
    write = record.Record.write

    def pressed(self, line):
        third = line.get("round") == 3
        if third and before:
            press()
        write(self, line)
        if third and not before:
            press()

    monkeypatch.setattr(record.Record, "write", pressed)
    run, path = made(), tmp_path / "record.jsonl"
    with record.Record(path) as file:
        file.run(run.header(), run.run)
    (kept,) = record.read(path)
    assert [r["round"] for r in kept.rounds] == [1, 2, 3]
    assert kept.stopped == f"Interrupted after round 3 of {ROUNDS}."
