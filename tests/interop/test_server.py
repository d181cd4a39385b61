"""A server and its clients give a simulation's models, for every algorithm.

Clients may join and leave. A bad client harms no other client and ends no run.
"""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from entry_points import sentence
from parts.interop import (
    DATA,
    ROUNDS,
    SEED,
    SETTING,
    TRAINING,
    again,
    agree,
    algorithm,
    bn_model,
    model,
    whole,
)
from parts.modes import Mode
from small import SIX, crossed, images, layers, near, swept, tiny_model
from torch import nn

from pflcore import (
    Adversary,
    Client,
    Federation,
    Robustness,
    Server,
    Simulation,
)
from pflcore.algorithms import ALGORITHMS, Cohort, FedAvg
from pflcore.robust import Krum, MultiKrum, TrimmedMean
from pflcore.simulation import round as by_hand

ALL = range(DATA.n)


def apart(alg, make=model, clip=None, data=DATA, **options):
    alg = algorithm(alg) if isinstance(alg, str) else alg
    server = Server(alg, make, data.n, rounds=ROUNDS, seed=SEED, clip=clip, **options)
    parts = [data.subset([i]) for i in ALL]
    return server, [
        Client(alg, make, part, TRAINING, **SETTING, **options) for part in parts
    ]


def uploads(server, clients, ids=ALL):
    downloads = {i: server.download(i) for i in ids}
    return {i: clients[i].train(d) for i, d in reversed(downloads.items())}


def play(server, clients, *cohorts):
    return [server.aggregate(uploads(server, clients, ids)) for ids in cohorts]


def personal(server, clients, i):
    return clients[i].model(server.download(i, "evaluation"))


def view(server, clients, i):
    return personal(server, clients, i).state_dict()["view_w"]


def unchanged(server, before):
    after = server.state_dict()["state"]
    return all(torch.equal(v, after[k]) for k, v in before["state"].items())


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", swept(one_in=1))
def test_server_and_clients_are_the_simulation(name, participation):
    # A client that never trained has other statistics, see docs/interop.md.
    make = bn_model if participation == 1 else model
    run = whole(algorithm(name), make, participation)
    history = run.run()
    server, clients = apart(name, make)
    rounds = range(1, ROUNDS + 1)
    cohorts = [by_hand.sample_cohort(run.config, r, participation) for r in rounds]
    play(server, clients, *(cohort.tolist() for cohort in cohorts))
    for i in ALL:
        x, y = DATA.client(i, "test")
        one = history.model(i)
        other = personal(server, clients, i)
        agree(one, other, x)
        metrics = clients[i].evaluate(server.download(i, "evaluation"))
        # The model of kNN-Per gives probabilities.
        scores = one(x).log() if name == "knnper" else one(x)
        want = {
            "size": len(y),
            "loss": nn.functional.cross_entropy(scores, y).item(),
            "accuracy": (one.predict(x) == y).double().mean(),
        }
        assert metrics == pytest.approx(want)
    assert ("@statistics" in server.download(0)) is run.config.averages


def test_clients_that_label_otherwise_are_those_of_a_simulation():
    labels = torch.arange(DATA.classes)[None] + torch.arange(DATA.n)[:, None]
    data = replace(DATA, relabel=labels % DATA.classes)
    whole_run = Simulation("fedper", model, data, TRAINING, ROUNDS, **SETTING)
    history = whole_run.run()
    server, clients = apart("fedper", data=data)
    play(server, clients, *[ALL] * ROUNDS)
    last = history.last_values("accuracy")
    for i in ALL:
        agree(history.model(i), personal(server, clients, i), data.client(i)[0])
        metrics = clients[i].evaluate(server.download(i, "evaluation"))
        assert metrics["accuracy"] == pytest.approx(last[i].item())


