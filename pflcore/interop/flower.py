"""Personalized federated learning in Flower (Message API, flwr 1.41 and later).

It needs the extra `flower`.

- `client_app` and `PflStrategy` play any algorithm, the one at the clients, the other
  at the server.
- `PersonalStrategy` sends each client its own model, by a method that needs nothing of
  a client but its model. ClientApps stay as they are.
- `keep_private` is a mod that keeps some tensors with their client.
- `ExactMultiKrum` is Flower's MultiKrum by exact distances.
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
    from pflcore.check import install_command

    raise ImportError(
        f"pflcore.interop.flower needs Flower; {install_command('flwr')}."
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
from pflcore.algorithms._feddwa import FedDWA
from pflcore.algorithms._protocol import Tensors
from pflcore.check import are_names, checked, require
from pflcore.interop._packing import pack
from pflcore.interop._personalize import Krum, method_of, min_models, personalize
from pflcore.interop._remote import MAX_SAMPLES, Client, Server, layout_of
from pflcore.simulation._loop import MAX_VOID_ROUNDS
from pflcore.simulation._models import Personalized
from pflcore.simulation._uploads import RoundOutcome
from pflcore.simulation.round import RunConfig, sample_cohort
from pflcore.train._random import draw_without_replacement

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
    """Tensors as Flower's arrays, which are numpy's.

    Raises ValueError for a dtype that numpy does not have.
    """
    for name, tensor in tensors.items():
        fits = tensor.dtype != torch.bfloat16
        require(fits, name, "float32 or float16, which Flower carries", tensor)
    return ArrayRecord({name: t.detach().cpu() for name, t in tensors.items()})


def decode_tensors(content: RecordDict) -> Tensors | None:
    """The tensors of the one ArrayRecord in a message; None where there are none."""
    records = [*content.array_records.values()]
    if len(records) != 1:
        return None
    try:
        return dict(records[0].to_torch_state_dict())
    except Exception:  # bytes that somebody else made raise errors of many kinds
        return None


def model_layout(content: RecordDict) -> tuple[Any, bool]:
    """The layout of the one model in a message, and whether its numbers are possible.

    The layout has the names, shapes and dtypes; it is None where there is no model.
    Numbers are possible that are finite, and no negative variance.
    """
    tensors = decode_tensors(content)
    if not tensors:
        return None, False
    is_possible = all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] == "running_var" and bool((tensor < 0).any()):
            is_possible = False
    return ([*content.array_records], layout_of(tensors)), is_possible


def metrics_layout(content: RecordDict, weight: str) -> Any:
    """The names of the metrics in a reply, and of lists their lengths.

    None where the metric `weight` is no number of samples.
    """
    records = [*content.metric_records.items()]
    if len(records) != 1:
        return None
    name, metrics = records[0]
    num_samples = metrics.get(weight)
    is_number = isinstance(num_samples, int | float)
    if not is_number or not 0 < num_samples <= MAX_SAMPLES:
        return None
    lengths = {
        key: len(value) if isinstance(value, list) else None
        for key, value in metrics.items()
    }
    return name, lengths


def matching_positions(
    layouts: Sequence[Any], expected_layout: Any = None
) -> list[int]:
    """The places of `expected_layout`; where nobody has it, of the most frequent one.

    None stands for no layout.
    """
    known = [layout for layout in layouts if layout]
    expected = expected_layout
    if expected not in known:
        expected = max(known, key=known.count, default=None)
    return [
        place for place, layout in enumerate(layouts) if layout and layout == expected
    ]


def usable_replies(
    replies: Iterable[Message],
    weight: str,
    expected_layout: Any = None,
    *,
    models: bool = True,
    finite: bool = True,
) -> list[Message]:
    """The replies that hold what most replies hold; others are logged and left out.

    A reply holds one model of the tensors that most have, and metrics of the names that
    most have. Replies come in the order of the nodes, so that no bit depends on which
    node answered first. Those without content, which report an error, stay.

    Args:
        weight: the name of the metric with the number of samples.
        expected_layout: the layout of the models, where any reply has it.
        models: False asks for metrics alone.
        finite: False also takes models that are not finite.
    """
    replies = sorted(replies, key=_node_of)
    answers = [reply for reply in replies if reply.has_content()]
    usable = answers
    if models:
        layouts = []
        for answer in answers:
            layout, is_possible = model_layout(answer.content)
            layouts.append(layout if is_possible or not finite else None)
        places = matching_positions(layouts, expected_layout)
        usable = [answers[place] for place in places]
    layouts = [metrics_layout(answer.content, weight) for answer in usable]
    usable_nodes = {_node_of(usable[place]) for place in matching_positions(layouts)}
    odd = [_node_of(a) for a in answers if _node_of(a) not in usable_nodes]
    if odd:
        wanted = "metrics of the others' names"
        if models:
            wanted = "finite models of the others' tensors"
        text = "nodes %s: no %s with %r in their replies; absent"
        log(WARNING, text, odd, wanted, weight)
    return [reply for reply in replies if _node_of(reply) not in odd]


def _node_of(reply: Message) -> int:
    """The node that sent a reply."""
    node: int = reply.metadata.src_node_id
    return node


def only_record(message: Message, name: str) -> tuple[str, ArrayRecord]:
    """The key and the record of the one model in a message.

    Raises ValueError, with the message's `name`, where there are several, or none.
    """
    records = dict(message.content.array_records)
    require(len(records) == 1, name, "one ArrayRecord, the model", list(records))
    return next(iter(records.items()))


STATE_RECORD = "pflcore.client"  # the record of Context.state
# Clients that are kept rather than made again; their state is in their contexts.
MAX_CACHED_CLIENTS = 32
Evaluate = Callable[[Personalized, Context], dict[str, float]]


def number_of(context: Context) -> Hashable:
    """The client that a node is: its partition, where the node has one."""
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
    """The ClientApp of `PflStrategy`.

    `client_app(lambda context: pflcore.Client("ditto", model, data_of(context),
    training))` is one. What the algorithm keeps at a client is in `Context.state`,
    which a simulation carries to the worker and back for each message.

    Args:
        make: returns the `pflcore.Client` of a node, by its `context.node_config` and
            `context.run_config`. It may be called more than once for a node.
        evaluate: `evaluate(model, context)` returns numbers by name ("size": the number
            of samples that they are of), and may save the model. The default is the
            loss, and for classes the accuracy, on the client's test samples.
        client_id: tells which client a node is, by a string or a whole number; the
            default is its "partition-id".
        mods: Flower's own.
    """
    app = ClientApp(mods=mods or [])
    client_of = client_cache(make)

    @app.query("pflcore")  # type: ignore[untyped-decorator]
    def identify(message: Message, context: Context) -> Message:
        config = ConfigRecord({"client": client_id(context)})
        return Message(RecordDict({"config": config}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        key, record = only_record(message, "the server's message")
        client = client_of(context)
        upload, num_samples = client.train(record.to_torch_state_dict())
        context.state[STATE_RECORD] = ConfigRecord({"bytes": client_bytes(client)})
        metrics = MetricRecord({"num-examples": num_samples})
        content = RecordDict({key: record_of(upload), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator]
    def test(message: Message, context: Context) -> Message:
        _, record = only_record(message, "the server's message")
        download = record.to_torch_state_dict()
        client = client_of(context)
        if evaluate is None:
            values = client.evaluate(download)
        else:
            values = evaluate(client.model(download), context)
        metrics = MetricRecord({"num-examples": values.pop("size", 1), **values})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def client_cache(make: Callable[[Context], Client]) -> Callable[[Context], Client]:
    """A function from a context to its client, with the state that the context holds.

    It keeps the clients that it makes, and forgets the oldest where they are many.
    """
    clients: dict[tuple[int, int], Client] = {}

    def client_of(context: Context) -> Client:
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
        return client

    return client_of


def client_bytes(client: Client) -> bytes:
    """The state of a client as bytes."""
    data = io.BytesIO()
    torch.save(client.state_dict(), data)
    return data.getvalue()


PRIVATE_RECORD = "pflcore.private"  # the record of Context.state


def keep_private(*patterns: str) -> Mod:
    """A mod with which the tensors that match stay with their client.

    `ClientApp(mods=[keep_private("head.*")])` uses it; nothing else changes, on neither
    side. The classifier's names make FedPer (Arivazhagan et al. 2019), the features'
    LG-FedAvg (Liang et al. 2020), the batch norms' FedBN (Li et al. 2021), of any app
    whose replies are models.

    A client's values are in `Context.state`. In training and evaluation they take the
    place of the incoming ones. In a reply the values that came take theirs: private
    values do not travel, every reply has the tensors that the server expects, and the
    server's mean leaves them where they started. A client that has not trained yet uses
    the incoming values. Raises ValueError where a pattern matches nothing.
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
    """The names in `record` that match.

    Raises ValueError where a pattern matches none.
    """
    names = dict.fromkeys(record, False)
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        wanted = f"patterns of some of {', '.join(names)}"
        require(matches, "keep_private", wanted, pattern)
        names |= dict.fromkeys(matches, True)
    return [name for name, is_private in names.items() if is_private]


