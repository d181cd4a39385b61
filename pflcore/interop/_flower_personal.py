"""Flower strategies that need nothing of a client but its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from flwr.supercore import log
from torch import Tensor

from pflcore.algorithms._feddwa import FedDWA
from pflcore.algorithms._pfedgraph import PFedGraph
from pflcore.interop._flower_messages import (
    Layout,
    decode_tensors,
    layout_of,
    mean_metrics,
    sender_of,
    usable_replies,
)
from pflcore.interop._packing import (
    ModelTemplate,
    Shapes,
    mix_statistics,
    split_row,
)
from pflcore.interop._personalize import (
    MixedModels,
    method_of,
    min_models,
    mix_models,
)

Aggregated = tuple[ArrayRecord | None, MetricRecord | None]


class StoredModel(NamedTuple):
    """One node's personalized model as numbers, from which a record is built.

    Attributes:
        template: The node's upload without the numbers that are in the rows.
        parts: The shapes of the tensors in a row, and the row. The first part has the
            weights, and a second one has running statistics.
    """

    template: ModelTemplate
    parts: list[tuple[Shapes, Tensor]]

    def record(self) -> ArrayRecord:
        """The model as a new record of Flower."""
        pieces: dict[str, Tensor] = {}
        for shapes, row in self.parts:
            pieces |= split_row(shapes, row)
        record: ArrayRecord = self.template.like(pieces, copies=True)
        return record

    def detached(self) -> StoredModel:
        """The model without the memory of other nodes' rows."""
        parts = []
        for shapes, row in self.parts:
            has_own_memory = row.untyped_storage().nbytes() == row.nbytes
            parts.append((shapes, row if has_own_memory else row.clone()))
        return StoredModel(self.template, parts)


class PersonalModels(Mapping[int, ArrayRecord]):
    """The personalized models by node id; a record is built when it is read.

    The models lie in memory as the rows that the mix returned. A record would be a
    second copy of each.
    """

    def __init__(self) -> None:
        self._stored: dict[int, StoredModel] = {}

    def __getitem__(self, node: int) -> ArrayRecord:
        return self._stored[node].record()

    def __iter__(self) -> Iterator[int]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, node: object) -> bool:
        return node in self._stored  # that of Mapping would build the record

    def update(self, mixed: MixedModels) -> None:
        """Takes over the models of a round; those of other nodes stay."""
        form = mixed.form
        statistics = mix_statistics(form, mixed.mixing.weight, mixed.mixing.index)
        # A row is a view, so it would keep the whole matrix of an earlier round.
        for node in self._stored.keys() - set(form.ids):
            self._stored[node] = self._stored[node].detached()
        for i, node in enumerate(form.ids):
            parts = [(form.columns, mixed.rows[i])]
            if statistics is not None:
                parts.append((form.averaged, statistics[i]))
            self._stored[node] = StoredModel(form.models[i], parts)


class FilteredFedAvg(FedAvg):  # type: ignore[misc]
    """Flower's FedAvg, whose metrics may differ in their names from node to node."""

    def __init__(self, **flower: Any) -> None:
        means = {
            "train_metrics_aggr_fn": mean_metrics,
            "evaluate_metrics_aggr_fn": mean_metrics,
        }
        super().__init__(**means | flower)

    def _contents(self, replies: Iterable[Message], is_train: bool) -> list[RecordDict]:
        """The contents of replies; errors are logged."""
        replies, _ = self._check_and_log_replies(replies, is_train, validate=False)
        return [reply.content for reply in replies]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean of the metrics of the usable replies, as in FedAvg."""
        replies = usable_replies(replies, self.weighted_by_key)
        contents = self._contents(replies, is_train=False)
        if not contents:
            return None
        return self.evaluate_metrics_aggr_fn(contents, self.weighted_by_key)  # type: ignore[no-any-return]


class PersonalStrategy(FilteredFedAvg):
    """Flower's `FedAvg` that sends each client its own model.

    `pflcore.personalize` makes the models of the clients that have trained. A client
    that has not trained yet receives the mean of the round. It works with any ClientApp
    that FedAvg works with. A node whose reply has other tensors than the model that was
    sent, or numbers that are not finite, is absent from the round.

    Args:
        method: A method of `pflcore.personalize`: "fedamp", "heurfedamp", "pfedgraph",
            "sfl", "clusters", "feddwa", or an instance. FedDWA takes the models of the
            round before as its guidance, pFedGraph the first model that was sent as the
            one that all started from.
        include: Patterns of the tensors to mix, as in `pflcore.pack`; by default all.
        exclude: Patterns of the tensors that stay each client's own.
        flower: The arguments of Flower's FedAvg.
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
        self._compares_updates = isinstance(method_of(method, {}), PFedGraph)
        super().__init__(**flower)
        self.method = method
        self.chosen: dict[str, Any] = {"include": include, "exclude": exclude}
        self.models = PersonalModels()
        # The last upload of each node, by node id, where the method looks back
        self._last: dict[int, ArrayRecord] = {}
        # The first model that was sent, where the method compares updates from it
        self._base: ArrayRecord | None = None
        self._layout: Layout = {}  # that of the model that was sent
        self._has_advised = False

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """Makes the clients' next models, and returns the mean as FedAvg does."""
        weight = self.weighted_by_key
        replies = usable_replies(replies, weight, self._layout)
        contents = self._contents(replies, is_train=True)
        if not contents:
            return None, None
        answers = [reply for reply in replies if reply.has_content()]
        self._personalize({sender_of(reply): reply.content for reply in answers})
        mean = aggregate_arrayrecords(contents, weight)
        return mean, self.train_metrics_aggr_fn(contents, weight)

    def _personalize(self, contents: Mapping[int, RecordDict]) -> None:
        """Makes the nodes' next models from the uploads in their replies."""
        uploads: dict[int, Any] = {
            node: next(iter(content.array_records.values()))
            for node, content in contents.items()
        }
        least = min_models(method_of(self.method, {}))
        if len(uploads) < least:
            text = "%s needs %d models, got %d; everybody keeps the one that it has."
            log(WARNING, text, self.method, least, len(uploads))
            return
        previous = None
        if self._looks_back:
            previous = {node: self._last.get(node, uploads[node]) for node in uploads}
        mixed = mix_models(
            uploads, self.method, previous=previous, base=self._base, **self.chosen
        )
        self.models.update(mixed)
        if mixed.advice is not None and not self._has_advised:
            log(WARNING, mixed.advice)
            self._has_advised = True
        if self._looks_back:
            self._last.update(uploads)

    def _construct_messages(
        self, record: RecordDict, node_ids: list[int], message_type: str
    ) -> Iterable[Message]:
        """The messages of FedAvg, each with the model of its node."""
        key = self.arrayrecord_key
        self._layout = self._layout or layout_of(decode_tensors(record) or {})
        if self._compares_updates and self._base is None:
            self._base = record[key]

        def message_of(node: int) -> Message:
            model = self.models[node] if node in self.models else record[key]
            content = RecordDict({**record, key: model})
            return Message(content, node, message_type)

        return [message_of(node) for node in node_ids]
