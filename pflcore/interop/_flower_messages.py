"""Models and metrics in Flower's messages, and the replies that fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore import log
from torch import Tensor

from pflcore.algorithms._protocol import Tensors
from pflcore.check import require
from pflcore.interop._message import MAX_SAMPLES


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """A Flower record of tensors.

    Flower's arrays are those of numpy, so this raises ValueError for bfloat16.
    """
    for name, tensor in tensors.items():
        fits = tensor.dtype != torch.bfloat16
        require(fits, name, "float32 or float16, which Flower carries", tensor)
    return ArrayRecord({name: t.detach().cpu() for name, t in tensors.items()})


def decode_tensors(content: RecordDict) -> Tensors | None:
    """The tensors of the only ArrayRecord in a message.

    None where there is no single record, or its bytes are no tensors.
    """
    records = [*content.array_records.values()]
    if len(records) != 1:
        return None
    try:
        return dict(records[0].to_torch_state_dict())
    except Exception:  # the bytes of another program raise errors of many kinds
        return None


Layout = dict[str, tuple[torch.Size, torch.dtype]]


def layout_of(tensors: Tensors) -> Layout:
    """The shape and the dtype of each tensor."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def has_model(content: RecordDict, layout: Layout) -> bool:
    """True where a message has one model of this layout, with possible numbers.

    Possible numbers are finite, and no variance among them is negative.
    """
    tensors = decode_tensors(content)
    if not tensors or layout_of(tensors) != layout:
        return False
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            return False
        if name.rpartition(".")[2] == "running_var" and (tensor < 0).any():
            return False
    return True


def has_samples(content: RecordDict, weight: str) -> bool:
    """True where the metric `weight` of a message's metrics is a number of samples."""
    records = [*content.metric_records.values()]
    num_samples: Any = records[0].get(weight) if len(records) == 1 else None
    return isinstance(num_samples, int | float) and 0 < num_samples <= MAX_SAMPLES


def usable_replies(
    replies: Iterable[Message], weight: str, layout: Layout | None = None
) -> list[Message]:
    """The replies that count; the others are logged, and left out.

    They have a number of samples and, with `layout`, a model of that layout. They are
    in the order of the nodes, so that no bit depends on the node that answered first.
    Replies without content, which report an error, are part of the result.

    Args:
        replies: The replies of a round.
        weight: The name of the metric with the number of samples.
        layout: The layout of the models; None where no model is expected.
    """
    usable = []
    odd = []
    for reply in sorted(replies, key=sender_of):
        content = reply.content if reply.has_content() else None
        fits = content is None or has_samples(content, weight)
        if fits and content is not None and layout is not None:
            fits = has_model(content, layout)
        if fits:
            usable.append(reply)
        else:
            odd.append(sender_of(reply))
    if odd:
        model = "" if layout is None else "a finite model as the server's, and "
        text = "nodes %s: expected %s%r in their metrics; absent"
        log(WARNING, text, odd, model, weight)
    return usable


def mean_metrics(contents: Iterable[RecordDict], weight: str) -> MetricRecord:
    """The mean of each metric over the contents that have it, as Flower weights them.

    A metric that is a number in one content and a list in another is left out.
    """
    values_of: dict[str, list[tuple[Any, float]]] = {}
    for content in contents:
        metrics = next(iter(content.metric_records.values()))
        for name, value in metrics.items():
            if name != weight:
                pairs = values_of.setdefault(name, [])
                pairs.append((np.asarray(value), metrics[weight]))
    means = MetricRecord()
    for name, pairs in values_of.items():
        if len({value.shape for value, _ in pairs}) == 1:
            total = sum(num_samples for _, num_samples in pairs)
            parts = [value * (num_samples / total) for value, num_samples in pairs]
            means[name] = np.sum(parts, 0).tolist()
    return means


def sender_of(reply: Message) -> int:
    """The id of the node that sent a reply."""
    node: int = reply.metadata.src_node_id
    return node


def only_record(message: Message, name: str) -> tuple[str, ArrayRecord]:
    """The key and the record of the only model in a message.

    Raises ValueError, which begins with `name`, where there is no single record.
    """
    records = dict(message.content.array_records)
    require(len(records) == 1, name, "one ArrayRecord, the model", list(records))
    return next(iter(records.items()))
