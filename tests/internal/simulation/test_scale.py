"""Tests of federations with very many clients.

The cost of a round depends on its cohort only. Rows may be on disk. Neither changes a
result.
"""

import json
import os
from collections import Counter

import pytest
import torch
from entry_points import sentence
from parts.memory import Making
from parts.states import same
from parts.user import simulation as small
from small import copied, equals, images, normed_model
from torch.utils._pytree import tree_leaves

from pflcore import Training
from pflcore.algorithms import FedRep, HypCluster, Waffle
from pflcore.results._export import rows
from pflcore.results.record import group_runs, to_json
from pflcore.simulation import _evaluate as evaluation
from pflcore.simulation import checkpoint
from pflcore.simulation._per_target import dense_report
from pflcore.train import _memory as memory
from pflcore.train._random import draw_without_replacement


def simulation(name, n=40, **options):
    """A simulation of n clients with two samples each."""
    training = Training(lr=0.1, batch_size=2)
    data = options.pop("data", None) or images((2,) * n)
    return small(name, data, **{"training": training, "rounds": 4, **options})


# a round costs its cohort


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "ditto", "feddwa", "waffle", "hypcluster"]
)
def test_nothing_in_a_round_or_its_record_is_as_long_as_the_federation(name):
    n = 20_000
    play = simulation(name, n, participation=10 / n, evaluated=20).iterate()
    next(play)
    made = []
    with Making(
        lambda out: made.extend(getattr(t, "nbytes", 0) for t in tree_leaves(out))
    ):
        record = next(play)
    assert len(record["cohort"]) == 10 and len(json.dumps(to_json(record))) < 5000
    assert 0 < max(made) < n


@pytest.mark.parametrize(
    "n, count", [(10, 10), (10, 9), (12, 3), (13, 3), (1000, 7), (10**12, 50)]
)
def test_draws_are_distinct_and_their_own(n, count):
    a = draw_without_replacement(n, count, 1, "x")
    b = draw_without_replacement(n, count, 2, "x")
    assert len(a.unique()) == len(a) == count and int(a.min()) >= 0 and int(a.max()) < n
    equals(a, draw_without_replacement(n, count, 1, "x"))
    assert n == count or not torch.equal(a, b)


# Draws from 5 clients come from a permutation, those from 9 clients from single draws.
@pytest.mark.parametrize("n, count", [(5, 2), (9, 2)])
def test_every_client_is_drawn_as_often(n, count):
    times = Counter(
        i
        for key in range(4000)
        for i in draw_without_replacement(n, count, key).tolist()
    )
    expected = 4000 * count / n
    # The limit of chi squared with 8 degrees of freedom has p < 3e-4.
    assert (
        sum((times[i] - expected) ** 2 / (expected * (1 - count / n)) for i in range(n))
        < 30
    )


def test_a_number_of_clients_is_evaluated_as_a_list_of_them_is():
    some = simulation("ditto", 50, evaluated=6)
    ids = some.eval_clients.tolist()
    other = simulation("ditto", 50, evaluated=6, seed=1).eval_clients.tolist()
    assert len(ids) == len(other) == 6 and ids != other
    history = some.run()
    given = simulation("ditto", 50, evaluated=ids).run()
    for a, b in zip(history.rounds, given.rounds, strict=True):
        assert a["eval"]["clients"] == ids and len(b["eval"]["loss"]) == 50
        for k in ("loss", "accuracy", "size"):
            assert a["eval"][k] == [b["eval"][k][i] for i in ids]
    found = rows(history.header, history.rounds, "client")
    assert [r["client"] for r in found[:6]] == ids
    assert "mean_clients" not in rows(history.header, history.rounds)[0]
    last = group_runs(history.lines())[0].curve(ids[2])[1][-1]
    assert last == history.rounds[-1]["eval"]["accuracy"][2]


def test_weights_of_those_who_took_part_alone_are_read_as_everybodys():
    """Weights of the cohort are read as weights of all clients.

    WAFFLE reports N weights where all clients take part, and else those of the cohort.
    """
    some = {"participation": 0.5, "rounds": 2, "every": 0}
    history = simulation("waffle", 6, **some).run()
    record = history.rounds[-1]
    assert record["report"].keys() == {"index", "weight"}
    want = torch.zeros(6, dtype=torch.float64)
    want[record["cohort"]] = torch.tensor(
        record["report"]["weight"], dtype=torch.float64
    )
    equals(group_runs(history.lines())[0].weights()[1][-1], want)
    assert dense_report(record["report"], 6) == {"weights": want.tolist()}
    everybody = simulation("waffle", 6, rounds=1, every=0).run()
    assert len(everybody.rounds[0]["report"]["weights"]) == 6


@pytest.mark.parametrize("alg", [Waffle, HypCluster])
def test_a_void_round_reports_nothing_and_leaves_the_weights_of_earlier_rounds(alg):
    huge, sound = (
        simulation(alg(server_lr=lr), 6, rounds=1, every=0) for lr in (1e42, 1.0)
    )
    before = copied(huge.state.server)
    with pytest.warns(RuntimeWarning, match="the server's x would not be finite"):
        history = huge.run()
    (line,) = history.rounds
    assert line["void"] and not line["report"] and history.state.void_rounds == 1
    equals(history.state.server, before)
    assert not all(map(torch.equal, sound.run().state.server.values(), before.values()))


# rows on disk ---------------------------------------------------------------
def full_disk(monkeypatch):
    monkeypatch.setattr(
        "shutil.disk_usage", lambda folder: type("Full", (), {"free": 100})
    )


