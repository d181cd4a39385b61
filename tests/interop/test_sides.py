"""A server and its clients that were saved go on as if they had not stopped."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from entry_points import sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from parts.interop import DATA, ROUNDS, SEED, SETTING, TRAINING, algorithm, bn_model
from small import swept
from torch import nn

from pflcore import Client, Server

ALL = range(DATA.n)


def new_server(name, size=DATA.n, **options):
    options = {"rounds": ROUNDS, "seed": SEED} | options
    return Server(algorithm(name), bn_model, size, **options)


def new_client(name, number, **options):
    data = DATA.subset([number])
    return Client(algorithm(name), bn_model, data, TRAINING, **SETTING | options)


def play(server, clients, ids):
    uploads = {i: clients[i].train(server.download(i)) for i in ids}
    return server.aggregate(uploads)


def personal(server, clients, i):
    model = clients[i].model(server.download(i, "evaluation"))
    return model.state_dict()


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def assert_same_state(server, other):
    got, want = server.state_dict(), other.state_dict()
    for group in ("state", "report", "net"):
        assert_equal(got.pop(group), want.pop(group))
    assert got == want


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize("name", swept())
def test_saved_sides_go_on_without_a_difference(name, tmp_path):
    """Both sides are saved in the middle of a round, after the clients' work."""
    sides = new_server(name), [new_client(name, i) for i in ALL]
    play(*sides, ALL)
    server, clients = sides
    server.save(tmp_path)
    uploads = {i: clients[i].train(server.download(i)) for i in ALL}
    for i in ALL:
        clients[i].save(tmp_path / str(i))

    restored = new_server(name).restore(tmp_path)
    again = [new_client(name, i).restore(tmp_path / str(i)) for i in ALL]
    for i in ALL:
        restored.join(i)
    restored.aggregate(uploads)
    server.aggregate(uploads)

    for one, parts in ((server, clients), (restored, again)):
        play(one, parts, [0, 1, 3])
    assert_same_state(restored, server)
    for i in ALL:
        assert_equal(personal(restored, again, i), personal(server, clients, i))


EVENTS = st.lists(
    st.tuples(st.sampled_from(["play", "join", "leave", "save"]), st.integers(0, 5)),
    max_size=8,
)


@settings(max_examples=10)
@given(name=st.sampled_from(["fedavg", "feddwa", "scaffold"]), events=EVENTS)
def test_a_server_with_any_clients_comes_back(name, events):
    """The server is saved and read anew after any comings and goings."""
    names = ["x", 17, np.int64(1), "1", 2**40, "é"]
    server = new_server(name, 2)
    clients = {}
    for event, place in events:
        client = names[place]
        if event == "join" or (event == "play" and not clients):
            server.join(client)
            clients.setdefault(client, new_client(name, place % DATA.n))
        elif event == "play":
            play(server, clients, clients)
        elif event == "leave" and client in clients:
            del clients[client]
            server.leave(client)
        elif event == "save":
            with tempfile.TemporaryDirectory() as folder:
                server.save(Path(folder))
                restored = new_server(name, 1).restore(folder)
            assert_same_state(restored, server)
            server = restored


def test_first_weights_of_a_module_come_back(tmp_path):
    """A module that is given has its own first weights, which a restart draws anew."""

    def made():
        return Server("fedavg", nn.Linear(6, 3).double(), 2)

    server = made()
    server.save(tmp_path)
    restored = made().restore(tmp_path)
    for grown in (server, restored):
        for i in range(3):
            grown.join(i)
    assert_equal(restored.state_dict()["state"], server.state_dict()["state"])
    assert torch.equal(restored.net.w0, server.net.w0)


def test_the_expected_uploads_come_back(tmp_path):
    """After a restart, most uploads may be odd, and the honest one still counts."""
    server, clients = new_server("fedavg"), [new_client("fedavg", i) for i in ALL]
    play(server, clients, ALL)
    server.save(tmp_path)
    restored = new_server("fedavg").restore(tmp_path)
    uploads = {i: clients[i].train(restored.download(i)) for i in ALL}
    for i in (1, 2, 3):
        tensors, num_samples = uploads[i]
        uploads[i] = (tensors | {"more": torch.ones(1)}, num_samples)
    with pytest.warns(RuntimeWarning, match="in its upload, got 'more'"):
        assert restored.aggregate(uploads, strict=False).ids == [0]


@pytest.mark.parametrize(
    "words, other",
    [
        ("algorithm is 'fedavg' there and 'scaffold' here", {"name": "scaffold"}),
        ("batch_norm is 'average' there and 'local' here", {"batch_norm": "local"}),
        ("seed is 5 there and 6 here", {"seed": 6}),
    ],
)
def test_a_side_of_something_else_is_refused(words, other, tmp_path):
    new_server("fedavg").save(tmp_path / "server")
    new_client("fedavg", 0).save(tmp_path / "client")
    options = {"name": "fedavg"} | other
    name = options.pop("name")
    server, client = new_server(name, **options), new_client(name, 0, **options)
    for side, kind in ((server, "server"), (client, "client")):
        with sentence(f"state: expected that of this {kind}, got .*: {words}; give"):
            side.restore(tmp_path / kind)
    with sentence("state: expected that of this client, .*: side is 'server' there"):
        client.restore(tmp_path / "server")
    with sentence("checkpoint: expected a folder that holds one, got"):
        server.restore(tmp_path / "nothing")
