"""Local training of whole models: an epoch of all clients in one call, beside the same in torch,
client after client."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from bench.problem import Problem, relative
from bench.workload import LR, MODELS, epoch
from pflcore.data import Federation
from pflcore.train import Clients, Net, Training, prepared

BUILDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(28, 10), (28,)),
    "logistic": (lambda: nn.Linear(784, 10), (784,)),
    **{name: (build, (1, 28, 28)) for name, build in MODELS.items()},
}


def sizes(quick: bool) -> Iterator[dict[str, Any]]:
    """N clients of n samples each, batches of 20, one epoch of the model."""
    whole = (("linear", 139, 110), ("logistic", 20, 600), ("mlp", 20, 1000), ("lenet5", 20, 1000))
    for model, n, samples in whole[:3] if quick else whole:
        yield {"model": model, "N": min(n, 10) if quick else n, "n": 100 if quick else samples}


def problem(size: dict[str, Any]) -> Problem:
    (build, shape), n, count = BUILDS[size["model"]], size["N"], size["n"]
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n * count, *shape, generator=gen)
    y = torch.randint(10, (n * count,), generator=gen)
    data = Federation(x, y, {"train": list(torch.arange(n * count).split(count))}, 10)
    net, training = Net(build, seed=0), Training(lr=LR, batch_size=20)
    setting, general = (prepared(net, data, training, e, seed=0) for e in ("auto", "loop"))

    @torch.enable_grad()
    def call(s: Any = setting) -> torch.Tensor:
        buffers = s.net.b0.expand(n, -1).clone()
        return Clients(s, torch.arange(n), 1, buffers).fit(s.net.w0.expand(n, -1)).w

    @torch.enable_grad()
    def plain() -> torch.Tensor:
        model, trained = build(), []
        for i in range(n):
            net.load(model, net.w0)
            epoch(model, torch.optim.SGD(model.parameters(), lr=LR), *data.client(i, "train"))
            trained.append(net.row(model))
        return torch.stack(trained)

    def error(got: torch.Tensor) -> float | None:
        # the plain loop shuffles otherwise: the same training by the general path
        return None if setting.engine.chain is None else relative(call(), call(general).double())

    return Problem("chain", size, {"pflcore": call, "plain loop": plain}, error)
