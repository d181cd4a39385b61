"""Local training of whole models: an epoch of all clients in one call, beside the same
in torch, client after client."""

from typing import Any

import torch

from bench.problem import Problem, Size, Sizes, relative
from bench.workload import Workload, cohort, federation, train
from pflcore import Net
from pflcore.train._select_engine import make_context

# N clients of n samples each, batches of 20, one epoch of the model
WHOLE = (
    ("linear", "rows", 139, 110),
    ("linear", "made up", 20, 600),
    ("mlp", "made up", 20, 1000),
    ("lenet5", "made up", 20, 1000),
)


def sizes(quick: bool) -> Sizes:
    for model, data, n, samples in WHOLE[:3] if quick else WHOLE:
        few = {"N": min(n, 10), "n": 100} if quick else {"N": n, "n": samples}
        yield {"model": model, "data": data, **few}


def problem(size: Size) -> Problem:
    n = size["N"]
    w = Workload("", size["model"], size["data"], n, n, n * size["n"], 0)
    data, net = federation(w), Net(w.build, seed=0)
    setting, general = (
        make_context(net, data, w.training, e, seed=0) for e in ("auto", "loop")
    )

    @torch.enable_grad()
    def call(s: Any = setting) -> torch.Tensor:
        clients, rows = cohort(s)
        return clients.fit(rows).w

    def plain() -> torch.Tensor:
        model, trained = w.build(), []
        for i in range(n):
            net.load(model, net.w0)
            train(model, w, i)
            trained.append(net.row(model))
        return torch.stack(trained)

    def error(got: torch.Tensor) -> float | None:
        # the plain loop shuffles otherwise: the same training by the general path
        return (
            None
            if setting.engine.chain is None
            else relative(call(), call(general).double())
        )

    return Problem("chain", size, {"pflcore": call, "plain loop": plain}, error)
