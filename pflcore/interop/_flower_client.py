"""Flower's client side: a ClientApp for any algorithm, and `keep_private`."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from pflcore.check import are_names, checked, require
from pflcore.interop._client import Client
from pflcore.interop._flower_messages import only_record, record_of
from pflcore.simulation._models import Personalized
from pflcore.simulation.checkpoint import Checkpoint

# The key in Context.state of a client's state between rounds.
STATE_RECORD = "pflcore.client"
# Making a client anew is slow, so this many are kept in memory. Their states are in
# their contexts.
MAX_CACHED_CLIENTS = 32
Folder = str | Path
Evaluate = Callable[[Personalized, Context], dict[str, float]]


def number_of(context: Context) -> Hashable:
    """The id of a node's client: its partition or the node's id."""
    number: Hashable = context.node_config.get("partition-id", str(context.node_id))
    return number


@checked
def client_app(
    make: Callable[[Context], Client],
    *,
    evaluate: Evaluate | None = None,
    client_id: Callable[[Context], Hashable] = number_of,
    mods: list[Any] | None = None,
    checkpoint: Folder | Callable[[Context], Folder | None] | None = None,
) -> ClientApp:
    """The ClientApp of `PflStrategy`.

    An example is `client_app(lambda context: pflcore.Client("ditto", model,
    data_of(context), training))`. The algorithm's state of a client is in
    `Context.state`, which a Flower simulation carries to the worker and back for each
    message.

    Args:
        make: Returns the `pflcore.Client` of a node, by its `context.node_config` and
            `context.run_config`. It may be called more than once for a node.
        evaluate: `evaluate(model, context)` returns numbers by name, where "size" is
            the number of samples that they come from. It may also save the model. The
            default returns the loss, and for classes the accuracy, on the client's test
            samples.
        client_id: Returns the id of a node's client, a string or a whole number. The
            default is the node's "partition-id", or else the node's id.
        mods: The mods of Flower's ClientApp.
        checkpoint: A folder on the node, where the state of each client is also saved,
            for a run that goes on by `PflStrategy(checkpoint=)`: Flower gives a new run
            an empty `Context.state`. Or a function that returns the folder of a node,
            or None. By default nothing is saved.
    """
    app = ClientApp(mods=mods or [])
    client_of = client_cache(make)

    def folder_of(context: Context) -> Checkpoint | None:
        folder = checkpoint(context) if callable(checkpoint) else checkpoint
        if folder is None:
            return None
        # The repr tells the ids 1 and "1" apart. An id may be no name of a file.
        digest = sha256(repr(client_id(context)).encode()).hexdigest()
        return Checkpoint(Path(folder) / f"client-{digest[:16]}")

    @app.query("pflcore")  # type: ignore[untyped-decorator]
    def identify(message: Message, context: Context) -> Message:
        config = ConfigRecord({"client": client_id(context)})
        return Message(RecordDict({"config": config}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        key, record = only_record(message, "the server's message")
        folder = folder_of(context)
        client = client_of(context, folder)
        upload, num_samples = client.train(record.to_torch_state_dict())
        context.state[STATE_RECORD] = ConfigRecord({"bytes": client_bytes(client)})
        if folder is not None:
            client.save(folder.folder)
        metrics = MetricRecord({"num-examples": num_samples})
        content = RecordDict({key: record_of(upload), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator]
    def test(message: Message, context: Context) -> Message:
        _, record = only_record(message, "the server's message")
        download = record.to_torch_state_dict()
        client = client_of(context, folder_of(context))
        if evaluate is None:
            values = client.evaluate(download)
        else:
            values = evaluate(client.model(download), context)
        metrics = MetricRecord({"num-examples": values.pop("size", 1), **values})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def client_cache(
    make: Callable[[Context], Client],
) -> Callable[[Context, Checkpoint | None], Client]:
    """A function from a context to its client, in the context's state.

    Where the context has no state, that of the checkpoint counts if there is one. The
    function keeps up to `MAX_CACHED_CLIENTS` clients, and forgets the oldest beyond
    that.
    """
    clients: dict[tuple[int, int], Client] = {}

    def client_of(context: Context, checkpoint: Checkpoint | None = None) -> Client:
        key = (context.run_id, context.node_id)
        if key not in clients:
            clients[key] = make(context)
            is_client = isinstance(clients[key], Client)
            wanted = "a function that gives a Client"
            require(is_client, "make", wanted, clients[key])
            if len(clients) > MAX_CACHED_CLIENTS:
                oldest = next(iter(clients))
                del clients[oldest]
        client = clients[key]
        if STATE_RECORD in context.state:
            data = io.BytesIO(context.state[STATE_RECORD]["bytes"])
            client.load_state_dict(torch.load(data, weights_only=True))
        elif checkpoint is not None and checkpoint.exists:
            client.restore(checkpoint.folder)
        return client

    return client_of


def client_bytes(client: Client) -> bytes:
    """The state of a client as bytes."""
    data = io.BytesIO()
    torch.save(client.state_dict(), data)
    return data.getvalue()


# The key in Context.state of a client's private tensors.
PRIVATE_RECORD = "pflcore.private"


def keep_private(*patterns: str) -> Mod:
    """A mod that keeps the tensors of matching names with their client.

    Use it as in `ClientApp(mods=[keep_private("head.*")])`; server and app stay
    unchanged. It suits any app whose replies are models. The private tensors select the
    method:

    - those of the classifier: FedPer (Arivazhagan et al. 2019);
    - those of the features: LG-FedAvg (Liang et al. 2020);
    - those of the batch norms: FedBN (Li et al. 2021).

    The private values of a client are in `Context.state`. In training and evaluation
    they replace the incoming values. A client that has not trained yet uses the
    incoming values.

    In a reply the incoming values replace the private values. So private values do not
    travel, every reply has the tensors that the server expects, and the server's mean
    of these tensors never changes.

    Raises ValueError where a pattern matches no tensor.

    Args:
        patterns: Shell patterns of the names of private tensors.
    """
    fits = bool(patterns) and are_names(patterns)
    wanted = "names of private tensors, as in keep_private('head.*')"
    require(fits, "patterns", wanted, patterns)

    def mod(
        message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        if kind == MessageType.QUERY:
            return call_next(message, context)
        key, incoming = only_record(message, "the server's message")
        names = _private_names(incoming, patterns)
        stored = context.state.array_records.get(PRIVATE_RECORD, {})
        used = ArrayRecord({**incoming, **stored})
        message.content = RecordDict({**message.content, key: used})
        reply = call_next(message, context)
        if kind != MessageType.TRAIN or not reply.has_content():
            return reply
        key, trained = only_record(reply, "the app's reply")
        has_names = trained.keys() >= set(names)
        require(has_names, "the app's reply", f"a model with {names}", list(trained))
        private = {name: trained[name] for name in names}
        context.state[PRIVATE_RECORD] = ArrayRecord(private)
        unchanged = {name: incoming[name] for name in names}
        sent = ArrayRecord({**trained, **unchanged})
        reply.content = RecordDict({**reply.content, key: sent})
        return reply

    return mod


def _private_names(record: ArrayRecord, patterns: Sequence[str]) -> list[str]:
    """The names in `record` that match a pattern.

    Raises ValueError where a pattern matches no name.
    """
    names = dict.fromkeys(record, False)
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        wanted = f"patterns of some of {', '.join(names)}"
        require(matches, "keep_private", wanted, pattern)
        names |= dict.fromkeys(matches, True)
    return [name for name, is_private in names.items() if is_private]
