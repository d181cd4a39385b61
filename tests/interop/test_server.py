"""A server and clients apart give what a simulation gives, for every algorithm; clients come and
go."""

import io
import warnings
from typing import Any

import pytest
import torch
from small import swept, tiny_model
from torch import nn

from pflcore import Client, Evaluation, Hardware, Robustness, Server, Simulation, Training
from pflcore.algorithms import ALGORITHMS, FedAvg
from pflcore.simulation.round import sample
from pflcore.testing import Case

ROUNDS, SEED = 3, 5
TRAINING = Training(lr=0.05, batch_size=7, epochs=1, schedule=lambda round, rounds: 1 / round)
OPTIONS: dict[str, dict[str, Any]] = {
    "knnper": {"k": 3},
    "clustered_fl": {"first": 0, "eps1": 10.0, "eps2": 0.0},
}


def algorithm(name):
    return ALGORITHMS[name](**OPTIONS.get(name, {}))


def model():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


DATA = Case(FedAvg()).data
SETTING: dict[str, Any] = {"hardware": Hardware("loop", 1), "seed": SEED}
NEVER = Evaluation(every=0)


def play(server, clients, cohorts):
    done = []
    for ids in cohorts:
        downloads = {i: server.download(i) for i in ids}
        done.append(
            server.aggregate({i: clients[i].train(d) for i, d in reversed(downloads.items())})
        )
    return done


def apart(alg, make=model, **options):
    server = Server(alg, make, DATA.n, rounds=ROUNDS, seed=SEED, **options)
    more = {k: v for k, v in options.items() if k == "batch_norm"}
    return server, [
        Client(alg, make, DATA.subset([i]), TRAINING, **SETTING, **more) for i in range(DATA.n)
    ]


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", swept())
def test_server_and_clients_are_the_simulation(name, participation):
    alg = algorithm(name)
    whole = Simulation(
        alg, model, DATA, TRAINING, ROUNDS, participation, evaluation=NEVER, **SETTING
    )
    history = whole.run()
    server, clients = apart(alg)
    play(
        server,
        clients,
        [sample(whole.setup, r, participation).tolist() for r in range(1, ROUNDS + 1)],
    )
    for i, client in enumerate(clients):
        x = DATA.client(i, "test")[0]
        one, other = history.model(i), client.model(server.download(i, "evaluation"))
        torch.testing.assert_close(other(x), one(x), rtol=1e-9, atol=1e-12)
        if "view_w" in one.state_dict():
            torch.testing.assert_close(
                other.state_dict()["view_w"], one.state_dict()["view_w"], rtol=1e-9, atol=1e-12
            )
    assert server.round == ROUNDS


def test_what_travels_is_plain_tensors_of_the_algorithms_size():
    server, clients = apart(algorithm("fedfomo"))
    play(server, clients, [[0, 1, 2, 3]])
    down = server.download(0)
    assert all(type(v) is torch.Tensor for v in down.values())
    sent = sum(v.numel() for v in down.values() if v.is_floating_point())
    assert sent == 3 * server.net.size  # the three others, each once
    again = torch.load(io.BytesIO(saved(down)), weights_only=True)
    up, n = clients[0].train(again)
    assert n == 9 and all(type(v) is torch.Tensor for v in up.values())


def saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["fedavg", "feddwa", "l2c", "waffle", "clustered_fl"])
def test_a_server_and_clients_that_were_saved_go_on_as_if_they_had_not_stopped(name):
    one, two = apart(algorithm(name)), apart(algorithm(name))
    cohorts = [[0, 1, 2, 3], [0, 2], [0, 1, 3]]
    play(*one, cohorts)
    play(*two, cohorts[:2])
    fresh = apart(algorithm(name))
    for new, old in zip([fresh[0], *fresh[1]], [two[0], *two[1]], strict=True):
        new.load_state_dict(torch.load(io.BytesIO(saved(old.state_dict())), weights_only=True))
    play(*fresh, cohorts[2:])
    for key, value in one[0].state_dict()["state"].items():
        assert torch.equal(fresh[0].state_dict()["state"][key], value), key
    assert fresh[0].clients == one[0].clients and fresh[0].round == 3


def test_a_client_that_has_worked_begins_anew_with_a_new_ones_state():
    server, clients = apart(algorithm("ditto"))
    state, started = (
        clients[0].state_dict(),
        clients[0].model(server.download(0, "evaluation")).state_dict()["view_w"],
    )
    play(server, clients, [[0, 1, 2, 3]])
    clients[0].load_state_dict(state)
    fresh = apart(algorithm("ditto"))[0]
    assert torch.equal(
        clients[0].model(fresh.download(0, "evaluation")).state_dict()["view_w"], started
    )


