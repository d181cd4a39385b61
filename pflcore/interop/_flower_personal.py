"""Flower strategies that need nothing of a client but its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, MultiKrum, Result
from flwr.supercore import log
from torch import Tensor

from pflcore import ops, robust
from pflcore.algorithms._feddwa import FedDWA
from pflcore.algorithms._pfedgraph import PFedGraph
from pflcore.interop._flower_messages import (
    matching_positions,
    model_layout,
    sender_of,
    usable_replies,
)
from pflcore.interop._flower_sending import OneByOneGrid, OneTimeMessages
from pflcore.interop._packing import (
    ModelTemplate,
    Shapes,
    mix_statistics,
    pack,
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
    """Flower's FedAvg, with an evaluation that leaves out replies of another layout."""

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean of the metrics of the usable replies, as in FedAvg."""
        replies = usable_replies(replies, self.weighted_by_key, models=False)
        return super().aggregate_evaluate(server_round, replies)  # type: ignore[no-any-return]


class PersonalStrategy(FilteredFedAvg):
    """Flower's `FedAvg` that sends each client its own model.

    `pflcore.personalize` makes the models of the clients that have trained. A client
    that has not trained yet receives the mean of the round. It works with any ClientApp
    that FedAvg works with. Raises ValueError for models that differ in their tensors.

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
        # The layout of the models: that of the model that was sent, or of most uploads.
        self._expected_layout: Any = None
        self._has_advised = False

    def start(self, grid: Grid, *args: Any, **options: Any) -> Result:
        """The result of Flower's `start`, with the same arguments.

        A node's message is built when it is sent.
        """
        return super().start(OneByOneGrid(grid), *args, **options)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """Makes the clients' next models, and returns the mean as FedAvg does."""
        replies = usable_replies(replies, self.weighted_by_key, self._expected_layout)
        contents = {
            sender_of(reply): reply.content for reply in replies if reply.has_content()
        }
        if contents:
            self._personalize(contents)
        return super().aggregate_train(server_round, replies)  # type: ignore[no-any-return]

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
        layout, _ = model_layout(next(iter(contents.values())))
        if layout != self._expected_layout:
            self._expected_layout = layout
            self._last = {}  # uploads of another layout cannot be compared
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
        """The messages of FedAvg, each with the model of its node.

        Each is built when it is read.
        """
        key = self.arrayrecord_key
        self._expected_layout = self._expected_layout or model_layout(record)[0]
        if self._compares_updates and self._base is None:
            self._base = record[key]

        def message_of(node: int) -> Message:
            model = self.models[node] if node in self.models else record[key]
            content = RecordDict({**record, key: model})
            return Message(content, node, message_type)

        return OneTimeMessages(message_of(node) for node in node_ids)


def select_multikrum(
    contents: list[RecordDict], num_malicious_nodes: int, num_nodes_to_select: int
) -> list[RecordDict]:
    """The selected contents by exact distances, best first.

    It takes the place of Flower's `select_multikrum`, also in
    `Bulyan(selection_rule=select_multikrum)`. That function expands
    |a|^2 + |b|^2 - 2 a b in float32, with errors larger than the distances of models
    that differ by a thousandth.

    Models are compared by their floating-point tensors without running statistics. A
    content without a model of the most frequent layout is logged and left out. A model
    that is not finite is never selected. Raises ValueError unless 2 f + 2 < N for f
    malicious nodes and the N contents that are left, because Krum guarantees nothing
    there.

    Args:
        contents: The contents of the replies, each with one model.
        num_malicious_nodes: The number f of bad nodes that Krum withstands.
        num_nodes_to_select: The number of contents to select.
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
    rows[~possible_rows] = torch.nan  # Krum takes it as infinitely far from all others
    krum = robust.MultiKrum(num_malicious_nodes, num_nodes_to_select)
    chosen = krum.select(ops.pairwise_sqdist(rows)).tolist()
    return [contents[places[i]] for i in chosen if possible_rows[i]]


class ExactMultiKrum(FilteredFedAvg, MultiKrum):  # type: ignore[misc]
    """Flower's `MultiKrum` with exact distances, and with the same arguments.

    A node counts as absent if its reply has no model of the most frequent layout, or no
    number of samples. Where too few replies are left for Krum, these absent nodes count
    among the malicious ones, and fewer replies are selected. Where still too few are
    left, the round is skipped with a line in the log.
    """

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> Aggregated:
        """The mean of the selected replies, and of their metrics."""
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
