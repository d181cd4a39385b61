"""The state of a server or a client, and the one file that holds it.

A state is a dict of tensors, dicts of tensors by name, and values that JSON can hold.
Its "identity" describes the side that it belongs to, so that the state of another
algorithm, model or option is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflcore.algorithms import name_of
from pflcore.algorithms._protocol import Algorithm
from pflcore.simulation import checkpoint as store
from pflcore.simulation._describe import Record, describe_net, first_difference
from pflcore.simulation._functions import describe_functions
from pflcore.simulation.record import to_json
from pflcore.train import Net

SideState = dict[str, Any]


def identity_of(
    side: str, algorithm: Algorithm, net: Net, averages: bool, **options: Any
) -> Record:
    """The description by which a state tells sides apart.

    Args:
        side: "server" or "client".
        algorithm: The algorithm of the side.
        net: The model of the side.
        averages: True where batch norm's statistics are averaged.
        options: Further options that the numbers depend on.
    """
    description = {
        "side": side,
        "algorithm": name_of(algorithm),
        "options": algorithm,
        "net": describe_net(net),
        "functions": describe_functions(
            net.module, net.loss_fn, algorithm=algorithm, **options
        ),
        "batch_norm": "average" if averages else "local",
        **options,
    }
    record: Record = to_json(description)
    return record


def check_identity(state: Any, identity: Record) -> None:
    """Raises ValueError where a state is not that of the side with this identity."""
    side = identity["side"]
    there = state.get("identity") if isinstance(state, Mapping) else None
    if not isinstance(there, Mapping):
        raise ValueError(f"state: expected what state_dict() of a {side} gives.")
    difference = first_difference(dict(there), identity)
    if difference is not None:
        raise ValueError(
            f"state: expected that of this {side}, got one of another: {difference}; "
            "give what it was made with."
        )


def copied(state: SideState) -> SideState:
    """The state with copies of its tensors."""
    copy: SideState = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            copy[name] = value.clone()
        elif is_group(value):
            copy[name] = {key: tensor.clone() for key, tensor in value.items()}
        else:
            copy[name] = value
    return copy


def is_group(value: Any) -> bool:
    """True for a dict of tensors, also for an empty one."""
    return isinstance(value, dict) and all(
        isinstance(tensor, Tensor) for tensor in value.values()
    )


def write_state(folder: str | Path, state: SideState) -> None:
    """Writes a state into `folder`, in place of one that is there.

    No copy is made of a tensor on the CPU. Raises OSError where it cannot be written;
    then the earlier file stands.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    groups = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif is_group(value):
            groups.append(name)
            tensors |= {f"{name}.{key}": tensor for key, tensor in value.items()}
        else:
            values[name] = value
    store.save(folder, tensors, {**values, "groups": groups})


def read_state(folder: str | Path) -> SideState:
    """The state in `folder`, with its tensors on the CPU.

    Raises ValueError where there is none, or where its file is damaged.
    """
    tensors, values = store.load(folder)
    state: SideState = dict(values)
    for name in state.pop("groups", ()):
        state[name] = {}
    for name, tensor in tensors.items():
        group, _, key = name.partition(".")
        if key:
            state.setdefault(group, {})[key] = tensor
        else:
            state[name] = tensor
    return state


def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of tensors, on a device."""
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
