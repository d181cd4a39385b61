"""The loop: records, what is said at the end, cohorts; and what a run bears of bad
numbers and arguments."""

import copy
import warnings

import numpy as np
import pytest
import torch
from entry_points import held_out, sentence, views
from parts.states import same
from parts.user import simulation as run
from small import (
    ENGINES,
    equals,
    images,
    lines,
    make_setting,
    near,
    play,
    swept,
    tiny_model,
    with_test,
)
from torch import nn

from pflcore import (
    ALGORITHMS,
    Adversary,
    Federation,
    Net,
    Training,
    step,
)
from pflcore.algorithms import MRMTL, Ditto, Mocha, PFedMe, QFedAvg, Scaffold
from pflcore.results import record as records
from pflcore.results.table import table
from pflcore.simulation.round import RunConfig, initial_state


def test_a_run_of_many_rounds_ends_with_the_last():
    many = run("local", rounds=260, every=0)
    assert len(many.run().rounds) == many.state.round == 260


# what is said at the end ----------------------------------------------------
def said(scale=1.0, labels=1.0, **options):
    """The warnings of a run whose last client has features, and test targets, times
    so much."""
    train = [(torch.randn(12, 4) * s, torch.randn(12)) for s in (1.0, 1.0, 1.0, scale)]
    x, y = train[-1]
    data = Federation.from_clients(with_test(train, [*train[:3], (x, y * labels)]))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(
            data=data, model=nn.Linear(4, 1), training=Training(lr=0.01), **options
        ).run()
    return [str(w.message) for w in found if w.category is RuntimeWarning]


def test_a_runaway_update_is_named_once_with_clip():
    """As are those who were dropped, and losses of infinity; a quiet run says
    nothing."""
    assert said() == said(adversary=Adversary("scale", [1], 1e3)) == []
    (far,) = said(adversary=Adversary("scale", [1], 1e8))
    assert "client 1's update was" in far and "clip" in far
    dropped, *_ = said(1e25)
    assert (
        "client(s) [3] were dropped in most of their rounds" in dropped
        and "lower lr" in dropped
    )
    (loss,) = said(labels=1e30)
    assert "the last loss of client(s) [3] is inf" in loss


# cohorts --------------------------------------------------------------------
@pytest.mark.parametrize(
    "alg", [Ditto(lam=0.5), MRMTL(lam=0.5), PFedMe(personal_lr=0.1), Mocha(lam=1e-3)]
)
def test_who_never_joined_is_served_what_the_server_has_and_starts_there(alg):
    s = lines()
    ids = [0, 1, 2, 3]
    state = play(alg, s, 12, lambda r: ids)[-1][0]
    shared = (
        state.server["x"] if "x" in state.server else state.server["w"][ids].mean(0)
    )
    assert shared.abs().min() > 0.5
    near(views(alg, state, s, torch.arange(6))[0]["w"][4:], shared.expand(2, -1))
    after = step(RunConfig(alg, s), state, torch.tensor([4]))[0]
    key = next(k for k in ("v", "theta", "w") if k in after.clients)
    assert (
        0
        < (after.clients[key][4] - shared).abs()
        < (after.clients[key][4] - s.net.w0).abs()
    )


@pytest.mark.parametrize("name", ["fedfomo", "l2c", "feddwa", "scaffold", "hypcluster"])
def test_the_order_of_a_cohorts_ids_changes_nothing(name):
    data = held_out(images((20, 25, 30, 35, 22)))
    s = make_setting(Net(tiny_model()), data, Training(lr=0.1, batch_size=8), rounds=9)
    alg = ALGORITHMS[name](**({"m": 2} if name == "fedfomo" else {}))
    found = []
    for orders in (
        [range(5), [0, 2, 4], [1, 2, 3]],
        [[3, 1, 0, 4, 2], [4, 0, 2], [2, 3, 1]],
    ):
        state = initial_state(alg, s.net, 5)
        for ids in orders:
            state, done = step(RunConfig(alg, s), state, torch.tensor(ids))
            assert done.ids == sorted(ids)
        found.append(state.server | state.clients)
    equals(*found)
    with sentence("ids: expected each client once"):
        step(RunConfig(alg, s), initial_state(alg, s.net, 5), torch.tensor([1, 1]))


@pytest.mark.parametrize("name", ["fedfomo", "l2c"])
def test_a_client_of_one_sample_does_not_end_the_run(name):
    alone = run(name, images((1, 20, 25)))
    sizes = [alone.data.size(split).tolist() for split in ("train", "val")]
    assert sizes == [[1, 16, 20], [0, 4, 5]]
    assert "clients without val samples: 1" in alone.data.summary()
    assert len(alone.run().rounds) == 3
    with sentence(".*a client with enough samples"):
        run(name, images((1, 1)))


@pytest.mark.parametrize("alg", [Scaffold(option="II"), QFedAvg(q=1.0)])
def test_a_step_size_of_zero_drops_nobody(alg):
    net, data = Net(tiny_model()), images()
    still = Training(lr=0.1, batch_size=8, schedule=lambda r, rounds: float(r != 2))
    for state, done in play(alg, make_setting(net, data, still, rounds=3)):
        assert not done.dropped and not done.void and state.round
    if isinstance(alg, Scaffold):
        s = make_setting(net, data, Training(lr=0.0, batch_size=8))
        two, one = (play(a, s, 1)[0][0].clients["c"] for a in (alg, Scaffold()))
        equals(two, one)
        assert one.any()


# bad numbers and arguments ---------------------------------------------------
def far(name, size):
    """One client's upload is huge, from the second round on."""

    class Far(ALGORITHMS[name]):
        def train(self, down, client_state, clients):
            new, up, fit = super().train(down, client_state, clients)
            if clients.round > 1:
                up["delta"][clients.ids == 2] = size
            return new, up, fit

    return Far()


