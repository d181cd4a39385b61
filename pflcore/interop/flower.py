"""Personalized federated learning in Flower (Message API, flwr 1.41 and later).

It needs the extra `flower`.

- `client_app` and `PflStrategy` run any algorithm, `client_app` at the clients and
  `PflStrategy` at the server.
- `PersonalStrategy` sends each client its own model, by a method that needs only the
  clients' models. Any ClientApp works with it unchanged.
- `keep_private` is a mod that keeps some tensors with their client.

A node is a process of Flower's, known by its id. A client is the holder of the data on
a node, known by the id that `client_app` sends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import nullcontext
from functools import partialmethod
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

try:
    import flwr as _  # noqa: F401
except ImportError:
    from pflcore.check import pip_install

    raise ImportError(
        f"pflcore.interop.flower needs Flower; {pip_install('flwr')}."
    ) from None

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.supercore import log
from torch import Tensor

from pflcore._cohort import cohort_size
from pflcore.check import require
from pflcore.interop._flower_client import client_app, keep_private
from pflcore.interop._flower_messages import (
    decode_tensors,
    record_of,
    sender_of,
)
from pflcore.interop._flower_personal import (
    Aggregated,
    FilteredFedAvg,
    PersonalStrategy,
)
from pflcore.interop._server import Server
from pflcore.interop._sides import read_state, write_state
from pflcore.simulation._files import lock_folder
from pflcore.simulation._loop import MAX_VOID_ROUNDS
from pflcore.simulation._sampling import draw_uniformly, with_required
from pflcore.simulation._uploads import RoundOutcome
from pflcore.simulation.checkpoint import Checkpoint

__all__ = [
    "PersonalStrategy",
    "PflStrategy",
    "client_app",
    "keep_private",
]

WHO_QUERY = "query.pflcore"  # the message that asks a node for its client's id


def client_of_reply(reply: Message) -> Hashable | None:
    """The id of the client in a node's answer, or None."""
    try:
        client = reply.content["config"]["client"]
    except (LookupError, TypeError, ValueError):  # a reply of an error has no content
        return None
    is_name = isinstance(client, str | int) and not isinstance(client, bool)
    return client if is_name else None


