"""A bad client does not take the others with it: every algorithm, by every kind of bad upload.
`docs/trust.md` says what is promised.

The round goes on or stops with one sentence, what the server and the honest clients hold stays
finite, and a round changes all or nothing.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn as nn
from doors import held_out
from small import SIX, images, make_setting, swept, tiny_model

from pflcore import Client, Hardware, Net, Server, Simulation, Training, evaluate, step
from pflcore.algorithms import ALGORITHMS, FedAvg, Stop
from pflcore.data import Federation
from pflcore.simulation.round import Setup, begin

OPTIONS: dict[str, dict[str, Any]] = {"knnper": {"k": 3}}
DEFENDED = {
    "fedavg, median": FedAvg(defence="median"),
    "fedavg, fltrust": FedAvg(defence="fltrust", root=0),
}
NAMES = [*sorted(ALGORITHMS), *DEFENDED]
N, BAD, TARGET = 4, 2, 0
SILENT = {"local"}  # uploads nothing
VALUES = {"nan": torch.nan, "inf": torch.inf, "1e30": 1e30, "zeros": 0.0}
TRAINING = Training(lr=0.1, batch_size=10)
DATA = held_out(images((9, 20, 31, 20)))
TRIED: Counter[str] = Counter()  # bad inputs, by kind
every = pytest.mark.parametrize("name", swept(NAMES, (*SIX, *DEFENDED)))


def algorithm(name):
    return DEFENDED.get(name) or ALGORITHMS[name](**OPTIONS.get(name, {}))


def start(name):
    alg = algorithm(name)
    s = make_setting(alg.prepare(Net(tiny_model())), DATA, TRAINING, 6, workers=1)
    return alg, s, begin(alg, s.net, N)


def spoilt(alg, value, *bad):
    """The algorithm with `value` everywhere in what these clients upload."""

    class Spoilt(type(alg)):
        def train(self, down, own, clients):
            own, up, fit = super().train(down, own, clients)
            at = torch.isin(clients.ids, torch.tensor(bad)).nonzero()[:, 0]
            return (
                own,
                {
                    k: v.index_fill(0, at, value) if v.is_floating_point() else v
                    for k, v in up.items()
                },
                fit,
            )

    return Spoilt(**vars(alg))


def parts(state):
    return {
        **state.server,
        **{f"own {k}": v for k, v in state.clients.items()},
        "buffers": state.batch_norm,
    }


def same(a, b):
    one, two = parts(a), parts(b)
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def one_sentence(error):
    text = str(error)
    assert text.endswith(".") and text.count(". ") == 0 and "\n" not in text, text


@every
@pytest.mark.parametrize("kind", VALUES)
def test_a_bad_upload(name, kind):
    alg, s, state = start(name)
    for _ in range(3):
        TRIED[kind] += 1
        before = copy.deepcopy(state)
        try:
            state, done = step(Setup(spoilt(alg, VALUES[kind], BAD), s), state, torch.arange(N))
        except Stop as stop:  # where a method knows that going on makes no sense
            one_sentence(stop)
            assert kind == "1e30" and same(state, before)
            break
        if kind in ("nan", "inf") and name not in SILENT:
            assert done.dropped == [BAD] and not done.void
            # it was absent
            assert all(
                torch.equal(state.clients[k][BAD], before.clients[k][BAD]) for k in state.clients
            )
        elif done.void:
            assert same(state, before) and kind == "1e30"
        assert all(bool(v.isfinite().all()) for v in parts(state).values() if v.is_floating_point())
    honest = torch.arange(N) != BAD
    if kind != "1e30":
        assert evaluate(Setup(alg, s), state)["loss"][honest].isfinite().all()
    elif name == "fedavg, median":
        assert (evaluate(Setup(alg, s), state)["loss"][honest] < 2).all()


@pytest.mark.parametrize("name", [n for n in NAMES if algorithm(n).traits.required])
@pytest.mark.parametrize("kind", VALUES)
def test_the_target_is_bad(name, kind):
    alg, s, state = start(name)
    state, _ = step(Setup(alg, s), state, torch.arange(N))
    TRIED[f"the target's {kind}"] += 1
    before = copy.deepcopy(state)
    state, done = step(Setup(spoilt(alg, VALUES[kind], TARGET), s), state, torch.arange(N))
    assert done.void == (kind in ("nan", "inf")) and (same(state, before) or not done.void)
    assert all(bool(v.isfinite().all()) for v in parts(state).values() if v.is_floating_point())


@every
def test_a_hook_that_fails_changes_nothing(name):
    class Gone(type(algorithm(name))):
        fails = False

        def train(self, down, own, clients):
            out = super().train(down, own, clients)
            if Gone.fails:
                raise ConnectionError("client 2 is gone.")
            return out

    alg, s, state = start(name)
    gone = Gone(**vars(alg))
    state, _ = step(Setup(gone, s), state, torch.arange(N))
    before, Gone.fails = copy.deepcopy(state), True
    TRIED["a client that drops out"] += 1
    with pytest.raises(ConnectionError):
        step(Setup(gone, s), state, torch.arange(N))
    assert same(state, before) and state.round == before.round
    Gone.fails = False
    without = torch.tensor([i for i in range(N) if i != BAD])
    one, two = (step(Setup(a, s), copy.deepcopy(before), without)[0] for a in (gone, alg))
    assert same(one, two) and all(
        torch.equal(one.clients[k][BAD], before.clients[k][BAD]) for k in one.clients
    )


@every
def test_an_upload_of_the_wrong_size(name):
    """Whoever sends it is named, also where it is the first of all uploads; without it the round
    goes on."""
    alg, (_, s, _) = algorithm(name), start(name)
    server = Server(alg, s.net, N, rounds=4)
    clients = [
        Client(alg, s.net, DATA.subset([i]), TRAINING, hardware=Hardware(engine="loop"))
        for i in range(N)
    ]
    for bad in (0, BAD) if not alg.traits.required else (BAD,):
        uploads = {i: clients[i].train(server.download(i)) for i in range(N)}
        key = next(
            (k for k, v in uploads[bad][0].items() if v.is_floating_point() and v.dim()), None
        )
        if key is None:
            assert name in SILENT
            return
        right = uploads[bad]
        for wrong in (
            right[0][key][:-1],
            right[0][key][None],
            torch.empty(0),
            right[0][key].half(),
        ):
            TRIED["wrong size"] += 1
            before = copy.deepcopy(server.state_dict())
            with pytest.raises(ValueError, match=rf"^client {bad}: its upload holds") as e:
                server.aggregate({**uploads, bad: ({**right[0], key: wrong}, right[1])})
            one_sentence(e.value)
            after = server.state_dict()
            assert after["round"] == before["round"] and all(
                torch.equal(v, before["state"][k]) for k, v in after["state"].items()
            )
        done = server.aggregate({i: up for i, up in uploads.items() if i != bad})
        assert not done.void and bad not in done.ids


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "fedamp", "feddwa_qp", "mrmtl"])
@pytest.mark.parametrize("buffers", ["auto", "local"])
def test_a_first_round_of_nothing_but_wrong_uploads(name, buffers):
    """There is no right one yet to compare them with: one sentence, nothing changed, and the same
    round can be played with right ones."""
    alg = algorithm(name)
    net = alg.prepare(
        Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)))
    )
    server = Server(alg, net, N, rounds=4, batch_norm=buffers)
    uploads = {
        i: Client(alg, net, DATA.subset([i]), TRAINING, batch_norm=buffers).train(
            server.download(i)
        )
        for i in range(N)
    }
    before, message = copy.deepcopy(server.state_dict()), uploads[0][0]
    for key in (
        next(k for k, v in message.items() if v.dim() and v.is_floating_point()),
        *(k for k in message if k == "@statistics"),
    ):
        right = message[key]
        for wrong in ({}, {key: right[:-1]}, {key: right[None]}, {key: torch.empty(0)}):
            TRIED["everybody's wrong size"] += 1
            with pytest.raises(ValueError, match=r"^(uploads|client 0): ") as e:
                server.aggregate(
                    {
                        i: ({k: v for k, v in up.items() if k != key} | wrong, n)
                        for i, (up, n) in uploads.items()
                    }
                )
            one_sentence(e.value)
            after = server.state_dict()
            assert (
                all(torch.equal(v, before["state"][k]) for k, v in after["state"].items())
                and after["round"] == 0
            )
            assert after["accepted"] == before["accepted"]
    assert not server.aggregate(uploads).void


def test_what_an_own_algorithm_says_of_a_first_round_is_heard():
    class Own(FedAvg):
        def update(self, state, up, cohort):
            raise ValueError("bank: expected to be open.")

    server = Server(Own(), tiny_model(), N)
    uploads = {
        i: Client(Own(), tiny_model(), DATA.subset([i]), TRAINING).train(server.download(i))
        for i in range(N)
    }
    with pytest.raises(
        ValueError,
        match=r"^uploads: Own cannot use .* \(bank: expected to be open\); give both sides",
    ):
        server.aggregate(uploads)


@pytest.mark.parametrize("name", ["fedavg", "waffle", "feddwa"])
def test_a_run_of_bad_rounds_alone_stops_with_one_sentence(name):
    class Broken(ALGORITHMS[name]):
        def train(self, down, own, clients):
            own, up, fit = super().train(down, own, clients)
            return own, {k: v * torch.nan for k, v in up.items()}, fit

    run = Simulation(Broken(), tiny_model(), DATA, TRAINING, rounds=9, hardware=Hardware(workers=1))
    with pytest.warns(RuntimeWarning, match="stopped early"):
        history = run.run()
    assert len(history.rounds) == 3 and history.stopped is not None
    one_sentence(ValueError(history.stopped))


def test_a_client_without_data_is_refused_before_the_first_round():
    TRIED["empty data"] += 1
    with pytest.raises(ValueError, match=r"leave out the 1 without, got .1.") as e:
        Federation.from_clients(
            [
                (torch.randn(4, 6), torch.tensor([0, 1, 2, 3])),
                (torch.empty(0, 6), torch.empty(0, dtype=torch.long)),
            ]
        )
    assert "\n" not in str(e.value)


def test_a_message_that_is_none_and_a_number_of_samples_that_cannot_be():
    server = Server("fedavg", tiny_model(), 2, rounds=3)
    client = Client("fedavg", tiny_model(), DATA.subset([0]), TRAINING)
    up, n = client.train(server.download(0))
    about = next(k for k, v in up.items() if not v.is_floating_point())
    before = server.state_dict()["state"]["server.x"].clone()
    for message, size in [
        (None, n),
        ({}, n),
        ({**up, "delta": "none"}, n),
        ({**up, about: torch.zeros(2)}, n),
        ({**up, about: torch.tensor(3)}, n),
        ({**up, "delta@rows": torch.zeros(2, 3)}, n),
        (
            {
                **up,
                "delta@rows": torch.zeros(2, 3),
                "delta@sent": torch.ones(5, dtype=torch.bool),
                "delta@index": torch.zeros(1),
            },
            n,
        ),
        ({k: v for k, v in up.items() if k == about}, n),
        (up, 0),
        (up, 10**30),
        (up, torch.nan),
    ]:
        TRIED["malformed messages"] += 1
        with pytest.raises(ValueError, match=r"^(client 0|uploads)") as e:
            server.aggregate({0: (message, size)})
        assert (
            "\n" not in str(e.value)
            and server.round == 0
            and torch.equal(server.state_dict()["state"]["server.x"], before)
        )
