"""Flower runs the algorithms, and a mod or strategy personalizes any app.

`PflStrategy` and `client_app` give the models of a simulation. In an app that does not
know pflcore, one line (`keep_private`) keeps tensors with their client, and one line
(`PersonalStrategy`) sends each client its own model.
"""

import io
import os
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
pytest.importorskip("flwr")

import torch
from entry_points import sentence
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from parts.flower import Nodes, context, maker
from parts.interop import DATA, ROUNDS, SEED, agree, algorithm, whole
from parts.interop import bn_model as model
from parts.logs import logged
from small import crossed, near
from torch import nn

from pflcore import Server, personalize
from pflcore.algorithms import SFL
from pflcore.algorithms import FedAvg as FedAvgOfClients
from pflcore.interop.flower import (
    PersonalStrategy,
    PflStrategy,
    client_app,
    keep_private,
)

N = DATA.n
KEPT = "pflcore.private"  # the record of a node's state
LEAST = {"min_train_nodes": 4, "min_evaluate_nodes": 4, "min_available_nodes": 4}


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "scaffold",
        "waffle",
        "ditto",
        "feddwa",
        "fedfomo",
        "clustered_fl",
        "knnper",
    ],
)
def test_every_algorithm_in_flower_is_the_simulation(name):
    alg = algorithm(name)
    models = {}
    part = 0.5 if name in ("scaffold", "waffle", "ditto", "fedavg") else 1.0

    def keep(personal, context):
        models[context.node_config["partition-id"]] = personal
        return {"loss": 0.0}

    history = whole(alg, model, part).run()
    strategy = PflStrategy(
        Server(alg, model, N, rounds=ROUNDS, seed=SEED), fraction_train=part
    )
    strategy.start(Nodes(client_app(maker(alg), evaluate=keep), range(N)))
    assert strategy.server.round == ROUNDS and sorted(models) == list(range(N))
    for i, other in models.items():
        x = DATA.client(i, "test")[0]
        one = history.model(i)
        # Without averaged statistics, a client that never trained has others, see
        # docs/interop.md.
        agree(one, other, x if strategy.server.averages or part == 1 else None)


def test_who_is_absent_or_comes_again_under_another_node():
    grid = Nodes(client_app(maker("ditto")), range(N))
    strategy = PflStrategy(
        Server("ditto", model, N, rounds=4, seed=SEED), min_available_nodes=1
    )
    grid.mute = {101}
    metrics = strategy.start(grid, num_rounds=1).evaluate_metrics_clientapp[1]
    assert set(metrics) == {"loss", "accuracy"}
    assert strategy.server.round == 1 and {*strategy.clients.values()} == {0, 2, 3}
    grid.mute = set()
    grid.contexts[205] = grid.contexts.pop(100)  # a restarted node with its old state
    strategy.start(grid, num_rounds=1)
    assert {*strategy.clients.values()} == {*range(N)}
    assert strategy.server.clients == {i: i for i in range(N)}
    grid.mute = set(grid.contexts)  # no node answers in time
    strategy.start(grid, num_rounds=1)
    assert strategy.server.round == 3
    two = PflStrategy(Server("ditto", model, 3, rounds=1))
    # Two nodes claim to be client 1.
    two.start(Nodes(client_app(maker("ditto")), [0, 1, 1]))
    assert two.server.round == 1