def test_a_client_tells_its_own_scores():
    whole = Simulation("ditto", model, DATA, TRAINING, ROUNDS, **SETTING)
    history = whole.run()
    server, clients = apart(algorithm("ditto"))
    play(server, clients, [[0, 1, 2, 3]] * ROUNDS)
    for i, client in enumerate(clients):
        told = client.evaluate(server.download(i, "evaluation"))
        assert told["size"] == int(DATA.size("test")[i])
        for key in ("loss", "accuracy"):
            assert told[key] == pytest.approx(float(history.series(key)[1][-1][i]), rel=1e-9)
    with pytest.raises(ValueError, match="split: this client has no sample of 'night'"):
        clients[0].evaluate(server.download(0, "evaluation"), "night")


def test_a_state_of_something_else_is_refused_and_nothing_changes():
    server, _ = apart(algorithm("fedavg"))
    before = server.state_dict()
    other = Server("fedavg", tiny_model(), 4).state_dict()
    for state, words in (
        (Server("fedprox", model, 4).state_dict(), "expected one of fedavg, got one of fedprox"),
        (other, "state: expected a state of FedAvg .* server.x like"),
        ({}, r"expected what Server.state_dict\(\) gives"),
    ):
        with pytest.raises(ValueError, match=words):
            server.load_state_dict(state)
    assert torch.equal(server.state_dict()["state"]["server.x"], before["state"]["server.x"])


def test_a_clients_state_of_something_else_is_refused_and_nothing_changes():
    server, clients = apart(algorithm("ditto"))
    play(server, clients, [[0, 1, 2, 3]])
    started = clients[0].model(server.download(0, "evaluation")).state_dict()["view_w"]
    narrow = Client("ditto", tiny_model(), DATA.client(0, "train")).state_dict()
    for state, words in (
        (
            apart(algorithm("scaffold"))[1][0].state_dict(),
            "expected one of ditto, got one of scaffold",
        ),
        (narrow, "state: it is of a model of other parameters"),
        ({"own": {}}, r"expected what Client.state_dict\(\) gives"),
    ):
        with pytest.raises(ValueError, match=words):
            clients[0].load_state_dict(state)
    assert torch.equal(
        clients[0].model(server.download(0, "evaluation")).state_dict()["view_w"], started
    )


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [("fedavg", "scaffold"), ("waffle", "scaffold"), ("fedavg", "qfedavg"), ("fedper", "fedavg")],
)
def test_two_algorithms_are_one_sentence_on_either_side(theirs, mine):
    (server, others), (_, clients) = apart(algorithm(theirs)), apart(algorithm(mine))
    with pytest.raises(ValueError, match=f"^download: it is of another algorithm than {mine}"):
        clients[0].train(server.download(0))
    for i in range(4):
        server.join(i)
    upload, n = others[0].train(server.download(0))
    with pytest.raises(ValueError, match=f"^client 0: it is of another algorithm than {mine}"):
        other = apart(algorithm(mine))[0]
        other.download(0)
        other.aggregate({0: (upload, n)})


def bn_model():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_running_statistics_travel_where_they_are_averaged(batch_norm):
    whole = Simulation(
        "fedavg",
        bn_model,
        DATA,
        TRAINING,
        ROUNDS,
        evaluation=NEVER,
        batch_norm=batch_norm,
        **SETTING,
    )
    history = whole.run()
    server, clients = apart(algorithm("fedavg"), bn_model, batch_norm=batch_norm)
    play(server, clients, [[0, 1, 2, 3]] * ROUNDS)
    for i, client in enumerate(clients):
        one, other = (
            history.model(i).state_dict(),
            client.model(server.download(i, "evaluation")).state_dict(),
        )
        for key in ("view_w", "statistics"):
            torch.testing.assert_close(other[key], one[key], rtol=1e-9, atol=1e-12)
    assert ("@statistics" in server.download(0)) is (batch_norm == "average")


def test_a_client_whose_upload_was_lost_or_refused_keeps_its_old_state():
    server, clients = apart(algorithm("ditto"))
    play(server, clients, [[0, 1, 2, 3]])
    before = clients[1].model(server.download(1, "evaluation")).state_dict()["view_w"]
    up, n = clients[1].train(server.download(1))
    play(server, clients, [[0, 2, 3]])  # the upload never arrived
    assert torch.equal(
        clients[1].model(server.download(1, "evaluation")).state_dict()["view_w"], before
    )
    up, n = clients[1].train(server.download(1))
    up["delta"][0] = torch.nan
    others = {i: clients[i].train(server.download(i)) for i in (0, 2)}
    done = server.aggregate({1: (up, n), **others})
    assert done.dropped == [1] and not done.void
    assert torch.equal(
        clients[1].model(server.download(1, "evaluation")).state_dict()["view_w"], before
    )
    play(server, clients, [[1]])
    assert not torch.equal(
        clients[1].model(server.download(1, "evaluation")).state_dict()["view_w"], before
    )


