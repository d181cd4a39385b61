"""Local training of whole models: an epoch of all clients in one call, beside the same in torch,
client after client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from bench.problem import Problem, relative
from bench.workload import LR, MODELS, epoch
from pflcore.data import Federation
from pflcore.train import Clients, Net, Training, prepared

PROVIDERS = ("pflcore", "plain loop")
BUILDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(28, 10), (28,)),
    "logistic": (lambda: nn.Linear(784, 10), (784,)),
    **{name: (build, (1, 28, 28)) for name, build in MODELS.items()},
}


def sizes(quick: bool) -> Iterator[dict[str, Any]]:
    """N clients of n samples each, batches of 20, one epoch of the model."""
    for model, n, samples in (
        ("linear", 139, 110),
        ("logistic", 20, 600),
        ("mlp", 20, 1000),
        ("lenet5", 20, 1000),
    ):
        if not quick or model != "lenet5":
            yield {
                "model": model,
                "N": n if not quick else min(n, 10),
                "n": samples if not quick else 100,
            }


def problem(size: dict[str, Any]) -> Problem:
    (build, shape), n, count = BUILDS[size["model"]], size["N"], size["n"]
    gen = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(n * count, *shape, generator=gen),
        torch.randint(10, (n * count,), generator=gen),
    )
    data = Federation(x, y, {"train": list(torch.arange(n * count).split(count))}, 10)
    net = Net(build, seed=0)
    setting = prepared(net, data, Training(lr=LR, batch_size=20), seed=0)
    rows = setting.net.w0.expand(n, -1)

    @torch.enable_grad()
    def call() -> torch.Tensor:
        return (
            Clients(setting, torch.arange(n), 1, setting.net.b0.expand(n, -1).clone()).fit(rows).w
        )

    @torch.enable_grad()
    def plain() -> torch.Tensor:
        model, trained = build(), []
        for i in range(n):
            net.load(model, net.w0)
            epoch(model, torch.optim.SGD(model.parameters(), lr=LR), *data.client(i, "train"))
            trained.append(net.row(model))
        return torch.stack(trained)

    @torch.enable_grad()
    def error(got: torch.Tensor) -> float | None:
        if setting.engine.chain is None:
            return None
        general = prepared(net, data, Training(lr=LR, batch_size=20), "loop", seed=0)
        want = Clients(general, torch.arange(n), 1, net.b0.expand(n, -1).clone()).fit(rows).w
        # the plain loop shuffles otherwise: the same training by the general path
        return relative(call(), want.double())

    return Problem("chain", size, {"pflcore": call, "plain loop": plain}, error)
