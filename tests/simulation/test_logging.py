"""The logger "pflcore" describes a run, and the description changes no bit."""

import logging

import pytest
import torch
from parts.logs import logged
from parts.user import simulation
from small import equals, images, layers


def messages(level, run):
    """The messages of this level while a run is played."""
    with logged("pflcore", level) as records:
        run.run()
    assert all(r.levelno >= level for r in records)
    return [r.getMessage() for r in records if r.levelno == level]


def with_bad_clients(*bad, **options):
    """A run of four clients in which updates of clients `bad` overflow."""
    data = images((20,) * 4)
    for client in bad:
        data.x[data.index["train"][client]] *= 1e30
    model = layers("Linear 6 5, ReLU, Linear 5 4")
    return simulation("scaffold", data, model=model, **options)


def test_nothing_is_printed_by_default(capfd):
    simulation().run()

    assert capfd.readouterr() == ("", "")


def test_info_is_a_line_for_each_round():
    run = simulation()
    lines = messages(logging.INFO, run)

    assert len(lines) == run.rounds
    last = lines[-1]
    record = run.history.rounds[-1]
    accuracy = torch.tensor(record["eval"]["accuracy"]).mean().item()
    assert last.startswith("fedavg, seed 0, round 3 of 3: 3 clients, ")
    assert f"mean training loss {record['train_loss']:.4g}, " in last
    assert f"{record['seconds']:.3g} s, " in last
    assert f"accuracy {accuracy:.4g}" in last


def test_info_names_dropped_clients_and_void_rounds():
    one = with_bad_clients(1, rounds=1)
    every = with_bad_clients(*range(4), rounds=1)
    with pytest.warns(RuntimeWarning, match="were dropped"):
        (dropped,) = messages(logging.INFO, one)
    with pytest.warns(RuntimeWarning, match="diverged"):
        (void,) = messages(logging.INFO, every)

    assert "4 clients, dropped [1], mean training loss " in dropped
    assert ": 4 clients, dropped [0, 1, 2, 3], void (not finite), " in void


def test_debug_names_the_engine_and_its_reason():
    run = simulation(rounds=2)
    (line,) = messages(logging.DEBUG, run)

    path = run.header()["path"]
    assert path["how"] == "by the kernels"
    assert line == f"fedavg, seed 0: by the kernels ({path['why']})"


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "ditto", "feddwa"])
def test_log_changes_no_bit(algorithm):
    quiet = simulation(algorithm, clip=0.1)
    quiet.run()
    loud = simulation(algorithm, clip=0.1)
    messages(logging.DEBUG, loud)

    def numbers(run):
        records = [{**record, "seconds": 0.0} for record in run.history.rounds]
        return records, run.state.server, run.state.clients

    assert numbers(loud)[0] == numbers(quiet)[0]
    equals(numbers(loud)[1:], numbers(quiet)[1:])


def test_log_costs_nothing_when_it_is_off(monkeypatch):
    def unexpected(*_):
        raise AssertionError("a level that is off was computed")

    for name in ("mean", "name_of"):
        monkeypatch.setattr(f"pflcore.simulation._log.{name}", unexpected)
    history = simulation().run()

    assert len(history.rounds) == 3