class FilteredFedAvg(FedAvg):  # type: ignore[misc]
    """Flower's FedAvg, whose evaluation leaves out replies that differ from most."""

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean of the metrics, as FedAvg has it."""
        replies = usable_replies(replies, self.weighted_by_key, models=False)
        return super().aggregate_evaluate(server_round, replies)  # type: ignore[no-any-return]


class PersonalStrategy(FilteredFedAvg):
    """Flower's `FedAvg` that sends each client its own model.

    `pflcore.personalize` makes the models; any ClientApp that FedAvg drives will do. A
    client that has not trained yet receives the mean of the round. Raises ValueError
    for models that differ in their tensors.

    Args:
        method: "fedamp", "heurfedamp", "sfl", "clusters", "feddwa" (its guidance are
            the models of the round before), or an instance.
        include: the tensors that are mixed, as in `pflcore.pack`; the others stay each
            client's own.
        exclude: those that are not, as in `pflcore.pack`.
        flower: FedAvg's own arguments.
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
        # The layout of the models: as they were sent, or as most came.
        self._expected_layout: Any = None

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """Makes all clients' next models; returns the mean, as FedAvg does."""
        replies = usable_replies(replies, self.weighted_by_key, self._expected_layout)
        contents = {
            _node_of(reply): reply.content for reply in replies if reply.has_content()
        }
        if contents:
            self._personalize(contents)
        return super().aggregate_train(server_round, replies)  # type: ignore[no-any-return]

    def _personalize(self, contents: Mapping[int, RecordDict]) -> None:
        """Makes the nodes' next models of the uploads in their replies."""
        uploads: dict[int, Any] = {
            node: next(iter(content.array_records.values()))
            for node, content in contents.items()
        }
        least = min_models(method_of(self.method, {}))
        if len(uploads) < least:
            text = "%s needs %d models, got %d; everybody keeps the one that it has."
            log(WARNING, text, self.method, least, len(uploads))
            return
        layout, _ = model_layout(next(iter(contents.values())))
        if layout != self._expected_layout:
            self._expected_layout = layout
            self._last = {}  # uploads of another layout cannot be compared
        previous = None
        if self._looks_back:
            previous = {node: self._last.get(node, uploads[node]) for node in uploads}
        models = personalize(uploads, self.method, previous=previous, **self.chosen)
        self.models.update(models)
        self._last.update(uploads)

    def _construct_messages(
        self, record: RecordDict, node_ids: list[int], message_type: str
    ) -> Iterable[Message]:
        """FedAvg's messages, each with the node's own model."""
        key = self.arrayrecord_key
        self._expected_layout = self._expected_layout or model_layout(record)[0]
        messages = []
        for node in node_ids:
            model = self.models.get(node, record[key])
            content = RecordDict({**record, key: model})
            messages.append(Message(content, node, message_type))
        return messages


