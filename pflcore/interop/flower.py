"""Personalized federated learning in Flower (Message API, flwr 1.41 and later); needs
the extra `flower`.

`client_app` and `PflStrategy` play any algorithm, the one at the clients, the other at
the server. For ClientApps as they are: `PersonalStrategy` sends each client its own
model, by a method that needs nothing of a client but its model; `keep_private` is a mod
that keeps some tensors with their client; `ExactMultiKrum` is Flower's MultiKrum by
exact distances.
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
from pflcore.algorithms._protocol import Tensors
from pflcore.algorithms._relations import FedDWA
from pflcore.check import are_names, checked, require
from pflcore.interop._packing import pack
from pflcore.interop._personalize import Krum, method_of, min_models, personalize
from pflcore.interop._remote import MAX_SAMPLES, Client, Server, layout_of
from pflcore.simulation._loop import MAX_VOID_ROUNDS
from pflcore.simulation._models import Personalized
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
    """Tensors as Flower's arrays, which are numpy's. ValueError for what numpy has no
    numbers for."""
    for name, t in tensors.items():
        require(
            t.dtype != torch.bfloat16,
            name,
            "float32 or float16, which Flower carries",
            t,
        )
    return ArrayRecord({k: t.detach().cpu() for k, t in tensors.items()})


def decode_tensors(content: RecordDict) -> Tensors | None:
    """The tensors of the one ArrayRecord in a message; None where they cannot be
    decoded."""
    records = [*content.array_records.values()]
    if len(records) != 1:
        return None
    try:
        return dict(records[0].to_torch_state_dict())
    except Exception:  # somebody else's bytes raise many kinds
        return None


def model_layout(content: RecordDict) -> tuple[Any, bool]:
    """The name, shapes and dtypes of the one model in a message, None where it has
    none; and whether its numbers are finite, and no variance is below 0."""
    tensors = decode_tensors(content)
    if not tensors:
        return None, False
    variances = [v for k, v in tensors.items() if k.rpartition(".")[2] == "running_var"]
    finite = all(bool(v.isfinite().all()) for v in tensors.values())
    fine = finite and not any(bool((v < 0).any()) for v in variances)
    return ([*content.array_records], layout_of(tensors)), fine


def metrics_layout(content: RecordDict, weight: str) -> Any:
    """The names of the metrics in a reply, and of lists their lengths; None where their
    `weight` is no number of samples."""
    records = [*content.metric_records.items()]
    if len(records) != 1:
        return None
    (name, metrics), *_ = records
    number = metrics.get(weight)
    if not isinstance(number, int | float) or not 0 < number <= MAX_SAMPLES:
        return None
    return name, {
        k: len(v) if isinstance(v, list) else None for k, v in metrics.items()
    }


def matching_positions(
    layouts: Sequence[Any], expected_layout: Any = None
) -> list[int]:
    """The places of those with the form that most have, or `expected_layout` where
    anybody has it."""
    known = [form for form in layouts if form]
    form = (
        expected_layout
        if expected_layout in known
        else max(known, key=known.count, default=None)
    )
    return [i for i, other in enumerate(layouts) if other and other == form]


def usable_replies(
    replies: Iterable[Message],
    weight: str,
    expected_layout: Any = None,
    *,
    models: bool = True,
    finite: bool = True,
) -> list[Message]:
    """The replies without those that do not hold what most hold: these are logged, and
    were absent.

    Each holds one model of the tensors that most have (of the form `expected_layout`,
    where anybody has it), `finite` where that is asked, and metrics of the names that
    most have, with its `weight`; without `models` metrics alone. What comes is in the
    order of the nodes, so that no bit depends on who answered first.
    """
    replies = sorted(replies, key=lambda m: m.metadata.src_node_id)
    kept = heard = [m for m in replies if m.has_content()]
    if models:
        looks = [model_layout(m.content) for m in heard]
        forms = [form if fine or not finite else None for form, fine in looks]
        kept = [heard[i] for i in matching_positions(forms, expected_layout)]
    kept = [
        kept[i]
        for i in matching_positions([metrics_layout(m.content, weight) for m in kept])
    ]
    nodes = {m.metadata.src_node_id for m in kept}
    odd = [m.metadata.src_node_id for m in heard if m.metadata.src_node_id not in nodes]
    if odd:
        what = (
            "finite models of the others' tensors"
            if models
            else "metrics of the others' names"
        )
        log(
            WARNING,
            "nodes %s: no %s with %r in their replies; absent",
            odd,
            what,
            weight,
        )
    return [m for m in replies if m.metadata.src_node_id not in odd]


def only_record(message: Message, whose: str) -> tuple[str, ArrayRecord]:
    """The key and the record of the one model in a message. ValueError where there are
    several, or none."""
    records = dict(message.content.array_records)
    require(len(records) == 1, whose, "one ArrayRecord, the model", list(records))
    return next(iter(records.items()))


STATE_RECORD = "pflcore.client"  # the record of Context.state
# clients at hand, that are not made again; what they know is in their contexts
MAX_CACHED_CLIENTS = 32
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
    """The ClientApp of `PflStrategy`: `client_app(lambda context:
    pflcore.Client("ditto", model, data_of(context), training))`.

    `make` gives the `pflcore.Client` of a node, by its `context.node_config` and
    `context.run_config`; it may be called more than once for one.
    `evaluate(model, context)` gives numbers by name ("size": the samples that they are
    of) and may save the model; without one they are the loss, and for classes the
    accuracy, on the client's test samples. `client_id`: which client a node is, a
    string or a whole number; by default its "partition-id". What the algorithm keeps at
    a client is in `Context.state`, which a simulation carries to the worker and back
    for each message.
    """
    app, opened = ClientApp(mods=mods or []), client_cache(make)

    @app.query("pflcore")  # type: ignore[untyped-decorator]
    def who(message: Message, context: Context) -> Message:
        config = ConfigRecord({"client": client_id(context)})
        return Message(RecordDict({"config": config}), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        key, record = only_record(message, "the server's message")
        client = opened(context)
        upload, samples = client.train(record.to_torch_state_dict())
        context.state[STATE_RECORD] = ConfigRecord({"bytes": client_bytes(client)})
        metrics = MetricRecord({"num-examples": samples})
        return Message(
            RecordDict({key: record_of(upload), "metrics": metrics}), reply_to=message
        )

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


def client_cache(make: Callable[[Context], Client]) -> Callable[[Context], Client]:
    """What gives the client of a node, with the state that its context holds."""
    made: dict[tuple[int, int], Client] = {}

    def opened(context: Context) -> Client:
        key = context.run_id, context.node_id
        if key not in made:
            made[key] = make(context)
            require(
                isinstance(made[key], Client),
                "make",
                "a function that gives a Client",
                made[key],
            )
            if len(made) > MAX_CACHED_CLIENTS:
                del made[next(iter(made))]
        if STATE_RECORD in context.state:
            kept = io.BytesIO(context.state[STATE_RECORD]["bytes"])
            made[key].load_state_dict(torch.load(kept, weights_only=True))
        return made[key]

    return opened


def client_bytes(client: Client) -> bytes:
    """What a client keeps, as bytes."""
    data = io.BytesIO()
    torch.save(client.state_dict(), data)
    return data.getvalue()


PRIVATE_RECORD = "pflcore.private"  # the record of Context.state


def keep_private(*patterns: str) -> Mod:
    """`ClientApp(mods=[keep_private("head.*")])`: the tensors that match stay with
    their client; nothing else changes, on neither side.

    The classifier's names make FedPer (Arivazhagan et al. 2019), the features'
    LG-FedAvg (Liang et al. 2020), the batch norms' FedBN (Li et al. 2021), of any app
    whose replies are models. A client's values are in `Context.state`; they take the
    place of the incoming ones in training and evaluation. In their place the reply
    carries the values that came: private ones do not travel, every reply has the
    tensors that the server expects, and its mean leaves them where they started. Who
    has not trained yet uses those. ValueError in one sentence where a pattern matches
    nothing.
    """
    named = bool(patterns) and are_names(patterns)
    require(
        named,
        "patterns",
        "names of private tensors, as in keep_private('head.*')",
        patterns,
    )

    def mod(
        message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        if kind == MessageType.QUERY:
            return call_next(message, context)
        key, came = only_record(message, "the server's message")
        kept = context.state.array_records.get(PRIVATE_RECORD, {})
        names = _private(came, patterns)
        message.content = RecordDict(
            {**message.content, key: ArrayRecord({**came, **kept})}
        )
        reply = call_next(message, context)
        if kind == MessageType.TRAIN and reply.has_content():
            key, made = only_record(reply, "the app's reply")
            require(
                made.keys() >= set(names),
                "the app's reply",
                f"a model with {names}",
                list(made),
            )
            context.state[PRIVATE_RECORD] = ArrayRecord({n: made[n] for n in names})
            sent = ArrayRecord({**made, **{n: came[n] for n in names}})
            reply.content = RecordDict({**reply.content, key: sent})
        return reply

    return mod


def _private(came: ArrayRecord, patterns: Sequence[str]) -> list[str]:
    """The names in `came` that match; ValueError where a pattern matches none."""
    for pattern in patterns:
        found = any(fnmatchcase(n, pattern) for n in came)
        require(
            found, "keep_private", f"patterns of some of {', '.join(came)}", pattern
        )
    return [n for n in came if any(fnmatchcase(n, p) for p in patterns)]


class FilteredFedAvg(FedAvg):  # type: ignore[misc]
    """Flower's FedAvg, whose evaluation leaves out who answers otherwise than most."""

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean of the metrics, as FedAvg has it."""
        replies = usable_replies(replies, self.weighted_by_key, models=False)
        return super().aggregate_evaluate(server_round, replies)  # type: ignore[no-any-return]


class PersonalStrategy(FilteredFedAvg):
    """Flower's `FedAvg` that sends each client its own model, made by
    `pflcore.personalize`; any ClientApp that FedAvg drives will do.

    `method`: "fedamp", "heurfedamp", "sfl", "clusters", "feddwa" (its guidance are the
    models of the round before) or an instance; `include`, `exclude`: the tensors that
    are mixed, as `pflcore.pack` has them, the others stay each client's own. `flower`:
    FedAvg's own arguments. Who has not trained yet, gets the mean of the round.
    ValueError in one sentence for models that differ in their tensors.
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
        # the form of the models: as they were sent, or as most came
        self._expected_layout: Any = None

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """Makes everybody's next model; gives the mean, as FedAvg does."""
        replies = usable_replies(replies, self.weighted_by_key, self._expected_layout)
        contents = {
            m.metadata.src_node_id: m.content for m in replies if m.has_content()
        }
        came: dict[int, Any] = {
            node: next(iter(content.array_records.values()))
            for node, content in contents.items()
        }
        least = min_models(method_of(self.method, {}))
        if came and len(came) < least:
            said = "%s needs %d models, got %d; everybody keeps the one that it has."
            log(WARNING, said, self.method, least, len(came))
        elif came:
            form, _ = model_layout(next(iter(contents.values())))
            # what came before cannot be compared with it
            if form != self._expected_layout:
                self._expected_layout = form
                self._last = {}
            last = {node: self._last.get(node, own) for node, own in came.items()}
            previous = last if self._looks_back else None
            self.models.update(
                personalize(came, self.method, previous=previous, **self.chosen)
            )
            self._last.update(came)
        return super().aggregate_train(server_round, replies)  # type: ignore[no-any-return]

    def _construct_messages(
        self, record: RecordDict, node_ids: list[int], message_type: str
    ) -> Iterable[Message]:
        """FedAvg's messages, each with its node's own model."""
        key = self.arrayrecord_key
        self._expected_layout = self._expected_layout or model_layout(record)[0]
        each = [(node, self.models.get(node, record[key])) for node in node_ids]
        return [
            Message(RecordDict({**record, key: own}), n, message_type)
            for n, own in each
        ]


