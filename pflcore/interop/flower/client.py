"""A ClientApp that is the clients' half of any algorithm."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pflcore.check import checked
from pflcore.interop.client import Client
from pflcore.interop.flower.records import only_record, record_of
from pflcore.simulation.checkpoint import replacing
from pflcore.simulation.personal import Personalized

STATE = "pflcore.client"  # the record of Context.state
AT_HAND = 32  # clients that a process does not make again; what they know is in their contexts
Evaluate = Callable[[Personalized, Context], dict[str, float]]


def number_of(context: Context) -> Hashable:
    """Which client a node is: its partition, where the node has one."""
    number: Hashable = context.node_config.get("partition-id", str(context.node_id))
    return number


@checked
def client_app(
    make: Callable[[Context], Client],
    *,
    evaluate: Evaluate | None = None,
    client_id: Callable[[Context], Hashable] = number_of,
    folder: str | os.PathLike[str] | None = None,
    mods: list[Any] | None = None,
) -> ClientApp:
    """The ClientApp of `PflStrategy`: `client_app(lambda context: pflcore.Client("ditto", model,
    data_of(context), training))`.

    `make` gives the `pflcore.Client` of a node, by its `context.node_config` and
    `context.run_config`; it may be called more than once for one. `evaluate(model, context)` gives
    numbers by name ("size": the samples that they are of) and may save the model; without one
    they are the loss, and for classes the accuracy, on the client's test samples. `client_id`:
    which client a node is, a string or a whole number; by default its "partition-id". What the
    algorithm keeps at a client is in `Context.state`, which a simulation carries to the worker and
    back for each message; with `folder` it is in a file there, on the client's machine, and its
    name is in the state.
    """
    app = ClientApp(mods=mods or [])

    # with the state that a new one has
    made: dict[tuple[int, int], tuple[Client, dict[str, Any]]] = {}

    def opened(context: Context) -> Client:
        key = context.run_id, context.node_id
        client, state = made.pop(key) if key in made else (make(context), {})
        if not isinstance(client, Client):
            raise TypeError(
                "make: expected a function of a Context that gives a pflcore.Client, it gave "
                f"{type(client).__name__}."
            )
        made[key] = client, state or client.state_dict()
        if len(made) > AT_HAND:
            del made[next(iter(made))]  # who was needed longest ago
        kept = context.state.config_records.get(STATE)
        if kept is not None:
            state = torch.load(
                Path(kept["file"]) if "file" in kept else io.BytesIO(kept["bytes"]),
                weights_only=True,
            )
        client.load_state_dict(state or made[key][1])
        return client

    def keep(client: Client, context: Context) -> None:
        if folder is None:
            data = io.BytesIO()
            torch.save(client.state_dict(), data)
            context.state[STATE] = ConfigRecord({"bytes": data.getvalue()})
            return
        file = Path(folder).absolute() / f"run-{context.run_id}-node-{context.node_id}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as part:
            torch.save(client.state_dict(), part)
        context.state[STATE] = ConfigRecord({"file": str(file)})

    @app.query("pflcore")  # type: ignore[untyped-decorator]
    def who(message: Message, context: Context) -> Message:
        return Message(
            RecordDict({"config": ConfigRecord({"client": client_id(context)})}), reply_to=message
        )

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        key, record = only_record(message, "the server's message")
        client = opened(context)
        upload, samples = client.train(record.to_torch_state_dict())
        keep(client, context)
        return Message(
            RecordDict(
                {key: record_of(upload), "metrics": MetricRecord({"num-examples": samples})}
            ),
            reply_to=message,
        )

    @app.evaluate()  # type: ignore[untyped-decorator]
    def test(message: Message, context: Context) -> Message:
        download = only_record(message, "the server's message")[1].to_torch_state_dict()
        client = opened(context)
        found = (
            client.evaluate(download)
            if evaluate is None
            else evaluate(client.model(download), context)
        )
        found = {"num-examples": found.pop("size", 1), **found}
        return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)

    return app
