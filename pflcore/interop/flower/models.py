"""A strategy for ClientApps as they are: each client is sent its own model, by a method that needs
nothing of a client but its model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from pflcore.algorithms.feddwa import FedDWA
from pflcore.interop.flower.records import only_record, usable
from pflcore.interop.mixing import method_of, personalize


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
