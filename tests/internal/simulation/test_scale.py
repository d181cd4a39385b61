"""Very many clients: a round costs its cohort, rows may be on disk, and neither changes a result."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
import torch
import torch.nn as nn

from pflcore import Federation, Simulation, Training
from pflcore.data.ragged import Ragged
from pflcore.local import memory
from pflcore.local.random import drawn
from pflcore.results.export import rows
from pflcore.results.record import group, plain
from pflcore.simulation import rows as on_disk
from pflcore.simulation.footprint import Live
from pflcore.simulation.uploads import farthest, rounded


def many(n: int, each: int = 3) -> Federation:
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(n * each, 4, generator=gen), torch.randint(0, 2, (n * each,), generator=gen)
    place = torch.arange(n * each).view(n, each)
    index = {"train": place[:, 1:], "test": place[:, :1]}
    return Federation(x, y, {s: Ragged(p.reshape(-1), torch.arange(n + 1) * p.shape[1]) for s, p in index.items()}, 2)


def simulation(name, data, **options):
    return Simulation(name, lambda: nn.Linear(4, 2), data, Training(lr=0.1, batch_size=2), **{"rounds": 4, **options})


# a round costs its cohort ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "feddwa", "waffle", "hypcluster"])
def test_nothing_in_a_round_or_its_record_is_as_long_as_the_federation(name):
    n = 20_000
    play = simulation(name, many(n), participation=10 / n, eval_clients=20).iterate()
    next(play)
    with Live() as live:
        record = next(play)
    assert len(record["cohort"]) == 10 and live.peak < n and len(json.dumps(plain(record))) < 5000


@pytest.mark.parametrize(("n", "count"), [(10, 10), (10, 9), (12, 3), (13, 3), (1000, 7), (10**12, 50)])
def test_draws_are_distinct_and_their_own(n, count):
    a, b = drawn(n, count, 1, "x"), drawn(n, count, 2, "x")
    assert len(a.unique()) == len(a) == count and int(a.min()) >= 0 and int(a.max()) < n
    assert torch.equal(a, drawn(n, count, 1, "x")) and (n == count or not torch.equal(a, b))


@pytest.mark.parametrize(("n", "count"), [(5, 2), (9, 2)])  # the permutation, and the draws
def test_every_client_is_drawn_as_often(n, count):
    times = Counter(i for key in range(4000) for i in drawn(n, count, key).tolist())
    expected = 4000 * count / n
    assert sum((times[i] - expected) ** 2 / (expected * (1 - count / n)) for i in range(n)) < 30  # chi squared, 8 degrees: p < 3e-4


def test_means_and_rows_of_some_clients():
    history = simulation("fedavg", many(50), eval_clients=6).run()
    found, ids = rows(history.header, history.rounds, "client"), history.rounds[0]["eval"]["clients"]
    assert [r["client"] for r in found[:6]] == ids and "mean_clients" not in rows(history.header, history.rounds)[0]
    run = group(history.lines())[0]
    assert run.curve(ids[2])[1][-1] == history.rounds[-1]["eval"]["accuracy"][2]


# rows on disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 1])
def test_only_clients_that_took_part_take_room(tmp_path, every):
    """An evaluation of everybody writes nothing."""
    run = simulation("ditto", many(40), rows=tmp_path, participation=0.1, rounds=2, eval_every=every)
    play = run.iterate()
    cohort = next(play)["cohort"]
    own = run._state.own
    assert own.known.nonzero()[:, 0].tolist() == cohort and not own["v"][~own.known].any()


def test_many_clients_are_evaluated_in_parts(tmp_path, monkeypatch):
    whole = simulation("ditto", many(12), rows=tmp_path).run()
    monkeypatch.setattr(on_disk, "CHUNK", 5 * 10 * 4)
    parts = simulation("ditto", many(12), rows=tmp_path).run()
    assert parts.rounds[-1]["eval"] == whole.rounds[-1]["eval"]


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    class Full:
        free = 100

    monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda folder: Full)
    with pytest.raises(memory.RunTooLarge, match=r"rows: the clients' rows may take .* on disk, and .* has 100 B free"):
        simulation("ditto", many(40), rows=tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="rows: expected 'auto', 'memory' or a folder, got 'nowhere'"):
        simulation("ditto", many(40), rows="nowhere")


def test_a_disk_that_becomes_full_ends_the_run_with_a_sentence_and_the_state_of_the_last_round(tmp_path, monkeypatch):
    run = simulation("ditto", many(40), rows=tmp_path, participation=0.2)

    def fill(round, record):
        monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda folder: type("Full", (), {"free": 100}))

    with pytest.raises(OSError, match=r"rows: \d more clients need up to .* on disk, and .* has 100 B free; make room") as told:
        run.run(fill)
    assert len(told.value.history.rounds) == 1 and run._state.round == 1
    monkeypatch.undo()
    rest = run.run()
    whole = simulation("ditto", many(40), participation=0.2).run()
    assert [r["round"] for r in rest.rounds] == [2, 3, 4] and rest.rounds[-1]["eval"] == whole.rounds[-1]["eval"]


def test_what_does_not_fit_goes_to_disk_by_itself(monkeypatch):
    assert simulation("ditto", many(40)).folder is None
    monkeypatch.setattr(memory, "capacity", lambda device: 12_000)
    assert simulation("ditto", many(40)).folder is not None


# what ten thousand numbers are made of ---------------------------------------------------------------------------------


def test_numbers_rounded_at_once_are_those_rounded_one_by_one():
    gen = torch.Generator().manual_seed(0)
    wide = (10 ** (9 * torch.rand(5000, generator=gen, dtype=torch.float64) - 5)).tolist()
    ties = [k / 1024 for k in range(1, 3000)] + [k / 2000 for k in range(1, 3000)]
    values = [*wide, *ties, 0.0, None, 1.005, 99.95, 0.0099951, 1e-320, 1e300, float("inf")]
    assert rounded(values) == [None if v is None else float(f"{v:.3g}") for v in values]


def test_the_farthest_of_many_updates():
    assert farthest([3, 4, 5, 6], [1.0, None, 30.0, 40.0]) == (6, 40.0)
    assert farthest([3, 4], [1.0, None]) is None and farthest([3], None) is None
