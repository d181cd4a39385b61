"""What a run bears of bad clients, numbers and arguments: none improves a table, each is said in
one sentence."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from doors import held_out, synthetic_clusters
from methods import Ditto, FedAdam
from small import grouped, swept, with_test
from torch import nn

from pflcore import (
    ALGORITHMS,
    Hardware,
    Net,
    Simulation,
    Training,
    metrics,
)
from pflcore.algorithms import FedAvg
from pflcore.data import Federation
from pflcore.results.record import group
from pflcore.results.table import table


@pytest.fixture(scope="module")
def data():
    return synthetic_clusters(n=4, groups=1, samples=20, classes=3, dim=5, held_out=20)


def model():
    return nn.Linear(5, 3)


def made(name):
    """The algorithm for a model that is nothing but a head, of which the bias is private where a
    part is."""
    kind = ALGORITHMS[name]
    return kind(**({"private": "*bias"} if getattr(kind, "private", "") == "head" else {}))


def run(data, algorithm="fedavg", **options):
    options = grouped({"rounds": 3, "workers": 1} | options)
    return Simulation(
        algorithm,
        options.pop("model", model),
        data,
        Training(lr=options.pop("lr", 0.1), batch_size=10),
        **options,
    )


class Far(FedAvg):
    """One client's upload is huge, from the second round on."""

    size = 1e10

    def train(self, down, own, clients):
        return _far(FedAvg, self, down, own, clients, self.size)


def sentence(error):
    text = str(error.value)
    assert text.count(". ") == 0 and "\n" not in text
    return text


# losses and accuracies ------------------------------------------------------
def test_a_model_that_answers_nan_is_wrong():
    scores = torch.tensor([[torch.nan, torch.nan], [0.0, 1.0], [torch.nan, 9.0]])
    assert metrics.right(scores, torch.tensor([0, 1, 1])).tolist() == [False, True, False]
    assert metrics.right(torch.tensor([torch.nan, -1.0]), torch.tensor([0, 0])).tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_loss_that_is_not_finite_spoils_the_mean_and_is_counted(data, engine):
    s = run(data, engine=engine)
    s.state.server["x"][:] = torch.nan
    seen = s.evaluate("test")
    assert seen["loss"].isinf().all() and (seen["accuracy"] == 0).all()


def test_whole_numbers_are_no_labels_to_a_squared_error():
    parts = [(torch.randn(8, 2), torch.arange(8)) for _ in range(2)]
    fed = Federation.from_clients(with_test(parts, parts), classes=None)
    for engine in ("loop", "vmap"):
        s = Simulation(
            "fedavg",
            Net(lambda: nn.Linear(2, 1), "squared"),
            fed,
            Training(lr=0.01),
            rounds=1,
            hardware=Hardware(engine=engine),
        )
        assert set(s.evaluate("test")) == {"loss", "size"}


def test_what_stopped_a_run_is_said(data):
    with pytest.warns(RuntimeWarning, match="fedavg, seed 0, stopped early: The run diverged"):
        run(data, lr=1e38, rounds=9).run()


# a run's end ----------------------------------------------------------------
def test_void_rounds_at_the_end_are_a_sentence(data):
    history = run(data, lr=1e38, rounds=2).run()
    assert [r["void"] for r in history.rounds] == [
        False,
        True,
    ] and "round 2 was void" in history.stopped


# huge but finite ------------------------------------------------------------
@pytest.mark.parametrize("cls", ["fedadam", "fedyogi", "fedadagrad"])
def test_a_servers_second_moment_never_becomes_infinite(data, cls):
    kind = type(
        "Spoilt", (ALGORITHMS[cls],), {"train": lambda *args: _far(ALGORITHMS[cls], *args, 1e25)}
    )
    s = run(data, kind(), rounds=9)
    history = s.run()
    assert [r["void"] for r in history.rounds] == [False, True, True, True]
    assert (
        "the server's" in history.stopped
        and " v" in history.stopped
        and "client 2's update" in history.stopped
        and "clip" in history.stopped
    )
    assert all(bool(v.isfinite().all()) for v in history.state.server.values())


def _far(base, self, down, own, clients, size):
    new, up, fit = base.train(self, down, own, clients)
    if clients.round > 1:
        up["delta"][clients.ids == 2] = size
    return new, up, fit


def test_who_moved_far_is_in_the_record_and_in_the_table(data):
    history = run(data, Far()).run()
    assert max(history.rounds[0]["moved"]) < 5
    assert history.rounds[1]["moved"][2] > 1e8 and sorted(history.rounds[1]["moved"])[2] < 5
    text = table(group(history.lines()))
    assert "moved far: client 2 by up to" in text
    assert "moved far" not in table(group(run(data).run().lines()))


def test_a_clipped_update_is_as_long_as_allowed(data):
    free, held = (run(data, Far(), rounds=2, clip=c).run() for c in (None, 0.5))
    assert (
        held.rounds[1]["clipped"] == [2]
        and held.header["clip"] == 0.5
        and free.rounds[1]["clipped"] == []
    )
    assert float(free.state.server["x"].norm()) > 1e8 > 10 > float(held.state.server["x"].norm())
    assert "the updates of 1 client were clipped" in table(group(held.lines()))
    one = run(data, clip=0.01, rounds=1, participation=0.25)
    before = one.state.server["x"].clone()
    moved = one.run().state.server["x"] - before
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-5)