# losses and accuracies ------------------------------------------------------


@ENGINES
def test_a_loss_that_is_not_finite_spoils_the_mean_and_is_counted(engine):
    s = run(engine=engine)
    s.state.server["x"][:] = torch.nan
    seen = s.evaluate("test")
    assert seen["loss"].isinf().all() and (seen["accuracy"] == 0).all()


# a run's end ----------------------------------------------------------------
WILD = {"model": lambda: nn.Linear(6, 4), "training": Training(lr=1e38, batch_size=8)}
FAR = ("the server's", " v", "client 2's update", "clip")
ENDS = [  # how a run diverges, its rounds, and what is said
    (
        WILD,
        9,
        ("fedavg", "The run diverged", "rounds 2 to 4 were void", "learning rate"),
    ),
    (WILD, 2, ("fedavg", "The run diverged", "round 2 was void", "learning rate")),
    # huge but finite: a second moment never becomes infinite
    *(
        ({"algorithm": far(n, 1e25)}, 9, FAR)
        for n in ("fedadam", "fedyogi", "fedadagrad")
    ),
]


@pytest.mark.parametrize("options, rounds, words", ENDS)
def test_divergence_ends_a_run_with_a_sentence_and_the_record_intact(
    options, rounds, words
):
    with pytest.warns(RuntimeWarning, match=", seed 0, stopped early: ") as said:
        history = run(**options, rounds=rounds).run()
    assert [r["void"] for r in history.rounds] == [False, True, True, True][:rounds]
    for word in words:
        assert word in str(said[0].message)
    assert options is not WILD or history.rounds[-1]["dropped"] == [0, 1, 2]
    assert all(bool(v.isfinite().all()) for v in history.state.server.values())


def test_who_moved_far_is_in_the_record_and_in_the_table_and_may_be_clipped():
    wild, plain = far("fedavg", 1e10), run().run()
    free, held = (run(wild, clip=c).run() for c in (None, 0.5))
    moved = free.rounds[1]["relative_update_norm"]
    assert (
        max(free.rounds[0]["relative_update_norm"]) < 5 < 1e8 < moved[2]
        and sorted(moved)[1] < 5
    )
    assert "moved far: client 2 by up to" in table(records.group_runs(free.lines()))
    assert "moved far" not in table(records.group_runs(plain.lines()))
    assert held.rounds[1]["clipped"] == [2] and free.rounds[1]["clipped"] == []
    assert (
        float(free.state.server["x"].norm())
        > 1e8
        > 10
        > float(held.state.server["x"].norm())
    )
    assert held.header["clip"] == 0.5
    assert "the updates of 1 client were clipped" in table(
        records.group_runs(held.lines())
    )


@pytest.mark.parametrize("name", swept())
def test_every_method_takes_a_clip(name):
    plays = [run(name, rounds=2, every=0, clip=c) for c in (None, 1e30, 1e-3)]
    loose, wide, held = (play.run() for play in plays)
    # a limit that nobody meets changes nothing
    equals(loose.state.server, wide.state.server)
    assert held.stopped is None
    for record in held.rounds:
        assert (
            bool(record["clipped"])
            == bool(record["relative_update_norm"])
            == (name != "local")
        )


# states ---------------------------------------------------------------------
@pytest.mark.parametrize("rows", ["memory", "disk"])
def test_what_a_caller_holds_never_changes(rows, tmp_path):
    where = {"storage": rows if rows == "memory" else tmp_path}
    start = run("ditto", rounds=2, **where).run().state
    kept = copy.deepcopy(start)
    results = []
    for s in [run("ditto", rounds=4, **where) for _ in range(2)]:
        s.state = start
        results.append(s.run().state)
    seen, s = [], run("ditto", **where)
    s.run(lambda r, record: seen.append((s.state, copy.deepcopy(s.state))))
    s.state = seen[0][0]  # put back, and gone on with
    next(s.iterate())
    again = run("ditto", **where).run().state  # looking changes nothing
    for one, two in [(start, kept), results, *seen, (again, seen[-1][0])]:
        assert same(one, two)


def test_a_warm_start_of_something_else_is_refused():
    state = run("ditto").run().state
    for name, data, model, word in (
        ("scaffold", None, tiny_model(), "Scaffold"),
        ("ditto", images((9,) * 5), tiny_model(), "5 clients"),
        ("ditto", None, nn.Linear(6, 4), r"server.x like a tensor \[28\]"),
    ):
        with sentence("state: .*" + word):
            run(name, data, model=model, rounds=9).state = state
    for rounds, wrong in ((1, state), (9, 3)):
        with sentence("state: expected a State, .* of at most"):
            run("ditto", rounds=rounds).state = wrong


# options --------------------------------------------------------------------
@pytest.mark.parametrize("kind", [list, tuple, set, np.array, torch.tensor])
def test_lists_of_clients_will_do(kind):
    history = run(clients=kind([2, 0]), evaluated=kind([0, 1])).run()
    first = history.rounds[0]
    assert first["cohort"] == [0, 2] and first["eval"]["size"][2:] == [0]
    assert Adversary("sign_flip", kind([1, 2])).clients == (1, 2)


def test_who_is_evaluated_is_drawn_of_those_with_samples():
    x, y = torch.randn(8, 6), torch.arange(8) % 4
    alone = {"train": (x, y), "test": (x[:0], y[:0])}
    data = Federation.from_clients([{"train": (x, y), "test": (x, y)}, *[alone] * 3])
    assert run(data=data, evaluated=1).eval_clients.tolist() == [0]
