"""Personalized federated learning in Flower (Message API, flwr 1.41 and later); needs the extra
`flower`.

`client_app` and `PflStrategy` play any algorithm, the one at the clients, the other at the server.
For ClientApps as they are: `PersonalStrategy` sends each client its own model, by a method that
needs nothing of a client but its model; `keep_private` is a mod that keeps some tensors with their
client; `ExactMultiKrum` is Flower's MultiKrum by exact distances.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from logging import WARNING
from pathlib import Path
from types import SimpleNamespace
from typing import Any

try:
    import flwr as _  # noqa: F401
except ImportError:
    raise ImportError(
        "pflcore.interop.flower needs Flower; pip install 'pflcore[flower]'."
    ) from None

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
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, MultiKrum, Result
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords, sample_nodes
from flwr.supercore import log
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.relations import FedDWA
from pflcore.check import Buffers, are_names, checked, refuse
from pflcore.interop.client import Client
from pflcore.interop.mixing import Krum, method_of, personalize
from pflcore.interop.packing import pack
from pflcore.interop.server import Server
from pflcore.simulation.checkpoint import replacing
from pflcore.simulation.personal import Personalized
from pflcore.simulation.round import Setup, sample
from pflcore.train.random import drawn

__all__ = [
    "ExactMultiKrum",
    "PersonalStrategy",
    "PflStrategy",
    "client_app",
    "keep_private",
    "select_multikrum",
]


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as Flower's arrays, which are numpy's. ValueError for what numpy has no numbers
    for."""
    for name, t in tensors.items():
        if t.dtype == torch.bfloat16:
            raise ValueError(
                f"{name!r} is bfloat16, which Flower's arrays cannot carry; train a float32 or "
                "float16 model there."
            )
    return ArrayRecord({k: t.detach().cpu() for k, t in tensors.items()})


def usable(replies: list[Message], weight: str) -> list[Message]:
    """The replies without those that do not hold one finite model of the tensors that most of them
    have, with its `weight`: these are logged, and were absent."""
    forms: dict[int, object] = {}
    for i, message in enumerate(replies):
        if message.has_content():
            records, numbers = (
                dict(message.content.array_records),
                [m.get(weight) for m in message.content.metric_records.values()],
            )
            arrays = {k: (tuple(a.shape), a.dtype) for r in records.values() for k, a in r.items()}
            one = (
                len(records) == 1
                and len(numbers) == 1
                and isinstance(numbers[0], int | float)
                and numbers[0] > 0
            )
            finite = one and all(
                bool(t.isfinite().all())
                for r in records.values()
                for t in r.to_torch_state_dict().values()
            )
            forms[i] = arrays if finite else None
    known = [f for f in forms.values() if f is not None]
    usual = max(known, key=known.count, default=None)
    bad = [i for i, form in forms.items() if form != usual or form is None]
    for i in bad:
        log(
            WARNING,
            "node %d: its reply is no finite model of the others' tensors with %r; it was absent",
            replies[i].metadata.src_node_id,
            weight,
        )
    return [m for i, m in enumerate(replies) if i not in bad]


def only_record(message: Message, whose: str) -> tuple[str, ArrayRecord]:
    """The key and the record of the one model in a message. ValueError where there are several, or
    none."""
    records = dict(message.content.array_records)
    if len(records) != 1:
        raise ValueError(
            f"{whose}: expected one ArrayRecord, the model, got "
            f"{', '.join(map(repr, records)) or 'none'}; send one."
        )
    return next(iter(records.items()))


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


PRIVATE = "pflcore.private"  # the record of Context.state