@pytest.mark.parametrize("name", swept(set(ALGORITHMS) - {"factorized_waffle"}))
def test_every_method_takes_a_clip(name, data):
    fed, clip, alg = held_out(data), 1e-3, made(name)
    loose, wide = (run(fed, alg, rounds=2, every=0, clip=c) for c in (None, 1e30))
    a, b = loose.run().state, wide.run().state
    # a limit that nobody meets changes nothing
    assert all(torch.equal(a.server[k], b.server[k]) for k in a.server)
    history = run(fed, alg, rounds=2, every=0, clip=clip).run()
    assert history.stopped is None and all(
        bool(r["clipped"]) == (name != "local") for r in history.rounds
    )
    assert all(bool(r["moved"]) == (name != "local") for r in history.rounds)


# states ---------------------------------------------------------------------
def test_what_a_caller_holds_never_changes(data):
    start = run(data, "ditto", rounds=2).run().state
    kept = copy.deepcopy(start)
    results = [run(data, "ditto", rounds=4, warm_start=start).run() for _ in range(2)]
    seen = []
    s = run(data, "ditto", rounds=3)
    s.run(lambda r, record: seen.append((s.state, copy.deepcopy(s.state))))
    for one, two in [(start, kept), (results[0].state, results[1].state), *seen]:
        assert all(
            torch.equal(one.clients[k], two.clients[k]) for k in two.clients
        ) and torch.equal(one.server["x"], two.server["x"])
    again = run(data, "ditto", rounds=3).run().state
    assert torch.equal(again.clients["v"], s.state.clients["v"])  # looking changes nothing


def test_a_warm_start_of_something_else_is_refused(data):
    state = run(data, "ditto").run().state
    other = synthetic_clusters(n=5, groups=1, samples=20, classes=3, dim=5, held_out=20)
    wide = lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))  # noqa: E731
    cases = [
        ("scaffold", data, model, "Scaffold"),
        ("ditto", other, model, "5 clients"),
        ("ditto", data, wide, "shape"),
    ]
    for name, fed, build, word in cases:
        with pytest.raises(ValueError, match=r"^warm_start: .*" + word) as e:
            run(fed, name, model=build, rounds=9, warm_start=state)
        sentence(e)
    with pytest.raises(ValueError, match=r"^rounds: ") as e:
        run(data, "ditto", rounds=3, warm_start=state)


# arguments ------------------------------------------------------------------
BAD = {
    "clients": {"clients": [1, 1, 1]},
    "evaluation.clients": {"evaluated": [0, 9]},
    "rounds": {"rounds": math.nan},
    "workers": {"workers": -1},
    "device": {"device": "mps"},
    "seed": {"seed": 1e23},
    "clip": {"clip": math.nan},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(data, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected") as e:
        run(data, **BAD[name])
    sentence(e)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAvg(server_lr=math.nan),
        lambda: FedAdam(server_lr=math.inf),
        lambda: FedAvg(server_lr=-1.0),
        lambda: Ditto(personal_epochs=0),
        lambda: Ditto(lam=math.inf),
        lambda: Training(lr=math.inf),
        lambda: Training(weight_decay=math.inf),
        lambda: Training(epochs=1.5),
    ],
)
def test_bad_options(make):
    with pytest.raises(ValueError, match="expected") as e:
        make()
    sentence(e)


def test_lists_of_clients_will_do(data):
    history = run(data, clients=[2, 0], evaluated=[0, 1]).run()
    assert history.rounds[0]["cohort"] == [0, 2] and history.rounds[0]["eval"]["size"][2:] == [0, 0]


def test_a_class_in_the_place_of_an_instance(data):
    assert run(data, Ditto).algorithm == Ditto()  # a class stands for its defaults
    with pytest.raises(TypeError, match=r"class CrossEntropyLoss; write CrossEntropyLoss\(\)") as e:
        Net(model, nn.CrossEntropyLoss)
    sentence(e)


@pytest.mark.parametrize("name", swept(set(ALGORITHMS) - {"factorized_waffle"}))
def test_options_that_play_no_part_change_nothing_and_the_others_do(name):
    fed = held_out(
        synthetic_clusters(n=4, groups=2, samples=20, classes=3, dim=5, held_out=20).keep(
            0.7, [0, 1]
        )
    )
    algorithm = made(name)
    base = run(fed, algorithm).run()
    for key, value in (
        ("server_lr", 0.5),
        ("weighting", "uniform" if vars(algorithm).get("weighting") == "samples" else "samples"),
    ):
        if key not in vars(algorithm):
            continue
        try:
            other = run(fed, replace(algorithm, **{key: value})).run()
        except ValueError as e:  # it has no other
            assert str(e).startswith(f"{key}: expected {vars(algorithm)[key]!r}, got")
            continue
        assert not torch.equal(base.series("loss")[1], other.series("loss")[1])


def test_an_infinite_loss_is_no_very_large_number():
    fed = Federation.from_clients(
        [(torch.randn(6, 2), torch.randn(6) * by) for by in (1.0, 1e25)]
    ).split(test=0.5)
    assert (
        Simulation(FedAvg(), torch.nn.Linear(2, 1), fed, Training(1e-3), rounds=1).evaluate("test")[
            "loss"
        ][1]
        == math.inf
    )


def test_an_error_in_a_callback_keeps_the_history(data):
    def on_round(r, record):
        if r == 2:
            raise KeyError("mine")

    s = run(data)
    with pytest.raises(KeyError) as e:
        s.run(on_round)
    assert [r["round"] for r in e.value.history.rounds] == [
        1,
        2,
    ] and e.value.history.state.round == 2


def test_a_run_cut_short_says_so(tmp_path):
    lines = [{"header": {"algorithm": "fedavg", "rounds": 150}}] + [
        {"round": r, "eval": {"accuracy": [0.5]}} for r in range(1, 65)
    ]
    text = table(group(lines))
    assert "| 64 of 150 rounds" in text and "of 64" not in text
