"""Medians and trimmed means of client models: `trimmed_mean`, torch, numpy and byzfl.

`aggregate` takes the mean of the same rows, which is not robust. It shows what
robustness costs.

Symbols: N models of P parameters; f numbers that are left out at either end.
"""

from typing import Any

import torch
from torch import Tensor

from bench.problem import (
    Calls,
    Problem,
    Size,
    Sizes,
    fits,
    generator,
    models,
    on_cpu,
    relative,
)
from pflcore import ops
from pflcore.ops import reference


def sizes(quick: bool) -> Sizes:
    """The median of N models, and their mean without a fifth at either end."""
    clients = ((20, 100_000),) if quick else ((20, 10**6), (100, 10**6), (1000, 10**4))
    for n, p in clients:
        for f in ((n - 1) // 2, n // 5):
            yield {"N": n, "P": p, "f": f}


def problem(size: Size) -> Problem | None:
    """The problem of a size; None where the memory is too small."""
    n, p, f = size["N"], size["P"], size["f"]
    if not fits(5 * n * p):  # a sort has a copy, and the places as int64
        return None
    x = models(n, p)
    checked = torch.randint(p, (1000,), generator=generator(1))  # columns
    want = x[:, checked].double().sort(0).values[f : n - f].mean(0)
    equal = torch.full((1, n), 1 / n, dtype=torch.float64)

    def by_sort() -> Tensor:
        return x.sort(0).values[f : n - f].mean(0)

    def by_numpy() -> Any:
        import numpy as np

        kept = np.partition(x.numpy(), (f, n - f - 1), 0)[f : n - f]
        return kept.mean(0)

    def by_byzfl() -> Any:
        import byzfl

        is_median = f == (n - 1) // 2
        return (byzfl.Median() if is_median else byzfl.TrMean(f))(x)

    providers: Calls = {
        "pflcore": lambda: ops.trimmed_mean(x, f),
        "reference": lambda: reference.trimmed_mean(x, f),
        "torch.sort": by_sort,
        "byzfl": by_byzfl,
    }
    if n % 2 == 0 and f == (n - 1) // 2:
        # Most code bases take torch's median, which is the lower of two in the middle.
        providers["torch.median, the lower one"] = lambda: x.median(0).values
    providers |= on_cpu({"numpy.partition": by_numpy})
    # Not the same numbers: the mean of all rows.
    providers["the mean, by aggregate"] = lambda: ops.aggregate(x, equal)[0]

    def error(got: Any) -> float:
        return relative(torch.as_tensor(got)[checked], want)

    return Problem("trimmed_mean", size, providers, error, 4 * n * p, 4 * p)