@pytest.mark.parametrize("name", ["ditto", "scaffold", "feddwa"])
def test_rows_on_disk_change_nothing(name, tmp_path):
    options = {"participation": 0.2, "every": 2}
    a, b = (
        simulation(name, storage=where, **options) for where in ("memory", tmp_path)
    )
    first = a.run()
    second = b.run()
    for one, two in zip(first.rounds, second.rounds, strict=True):
        assert one | {"seconds": 0} == two | {"seconds": 0}
    seen = [(h.header["storage"], h.header["stream"]) for h in (first, second)]
    assert seen == [("memory", 3), ("disk", 3)]
    assert os.listdir(tmp_path) == [] and same(
        first.state, second.state, first.state.participated
    )
    x = a.data.x[:5]
    new = (torch.ones(4, 6), torch.tensor([0, 1, 0, 1]))
    for i in (0, 7, 39):
        equals(first.model(i)(x), second.model(i)(x))
    # A client that joins later meets the rows of clients that never took part.
    equals(first.adapt(new, 2)(x), second.adapt(new, 2)(x))


@pytest.mark.parametrize("every", [0, 1])
def test_only_clients_that_took_part_take_room(tmp_path, every):
    """An evaluation of all clients writes no rows."""
    run = simulation(
        "ditto", storage=tmp_path, participation=0.1, rounds=2, every=every
    )
    cohort = next(run.iterate())["cohort"]
    own = run._state.clients
    seen = run._state.participated
    assert seen.nonzero()[:, 0].tolist() == cohort and not own["v"][~seen].any()


def test_many_clients_are_evaluated_in_parts(tmp_path, monkeypatch):
    whole_run = simulation("ditto", 12, storage=tmp_path)
    whole = whole_run.run()
    monkeypatch.setattr(
        evaluation, "EVAL_CHUNK_BYTES", 5 * whole_run.context.net.size * 4
    )
    parts = simulation("ditto", 12, storage=tmp_path).run()
    assert parts.rounds[-1]["eval"] == whole.rounds[-1]["eval"]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_parts_are_cut_between_those_who_are_computed_at_once(
    engine, tmp_path, monkeypatch
):
    """The parts of an evaluation do not divide a block.

    Some evaluations train. Under vmap, a client's last digits then depend on its block.
    """
    alg = FedRep(finetune_epochs=2)
    how = {
        "storage": tmp_path,
        "engine": engine,
        "model": normed_model,
        "clients_per_block": 4,
        "rounds": 2,
    }
    run = simulation(alg, data=images(range(2, 15)), **how)
    run.run()
    whole = evaluation.evaluate(run.config, run.state)
    for clients in (1, 5, 9):
        width = sum(v[0].nbytes for v in run.state.clients.values())
        monkeypatch.setattr(evaluation, "EVAL_CHUNK_BYTES", clients * width)
        equals(evaluation.evaluate(run.config, run.state), whole)


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    full_disk(monkeypatch)
    words = "storage: the clients' rows may take .* on disk, and .* has 100 B free"
    with sentence(words, memory.RunTooLarge):
        simulation("ditto", storage=tmp_path)
    assert os.listdir(tmp_path) == []
    with sentence("storage: expected 'auto', 'memory' or a folder, got "):
        simulation("ditto", storage="nowhere")


@pytest.mark.parametrize("held", [False, True])
def test_full_disk_ends_the_run_with_its_last_state(held, tmp_path, monkeypatch):
    """The process is not killed where the disk is full.

    A mapped file that cannot grow would end the process by SIGBUS.
    """
    run = simulation("ditto", storage=tmp_path, participation=0.2)

    def becomes_full(round, record):
        # Where the state is held outside, the run continues with a copy.
        assert not held or run.state.round == round
        full_disk(monkeypatch)

    rows = "a copy of the state needs" if held else "this round's rows need"
    with pytest.raises(
        OSError, match=f"storage: {rows} up to .* 100 B free; make room"
    ) as told:
        run.run(becomes_full)
    assert len(told.value.history.rounds) == 1 and run._state.round == 1
    monkeypatch.undo()
    rest = run.run()
    whole = simulation("ditto", participation=0.2).run()
    assert [r["round"] for r in rest.rounds] == [2, 3, 4]
    assert rest.rounds[-1]["eval"] == whole.rounds[-1]["eval"]


def test_what_does_not_fit_goes_to_disk_by_itself(monkeypatch):
    needs = simulation("ditto").peak_bytes()
    for has, folder in ((needs * 2, False), (needs * 3 // 2, True)):
        monkeypatch.setattr(memory, "capacity", lambda device, has=has: has)
        assert bool(simulation("ditto").config.folder) is folder
    monkeypatch.setattr(memory, "capacity", lambda device: 10)
    words = r"memory: the run needs about [\d.]+ KiB beside its data, and cpu has 10 B"
    with sentence(f"{words}; let", memory.RunTooLarge):
        simulation("ditto", storage="memory")


def test_a_checkpoint_of_rows_on_disk_goes_on_there_and_in_memory(tmp_path):
    """A checkpoint has only the rows of clients that took part.

    The other clients have the rows of new clients, on disk as in memory.
    """
    data = images((2,) * 12)
    options = {"rounds": 6, "participation": 0.2, "every": 0}
    whole = simulation("ditto", data=data, **options).run()
    half = simulation("ditto", data=data, storage=tmp_path, **options)
    half.run(lambda r, _: half.save(tmp_path / "kept") if r == 2 else None)
    held, _ = checkpoint.load(tmp_path / "kept")
    assert int(held["seen"].sum()) == len(held["clients.v"]) < 12
    for place in (tmp_path, "memory"):
        rest = simulation("ditto", data=data, storage=place, **options).restore(
            tmp_path / "kept"
        )
        assert (rest.config.folder is None) == (place == "memory")
        rest.run()
        assert same(rest.state, whole.state, rest.state.participated)