def test_what_travels_is_plain_tensors_of_the_algorithms_size():
    server, clients = apart("fedfomo")
    play(server, clients, ALL)
    down = server.download(0)
    up, n = clients[0].train(again(down))
    assert n == 10 and all(
        type(v) is torch.Tensor for v in (*down.values(), *up.values())
    )
    sent = sum(
        v.numel() for k, v in down.items() if v.is_floating_point() and k != "@about"
    )
    assert sent == 3 * server.net.size  # the models of the three others, each once


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize(
    "name", ["fedavg", "feddwa", "l2c", "waffle", "clustered_fl", "ditto"]
)
def test_a_server_and_clients_that_were_saved_go_on_as_if_they_had_not_stopped(name):
    """A restored server and its clients go on without a difference.

    The states are loaded into new objects, and into those that have gone on since.
    """
    server, clients = apart(name)
    fresh = apart(name)
    cohorts = [[0, 1, 2, 3], [0, 2], [0, 1, 3]]
    states = []
    for ids in cohorts:
        states.append(again([part.state_dict() for part in (server, *clients)]))
        play(server, clients, ids)
    end = server.state_dict()
    seen = view(server, clients, 0)
    for (restored, parts), first in (((server, clients), 0), (fresh, 2)):
        for part, state in zip((restored, *parts), states[first], strict=True):
            part.load_state_dict(state)
        play(restored, parts, *cohorts[first:])
        assert unchanged(restored, end)
        assert torch.equal(view(restored, parts, 0), seen)
        assert restored.clients == server.clients and restored.round == 3


