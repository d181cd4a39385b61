"""One line keeps tensors with their client, in an app that knows nothing of it, under a server that knows nothing of it."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="these need Flower; pip install 'pflcore[flower]'")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from nodes import Nodes, context
from torch import nn

from pflcore.interop.flower import keep_private
from pflcore.interop.flower.private import PRIVATE

N, ROUNDS = 4, 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def moved(state, client):
    """What an app calls training: each client pulls everything towards a number of its own."""
    return {k: v if k.endswith("tracked") else v + 0.5 * (client + 1 - v) for k, v in state.items()}


def app(*mods, seen=None, drop=""):
    made = ClientApp(mods=list(mods))

    @made.train()
    def train(message, ctx):
        client = ctx.node_config["partition-id"]
        state = moved(message.content["arrays"].to_torch_state_dict(), client)
        arrays = ArrayRecord({k: v for k, v in state.items() if k != drop})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": client + 1})}), reply_to=message)

    @made.evaluate()
    def test(message, ctx):
        if seen is not None:
            seen.setdefault(ctx.node_config["partition-id"], []).append(message.content["arrays"].to_torch_state_dict())
        return Message(RecordDict({"metrics": MetricRecord({"loss": 0.0, "num-examples": 1})}), reply_to=message)

    return made


def run(grid):
    fed = FedAvg(min_train_nodes=N, min_evaluate_nodes=N, min_available_nodes=N)
    return fed.start(grid, ArrayRecord(net().state_dict()), num_rounds=ROUNDS)


@pytest.mark.parametrize("patterns", [("2.*",), ("0.*", "1.*"), ("1.*",)], ids=["FedPer", "LG-FedAvg", "FedBN"])
def test_any_app_is_fedper_lg_fedavg_or_fedbn(patterns):
    seen: dict[int, list[Any]] = {}
    grid = Nodes(app(keep_private(*patterns), seen=seen), range(N))
    result = run(grid)
    start = net().state_dict()
    mine = [k for k in start if k.startswith(tuple(p[0] for p in patterns))]
    shared, own = dict(start), [{k: start[k] for k in mine} for _ in range(N)]  # by hand, without Flower
    for _ in range(ROUNDS):
        trained = [moved({**shared, **o}, i) for i, o in enumerate(own)]
        own = [{k: t[k] for k in mine} for t in trained]
        shared |= {k: sum((i + 1) * t[k] for i, t in enumerate(trained)) / 10 for k in start if k not in mine}
    for i in range(N):
        for k, v in {**shared, **own[i]}.items():
            torch.testing.assert_close(seen[i][-1][k].double(), v.double(), rtol=1e-12, atol=1e-12)
    for k, v in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(v.double(), shared[k].double(), rtol=1e-12, atol=1e-12)  # the private ones are where they started


def test_private_values_do_not_travel():
    grid = Nodes(app(keep_private("2.*")), range(N))
    run(grid)
    start = net().state_dict()
    sent = [m.content["arrays"].to_torch_state_dict() for m in grid.answered if m.metadata.message_type == "train"]
    assert len(sent) == N * ROUNDS
    for state in sent:
        assert list(state) == list(start)
        torch.testing.assert_close(state["2.weight"], start["2.weight"], rtol=1e-12, atol=0.0)
    kept = [c.state[PRIVATE].to_torch_state_dict()["2.weight"] for c in grid.contexts.values()]
    assert all((k - start["2.weight"]).abs().min() > 1e-3 for k in kept)


def test_without_the_line_everything_is_averaged():
    seen: dict[int, list[Any]] = {}
    run(Nodes(app(seen=seen), range(N)))
    assert torch.equal(seen[0][-1]["2.weight"], seen[3][-1]["2.weight"])


def message(**arrays):
    content = {k: ArrayRecord({n: _array(a) for n, a in v.items()}) for k, v in arrays.items()}
    return Message(RecordDict({**content, "config": ConfigRecord()}), 7, "train")


def _array(a):
    from flwr.app import Array

    return Array(np.asarray(a, np.float32))


def test_what_does_not_fit_is_one_sentence():
    with pytest.raises(ValueError, match=r"expected the names of the private tensors, as in keep_private\('head\.\*'\), got none"):
        keep_private()
    with pytest.raises(ValueError, match="patterns: expected a name or a list of names"):
        keep_private(3)
    ctx, ok = context(7, {"partition-id": 1}), {"body": [1.0], "head": [1.0, 2.0]}
    run_ = app(keep_private("head*"))
    run_(message(arrays=ok), ctx)
    before = ctx.state[PRIVATE]
    for given, kept, words in (
        (message(arrays={"body": [1.0]}), context(7), r"'head\*' matches no tensor of the model; its tensors are body"),
        (message(arrays=ok, more=ok), ctx, "the server's message: expected one ArrayRecord, the model, got 'arrays', 'more'"),
        (message(), ctx, "expected one ArrayRecord, the model, got none"),
        (message(arrays={**ok, "head": [1.0]}), ctx, r"this client keeps 'head' of shape \[2\], the server sends shape \[1\]"),
        (message(arrays={"body": [1.0], "head2": [1.0]}), ctx, r"this client keeps 'head' of shape \[2\], the server sends none"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            run_(given, kept)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="the app's reply is without 'head'; it must send the whole model"):
        app(keep_private("head*"), drop="head")(message(arrays=ok), ctx)
    assert ctx.state[PRIVATE] is before


def test_a_tensor_of_bytes_that_numpy_has_no_numbers_for_is_kept_as_it_is():
    """bfloat16 as other code puts it into a record: two bytes a number, of which nothing is computed here."""
    ctx, raw = context(7, {"partition-id": 1}), np.frombuffer(b"\x80\x3f\x00\x40", dtype="V2")
    from flwr.app import Array

    app_ = ClientApp(mods=[keep_private("head")])

    @app_.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    given = Message(RecordDict({"arrays": ArrayRecord({"head": Array(raw)})}), 7, "train")
    reply = app_(given, ctx)
    assert reply.content["arrays"]["head"].data == ctx.state[PRIVATE]["head"].data == Array(raw).data
