"""In Flower every algorithm gives what a simulation gives; every client its own model; what does
not fit is one sentence."""

from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from methods import SFL
from nodes import Nodes
from parts.flower_server import DATA, ROUNDS, SEED, TRAINING, N, maker, model
from torch import nn

from pflcore import Client, Evaluation, Hardware, Simulation, personalize
from pflcore.algorithms import ALGORITHMS
from pflcore.interop.flower import PersonalStrategy, PflStrategy, client_app

OPTIONS: dict[str, dict[str, Any]] = {
    "knnper": {"k": 3},
    "clustered_fl": {"first": 0, "eps1": 10.0, "eps2": 0.0},
}


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "waffle", "ditto", "feddwa", "fedfomo", "clustered_fl", "knnper"]
)
def test_every_algorithm_in_flower_is_the_simulation(name, tmp_path):
    alg, models = ALGORITHMS[name](**OPTIONS.get(name, {})), {}
    part = 0.5 if name in ("scaffold", "waffle", "ditto", "fedavg") else 1.0

    def keep(personal, context):
        models[context.node_config["partition-id"]] = personal
        return {"loss": 0.0}

    whole = Simulation(
        alg,
        model,
        DATA,
        TRAINING,
        ROUNDS,
        part,
        evaluation=Evaluation(every=0),
        seed=SEED,
        hardware=Hardware("loop", 1),
    )
    history = whole.run()
    grid = Nodes(
        client_app(maker(alg), evaluate=keep, folder=tmp_path if part < 1 else None), range(N)
    )
    strategy = PflStrategy(alg, model, N, rounds=ROUNDS, seed=SEED, fraction_train=part)
    strategy.start(grid)
    assert strategy.server.round == ROUNDS and sorted(models) == list(range(N))
    for i, other in models.items():
        x, one = DATA.client(i, "test")[0], history.model(i)
        # else who never trained has other statistics, see docs/interop.md
        if strategy.server.averages or part == 1:
            torch.testing.assert_close(other(x), one(x), rtol=1e-9, atol=1e-12)
        if "view_w" in one.state_dict():
            torch.testing.assert_close(
                other.state_dict()["view_w"], one.state_dict()["view_w"], rtol=1e-9, atol=1e-12
            )


def test_who_is_absent_or_comes_again_under_another_node():
    grid = Nodes(client_app(maker("ditto")), range(N))
    strategy = PflStrategy("ditto", model, N, rounds=4, seed=SEED, min_available_nodes=1)
    grid.mute = {101}
    # a mistake of one's own is still seen while another is silent
    with pytest.raises(ValueError, match="split: this client"):
        Client("ditto", model, DATA.subset([0]), TRAINING).evaluate(
            strategy.server.download(0, "evaluation"), "no such split"
        )
    strategy.start(grid, num_rounds=1)
    assert strategy.server.round == 1 and set(strategy.clients.values()) == set(range(N)) - {1}
    grid.mute = set()
    grid.contexts[205] = grid.contexts.pop(100)  # it was restarted; it has its state
    strategy.start(grid, num_rounds=1)
    assert set(strategy.clients.values()) == set(range(N)) and strategy.server.clients == {
        i: i for i in range(N)
    }
    grid.mute = set(grid.contexts)  # nobody answers in time
    strategy.start(grid, num_rounds=1)
    assert strategy.server.round == 2