def test_a_void_round_changes_nothing_and_is_counted():
    server, clients = apart(algorithm("feddwa"))
    play(server, clients, [[0, 1]])
    g = server.state_dict()["state"]
    up, n = clients[0].train(server.download(0))
    done = server.aggregate(
        {0: ({k: v if k[0] == "@" else v * torch.nan for k, v in up.items()}, n)}
    )
    assert (
        done.void
        and server.round == 2
        and all(torch.equal(v, g[k]) for k, v in server.state_dict()["state"].items())
    )


@pytest.mark.parametrize("name", swept())
def test_clients_come_by_any_name_beyond_the_number_that_was_expected(name):
    alg = algorithm(name)
    server = Server(alg, model, 2, rounds=ROUNDS, seed=SEED)
    clients = {
        c: Client(alg, model, DATA.subset([i]), TRAINING, **SETTING)
        for i, c in enumerate(("x", 17, "y", "z"))
    }
    for there in (["x", 17], ["x", "z", 17], ["x", "y", "z"]):
        for c in there:
            server.join(c)
        uploads = {c: clients[c].train(server.download(c)) for c in there}
        assert server.aggregate(uploads).void is False
    assert server.clients == {"x": 0, 17: 1, "z": 2, "y": 3}
    server.download("x")
    server.leave(17)
    with pytest.raises(ValueError, match="client 17: the round has begun with 4 clients"):
        server.download(17)
    server.aggregate({"x": clients["x"].train(server.download("x"))})
    assert server.download(17)["@about"][0] == 4  # a newcomer, whoever had the number
    scores = clients["y"].model(server.download("y", "evaluation"))(DATA.client(2, "test")[0])
    assert scores.isfinite().all()


def test_numbers_of_whole_numbers_are_their_own():
    server = Server("fedavg", model, 4)
    for client in (3, "a", 0, 1):
        server.download(client)
    assert server.clients == {3: 3, "a": 0, 0: 1, 1: 2}


def test_mistakes_are_one_sentence_and_cost_nothing():
    server, clients = apart(algorithm("waffle"))
    late = {0: clients[0].train(server.download(0))}
    play(server, clients, [[0, 1]])
    before = server.state_dict()
    up, n = clients[0].train(server.download(0))
    other, m = clients[1].train(server.download(1))
    cases: list[tuple[Any, str]] = [
        ({}, "uploads: expected"),
        ([up], "uploads: expected"),
        (late, "upload is number 0's of round 1, expected 0's of round 2"),
        ({0: (other, m)}, "upload is number 1's of round 2, expected 0's"),
        ({1: (other, m)}, "the target, client number 0, must take part"),
        ({0: (up, n), 9: (other, m)}, "client 9: it is not known here"),
        ({0: up}, r"client 0: expected \(upload, number of samples\)"),
        ({0: (up, 0)}, "client 0, number of samples: expected a whole number"),
        (
            {0: ({"delta": up["delta"]}, n)},
            "client 0: expected a dict of tensors as the other side made it",
        ),
        ({0: ({**up, "delta": up["delta"][:3]}, n)}, r"its upload holds delta \[3\] float64"),
        (
            {0: ({k: v for k, v in up.items() if k != "delta"}, n)},
            "its upload holds .* expected delta",
        ),
    ]
    for uploads, words in cases:
        with pytest.raises(ValueError, match=words) as error:
            server.aggregate(uploads)
        assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")
    for key, value in before["state"].items():
        assert torch.equal(server.state_dict()["state"][key], value)
    assert not server.aggregate({0: (up, n), 1: (other, m)}).void


def test_a_refused_upload_does_not_spoil_the_round_for_the_others():
    server, clients = apart(algorithm("fedavg"))
    good = {i: clients[i].train(server.download(i)) for i in (0, 1)}
    up, n = clients[2].train(server.download(2))
    for client, bad in (
        (0, {**good[0][0], "delta": up["delta"].float()}),
        (2, {**up, "delta": up["delta"][:5]}),
    ):
        with pytest.raises(ValueError, match="its upload holds delta"):
            server.aggregate({**good, client: (bad, n)})
    assert server.aggregate(good).ids == [0, 1]


