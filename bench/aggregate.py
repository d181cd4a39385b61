"""Mixing client models: `aggregate` beside torch and numpy; N results of N models, 5 of
N, and FedAvg's single one."""

import torch
from torch import Tensor

from bench.problem import (
    Calls,
    Problem,
    Size,
    Sizes,
    cohorts,
    fits,
    generator,
    models,
    on_cpu,
    relative,
)
from pflcore import ops

NEIGHBOURS = 5


def sizes(quick: bool) -> Sizes:
    """M results; K of the N models in each."""
    for size in cohorts(quick):
        n = size["N"]
        for m, k in ((1, n), (n, n), (n, NEIGHBOURS)):
            yield size | {"M": m, "K": k}


def sparse_calls(weight: Tensor, x: Tensor) -> Calls:
    rows = weight.to_sparse_csr()
    return {"torch.sparse": lambda: torch.sparse.mm(rows, x)}


def problem(size: Size) -> Problem | None:
    n, m, k, p = (size[letter] for letter in "NMKP")
    if not fits(n * p, 2 * m * p):
        return None
    x = models(n, p)
    gen = generator(1)
    full = torch.softmax(torch.randn(m, n, generator=gen), 1)
    weight, index = full.topk(k, 1) if k < n else (full, None)
    weight = weight / weight.sum(1, keepdim=True)
    # touched, so that no provider pays for the page faults of the others
    out = torch.ones(m, p)
    look = torch.randint(p, (1000,), generator=gen)  # columns that are checked
    at = torch.arange(n).expand(m, n) if index is None else index
    dense = torch.zeros(m, n, dtype=torch.float64).scatter_(1, at, weight.double())
    want = dense @ x[:, look].double()

    providers: Calls = {
        "pflcore": lambda: ops.aggregate(x, weight, index, out=out),
        "pflcore, fresh result": lambda: ops.aggregate(x, weight, index),
    }
    if index is None:
        providers["torch.mm"] = lambda: torch.mm(weight, x, out=out)
        providers["torch.mm, fresh result"] = lambda: weight @ x
        providers |= on_cpu(
            {"numpy": lambda: weight.numpy().dot(x.numpy(), out=out.numpy())}
        )
    else:
        # what a code base without a sparse form does
        single = dense.float()
        providers["torch.mm"] = lambda: torch.mm(single, x, out=out)
        providers |= sparse_calls(single, x) if x.is_cuda else {}
    return Problem(
        "aggregate",
        size,
        providers,
        lambda got: relative(torch.as_tensor(got)[:, look], want),
        reads=4 * len(at.unique()) * p,
        writes=4 * m * p,
        operations=2.0 * m * k * p,
    )
