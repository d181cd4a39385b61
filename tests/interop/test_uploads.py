"""One bad client reaches nobody and ends nothing: uploads that are no numbers, no tensors, or not
what was asked for."""

import logging

import pytest
import torch
from small import with_test
from torch import nn

import pflcore
from pflcore import Adversary, Client, Federation, Robustness, Server, Simulation, Training
from pflcore.algorithms import Cohort, FedAvg

GEN = torch.Generator().manual_seed(0)


PARTS = [(torch.randn(12, 4, generator=GEN), torch.arange(12) % 3) for _ in range(5)]


TRAINING = Training(lr=0.1, batch_size=4)


def normed():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def models(bad, value):
    given = [normed().state_dict() for _ in range(6)]
    given[4] = {k: torch.full_like(v, value) if k.endswith(bad) else v for k, v in given[4].items()}
    return given


@pytest.mark.parametrize("method", ["krum", "multikrum", "clusters", "sfl"])
@pytest.mark.parametrize(
    ("bad", "value"),
    [("running_var", torch.nan), ("running_mean", torch.inf), ("running_var", -1e30)],
)
def test_personalize_refuses_statistics_that_are_none(method, bad, value):
    with pytest.raises(
        ValueError, match="uploads: client 4's model is not finite, or has a negative variance"
    ):
        pflcore.personalize(models(bad, value), method, buffers="average")
    assert all(
        v.isfinite().all()
        for m in pflcore.personalize(models("none", 0.0), method, buffers="average")
        for v in m.values()
    )


def round_of(server, clients, spoil, **options):
    return server.aggregate(
        {i: spoil(i, client.train(server.download(i))) for i, client in enumerate(clients)},
        **options,
    )


def both(name="fedavg", **options):
    server = Server(name, normed, 5, rounds=3, **options)
    return server, [Client(name, normed, part, TRAINING) for part in PARTS]


def test_a_negative_variance_is_dropped_and_honest_models_stay_finite():
    server, clients = both(clip=1.0)

    def spoil(i, reply):
        return (
            ({**reply[0], "@statistics": torch.full_like(reply[0]["@statistics"], -1e6)}, reply[1])
            if i == 4
            else reply
        )

    assert round_of(server, clients, spoil).dropped == [4]
    assert clients[0].model(server.download(0, "evaluation"))(PARTS[0][0]).isfinite().all()


@pytest.mark.parametrize(
    "layout", [torch.Tensor.to_sparse, lambda t: torch.nested.as_nested_tensor([t])]
)
def test_an_upload_of_another_layout_is_a_sentence_with_its_clients_name(layout):
    server, clients = both()
    with pytest.raises(ValueError, match="client 4: expected dense tensors"):
        round_of(
            server,
            clients,
            lambda i, reply: (
                ({**reply[0], "delta": layout(reply[0]["delta"])}, reply[1]) if i == 4 else reply
            ),
        )


def test_statistics_that_require_gradients_are_only_numbers():
    server, clients = both("fedadam")
    round_of(
        server,
        clients,
        lambda i, reply: (
            {**reply[0], "@statistics": reply[0]["@statistics"].requires_grad_()},
            reply[1],
        ),
    )
    assert not round_of(server, clients, lambda i, reply: reply).void


BAD = {
    "shape": lambda up, n: ({**up, "delta": up["delta"][:-1]}, n),
    "dtype": lambda up, n: ({**up, "delta": up["delta"].double()}, n),
    "more": lambda up, n: ({**up, "more": torch.ones(1)}, n),
    "less": lambda up, n: ({k: v for k, v in up.items() if k != "@about"}, n),
    "another's": lambda up, n: ({**up, "@about": up["@about"] + 1}, n),
    "samples": lambda up, n: (up, -1),
    "no samples": lambda up, n: (up, None),
    "nothing": lambda up, n: ([], n),
}


@pytest.mark.parametrize("how", BAD)
def test_a_round_goes_on_without_an_upload_that_does_not_fit(how):
    server, clients = both()
    with pytest.warns(RuntimeWarning, match="client 4"):
        outcome = round_of(
            server, clients, lambda i, reply: BAD[how](*reply) if i == 4 else reply, strict=False
        )
    assert outcome.ids == [0, 1, 2, 3] and not outcome.void and server.round == 1


def test_a_round_in_which_nothing_fits_is_void():
    server, clients = both()
    with pytest.warns(RuntimeWarning):
        assert round_of(server, clients, lambda i, reply: ({}, 1), strict=False).void
    assert server.round == 1