def test_mistakes_at_the_door():
    server, clients = apart(algorithm("fedavg"))
    with pytest.raises(TypeError, match="client_id: expected a string or a whole number"):
        server.download(1.5)
    with pytest.raises(ValueError, match="purpose"):
        server.download(1, "test")
    play(server, clients, [[0]])
    with pytest.raises(ValueError, match="got one for an evaluation"):
        clients[0].train(server.download(0, "evaluation"))
    with pytest.raises(ValueError, match="it is for a model of 53 parameters, this one has 60"):
        Client(
            "fedavg",
            lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3, bias=False)).double(),
            DATA.subset([0]),
        ).train(server.download(0))
    with pytest.raises(ValueError, match="expected those of one client"):
        Client("fedavg", model, DATA)
    with pytest.raises(ValueError, match="template: expected an nn"):
        Server("fedavg", 3, 4)
    with pytest.raises(ValueError, match="other `batch_norm`"):
        Client("fedavg", bn_model, DATA.subset([0]), batch_norm="local").train(
            Server("fedavg", bn_model, 4).download(0)
        )


def test_a_client_takes_arrays_and_knows_classes_that_it_has_not():
    x, y = DATA.client(0)
    client = Client("fedrod", model, (x.float().numpy(), (y * 0).numpy()), TRAINING, **SETTING)
    assert client.data.classes == 3 and client.data.x.dtype == torch.float64
    server = Server("fedrod", model, 1, seed=SEED)
    assert not server.aggregate({0: client.train(server.download(0))}).void


@pytest.mark.parametrize(
    ("name", "options"),
    [("scaffold", {}), ("waffle", {"control_agg": "literal"}), ("waffle", {}), ("ditto", {})],
)
def test_a_client_keeps_what_the_server_took_of_a_long_update(name, options):
    alg = ALGORITHMS[name](**options)
    whole = Simulation(
        alg,
        model,
        DATA,
        TRAINING,
        ROUNDS,
        evaluation=NEVER,
        robustness=Robustness(clip=0.05),
        **SETTING,
    )
    history = whole.run()
    assert any(r["clipped"] for r in history.rounds)
    server = Server(alg, model, DATA.n, rounds=ROUNDS, seed=SEED, clip=0.05)
    clients = [Client(alg, model, DATA.subset([i]), TRAINING, **SETTING) for i in range(DATA.n)]
    play(server, clients, [[0, 1, 2, 3]] * 2)
    again = Server(alg, model, DATA.n, rounds=ROUNDS, seed=SEED, clip=0.05)
    again.load_state_dict(torch.load(io.BytesIO(saved(server.state_dict())), weights_only=True))
    play(again, clients, [[0, 1, 2, 3]])
    for i, client in enumerate(clients):
        again.download(i)
        client.model(again.download(i, "evaluation"))  # which settles the last round
        for key, rows in whole.state.clients.items():
            torch.testing.assert_close(
                client.state_dict()["own"][key][0], rows[i], rtol=1e-9, atol=1e-12
            )


def test_a_client_whose_own_model_diverges_is_dropped_and_keeps_what_it_had():
    alg = ALGORITHMS["ditto"](lam=1e30)
    whole = Simulation(alg, model, DATA, TRAINING, ROUNDS, evaluation=NEVER, **SETTING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = whole.run()
    want = [r["dropped"] for r in history.rounds]
    assert any(want)
    server, clients = apart(alg)
    assert [done.dropped for done in play(server, clients, [[0, 1, 2, 3]] * len(want))] == want
    for i, client in enumerate(clients):
        assert bool(
            client.model(server.download(i, "evaluation")).state_dict()["view_w"].isfinite().all()
        )


def test_states_of_another_dtype_are_refused():
    server, clients = apart(algorithm("ditto"))
    narrow = lambda: model().float()  # noqa: E731
    with pytest.raises(
        ValueError, match=r"state: expected server's x in torch\.float64, got torch\.float32"
    ):
        server.load_state_dict(Server(algorithm("ditto"), narrow, 4).state_dict())
    with pytest.raises(ValueError, match="state: it is of a model of other parameters"):
        clients[0].load_state_dict(
            Client(algorithm("ditto"), narrow, DATA.subset([0]), TRAINING).state_dict()
        )


@pytest.mark.parametrize("name", ["hypcluster", "ensemble"])
def test_a_pick_of_no_model_is_named(name):
    server, clients = apart(algorithm(name))
    play(server, clients, [[0, 1, 2, 3]])
    ups = {i: clients[i].train(server.download(i)) for i in range(4)}
    ups[1][0]["pick"].fill_(99)
    with pytest.raises(
        ValueError, match="client number 1: it says it picked model 99, expected 0 to 1"
    ):
        server.aggregate(ups)
    del ups[1]
    assert not server.aggregate(ups).void
