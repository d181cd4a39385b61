"""What a run bears of bad clients, numbers and arguments: none improves a table, each is said in
one sentence."""

import copy

import pytest
import torch
from doors import held_out, sentence, synthetic_clusters
from small import grouped, swept
from torch import nn

from pflcore import ALGORITHMS, Simulation, Training
from pflcore.results.record import group
from pflcore.results.table import table


def federation(n=4, groups=1):
    return synthetic_clusters(n=n, groups=groups, samples=20, classes=3, dim=5, held_out=20)


@pytest.fixture(scope="module")
def data():
    return federation()


def model():
    return nn.Linear(5, 3)


def made(name):
    """The algorithm for a model that is nothing but a head, of which the bias is private where a
    part is."""
    kind = ALGORITHMS[name]
    return kind(**({"private": "*bias"} if getattr(kind, "private", "") == "head" else {}))


def run(data, algorithm="fedavg", **options):
    options = grouped({"rounds": 3, "workers": 1} | options)
    training = Training(lr=options.pop("lr", 0.1), batch_size=10)
    return Simulation(algorithm, options.pop("model", model), data, training, **options)


def far(name, size):
    """One client's upload is huge, from the second round on."""

    class Far(ALGORITHMS[name]):
        def train(self, down, own, clients):
            new, up, fit = super().train(down, own, clients)
            if clients.round > 1:
                up["delta"][clients.ids == 2] = size
            return new, up, fit

    return Far()


every = pytest.mark.parametrize("name", swept(set(ALGORITHMS) - {"factorized_waffle"}))


# losses and accuracies ------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_loss_that_is_not_finite_spoils_the_mean_and_is_counted(data, engine):
    s = run(data, engine=engine)
    s.state.server["x"][:] = torch.nan
    seen = s.evaluate("test")
    assert seen["loss"].isinf().all() and (seen["accuracy"] == 0).all()


# a run's end ----------------------------------------------------------------
@pytest.mark.parametrize("rounds, void", [(9, [False, True, True, True]), (2, [False, True])])
def test_divergence_ends_a_run_with_a_sentence_and_the_record_intact(data, rounds, void):
    with pytest.warns(RuntimeWarning, match="fedavg, seed 0, stopped early: The run diverged"):
        history = run(data, lr=1e38, rounds=rounds).run()
    assert [r["void"] for r in history.rounds] == void and "learning rate" in history.stopped
    assert "round 2 was void" in history.stopped or "rounds 2 to 4 were void" in history.stopped
    assert history.rounds[-1]["dropped"] == [0, 1, 2, 3]
    assert all(bool(v.isfinite().all()) for v in history.state.server.values())


# huge but finite ------------------------------------------------------------
@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_a_servers_second_moment_never_becomes_infinite(data, name):
    history = run(data, far(name, 1e25), rounds=9).run()
    assert [r["void"] for r in history.rounds] == [False, True, True, True]
    for words in ("the server's", " v", "client 2's update", "clip"):
        assert words in history.stopped
    assert all(bool(v.isfinite().all()) for v in history.state.server.values())


def test_who_moved_far_is_in_the_record_and_in_the_table(data):
    history = run(data, far("fedavg", 1e10)).run()
    moved = history.rounds[1]["moved"]
    assert max(history.rounds[0]["moved"]) < 5 < 1e8 < moved[2] and sorted(moved)[2] < 5
    assert "moved far: client 2 by up to" in table(group(history.lines()))
    assert "moved far" not in table(group(run(data).run().lines()))


def test_a_clipped_update_is_as_long_as_allowed(data):
    free, held = (run(data, far("fedavg", 1e10), rounds=2, clip=c).run() for c in (None, 0.5))
    assert held.rounds[1]["clipped"] == [2] and free.rounds[1]["clipped"] == []
    assert float(free.state.server["x"].norm()) > 1e8 > 10 > float(held.state.server["x"].norm())
    assert held.header["clip"] == 0.5
    assert "the updates of 1 client were clipped" in table(group(held.lines()))
    one = run(data, clip=0.01, rounds=1, participation=0.25)
    before = one.state.server["x"].clone()
    moved = one.run().state.server["x"] - before
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-5)


@every
def test_every_method_takes_a_clip(name, data):
    fed, alg = held_out(data), made(name)
    plays = [run(fed, alg, rounds=2, every=0, clip=c) for c in (None, 1e30, 1e-3)]
    loose, wide, held = (play.run() for play in plays)
    # a limit that nobody meets changes nothing
    assert all(torch.equal(v, wide.state.server[k]) for k, v in loose.state.server.items())
    assert held.stopped is None
    for record in held.rounds:
        assert bool(record["clipped"]) == bool(record["moved"]) == (name != "local")


# states ---------------------------------------------------------------------
def test_what_a_caller_holds_never_changes(data):
    start = run(data, "ditto", rounds=2).run().state
    kept = copy.deepcopy(start)
    results = [run(data, "ditto", rounds=4, warm_start=start).run().state for _ in range(2)]
    seen, s = [], run(data, "ditto", rounds=3)
    s.run(lambda r, record: seen.append((s.state, copy.deepcopy(s.state))))
    s.state = seen[0][0]  # put back, and gone on with
    next(s.iterate())
    for one, two in [(start, kept), results, *seen]:
        assert torch.equal(one.clients["v"], two.clients["v"])
        assert torch.equal(one.server["x"], two.server["x"])
    again = run(data, "ditto", rounds=3).run().state  # looking changes nothing
    assert torch.equal(again.clients["v"], seen[-1][0].clients["v"])


def test_a_warm_start_of_something_else_is_refused(data):
    state = run(data, "ditto").run().state
    wide = lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))  # noqa: E731
    for name, fed, build, word in (
        ("scaffold", data, model, "Scaffold"),
        ("ditto", federation(5), model, "5 clients"),
        ("ditto", data, wide, r"server.x like a tensor \[39\]"),
    ):
        with sentence("warm_start: .*" + word):
            run(fed, name, model=build, rounds=9, warm_start=state)
    with sentence("rounds: expected more than the 3"):
        run(data, "ditto", rounds=3, warm_start=state)


# options --------------------------------------------------------------------
def test_lists_of_clients_will_do(data):
    history = run(data, clients=[2, 0], evaluated=[0, 1]).run()
    first = history.rounds[0]
    assert first["cohort"] == [0, 2] and first["eval"]["size"][2:] == [0, 0]


def test_a_run_cut_short_says_so():
    lines = [{"header": {"algorithm": "fedavg", "rounds": 150}}]
    lines += [{"round": r, "eval": {"accuracy": [0.5]}} for r in range(1, 65)]
    text = table(group(lines))
    assert "| 64 of 150 rounds" in text and "of 64" not in text