@pytest.mark.parametrize("strategy", ["all", "personal"])
@pytest.mark.parametrize("how", ["shape", "more", "less", "samples", "none"])
def test_one_malformed_reply_ends_no_flower_run(strategy, how, caplog, monkeypatch):
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from nodes import Nodes

    from pflcore.interop.flower import PersonalStrategy, PflStrategy, client_app

    def spoilt(message):
        (arrays,), (metrics,) = (
            message.content.array_records.values(),
            message.content.metric_records.values(),
        )
        tensors, weight = arrays.to_torch_state_dict(), 0 if how == "samples" else 12
        first = next(k for k in tensors if not k.startswith("@"))
        if how == "shape":
            tensors[first] = tensors[first][:-1]
        tensors |= {"other": torch.ones(2)} if how == "more" else {}
        records = (
            {}
            if how == "none"
            else {
                "arrays": ArrayRecord(
                    {k: v for k, v in tensors.items() if how != "less" or k != first}
                )
            }
        )
        return RecordDict({**records, "metrics": MetricRecord({**metrics, "num-examples": weight})})

    if strategy == "all":
        app = client_app(
            lambda context: Client(
                "fedavg", normed, PARTS[context.node_config["partition-id"]], TRAINING
            )
        )
        plan = PflStrategy("fedavg", normed, 4, rounds=2)
        whole, start = app, ()
    else:
        whole, plan, start = (
            ClientApp(),
            PersonalStrategy("clusters", min_available_nodes=4),
            (ArrayRecord(normed().state_dict()),),
        )

        @whole.train()
        def train(message, context):
            content = RecordDict(
                {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 12})}
            )
            return Message(content, reply_to=message)

        @whole.evaluate()
        def test(message, context):
            return Message(
                RecordDict({"metrics": MetricRecord({"loss": 0.0, "num-examples": 12})}),
                reply_to=message,
            )

    grid = Nodes(whole, range(4))
    answer = grid.send_and_receive

    def answered(messages, **options):
        replies = list(answer(messages, **options))
        for reply in replies:
            if reply.metadata.src_node_id == 102 and reply.metadata.message_type == "train":
                reply.content = spoilt(reply)
        return replies

    monkeypatch.setattr(grid, "send_and_receive", answered)
    logging.getLogger("flwr").propagate = True
    with pytest.warns(RuntimeWarning) if strategy == "all" else caplog.at_level(logging.WARNING):
        plan.start(grid, *start, num_rounds=2)
    assert plan.server.round == 2 if strategy == "all" else set(plan.models) == {100, 101, 103}
    logging.getLogger("flwr").propagate = False


def test_two_nodes_that_claim_one_client_end_no_run():
    pytest.importorskip("flwr")
    from nodes import Nodes

    from pflcore.interop.flower import PflStrategy, client_app

    app = client_app(lambda context: Client("fedavg", normed, PARTS[0], TRAINING))
    strategy = PflStrategy("fedavg", normed, 3, rounds=1, min_available_nodes=3)
    strategy.start(Nodes(app, [0, 1, 1]))
    assert strategy.server.round == 1


def test_a_client_of_many_keeps_one_list_of_its_samples():
    x, y = torch.randn(600, 4), torch.arange(600) % 3
    server = Server("fedavg", nn.Linear(4, 3), 100_000)
    client = Client("fedavg", nn.Linear(4, 3), (x, y), TRAINING)
    download = server.download(7)
    before = resident()
    client.train(download)
    assert resident() - before < 100 * 2**20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    ("defence", "least"), [("krum", 5), ("multi_krum", 5), ("trimmed_mean", 3)]
)
def test_a_client_that_is_not_finite_ends_no_defended_run(defence, least):
    data = Federation.from_clients(with_test(PARTS[:least], PARTS[:least]))
    algorithm = FedAvg(defence=defence, hostile=1)
    bad = {"attack": "scale", "clients": [least - 1], "strength": 1e39}
    history = Simulation(
        algorithm,
        nn.Linear(4, 3),
        data,
        TRAINING,
        rounds=5,
        robustness=Robustness(adversary=Adversary(**bad)),
    ).run()
    assert history.stopped is None
    assert [(r["dropped"], r["void"]) for r in history.rounds] == [([least - 1], False)] * 5


def test_clients_that_were_merely_absent_lower_no_defence():
    server = Server(FedAvg(defence="krum", hostile=1), nn.Linear(4, 3), 5)
    clients = [Client(server.algorithm, nn.Linear(4, 3), part, TRAINING) for part in PARTS]
    outcome = server.aggregate({i: clients[i].train(server.download(i)) for i in range(4)})
    assert outcome.void and server.round == 1
    outcome = server.aggregate(
        {i: client.train(server.download(i)) for i, client in enumerate(clients)}
    )
    assert not outcome.void


@pytest.mark.parametrize(
    ("count", "lost", "f"),
    [
        (11, 0, 4),
        (10, 1, 3),
        (9, 2, 3),
        (9, 1, 3),
        (8, 1, None),
        (8, 2, 2),
        (4, 4, 0),
        (2, 4, None),
    ],
)
def test_as_many_may_be_hostile_as_those_who_are_left_allow(count, lost, f):
    """Krum with f = 4: of models on a line it takes the one in the middle of the N - f - 2
    nearest."""
    alg = FedAvg(defence="krum", hostile=4)
    delta = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    size = torch.ones(count, dtype=torch.long)
    cohort = Cohort(torch.arange(count), size, 20, 1, 1, lost=lost)
    if f is None:
        with pytest.raises(
            Exception,
            match=r"defence: krum against 4 hostile clients needs 11 in a round, and round 1 has",
        ):
            alg.defended(delta, cohort)
        return
    far = (
        torch.cdist(delta.double(), delta.double())
        .square()
        .fill_diagonal_(torch.inf)
        .sort(1)
        .values
    )
    assert alg.defended(delta, cohort)[1].weight.argmax() == far[:, : count - f - 2].sum(1).argmin()
