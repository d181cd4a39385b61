"""A run keeps records, gives warnings and bears bad numbers."""

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
    Stop,
    Training,
    step,
)
from pflcore.algorithms import MRMTL, Ditto, Mocha, PFedMe, QFedAvg, Scaffold
from pflcore.lab.results.table import table
from pflcore.simulation import record as records
from pflcore.simulation.round import RunConfig, initial_state


@pytest.mark.deep("it takes a second")
def test_a_run_of_many_rounds_ends_with_the_last():
    many = run("local", rounds=260, every=0)
    assert len(many.run().rounds) == many.state.round == 260


def test_the_header_tells_initial_weights_apart():
    """The identity does not: a checkpoint brings its own initial weights."""
    model = tiny_model()()
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    one, same_one, another = (run(model=m) for m in (model, model, other))
    differing = {k for k, v in one.header().items() if another.header()[k] != v}
    assert one.header() == same_one.header() and differing == {"initial_weights"}


# warnings at the end --------------------------------------------------------
def warnings_of_a_run(scale=1.0, labels=1.0, **options):
    """The warnings of a run with one bad client.

    Args:
        scale: Factor of the features of the last client.
        labels: Factor of the test targets of the last client.
        options: Options of the run.
    """
    train = [(torch.randn(12, 4) * s, torch.randn(12)) for s in (1.0, 1.0, 1.0, scale)]
    x, y = train[-1]
    data = Federation.from_clients(with_test(train, [*train[:3], (x, y * labels)]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(
            data=data, model=nn.Linear(4, 1), training=Training(lr=0.01), **options
        ).run()
    return [str(w.message) for w in caught if w.category is RuntimeWarning]


def test_a_runaway_update_is_named_once_with_clip():
    """A run warns of huge updates, dropped clients and infinite losses.

    A healthy run gives no warning.
    """
    assert warnings_of_a_run() == []
    assert warnings_of_a_run(adversary=Adversary("scale", [1], 1e3)) == []
    (huge,) = warnings_of_a_run(adversary=Adversary("scale", [1], 1e8))
    assert "client 1's update was" in huge and "clip" in huge
    dropped, *_ = warnings_of_a_run(1e25)
    assert (
        "client(s) [3] were dropped in most of their rounds" in dropped
        and "lower lr" in dropped
    )
    (loss,) = warnings_of_a_run(labels=1e30)
    assert "the last loss of client(s) [3] is inf" in loss


# cohorts --------------------------------------------------------------------
@pytest.mark.deep("together they take seconds", quick=4)
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
    after = step(RunConfig.of(alg, s), state, torch.tensor([4]))[0]
    key = next(k for k in ("v", "theta", "w") if k in after.clients)
    assert (
        0
        < (after.clients[key][4] - shared).abs()
        < (after.clients[key][4] - s.net.w0).abs()
    )


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", ["fedfomo", "l2c", "feddwa", "scaffold", "hypcluster"])
def test_the_order_of_a_cohorts_ids_changes_nothing(name):
    data = held_out(images((20, 25, 30, 35, 22)))
    s = make_setting(Net(tiny_model()), data, Training(lr=0.1, batch_size=8), rounds=9)
    alg = ALGORITHMS[name](**({"m": 2} if name == "fedfomo" else {}))
    states = []
    for orders in (
        [range(5), [0, 2, 4], [1, 2, 3]],
        [[3, 1, 0, 4, 2], [4, 0, 2], [2, 3, 1]],
    ):
        state = initial_state(alg, s.net, 5)
        for ids in orders:
            state, done = step(RunConfig.of(alg, s), state, torch.tensor(ids))
            assert done.ids == sorted(ids)
        states.append(state.server | state.clients)
    equals(*states)
    with sentence("ids: expected each client once"):
        step(RunConfig.of(alg, s), initial_state(alg, s.net, 5), torch.tensor([1, 1]))


@pytest.mark.parametrize("name", ["fedfomo", "l2c"])
def test_a_client_of_one_sample_does_not_end_the_run(name):
    alone = run(name, images((1, 20, 25)))
    data = alone.config.data
    sizes = [data.size(split).tolist() for split in ("train", "val")]
    assert sizes == [[1, 16, 20], [0, 4, 5]]
    assert "clients without val samples: 1" in data.summary()
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
    """An algorithm in which client 2 uploads huge numbers from round 2."""

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
ENDS = [  # options of a run that diverges, its rounds, and words of the warning
    (
        WILD,
        9,
        ("fedavg", "The run diverged", "rounds 2 to 4 were void", "learning rate"),
    ),
    (WILD, 2, ("fedavg", "The run diverged", "round 2 was void", "learning rate")),
    # The update is huge but finite, and the second moment stays finite.
    *(
        ({"algorithm": far(n, 1e25)}, 9, FAR)
        for n in ("fedadam", "fedyogi", "fedadagrad")
    ),
]


@pytest.mark.parametrize("options, rounds, words", ENDS)
def test_divergence_ends_a_run_with_a_sentence_and_the_record_intact(
    options, rounds, words
):
    with pytest.warns(RuntimeWarning, match=", seed 0, stopped early: ") as caught:
        history = run(**options, rounds=rounds).run()
    assert [r["void"] for r in history.rounds] == [False, True, True, True][:rounds]
    for word in words:
        assert word in str(caught[0].message)
    assert options is not WILD or history.rounds[-1]["dropped"] == [0, 1, 2]
    assert all(bool(v.isfinite().all()) for v in history.state.server.values())


def test_who_moved_far_is_in_the_record_and_in_the_table_and_may_be_clipped():
    wild = far("fedavg", 1e10)
    plain = run().run()
    free = run(wild, clip=None).run()
    clipped = run(wild, clip=0.5).run()
    norms = free.rounds[1]["relative_update_norm"]
    assert max(free.rounds[0]["relative_update_norm"]) < 5 < 1e8 < norms[2]
    assert sorted(norms)[1] < 5
    assert "moved far: client 2 by up to" in table(records.group_runs(free.lines()))
    assert "moved far" not in table(records.group_runs(plain.lines()))
    assert clipped.rounds[1]["clipped"] == [2] and free.rounds[1]["clipped"] == []
    assert (
        float(free.state.server["x"].norm())
        > 1e8
        > 10
        > float(clipped.state.server["x"].norm())
    )
    assert clipped.header["clip"] == 0.5
    assert "the updates of 1 client were clipped" in table(
        records.group_runs(clipped.lines())
    )


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", swept())
def test_every_method_takes_a_clip(name):
    plays = [run(name, rounds=2, every=0, clip=c) for c in (None, 1e30, 1e-3)]
    free, wide, clipped = (play.run() for play in plays)
    # A limit that no update reaches changes nothing.
    equals(free.state.server, wide.state.server)
    assert clipped.stopped is None
    for record in clipped.rounds:
        assert (
            bool(record["clipped"])
            == bool(record["relative_update_norm"])
            == (name != "local")
        )


# states ---------------------------------------------------------------------
def test_what_a_caller_holds_never_changes():
    start = run("ditto", rounds=2).run().state
    start_copy = copy.deepcopy(start)
    results = []
    for s in [run("ditto", rounds=4) for _ in range(2)]:
        s.state = start
        results.append(s.run().state)
    seen = []
    s = run("ditto")
    s.run(lambda r, record: seen.append((s.state, copy.deepcopy(s.state))))
    s.state = seen[0][0]  # the run is set back, and then it goes on
    next(s.iterate())
    # A run without a callback that reads its state ends the same.
    again = run("ditto").run().state
    for one, two in [(start, start_copy), results, *seen, (again, seen[-1][0])]:
        assert same(one, two)


def test_every_round_is_in_one_history():
    def stop(round, record):
        if round == 2:
            raise Stop("enough")

    s = run("ditto", rounds=6)
    first = s.run(stop)
    rounds = s.iterate()
    next(rounds), next(rounds)
    rest = s.run()

    assert [record["round"] for record in first.rounds] == [1, 2]
    assert [record["round"] for record in rest.rounds] == [3, 4, 5, 6]


def test_a_state_of_another_run_brings_no_records():
    other = run("ditto", rounds=6, seed=2)
    rounds = other.iterate()
    for _ in range(4):
        next(rounds)
    s = run("ditto", rounds=6)
    next(s.iterate())

    s.state = other.state

    assert [record["round"] for record in s.run().rounds] == [5, 6]


def test_a_simulation_is_equal_to_itself_alone():
    s = run("ditto", clients=[0, 1])
    assert s == s and s != run("ditto", clients=[0, 1]) and {s: 1}[s] == 1


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
    with sentence("evaluation.clients: expected clients of which one has samples of"):
        run(data=data, evaluated=[1, 2])


def test_a_run_that_loses_all_of_many_clients_names_a_few():
    with pytest.warns(RuntimeWarning) as caught:
        run(**WILD, data=images(sizes=(20,) * 8), rounds=9).run()

    assert "client(s) [0, 1, 2, 3, 4] and 3 more sent" in str(caught[0].message)
