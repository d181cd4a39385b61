"""What a client claims beside its model steers no other client's model.

The methods say what their clients upload, and what the numbers can be. No message
decides it.
"""

import re
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from entry_points import sentence
from parts.interop import DATA, ROUNDS, SEED, SETTING, algorithm, bn_model
from small import crossed, swept

from pflcore import Client, Server, Training
from pflcore.algorithms import ALGORITHMS, Claim

ALL = range(DATA.n)
TRAINING = Training(lr=0.05, batch_size=7)
FORGERIES = (torch.nan, torch.inf, -torch.inf, -1.0, 0.5, 1e6, 1e30)
FINITE = {-1.0, 0.5, 1e6, 1e30}
NOT_NEGATIVE = {0.5, 1e6, 1e30}
# The forgeries that a server cannot tell from honest numbers, without the options of
# the clients' training.
UNSEEN = {
    ("qfedavg", "weight"): set(),
    ("qfedavg", "h"): {1e6, 1e30},
    ("fednova", "steps"): set(),
    ("mocha", "steps"): set(),
    ("mocha", "lr"): NOT_NEGATIVE,
    ("scaffold", "control"): FINITE,
    ("waffle", "control"): FINITE,
    ("weight_erosion", "passes"): {1e6},
    ("fedcac", "mask"): set(),
    ("fedfomo", "a"): FINITE,
    ("l2c", "weights"): set(),
    ("hypcluster", "pick"): set(),
    ("hypcluster", "b"): NOT_NEGATIVE,
    ("ensemble", "pick"): set(),
    ("ensemble", "b"): NOT_NEGATIVE,
    ("fedproto", "counts"): set(),
    ("fedpac", "counts"): set(),
    ("fedpac", "statistics"): FINITE,
    ("fedpac", "variance"): NOT_NEGATIVE,
    ("fedas", "trace"): NOT_NEGATIVE,
}
# Claims that follow from the options of training.
KNOWN = {
    ("qfedavg", "h"),
    ("mocha", "steps"),
    ("mocha", "lr"),
    ("weight_erosion", "passes"),
}


def model():
    return bn_model().float()


def new_server(name, training=None, clip=None):
    alg = algorithm(name)
    options = {"rounds": ROUNDS, "seed": SEED, "clip": clip, "training": training}
    return Server(alg, model, DATA.n, **options)


@cache
def new_clients(name):
    """Clients that have trained in no round whose upload was used."""
    alg = algorithm(name)
    parts = [DATA.subset([i]) for i in ALL]
    return [Client(alg, model, part, TRAINING, **SETTING) for part in parts]


def uploads(server, clients, ids=ALL):
    return {i: clients[i].train(server.download(i)) for i in ids}


def claims(name):
    server = new_server(name)
    cohort = server._cohort(ALL, [10] * DATA.n, 1)
    state = server._state.server
    down = server.algorithm.send(state, cohort)
    expected = server.algorithm.uploads(state, down, cohort)
    return [key for key, value in expected.items() if isinstance(value, Claim)]


def state_of(server):
    return server.state_dict()["state"]


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) for key, value in one.items()
    )


def dtypes(server):
    return {key: value.dtype for key, value in state_of(server).items()}


def refused(server, start, ups, bad):
    """Whether a lenient round leaves the bad client alone out, by name."""
    server.load_state_dict(start)
    server.aggregate({i: up for i, up in ups.items() if i != bad}, strict=False)
    without = state_of(server)
    server.load_state_dict(start)
    done = server.aggregate(ups, strict=False)
    is_out = bad in done.dropped or bad not in done.ids
    assert done.void or {*done.ids} - {*done.dropped} >= {*ALL} - {bad}
    assert not is_out or same(state_of(server), without)
    return is_out