def trainer(*mods, seen=None, moved=None, drop=""):
    """A Flower app whose training is a function of model and client."""
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
            received = message.content["arrays"].to_torch_state_dict()
            seen[context.node_config["partition-id"]] = received
        metrics = MetricRecord({"loss": 0.0, "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def apart(state, i):
    """A training step that moves two groups of clients apart."""
    step = 1e-3 * (i + 1) + (i % 2)
    return {k: v + step if v.is_floating_point() else v for k, v in state.items()}


def pulled(state, i):
    """A training step that moves weights towards a number of the client."""
    return {
        k: v if k.endswith("tracked") else v + 0.5 * (i + 1 - v)
        for k, v in state.items()
    }


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "method", ["fedamp", "clusters", SFL(k=1), "feddwa", "pfedgraph"]
)
def test_any_app_gets_its_own_models(method):
    seen = {}
    grid = Nodes(trainer(seen=seen), range(4))
    start = ArrayRecord(model().state_dict())
    result = PersonalStrategy(method, **LEAST).start(grid, start, num_rounds=2)
    first = grid.trained()[:4]
    second = grid.trained()[4:]
    given = {"feddwa": {"previous": first}, "pfedgraph": {"base": start}}
    expected = personalize(second, method, **given.get(method, {}))
    for i in range(4):
        for k, v in expected[i].to_torch_state_dict().items():
            near(seen[i][k], v)
    mean = result.arrays.to_torch_state_dict()["0.weight"]
    # FedAvg would have sent the mean.
    assert (seen[0]["0.weight"] - mean).abs().min() > 1e-6


@pytest.mark.parametrize(
    "pattern",
    ["3.*", "[01].*", "1.*", None],
    ids=["FedPer", "LG-FedAvg", "FedBN", "FedAvg"],
)
def test_any_app_is_fedper_lg_fedavg_or_fedbn_and_private_values_do_not_travel(pattern):
    seen = {}
    mods = [keep_private(pattern)] if pattern else []
    grid = Nodes(trainer(*mods, seen=seen, moved=pulled), range(4))
    start = model().state_dict()
    result = FedAvg(**LEAST).start(grid, ArrayRecord(start), num_rounds=ROUNDS)
    names = [k for k in start if pattern and k[0] in pattern]  # of private tensors
    # The wanted models, computed by hand without Flower.
    shared = dict(start)
    private = [{k: start[k] for k in names}] * 4
    for _ in range(ROUNDS):
        trained = [pulled(shared | tensors, i) for i, tensors in enumerate(private)]
        private = [{k: t[k] for k in names} for t in trained]
        for k in start.keys() - set(names):
            shared[k] = sum((i + 1) * t[k] for i, t in enumerate(trained)) / 10
    for i in range(4):
        for k, v in (shared | private[i]).items():
            near(seen[i][k], v)
    for k, v in result.arrays.to_torch_state_dict().items():
        near(v, shared[k])  # the server's private tensors keep their first values
    for state in (record.to_torch_state_dict() for record in grid.trained()):
        assert list(state) == list(start)
        for k in names:
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
    ctx = context(7, {"partition-id": 1})
    ok = {"body": [1.0], "head": [1.0, 2.0]}
    app = trainer(keep_private("head*"))
    app(message(arrays=ok), ctx)
    before = ctx.state[KEPT]
    one = "the server's message: expected one ArrayRecord"
    lacks = r"keep_private: expected patterns of some of body, got 'head\*'"
    for records, node_context, words in (
        ({"arrays": {"body": [1.0]}}, context(7), lacks),
        ({"arrays": ok, "more": ok}, ctx, one),
        ({}, ctx, one),
    ):
        with sentence(words):
            app(message(**records), node_context)
    with sentence(r"the app's reply: expected a model with \['head'\], got"):
        trainer(keep_private("head*"), drop="head")(message(arrays=ok), ctx)
    assert ctx.state[KEPT] is before


def test_a_tensor_of_bytes_that_numpy_has_no_numbers_for_is_kept_as_it_is():
    """A private tensor of a dtype that NumPy lacks is kept unchanged.

    bfloat16 may come as two bytes a number. `keep_private` does not compute with them.
    """
    ctx = context(7)
    raw = Array(np.frombuffer(b"\x80\x3f\x00\x40", dtype="V2"))
    app = ClientApp(mods=[keep_private("head")])

    @app.train()
    def train(message, context):
        return Message(
            RecordDict({"arrays": message.content["arrays"]}), reply_to=message
        )

    sent = Message(RecordDict({"arrays": ArrayRecord({"head": raw})}), 7, "train")
    reply = app(sent, ctx)
    assert reply.content["arrays"]["head"].data == raw.data
    assert ctx.state[KEPT]["head"].data == raw.data


def error_of(app, partitions, name="scaffold", net=model):
    strategy = PflStrategy(Server(name, net, N, rounds=3), min_available_nodes=1)
    with pytest.raises(ValueError) as error:
        strategy.start(Nodes(app, partitions))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_one_sentence():
    wide = client_app(maker("scaffold", lambda: nn.Linear(6, 3).double()))
    error = error_of(wide, [0, 1])
    assert "all 2 clients failed, the first one by" in error
    assert "download: it is of another algorithm, model or `batch_norm` than" in error
    error = error_of(ClientApp(), [0])
    assert "no node says which client it is" in error
    assert "must be a client_app" in error
    error = error_of(client_app(maker("waffle")), [1, 2], "waffle")
    assert error.startswith(
        "3 rounds in a row came to nothing: Waffle needs a node for client numb"
    )
    halves = lambda: model().bfloat16()  # noqa: E731
    error = error_of(client_app(maker("fedavg", halves)), [0], "fedavg", halves)
    assert "expected float32 or float16, which Flower carries, got a tensor" in error
    strategy = PflStrategy(Server("fedavg", model, 1))
    arrays = ArrayRecord(model().state_dict())
    nodes = Nodes(client_app(maker("fedavg")), [0])
    three = client_app(lambda context: 3)
    with sentence("make: expected a function that"):
        three(message(arrays={"a": [1.0]}), context(7))
    with sentence("make: expected a function"):
        client_app("fedavg")
    with sentence("initial_arrays: expected None, as the start is the mo"):
        strategy.start(nodes, arrays)
    with sentence("method: scaffold needs more of its clients than a model"):
        PersonalStrategy("scaffold")


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("strategy", ["all", "personal"])
@pytest.mark.parametrize("how", ["shape", "samples", "nan", "none"])
def test_one_malformed_reply_ends_no_run(strategy, how):
    def spoilt(message):
        (arrays,) = message.content.array_records.values()
        tensors = arrays.to_torch_state_dict()
        first = next(k for k in tensors if not k.startswith("@"))
        value = tensors[first]
        odd = {"shape": value[:-1], "nan": value * torch.nan}
        arrays = ArrayRecord(tensors | {first: odd.get(how, value)})
        metrics = MetricRecord({"num-examples": 0 if how == "samples" else 12})
        return RecordDict(
            {} if how == "none" else {"arrays": arrays, "metrics": metrics}
        )

    if strategy == "all":
        app = client_app(maker("fedavg"))
        start = ()
        plan = PflStrategy(Server("fedavg", model, 4, rounds=2))
    else:
        app = trainer()
        start = (ArrayRecord(model().state_dict()),)
        plan = PersonalStrategy("clusters", **LEAST)
    grid = Nodes(app, range(4))
    grid.spoil = spoilt
    warned = strategy == "all" and how != "nan"
    with pytest.warns(RuntimeWarning) if warned else nullcontext():
        plan.start(grid, *start, num_rounds=2)
    if strategy == "all":
        assert plan.server.round == 2
    else:
        assert set(plan.models) == {100, 101, 103}


# -- a node whose reply cannot be used counts as absent, and ends no run


def npy(array, **header):
    """The bytes of an array as Flower carries them."""
    file = io.BytesIO()
    if header:
        fields = np.lib.format.header_data_from_array_1_0(array) | header
        np.lib.format.write_array_header_1_0(file, fields)
        file.write(array.tobytes())
    else:
        np.save(file, array)
    return file.getvalue()


class Touches:
    """An object that writes a file when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch unpickled",)


def carried(array, data, stype="numpy.ndarray"):
    return Array(dtype=str(array.dtype), shape=array.shape, stype=stype, data=data)


TENSORS = {  # replacements of a tensor of a reply
    "cut": lambda a: carried(a, npy(a)[:60]),
    "cut in its numbers": lambda a: carried(a, npy(a)[:-2]),
    "garbage": lambda a: carried(a, b"garbage"),
    "empty": lambda a: carried(a, b""),
    "pickled": lambda a: carried(a, npy(np.array([Touches()], dtype=object))),
    "zipped": lambda a: carried(a, b"PK\x03\x04" + npy(a)),
    "far too large": lambda a: carried(a, npy(a, shape=(10**9, 10**3))),
    "of a negative shape": lambda a: carried(a, npy(a, shape=(-1,))),
    "of another kind": lambda a: carried(a, npy(a), "evil"),
    "words": lambda a: Array(np.array(["a"])),
    "bytes": lambda a: Array(np.zeros(a.shape, dtype="V2")),
    "short": lambda a: Array(a[:-1]),
    "none": lambda a: Array(a[:0]),
    "half": lambda a: Array(a.astype(np.float16)),
    "complex": lambda a: Array(a.astype(np.complex64)),
    "NaN": lambda a: Array(a * np.nan),
    "Inf": lambda a: Array(a + np.inf),
}
WEIGHTS = {  # replacements of its metrics, which hold the number of samples
    "0": {"num-examples": 0},
    "negative": {"num-examples": -1},
    "nan": {"num-examples": float("nan")},
    "inf": {"num-examples": float("inf")},
    "huge": {"num-examples": 10**30},
    "list": {"num-examples": [12]},
    "absent": {"n": 12},
}
RECORDS = {  # replacements of its records
    "nothing": lambda arrays, metrics: {},
    "config": lambda arrays, metrics: {"config": ConfigRecord({"x": 1})},
    "arrays alone": lambda arrays, metrics: {"arrays": arrays},
    "metrics alone": lambda arrays, metrics: {"metrics": metrics},
    "two models": lambda arrays, metrics: {
        "arrays": arrays,
        "more": arrays,
        "metrics": metrics,
    },
    "no tensor": lambda arrays, metrics: {
        "arrays": ArrayRecord({}),
        "metrics": metrics,
    },
    "a tensor more": lambda arrays, metrics: {
        "arrays": ArrayRecord({**arrays, "z": Array(np.zeros(2))}),
        "metrics": metrics,
    },
}
# Replacements of its records that only the means of Flower's own code cannot use.
NAMES = {
    "another name": lambda arrays, metrics: {"other": arrays, "metrics": metrics},
    "another metric": lambda arrays, metrics: {
        "arrays": arrays,
        "metrics": MetricRecord({**metrics, "loss": [1.0, 2.0]}),
    },
}


def spoilt(content, part, how):
    """The content of a reply in which one part is replaced."""
    arrays, metrics = content["arrays"], content["metrics"]
    if part == "tensor":
        key = next(k for k in arrays if not k.startswith("@"))
        arrays = ArrayRecord({**arrays, key: TENSORS[how](arrays[key].numpy())})
    if part == "weight":
        metrics = MetricRecord(WEIGHTS[how])
    if part != "records":
        return RecordDict({"arrays": arrays, "metrics": metrics})
    make = {**RECORDS, **NAMES}[how]
    return RecordDict(make(arrays, metrics))


@cache
def honest(strategy):
    """The replies of four honest nodes in a first round, by node."""
    if strategy == "server":
        app = client_app(maker("ditto"))
        start = ()
    else:
        app = trainer()
        start = (ArrayRecord(model().state_dict()),)
    grid = Nodes(app, range(4))
    STRATEGIES[strategy]().start(grid, *start, num_rounds=1)
    replies = [m for m in grid.answered if m.metadata.message_type == "train"]
    return {m.metadata.src_node_id: m.content for m in replies}


STRATEGIES = {
    "server": lambda: PflStrategy(Server("ditto", model, 4, rounds=2, seed=SEED)),
    "clusters": lambda: PersonalStrategy("clusters", **LEAST),
    "feddwa": lambda: PersonalStrategy("feddwa", **LEAST),
}


def answers(contents, kind="train"):
    """Replies of nodes in reverse order."""
    asked = {node: Message(RecordDict(), node, kind) for node in contents}
    each = [Message(contents[node], reply_to=asked[node]) for node in contents]
    return each[::-1]


def send_first(plan):
    """Sends the first model, which tells a strategy the form of the uploads."""
    arrays = ArrayRecord(model().state_dict())
    plan.configure_train(1, arrays, ConfigRecord(), Nodes(trainer(), range(4)))
    return plan


def aggregated(strategy, contents):
    """All tensors and metrics of a strategy after these first replies."""
    plan = STRATEGIES[strategy]()
    if strategy == "server":
        for node in honest(strategy):
            plan.clients[node] = node - 100
            plan.server.join(node - 100)
    else:
        send_first(plan)
    arrays, metrics = plan.aggregate_train(1, answers(contents))
    models = {"mean": arrays, **getattr(plan, "models", {})}
    states = {k: v.to_torch_state_dict() for k, v in models.items() if v is not None}
    if strategy == "server":
        states["state"] = plan.server.state_dict()["state"]
    return {f"{k}.{n}": t for k, v in states.items() for n, t in v.items()}, metrics


def equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) for k in one
    )


ODD = [
    *(("tensor", how) for how in TENSORS),
    *(("weight", how) for how in WEIGHTS),
    *(("records", how) for how in RECORDS),
]


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("strategy, odd", crossed(STRATEGIES, ODD))
def test_a_reply_that_cannot_be_used_is_absent(strategy, odd, tmp_path, monkeypatch):
    part, how = odd
    monkeypatch.chdir(tmp_path)
    contents = honest(strategy)
    others = {node: contents[node] for node in (100, 101, 103)}

    got, _ = aggregated(strategy, {**contents, 102: spoilt(contents[102], part, how)})

    want, _ = aggregated(strategy, others)
    assert equal(got, want) and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_records_and_metrics_of_other_names_count(strategy, how):
    contents = honest(strategy)

    got, metrics = aggregated(
        strategy, {**contents, 102: spoilt(contents[102], "records", how)}
    )

    want, _ = aggregated(strategy, contents)
    assert equal(got, want) and metrics is not None


EVALUATIONS = [
    *(
        ({"metrics": MetricRecord({"loss": 9.0, **weight})})
        for weight in WEIGHTS.values()
    ),
    {},
    {k: MetricRecord({"loss": 9.0, "num-examples": 2}) for k in ("metrics", "m")},
    {"metrics": ConfigRecord({"loss": 9.0, "num-examples": 2})},
]


@pytest.mark.parametrize("odd", EVALUATIONS)
@pytest.mark.parametrize("strategy", ["server", "clusters"])
def test_an_evaluation_that_cannot_be_used_is_absent(strategy, odd):
    fine = RecordDict({"metrics": MetricRecord({"loss": 1.0, "num-examples": 2})})
    contents = {100: RecordDict(odd), 101: fine, 102: fine}

    got = STRATEGIES[strategy]().aggregate_evaluate(1, answers(contents, "evaluate"))

    assert got == MetricRecord({"loss": 1.0})


def test_each_metric_is_the_mean_over_the_nodes_that_report_it():
    def content(**metrics):
        return RecordDict({"metrics": MetricRecord(metrics)})

    contents = {
        100: content(**{"loss": 1.0, "num-examples": 3}),
        101: RecordDict({"own": MetricRecord({"loss": 5.0, "num-examples": 1})}),
        102: content(**{"num-examples": 9}),
        103: content(**{"curve": [2.0, 4.0], "mixed": 1.0, "num-examples": 1}),
        104: content(**{"curve": [4.0, 0.0], "mixed": [1.0], "num-examples": 1}),
    }

    for strategy in ("server", "clusters"):
        replies = answers(contents, "evaluate")
        got = STRATEGIES[strategy]().aggregate_evaluate(1, replies)

        assert got == MetricRecord({"loss": 2.0, "curve": [3.0, 2.0]})


def test_an_evaluation_of_nobody_gives_nothing():
    empty = RecordDict({"metrics": MetricRecord({"loss": 1.0, "num-examples": 0})})
    for make in STRATEGIES.values():
        replies = answers({100: empty, 101: empty}, "evaluate")
        assert make().aggregate_evaluate(1, replies) is None


def test_a_negative_variance_reaches_nobody():
    contents = dict(honest("clusters"))
    arrays = contents[102]["arrays"]
    odd = {**arrays, "1.running_var": Array(-arrays["1.running_var"].numpy() - 1)}
    contents[102] = RecordDict(
        {"arrays": ArrayRecord(odd), "metrics": contents[102]["metrics"]}
    )
    plan = send_first(PersonalStrategy("krum", **LEAST))
    plan.aggregate_train(1, answers(contents))
    mean, _ = plan.aggregate_train(2, answers(contents))
    assert (mean.to_torch_state_dict()["1.running_var"] > 0).all()
    assert plan.models == {}  # krum needs five models


def test_too_few_models_for_a_method_leave_everybody_the_one_that_it_has():
    contents = honest("clusters")
    plan = send_first(PersonalStrategy("clusters", **LEAST))
    plan.aggregate_train(1, answers(contents))
    before = dict(plan.models)

    mean, _ = plan.aggregate_train(2, answers({100: contents[100]}))

    assert plan.models == before and sorted(before) == [100, 101, 102, 103]
    assert torch.equal(
        mean.to_torch_state_dict()["0.weight"],
        contents[100]["arrays"].to_torch_state_dict()["0.weight"],
    )


def test_cohorts_that_share_nobody_have_no_last_round():
    """A client without a last upload keeps its model under FedDWA."""
    contents = honest("feddwa")
    plan = send_first(PersonalStrategy("feddwa", **LEAST))
    for ids in ((100, 101), (102, 103)):
        plan.aggregate_train(1, answers({node: contents[node] for node in ids}))
    for node in (102, 103):
        upload = contents[node]["arrays"].to_torch_state_dict()
        for key, value in plan.models[node].to_torch_state_dict().items():
            near(value, upload[key])


def test_models_of_another_form_do_not_become_the_usual_ones():
    """Models must have the form that the server has sent."""
    contents = honest("feddwa")
    odd = spoilt(contents[100], "tensor", "short")
    plan = PersonalStrategy("feddwa", min_train_nodes=2, min_available_nodes=2)
    grid = Nodes(trainer(), range(2))
    sent = ArrayRecord(model().state_dict())
    list(plan.configure_train(1, sent, ConfigRecord(), grid))
    for round in (1, 2):
        plan.aggregate_train(round, answers({100: odd, 101: contents[101]}))
    assert plan.aggregate_train(3, answers({100: odd})) == (None, None)
    assert sorted(plan.models) == [101]


# -- a node says which client it is ----------------------------------------------


def answer_of(record):
    return RecordDict({"config": record})


ANSWERS = {
    "nothing": RecordDict({}),
    "no client": answer_of(ConfigRecord({"x": 1})),
    "a list": answer_of(ConfigRecord({"client": [1, 2]})),
    "a float": answer_of(ConfigRecord({"client": 1.5})),
    "a truth value": answer_of(ConfigRecord({"client": True})),
    "bytes": answer_of(ConfigRecord({"client": b"a"})),
    "metrics": answer_of(MetricRecord({"client": 1.5})),
    "a tensor": answer_of(ArrayRecord({"client": Array(np.zeros(2))})),
    "an error": Error(code=0, reason="boom"),
}


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_node_that_does_not_say_which_client_it_is_is_asked_again(answer):
    grid = Nodes(client_app(maker("ditto")), range(N))
    grid.lies = {102: ANSWERS[answer]}
    strategy = PflStrategy(Server("ditto", model, N, rounds=4, seed=SEED))
    strategy.start(grid, num_rounds=1)
    assert strategy.server.round == 1 and 2 not in strategy.server.clients
    assert grid.trainers() == [100, 101, 103]
    grid.lies = {}
    strategy.start(grid, num_rounds=1)
    assert strategy.server.round == 2 and grid.trainers() == [100, 101, 102, 103]


@pytest.mark.deep("it takes a second")
def test_who_was_known_first_is_the_client_while_it_is_connected():
    grid = Nodes(client_app(maker("feddwa")), range(N))
    strategy = PflStrategy(
        Server("feddwa", model, N, rounds=9, seed=SEED), min_available_nodes=1
    )

    def play():
        strategy.start(grid, num_rounds=1)
        return grid.trainers()

    assert play() == [100, 101, 102, 103]
    with logged("flwr") as records:
        for impostor in (5, 999):  # before and after node 101 in the order of the nodes
            grid.contexts[impostor] = context(impostor, {"partition-id": 1})
            assert play() == [100, 101, 102, 103]
        assert play() == [100, 101, 102, 103]
    words = "node 5 says it is client 1, as node 101 does, which was first"
    # The warning comes once.
    assert len([r for r in records if words in r.getMessage()]) == 1
    assert strategy.server.clients == {i: i for i in range(N)}
    # The connection ends, and the client comes back, as the same node or as another.
    del grid.contexts[5], grid.contexts[999]
    client_context = grid.contexts.pop(101)
    assert play() == [100, 102, 103]
    grid.contexts[205] = client_context
    assert play() == [100, 102, 103, 205]
    grid.contexts[101] = client_context
    del grid.contexts[205]
    assert play() == [100, 101, 102, 103]
    assert strategy.server.clients == {i: i for i in range(N)}


def test_of_two_that_come_at_once_the_grid_says_who_is_first():
    grid = Nodes(client_app(maker("ditto")), range(N))
    grid.contexts[5] = context(5, {"partition-id": 1})
    strategy = PflStrategy(Server("ditto", model, N, rounds=4, seed=SEED))
    strategy.start(grid, num_rounds=1)
    assert grid.trainers() == [100, 101, 102, 103]


def test_a_node_whose_client_would_grow_a_round_that_has_begun_waits():
    grid = Nodes(client_app(maker("ditto")), [0, 1])
    strategy = PflStrategy(Server("ditto", model, 2, rounds=4, seed=SEED))
    grid.mute = {100, 101}
    list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    grid.mute = set()
    strategy.start(grid, num_rounds=1)
    grid.asked.clear()
    grid.contexts[102] = context(102, {"partition-id": 2})
    strategy.server.download(0)  # begins a round
    list(strategy.configure_train(2, ArrayRecord(), ConfigRecord(), grid))
    assert strategy.server.num_clients == 2
    strategy.start(grid, num_rounds=2)
    assert strategy.server.num_clients == 3 and 102 in grid.trainers()


def test_a_question_waits_no_longer_than_a_round():
    grid = Nodes(client_app(maker("ditto")), range(N))
    seconds = []
    grid.send_and_receive = lambda messages, timeout: seconds.append(timeout) or []
    strategy = PflStrategy(Server("ditto", model, N, rounds=4, seed=SEED))
    strategy.start(grid, num_rounds=1, timeout=0.2)
    assert {*seconds} == {0.2}


def test_a_required_client_may_be_away_for_a_round():
    grid = Nodes(client_app(maker("waffle")), range(N))
    strategy = PflStrategy(
        Server("waffle", model, N, rounds=9, seed=SEED), min_available_nodes=1
    )
    strategy.start(grid, num_rounds=1)
    target = grid.contexts.pop(100)
    strategy.start(grid, num_rounds=2)
    assert strategy.server.round == 3
    grid.contexts[100] = target
    strategy.start(grid, num_rounds=1)
    assert strategy.server.round == 4
    del grid.contexts[100]
    with sentence(
        "3 rounds in a row came to nothing: Waffle needs a node for client number 0 in"
    ):
        strategy.start(grid, num_rounds=3)


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "fraction, least, count", [(0.5, 1, 2), (0.75, 1, 3), (0.5, 3, 3), (0.1, 9, 4)]
)
def test_a_fraction_of_the_nodes_is_evaluated(fraction, least, count):
    """They are floor(fraction * n) of n = 4 nodes, at least `min_evaluate_nodes`."""
    strategy = PflStrategy(
        Server("fedavg", model, N, rounds=9, seed=SEED),
        fraction_evaluate=fraction,
        min_evaluate_nodes=least,
    )
    grid = Nodes(client_app(maker("fedavg")), range(N))
    strategy.start(grid, num_rounds=2)
    assert [kind for kind, _ in grid.asked].count("evaluate") == 2 * count


def test_a_round_in_which_everybody_fails_is_void():
    def fails(context):
        raise ValueError("it is night")

    night, day = (Nodes(client_app(make), range(N)) for make in (fails, maker("ditto")))
    strategy = PflStrategy(
        Server("ditto", model, N, rounds=9, seed=SEED), fraction_evaluate=0.0
    )
    for _ in range(2):
        strategy.start(night, num_rounds=2)
        strategy.start(day, num_rounds=1)
    assert strategy.server.round == 6
    with sentence(
        "3 rounds in a row came to nothing: all 4 clients failed, .*it is night"
    ):
        strategy.start(night, num_rounds=3)


def test_rounds_that_nobody_answers_end_the_run():
    grid = Nodes(client_app(maker("ditto")), range(N))
    answered = grid.send_and_receive

    def mute(messages, **options):
        messages = list(messages)
        if any(message.metadata.message_type == "train" for message in messages):
            return []
        return answered(messages, **options)

    grid.send_and_receive = mute
    strategy = PflStrategy(
        Server("ditto", model, N, rounds=9, seed=SEED), fraction_evaluate=0.0
    )
    with sentence("3 rounds in a row came to nothing: no client answered"):
        strategy.start(grid, num_rounds=6)


class Lost(FedAvgOfClients):
    def train(self, down, client_state, clients):
        client_state, up, fit = super().train(down, client_state, clients)
        return client_state, {"delta": up["delta"] * torch.nan}, fit


def test_void_rounds_end_the_run():
    strategy = PflStrategy(
        Server(Lost(), model, N, rounds=9, seed=SEED), fraction_evaluate=0.0
    )
    grid = Nodes(client_app(maker(Lost())), range(N))
    with sentence("3 rounds in a row came to nothing: nobody is left"):
        strategy.start(grid, num_rounds=6)
