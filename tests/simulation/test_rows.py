"""Many clients: some of them are evaluated, their rows may be on disk, and neither changes a result."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn as nn
from methods import Waffle
from simulation_help import group
from small import images, tiny_model

from pflcore import Federation, Simulation, Training, cli, for_everyone
from pflcore.results.table import table
from pflcore.simulation import checkpoint


def many(n: int, each: int = 3) -> Federation:
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(n * each, 4, generator=gen), torch.randint(0, 2, (n * each,), generator=gen)
    place = torch.arange(n * each).view(n, each)
    index = {"train": place[:, 1:], "test": place[:, :1]}
    return Federation(x, y, {s: list(p) for s, p in index.items()}, 2)


def simulation(name, data, **options):
    return Simulation(name, lambda: nn.Linear(4, 2), data, Training(lr=0.1, batch_size=2), **{"rounds": 4, **options})


def test_a_number_of_clients_is_evaluated_as_a_list_of_them_is():
    data = many(50)
    some = simulation("ditto", data, eval_clients=6)
    given = simulation("ditto", data, eval_clients=some.eval_clients.tolist())
    assert len(some.eval_clients) == 6 and not torch.equal(
        some.eval_clients, simulation("ditto", data, eval_clients=6, seed=1).eval_clients
    )
    for a, b in zip(some.iterate(), given.iterate(), strict=True):
        ids = a["eval"]["clients"]
        assert ids == some.eval_clients.tolist() and len(b["eval"]["loss"]) == 50
        assert all(a["eval"][k] == [b["eval"][k][i] for i in ids] for k in ("loss", "accuracy", "size"))
    with pytest.raises(ValueError, match="eval_clients: expected a whole number, at least 1, got 0"):
        simulation("fedavg", data, eval_clients=0)


def test_weights_of_those_who_took_part_alone_are_read_as_everybodys():
    """WAFFLE's report is a list of N, or of the cohort; and a run for each client has one for each."""
    data, some = many(6), {"participation": 0.5, "rounds": 2, "eval_every": 0}
    history = simulation("waffle", data, **some).run()
    run, state = group(history.lines())[0], history.state
    want = torch.zeros(6, dtype=torch.float64).index_copy_(0, state.g["ids"], state.g["weights"])
    assert history.rounds[-1]["report"].keys() == {"index", "weight"} and torch.equal(run.weights()[1][-1], want)
    each = group(for_everyone("waffle", lambda: nn.Linear(4, 2), data, Training(lr=0.1, batch_size=2), **some).lines())[0]
    alone = group(simulation(Waffle(target=4), data, **some).run().lines())[0]
    assert torch.equal(each.weights()[1][-1][0], want) and torch.equal(each.weights()[1][-1][4], alone.weights()[1][-1])
    whole = simulation("waffle", data, rounds=1, eval_every=0).run()
    assert len(whole.rounds[0]["report"]["weights"]) == 6


def test_a_void_round_leaves_the_weights_of_earlier_rounds():
    huge = simulation(Waffle(server_lr=1e42), many(6), rounds=1, eval_every=0)
    before = huge.state.g["history"].clone()
    with pytest.warns(RuntimeWarning, match="the server's x would not be finite"):
        state = huge.run().state
    assert state.void == 1 and torch.equal(state.g["history"], before) and not torch.equal(_once(many(6)), before)


def _once(data):
    return simulation("waffle", data, rounds=1, eval_every=0).run().state.g["history"]


def test_records_of_two_streams_stand_in_no_table():
    history = simulation("fedavg", many(8), rounds=1).run()
    old = {**history.header, "stream": 1, "seed": 5}
    with pytest.raises(ValueError, match="stream: expected runs of one version of the random streams, got 1 and 3"):
        table(group([*history.lines(), {"header": old}, *history.rounds]))


@pytest.mark.parametrize("name", ["ditto", "scaffold", "feddwa"])
def test_rows_on_disk_change_nothing(name, tmp_path):
    data, options = many(40), {"participation": 0.2, "eval_every": 2}
    a, b = (simulation(name, data, rows=where, **options) for where in ("memory", tmp_path))
    first, second = a.run(), b.run()
    keep = [{k: v for k, v in r.items() if k != "seconds"} for r in first.rounds]
    assert keep == [{k: v for k, v in r.items() if k != "seconds"} for r in second.rounds]
    assert first.header["rows"] == "memory" and second.header["rows"] == "disk" and os.listdir(tmp_path) == []
    at = first.state.joined
    assert all(torch.equal(v[at], second.state.own[k][at]) for k, v in first.state.own.items())
    assert all(torch.equal(v, second.state.g[k]) for k, v in first.state.g.items())
    x = data.x[:5]
    assert all(torch.equal(first.model(i)(x), second.model(i)(x)) for i in (0, 7, 39))


def test_a_snapshot_on_disk_does_not_change(tmp_path):
    run = simulation("ditto", many(12), rows=tmp_path)
    play = run.iterate()
    next(play)
    seen = run.state
    before = seen.own["v"].clone()
    next(play)
    assert torch.equal(seen.own["v"], before) and not torch.equal(run.state.own["v"], before)


def test_a_newcomer_meets_fresh_rows_of_those_who_never_took_part(tmp_path):
    data, x = many(12), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    new = (torch.ones(4, 4), torch.tensor([0, 1, 0, 1]))
    a, b = (simulation("fedamp", data, rows=where, participation=0.2, eval_every=0).run().adapt(new, 2) for where in ("memory", tmp_path))
    assert torch.equal(a(x), b(x))


def test_a_dry_run_says_where_the_rows_are(tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["run", "ditto", "--data", "synthetic_linear", "--rounds", "3", "--dry-run", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "of the clients' own" in said and "in memory; peak memory" in said and not out.exists()


def test_a_checkpoint_of_rows_on_disk_goes_on_there_and_in_memory(tmp_path):
    """Only the rows of clients that were seen are in it; the others' are a fresh client's wherever the run goes on."""
    data, training = images((8, 20, 30, 9, 12)), Training(lr=0.1, batch_size=5)

    def run(where):
        return Simulation("ditto", tiny_model(), data, training, rounds=6, participation=0.4, eval_every=0, rows=where)

    whole = run("memory").run()
    half = run(tmp_path)
    half.rounds = 6
    half.run(lambda r, _: half.save(tmp_path / "kept") if r == 2 else None)
    held, _ = checkpoint.load(tmp_path / "kept")
    assert len(held["seen.ids"]) == len(held["own.v"]) < 5
    for options in ({}, {"rows": "memory"}):
        rest = Simulation.load(tmp_path / "kept", model=tiny_model(), data=data, **options)
        assert (rest.folder is None) == bool(options)
        rest.run()
        assert torch.equal(rest.state.g["x"], whole.state.g["x"])
        ids = rest.state.joined
        assert all(torch.equal(rest.state.own[k][ids], whole.state.own[k][ids]) for k in whole.state.own)
