"""Flower: `PflStrategy` and `client_app` give what a simulation gives; one line keeps tensors with
their client, one sends each client its own model, in apps that know nothing of it; Multi-Krum by
exact distances."""

import logging
import os
import pickle

import numpy as np
import pytest

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
pytest.importorskip("flwr")

import torch
from doors import sentence
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Bulyan, FedAvg, MultiKrum
from flwr.serverapp.strategy.multikrum import select_multikrum as flowers
from flwr.supercore.task_identity import TaskIdentity
from methods import SFL
from parts.interop import DATA, ROUNDS, SEED, SETTING, TRAINING, agree, algorithm, whole
from parts.interop import bn_model as model
from small import near
from torch import nn

from pflcore import Client, Server, personalize
from pflcore.interop.flower import (
    ExactMultiKrum,
    PersonalStrategy,
    PflStrategy,
    client_app,
    keep_private,
    select_multikrum,
)

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def context(node, config=None):
    own = {"node_id": node, "node_config": config or {}, "state": RecordDict()}
    return Context(run_id=1, run_config={}, **own)


class Nodes(Grid):
    """Nodes 100, 101, ... of partitions `partitions` in this process, all with one ClientApp:
    messages go through Flower's classes, but through no network and no Ray."""

    def __init__(self, app, partitions):
        self.app, self.answered = app, []
        each = enumerate(partitions, 100)
        self.contexts = {node: context(node, {"partition-id": p}) for node, p in each}
        self.mute = set()  # nodes that do not answer
        self.spoil = None  # what becomes of node 102's trained model on its way

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.mute:
                continue
            kept = pickle.loads(pickle.dumps(self.contexts[node]))  # as it travels
            try:
                replies.append(self.app(pickle.loads(pickle.dumps(message)), kept))
                self.contexts[node] = kept
            except Exception as error:  # as a node does
                why = Error(code=0, reason=f"{type(error)}:<'{error}'>")
                replies.append(Message(why, reply_to=message))
            if self.spoil and node == 102 and message.metadata.message_type == "train":
                replies[-1].content = self.spoil(replies[-1])
        self.answered += sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        return replies[::-1]

    def trained(self):
        """The models that came, round after round."""
        train = [m for m in self.answered if m.metadata.message_type == "train"]
        return [m.content["arrays"] for m in train]


Nodes.__abstractmethods__ = frozenset()  # a network's, which nobody calls here


N = DATA.n
KEPT = "pflcore.private"  # the record of a node's state
LEAST = {"min_train_nodes": 4, "min_evaluate_nodes": 4, "min_available_nodes": 4}


def maker(alg, net=model):
    def make(context):
        part = DATA.subset([int(context.node_config["partition-id"])])
        return Client(alg, net, part, TRAINING, **SETTING)

    return make


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "waffle", "ditto", "feddwa", "fedfomo", "clustered_fl", "knnper"]
)
def test_every_algorithm_in_flower_is_the_simulation(name):
    alg, models = algorithm(name), {}
    part = 0.5 if name in ("scaffold", "waffle", "ditto", "fedavg") else 1.0

    def keep(personal, context):
        models[context.node_config["partition-id"]] = personal
        return {"loss": 0.0}

    history = whole(alg, model, part).run()
    strategy = PflStrategy(Server(alg, model, N, rounds=ROUNDS, seed=SEED), fraction_train=part)
    strategy.start(Nodes(client_app(maker(alg), evaluate=keep), range(N)))
    assert strategy.server.round == ROUNDS and sorted(models) == list(range(N))
    for i, other in models.items():
        x, one = DATA.client(i, "test")[0], history.model(i)
        # else who never trained has other statistics, see docs/interop.md
        agree(one, other, x if strategy.server.averages or part == 1 else None)


