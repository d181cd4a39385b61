"""Local training of whole models, an epoch of all clients per call.

It is compared with the same training in torch, client after client.

Symbols: N clients of n samples each.
"""

from typing import Any

import torch

from bench.problem import Facts, Problem, Size, Sizes, relative
from bench.workload import Workload, cohort, federation, train
from pflcore import Net
from pflcore.train._select_engine import make_context

# Model, data, N, n and options of training; batches of 20, one epoch.
WHOLE: tuple[tuple[str, str, int, int, Facts], ...] = (
    ("linear", "rows", 139, 110, {}),
    ("linear", "made up", 20, 600, {}),
    ("mlp", "made up", 20, 1000, {}),
    ("mlp", "made up", 20, 1000, {"clip_grad": 1.0}),
    ("mlp", "made up", 20, 1000, {"local_optimizer": "adamw"}),
    ("lenet5", "made up", 20, 1000, {}),
    ("cifar_cnn", "made-up photos", 20, 100, {}),
    ("resnet8", "made-up photos", 4, 100, {}),
    ("resnet18, 8 wide", "made-up photos", 4, 100, {}),
    ("resnet18, 8 wide, group norm", "made-up photos", 4, 100, {}),
    # No chain: torch's wide convolutions are faster.
    ("resnet18, 16 wide", "made-up photos", 4, 100, {}),
)
OPTIONS = ("clip_grad", "local_optimizer")


def sizes(quick: bool) -> Sizes:
    """Models, data, N and n, and options of training."""
    chosen = WHOLE[:3] if quick else WHOLE
    for model, data, n, samples, options in chosen:
        if quick:
            n = min(n, 10)
            samples = 100
        yield {"model": model, "data": data, "N": n, "n": samples, **options}


def problem(size: Size) -> Problem:
    """The problem of a size."""
    n = size["N"]
    w = Workload(
        name="",
        model=size["model"],
        data=size["data"],
        n=n,
        cohort=n,
        samples=n * size["n"],
        tests=0,
        steps=tuple((k, size[k]) for k in OPTIONS if k in size),
    )
    data = federation(w)
    net = Net(w.build, seed=0)
    setting = make_context(net, data, w.training, "auto", seed=0)
    general = make_context(net, data, w.training, "loop", seed=0)

    @torch.enable_grad()
    def call(s: Any = setting) -> torch.Tensor:
        clients, rows = cohort(s)
        return clients.fit(rows).w

    def plain() -> torch.Tensor:
        model = w.build()
        trained = []
        for i in range(n):
            net.load(model, net.w0)
            train(model, w, i)
            trained.append(net.row(model))
        return torch.stack(trained)

    def error(got: torch.Tensor) -> float | None:
        # The plain loop has other shuffles, so the package's general engine, with the
        # same ones, is compared with the chain.
        if setting.engine.chain is None:
            return None
        return relative(call(), call(general).double())

    return Problem("chain", size, {"pflcore": call, "plain loop": plain}, error)
