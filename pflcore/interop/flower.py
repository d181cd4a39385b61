"""Personalized federated learning in Flower (Message API, flwr 1.41 and later); needs the extra
`flower`.

`client_app` and `PflStrategy` play any algorithm, the one at the clients, the other at the server.
For ClientApps as they are: `PersonalStrategy` sends each client its own model, by a method that
needs nothing of a client but its model; `keep_private` is a mod that keeps some tensors with their
client; `ExactMultiKrum` is Flower's MultiKrum by exact distances.
"""

import io
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partialmethod
from logging import WARNING
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
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.supercore import log
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._relations import FedDWA
from pflcore.check import are_names, checked, need
from pflcore.interop._mixing import Krum, method_of, personalize
from pflcore.interop._packing import pack
from pflcore.interop._remote import Client, Form, Server, layout_of
from pflcore.simulation._personal import Personalized
from pflcore.simulation.round import Setup, sample
from pflcore.train._random import drawn

__all__ = [
    "ExactMultiKrum",
    "PersonalStrategy",
    "PflStrategy",
    "client_app",
    "keep_private",
    "select_multikrum",
]

Aggregated = tuple[ArrayRecord | None, MetricRecord | None]


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as Flower's arrays, which are numpy's. ValueError for what numpy has no numbers
    for."""
    for name, t in tensors.items():
        need(t.dtype != torch.bfloat16, name, "float32 or float16, which Flower carries", t)
    return ArrayRecord({k: t.detach().cpu() for k, t in tensors.items()})


def usable(replies: list[Message], weight: str) -> list[Message]:
    """The replies without those that do not hold one finite model of the tensors that most of them
    have, with its `weight`: these are logged, and were absent."""
    forms = {
        m.metadata.src_node_id: _form_of(m.content, weight) for m in replies if m.has_content()
    }
    known = [form for form in forms.values() if form]
    usual = max(known, key=known.count, default=False)
    odd = [node for node, form in forms.items() if form != usual]
    if odd:
        said = "nodes %s: no finite models of the others' tensors with %r in their replies; absent"
        log(WARNING, said, odd, weight)
    return [m for m in replies if m.metadata.src_node_id not in odd]


def _form_of(content: RecordDict, weight: str) -> Form | None:
    """The shapes and dtypes of the one finite model in a reply, where its weight is a number above
    0."""
    records, metrics = [*content.array_records.values()], [*content.metric_records.values()]
    if len(records) != 1 or len(metrics) != 1:
        return None
    tensors, number = records[0].to_torch_state_dict(), metrics[0].get(weight)
    weighted = isinstance(number, int | float) and number > 0
    if not weighted or not all(bool(t.isfinite().all()) for t in tensors.values()):
        return None
    return layout_of(tensors)


def only_record(message: Message, whose: str) -> tuple[str, ArrayRecord]:
    """The key and the record of the one model in a message. ValueError where there are several, or
    none."""
    records = dict(message.content.array_records)
    need(len(records) == 1, whose, "one ArrayRecord, the model", list(records))
    return next(iter(records.items()))


STATE = "pflcore.client"  # the record of Context.state
MOST = 32  # clients at hand, that are not made again; what they know is in their contexts
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
    back for each message.
    """
    app, opened = ClientApp(mods=mods or []), at_hand(make)

    @app.query("pflcore")  # type: ignore[untyped-decorator]
    def who(message: Message, context: Context) -> Message:
        config = ConfigRecord({"client": client_id(context)})
        return Message(RecordDict({"config": config}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        key, record = only_record(message, "the server's message")
        client = opened(context)
        upload, samples = client.train(record.to_torch_state_dict())
        context.state[STATE] = ConfigRecord({"bytes": saved(client)})
        metrics = MetricRecord({"num-examples": samples})
        return Message(RecordDict({key: record_of(upload), "metrics": metrics}), reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator]
    def test(message: Message, context: Context) -> Message:
        download = only_record(message, "the server's message")[1].to_torch_state_dict()
        client = opened(context)
        if evaluate is None:
            found = client.evaluate(download)
        else:
            found = evaluate(client.model(download), context)
        metrics = MetricRecord({"num-examples": found.pop("size", 1), **found})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def at_hand(make: Callable[[Context], Client]) -> Callable[[Context], Client]:
    """What gives the client of a node, with the state that its context holds."""
    made: dict[tuple[int, int], Client] = {}

    def opened(context: Context) -> Client:
        key = context.run_id, context.node_id
        if key not in made:
            made[key] = make(context)
            need(isinstance(made[key], Client), "make", "a function that gives a Client", made[key])
            if len(made) > MOST:
                del made[next(iter(made))]
        if STATE in context.state:
            kept = io.BytesIO(context.state[STATE]["bytes"])
            made[key].load_state_dict(torch.load(kept, weights_only=True))
        return made[key]

    return opened


def saved(client: Client) -> bytes:
    """What a client keeps, as bytes."""
    data = io.BytesIO()
    torch.save(client.state_dict(), data)
    return data.getvalue()


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
    nothing.
    """
    named = bool(patterns) and are_names(patterns)
    need(named, "patterns", "names of private tensors, as in keep_private('head.*')", patterns)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        if kind == MessageType.QUERY:
            return call_next(message, context)
        key, came = only_record(message, "the server's message")
        kept = context.state.array_records.get(PRIVATE, {})
        names = _private(came, patterns)
        message.content = RecordDict({**message.content, key: ArrayRecord({**came, **kept})})
        reply = call_next(message, context)
        if kind == MessageType.TRAIN and reply.has_content():
            key, made = only_record(reply, "the app's reply")
            need(made.keys() >= set(names), "the app's reply", f"a model with {names}", list(made))
            context.state[PRIVATE] = ArrayRecord({n: made[n] for n in names})
            sent = ArrayRecord({**made, **{n: came[n] for n in names}})
            reply.content = RecordDict({**reply.content, key: sent})
        return reply

    return mod


def _private(came: ArrayRecord, patterns: Sequence[str]) -> list[str]:
    """The names in `came` that match; ValueError where a pattern matches none."""
    for pattern in patterns:
        found = any(fnmatchcase(n, pattern) for n in came)
        need(found, "keep_private", f"patterns of some of {', '.join(came)}", pattern)
    return [n for n in came if any(fnmatchcase(n, p) for p in patterns)]


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
        self._looks_back = isinstance(method_of(method, {}), FedDWA)
        super().__init__(**flower)
        self.method = method
        self.chosen: dict[str, Any] = {"include": include, "exclude": exclude}
        self.models: dict[int, ArrayRecord] = {}  # by node id
        self._last: dict[int, ArrayRecord] = {}  # the uploads that they were made of

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """Makes everybody's next model; gives the mean, as FedAvg does."""
        # the bits do not depend on who came first
        replies = sorted(replies, key=lambda m: m.metadata.src_node_id)
        replies = usable(replies, self.weighted_by_key)
        came: dict[int, Any] = {
            m.metadata.src_node_id: only_record(m, "")[1] for m in replies if m.has_content()
        }
        if came:
            last: Any = (self._last or came) if self._looks_back else None
            self.models.update(personalize(came, self.method, previous=last, **self.chosen))
            self._last.update(came)
        return super().aggregate_train(server_round, replies)  # type: ignore[no-any-return]

    def _construct_messages(
        self, record: RecordDict, node_ids: list[int], message_type: str
    ) -> Iterable[Message]:
        """FedAvg's messages, each with its node's own model."""
        key = self.arrayrecord_key
        each = [(node, self.models.get(node, record[key])) for node in node_ids]
        return [Message(RecordDict({**record, key: own}), n, message_type) for n, own in each]


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
    return [contents[i] for i in _chosen(contents, num_malicious_nodes, num_nodes_to_select)]


def _chosen(contents: list[RecordDict], f: int, m: int) -> list[int]:
    rows, _ = pack([next(iter(c.array_records.values())) for c in contents])
    return Krum(f, m).chosen(ops.pairwise_sqdist(rows)).tolist()  # type: ignore[no-any-return]


class ExactMultiKrum(MultiKrum):  # type: ignore[misc]
    """Flower's `MultiKrum`, word for word its arguments, with exact distances. A round of too few
    replies for Krum is skipped, and said."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
        """The mean of the chosen replies, and of their metrics."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        f, least = self.num_malicious_nodes, 2 * self.num_malicious_nodes + 3
        if len(valid) < least:
            said = "Krum needs %d replies for %d malicious nodes, got %d; the round is skipped."
            log(WARNING, said, least, f, len(valid))
            return None, None
        chosen = _chosen([m.content for m in valid], f, self.num_nodes_to_select)
        mean = FedAvg.aggregate_train(self, server_round, [valid[i] for i in chosen])
        return mean  # type: ignore[no-any-return]


WHO = "query.pflcore"  # the message that asks a node which client it is


class PflStrategy(FedAvg):  # type: ignore[misc]
    """`pflcore.Server` as Flower's strategy: any algorithm, each client its own download, with
    `client_app` on the other side.

    `server`: the `pflcore.Server`; its model and start are those of the clients' `pflcore.Client`.
    `flower`: FedAvg's own arguments; it waits for as many nodes as the server has clients where
    `min_available_nodes` says nothing else. Who trains is drawn by the server's seed, as a
    simulation draws it, so a run gives the models of `pflcore.Simulation`. A node that does not
    answer was absent from the round; where all answers are errors, the run ends with the first
    one's reason.
    """

    def __init__(self, server: Server, **flower: Any) -> None:
        least = {
            "min_train_nodes": 1,
            "min_evaluate_nodes": 1,
            "min_available_nodes": server.num_clients,
        }
        super().__init__(**least | flower)
        self.server = server
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
        need(not initial_arrays, "initial_arrays", "None, as the start is the model's own", "some")
        left = self.server.rounds - self.server.round
        return super().start(
            grid, ArrayRecord(), left if num_rounds is None else num_rounds, **options
        )

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregated:
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
            upload = records[0] if len(records) == 1 else records
            uploads.setdefault(client, (upload, metrics.get(self.weighted_by_key)))
        if not uploads:
            return None, None
        outcome = self.server.aggregate(uploads, strict=False)
        if outcome.void or outcome.dropped:
            said = "round %d: not finite, so absent: clients %s%s"
            log(WARNING, said, server_round, outcome.dropped, "; void" * outcome.void)
        fine = [m.content for m in valid if self.clients[m.metadata.src_node_id] in outcome.ids]
        return None, self.train_metrics_aggr_fn(fine, self.weighted_by_key) if fine else None

    # inside -----------------------------------------------------------------
    def _messages(
        self, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """A message for each client of this round's cohort, or for each that is evaluated."""
        train, alg = kind == "train", self.server.algorithm
        fraction = self.fraction_train if train else self.fraction_evaluate
        if not fraction:
            return []
        here = self._here(grid)
        among, n = torch.tensor(sorted(here)), len(here)
        if train:
            absent = set(alg.traits.required) - set(here)
            words = "a node for its client in every round"
            need(not absent, "algorithm", words, f"none of {absent}")
            part = max(fraction, min(1.0, self.min_train_nodes / n))
            seed: Any = SimpleNamespace(seed=self.server.seed)  # all that is asked of a setting
            ids = sample(Setup(alg, seed), self.server.round + 1, part, among)
        else:
            count = max(int(fraction * n), min(self.min_evaluate_nodes, n))
            ids = among[drawn(n, count, self.server.seed, server_round, "evaluated").sort().values]
        config["server-round"], messages = server_round, []
        purpose: Any = "train" if train else "evaluation"
        for node in [here[i] for i in ids.tolist()]:
            record = record_of(self.server.download(self.clients[node], purpose))
            content = RecordDict({self.arrayrecord_key: record, self.configrecord_key: config})
            messages.append(Message(content, node, kind))
        return messages

    configure_train = partialmethod(_messages, "train")
    configure_evaluate = partialmethod(_messages, "evaluate")

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
        known = sorted((str(self.clients[n]).zfill(20), n) for n in nodes if n in self.clients)
        return {self.server.join(self.clients[node]): node for _, node in known}
