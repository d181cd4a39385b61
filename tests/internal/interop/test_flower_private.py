"""One line keeps tensors with their client, in an app that knows nothing of it, under a server that
knows nothing of it."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from nodes import Nodes, context
from parts.flower_private import ROUNDS, N, app, message, net, run

from pflcore.interop.flower import PRIVATE, keep_private

pytest.importorskip("flwr")


def test_private_values_do_not_travel():
    grid = Nodes(app(keep_private("2.*")), range(N))
    run(grid)
    start = net().state_dict()
    sent = [
        m.content["arrays"].to_torch_state_dict()
        for m in grid.answered
        if m.metadata.message_type == "train"
    ]
    assert len(sent) == N * ROUNDS
    for state in sent:
        assert list(state) == list(start)
        torch.testing.assert_close(state["2.weight"], start["2.weight"], rtol=1e-12, atol=0.0)
    kept = [c.state[PRIVATE].to_torch_state_dict()["2.weight"] for c in grid.contexts.values()]
    assert all((k - start["2.weight"]).abs().min() > 1e-3 for k in kept)


def test_what_does_not_fit_is_one_sentence():
    with pytest.raises(
        ValueError,
        match=r"expected the names of the private tensors, as in keep_private\('head\.\*'\), got "
        r"none",
    ):
        keep_private()
    with pytest.raises(ValueError, match="patterns: expected a name or a list of names"):
        keep_private(3)
    ctx, ok = context(7, {"partition-id": 1}), {"body": [1.0], "head": [1.0, 2.0]}
    run_ = app(keep_private("head*"))
    run_(message(arrays=ok), ctx)
    before = ctx.state[PRIVATE]
    for given, kept, words in (
        (
            message(arrays={"body": [1.0]}),
            context(7),
            r"'head\*' matches no tensor of the model; its tensors are body",
        ),
        (
            message(arrays=ok, more=ok),
            ctx,
            "the server's message: expected one ArrayRecord, the model, got 'arrays', 'more'",
        ),
        (message(), ctx, "expected one ArrayRecord, the model, got none"),
        (
            message(arrays={**ok, "head": [1.0]}),
            ctx,
            r"this client keeps 'head' of shape \[2\], the server sends shape \[1\]",
        ),
        (
            message(arrays={"body": [1.0], "head2": [1.0]}),
            ctx,
            r"this client keeps 'head' of shape \[2\], the server sends none",
        ),
    ):
        with pytest.raises(ValueError, match=words) as error:
            run_(given, kept)
        assert "\n" not in str(error.value)
    with pytest.raises(
        ValueError, match="the app's reply is without 'head'; it must send the whole model"
    ):
        app(keep_private("head*"), drop="head")(message(arrays=ok), ctx)
    assert ctx.state[PRIVATE] is before


def test_a_tensor_of_bytes_that_numpy_has_no_numbers_for_is_kept_as_it_is():
    """bfloat16 as other code puts it into a record: two bytes a number, of which nothing is
    computed here."""
    ctx, raw = context(7, {"partition-id": 1}), np.frombuffer(b"\x80\x3f\x00\x40", dtype="V2")
    from flwr.app import Array

    app_ = ClientApp(mods=[keep_private("head")])

    @app_.train()
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    given = Message(RecordDict({"arrays": ArrayRecord({"head": Array(raw)})}), 7, "train")
    reply = app_(given, ctx)
    assert (
        reply.content["arrays"]["head"].data == ctx.state[PRIVATE]["head"].data == Array(raw).data
    )
