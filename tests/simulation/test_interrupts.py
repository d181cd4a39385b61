"""The record states the reason why a run has ended early."""

import pkgutil
import re
import signal
import warnings
from dataclasses import replace

import pytest
import torch
from entry_points import sentence
from parts.user import simulation
from small import images, tiny_model

import pflcore
from pflcore import EarlyStopping, Simulation, Stop, Training, run_each_target

ROUNDS = 5


def press():
    signal.raise_signal(signal.SIGINT)


def test_every_callback_sees_the_round_in_which_ctrl_c_came():
    seen = []

    def first(round, _):
        if round == 3:
            press()
        seen.append(("first", round))

    history = simulation(rounds=ROUNDS).run(
        [first, lambda round, _: seen.append(("second", round))]
    )
    assert (
        history.interrupted
        and history.stopped == f"Interrupted after round 3 of {ROUNDS}."
    )
    names = ("first", "second")
    assert seen == [(name, round) for round in (1, 2, 3) for name in names]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_that_is_interrupted_after_its_last_round_is_whole():
    """A run that is interrupted after its last round is whole.

    The history still says that it was interrupted, so that a program that plays several
    runs ends after this one.
    """
    whole = simulation(rounds=ROUNDS).run()
    history = simulation(rounds=ROUNDS).run(
        lambda round, _: press() if round == ROUNDS else None
    )
    assert history.interrupted and history.stopped is None
    assert len(history.rounds) == ROUNDS == history.state.round
    assert list(history.lines())[-1]["eval"] == whole.rounds[-1]["eval"]


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("place", ["sample_cohort", "serve", "apply", "evaluate"])
def test_a_run_that_is_interrupted_within_a_round_goes_on(place, monkeypatch):
    """Its state is that of a whole round, wherever Ctrl-C comes."""
    of_loop = ("sample_cohort", "evaluate")
    module = "_loop" if place in of_loop else "round"
    name = f"pflcore.simulation.{module}.{place}"
    function = pkgutil.resolve_name(name)
    calls = []

    def pressed(*given):
        result = function(*given)
        calls.append(place)
        if len(calls) == 2:
            press()
        return result

    whole = simulation("scaffold", rounds=ROUNDS)
    want = whole.run()
    run = simulation("scaffold", rounds=ROUNDS)
    with monkeypatch.context() as patch:
        patch.setattr(name, pressed)
        history = run.run()
    assert history.interrupted and len(history.rounds) in (1, 2)
    assert len(history.rounds) == run.state.round
    # The evaluation of a round that was played may be missing.
    history.rounds[-1]["eval"] = want.rounds[len(history.rounds) - 1]["eval"]
    rest = run.run()

    rounds = [{**r, "seconds": 0} for r in [*history.rounds, *rest.rounds]]
    assert rounds == [{**r, "seconds": 0} for r in want.rounds]
    for name in ("server", "clients"):
        wanted = getattr(whole.state, name)
        for key, tensor in getattr(run.state, name).items():
            assert torch.equal(tensor, wanted[key])


def test_rounds_that_were_iterated_are_in_the_history_of_a_run():
    run = simulation(rounds=ROUNDS)
    first = [record for record, _ in zip(run.iterate(), range(2), strict=False)]
    played = run.state.round
    history = run.run()

    assert [r["round"] for r in history.rounds] == [*range(1, ROUNDS + 1)]
    assert history.rounds[:2] == first[:2] and played >= 2


@pytest.mark.parametrize("target, rounds", [(0, 0), (2, 2)])
def test_runs_for_everyone_that_are_interrupted_say_so_where_one_lacks(target, rounds):
    def last(t, round, _):
        if (t, round) == (target, 2):
            press()

    history = run_each_target("waffle", tiny_model(), images(), rounds=2, on_round=last)
    assert history.interrupted and len(history.rounds) == rounds
    reason = "Interrupted after the run of target 0, of 3 targets."
    assert history.stopped == (None if target == 2 else reason)


def mape(scores, y):
    return (scores[:, 0] - y).abs().mean()


