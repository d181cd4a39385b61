"""Tests of federations with very many clients.

The cost of a round depends on its cohort only.
"""

import json
from collections import Counter

import pytest
import torch
from parts.memory import Making
from parts.states import same
from parts.user import simulation as small
from small import copied, equals, images, swept
from torch.utils._pytree import tree_leaves

from pflcore import Training
from pflcore.algorithms import HypCluster, Waffle
from pflcore.simulation import checkpoint
from pflcore.simulation._export import rows
from pflcore.simulation._per_target import dense_report
from pflcore.simulation.record import group_runs, to_json
from pflcore.train._random import draw_without_replacement


def simulation(name, n=40, **options):
    """A simulation of n clients with two samples each."""
    training = Training(lr=0.1, batch_size=2)
    data = options.pop("data", None) or images((2,) * n)
    return small(name, data, **{"training": training, "rounds": 4, **options})


# a round costs its cohort


@pytest.mark.parametrize(
    "name",
    swept(["fedavg", "scaffold", "ditto", "feddwa", "waffle", "hypcluster"], ["ditto"]),
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


def test_a_checkpoint_has_the_rows_of_participants_alone(tmp_path):
    data = images((2,) * 12)
    options = {"rounds": 6, "participation": 0.2, "every": 0}
    whole = simulation("ditto", data=data, **options).run()
    half = simulation("ditto", data=data, **options)
    half.run(lambda r, _: half.save(tmp_path) if r == 2 else None)

    held, _ = checkpoint.load(tmp_path)
    assert int(held["seen"].sum()) == len(held["clients.v"]) < 12
    rest = simulation("ditto", data=data, **options).restore(tmp_path)
    rest.run()
    assert same(rest.state, whole.state, rest.state.participated)
