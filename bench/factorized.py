"""Ten clients of WAFFLe's MLP (784-200-10, 120 factors, batches of 10): its layers beside dense
ones, and with all that it draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.problem import Problem
from pflcore.algorithms.factorized_waffle import FactorizedWaffle
from pflcore.data import Federation
from pflcore.nn.models import model_for
from pflcore.train import Clients, Net, Training, prepared

PROVIDERS = ("factorized layers", "dense layers", "with sampling and divergence")
CLIENTS = 10


def sizes(quick: bool) -> Iterator[dict[str, Any]]:
    """One epoch of `images` made-up images of 1 x 28 x 28 for each of ten clients."""
    for images in (100,) if quick else (100, 480):
        yield {"images": images}


def problem(size: dict[str, Any]) -> Problem:
    gen = torch.Generator().manual_seed(0)
    clients = [
        (
            torch.randn(size["images"], 1, 28, 28, generator=gen),
            torch.randint(10, (size["images"],), generator=gen),
        )
    ] * CLIENTS
    data, training = Federation.from_arrays(clients), Training(lr=0.04, batch_size=10)
    waffle = FactorizedWaffle(ranks=(120,))
    dense = Net(lambda: model_for("mlp", (1, 28, 28), 10, bias=False))
    factorized = waffle.prepare(dense)

    def cohort(net: Net) -> Clients:
        return Clients(
            prepared(net, data, training),
            torch.arange(CLIENTS),
            1,
            net.b0.expand(CLIENTS, -1).clone(),
        )

    on_dense, on_factors = cohort(dense), cohort(factorized)
    rows = {net.size: net.w0.repeat(CLIENTS, 1) for net in (dense, factorized)}
    first = waffle.newcomer({}, factorized, CLIENTS)
    own = {k: v.repeat(CLIENTS, 1) for k, v in first.items()}
    return Problem(
        "factorized",
        size,
        {
            "factorized layers": lambda: on_factors.fit(rows[factorized.size]),
            "dense layers": lambda: on_dense.fit(rows[dense.size]),
            "with sampling and divergence": lambda: waffle.learn(
                rows[factorized.size].clone(), own, on_factors
            ),
        },
        lambda got: None,
    )
