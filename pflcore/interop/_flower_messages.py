"""Models and metrics in Flower's messages, and the replies that fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict
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


def model_layout(content: RecordDict) -> tuple[Any, bool]:
    """A message's layout, and True if its model has possible numbers.

    The layout has names, shapes and dtypes; it is None where there is no single model.
    Possible numbers are finite, and no variance among them is negative.
    """
    tensors = decode_tensors(content)
    if not tensors:
        return None, False
    is_possible = all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] == "running_var" and bool((tensor < 0).any()):
            is_possible = False
    layout = {key: (value.shape, value.dtype) for key, value in tensors.items()}
    return ([*content.array_records], layout), is_possible


def metrics_layout(content: RecordDict, weight: str) -> Any:
    """The names of a reply's metrics, with the lengths of lists.

    None where there is no single record of metrics, or the metric `weight` is no number
    of samples.
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
    """The positions of the layouts that equal `expected_layout`.

    Where no layout equals it, the most frequent one is expected. None in `layouts`
    stands for an item without a layout, which never matches.
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
    """The replies with the most frequent layout; others are left out.

    A usable reply has one model with the tensors of most models, and metrics with the
    names of most metrics. Other replies are logged. The result is in the order of the
    nodes, so that no bit depends on the node that answered first. Replies without
    content, which report an error, are part of the result.

    Args:
        replies: The replies of a round.
        weight: The name of the metric with the number of samples.
        expected_layout: The layout of the models, if any reply has it.
        models: False means that a reply needs metrics only.
        finite: False also accepts models that are not finite.
    """
    replies = sorted(replies, key=sender_of)
    answers = [reply for reply in replies if reply.has_content()]
    usable = answers
    if models:
        layouts = []
        for answer in answers:
            layout, is_possible = model_layout(answer.content)
            if finite and not is_possible:
                layout = None
            layouts.append(layout)
        places = matching_positions(layouts, expected_layout)
        usable = [answers[place] for place in places]
    layouts = [metrics_layout(answer.content, weight) for answer in usable]
    usable_nodes = {sender_of(usable[place]) for place in matching_positions(layouts)}
    odd = [sender_of(a) for a in answers if sender_of(a) not in usable_nodes]
    if odd:
        wanted = "metrics of the others' names"
        if models:
            wanted = "finite models of the others' tensors"
        text = "nodes %s: no %s with %r in their replies; absent"
        log(WARNING, text, odd, wanted, weight)
    return [reply for reply in replies if sender_of(reply) not in odd]


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
