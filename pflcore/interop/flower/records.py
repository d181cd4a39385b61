"""What travels in Flower: tensors as an ArrayRecord, and the one model of a message."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as Flower's arrays, which are numpy's. ValueError for what numpy has no numbers for."""
    for name, t in tensors.items():
        if t.dtype == torch.bfloat16:
            raise ValueError(f"{name!r} is bfloat16, which Flower's arrays cannot carry; train a float32 or float16 model there.")
    return ArrayRecord({k: t.detach().cpu() for k, t in tensors.items()})


def only_record(message: Message, whose: str) -> tuple[str, ArrayRecord]:
    """The key and the record of the one model in a message. ValueError where there are several, or none."""
    records = dict(message.content.array_records)
    if len(records) != 1:
        raise ValueError(f"{whose}: expected one ArrayRecord, the model, got {', '.join(map(repr, records)) or 'none'}; send one.")
    return next(iter(records.items()))
