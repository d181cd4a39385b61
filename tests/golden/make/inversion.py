"""Golden numbers of model inversion by MI-FACE, of a softmax regression."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, load, main

LR = 0.1
TARGET = 1  # the class that is inverted


def probabilities(x: np.ndarray, W: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The softmax of the scores `W x + bias`."""
    power = np.exp(W @ x + bias)
    return power / power.sum()


def results() -> Iterator[Result]:
    """The steps of inversion.json (Fredrikson et al. 2015, Algorithm 1).

    `x <- x + lr grad f_y(x)` from zeros, f_y the target's probability, whose gradient
    is `f_y (W_y - sum_c f_c W_c)`. A row holds x, and before the step f_y(x).
    """
    stored = load("inversion")
    W = np.array(stored["weight"])
    bias = np.array(stored["bias"])
    x = np.zeros(3)
    for i, row in enumerate(stored["steps"]):
        f = probabilities(x, W, bias)
        value = [x.tolist(), float(f[TARGET])]
        yield Result("inversion", ("steps", i), value[: len(row)], 1e-7, 5e-10)
        x = x + LR * f[TARGET] * (W[TARGET] - f @ W)


if __name__ == "__main__":
    main(results())
