"""Checkpoints of a server and of a client, each for the side that wrote it.

A side is a `Server` or a `Client`. `pflcore.simulation.checkpoint` writes the file,
whole or not at all. Its facts hold the identity of the side, so that another algorithm,
model or option is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pflcore.algorithms import name_of
from pflcore.algorithms._protocol import Algorithm
from pflcore.results.record import to_json
from pflcore.simulation import checkpoint as store
from pflcore.simulation._describe import Record, describe_net, first_difference
from pflcore.simulation._functions import describe_functions
from pflcore.train import Net


def identity_of(
    side: str, algorithm: Algorithm, net: Net, averages: bool, **options: Any
) -> Record:
    """The description by which a checkpoint tells sides apart.

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


def save_side(
    folder: str | Path,
    identity: Record,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Writes a side's checkpoint. Raises OSError where it cannot be written.

    Args:
        folder: The folder of the checkpoint.
        identity: The result of `identity_of`.
        tensors: Tensors [...] on any device, of which no copy is made.
        facts: Further values that JSON can hold.
    """
    store.save(folder, tensors, {**facts, "identity": identity})


def load_side(folder: str | Path, identity: Record) -> tuple[dict[str, Tensor], Record]:
    """The tensors and facts of a side's checkpoint.

    Raises ValueError where it is absent, damaged or of a side with another identity.
    """
    tensors, facts = store.load(folder)
    there = facts.get("identity")
    if not isinstance(there, dict):
        raise ValueError(
            f"checkpoint: {folder} holds that of a simulation, expected one of a "
            f"{identity['side']}; give another folder."
        )
    difference = first_difference(there, identity)
    if difference is not None:
        raise ValueError(
            f"checkpoint: {folder} holds that of another {identity['side']}: "
            f"{difference}; give what it was made with, or another folder."
        )
    return tensors, facts


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with `prefix` before their names."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
