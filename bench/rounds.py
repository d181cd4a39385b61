"""One round of training, end to end: an algorithm of every family; for FedAvg a plain torch loop,
Flower and pfl beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from bench import peers
from bench.problem import Problem
from bench.workload import BATCH, LR, MODELS, Workload, epoch
from pflcore import Evaluation
from pflcore.data import Federation
from pflcore.simulation import Simulation
from pflcore.train.training import Training

PROVIDERS = ("pflcore", "plain loop", "flwr", "pfl")
FAMILIES = (
    "fedavg",
    "fedadam",
    "fedprox",
    "scaffold",
    "waffle",
    "weight_erosion",
    "feddwa",
    "hypcluster",
    "apfl",
    "per_fedavg",
)


def sizes(quick: bool) -> Iterator[dict[str, Any]]:
    """N clients of `images` made-up images of 1 x 28 x 28, batches of 20, one epoch."""
    for name, model, n in itertools.product(FAMILIES, MODELS, (10,) if quick else (10, 20, 100)):
        yield {
            "algorithm": name,
            "model": model,
            "N": n,
            "images": 100 if quick or n > 20 else 1000,
        }


def made_up(model: str, n: int, count: int) -> Workload:
    """What the frameworks are given: n clients of `count` images each, everybody in every round."""
    return Workload("rounds", model, "made up", n, n, n * count, n)


def plain_loop(
    model: nn.Module, clients: list[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], Any]:
    """What one writes without a framework: one nn.Module, torch.optim.SGD, one client after
    another, on one thread."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def round() -> dict[str, torch.Tensor]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        total = {k: torch.zeros_like(v) for k, v in state.items()}
        for x, y in clients:
            model.load_state_dict(state)
            epoch(model, optimizer, x, y)
            for k, v in model.state_dict().items():
                total[k].add_(v, alpha=1 / len(clients))
        state.update(total)
        torch.set_num_threads(threads)
        return total

    return round


def problem(size: dict[str, Any]) -> Problem:
    gen = torch.Generator().manual_seed(0)
    n, images = size["N"], size["images"]
    clients = [
        (torch.randn(images, 1, 28, 28, generator=gen), torch.randint(10, (images,), generator=gen))
        for _ in range(n)
    ]
    data = Federation.from_arrays(clients, test_fraction=0.1)
    build = MODELS[size["model"]]
    run = Simulation(
        size["algorithm"],
        build,
        data,
        Training(lr=LR, batch_size=BATCH),
        rounds=10_000,
        evaluation=Evaluation(every=0),
    )
    rounds = run.iterate()
    providers: dict[str, Any] = {"pflcore": lambda: next(rounds)}
    if size["algorithm"] == "fedavg":
        own = [data.client(i, "train") for i in range(n)]
        providers["plain loop"] = plain_loop(build(), own)
        count = len(own[0][0])
        providers["flwr"] = lambda: peers.flower(made_up(size["model"], n, count))
        providers["pfl"] = lambda: peers.apple(made_up(size["model"], n, count))
    return Problem("round", size, providers, lambda got: None)
