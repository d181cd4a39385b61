"""Robust means of client models by coordinate: pflcore, torch, numpy and byzfl.

These are medians, trimmed means and means around the median. `aggregate` takes the mean
of the same rows, which is not robust. It shows what robustness costs.

Symbols: N models of P parameters; f numbers that are left out: at either end by a
trimmed mean, and altogether by a mean around the median.
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
    """N models: the median, and both means with a fifth of the models as f."""
    clients = ((20, 100_000),) if quick else ((20, 10**6), (100, 10**6), (1000, 10**4))
    for n, p in clients:
        for f in ((n - 1) // 2, n // 5):
            yield {"N": n, "P": p, "f": f}
        yield {"N": n, "P": p, "f": n // 5, "mean": "around the median"}


def problem(size: Size) -> Problem | None:
    """The problem of a size; None where the memory is too small."""
    n, p, f = size["N"], size["P"], size["f"]
    if not fits(5 * n * p):  # a sort has a copy, and the places as int64
        return None
    x = models(n, p)
    if "mean" in size:
        return around_median(size, x)
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


def around_median(size: Size, x: Tensor) -> Problem:
    """The mean of the N - f numbers of each column nearest to its median."""
    n, p, f = size["N"], size["P"], size["f"]
    checked = torch.randint(p, (1000,), generator=generator(1))  # columns

    def by_sort(x: Tensor = x) -> Tensor:
        distance = (x - x.quantile(0.5, 0)).abs()
        nearest = distance.sort(0).indices[: n - f]
        return x.gather(0, nearest).mean(0)

    def by_byzfl() -> Any:
        import byzfl

        return byzfl.Meamed(f)(x)

    want = by_sort(x[:, checked].double())
    providers: Calls = {
        "pflcore": lambda: ops.mean_around_median(x, n - f),
        "reference": lambda: reference.mean_around_median(x, n - f),
        "byzfl": by_byzfl,
    }
    if n * p <= 16e6:  # of larger tensors `quantile` takes none
        providers["torch.sort"] = by_sort
    equal = torch.full((1, n), 1 / n, dtype=torch.float64)
    # Not the same numbers: the mean of all rows.
    providers["the mean, by aggregate"] = lambda: ops.aggregate(x, equal)[0]

    def error(got: Any) -> float:
        return relative(torch.as_tensor(got)[checked], want)

    return Problem("mean_around_median", size, providers, error, 4 * n * p, 4 * p)