def test_an_early_stop_that_is_wanted_is_no_warning():
    stop = EarlyStopping(patience=1, min_delta=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = simulation(rounds=ROUNDS).run(stop)
    assert history.stopped.startswith("Stopped early after round 2")


def test_an_early_stop_leaves_the_warnings_on_clients():
    wild = Training(lr=1e200, batch_size=8)

    def stop(round, record):
        raise Stop("One round is enough.")

    with pytest.warns(RuntimeWarning) as caught:
        simulation(rounds=ROUNDS, training=wild).run(stop)
    assert "One round" not in "".join(str(warning.message) for warning in caught)


def test_a_run_for_each_target_may_be_stopped_without_a_warning():
    def stop(target, round, record):
        if round == 2:
            raise Stop("Two rounds are enough.")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = run_each_target(
            "waffle", tiny_model(), images((20, 20)), rounds=ROUNDS, on_round=stop
        )
    assert not history.end.broke_off and len(history.rounds) == 2


def test_an_error_of_ones_own_stops_a_run_when_it_no_longer_falls():
    """Early stopping takes a user's metric that improves as it falls.

    The run evaluates the split that the help of EarlyStopping advises.
    """
    with sentence(
        "key: expected one of .*, or a metric of your own with higher_is_better=True"
    ):
        EarlyStopping(key="mape")

    def play(stop, values):
        for round, value in enumerate(values, 1):
            stop(round, {"eval": {"mape": [value], "size": [1]}})

    falls = EarlyStopping(patience=2, key="mape", higher_is_better=False)
    play(falls, [5.0, 4.0, 3.0, 2.0])
    assert (falls.best, falls.round) == (2.0, 4)
    with sentence("Stopped early after round 3: mape 5 of round 1", Stop):
        play(
            EarlyStopping(patience=2, key="mape", higher_is_better=True),
            [5.0, 4.0, 3.0],
        )
    data = images((20, 20, 20)).split(val=0.2)
    advised = re.search("`evaluation=(.*?)`", EarlyStopping.__doc__)[1]
    look = replace(eval(advised, vars(pflcore)), metrics=(mape,))
    assert look.split == "val"
    stop = EarlyStopping(patience=ROUNDS, key="mape", higher_is_better=False)
    history = simulation(data=data, rounds=ROUNDS, evaluation=look).run(stop)
    assert stop.best == min(history.series("mape")[1].mean(1)).item()


@pytest.mark.parametrize(
    "key, up", [("rmse", False), ("train_loss", False), ("r2", True)]
)
def test_names_that_are_known_know_their_direction(key, up):
    stop = EarlyStopping(patience=1, key=key)
    for round, value in enumerate((1.0, 2.0 if up else 0.5), 1):
        stop(round, {"eval": {key: [value], "size": [1]}})
    assert stop.round == 2


def test_early_stopping():
    stop = EarlyStopping(patience=2, key="accuracy", min_delta=0.1)

    def record(value):
        return {"eval": {"accuracy": [value, None, value], "size": [1, 0, 1]}}

    for round, value in ((1, 0.2), (2, 0.5), (4, 0.55)):
        stop(round, record(value))
    stop(5, {"eval": None})
    words = (
        r"Stopped early after round 6: accuracy 0\.5 of round 2 stood for 2 evaluations"
    )
    with sentence(words, Stop):
        stop(6, record(float("nan")))
    stop(1, record(0.1))  # the next run
    assert stop.best == 0.1 and stop.round == 1
    with sentence("key: expected one of accuracy, got 'auc'"):
        EarlyStopping(key="auc")(1, record(0.3))
    with sentence("key: expected one of accuracy, .* got 'acuracy'"):
        EarlyStopping(key="acuracy")
    with sentence("on_round: expected a function"):
        simulation(rounds=ROUNDS).run(3)


def test_early_stopping_by_some_clients():
    """A method that makes the model of one client is judged by this client."""
    stop = EarlyStopping(patience=1, key="accuracy", clients=[4])

    def record(all_but_one, one, **more):
        return {"eval": {"accuracy": [all_but_one, one], "size": [1, 1], **more}}

    stop(1, record(0.9, 0.1, clients=[2, 4]))
    stop(2, record(0.1, 0.2, clients=[2, 4]))
    with sentence("Stopped early after round 3: accuracy 0.2 of round 2", Stop):
        stop(3, record(0.9, 0.1, clients=[2, 4]))
    with sentence(r"clients: expected some of \[0, 1\], the evaluated, got 4"):
        EarlyStopping(key="accuracy", clients=[4])(1, record(0.1, 0.2))


def test_a_callback_that_empties_a_record_is_named():
    def forgetful(round, record):
        record.clear()

    run = Simulation("fedavg", tiny_model()(), images((8, 8)), rounds=3)
    with sentence(
        "on_round, forgetful: expected a function that leaves 'round' in a round's rec"
    ):
        run.run([lambda round, record: None, forgetful])
