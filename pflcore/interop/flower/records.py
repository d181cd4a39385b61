"""What travels in Flower: tensors as an ArrayRecord, and the one model of a message."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING

import torch
from flwr.app import ArrayRecord, Message
from flwr.supercore import log
from torch import Tensor


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as Flower's arrays, which are numpy's. ValueError for what numpy has no numbers
    for."""
    for name, t in tensors.items():
        if t.dtype == torch.bfloat16:
            raise ValueError(
                f"{name!r} is bfloat16, which Flower's arrays cannot carry; train a float32 or "
                "float16 model there."
            )
    return ArrayRecord({k: t.detach().cpu() for k, t in tensors.items()})


def usable(replies: list[Message], weight: str) -> list[Message]:
    """The replies without those that do not hold one finite model of the tensors that most of them
    have, with its `weight`: these are logged, and were absent."""
    forms: dict[int, object] = {}
    for i, message in enumerate(replies):
        if message.has_content():
            records, numbers = (
                dict(message.content.array_records),
                [m.get(weight) for m in message.content.metric_records.values()],
            )
            arrays = {k: (tuple(a.shape), a.dtype) for r in records.values() for k, a in r.items()}
            one = (
                len(records) == 1
                and len(numbers) == 1
                and isinstance(numbers[0], int | float)
                and numbers[0] > 0
            )
            finite = one and all(
                bool(t.isfinite().all())
                for r in records.values()
                for t in r.to_torch_state_dict().values()
            )
            forms[i] = arrays if finite else None
    known = [f for f in forms.values() if f is not None]
    usual = max(known, key=known.count, default=None)
    bad = [i for i, form in forms.items() if form != usual or form is None]
    for i in bad:
        log(
            WARNING,
            "node %d: its reply is no finite model of the others' tensors with %r; it was absent",
            replies[i].metadata.src_node_id,
            weight,
        )
    return [m for i, m in enumerate(replies) if i not in bad]


def only_record(message: Message, whose: str) -> tuple[str, ArrayRecord]:
    """The key and the record of the one model in a message. ValueError where there are several, or
    none."""
    records = dict(message.content.array_records)
    if len(records) != 1:
        raise ValueError(
            f"{whose}: expected one ArrayRecord, the model, got "
            f"{', '.join(map(repr, records)) or 'none'}; send one."
        )
    return next(iter(records.items()))