@pytest.mark.parametrize("name", ["ditto", "fedavg"])
def test_a_client_that_lost_its_state_says_so(name):
    server, clients = apart(name)
    play(server, clients, ALL)
    client = clients[0]
    client.model(server.download(0, "evaluation"))
    saved = client.state_dict()  # of round 1
    play(server, clients, ALL, ALL)
    download = server.download(0, "evaluation")
    client.load_state_dict(saved)
    fresh = apart(name)[1][0]
    for part, held in ((client, "of round 1"), (fresh, "a new client's")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            part.model(download)
        texts = [str(warning.message) for warning in caught]
        words = f"own state is {held}, and the server last used its upload of round 3"
        assert [words in text for text in texts] == [True] * (name == "ditto"), texts


def test_a_state_of_something_else_is_refused_and_nothing_changes():
    server, clients = apart("ditto")
    play(server, clients, ALL)
    before = server.state_dict()
    started = view(server, clients, 0)
    narrow = lambda: model().float()  # noqa: E731
    others = [apart("scaffold"), apart("ditto", tiny_model()), apart("ditto", narrow)]
    server_states = [other.state_dict() for other, _ in others]
    client_states = [other[0].state_dict() for _, other in others]
    for part, kind, states in (
        (server, "server", server_states),
        (clients[0], "client", client_states),
    ):
        for state in ({}, {"own": {}}, None):
            with sentence(rf"state: expected what state_dict\(\) of a {kind} gives"):
                part.load_state_dict(state)
        for state in states:
            with sentence(f"state: expected that of this {kind}, got one of another: "):
                part.load_state_dict(state)
    assert unchanged(server, before) and torch.equal(view(server, clients, 0), started)
    looking_back = Server(ALGORITHMS["feddwa"](guidance="previous"), model, 4)
    with sentence("state: expected that of this server, .*: guidance is"):
        looking_back.load_state_dict(Server("feddwa", model, 4).state_dict())


LOCAL = {"alg": "fedavg", "make": bn_model, "batch_norm": "local"}
GAMES = [
    ({"alg": "fedavg"}, {"alg": "scaffold"}),
    ({"alg": "fedper"}, {"alg": "fedavg"}),
    ({"alg": "fedavg", "make": tiny_model()}, {"alg": "fedavg"}),
    ({"alg": "fedavg", "make": bn_model}, LOCAL),
]


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("theirs, mine", GAMES)
def test_two_games_are_one_sentence_on_either_side(theirs, mine):
    """A server and a client of different runs refuse each other's messages."""
    their_server, their_clients = apart(**theirs)
    my_server, my_clients = apart(**mine)
    words = "it is of another algorithm, model or `batch_norm`"
    with sentence(f"download: {words}"):
        my_clients[0].train(their_server.download(0))
    my_server.join(0)
    with sentence(f"client 0: {words}"):
        my_server.aggregate(uploads(their_server, their_clients, [0]))


def test_a_client_whose_upload_was_lost_or_refused_keeps_its_old_state():
    server, clients = apart("ditto")
    play(server, clients, ALL)
    before = view(server, clients, 1)
    clients[1].train(server.download(1))
    play(server, clients, [0, 2, 3])  # client 1's upload is lost
    assert torch.equal(view(server, clients, 1), before)
    ups = uploads(server, clients, [0, 1, 2])
    ups[1][0]["delta"][0] = torch.nan
    done = server.aggregate(ups)
    assert done.dropped == [1] and not done.void
    assert torch.equal(view(server, clients, 1), before)
    play(server, clients, [1])
    assert not torch.equal(view(server, clients, 1), before)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", swept())
def test_clients_come_by_any_name_beyond_the_number_that_was_expected(name):
    server = Server(algorithm(name), model, 2, rounds=ROUNDS, seed=SEED)
    clients = dict(zip(("x", 17, "y", "z"), apart(name)[1], strict=True))
    for there in (["x", 17], ["x", "z", 17], ["x", "y", "z"]):
        for c in there:
            server.join(c)
        assert not play(server, clients, there)[0].void
    assert server.clients == {"x": 0, 17: 1, "z": 2, "y": 3}
    server.download("x")
    server.leave(17)
    with sentence("client 17: expected no newcomer in a round begun with 4 clients"):
        server.download(17)
    play(server, clients, ["x"])
    assert server.download(17)["@about"][0] == 4  # a newcomer, whatever its number was
    assert personal(server, clients, "y")(DATA.client(2, "test")[0]).isfinite().all()


def test_scaffolds_control_variate_is_the_mean_of_all_after_a_client_joined():
    """SCAFFOLD's control variate is the mean over clients (Algorithm 1).

    This holds also with more clients than the server expected.
    """
    server = Server("scaffold", model, 3, rounds=ROUNDS, seed=SEED)
    _, clients = apart("scaffold")
    for there in ([0, 1, 2], ALL, ALL):
        for client in there:
            server.join(client)
        play(server, clients, there)
    for i in ALL:
        personal(server, clients, i)  # tells the client if its last upload was used
    mean = sum(client.state_dict()["own"]["c"][0] for client in clients) / DATA.n
    near(server.state_dict()["state"]["server.c"], mean)


def test_numbers_of_whole_numbers_are_their_own():
    server = Server("fedavg", model, 4)
    for client in (3, "a", 0, 1):
        server.download(client)
    assert server.clients == {3: 3, "a": 0, 0: 1, 1: 2}


def test_mistakes_are_one_sentence_and_cost_nothing():
    server, clients = apart("waffle")
    late = uploads(server, clients, [0])
    play(server, clients, [0, 1])
    before = server.state_dict()
    both = uploads(server, clients, [0, 1])
    up = both[0]
    other = both[1]
    cases = [
        ({}, "uploads: expected"),
        ([up], "uploads: expected"),
        (
            late,
            "client 0: its upload is that of client number 0 for round 1",
        ),
        ({0: other}, "client 0: its upload is that of client number 1 for round 2"),
        ({1: other}, "uploads: the target, client number 0, must take part"),
        (
            {0: up, 9: other},
            "client 9: expected one of those who have downloaded, got .0, 1.",
        ),
    ]
    for given, words in cases:
        with sentence(words):
            server.aggregate(given)
    with pytest.warns(RuntimeWarning):
        for ups in ({}, {0: ({}, 1)}):
            assert server.aggregate(ups, strict=False).void
    assert unchanged(server, before)
    both = uploads(server, clients, [0, 1])
    assert not server.aggregate(both).void


def test_mistakes_at_the_door():
    server, clients = apart("fedavg")
    play(server, clients, [0])
    calls = [
        (
            lambda: server.download(1.5),
            "client_id: expected a string or a whole number",
        ),
        (
            lambda: server.download(1, "test"),
            "purpose: expected 'train' or 'evaluation'",
        ),
        (
            lambda: clients[0].train(server.download(0, "evaluation")),
            "download: .* an evaluation",
        ),
        (
            lambda: Client("fedavg", model, DATA),
            "samples: expected those of one client",
        ),
        (
            lambda: clients[0].evaluate(server.download(0, "evaluation"), "night"),
            "split: this client has no sample of 'night'",
        ),
    ]
    for call, words in calls:
        with sentence(words):
            call()


def test_a_client_takes_arrays_and_knows_classes_that_it_has_not():
    x, y = DATA.client(0)
    client = Client(
        "fedrod", model, (x.float().numpy(), (y * 0).numpy()), TRAINING, **SETTING
    )
    assert client.data.classes == 3 and client.data.x.dtype == torch.float64
    server = Server("fedrod", model, 1, seed=SEED)
    assert not server.aggregate({0: client.train(server.download(0))}).void


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "name, options",
    [
        ("scaffold", {}),
        ("waffle", {"control_agg": "literal"}),
        ("waffle", {}),
        ("ditto", {}),
    ],
)
def test_a_client_keeps_what_the_server_took_of_a_long_update(name, options):
    alg = ALGORITHMS[name](**options)
    run = whole(alg, model, robustness=Robustness(clip=0.05))
    assert any(r["clipped"] for r in run.run().rounds)
    server, clients = apart(alg, clip=0.05)
    play(server, clients, ALL, ALL)
    fresh = apart(alg, clip=0.05)[0]
    fresh.load_state_dict(again(server.state_dict()))
    play(fresh, clients, ALL)
    for i, client in enumerate(clients):
        fresh.download(i)
        personal(fresh, clients, i)  # tells the client if its last upload was used
        for key, rows in run.state.clients.items():
            near(client.state_dict()["own"][key][0], rows[i])