class PflStrategy(FilteredFedAvg):
    """`pflcore.Server` as Flower's strategy, with `client_app` on the other side.

    It runs any algorithm, and each client has its own download. The clients that train
    are drawn by the server's seed, as in a simulation. So a run gives the models of
    `pflcore.Simulation`.

    - A node that does not answer, or sends an answer that cannot be used, is absent
      from the round.
    - Where several nodes send the id of one client, the node that was known first takes
      part while it is connected.
    - Raises ValueError where three rounds in a row are void, because all nodes fail or
      a required client is absent.
    - With `checkpoint`, a new strategy goes on where a killed one has ended, to the
      same models. Raises ValueError where the folder holds the checkpoint of another
      algorithm, model or option. A checkpoint that cannot be written ends no run: after
      each such round Flower's log warns, with the folder and the reason.

    Args:
        server: The server, with the model and the seed of the clients'
            `pflcore.Client`.
        checkpoint: The folder that the server's state is written into after each round,
            and taken up from if it holds one. Where the algorithm keeps state at the
            clients, give `client_app` a `checkpoint`, too. By default nothing is
            written.
        flower: The arguments of Flower's FedAvg. By default `min_available_nodes` is
            the server's number of clients, so the strategy waits for all of them.
    """

    def __init__(
        self, server: Server, checkpoint: str | Path | None = None, **flower: Any
    ) -> None:
        least = {
            "min_train_nodes": 1,
            "min_evaluate_nodes": 1,
            "min_available_nodes": server.num_clients,
        }
        super().__init__(**least | flower)
        self.server = server
        # The client's id of each node, in the order of the answers.
        self.clients: dict[int, Hashable] = {}
        # Nodes whose client was known from another node before.
        self._duplicate_nodes: set[int] = set()
        self._has_asked = False  # True where clients were asked to train in the round
        # The rounds that Flower counted before it began anew, with a restored server.
        self._earlier_rounds = 0
        # The argument `timeout` of Flower's calls, set by `start`.
        self._timeout_options: dict[str, float] = {}
        self._checkpoint = None if checkpoint is None else Checkpoint(checkpoint)
        if self._checkpoint is not None and self._checkpoint.exists:
            self._restore(self._checkpoint.folder)

    def _restore(self, folder: str | Path) -> None:
        """Takes up the checkpoint in `folder`."""
        state = read_state(folder)
        flower: Any = state.get("flower")
        wanted = "the checkpoint of a PflStrategy"
        require(isinstance(flower, dict), "checkpoint", wanted, folder)
        self.server.load_state_dict(state)
        self.clients = {node: client for node, client in flower["nodes"]}
        self._earlier_rounds = flower["round"]
        text = "checkpoint: %s holds round %d; the run goes on after it"
        log(INFO, text, folder, self.server.round)

    def _save(self, server_round: int) -> None:
        """Writes the checkpoint after a round, where there is a folder for it.

        It must be written before a message tells clients that the round is over,
        because they then give up the state from before the round.
        """
        if self._checkpoint is None:
            return
        flower = {
            "nodes": [*self.clients.items()],
            "round": self._earlier_rounds + server_round,
        }
        try:
            state = {**self.server._live_state(), "flower": flower}
            write_state(self._checkpoint.folder, state)
        except OSError as error:
            log(WARNING, "%s The run goes on.", error)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        **options: Any,
    ) -> Result:
        """The result of Flower's `start`, with the model of the server.

        With a restored server the rounds of the result continue those before. Where no
        round is left, the models are only evaluated.

        Args:
            grid: Flower's grid of nodes.
            initial_arrays: None, because the server has the first model.
            num_rounds: The number of rounds; by default all that the server has left.
            options: Further arguments of Flower's `start`.
        """
        wanted = "None, as the start is the model's own"
        require(not initial_arrays, "initial_arrays", wanted, "some")
        if num_rounds is None:
            num_rounds = self.server.rounds - self.server.round
        default_timeout = 3600  # Flower's own
        self._timeout_options = {"timeout": options.get("timeout", default_timeout)}
        in_folder: Any = nullcontext()
        if self._checkpoint is not None:
            in_folder = lock_folder(self._checkpoint.folder, "checkpoint")
        with in_folder:
            result = super().start(grid, ArrayRecord(), num_rounds, **options)
            if num_rounds == 0 and self._earlier_rounds:
                config = options.get("evaluate_config") or ConfigRecord()
                self._evaluate_again(grid, config, result)
        return self._continued(result)

    def _evaluate_again(self, grid: Grid, config: ConfigRecord, result: Result) -> None:
        """Evaluates the models of the last round, whose evaluation may have ended."""
        messages = self.configure_evaluate(0, ArrayRecord(), config, grid)
        replies = grid.send_and_receive(messages, **self._timeout_options)
        metrics = self.aggregate_evaluate(0, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[0] = metrics

    def _continued(self, result: Result) -> Result:
        """The result, with rounds that continue those before a restart."""
        earlier = self._earlier_rounds
        for name, value in vars(result).items():
            if earlier and isinstance(value, dict):
                later = {round + earlier: metrics for round, metrics in value.items()}
                setattr(result, name, later)
        return result

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """Plays the server's round, saves it, and returns the mean metrics.

        There is no single model that it could return.
        """
        metrics = self._play_round(server_round, replies)
        self._save(server_round)
        return None, metrics

    def _play_round(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Plays the server's round, and returns the mean metrics."""
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
            client = self.clients[sender_of(reply)]
            counts: Any = next(iter(reply.content.metric_records.values()), {})
            num_samples = counts.get(self.weighted_by_key)
            uploads.setdefault(client, (decode_tensors(reply.content), num_samples))
        if not uploads:
            if self._has_asked and not failed:
                self._skip_round("no client answered.")
            return None
        outcome = self.server.aggregate(uploads, strict=False)
        self._log_outcome(server_round, outcome)
        if outcome.void:
            self._log_void_round(outcome.void_reason or "nobody is left.")
            return None
        accepted = [r for r in valid if self.clients[sender_of(r)] in outcome.ids]
        contents = self._contents(accepted, is_train=True)
        if not contents:
            return None
        return self.train_metrics_aggr_fn(contents, self.weighted_by_key)  # type: ignore[no-any-return]

    def _log_outcome(self, server_round: int, outcome: RoundOutcome) -> None:
        """Logs the dropped clients, and the reason for a void round."""
        if not outcome.void and not outcome.dropped:
            return
        void = ""
        if outcome.void:
            void = f"; void: {outcome.void_reason or 'nobody is left'}"
        text = "round %d: not finite or of no use, so absent: clients %s%s"
        log(WARNING, text, server_round, outcome.dropped, void)

    def _messages(
        self,
        kind: str,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """The messages of a round, one for each client that takes part.

        Args:
            kind: "train" or "evaluate".
        """
        is_training = kind == "train"
        self._has_asked &= not is_training
        fraction = self.fraction_train if is_training else self.fraction_evaluate
        if not fraction:
            return []
        node_of = self._connected_nodes(grid)
        if is_training and not self._can_train(node_of):
            return []
        if not node_of:
            return []
        available = torch.tensor(sorted(node_of), dtype=torch.long)
        server_round += self._earlier_rounds
        if is_training:
            ids = self._train_cohort(available)
        else:
            ids = self._evaluation_cohort(available, server_round)
        config["server-round"] = server_round
        nodes = [node_of[number] for number in ids.tolist()]
        if is_training:
            self._has_asked = bool(nodes)
        return [self._message(kind, node, config) for node in nodes]

    def _message(self, kind: str, node: int, config: ConfigRecord) -> Message:
        """The message for one node, with its client's download."""
        purpose: Any = "train" if kind == "train" else "evaluation"
        record = record_of(self.server.download(self.clients[node], purpose))
        content = RecordDict(
            {self.arrayrecord_key: record, self.configrecord_key: config}
        )
        return Message(content, node, kind)

    def _can_train(self, node_of: Mapping[int, int]) -> bool:
        """True where the connected nodes suffice; otherwise the round is void.

        Args:
            node_of: The node of each connected client, by the client's number.
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
        """The numbers of the clients that train, drawn as in a simulation."""
        least = min(1.0, self.min_train_nodes / len(available))
        participation = max(self.fraction_train, least)
        count = cohort_size(participation, len(available))
        key = (self.server.seed, self.server.round + 1, "cohort")
        drawn = draw_uniformly(available, count, *key)
        required = self.server.algorithm.traits.required_clients
        return with_required(drawn, required, available, count)

    def _evaluation_cohort(self, available: Tensor, server_round: int) -> Tensor:
        """The numbers of the clients that are evaluated, ascending."""
        n = len(available)
        least = min(self.min_evaluate_nodes, n)
        count = max(int(self.fraction_evaluate * n), least)
        key = (self.server.seed, server_round, "evaluated")
        return draw_uniformly(available, count, *key).sort().values

    configure_train = partialmethod(_messages, "train")
    configure_evaluate = partialmethod(_messages, "evaluate")

    def _skip_round(self, reason: str) -> None:
        """Plays a void round of the server, as a run does that loses all clients."""
        self.server.aggregate({}, strict=False)
        self._log_void_round(reason)

    def _log_void_round(self, reason: str) -> None:
        """Logs why a round came to nothing.

        Raises ValueError where it is the third in a row.
        """
        count = self.server._state.void_rounds
        if count >= MAX_VOID_ROUNDS:
            raise ValueError(f"{count} rounds in a row came to nothing: {reason}")
        log(WARNING, "the round is void: %s", reason)

    def _connected_nodes(self, grid: Grid) -> dict[int, int]:
        """The connected node of each client, by the client's number.

        New nodes are asked for their client's id.
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
        # Where several nodes send one id, the first in the grid's order counts.
        place_of = {node: place for place, node in enumerate(nodes)}
        reason_of = dict[int, str]()  # the reason of each node that sends no id
        for reply in sorted(replies, key=lambda r: place_of.get(sender_of(r), 0)):
            node = sender_of(reply)
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
        """The node of each client, by the client's number.

        Where several nodes have one client, it is the node that was known first.
        """
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
        # New clients receive their numbers here, so the order must not depend on the
        # answers. Padded with zeros, "2" comes before "10".
        for client in sorted(node_of, key=lambda client: str(client).zfill(20)):
            try:
                by_number[self.server.join(client)] = node_of[client]
            except ValueError as error:  # the state cannot grow in a started round
                log(WARNING, "%s", error)
        return by_number
