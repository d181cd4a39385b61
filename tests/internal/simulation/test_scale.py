"""Very many clients: a round costs its cohort, rows may be on disk, and neither changes a
result."""

import json
import os
from collections import Counter

import pytest
import torch
import torch.nn as nn
from methods import Waffle
from small import grouped, images, tiny_model

from pflcore import Evaluation, Federation, Hardware, Simulation, Training, for_everyone
from pflcore.data.ragged import Ragged
from pflcore.results.export import rows
from pflcore.results.record import group, plain
from pflcore.results.table import table
from pflcore.simulation import checkpoint
from pflcore.simulation import rows as on_disk
from pflcore.simulation.accept import farthest
from pflcore.simulation.footprint import Live
from pflcore.train import memory
from pflcore.train.random import drawn


def many(n, each=3):
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(n * each, 4, generator=gen), torch.randint(0, 2, (n * each,), generator=gen)
    place = torch.arange(n * each).view(n, each)
    index = {"train": place[:, 1:], "test": place[:, :1]}
    return Federation(
        x,
        y,
        {s: Ragged(p.reshape(-1), torch.full((n,), p.shape[1])) for s, p in index.items()},
        2,
    )


def simulation(name, data, **options):
    return Simulation(
        name,
        lambda: nn.Linear(4, 2),
        data,
        Training(lr=0.1, batch_size=2),
        **grouped({"rounds": 4, **options}),
    )


# a round costs its cohort


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "feddwa", "waffle", "hypcluster"])
def test_nothing_in_a_round_or_its_record_is_as_long_as_the_federation(name):
    n = 20_000
    play = simulation(name, many(n), participation=10 / n, evaluated=20).iterate()
    next(play)
    with Live() as live:
        record = next(play)
    assert len(record["cohort"]) == 10 and live.peak < n and len(json.dumps(plain(record))) < 5000


@pytest.mark.parametrize(
    ("n", "count"), [(10, 10), (10, 9), (12, 3), (13, 3), (1000, 7), (10**12, 50)]
)
def test_draws_are_distinct_and_their_own(n, count):
    a, b = drawn(n, count, 1, "x"), drawn(n, count, 2, "x")
    assert len(a.unique()) == len(a) == count and int(a.min()) >= 0 and int(a.max()) < n
    assert torch.equal(a, drawn(n, count, 1, "x")) and (n == count or not torch.equal(a, b))


@pytest.mark.parametrize(("n", "count"), [(5, 2), (9, 2)])  # the permutation, and the draws
def test_every_client_is_drawn_as_often(n, count):
    times = Counter(i for key in range(4000) for i in drawn(n, count, key).tolist())
    expected = 4000 * count / n
    # chi squared, 8 degrees: p < 3e-4
    assert sum((times[i] - expected) ** 2 / (expected * (1 - count / n)) for i in range(n)) < 30


def test_a_number_of_clients_is_evaluated_as_a_list_of_them_is():
    data = many(50)
    some = simulation("ditto", data, evaluated=6)
    given = simulation("ditto", data, evaluated=some.looked_at.tolist())
    assert len(some.looked_at) == 6 and not torch.equal(
        some.looked_at, simulation("ditto", data, evaluated=6, seed=1).looked_at
    )
    for a, b in zip(some.iterate(), given.iterate(), strict=True):
        ids = a["eval"]["clients"]
        assert ids == some.looked_at.tolist() and len(b["eval"]["loss"]) == 50
        assert all(
            a["eval"][k] == [b["eval"][k][i] for i in ids] for k in ("loss", "accuracy", "size")
        )
    with pytest.raises(
        ValueError, match=r"clients: expected .* a whole number, at least 1.*, got 0"
    ):
        simulation("fedavg", data, evaluated=0)


def test_means_and_rows_of_some_clients():
    history = simulation("fedavg", many(50), evaluated=6).run()
    found, ids = (
        rows(history.header, history.rounds, "client"),
        history.rounds[0]["eval"]["clients"],
    )
    assert [r["client"] for r in found[:6]] == ids and "mean_clients" not in rows(
        history.header, history.rounds
    )[0]
    run = group(history.lines())[0]
    assert run.curve(ids[2])[1][-1] == history.rounds[-1]["eval"]["accuracy"][2]


