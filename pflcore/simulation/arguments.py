"""What a run is given beside its options, checked: each mistake is one sentence."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from pflcore.algorithms.protocol import Algorithm
from pflcore.simulation.round import State, begin, flat
from pflcore.train import Net


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


def check_start(start: State, alg: Algorithm, net: Net, n: int, what: str = "warm_start") -> None:
    """ValueError where a state is not one of this algorithm, federation and model."""
    name, have = type(alg).__name__, flat(start)
    begun = begin(alg, net, n, clients=bool(start.clients))
    want = flat(begun)
    missing, foreign = (
        [_words(k) for k in sorted(a - b)]
        for a, b in ((want.keys(), have.keys()), (have.keys(), want.keys()))
    )
    if missing or any("client" in k for k in foreign):
        said = [f"without the {', '.join(missing)}"] if missing else []
        said += [f"with the {', '.join(foreign)}"] if foreign else []
        raise ValueError(
            f"{what}: expected a state of {name}, got one {' and '.join(said)}; start from a run "
            f"of {name}."
        )
    if len(start.seen) != n:
        raise ValueError(
            f"{what}: expected a state of {n} clients, got one of {len(start.seen)}; start from a "
            "run on this federation."
        )
    for key, like in want.items():
        shape, got = list(like.shape), list(have[key].shape)
        grown = key.startswith("server") and len(got) == len(shape) > 0 and got[1:] == shape[1:]
        if got != shape and not (grown and shape[0] not in (n, net.size)):  # rows that a run adds
            raise ValueError(
                f"{what}: expected {_words(key)} of shape {shape}, got {got}; start from a run of "
                "this model."
            )
        if have[key].dtype != like.dtype:
            raise ValueError(
                f"{what}: expected {_words(key)} in {like.dtype}, got {have[key].dtype}; start from "
                "a run of this model."
            )


def _words(key: str) -> str:
    part, _, name = key.partition(".")
    return f"{part.removesuffix('s')}'s {name}" if name else key
