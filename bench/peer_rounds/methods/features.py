"""GPFL, compared with PFLlib."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.peer_rounds import pfllib
from bench.peer_rounds.problem import (
    CLASSES,
    HIDDEN,
    Comparison,
    client_samples,
    model,
    our_history,
)
from pflcore import Net
from pflcore.algorithms import GPFL

OPTIONS = {"lam": 0.3, "mu": 0.02}


def gpfl_play(checkout: Path, corrected: bool) -> Tensor:
    """The clients' models [N, P] after the rounds, by PFLlib's GPFL.

    Args:
        checkout: The folder of PFLlib.
        corrected: True computes the conditions from the embeddings that a client
            received, before round 1 too.
    """
    options = {"lamda": OPTIONS["lam"], "mu": OPTIONS["mu"]}
    module: Any = pfllib._import(checkout, "flcore.servers.servergpfl")
    module.Played = _server(module.GPFL, corrected)
    server = pfllib.server_after(checkout, "servergpfl:Played", **options)
    return pfllib.client_models(server)


def our_models() -> Tensor:
    """The clients' bodies and heads [N, P] after pflcore's rounds."""
    state = our_history("gpfl", OPTIONS, {}).state
    net, heads = Net(model()), state.clients["h"]
    body = state.server["x"][: net.size - heads.shape[1]]
    return net.join(body, heads)


def _server(gpfl: Any, corrected: bool) -> Any:
    """The class of a server that begins with pflcore's valve and embeddings."""
    x0 = GPFL().server_init_args(Net(model()))["x0"]
    others = x0[-(2 * (HIDDEN**2 + 3 * HIDDEN) + CLASSES * HIDDEN) :]

    class Played(gpfl):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for client in self.clients:
                for part in (client.CoV, client.GCE, client.GCE_frozen):
                    part.double()
                parts = [*client.CoV.parameters(), *client.GCE.parameters()]
                nn.utils.vector_to_parameters(others.clone(), parts)
                client.GCE_frozen.load_state_dict(client.GCE.state_dict())
                # It counted whole batches alone.
                labels = client_samples()[client.id][1]
                counts = labels.bincount(minlength=CLASSES)
                client.sample_per_class = counts.double() / len(labels)
                zeros = torch.zeros(HIDDEN).double()
                client.generic_conditional_input = zeros
                client.personalized_conditional_input = zeros
                client.set_GCE = partial(_set_embeddings, client, corrected)
                if corrected:
                    client.set_GCE(client.GCE)

    return Played


def _set_embeddings(client: Any, corrected: bool, received: Any) -> None:
    """The client's `set_GCE` in float64; where corrected, it takes over first."""
    if corrected:
        client.GCE.load_state_dict(received.state_dict())
    torch.set_default_dtype(torch.float64)
    try:
        type(client).set_GCE(client, received)
    finally:
        torch.set_default_dtype(torch.float32)


COMPARISONS = [
    Comparison(
        "gpfl",
        "pfllib",
        partial(gpfl_play, corrected=True),
        OPTIONS,
        ours=our_models,
        reason="with conditions from the received embeddings",
    ),
    Comparison(
        "gpfl",
        "pfllib",
        partial(gpfl_play, corrected=False),
        OPTIONS,
        ours=our_models,
        reason=(
            "their `set_GCE` sums the client's own `self.GCE.embedding` before it "
            "takes over the received one, and never before round 1 (zeros); ours are "
            "the means of the received embeddings"
        ),
    ),
]
