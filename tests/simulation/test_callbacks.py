"""What is called after every round: it may stop a run, and costs nothing where it fails."""

import pytest
from doors import sentence
from parts.user import simulation

from pflcore import EarlyStopping, Stop


def test_a_callback_that_raises_loses_nothing():
    whole = simulation(rounds=5).run()
    run = simulation(rounds=5)

    def callback(round, record):
        if round == 3:
            raise KeyError("my own mistake")

    with pytest.raises(KeyError) as e:
        run.run([callback, lambda r, record: None])
    kept, rest = e.value.history, run.run()
    assert "KeyError in round 3" in kept.stopped and kept.model(0) is not None
    played = [(r["round"], r["eval"]) for r in kept.rounds + rest.rounds]
    assert len(kept.rounds) == 3 and played == [(r["round"], r["eval"]) for r in whole.rounds]
    with sentence("on_round: expected a function", TypeError):
        run.run(3)


def test_stop_ends_a_run_with_its_sentence():
    def callback(round, record):
        if round == 2:
            raise Stop("That will do.")

    history = simulation(rounds=5).run(callback)
    assert history.stopped == "That will do." and len(history.rounds) == 2


def test_early_stopping():
    stop = EarlyStopping(patience=2, key="accuracy", min_delta=0.1)

    def record(value):
        return {"eval": {"accuracy": [value, None, value], "size": [1, 0, 1]}}

    for round, value in ((1, 0.2), (2, 0.5), (4, 0.55)):
        stop(round, record(value))
    stop(5, {"eval": None})
    words = r"Stopped early after round 6: accuracy 0\.5 of round 2 stood for 2 evaluations"
    with sentence(words, Stop):
        stop(6, record(float("nan")))
    stop(1, record(0.1))  # the next run
    assert stop.best == 0.1 and stop.round == 1
    with sentence("key: expected one of accuracy, got 'auc'"):
        EarlyStopping(key="auc")(1, record(0.3))
