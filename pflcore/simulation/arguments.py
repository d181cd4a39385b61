"""What a run is given, checked: each mistake is one sentence that names the argument."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from pflcore.algorithms.base import FedAvg, State, Tensors
from pflcore.ops import kinds
from pflcore.simulation.rows import OnDisk, cloned
from pflcore.train.net import Net

WORKERS = 1024  # threads; beyond that a number is a slip of the keyboard
SEEDS = 2**63  # what generators are keyed by


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as a Python integer from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if isinstance(value, bool) or number is None or number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: expected a whole number, {limits}, got {value!r}.")
    return int(number)


def limit(name: str, value: Any) -> float | None:
    """`value` as a number above 0, or None."""
    if value is not None and not kinds.POSITIVE.fits(value):
        raise ValueError(f"{name}: expected a finite number above 0, or None for no limit, got {value!r}.")
    return None if value is None else float(value)


def device_of(name: Any) -> str:
    """The name of a device that is there."""
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu' or 'cuda', got {name!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: got {name!r}, but torch {torch.__version__} sees no GPU here; use device='cpu'.")
    return str(name)


def ids_of(name: str, given: Tensor | Sequence[int] | None, n: int) -> Tensor | None:
    """Ids of distinct clients, ascending, as int64; None as it is."""
    if given is None:
        return None
    try:
        ids = torch.as_tensor(sorted(given) if isinstance(given, Set) else given)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex() or ids.dim() != 1 or not len(ids):
        raise ValueError(f"{name}: expected ids of clients from 0 to {n - 1}, at least one, got {given!r}.")
    ids = ids.long().cpu().sort().values
    if int(ids[0]) < 0 or int(ids[-1]) >= n:
        raise ValueError(f"{name}: expected ids of clients from 0 to {n - 1}, got {int(ids[0] if ids[0] < 0 else ids[-1])}.")
    if len(ids.unique()) < len(ids):
        raise ValueError(f"{name}: expected each client once, got {int(ids[1:][ids[1:] == ids[:-1]][0])} more than once.")
    return ids


def check_start(start: Any, algorithm: FedAvg, net: Net, n: int) -> None:
    """Whether a state is one of this algorithm, federation and model."""
    if not isinstance(start, State):
        raise TypeError(f"warm_start: expected a State (a history's or a simulation's), got {type(start).__name__}.")
    g, fresh = algorithm.init(net, n)
    want = {**_shapes("server", g), **_shapes("client", fresh), "buffers": (n, *net.b0.shape)}
    have = {**_shapes("server", start.g), **_shapes("client", start.own, 1), "buffers": tuple(start.buffers.shape)}
    rows = {len(v) for v in (*start.own.values(), start.buffers)}
    name = type(algorithm).__name__
    missing = sorted(set(want) - set(have))
    foreign = sorted(k for k in set(have) - set(want) if k.startswith("client"))
    if missing or foreign:
        raise ValueError(f"warm_start: expected a state of {name}, got one {_words(missing, foreign)}; start from a run of {name}.")
    if rows != {n}:
        raise ValueError(f"warm_start: expected a state of {n} clients, got one of {max(rows - {n})}; start from a run on this federation.")
    for key, shape in want.items():
        got = have[key]
        grown = key.startswith("server") and len(got) == len(shape) > 0 and got[1:] == shape[1:]  # rows that a run adds to
        if got != shape and not (grown and shape[0] not in (n, net.size)):
            raise ValueError(f"warm_start: expected {key} of shape {list(shape)}, got {list(got)}; start from a run of this model.")
    odd = next((k for k, v in start.g.items() if k in g and v.dtype is not g[k].dtype), None)
    if odd is not None:
        raise ValueError(f"warm_start: expected {odd} in {g[odd].dtype}, got {start.g[odd].dtype}; start from a run of this model.")


def _shapes(whose: str, tensors: Tensors | Mapping[str, Tensor], skip: int = 0) -> dict[str, tuple[int, ...]]:
    return {f"{whose}'s {k}": tuple(v.shape[skip:]) for k, v in tensors.items()}


def _words(missing: Sequence[str], foreign: Sequence[str]) -> str:
    said = [f"without the {', '.join(missing)}"] if missing else []
    return " and ".join([*said, *([f"with the {', '.join(foreign)}"] if foreign else [])])


def copied(state: State) -> State:
    """The state with tensors of its own."""
    g = {k: cloned(v) for k, v in state.g.items()}
    own = state.own.clone() if isinstance(state.own, OnDisk) else {k: v.clone() for k, v in state.own.items()}
    return State(g, own, state.buffers.clone(), state.round, state.void, state.joined.clone())