def test_who_is_absent_or_comes_again_under_another_node():
    grid = Nodes(client_app(maker("ditto")), range(N))
    strategy = PflStrategy(Server("ditto", model, N, rounds=4, seed=SEED), min_available_nodes=1)
    grid.mute = {101}
    found = strategy.start(grid, num_rounds=1).evaluate_metrics_clientapp[1]
    assert set(found) == {"loss", "accuracy"}
    assert strategy.server.round == 1 and {*strategy.clients.values()} == {0, 2, 3}
    grid.mute = set()
    grid.contexts[205] = grid.contexts.pop(100)  # it was restarted; it has its state
    strategy.start(grid, num_rounds=1)
    assert {*strategy.clients.values()} == {*range(N)}
    assert strategy.server.clients == {i: i for i in range(N)}
    grid.mute = set(grid.contexts)  # nobody answers in time
    strategy.start(grid, num_rounds=1)
    assert strategy.server.round == 2
    two = PflStrategy(Server("ditto", model, 3, rounds=1))
    two.start(Nodes(client_app(maker("ditto")), [0, 1, 1]))  # two nodes claim one client
    assert two.server.round == 1


def trainer(*mods, seen=None, moved=None, drop=""):
    """Any app of Flower's, whose training is a function of the state and the client's number."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        i = context.node_config["partition-id"]
        state = message.content["arrays"].to_torch_state_dict()
        state = {k: v for k, v in (moved or apart)(state, i).items() if k != drop}
        weight = MetricRecord({"num-examples": i + 1})
        content = RecordDict({"arrays": ArrayRecord(state), "metrics": weight})
        return Message(content, reply_to=message)

    @app.evaluate()
    def test(message, context):
        if seen is not None:
            came = message.content["arrays"].to_torch_state_dict()
            seen[context.node_config["partition-id"]] = came
        metrics = MetricRecord({"loss": 0.0, "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def apart(state, i):
    """Two groups of clients, each of which goes its own way."""
    step = 1e-3 * (i + 1) + (i % 2)
    return {k: v + step if v.is_floating_point() else v for k, v in state.items()}


def pulled(state, i):
    """Each client pulls everything towards a number of its own."""
    return {k: v if k.endswith("tracked") else v + 0.5 * (i + 1 - v) for k, v in state.items()}


@pytest.mark.parametrize("method", ["fedamp", "clusters", SFL(k=1), "feddwa"])
def test_any_app_gets_its_own_models(method):
    seen = {}
    grid = Nodes(trainer(seen=seen), range(4))
    start = ArrayRecord(model().state_dict())
    result = PersonalStrategy(method, **LEAST).start(grid, start, num_rounds=2)
    first, second = grid.trained()[:4], grid.trained()[4:]
    previous = {"previous": first} if method == "feddwa" else {}
    expected = personalize(second, method, **previous)
    for i in range(4):
        for k, v in expected[i].to_torch_state_dict().items():
            near(seen[i][k], v)
    mean = result.arrays.to_torch_state_dict()["0.weight"]
    assert (seen[0]["0.weight"] - mean).abs().min() > 1e-6  # not what FedAvg would have sent


@pytest.mark.parametrize(
    "pattern", ["3.*", "[01].*", "1.*", None], ids=["FedPer", "LG-FedAvg", "FedBN", "FedAvg"]
)
def test_any_app_is_fedper_lg_fedavg_or_fedbn_and_private_values_do_not_travel(pattern):
    seen = {}
    mods = [keep_private(pattern)] if pattern else []
    grid = Nodes(trainer(*mods, seen=seen, moved=pulled), range(4))
    start = model().state_dict()
    result = FedAvg(**LEAST).start(grid, ArrayRecord(start), num_rounds=ROUNDS)
    mine = [k for k in start if pattern and k[0] in pattern]
    # by hand, without Flower
    shared, own = dict(start), [{k: start[k] for k in mine}] * 4
    for _ in range(ROUNDS):
        trained = [pulled(shared | o, i) for i, o in enumerate(own)]
        own = [{k: t[k] for k in mine} for t in trained]
        for k in start.keys() - set(mine):
            shared[k] = sum((i + 1) * t[k] for i, t in enumerate(trained)) / 10
    for i in range(4):
        for k, v in (shared | own[i]).items():
            near(seen[i][k], v)
    for k, v in result.arrays.to_torch_state_dict().items():
        near(v, shared[k])  # the private ones are where they started
    for state in (record.to_torch_state_dict() for record in grid.trained()):
        assert list(state) == list(start)
        for k in mine:
            near(state[k], start[k])


def message(**arrays):
    content = {
        k: ArrayRecord({n: Array(np.asarray(a, np.float32)) for n, a in v.items()})
        for k, v in arrays.items()
    }
    return Message(RecordDict({**content, "config": ConfigRecord()}), 7, "train")


def test_what_cannot_be_kept_is_one_sentence():
    for patterns in ((), (3,)):
        with sentence("patterns: expected names of private tensors"):
            keep_private(*patterns)
    ctx, ok = context(7, {"partition-id": 1}), {"body": [1.0], "head": [1.0, 2.0]}
    app = trainer(keep_private("head*"))
    app(message(arrays=ok), ctx)
    before = ctx.state[KEPT]
    one = "the server's message: expected one ArrayRecord"
    lacks = r"keep_private: expected patterns of some of body, got 'head\*'"
    for given, where, words in (
        ({"arrays": {"body": [1.0]}}, context(7), lacks),
        ({"arrays": ok, "more": ok}, ctx, one),
        ({}, ctx, one),
    ):
        with sentence(words):
            app(message(**given), where)
    with sentence(r"the app's reply: expected a model with \['head'\], got"):
        trainer(keep_private("head*"), drop="head")(message(arrays=ok), ctx)
    assert ctx.state[KEPT] is before


def test_a_tensor_of_bytes_that_numpy_has_no_numbers_for_is_kept_as_it_is():
    """bfloat16 as other code puts it into a record: two bytes a number, of which nothing is
    computed here."""
    ctx, raw = context(7), Array(np.frombuffer(b"\x80\x3f\x00\x40", dtype="V2"))
    app = ClientApp(mods=[keep_private("head")])

    @app.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    given = Message(RecordDict({"arrays": ArrayRecord({"head": raw})}), 7, "train")
    kept = app(given, ctx).content["arrays"]["head"], ctx.state[KEPT]["head"]
    assert kept[0].data == kept[1].data == raw.data


def error_of(app, partitions, name="scaffold", net=model):
    strategy = PflStrategy(Server(name, net, N, rounds=1), min_available_nodes=1)
    with pytest.raises(ValueError) as error:
        strategy.start(Nodes(app, partitions))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_one_sentence():
    wide = client_app(maker("scaffold", lambda: nn.Linear(6, 3).double()))
    said = error_of(wide, [0, 1])
    assert "all 2 clients failed, the first one for this reason" in said
    assert "download: it is of another algorithm, model or `batch_norm` than" in said
    said = error_of(ClientApp(), [0])
    assert "it does not say which client it is" in said and "must be a client_app" in said
    said = error_of(client_app(maker("waffle")), [1, 2], "waffle")
    assert said.startswith("algorithm: expected a node for its client in every round, got")
    halves = lambda: model().bfloat16()  # noqa: E731
    said = error_of(client_app(maker("fedavg", halves)), [0], "fedavg", halves)
    assert "expected float32 or float16, which Flower carries, got a tensor" in said
    own = PflStrategy(Server("fedavg", model, 1))
    arrays, nodes = ArrayRecord(model().state_dict()), Nodes(client_app(maker("fedavg")), [0])
    three = client_app(lambda context: 3)
    with sentence("make: expected a function that"):
        three(message(arrays={"a": [1.0]}), context(7))
    with sentence("make: expected a function"):
        client_app("fedavg")
    with sentence("initial_arrays: expected None, as the start is the mo"):
        own.start(nodes, arrays)
    with sentence("method: scaffold needs more of its clients than a model"):
        PersonalStrategy("scaffold")


@pytest.mark.parametrize("strategy", ["all", "personal"])
@pytest.mark.parametrize("how", ["shape", "samples", "nan", "none"])
def test_one_malformed_reply_ends_no_run(strategy, how, caplog, monkeypatch):
    def spoilt(message):
        (arrays,) = message.content.array_records.values()
        tensors = arrays.to_torch_state_dict()
        first = next(k for k in tensors if not k.startswith("@"))
        value = tensors[first]
        odd = {"shape": value[:-1], "nan": value * torch.nan}
        arrays = ArrayRecord(tensors | {first: odd.get(how, value)})
        metrics = MetricRecord({"num-examples": 0 if how == "samples" else 12})
        return RecordDict({} if how == "none" else {"arrays": arrays, "metrics": metrics})

    if strategy == "all":
        app, start = client_app(maker("fedavg")), ()
        plan = PflStrategy(Server("fedavg", model, 4, rounds=2))
    else:
        app, start = trainer(), (ArrayRecord(model().state_dict()),)
        plan = PersonalStrategy("clusters", **LEAST)
    grid = Nodes(app, range(4))
    grid.spoil = spoilt
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    warned = strategy == "all" and how != "nan"
    with pytest.warns(RuntimeWarning) if warned else caplog.at_level(logging.WARNING):
        plan.start(grid, *start, num_rounds=2)
    assert plan.server.round == 2 if strategy == "all" else set(plan.models) == {100, 101, 103}


K, F, P = 10, 2, 100_000  # replies, hostile ones of them, numbers of each


def contents(spread, seed=0, far=1.5, p=P):
    """Models that differ by `spread`, relatively; the first F of them are `far` times as far from
    the middle as the others."""
    draw = np.random.default_rng(seed)
    base, made = draw.normal(size=p), []
    for i in range(K):
        w = 0.05 * (base + spread * (far if i < F else 1.0) * draw.normal(size=p))
        arrays = ArrayRecord({"w": Array(w.astype(np.float32)), "steps": Array(np.asarray(i))})
        made.append(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}))
    return made


def messages(given):
    nodes = [Message(RecordDict(), 100 + i, "train") for i in range(len(given))]
    return [Message(c, reply_to=node) for c, node in zip(given, nodes, strict=True)]


def chosen(select, given):
    """The numbers of those whom it selects."""
    return [next(i for i, c in enumerate(given) if c is one) for one in select(given, F, K - F)]


def test_exact_distances_are_those_of_float64():
    """Flower's own picks a wrong client at a thousandth; where models differ much both pick the
    same."""
    close, apart = [contents(1e-3, seed) for seed in range(5)], contents(0.5)
    for given in (*close, apart, contents(1e-5, far=1.0)):
        rows = np.stack([c["arrays"]["w"].numpy().astype(np.float64) for c in given])
        square = ((rows[:, None] - rows[None]) ** 2).sum(-1)
        score = np.sort(square, 1)[:, 1 : K - F - 1].sum(1)
        assert chosen(select_multikrum, given) == score.argsort()[: K - F].tolist()
    assert any(min(chosen(flowers, given)) < F for given in close)
    assert {*chosen(flowers, apart)} == {*chosen(select_multikrum, apart)} == {*range(F, K)}


def test_the_strategy_is_flowers_own_but_for_the_distances():
    words = {"num_malicious_nodes": F, "num_nodes_to_select": K - F}
    for given in (contents(1e-3), contents(0.5)):
        arrays, metrics = ExactMultiKrum(**words).aggregate_train(1, messages(given))
        mean = np.mean([c["arrays"]["w"].numpy() for c in select_multikrum(given, F, K - F)], 0)
        np.testing.assert_allclose(arrays["w"].numpy(), mean, rtol=1e-5, atol=1e-8)
        assert metrics is not None
    other, _ = MultiKrum(**words).aggregate_train(1, messages(given))
    np.testing.assert_allclose(arrays["w"].numpy(), other["w"].numpy(), rtol=1e-5, atol=1e-7)
    few = messages(contents(1e-3, p=1000))  # it takes a second for each 20,000 parameters
    bulyan = Bulyan(num_malicious_nodes=1, selection_rule=select_multikrum)
    assert bulyan.aggregate_train(1, few)[0] is not None


def test_too_few_replies_skip_a_round_and_a_model_that_is_not_finite_is_not_chosen():
    given = contents(1e-3, p=100)
    strategy = ExactMultiKrum(num_malicious_nodes=4, num_nodes_to_select=2)
    for replies in (messages(given), []):
        assert strategy.aggregate_train(1, replies) == (None, None)
    bad, steps = Array(np.full(100, np.nan, np.float32)), Array(np.asarray(0))
    given[5] = RecordDict({"arrays": ArrayRecord({"w": bad, "steps": steps})})
    assert 5 not in chosen(select_multikrum, given)