def errors(app, partitions, **options):
    strategy = PflStrategy(
        options.pop("algorithm", "scaffold"), model, N, rounds=1, min_available_nodes=1, **options
    )
    with pytest.raises(ValueError) as error:
        strategy.start(Nodes(app, partitions))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_one_sentence():
    fits = client_app(maker("scaffold"))
    wide = client_app(maker("scaffold", lambda: nn.Linear(6, 3).double()))
    assert "all 2 clients failed, the first one for this reason" in (said := errors(wide, [0, 1]))
    assert "it is for a model of 63 parameters, this one has 21; give both sides one model." in said
    assert "it does not say which client it is" in (said := errors(ClientApp(), [0]))
    assert "its ClientApp must be a client_app" in said
    assert "client number 0 must take part in every round, and no node says" in errors(
        fits, [1, 2], algorithm="waffle"
    )
    said = errors(client_app(maker("fedavg")), [1, 0])
    assert (
        "all 2 clients failed" in said
        and "download: it is of another algorithm than fedavg, which is played here" in said
    )
    halves = lambda: model().bfloat16()  # noqa: E731
    with pytest.raises(
        ValueError,
        match=r"'.*' is bfloat16, which Flower's arrays cannot carry; train a float32 or float16 "
        r"model there",
    ):
        PflStrategy("fedavg", halves, 1, rounds=1).start(
            Nodes(client_app(maker("fedavg", halves)), [0])
        )
    with pytest.raises(TypeError, match=r"gives a pflcore\.Client, it gave int"):
        client_app(lambda context: 3)(message(), Nodes(fits, [0]).contexts[100])
    with pytest.raises(ValueError, match="initial_arrays: the start is `model`'s own"):
        PflStrategy("fedavg", model, 1).start(Nodes(fits, [0]), ArrayRecord(model().state_dict()))
    with pytest.raises(ValueError, match="algorithm: expected one of"):
        PflStrategy("no such", model, 1)
    with pytest.raises(ValueError, match="make: expected a function"):
        client_app("fedavg")


def message():
    return Message(RecordDict({"arrays": ArrayRecord(model().state_dict())}), 7, "train")


def trainer(seen, change=lambda i, state: state, weight="num-examples"):
    """Any app of Flower's: two groups of clients, each of which goes its own way."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        i = context.node_config["partition-id"]
        state = message.content["arrays"].to_torch_state_dict()
        state = {
            k: v + (1e-3 * (i + 1) + (i % 2)) if v.is_floating_point() else v
            for k, v in state.items()
        }
        arrays = ArrayRecord(change(i, state))
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({weight: 1})}), reply_to=message
        )

    @app.evaluate()
    def test(message, context):
        seen[context.node_config["partition-id"]] = message.content["arrays"].to_torch_state_dict()
        return Message(
            RecordDict({"metrics": MetricRecord({"loss": 0.0, "num-examples": 1})}),
            reply_to=message,
        )

    return app


def whole(method, grid, rounds=1, **options):
    least = {"min_train_nodes": 4, "min_evaluate_nodes": 4, "min_available_nodes": 4}
    return PersonalStrategy(method, **least, **options).start(
        grid, ArrayRecord(model().state_dict()), num_rounds=rounds
    )


@pytest.mark.parametrize("method", ["fedamp", "clusters", SFL(k=1), "feddwa"])
def test_any_app_gets_its_own_models(method):
    torch.manual_seed(0)
    seen: dict[int, Any] = {}
    grid = Nodes(trainer(seen), range(4))
    torch.manual_seed(0)
    result = whole(method, grid, rounds=2)
    trained = [m for m in grid.answered if m.metadata.message_type == "train"]
    first, second = (
        [m.content["arrays"] for m in sorted(part, key=lambda m: m.metadata.src_node_id)]
        for part in (trained[:4], trained[4:])
    )
    previous = {"previous": first} if method == "feddwa" else {}
    expected = personalize(second, method, **previous)
    for i in range(4):
        for k, v in expected[i].to_torch_state_dict().items():
            torch.testing.assert_close(seen[i][k], v, rtol=1e-12, atol=1e-12)
    mean = result.arrays.to_torch_state_dict()["0.weight"]
    assert (seen[0]["0.weight"] - mean).abs().min() > 1e-6  # not what FedAvg would have sent


def test_a_method_that_needs_more_is_one_sentence():
    for method, words in (
        (
            "scaffold",
            "Scaffold needs more of a client than its model; use PflStrategy and client_app, or "
            "one of fedamp",
        ),
        ("no such", "method: expected one of fedamp"),
    ):
        with pytest.raises(ValueError, match=words):
            PersonalStrategy(method)