def test_weights_of_those_who_took_part_alone_are_read_as_everybodys():
    """WAFFLE's report is a list of N, or of the cohort; and a run for each client has one for
    each."""
    data, some = many(6), {"participation": 0.5, "rounds": 2, "every": 0}
    history = simulation("waffle", data, **some).run()
    run = group(history.lines())[0]
    cohort, weight = (
        history.rounds[-1]["cohort"],
        torch.tensor(history.rounds[-1]["report"]["weight"], dtype=torch.float64),
    )
    want = torch.zeros(6, dtype=torch.float64).index_copy_(0, torch.tensor(cohort), weight)
    assert history.rounds[-1]["report"].keys() == {"index", "weight"} and torch.equal(
        run.weights()[1][-1], want
    )
    each = group(
        for_everyone(
            "waffle", lambda: nn.Linear(4, 2), data, Training(lr=0.1, batch_size=2), **grouped(some)
        ).lines()
    )[0]
    alone = group(simulation(Waffle(target=4), data, **some).run().lines())[0]
    assert torch.equal(each.weights()[1][-1][0], want) and torch.equal(
        each.weights()[1][-1][4], alone.weights()[1][-1]
    )
    whole = simulation("waffle", data, rounds=1, every=0).run()
    assert len(whole.rounds[0]["report"]["weights"]) == 6


def test_a_void_round_leaves_the_weights_of_earlier_rounds():
    huge = simulation(Waffle(server_lr=1e42), many(6), rounds=1, every=0)
    before = huge.state.server["history"].clone()
    with pytest.warns(RuntimeWarning, match="the server's x would not be finite"):
        state = huge.run().state
    assert (
        state.void == 1
        and torch.equal(state.server["history"], before)
        and not torch.equal(_once(many(6)), before)
    )


def _once(data):
    return simulation("waffle", data, rounds=1, every=0).run().state.server["history"]


def test_records_of_two_streams_stand_in_no_table():
    history = simulation("fedavg", many(8), rounds=1).run()
    old = {**history.header, "stream": 1, "seed": 5}
    with pytest.raises(
        ValueError, match="stream: expected runs of one version of the random streams, got 1 and 3"
    ):
        table(group([*history.lines(), {"header": old}, *history.rounds]))


# rows on disk ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["ditto", "scaffold", "feddwa"])
def test_rows_on_disk_change_nothing(name, tmp_path):
    data, options = many(40), {"participation": 0.2, "every": 2}
    a, b = (simulation(name, data, rows=where, **options) for where in ("memory", tmp_path))
    first, second = a.run(), b.run()
    keep = [{k: v for k, v in r.items() if k != "seconds"} for r in first.rounds]
    assert keep == [{k: v for k, v in r.items() if k != "seconds"} for r in second.rounds]
    assert (
        first.header["rows"] == "memory"
        and second.header["rows"] == "disk"
        and os.listdir(tmp_path) == []
    )
    at = first.state.seen
    assert all(
        torch.equal(v[at], second.state.clients[k][at]) for k, v in first.state.clients.items()
    )
    assert all(torch.equal(v, second.state.server[k]) for k, v in first.state.server.items())
    x = data.x[:5]
    assert all(torch.equal(first.model(i)(x), second.model(i)(x)) for i in (0, 7, 39))


@pytest.mark.parametrize("every", [0, 1])
def test_only_clients_that_took_part_take_room(tmp_path, every):
    """An evaluation of everybody writes nothing."""
    run = simulation("ditto", many(40), rows=tmp_path, participation=0.1, rounds=2, every=every)
    play = run.iterate()
    cohort = next(play)["cohort"]
    own, seen = run._state.clients, run._state.seen
    assert seen.nonzero()[:, 0].tolist() == cohort and not own["v"][~seen].any()


def test_a_snapshot_on_disk_does_not_change(tmp_path):
    run = simulation("ditto", many(12), rows=tmp_path)
    play = run.iterate()
    next(play)
    seen = run.state
    before = seen.clients["v"].clone()
    next(play)
    assert torch.equal(seen.clients["v"], before) and not torch.equal(
        run.state.clients["v"], before
    )


