"""Moves small tensors between devices without waiting for a GPU."""

import torch
from torch import Tensor


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """The tensor `t` [...] on `device`: itself where it is there, else a copy.

    For small tensors, such as a cohort's ids: to a GPU they go through pinned memory,
    so that the caller does not wait for the copy.
    """
    if t.device == device:
        return t
    if device.type != "cuda" or t.device.type != "cpu":
        return t.to(device)
    # Pinning starts CUDA on the current card, which is the first one by default.
    with torch.cuda.device(device):
        return t.pin_memory().to(device, non_blocking=True)