def test_every_claim_is_decided():
    found = {(name, key) for name in ALGORITHMS for key in claims(name)}

    assert found == UNSEEN.keys()


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("claim, training", crossed(UNSEEN, [None, TRAINING]))
def test_impossible_claims_leave_out_their_client(claim, training):
    name, key = claim
    bad = 3
    server = new_server(name, training, clip=1.0)
    clients = new_clients(name)
    ups = uploads(server, clients)
    start = server.state_dict()
    unseen = UNSEEN[name, key]
    if training is not None and (name, key) in KNOWN:
        unseen = set()
    up, count = ups[bad]
    for forgery in FORGERIES:
        forged = torch.full(up[key].shape, forgery, dtype=torch.float64)
        odd = ups | {bad: (up | {key: forged}, count)}

        is_out = refused(server, start, odd, bad)

        assert is_out is (forgery not in unseen), forgery
        if is_out and forgery in FINITE:
            server.load_state_dict(start)
            with sentence(f"client 3.* {key!r}"):
                server.aggregate(odd)
            assert same(state_of(server), start["state"])
    server.load_state_dict(start)
    assert not server.aggregate(ups).dropped


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("off", [0.75, 0.25, -0.25, -0.75])
@pytest.mark.parametrize(
    "name, key", [("mocha", "steps"), ("weight_erosion", "passes")]
)
def test_numbers_of_steps_are_whole(name, key, off):
    server = new_server(name)
    ups = uploads(server, new_clients(name))
    start = server.state_dict()
    up, count = ups[3]
    assert not server.aggregate(ups).dropped
    forged = ups | {3: (up | {key: up[key] + off}, count)}
    assert refused(server, start, forged, 3)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "name, key",
    [("fedpac", "prototypes"), ("fedproto", "prototypes"), ("feddbe", "mean")],
)
def test_clip_bounds_means_of_features(name, key):
    server = new_server(name, clip=1.0)
    clients = new_clients(name)
    before = state_of(server)[f"server.{key}"].clone()
    ups = uploads(server, clients)
    up, count = ups[3]
    forged = up | {key: torch.full_like(up[key], 1e30)}

    done = server.aggregate(ups | {3: (forged, count)})

    assert 3 in done.clipped
    assert (state_of(server)[f"server.{key}"] - before).norm() <= DATA.n


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", swept())
def test_no_upload_decides_a_dtype(name, tmp_path):
    """The dtype of a first or a later upload changes no state and stops no client.

    A wider dtype is converted, and a narrower one refused.
    """
    server = new_server(name)
    clients = deepcopy(new_clients(name))
    started = dtypes(server)
    first_ups = uploads(server, clients)
    first = server.state_dict()
    server.aggregate(first_ups)
    later_ups = uploads(server, clients)
    later = server.state_dict()
    plays = [(first, first_ups, (0,)), (first, first_ups, ALL), (later, later_ups, ALL)]
    for start, ups, ids in plays:
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            up, count = ups[0]
            odd = {}
            for key, value in up.items():
                is_about = key == "@about" or not value.is_floating_point()
                odd[key] = value if is_about else value.to(dtype)
            given = {i: ups[i] for i in ids} | {0: (odd, count)}
            is_narrow = dtype != torch.float64 and name != "local"
            server.load_state_dict(start)
            if is_narrow:
                with sentence("client 0, '.*': expected .*, got .*float16"):
                    server.aggregate(given)
                assert same(state_of(server), start["state"])
            else:
                server.aggregate(given)
                assert dtypes(server) == started
                server.load_state_dict(start)
            done = server.aggregate(given, strict=False)
            assert (0 in done.ids) is not is_narrow
            assert dtypes(server) == started
            assert not server.aggregate(uploads(server, clients)).dropped
    server.save(tmp_path)
    assert same(state_of(new_server(name).restore(tmp_path)), state_of(server))


def test_messages_of_other_transports_name_the_key():
    server = new_server("fedavg")
    clients = new_clients("fedavg")
    up, count = clients[0].train(server.download(0))
    without = {key: value for key, value in up.items() if key != "delta"}
    headless = {key: value for key, value in up.items() if key != "@about"}
    cases = [
        (up | {"delta": up["delta"].numpy()}, "client 0, 'delta': expected a tensor"),
        (headless, "client 0, '@about': expected the 8 numbers .*, got none"),
        (without, r"client 0, 'delta': expected \[.*\] float32, got none"),
        (
            up | {"delta": up["delta"].to_sparse()},
            "client 0, 'delta': expected a dense",
        ),
        ([up], "client 0: expected a dict of tensors by name"),
    ]
    for message, words in cases:
        with sentence(words):
            server.aggregate({0: (message, count)})


def test_the_page_lists_every_claim():
    page = Path(__file__).parents[2] / "docs" / "bad_clients.md"
    rows = re.findall(r"^- `(\w+)`, `(\w+)`: ", page.read_text("utf-8"), re.M)

    assert sorted(rows) == sorted(UNSEEN)