def test_many_clients_are_evaluated_in_parts(tmp_path, monkeypatch):
    whole = simulation("ditto", many(12), rows=tmp_path).run()
    monkeypatch.setattr(on_disk, "CHUNK", 5 * 10 * 4)
    parts = simulation("ditto", many(12), rows=tmp_path).run()
    assert parts.rounds[-1]["eval"] == whole.rounds[-1]["eval"]


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    class Full:
        free = 100

    monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda folder: Full)
    with pytest.raises(
        memory.RunTooLarge,
        match=r"rows: the clients' rows may take .* on disk, and .* has 100 B free",
    ):
        simulation("ditto", many(40), rows=tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(
        ValueError, match="rows: expected 'auto', 'memory' or a folder, got 'nowhere'"
    ):
        simulation("ditto", many(40), rows="nowhere")


def test_a_disk_that_becomes_full_ends_the_run_with_a_sentence_and_the_state_of_the_last_round(
    tmp_path, monkeypatch
):
    run = simulation("ditto", many(40), rows=tmp_path, participation=0.2)

    def fill(round, record):
        monkeypatch.setattr(
            on_disk.shutil, "disk_usage", lambda folder: type("Full", (), {"free": 100})
        )

    with pytest.raises(
        OSError,
        match=r"rows: this round's rows need up to .* on disk, and .* has 100 B free; make room",
    ) as told:
        run.run(fill)
    assert len(told.value.history.rounds) == 1 and run._state.round == 1
    monkeypatch.undo()
    rest = run.run()
    whole = simulation("ditto", many(40), participation=0.2).run()
    assert [r["round"] for r in rest.rounds] == [2, 3, 4] and rest.rounds[-1][
        "eval"
    ] == whole.rounds[-1]["eval"]


def test_a_newcomer_meets_fresh_rows_of_those_who_never_took_part(tmp_path):
    data, x = many(12), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    new = (torch.ones(4, 4), torch.tensor([0, 1, 0, 1]))
    a, b = (
        simulation("fedamp", data, rows=where, participation=0.2, every=0).run().adapt(new, 2)
        for where in ("memory", tmp_path)
    )
    assert torch.equal(a(x), b(x))


def test_what_does_not_fit_goes_to_disk_by_itself(monkeypatch):
    assert simulation("ditto", many(40)).setup.folder is None
    monkeypatch.setattr(memory, "capacity", lambda device: 12_000)
    assert simulation("ditto", many(40)).setup.folder is not None


def test_a_checkpoint_of_rows_on_disk_goes_on_there_and_in_memory(tmp_path):
    """Only the rows of clients that were seen are in it; the others' are a fresh client's wherever
    the run goes on."""
    data, training = images((8, 20, 30, 9, 12)), Training(lr=0.1, batch_size=5)

    def run(where):
        return Simulation(
            "ditto",
            tiny_model(),
            data,
            training,
            rounds=6,
            participation=0.4,
            evaluation=Evaluation(every=0),
            hardware=Hardware(rows=where),
        )

    whole = run("memory").run()
    half = run(tmp_path)
    half.rounds = 6
    half.run(lambda r, _: half.save(tmp_path / "kept") if r == 2 else None)
    held, _ = checkpoint.load(tmp_path / "kept")
    assert int(held["seen"].sum()) == len(held["clients.v"]) < 5
    for options in ({}, {"hardware": Hardware(rows="memory")}):
        rest = Simulation.load(tmp_path / "kept", model=tiny_model(), data=data, **options)
        assert (rest.setup.folder is None) == bool(options)
        rest.run()
        assert torch.equal(rest.state.server["x"], whole.state.server["x"])
        ids = rest.state.seen
        assert all(
            torch.equal(rest.state.clients[k][ids], whole.state.clients[k][ids])
            for k in whole.state.clients
        )


# what ten thousand numbers are made of


def test_the_farthest_of_many_updates():
    assert farthest([3, 4, 5, 6], [1.0, None, 30.0, 40.0]) == (6, 40.0)
    assert farthest([3, 4], [1.0, None]) is None and farthest([3], None) is None