def test_a_client_whose_own_model_diverges_is_dropped_and_keeps_what_it_had():
    alg = ALGORITHMS["ditto"](lam=1e30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = [r["dropped"] for r in whole(alg, model).run().rounds]
    assert any(want)
    both = apart(alg)
    assert [done.dropped for done in play(*both, *[ALL] * len(want))] == want
    assert all(view(*both, i).isfinite().all() for i in ALL)


@pytest.mark.deep("together they take seconds", quick=2)
@pytest.mark.parametrize("name", ["hypcluster", "ensemble"])
def test_a_pick_of_no_model_is_named(name):
    server, clients = apart(name)
    play(server, clients, ALL)
    ups = uploads(server, clients)
    ups[1][0]["pick"].fill_(99)
    before = server.state_dict()
    words = "client 1: its 'pick' holds 99, expected a whole number from 0 to 1"
    with sentence(words):
        server.aggregate(ups)
    assert unchanged(server, before)
    with pytest.warns(RuntimeWarning, match=words):
        done = server.aggregate(ups, strict=False)
    assert done.dropped == [1] and not done.void
    twin, _ = apart(name)
    twin.load_state_dict(before)
    assert not twin.aggregate({i: up for i, up in ups.items() if i != 1}).void
    assert unchanged(server, twin.state_dict())


LRS = (10.0, 1e30, 3.0, 1e-30, 0.0, -1.0)
STEPS = (1.0, 1e30, -1e30)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("lr, steps, lam", crossed(LRS, STEPS, [0.5, 0.01]))
def test_one_clients_word_about_its_step_size_ends_no_run(lr, steps, lam):
    server, clients = apart(ALGORITHMS["mocha"](lam=lam, outer=1))
    for _ in range(3):
        ups = uploads(server, clients)
        up, n = ups[3]
        claim = {
            "lr": torch.full_like(up["lr"], lr),
            "steps": torch.full_like(up["lr"], steps),
        }
        done = server.aggregate(ups | {3: (up | claim, n)}, strict=False)
        assert done.dropped in ([], [3])
        assert (done.void_reason is None) is (not done.void)
    assert server.round == 3
    assert personal(server, clients, 0)(DATA.client(0)[0]).isfinite().all()


def test_a_step_size_that_others_do_not_have_is_left_out_by_name():
    server = Server("mocha", model, 4, rounds=ROUNDS, seed=SEED)
    clients = apart("mocha")[1]
    names = ["a", "b", "c", "d"]

    def ups():
        each = {
            name: clients[i].train(server.download(name))
            for i, name in enumerate(names)
        }
        if server.round:
            up, n = each["d"]
            each["d"] = (up | {"lr": torch.full_like(up["lr"], 1000.0)}, n)
        return each

    server.aggregate(ups())
    before = server.state_dict()
    odd = ups()
    words = (
        "client 'd': its step size is 1000, the others' is 0.025, and MOCHA is "
        "unstable with it"
    )
    with sentence(words):
        server.aggregate(odd)
    assert unchanged(server, before)
    with pytest.warns(RuntimeWarning, match=words):
        done = server.aggregate(odd, strict=False)
    assert done.dropped == ["d"] and done.ids == names and not done.void
    del odd["d"]
    twin = Server("mocha", model, 4, rounds=ROUNDS, seed=SEED)
    twin.load_state_dict(before)
    twin.aggregate(odd)
    assert unchanged(server, twin.state_dict())


def test_step_sizes_that_are_all_too_large_void_a_round_and_say_so():
    def play(lam):
        alg = ALGORITHMS["mocha"](lam=lam, outer=1)
        server, _ = apart(alg)
        return server, uploads(server, apart(ALGORITHMS["mocha"](lam=0.01, outer=1))[1])

    server, ups = play(60.0)
    before = server.state_dict()
    with sentence("uploads: MOCHA is unstable from round 1 on"):
        server.aggregate(ups)
    with pytest.warns(RuntimeWarning, match="uploads: MOCHA is unstable"):
        done = server.aggregate(ups, strict=False)
    assert (
        done.void
        and done.void_reason.startswith("MOCHA is unstable")
        and unchanged(server, before)
    )


def test_what_an_own_algorithm_says_in_a_later_round_ends_no_run():
    class Own(FedAvg):
        def update(self, state, up, cohort):
            if cohort.round > 1:
                raise ZeroDivisionError("division by zero")
            return super().update(state, up, cohort)

    server, clients = apart(Own())
    play(server, clients, ALL)
    ups = uploads(server, clients)
    with pytest.raises(ZeroDivisionError):
        server.aggregate(ups)
    with pytest.warns(
        RuntimeWarning, match=r"Own cannot use what each holds.*division by zero"
    ):
        assert server.aggregate(ups, strict=False).void


def test_an_error_of_a_report_is_the_methods_own_and_costs_no_round():
    class Unreported(FedAvg):
        def report(self, state, mix, cohort):
            raise ValueError("no report")

    server, clients = apart(Unreported())
    with pytest.raises(ValueError, match=r"^no report$"):
        server.aggregate(uploads(server, clients), strict=False)
    assert server.round == 1
    server.algorithm.__class__ = FedAvg
    assert not play(server, clients, ALL)[0].void
    assert server.round == 2


def test_a_graph_has_no_place_for_a_newcomer():
    server, clients = apart(ALGORITHMS["sfl"](adjacency=torch.ones(4, 4)))
    play(server, clients, ALL)
    with sentence("adjacency: expected 5 x 5 numbers >= 0 .a newcomer counts, too"):
        server.join("late")
    assert not play(server, clients, ALL)[0].void


def test_a_negative_variance_is_dropped_and_honest_models_stay_finite():
    """A negative variance is dropped, and honest models stay finite.

    Statistics that require gradients count as plain numbers.
    """
    server, clients = apart("fedadam", bn_model, clip=1.0)
    ups = uploads(server, clients)
    ups[0][0]["@statistics"].requires_grad_()
    ups[3][0]["@statistics"].fill_(-1e6)
    assert server.aggregate(ups).dropped == [3]
    assert personal(server, clients, 0)(DATA.client(0)[0]).isfinite().all()
    assert not play(server, clients, ALL)[0].void


def numbers(about):
    """Headers with one number that no message has.

    The numbers have the order of the fields of `MessageHeader`.
    """
    number, n, _, round, rounds, done, accepted, factor = range(8)
    for place, odd in (
        *((number, odd) for odd in (-1, 4, 2**52, 0.5, torch.nan, torch.inf)),
        *((n, odd) for odd in (0, -1, 2e8, 1e300, 4.5)),
        *((round, odd) for odd in (0, -1, torch.nan)),
        (rounds, 0),
        *((done, odd) for odd in (-1, torch.inf)),
        *((accepted, odd) for odd in (-1, 99)),
        *((factor, odd) for odd in (-1, 2, torch.nan)),
    ):
        changed = about.clone()
        changed[place] = odd
        yield changed


class Largest(Mode):
    """A mode that notes the size of the largest new tensor."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        is_new = not any(result is arg for arg in args)
        if isinstance(result, torch.Tensor) and is_new:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def spoilt(up, n):
    """Bad uploads instead of `up`, which is of `n` samples.

    The first two are bad for every algorithm.
    """
    about = up["@about"]
    first = next(k for k in up if k[0] != "@")
    value = up[first]
    yield {k: v for k, v in up.items() if k != first}, n
    nested = torch.nested.as_nested_tensor([value])
    for odd in (
        value[None],
        torch.empty(0),
        value.half(),
        value.to_sparse(),
        nested,
        "none",
    ):
        yield up | {first: odd}, n
    for lost in up.keys() - {first}:
        yield {k: v for k, v in up.items() if k != lost}, n
    for odd in (about + 1, about * torch.nan, torch.zeros(2), torch.tensor(3)):
        yield up | {"@about": odd}, n
    pool = {"delta@rows": torch.zeros(2, 3)}
    sent = {
        "delta@sent": torch.ones(5, dtype=torch.bool),
        "delta@index": torch.zeros(1),
    }
    for more in (
        {"more": torch.ones(1)},
        {5: torch.ones(1)},
        {"more": 5},
        pool,
        pool | sent,
    ):
        yield up | more, n
    bomb = {
        "more@rows": torch.zeros(0, 600_000),
        "more@sent": torch.zeros(10**6, dtype=bool),
    }
    yield up | bomb | {"more@index": torch.zeros(1, dtype=torch.long)}, n
    yield up | {first: value.reshape(-1)[:1].expand(10**12)}, n
    yield from ((up | {"@about": odd}, n) for odd in numbers(about))
    yield from ((message, n) for message in (None, {}, []))
    yield from ((up, size) for size in (-1, 0, None, 10**30, torch.nan, True))


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", swept(set(ALGORITHMS) - {"local"}))
def test_an_upload_that_does_not_fit_is_named_and_a_round_goes_on_without_it(name):
    server, clients = apart(name, bn_model)
    for unfit in ({"more": torch.ones(1)}, {"@about": torch.ones(1)}):
        # In round 1 an upload must be like most of the uploads, and later like those of
        # the rounds before.
        ups = uploads(server, clients)
        before = server.state_dict()
        for bad in (0, 3):
            for odd in spoilt(*ups[bad]):
                with sentence(f"client {bad}[:,]"):
                    server.aggregate(ups | {bad: odd})
        same_fault = list(zip(*(spoilt(*ups[i]) for i in ALL), strict=True))
        for odd in same_fault if server.round else same_fault[:2]:
            with sentence("(uploads: .* cannot use what each holds|client 0[:,])"):
                server.aggregate(dict(enumerate(odd)))
        assert unchanged(server, before)
        up, n = ups[3]
        with pytest.warns(RuntimeWarning, match=r"client 3[:,]"):
            done = server.aggregate(ups | {3: (up | unfit, n)}, strict=False)
        assert done.ids == [0, 1, 2] and not done.void


def plain_model():
    return layers("Linear 6 5, ReLU, Linear 5 3")


def methods_and_dtypes():
    """Each method with each dtype of an upload.

    What becomes of a dtype does not depend on the method, so not all are deep tests.
    `test_no_upload_decides_a_dtype` has all methods.
    """
    for name in sorted(set(ALGORITHMS) - {"local"}):
        for dtype in (torch.float64, torch.float16, torch.int64):
            marks = pytest.mark.long("all algorithms")
            if name == "fedavg":
                marks = ()
            elif name in SIX:
                marks = pytest.mark.deep("all dtypes")
            yield pytest.param(name, dtype, marks=marks, id=f"{name}-{dtype}")


@pytest.mark.deep("it takes a second")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name, dtype", [*methods_and_dtypes()])
def test_one_dtype_of_an_upload_changes_nothing_for_others(name, dtype):
    """A wider dtype is converted, and another one refused, alone and in company."""
    for ids in ([0], ALL):
        for strict in (True, False):
            server, clients = apart(name, plain_model)
            ups = uploads(server, clients, ids)
            up, n = ups[0]
            odd = {k: v.to(dtype) for k, v in up.items() if v.dtype == torch.float32}
            assert odd
            given = {**ups, 0: ({**up, **odd}, n)}
            if dtype == torch.float64:
                twin = apart(name, plain_model)[0]
                play(twin, clients, ids)
                server.aggregate(given, strict)
                assert unchanged(server, twin.state_dict())
            elif strict:
                with sentence("client 0, '.*': expected .* float32, got"):
                    server.aggregate(given)
            else:
                assert 0 not in server.aggregate(given, strict).ids
            play(server, clients, ALL)


def named_client(names, number, **options):
    """A client whose classes have these names."""
    x, _ = DATA.client(number)
    y = [names[i % len(names)] for i in range(len(x))]
    data = Federation.from_clients([(x, y)], **options)
    return Client("fedavg", model, data, TRAINING, **SETTING)


def test_a_client_whose_classes_have_other_names_is_refused():
    server = Server("fedavg", model, 3, seed=SEED)
    same = ["covid", "normal", "pneumonia"]
    clients = [named_client(same, 0), named_client(same[1:], 1), named_client(same, 2)]
    ups = uploads(server, clients, [0, 1, 2])
    before = server.state_dict()
    words = (
        "client 1: its classes are normal, pneumonia, expected covid, normal, "
        "pneumonia, those of client 0; read its data with classes="
    )
    with sentence(words):
        server.aggregate(ups)
    assert unchanged(server, before) and server.classes is None
    with pytest.warns(RuntimeWarning, match=words):
        assert server.aggregate(ups, strict=False).ids == [0, 2]
    later = Server("fedavg", model, 3, seed=SEED)
    later.load_state_dict(again(server.state_dict()))
    with sentence(words):
        later.aggregate(uploads(later, clients, [1]))
    clients[1] = named_client(same[1:], 1, classes=same)
    assert not later.aggregate(uploads(later, clients, [1])).void
    later.leave(0)
    assert later.classes is None
    later.load_state_dict(server.state_dict())
    assert later.classes == tuple(same)
    turned = Server("fedavg", model, 3, seed=SEED, classes=same[::-1])
    with sentence(
        "classes: expected covid, normal, pneumonia, the names in the saved state, got "
        "pneumonia, normal, covid"
    ):
        turned.load_state_dict(server.state_dict())


def test_the_names_that_a_server_was_given_count():
    server = Server("fedavg", model, 2, seed=SEED, classes=["a", "b", "c"])
    clients = [named_client(["b", "c", "d"], 0), named_client(["a", "b", "c"], 1)]
    ups = uploads(server, clients, [0, 1])
    with sentence("client 0: its classes are b, c, d, expected a, b, c; read"):
        server.aggregate(ups)
    assert server.aggregate({1: ups[1]}).ids == [1]
    for odd in (torch.zeros(2), torch.tensor([200, 1], dtype=torch.uint8)):
        up, n = uploads(server, clients, [1])[1]
        with sentence("client 1, '@classes': expected the names of classes that a"):
            server.aggregate({1: (up | {"@classes": odd}, n)})


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", ["fedavg", "fedfomo", "l2c", "hypcluster"])
def test_nothing_is_made_that_is_larger_than_what_came(name):
    """No tensor is made that is larger than the message.

    A message of a megabyte announces a tensor with a million rows.
    """
    server, clients = apart(name)
    play(server, clients, ALL)
    ups = uploads(server, clients)
    download = again(server.download(0))
    keys = {k.removesuffix("@rows") for k in download if k.endswith("@rows")}
    key = min(keys, default="x")
    row = download.get(f"{key}@rows", torch.zeros(0, server.net.size).double())
    sent = torch.zeros(10**6, dtype=bool)
    bomb = {"@rows": row[:0], "@sent": sent, "@index": torch.full((1,), -1)}
    pool = {key + part: value for part, value in bomb.items()}
    with Largest() as largest:
        with sentence("client 0: expected .* in its upload, got"):
            server.aggregate(ups | {0: (ups[0][0] | pool, 10)})
        with sentence("download: expected shared rows as the other side made them"):
            clients[0].train(download | pool)
        for about in numbers(download["@about"]):
            with sentence("download, '@about': expected the 8 numbers"):
                clients[0].train(download | {"@about": about})
    assert largest.bytes <= len(sent)
    assert not server.aggregate(ups).void


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", swept())
def test_a_download_that_does_not_fit_is_one_sentence(name):
    server, clients = apart(name, bn_model)
    play(server, clients, ALL)
    download = server.download(0)
    client = clients[0]
    sizes = {server.net.size, *(v.shape[-1] for v in download.values() if v.shape[-1:])}
    for key, value in download.items():
        without_key = {k: v for k, v in download.items() if k != key}
        with sentence("download[:,]"):
            client.train(without_key)
        is_model = value.is_floating_point() and value.shape[-1:] == (max(sizes),)
        if is_model or key == "@statistics":
            for odd in (value.repeat(1, 2), value[..., :-1], value.float()):
                odd = odd[0] if odd.dim() > value.dim() else odd
                with sentence("download"):
                    client.train(download | {key: odd})
    assert not server.aggregate({0: client.train(download)}).void


def test_more_clients_than_a_message_can_number_are_refused_at_once():
    with sentence("num_clients: expected a whole number, at least 1, at most 16777216"):
        Server("fedavg", model, 2**24 + 1)


def test_what_an_own_algorithm_says_of_a_first_round_is_heard_and_ends_no_run():
    class Own(FedAvg):
        def update(self, state, up, cohort):
            raise ValueError("bank: expected to be open.")

    server, clients = apart(Own())
    ups = uploads(server, clients)
    words = (
        r"uploads: Own cannot use what each holds, .* \(bank: expected to be "
        r"open\); give both"
    )
    with sentence(words):
        server.aggregate(ups)
    with pytest.warns(RuntimeWarning, match=words):
        assert server.aggregate(ups, strict=False).void


def test_a_client_of_many_keeps_one_list_of_its_samples():
    data = torch.randn(600, 6).double(), torch.arange(600) % 3
    client = Client("fedavg", model, data, TRAINING)
    download = Server("fedavg", model, 100_000).download(7)
    before = resident()
    client.train(download)
    assert resident() - before < 100 * 2**20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


# -- defences where uploads are dropped: a dropped client lowers the number of hostile
# clients that the defence still expects, and an absent client does not


@pytest.mark.parametrize(
    "mean, least", [(Krum(1), 5), (MultiKrum(1), 5), (TrimmedMean(1), 3)]
)
def test_a_client_that_is_not_finite_ends_no_defended_run(mean, least):
    bad = Robustness(adversary=Adversary("scale", [least - 1], strength=1e39))
    algorithm = FedAvg(mean=mean)
    data = images((12,) * least)
    linear = nn.Linear(6, 4)
    history = Simulation(algorithm, linear, data, TRAINING, 5, robustness=bad).run()
    assert history.stopped is None
    outcomes = [(r["dropped"], r["void"]) for r in history.rounds]
    assert outcomes == [([least - 1], False)] * 5


# Each line: clients left in the round, dropped clients, and the number of hostile
# clients that may be among those left (null: the defence refuses).
LEFT = """\
[11, 0, 4]
[10, 1, 3]
[9, 2, 3]
[9, 1, 3]
[8, 1, null]
[8, 2, 2]
[4, 4, 0]
[2, 4, null]
"""


@pytest.mark.parametrize(
    "count, lost, f", [json.loads(line) for line in LEFT.splitlines()]
)
def test_as_many_may_be_hostile_as_those_who_are_left_allow(count, lost, f):
    """Krum against f = 4 equals Krum against the reduced number."""

    def weights(hostile, **more):
        cohort = Cohort(torch.arange(count), size, 20, 1, 1, **more)
        return Krum(hostile)(delta, cohort)[1].weight

    delta = torch.randn(count, 3)
    size = torch.ones(count, dtype=torch.long)
    if f is not None:
        assert torch.equal(weights(4, num_dropped=lost), weights(f))
        return
    words = "mean: krum:num_byzantine=4 needs 11 clients in a round, and round 1 has"
    with pytest.raises(Exception, match=words):
        weights(4, num_dropped=lost)


def test_an_evaluation_before_the_first_round_is_not_trained_on():
    server = Server("fedavg", model, DATA.n, seed=SEED)
    client = Client("fedavg", model, DATA.subset([0]), seed=SEED)
    assert client.evaluate(server.download(0, "evaluation"))
    with sentence("download: expected one to train on, got one for an evaluation"):
        client.train(server.download(0, "evaluation"))
    assert client.train(server.download(0))


def test_an_upload_that_is_not_finite_names_no_classes():
    server = Server("fedavg", model, 3, seed=SEED)
    names = [["x", "y", "z"], ["a", "b", "c"], ["a", "b", "c"]]
    clients = [named_client(of_client, i) for i, of_client in enumerate(names)]
    ups = uploads(server, clients, [0, 1, 2])
    ups[0][0]["delta"].fill_(torch.nan)

    outcome = server.aggregate(ups)

    assert outcome.dropped == [0] and not outcome.void
    assert tuple(server.classes) == ("a", "b", "c")


def test_a_head_may_have_one_input():
    data = Federation.from_clients([(torch.randn(8, 1), torch.arange(8) % 2)] * 2)
    net = nn.Linear(1, 2)
    server = Server("feddbe", net, 2, seed=SEED)
    client = Client("feddbe", net, data.subset([0]), seed=SEED)
    assert client.train(server.download(0))