def select_multikrum(
    contents: list[RecordDict], num_malicious_nodes: int, num_nodes_to_select: int
) -> list[RecordDict]:
    """Flower's `select_multikrum` with exact distances, best first; also for
    `Bulyan(selection_rule=select_multikrum)`.

    Flower's own expands |a|^2 + |b|^2 - 2 a b in float32, whose error exceeds the
    distances of models that differ by a thousandth. Here floating-point tensors are
    compared, without running statistics. Who sends no model of the tensors that most
    send is left out and logged, and who sends one that is not finite is never chosen.
    ValueError in one sentence where 2 f + 2 < N does not hold for f malicious nodes
    among the N that are left: Krum promises nothing there.
    """
    looks = [model_layout(c) for c in contents]
    fit = matching_positions([form for form, _ in looks])
    if len(fit) < len(contents):
        odd = [i for i in range(len(contents)) if i not in fit]
        log(WARNING, "contents %s: no models of the others' tensors; left out", odd)
    rows, _ = pack([next(iter(contents[i].array_records.values())) for i in fit])
    fine = torch.tensor([looks[i][1] for i in fit])
    rows[~fine] = torch.nan  # infinitely far
    chosen = Krum(num_malicious_nodes, num_nodes_to_select).select(
        ops.pairwise_sqdist(rows)
    )
    return [contents[fit[i]] for i in chosen.tolist() if fine[i]]


