"""A strategy that is the server's half of any algorithm; its clients are `client_app`s."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from logging import WARNING
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.supercore import log

from pflcore.check import Buffers
from pflcore.interop.flower.records import record_of
from pflcore.interop.server import Server
from pflcore.simulation.round import Setup, sample
from pflcore.train.random import drawn

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
