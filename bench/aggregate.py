"""Mixing client models: `aggregate` beside torch and numpy; N results of N models, 5 of N, and
FedAvg's single one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.problem import Problem, fits, generator, models, on_cpu, relative
from pflcore import ops
from pflcore.ops import reference

NEIGHBOURS = 5


def sizes(quick: bool) -> Iterator[dict[str, int]]:
    """M results; K of the N models in each."""
    for n, p in itertools.product((10, 20, 100, 1000), (62_006, 1_000_000, 10_000_000)):
        if n * p <= (2_000_000 if quick else 1_000_000_000):
            yield {"N": n, "M": 1, "K": n, "P": p}
            yield {"N": n, "M": n, "K": n, "P": p}
            yield {"N": n, "M": n, "K": NEIGHBOURS, "P": p}


def problem(size: dict[str, int]) -> Problem | None:
    n, m, k, p = (size[letter] for letter in "NMKP")
    if not fits(n * p, 2 * m * p):
        return None
    x = models(n, p)
    gen = generator(1)
    full = torch.softmax(torch.randn(m, n, generator=gen), 1)
    sparse = k < n
    weight, index = full.topk(k, 1) if sparse else (full, None)
    weight = weight / weight.sum(1, keepdim=True)
    out = torch.ones(m, p)  # touched, so that no provider pays for the page faults of the others
    look = torch.randint(p, (1000,), generator=gen)  # columns that are checked
    dense = (
        weight.double()
        if index is None
        else torch.zeros(m, n, dtype=torch.float64).scatter_(1, index, weight.double())
    )
    want = dense @ x[:, look].double()

    def error(got: Any) -> float:
        return relative(torch.as_tensor(got)[:, look], want)

    providers: dict[str, Any] = {
        "pflcore": lambda: ops.aggregate(x, weight, index, out=out),
        "pflcore, fresh result": lambda: ops.aggregate(x, weight, index),
        "reference": lambda: reference.aggregate(x, weight, index, None, 1.0, False),
    }
    if index is None:
        providers["torch.mm"] = lambda: torch.mm(weight, x, out=out)
        providers["torch.mm, fresh result"] = lambda: weight @ x
        providers |= on_cpu({"numpy": lambda: weight.numpy().dot(x.numpy(), out=out.numpy())})
    else:
        chosen = index
        # what a code base without a sparse form does
        providers["torch.mm"] = lambda: torch.mm(dense.float(), x, out=out)
        providers["embedding_bag"] = lambda: F.embedding_bag(
            chosen, x, mode="sum", per_sample_weights=weight
        )
    used = n if index is None else len(index.unique())
    return Problem(
        "aggregate",
        size,
        providers,
        error,
        reads=4 * used * p,
        writes=4 * m * p,
        operations=2.0 * m * k * p,
    )