def keep_private(*patterns: str) -> Mod:
    """`ClientApp(mods=[keep_private("head.*")])`: the tensors that match stay with their client;
    nothing else changes, on neither side.

    The classifier's names make FedPer (Arivazhagan et al. 2019), the features' LG-FedAvg (Liang et
    al. 2020), the batch norms' FedBN (Li et al. 2021), of any app whose replies are models. A
    client's values are in `Context.state`; they take the place of the incoming ones in training and
    evaluation. In their place the reply carries the values that came: private ones do not travel,
    every reply has the tensors that the server expects, and its mean leaves them where they
    started. Who has not trained yet uses those. ValueError in one sentence where a pattern matches
    nothing, or the model is another than the one that was kept.
    """
    if not patterns:
        raise ValueError(
            "patterns: expected the names of the private tensors, as in keep_private('head.*'), "
            "got none."
        )
    if not are_names(patterns):
        refuse("patterns", "a name or a list of names", patterns)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        if kind == MessageType.QUERY:
            return call_next(message, context)
        key, came = only_record(message, "the server's message")
        kept = context.state.array_records.get(PRIVATE, {})
        names = _private(came, kept, patterns)
        message.content = RecordDict({**message.content, key: ArrayRecord({**came, **kept})})
        reply = call_next(message, context)
        if kind == MessageType.TRAIN and reply.has_content():
            key, made = only_record(reply, "the app's reply")
            missing = [n for n in names if n not in made]
            if missing:
                raise ValueError(
                    f"keep_private: the app's reply is without {', '.join(map(repr, missing))}; it "
                    "must send the whole model."
                )
            context.state[PRIVATE] = ArrayRecord({n: made[n] for n in names})
            reply.content = RecordDict(
                {**reply.content, key: ArrayRecord({**made, **{n: came[n] for n in names}})}
            )
        return reply

    return mod


def _private(came: ArrayRecord, kept: ArrayRecord, patterns: Sequence[str]) -> list[str]:
    """The names in `came` that match; ValueError where a pattern matches none, or `kept` are
    others."""
    names = [n for n in came if any(fnmatchcase(n, p) for p in patterns)]
    for p in patterns:
        if not any(fnmatchcase(n, p) for n in names):
            raise ValueError(
                f"keep_private: {p!r} matches no tensor of the model; its tensors are "
                f"{', '.join(came)}."
            )
    for n in kept:
        if n not in names or kept[n].shape != came[n].shape:
            got = f"shape {list(came[n].shape)}" if n in came else "none"
            raise ValueError(
                f"keep_private: this client keeps {n!r} of shape {list(kept[n].shape)}, the "
                f"server sends {got}."
            )
    return names