def select_multikrum(
    contents: list[RecordDict], num_malicious_nodes: int, num_nodes_to_select: int
) -> list[RecordDict]:
    """Flower's `select_multikrum` with exact distances, best first.

    It also serves `Bulyan(selection_rule=select_multikrum)`. Flower's own expands
    |a|^2 + |b|^2 - 2 a b in float32, whose error exceeds the distances of models that
    differ by a thousandth. Here floating-point tensors are compared, without running
    statistics. A content without a model of the tensors that most have is left out and
    logged; a model that is not finite is never chosen. Raises ValueError where 2 f + 2
    < N does not hold for f malicious nodes among the N that are left: Krum promises
    nothing there.
    """
    layouts = []
    are_possible = []
    for content in contents:
        layout, is_possible = model_layout(content)
        layouts.append(layout)
        are_possible.append(is_possible)
    places = matching_positions(layouts)
    if len(places) < len(contents):
        odd = [place for place in range(len(contents)) if place not in places]
        log(WARNING, "contents %s: no models of the others' tensors; left out", odd)
    models = [next(iter(contents[place].array_records.values())) for place in places]
    rows, _ = pack(models)
    possible_rows = torch.tensor([are_possible[place] for place in places])
    rows[~possible_rows] = torch.nan  # infinitely far
    krum = Krum(num_malicious_nodes, num_nodes_to_select)
    chosen = krum.select(ops.pairwise_sqdist(rows)).tolist()
    return [contents[places[i]] for i in chosen if possible_rows[i]]


