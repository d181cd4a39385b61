"""Mixtures of client models: `aggregate` compared with torch and numpy.

There are N results of N models each, N results of 5 models each, and FedAvg's single
one.

Symbols: N models of P parameters; M results, each a mixture of K models.
"""

from typing import Any

import torch
import torch.nn.functional as F
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
    """Sizes N, P, M and K."""
    for size in cohorts(quick):
        n = size["N"]
        for m, k in ((1, n), (n, n), (n, NEIGHBOURS)):
            yield size | {"M": m, "K": k}


def sparse_calls(weight: Tensor, x: Tensor) -> Calls:
    """The product with sparse weights, which torch has on a card."""
    rows = weight.to_sparse_csr()
    return {"torch.sparse": lambda: torch.sparse.mm(rows, x)}


def problem(size: Size) -> Problem | None:
    """The problem of a size; None where the memory is too small."""
    n = size["N"]
    m = size["M"]
    k = size["K"]
    p = size["P"]
    if not fits(n * p, 2 * m * p):
        return None
    x = models(n, p)
    gen = generator(1)
    full = torch.softmax(torch.randn(m, n, generator=gen), 1)
    weight = full
    index = None
    mixed_rows = torch.arange(n).expand(m, n)
    if k < n:
        weight, index = full.topk(k, 1)
        mixed_rows = index
    weight = weight / weight.sum(1, keepdim=True)
    # It is written to here, so that no provider pays for the others' page faults.
    out = torch.ones(m, p)
    checked = torch.randint(p, (1000,), generator=gen)  # columns
    dense = torch.zeros(m, n, dtype=torch.float64)
    dense.scatter_(1, mixed_rows, weight.double())
    want = dense @ x[:, checked].double()

    providers: Calls = {
        "pflcore": lambda: ops.aggregate(x, weight, index, out=out),
        "pflcore, fresh result": lambda: ops.aggregate(x, weight, index),
    }
    if index is None:
        providers["torch.mm"] = lambda: torch.mm(weight, x, out=out)
        providers["torch.mm, fresh result"] = lambda: weight @ x

        def by_numpy() -> Any:
            return weight.numpy().dot(x.numpy(), out=out.numpy())

        providers |= on_cpu({"numpy": by_numpy})
    else:
        # A code base without a sparse form multiplies by weights of zero.
        single = dense.float()
        providers["torch.mm"] = lambda: torch.mm(single, x, out=out)
        providers["torch.mm, fresh result"] = lambda: single @ x
        providers["F.embedding_bag, fresh result"] = lambda: F.embedding_bag(
            index, x, per_sample_weights=weight, mode="sum"
        )
        if x.is_cuda:
            providers |= sparse_calls(single, x)
    return Problem(
        "aggregate",
        size,
        providers,
        lambda got: relative(torch.as_tensor(got)[:, checked], want),
        reads=4 * len(mixed_rows.unique()) * p,
        writes=4 * m * p,
        operations=2.0 * m * k * p,
    )
