"""Moves small tensors between devices without waiting for a GPU."""

import torch
from torch import Tensor


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """The tensor `t` [...] on `device`, itself where it is there already.

    It is meant for small tensors, such as a cohort's ids. To a GPU they go through
    pinned memory, so that the caller does not wait for the copy.
    """
    if t.device == device:
        return t
    if device.type != "cuda" or t.device.type != "cpu":
        return t.to(device)
    # Pinning starts CUDA on the current card. Without this block it would be the first
    # card, which may belong to another process.
    with torch.cuda.device(device):
        return t.pin_memory().to(device, non_blocking=True)
