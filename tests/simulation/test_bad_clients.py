"""A bad client does not take the others with it: every algorithm, by every kind of bad upload.
`docs/trust.md` says what is promised.

The round goes on or stops with one sentence, what the server and the honest clients hold stays
finite, and a round changes all or nothing.
"""

import copy
import re

import pytest
import torch
import torch.nn as nn
from doors import held_out, sentence
from small import SIX, images, make_setting, swept, tiny_model

from pflcore import Client, Hardware, Net, Server, Training, evaluate, step
from pflcore.algorithms import ALGORITHMS, FedAvg, Stop
from pflcore.simulation.round import Setup, begin

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
every = pytest.mark.parametrize("name", swept(NAMES, (*SIX, *DEFENDED)))


def algorithm(name):
    return DEFENDED.get(name) or ALGORITHMS[name](**({"k": 3} if name == "knnper" else {}))


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
            floats = {
                k: v.index_fill(0, at, value) for k, v in up.items() if v.dtype.is_floating_point
            }
            return own, up | floats, fit

    return Spoilt(**vars(alg))


def parts(state):
    own = {f"own {k}": v for k, v in state.clients.items()}
    return state.server | own | {"buffers": state.batch_norm}


def finite(state):
    return all(bool(v.isfinite().all()) for v in parts(state).values() if v.is_floating_point())


def same(a, b):
    one, two = parts(a), parts(b)
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


@every
@pytest.mark.parametrize("kind", VALUES)
def test_a_bad_upload(name, kind):
    alg, s, state = start(name)
    bad, honest = spoilt(alg, VALUES[kind], BAD), torch.arange(N) != BAD
    for _ in range(3):
        before = copy.deepcopy(state)
        try:
            state, done = step(Setup(bad, s), state, torch.arange(N))
        except Stop as stop:  # where a method knows that going on makes no sense
            assert re.fullmatch(r"((?!\. ).)+\.", str(stop)), stop
            assert kind == "1e30" and same(state, before)
            break
        if kind in ("nan", "inf") and name not in SILENT:
            assert done.dropped == [BAD] and not done.void
            # it was absent
            for k, v in state.clients.items():
                assert torch.equal(v[BAD], before.clients[k][BAD])
        elif done.void:
            assert same(state, before) and kind == "1e30"
        assert finite(state)
    loss = evaluate(Setup(alg, s), state)["loss"][honest]
    assert kind == "1e30" or loss.isfinite().all()
    assert name != "fedavg, median" or (loss < 2).all()
    for target in alg.traits.required:  # without it nothing changes
        state, _ = step(Setup(alg, s), begin(alg, s.net, N), torch.arange(N))
        before = copy.deepcopy(state)
        state, done = step(Setup(spoilt(alg, VALUES[kind], target), s), state, torch.arange(N))
        assert done.void == (kind in ("nan", "inf")) and (same(state, before) or not done.void)
        assert finite(state)


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
    with pytest.raises(ConnectionError):
        step(Setup(gone, s), state, torch.arange(N))
    assert same(state, before) and state.round == before.round
    Gone.fails, without = False, torch.tensor([0, 1, 3])  # it goes on, with whom it has
    one, two = (step(Setup(a, s), copy.deepcopy(before), without)[0] for a in (gone, alg))
    assert same(one, two)


def unchanged(server, before):
    after = server.state_dict()
    states = (after["state"], before["state"])
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())
    return all(after[k] == before[k] for k in ("round", "accepted"))


@every
def test_an_upload_of_the_wrong_size(name):
    """The client that sends it is named, also where it is the first of all uploads; without it the
    round goes on."""
    alg, (_, s, _) = algorithm(name), start(name)
    server, loop = Server(alg, s.net, N, rounds=4), Hardware(engine="loop")
    clients = [Client(alg, s.net, DATA.subset([i]), TRAINING, hardware=loop) for i in range(N)]
    for bad in (0, BAD) if not alg.traits.required else (BAD,):
        uploads = {i: clients[i].train(server.download(i)) for i in range(N)}
        up, size = uploads[bad]
        key = next((k for k, v in up.items() if v.is_floating_point() and v.dim()), None)
        if key is None:
            assert name in SILENT
            return
        for wrong in (up[key][:-1], up[key][None], torch.empty(0), up[key].half()):
            before = copy.deepcopy(server.state_dict())
            with sentence(f"client {bad}: expected a dict of dense tensors as"):
                server.aggregate({**uploads, bad: ({**up, key: wrong}, size)})
            assert unchanged(server, before)
        done = server.aggregate({i: up for i, up in uploads.items() if i != bad})
        assert not done.void and bad not in done.ids


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "fedamp", "feddwa_qp", "mrmtl"])
@pytest.mark.parametrize("buffers", ["auto", "local"])
def test_a_first_round_of_nothing_but_wrong_uploads(name, buffers):
    """There is no right one yet to compare them with: one sentence, nothing changed, and the same
    round can be played with right ones."""
    alg = algorithm(name)
    normed = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    net = alg.prepare(Net(lambda: normed))
    server = Server(alg, net, N, rounds=4, batch_norm=buffers)
    clients = [Client(alg, net, DATA.subset([i]), TRAINING, batch_norm=buffers) for i in range(N)]
    uploads = {i: client.train(server.download(i)) for i, client in enumerate(clients)}
    before, message = copy.deepcopy(server.state_dict()), uploads[0][0]
    first = next(k for k, v in message.items() if v.dim() and v.is_floating_point())
    for key in {first, "@statistics"} & message.keys():
        right = message[key]
        for wrong in ({}, {key: right[:-1]}, {key: right[None]}, {key: torch.empty(0)}):
            others = {}
            for i, (up, n) in uploads.items():
                others[i] = {k: v for k, v in up.items() if k != key} | wrong, n
            with sentence("(uploads|client 0): "):
                server.aggregate(others)
            assert unchanged(server, before)
    assert not server.aggregate(uploads).void


def test_what_an_own_algorithm_says_of_a_first_round_is_heard():
    class Own(FedAvg):
        def update(self, state, up, cohort):
            raise ValueError("bank: expected to be open.")

    server, client = Server(Own(), tiny_model(), N), Client(Own(), tiny_model(), DATA.subset([0]))
    words = r"uploads: Own cannot use .* \(bank: expected to be open\); give both sides"
    with sentence(words):
        server.aggregate({i: client.train(server.download(i)) for i in range(N)})


def test_a_message_that_is_none_and_a_number_of_samples_that_cannot_be():
    server = Server("fedavg", tiny_model(), 2, rounds=3)
    client = Client("fedavg", tiny_model(), DATA.subset([0]), TRAINING)
    up, n = client.train(server.download(0))
    about = "@about"
    before = copy.deepcopy(server.state_dict())
    rows = {"delta@rows": torch.zeros(2, 3)}
    sent = {"delta@sent": torch.ones(5, dtype=torch.bool), "delta@index": torch.zeros(1)}
    for message, size in [
        *((m, n) for m in (None, {}, {**up, "delta": "none"}, {about: up[about]})),
        *(({**up, about: torch.tensor(t)}, n) for t in ([0.0, 0.0], 3)),
        *(({**up, **rows, **more}, n) for more in ({}, sent)),
        *((up, k) for k in (0, 10**30, torch.nan)),
    ]:
        with sentence("(client 0|uploads)"):
            server.aggregate({0: (message, size)})
        assert unchanged(server, before)