class ExactMultiKrum(FilteredFedAvg, MultiKrum):  # type: ignore[misc]
    """Flower's `MultiKrum`, word for word its arguments, with exact distances.

    Who sends no model as most do, or no number of samples, was absent. Where so few are
    left that Krum would not do, those who sent something else count as malicious, and
    fewer are selected. A round of too few replies for Krum is skipped, and said.
    """

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """The mean of the chosen replies, and of their metrics."""
        replies = list(replies)
        kept = usable_replies(replies, self.weighted_by_key, finite=False)
        valid, _ = self._check_and_log_replies(kept, is_train=True)
        malicious = self.num_malicious_nodes
        lost = len(replies) - len(kept)
        f = min(malicious, (len(valid) - 3) // 2)
        if f < max(0, malicious - lost):
            said = (
                "Krum needs %d replies for %d malicious nodes, got %d; the round "
                "is "
                "skipped."
            )
            log(WARNING, said, 2 * malicious + 3, malicious, len(valid))
            return None, None
        m = min(self.num_nodes_to_select, len(valid) - f)
        contents = [message.content for message in valid]
        whose = {
            id(content): message
            for content, message in zip(contents, valid, strict=True)
        }
        chosen = [whose[id(content)] for content in select_multikrum(contents, f, m)]
        mean = FedAvg.aggregate_train(self, server_round, chosen)
        return mean  # type: ignore[no-any-return]


WHO_QUERY = "query.pflcore"  # the message that asks a node which client it is


def client_of_reply(reply: Message) -> Hashable | None:
    """The client that a node says it is; None where its answer names none."""
    try:
        client = reply.content["config"]["client"]
    except (LookupError, TypeError, ValueError):  # an error has no content
        return None
    named = isinstance(client, str | int) and not isinstance(client, bool)
    return client if named else None


class PflStrategy(FilteredFedAvg):
    """`pflcore.Server` as Flower's strategy: any algorithm, each client its own
    download, with `client_app` on the other side.

    `server`: the `pflcore.Server`; its model and start are those of the clients'
    `pflcore.Client`. `flower`: FedAvg's own arguments; it waits for as many nodes as
    the server has clients where `min_available_nodes` says nothing else. Who trains is
    drawn by the server's seed, as a simulation draws it, so a run gives the models of
    `pflcore.Simulation`. A node that does not answer, or whose answer cannot be used,
    was absent from the round. Of nodes that say they are one client, the one that was
    known first is heard while it is connected. ValueError in one sentence where three
    rounds in a row come to nothing: all nodes fail, or a client that must take part is
    not there.
    """

    def __init__(self, server: Server, **flower: Any) -> None:
        least = {
            "min_train_nodes": 1,
            "min_evaluate_nodes": 1,
            "min_available_nodes": server.num_clients,
        }
        super().__init__(**least | flower)
        self.server = server
        # who each node says it is, in the order heard
        self.clients: dict[int, Hashable] = {}
        self._duplicate_nodes: set[int] = set()  # nodes whose client another node is
        self._skipped_rounds = 0  # rounds in a row that came to nothing
        # how long for an answer, where `start` says it
        self._timeout_options: dict[str, float] = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        **options: Any,
    ) -> Result:
        """Flower's, for the rounds of the server that are left, or `num_rounds` of
        them; the start is the model's own."""
        require(
            not initial_arrays,
            "initial_arrays",
            "None, as the start is the model's own",
            "some",
        )
        left = self.server.rounds - self.server.round
        # Flower's own
        self._timeout_options = {"timeout": options.get("timeout", 3600)}
        return super().start(
            grid, ArrayRecord(), left if num_rounds is None else num_rounds, **options
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """The server's round; there is no one model to be given."""
        valid, failed = self._check_and_log_replies(
            replies, is_train=True, validate=False
        )
        if not valid and failed:
            reason = failed[0].error.reason
            self._skip_round(
                f"all {len(failed)} clients failed, the first one by "
                f"{reason.rstrip('.')}."
            )
        uploads: dict[Any, Any] = {}
        for message in valid:
            client = self.clients[message.metadata.src_node_id]
            metrics: Any = next(iter(message.content.metric_records.values()), {})
            upload = decode_tensors(message.content), metrics.get(self.weighted_by_key)
            uploads.setdefault(client, upload)
        if not uploads:
            return None, None
        self._skipped_rounds = 0
        outcome = self.server.aggregate(uploads, strict=False)
        if outcome.void or outcome.dropped:
            said = "round %d: not finite or of no use, so absent: clients %s%s"
            void = (
                f"; void: {outcome.void_reason or 'nobody is left'}"
                if outcome.void
                else ""
            )
            log(WARNING, said, server_round, outcome.dropped, void)
        taken = [
            m for m in valid if self.clients[m.metadata.src_node_id] in outcome.ids
        ]
        taken = usable_replies(taken, self.weighted_by_key, models=False)
        contents = [m.content for m in taken]
        return None, self.train_metrics_aggr_fn(
            contents, self.weighted_by_key
        ) if taken else None

    # inside -----------------------------------------------------------------
    def _messages(
        self,
        kind: str,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """A message for each client of this round's cohort, or for each that is
        evaluated."""
        train = kind == "train"
        alg = self.server.algorithm
        fraction = self.fraction_train if train else self.fraction_evaluate
        if not fraction:
            return []
        here = self._connected_nodes(grid)
        among = torch.tensor(sorted(here), dtype=torch.long)
        n = len(here)
        absent = set(alg.traits.required_clients) - set(here)
        if train and not here:
            self._skip_round(
                "no node says which client it is; their ClientApp must be a client_app."
            )
        elif train and absent:
            name = type(alg).__name__
            self._skip_round(
                f"{name} needs a node for client number {min(absent)} in every round."
            )
        if not here or (train and absent):
            return []
        if train:
            part = max(fraction, min(1.0, self.min_train_nodes / n))
            # all that is asked of a context
            seed: Any = SimpleNamespace(seed=self.server.seed)
            ids = sample_cohort(
                RunConfig(alg, seed), self.server.round + 1, part, among
            )
        else:
            count = max(int(fraction * n), min(self.min_evaluate_nodes, n))
            ids = among[
                draw_without_replacement(
                    n, count, self.server.seed, server_round, "evaluated"
                )
                .sort()
                .values
            ]
        config["server-round"], messages = server_round, []
        purpose: Any = "train" if train else "evaluation"
        for node in [here[i] for i in ids.tolist()]:
            record = record_of(self.server.download(self.clients[node], purpose))
            content = RecordDict(
                {self.arrayrecord_key: record, self.configrecord_key: config}
            )
            messages.append(Message(content, node, kind))
        return messages

    configure_train = partialmethod(_messages, "train")
    configure_evaluate = partialmethod(_messages, "evaluate")

    def _skip_round(self, reason: str) -> None:
        """Logs why a round comes to nothing; ValueError where it is the third in a
        row."""
        self._skipped_rounds += 1
        if self._skipped_rounds >= MAX_VOID_ROUNDS:
            raise ValueError(
                f"{self._skipped_rounds} rounds in a row came to nothing: {reason}"
            )
        log(WARNING, "the round is skipped: %s", reason)

    def _connected_nodes(self, grid: Grid) -> dict[int, int]:
        """The nodes that are connected, by their clients' numbers; new ones are asked
        which client they are."""
        nodes = sample_nodes(grid, self.min_available_nodes, 0)[1]
        asked = [
            Message(RecordDict(), node, WHO_QUERY)
            for node in nodes
            if node not in self.clients
        ]
        replies = grid.send_and_receive(asked, **self._timeout_options) if asked else ()
        mute = dict[int, str]()
        # of equals whom the grid names first
        order = {node: i for i, node in enumerate(nodes)}
        for reply in sorted(
            replies, key=lambda m: order.get(m.metadata.src_node_id, 0)
        ):
            node = reply.metadata.src_node_id
            client = client_of_reply(reply)
            if client is None:
                mute[node] = (
                    reply.error.reason if reply.has_error() else "another answer"
                )
            else:
                self.clients[node] = client
        if mute:
            said = (
                "nodes %s do not say which client they are, as a client_app does; "
                "absent (%s)"
            )
            log(WARNING, said, [*mute], next(iter(mute.values())))
        return self._nodes_by_client(nodes)

    def _nodes_by_client(self, nodes: Iterable[int]) -> dict[int, int]:
        """The nodes by their clients' numbers: of each client the first node that is
        there."""
        holders: dict[Hashable, int] = {}
        for node in (n for n in self.clients if n in {*nodes}):
            client = self.clients[node]
            holder = holders.setdefault(client, node)
            if holder != node and node not in self._duplicate_nodes:
                said = (
                    "node %s says it is client %r, as node %s does, which was "
                    "first; left out"
                )
                log(WARNING, said, node, client, holder)
                self._duplicate_nodes.add(node)
        here = {}
        for client in sorted(holders, key=lambda client: str(client).zfill(20)):
            try:
                here[self.server.join(client)] = holders[client]
            except ValueError as error:  # no newcomer in a round that has begun
                log(WARNING, "%s", error)
        return here
