"""Golden numbers of kNN-Per, Per-FedAvg and FedRoD.

Symbols: d are a query's distances to stored samples, lam the share of their vote; alpha
and beta are Per-FedAvg's inner and outer step sizes; g and h are FedRoD's generic and
personal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from cases import Result, load, main

FAMILY = "feddwa_family"

# kNN-Per's stored features and its query, as the test has them.
STORED = np.array([[0, 0], [1, 0], [0, 2], [3, 1], [2, 2]], float)
QUERY = np.array([0.5, 0.25])
NEIGHBOURS = 3


# kNN-Per ----------------------------------------------------------------------------


def votes(kernel: str) -> tuple[np.ndarray, np.ndarray]:
    """The nearest samples, and their weights, which sum to 1.

    - "exp": `exp(-d)` (Marfoq et al. 2022, Eq. 6)
    - "inverse": `1 / d` (Motley)
    - "gauss_dim": `exp(-d^2 / D)` of D features (the paper's code)
    """
    d = np.linalg.norm(STORED - QUERY, axis=1)
    near = np.argsort(d, kind="stable")[:NEIGHBOURS]
    d = d[near]
    weight = {
        "exp": np.exp(-d),
        "inverse": 1 / d,
        "gauss_dim": np.exp(-(d**2) / STORED.shape[1]),
    }[kernel]
    return near, weight / weight.sum()


def mixture(scores, loss, y, lam, kernel="exp") -> np.ndarray:
    """kNN-Per (Marfoq et al. 2022), Eq. 7: `lam p_knn + (1 - lam) p_model`.

    - Cross entropy mixes probabilities of classes, the model's being a softmax.
    - Binary cross entropy mixes the probability of class 1 and gives its logit, the
      probability being at least 1e-12.
    - The hinge loss mixes the score and the mean of the neighbours' signs.
    - The squared loss mixes numbers.
    """
    scores = np.array(scores)
    near, weight = votes(kernel)
    labels = np.array(y)[near]
    if loss == "cross_entropy":
        model = np.exp(scores) / np.exp(scores).sum()
        return lam * weight @ np.eye(len(scores))[labels] + (1 - lam) * model
    if loss == "binary_cross_entropy":
        p = lam * weight @ labels + (1 - lam) / (1 + np.exp(-scores))
        p = np.clip(p, 1e-12, 1 - 1e-12)
        return np.log(p / (1 - p))
    if loss == "hinge":
        labels = np.where(labels > 0, 1.0, -1.0)
    return lam * weight @ labels + (1 - lam) * scores


def vote_results() -> Iterator[Result]:
    """The rows of votes.json."""
    for i, (scores, loss, y, options, _) in enumerate(load("votes")):
        value = np.broadcast_to(mixture(scores, loss, y, **options), len(scores))
        yield Result("votes", (i, 4), value.tolist(), 1e-7, 5e-10)


# Per-FedAvg -------------------------------------------------------------------------


def per_fedavg(
    slope: Callable[[float], float],
    curvature: Callable[[float], float],
    w: float,
    alpha: float,
    beta: float,
    delta: float,
) -> dict[str, float]:
    """Per-FedAvg (Fallah et al. 2020, Algorithm 1) by a step of each variant.

    - `u = w - alpha f'(w)` and `v = f'(u)`
    - first-order: `w - beta v`
    - Hessian-free: `w - beta (v - alpha (f'(w + delta v) - f'(w - delta v)) / (2
      delta))`
    - exact: `w - beta (1 - alpha f''(w)) v`
    """
    u = w - alpha * slope(w)
    v = slope(u)
    product = (slope(w + delta * v) - slope(w - delta * v)) / (2 * delta)
    return {
        "inner_steps": u,
        "FO": w - beta * v,
        "HF": w - beta * (v - alpha * product),
        "exact": w - beta * (1 - alpha * curvature(w)) * v,
    }


def per_fedavg_results() -> Iterator[Result]:
    """Per-FedAvg's rows of feddwa_family.json."""
    stored = load(FAMILY)
    one = stored["H1_perfedavg_quadratic"]
    two = stored["H2_perfedavg_quartic"]
    losses = {
        "H1_perfedavg_quadratic": (
            lambda w: one["a"] * (w - one["c"]),
            lambda w: one["a"],
            1e-3,
        ),
        "H2_perfedavg_quartic": (lambda w: w**3 - 1, lambda w: 3 * w**2, two["delta"]),
    }
    for name, (slope, curvature, delta) in losses.items():
        case = stored[name]
        found = per_fedavg(
            slope, curvature, case["w"], case["alpha"], case["beta"], delta
        )
        for key, value in found.items():
            yield Result(FAMILY, (name, key), value, 1e-8, 1e-10)


# FedRoD -----------------------------------------------------------------------------


def cross_entropy(scores: np.ndarray, y: int) -> float:
    """Minus the logarithm of the softmax's probability of class y."""
    return float(np.log(np.exp(scores).sum()) - scores[y])


def fedrod_loss(g, h, counts, y, gamma) -> float:
    """FedRoD's training loss (Chen and Chao 2022) of one sample.

    Balanced softmax `CE(g + gamma log n_c)`, n_c the client's samples of class c, plus
    the personal loss `CE(g + h)`. A class without samples has a probability of 0.
    """
    prior = np.array(counts, float) ** gamma
    balanced = np.log((prior * np.exp(g)).sum()) - np.log(prior[y]) - g[y]
    return float(balanced) + cross_entropy(g + h, y)


def fedrod_results() -> Iterator[Result]:
    """The rows "fedrod_losses" of feddwa_family.json."""
    stored = load(FAMILY)
    g = np.array(stored["J1_fedrod_bsm"]["logits"])
    counts = stored["J1_fedrod_bsm"]["counts"]
    for i, (y, gamma, personal, _) in enumerate(stored["fedrod_losses"]):
        h = np.zeros(3) if personal is None else np.array(personal)
        value = fedrod_loss(g, h, counts, y, gamma)
        yield Result(FAMILY, ("fedrod_losses", i, 3), value, 1e-8, 1e-10)


def results() -> Iterator[Result]:
    """The numbers of this family in two golden files."""
    yield from vote_results()
    yield from per_fedavg_results()
    yield from fedrod_results()


if __name__ == "__main__":
    main(results())
