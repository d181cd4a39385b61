"""Equality of states."""

import torch


def same(a, b, only=slice(None)):
    """True where two states have the same bits.

    With `only`, rows of other clients are not compared.
    """
    one = tensors(a, only)
    two = tensors(b, only)
    return one.keys() == two.keys() and all(
        torch.equal(v, two[k]) for k, v in one.items()
    )


def tensors(state, only):
    of_clients = {f"own {k}": v[only] for k, v in state.clients.items()}
    return {**state.server, **of_clients, "b": state.buffers}