class ExactMultiKrum(FilteredFedAvg, MultiKrum):  # type: ignore[misc]
    """Flower's `MultiKrum`, with the same arguments, by exact distances.

    A node that sends no model as most do, or no number of samples, was absent. Where
    too few replies are left for Krum, the nodes that sent something else count as
    malicious, and fewer are selected. A round of too few replies even so is skipped,
    with a line in the log.
    """

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """The mean of the chosen replies, and of their metrics."""
        replies = list(replies)
        usable = usable_replies(replies, self.weighted_by_key, finite=False)
        valid, _ = self._check_and_log_replies(usable, is_train=True)
        malicious = self.num_malicious_nodes
        num_odd = len(replies) - len(usable)
        f = min(malicious, (len(valid) - 3) // 2)
        if f < max(0, malicious - num_odd):
            text = (
                "Krum needs %d replies for %d malicious nodes, got %d; the round is "
                "skipped."
            )
            log(WARNING, text, 2 * malicious + 3, malicious, len(valid))
            return None, None
        m = min(self.num_nodes_to_select, len(valid) - f)
        contents = [reply.content for reply in valid]
        reply_of = {id(reply.content): reply for reply in valid}
        selected = select_multikrum(contents, f, m)
        chosen = [reply_of[id(content)] for content in selected]
        mean = FedAvg.aggregate_train(self, server_round, chosen)
        return mean  # type: ignore[no-any-return]


WHO_QUERY = "query.pflcore"  # the message that asks a node which client it is


def client_of_reply(reply: Message) -> Hashable | None:
    """The client that a node says it is; None where its answer names none."""
    try:
        client = reply.content["config"]["client"]
    except (LookupError, TypeError, ValueError):  # an error has no content
        return None
    is_name = isinstance(client, str | int) and not isinstance(client, bool)
    return client if is_name else None


class PflStrategy(FilteredFedAvg):
    """`pflcore.Server` as Flower's strategy, with `client_app` on the other side.

    Any algorithm may be played; each client has its own download. The clients that
    train are drawn by the server's seed, as a simulation draws them, so a run gives the
    models of `pflcore.Simulation`. A node that does not answer, or whose answer cannot
    be used, was absent from the round. Of nodes that say they are one client, the one
    that was known first takes part while it is connected. Raises ValueError where three
    rounds in a row come to nothing: all nodes fail, or a required client is not there.

    Args:
        server: its model and start are those of the clients' `pflcore.Client`.
        flower: FedAvg's own arguments. Unless `min_available_nodes` says otherwise, the
            strategy waits for as many nodes as the server has clients.
    """

    def __init__(self, server: Server, **flower: Any) -> None:
        least = {
            "min_train_nodes": 1,
            "min_evaluate_nodes": 1,
            "min_available_nodes": server.num_clients,
        }
        super().__init__(**least | flower)
        self.server = server
        # The client that each node says it is, in the order of the answers.
        self.clients: dict[int, Hashable] = {}
        self._duplicate_nodes: set[int] = set()  # nodes whose client another node is
        self._skipped_rounds = 0  # rounds in a row that came to nothing
        # The seconds to wait for an answer, once `start` says it.
        self._timeout_options: dict[str, float] = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        **options: Any,
    ) -> Result:
        """Flower's `start`, from the server's own model.

        It plays the rounds that the server has left, or `num_rounds` of them.
        """
        wanted = "None, as the start is the model's own"
        require(not initial_arrays, "initial_arrays", wanted, "some")
        if num_rounds is None:
            num_rounds = self.server.rounds - self.server.round
        default_timeout = 3600  # Flower's own
        self._timeout_options = {"timeout": options.get("timeout", default_timeout)}
        return super().start(grid, ArrayRecord(), num_rounds, **options)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """Plays the server's round; there is no one model to be returned."""
        valid, failed = self._check_and_log_replies(
            replies, is_train=True, validate=False
        )
        if not valid and failed:
            reason = failed[0].error.reason.rstrip(".")
            self._skip_round(
                f"all {len(failed)} clients failed, the first one by {reason}."
            )
        uploads: dict[Any, Any] = {}
        for reply in valid:
            client = self.clients[_node_of(reply)]
            metrics: Any = next(iter(reply.content.metric_records.values()), {})
            num_samples = metrics.get(self.weighted_by_key)
            uploads.setdefault(client, (decode_tensors(reply.content), num_samples))
        if not uploads:
            return None, None
        self._skipped_rounds = 0
        outcome = self.server.aggregate(uploads, strict=False)
        self._log_outcome(server_round, outcome)
        accepted = [r for r in valid if self.clients[_node_of(r)] in outcome.ids]
        accepted = usable_replies(accepted, self.weighted_by_key, models=False)
        if not accepted:
            return None, None
        contents = [reply.content for reply in accepted]
        return None, self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _log_outcome(self, server_round: int, outcome: RoundOutcome) -> None:
        """Logs the clients that were dropped, and why a round is void."""
        if not outcome.void and not outcome.dropped:
            return
        void = ""
        if outcome.void:
            void = f"; void: {outcome.void_reason or 'nobody is left'}"
        text = "round %d: not finite or of no use, so absent: clients %s%s"
        log(WARNING, text, server_round, outcome.dropped, void)

    # inside -----------------------------------------------------------------
    def _messages(
        self,
        kind: str,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """A message for each client that trains, or that is evaluated."""
        is_training = kind == "train"
        fraction = self.fraction_train if is_training else self.fraction_evaluate
        if not fraction:
            return []
        node_of = self._connected_nodes(grid)
        if is_training and not self._can_train(node_of):
            return []
        if not node_of:
            return []
        available = torch.tensor(sorted(node_of), dtype=torch.long)
        if is_training:
            ids = self._train_cohort(available)
        else:
            ids = self._evaluation_cohort(available, server_round)
        config["server-round"] = server_round
        purpose: Any = "train" if is_training else "evaluation"
        messages = []
        for number in ids.tolist():
            node = node_of[number]
            record = record_of(self.server.download(self.clients[node], purpose))
            content = RecordDict(
                {self.arrayrecord_key: record, self.configrecord_key: config}
            )
            messages.append(Message(content, node, kind))
        return messages

    def _can_train(self, node_of: Mapping[int, int]) -> bool:
        """True where the nodes that are connected suffice; else skips the round.

        `node_of` has the node of each client's number.
        """
        algorithm = self.server.algorithm
        absent = set(algorithm.traits.required_clients) - set(node_of)
        if not node_of:
            self._skip_round(
                "no node says which client it is; their ClientApp must be a client_app."
            )
        elif absent:
            name = type(algorithm).__name__
            self._skip_round(
                f"{name} needs a node for client number {min(absent)} in every round."
            )
        return bool(node_of) and not absent

    def _train_cohort(self, available: Tensor) -> Tensor:
        """The numbers of the clients that train, drawn as a simulation draws them."""
        least = min(1.0, self.min_train_nodes / len(available))
        participation = max(self.fraction_train, least)
        # `sample_cohort` reads only the seed of a run's context.
        context: Any = SimpleNamespace(seed=self.server.seed)
        config = RunConfig(self.server.algorithm, context)
        return sample_cohort(config, self.server.round + 1, participation, available)

    def _evaluation_cohort(self, available: Tensor, server_round: int) -> Tensor:
        """The numbers of the clients that are evaluated, ascending."""
        n = len(available)
        least = min(self.min_evaluate_nodes, n)
        count = max(int(self.fraction_evaluate * n), least)
        drawn = draw_without_replacement(
            n, count, self.server.seed, server_round, "evaluated"
        )
        return available[drawn.sort().values]

    configure_train = partialmethod(_messages, "train")
    configure_evaluate = partialmethod(_messages, "evaluate")

    def _skip_round(self, reason: str) -> None:
        """Logs why a round comes to nothing.

        Raises ValueError where it is the third in a row.
        """
        self._skipped_rounds += 1
        if self._skipped_rounds >= MAX_VOID_ROUNDS:
            raise ValueError(
                f"{self._skipped_rounds} rounds in a row came to nothing: {reason}"
            )
        log(WARNING, "the round is skipped: %s", reason)

    def _connected_nodes(self, grid: Grid) -> dict[int, int]:
        """The connected node of each client's number.

        New nodes are asked which client they are.
        """
        nodes = sample_nodes(grid, self.min_available_nodes, 0)[1]
        queries = [
            Message(RecordDict(), node, WHO_QUERY)
            for node in nodes
            if node not in self.clients
        ]
        replies: Iterable[Message] = ()
        if queries:
            replies = grid.send_and_receive(queries, **self._timeout_options)
        # Of nodes that say they are one client, the first in the grid's order counts.
        place_of = {node: place for place, node in enumerate(nodes)}
        reason_of = dict[int, str]()  # of nodes that name no client
        for reply in sorted(replies, key=lambda r: place_of.get(_node_of(r), 0)):
            node = _node_of(reply)
            client = client_of_reply(reply)
            if client is not None:
                self.clients[node] = client
            elif reply.has_error():
                reason_of[node] = reply.error.reason
            else:
                reason_of[node] = "another answer"
        if reason_of:
            text = (
                "nodes %s do not say which client they are, as a client_app does; "
                "absent (%s)"
            )
            log(WARNING, text, [*reason_of], next(iter(reason_of.values())))
        return self._nodes_by_client(nodes)

    def _nodes_by_client(self, nodes: Iterable[int]) -> dict[int, int]:
        """The node of each client's number: of several the one that was known first."""
        connected = {*nodes}
        node_of: dict[Hashable, int] = {}
        for node, client in self.clients.items():
            if node not in connected:
                continue
            first = node_of.setdefault(client, node)
            if first != node and node not in self._duplicate_nodes:
                text = (
                    "node %s says it is client %r, as node %s does, which was first; "
                    "left out"
                )
                log(WARNING, text, node, client, first)
                self._duplicate_nodes.add(node)
        by_number = {}
        # In a fixed order, as new clients are numbered here: 2 before 10.
        for client in sorted(node_of, key=lambda client: str(client).zfill(20)):
            try:
                by_number[self.server.join(client)] = node_of[client]
            except ValueError as error:  # no newcomer in a round that has begun
                log(WARNING, "%s", error)
        return by_number
