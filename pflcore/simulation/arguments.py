"""What a run is given beside its options, checked: each mistake is one sentence."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor


def device_of(name: Any) -> str:
    """The name of a device that is there."""
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu' or 'cuda', got {name!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: got {name!r}, but torch {torch.__version__} sees no GPU here; use "
            "device='cpu'."
        )
    return str(name)


def ids_of(name: str, given: Tensor | Sequence[int] | None, n: int) -> Tensor | None:
    """Ids of distinct clients, ascending, as int64; None as it is."""
    if given is None:
        return None
    try:
        ids = torch.as_tensor(sorted(given) if isinstance(given, Set) else given)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if (
        ids.dtype == torch.bool
        or ids.is_floating_point()
        or ids.is_complex()
        or ids.dim() != 1
        or not len(ids)
    ):
        raise ValueError(
            f"{name}: expected ids of clients from 0 to {n - 1}, at least one, got {given!r}."
        )
    ids = ids.long().cpu().sort().values
    if int(ids[0]) < 0 or int(ids[-1]) >= n:
        odd = int(ids[0] if ids[0] < 0 else ids[-1])
        raise ValueError(f"{name}: expected ids of clients from 0 to {n - 1}, got {odd}.")
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        raise ValueError(f"{name}: expected each client once, got {int(twice[0])} more than once.")
    return ids
