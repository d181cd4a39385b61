"""A state with room for one more client."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pflcore.algorithms.protocol import Algorithm
from pflcore.simulation.round import State, begin, flat, unflat
from pflcore.train import Net


def grown(alg: Algorithm, state: State, net: Net, n: int) -> tuple[State, bool]:
    """A copy of the state with a newcomer, client n, and whether the server keeps a model for each
    client.

    What has rows or columns for the clients shows by its shape: a federation with one more client
    has more of them. The newcomer's batch norm starts from the mean of the others' statistics.
    """
    few, many = (flat(begin(alg, net, m, clients=bool(state.clients))) for m in (n, n + 1))
    models = [k for k, v in many.items() if k.startswith("server.") and v.shape[-1:] == (net.size,)]
    everybody = any(many[k].shape != few[k].shape for k in models)
    new = flat(replace(state, server=alg.grow(state.server, n)))
    for key, old in new.items():
        grows = key in many and many[key].shape[:1] > (0,) and many[key].shape != few[key].shape
        new[key] = larger(old, many[key]) if grows else old.clone()
    new["batch_norm"][n] = state.batch_norm.mean(0)
    return unflat(new, state.round, state.void), everybody


def larger(old: Tensor, large: Tensor) -> Tensor:
    """A copy of `large`, a first tensor of more clients, with `old` in its first rows and
    columns."""
    new = torch.empty_like(large, dtype=old.dtype, device=old.device).copy_(large)
    new[tuple(slice(length) for length in old.shape)] = old
    return new