class PersonalStrategy(FedAvg):  # type: ignore[misc]
    """Flower's `FedAvg` that sends each client its own model, made by `pflcore.personalize`; any
    ClientApp that FedAvg drives will do.

    `method`: "fedamp", "heurfedamp", "sfl", "clusters", "feddwa" (its guidance are the models of
    the round before) or an instance; `include`, `exclude`: the tensors that are mixed, as
    `pflcore.pack` has them, the others stay each client's own. `flower`: FedAvg's own arguments.
    Who has not trained yet, gets the mean of the round. ValueError in one sentence for models that
    differ in their tensors.
    """

    def __init__(
        self,
        method: Any = "fedamp",
        *,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        **flower: Any,
    ) -> None:
        try:
            self._looks_back = isinstance(method_of(method, {}), FedDWA)
        except ValueError as error:
            raise ValueError(
                str(error).replace("pflcore.Server and Client", "PflStrategy and client_app")
            ) from None
        super().__init__(**flower)
        self.method = method
        self.chosen: dict[str, Any] = {"include": include, "exclude": exclude}
        self.models: dict[int, ArrayRecord] = {}  # by node id
        self._last: dict[int, ArrayRecord] = {}  # the uploads that they were made of

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's nodes, each with its own model."""
        return [self._own(m) for m in super().configure_train(server_round, arrays, config, grid)]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's nodes, each with its own model."""
        return [
            self._own(m) for m in super().configure_evaluate(server_round, arrays, config, grid)
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Makes everybody's next model; gives the mean, as FedAvg does."""
        # the bits do not depend on who came first
        replies = sorted(replies, key=lambda m: m.metadata.src_node_id)
        replies = usable(replies, self.weighted_by_key)
        pairs = [
            (m.metadata.src_node_id, only_record(m, "")[1]) for m in replies if m.has_content()
        ]
        if pairs:
            previous: dict[str, Any] = {"previous": self._last or pairs} if self._looks_back else {}
            self.models.update(personalize(pairs, self.method, **self.chosen, **previous))
            self._last.update(pairs)
        return super().aggregate_train(server_round, replies)  # type: ignore[no-any-return]

    def _own(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        mine = {self.arrayrecord_key: self.models[node]} if node in self.models else {}
        return Message(RecordDict({**message.content, **mine}), node, message.metadata.message_type)


def select_multikrum(
    contents: list[RecordDict], num_malicious_nodes: int, num_nodes_to_select: int
) -> list[RecordDict]:
    """Flower's `select_multikrum` with exact distances, best first; also for
    `Bulyan(selection_rule=select_multikrum)`.

    Flower's own expands |a|^2 + |b|^2 - 2 a b in float32, whose error exceeds the distances of
    models that differ by a thousandth. Here floating-point tensors are compared, without running
    statistics. ValueError in one sentence for models that differ in their tensors, and where 2 f +
    2 < N does not hold for f malicious nodes: Krum promises nothing there.
    """
    rows, _ = pack([next(iter(c.array_records.values())) for c in contents])
    chosen = Krum(num_malicious_nodes, num_nodes_to_select).chosen(ops.pairwise_sqdist(rows))
    return [contents[i] for i in chosen.tolist()]


class ExactMultiKrum(MultiKrum):  # type: ignore[misc]
    """Flower's `MultiKrum`, word for word its arguments, with exact distances. A round of too few
    replies for Krum is skipped, and said."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean of the chosen replies, and of their metrics."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        if len(valid) <= 2 * self.num_malicious_nodes + 2:
            least = 2 * self.num_malicious_nodes + 3
            log(
                WARNING,
                "Krum needs %d replies for %d malicious nodes, got %d; the round is skipped.",
                least,
                least // 2 - 1,
                len(valid),
            )
            return None, None
        contents: Any = [m.content for m in valid]
        chosen = select_multikrum(contents, self.num_malicious_nodes, self.num_nodes_to_select)
        return aggregate_arrayrecords(chosen, self.weighted_by_key), self.train_metrics_aggr_fn(
            chosen, self.weighted_by_key
        )


WHO = "query.pflcore"  # the message that asks a node which client it is


class PflStrategy(FedAvg):  # type: ignore[misc]
    """`pflcore.Server` as Flower's strategy: any algorithm, each client its own download, with
    `client_app` on the other side.

    `algorithm`, `model`, `num_clients`, `rounds`, `seed`, `batch_norm` and `clip` are
    `pflcore.Server`'s; the model and its start are those of the clients' `pflcore.Client`.
    `flower`: FedAvg's own arguments; it waits for `num_clients` nodes where `min_available_nodes`
    says nothing else. Who trains is drawn by `seed`, as a simulation draws it, so a run gives the
    models of `pflcore.Simulation`. `server`: the `pflcore.Server`, with `state_dict()` and
    `report()`. A node that does not answer was absent from the round; where all answers are errors,
    the run ends with the first one's reason.
    """

    def __init__(
        self,
        algorithm: Any,
        model: Any,
        num_clients: int,
        *,
        rounds: int = 100,
        seed: int = 0,
        batch_norm: Buffers = "auto",
        clip: float | None = None,
        **flower: Any,
    ) -> None:
        self.server = Server(
            algorithm,
            model,
            num_clients,
            rounds=rounds,
            seed=seed,
            batch_norm=batch_norm,
            clip=clip,
        )
        super().__init__(
            **{
                "min_train_nodes": 1,
                "min_evaluate_nodes": 1,
                "min_available_nodes": num_clients,
                **flower,
            }
        )
        self.clients: dict[int, Hashable] = {}  # by node id

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        **options: Any,
    ) -> Result:
        """Flower's, for the rounds of the server that are left, or `num_rounds` of them; the start
        is the model's own."""
        if initial_arrays:
            raise ValueError(
                "initial_arrays: the start is `model`'s own, here and at the clients; leave them "
                "out, and load them there."
            )
        left = self.server.rounds - self.server.round
        return super().start(
            grid, ArrayRecord(), left if num_rounds is None else num_rounds, **options
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for each client of this round's cohort."""
        if not self.fraction_train:
            return []
        here, alg = self._here(grid), self.server.algorithm
        absent = set(alg.traits.required) - set(here)
        if absent:
            raise ValueError(
                f"algorithm: client number {min(absent)} must take part in every round, and no "
                "node says that it is that one."
            )
        part = max(self.fraction_train, min(1.0, self.min_train_nodes / len(here)))
        seed: Any = SimpleNamespace(seed=self.server.seed)  # all that is asked of a setting
        among = torch.tensor(sorted(here))
        ids = sample(Setup(alg, seed), self.server.round + 1, part, among)
        return self._messages([here[i] for i in ids.tolist()], "train", server_round, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The server's round; there is no one model to be given."""
        valid, failed = self._check_and_log_replies(replies, is_train=True, validate=False)
        if not valid and failed:
            raise ValueError(
                f"round {server_round}: all {len(failed)} clients failed, the first one for this "
                f"reason: {failed[0].error.reason}"
            )
        uploads: dict[Any, Any] = {}
        for message in valid:
            client = self.clients[message.metadata.src_node_id]
            metrics: Any = next(iter(message.content.metric_records.values()), {})
            records = [r.to_torch_state_dict() for r in message.content.array_records.values()]
            uploads.setdefault(
                client,
                (records[0] if len(records) == 1 else records, metrics.get(self.weighted_by_key)),
            )
        if not uploads:
            return None, None
        outcome = self.server.aggregate(uploads, strict=False)
        if outcome.void or outcome.dropped:
            log(
                WARNING,
                "round %d: not finite, so absent: clients %s%s",
                server_round,
                outcome.dropped,
                "; void" * outcome.void,
            )
        fine = [m.content for m in valid if self.clients[m.metadata.src_node_id] in outcome.ids]
        return None, self.train_metrics_aggr_fn(fine, self.weighted_by_key) if fine else None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for each client that is evaluated."""
        if not self.fraction_evaluate:
            return []
        here = self._here(grid)
        count = max(
            int(self.fraction_evaluate * len(here)), min(self.min_evaluate_nodes, len(here))
        )
        order, ids = (
            drawn(len(here), count, self.server.seed, server_round, "evaluated").tolist(),
            sorted(here),
        )
        return self._messages(
            [here[ids[i]] for i in sorted(order)], "evaluate", server_round, config
        )

    # inside -----------------------------------------------------------------
    def _messages(
        self, nodes: list[int], kind: str, server_round: int, config: ConfigRecord
    ) -> list[Message]:
        config["server-round"], purpose = server_round, "train" if kind == "train" else "evaluation"
        downloads = {
            node: record_of(self.server.download(self.clients[node], purpose)) for node in nodes
        }
        return [
            Message(
                RecordDict({self.arrayrecord_key: d, self.configrecord_key: config}), node, kind
            )
            for node, d in downloads.items()
        ]

    def _here(self, grid: Grid) -> dict[int, int]:
        """The nodes that are connected, by their clients' numbers; new ones are asked which client
        they are."""
        nodes = sample_nodes(grid, self.min_available_nodes, 0)[1]
        asked = [Message(RecordDict(), node, WHO) for node in nodes if node not in self.clients]
        for reply in grid.send_and_receive(asked) if asked else ():
            node = reply.metadata.src_node_id
            if reply.has_error():
                raise ValueError(
                    f"node {node}: it does not say which client it is ({reply.error.reason}); its "
                    "ClientApp must be a client_app."
                )
            self.clients[node] = reply.content["config"]["client"]
        known = sorted(
            (node for node in nodes if node in self.clients),
            key=lambda node: str(self.clients[node]).zfill(20),
        )
        here: dict[int, int] = {}
        for node in known:
            number = self.server.join(self.clients[node])
            if here.setdefault(number, node) != node:
                who = self.clients[node]
                log(
                    WARNING,
                    "client %r: nodes %d and %d both say that they are it; the first one is heard",
                    who,
                    here[number],
                    node,
                )
        return here
