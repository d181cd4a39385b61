"""Local training of linear models: all steps of all clients in one call, beside the same in batched torch and client after client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from bench.problem import Problem, relative
from pflcore.ops import linear, reference

PROVIDERS = ("pflcore", "batched torch", "plain loop")
LR = 0.01


def sizes(quick: bool) -> Iterator[dict[str, int]]:
    """S clients of n samples, I inputs, C outputs, batches of B: School's regression, logistic regression on images."""
    for (s, n, i, c), b in itertools.product(((139, 110, 28, 1), (20, 600, 784, 10)), (10, 32)):
        if not quick or i < 100:
            yield {"S": s, "n": n, "I": i, "C": c, "B": b}


def problem(size: dict[str, int]) -> Problem:
    s, n, i, c, b = size["S"], size["n"], size["I"], size["C"], size["B"]
    gen = torch.Generator().manual_seed(0)
    x, start = torch.randn(s * n, i, generator=gen), torch.randn(s, c * (i + 1), generator=gen) * 0.05
    criterion = "cross_entropy" if c > 1 else "squared"
    y = torch.randint(c, (s * n,), generator=gen) if c > 1 else torch.randn(s * n, generator=gen)
    order = torch.stack([torch.randperm(n, generator=gen) + k * n for k in range(s)])[:, None]
    steps = torch.full((s,), -(-n // b))
    w = start.clone()

    def call(op: Any, rows: torch.Tensor, samples: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        how = (b, False, criterion, True, LR, None, None, 0.0, None, None, 0.0, 0.0, None)
        op(rows, samples, y, None, order, torch.full((s,), n), steps, *how)
        return rows

    @torch.enable_grad()
    def plain() -> torch.Tensor:
        model, trained = nn.Linear(i, c), []
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for k in range(s):
            nn.utils.vector_to_parameters(start[k].clone(), model.parameters())
            for batch in order[k, 0].split(b):
                scores = model(x[batch])
                loss = F.cross_entropy(scores, y[batch]) if c > 1 else F.mse_loss(scores[:, 0], y[batch])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        return torch.stack(trained)

    def error(got: torch.Tensor) -> float:
        want = call(reference.linear_sgd_, start.double(), x.double(), y if c > 1 else y.double())
        if got is w:  # the timed calls went on and on: once more from the start
            got = call(linear.linear_sgd_, w.copy_(start), x, y)
        return relative(got, want)

    providers = {
        "pflcore": lambda: call(linear.linear_sgd_, w, x, y),
        "batched torch": lambda: call(reference.linear_sgd_, w, x, y),
        "plain loop": plain,
    }
    operations = 4.0 * s * n * i * c
    return Problem("linear_sgd_", size, providers, error, reads=4 * s * n * i, writes=4 * w.numel(), operations=operations)
