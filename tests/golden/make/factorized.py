"""Golden numbers of WAFFLe's factorized model: beliefs, their divergences, priors.

Symbols: factor k has the belief Bernoulli(pi_k) in its use, and the belief
Kumaraswamy(c_k, d_k) in its stick v_k; u_k is a uniform draw; alpha is the prior's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, load, main

ALPHA = 5.0  # of the example


def harmonic(d: float) -> float:
    """The harmonic number H_d for any d > 0: `digamma(d + 1) + gamma`.

    `H_d = H_(d + 40) - sum_k 1 / (d + k)`, and H of a large number by its expansion.
    """
    z = d + 40
    large = np.log(z) + np.euler_gamma + 1 / (2 * z) - 1 / (12 * z**2)
    large += 1 / (120 * z**4)
    return large - sum(1 / (d + k) for k in range(1, 41))


def kumaraswamy_divergence(c: float, d: float, alpha: float) -> float:
    """KL(Kumaraswamy(c, d) || Beta(alpha, 1)) (Nalisnick and Smyth 2017).

    `(alpha - c) / c H_d + log(c d / alpha) - (d - 1) / d`
    """
    return (alpha - c) / c * harmonic(d) + np.log(c * d / alpha) - (d - 1) / d


def bernoulli_divergence(pi: np.ndarray, p: np.ndarray) -> np.ndarray:
    """KL(Bernoulli(pi) || Bernoulli(p))."""
    return pi * np.log(pi / p) + (1 - pi) * np.log((1 - pi) / (1 - p))


def prior_means(alpha: float, factors: int) -> list[float]:
    """The prior means `(alpha / (alpha + 1))^k` of factors k = 1 .. F."""
    return [(alpha / (alpha + 1)) ** k for k in range(1, factors + 1)]


def results() -> Iterator[Result]:
    """The numbers of indian_buffet.json.

    The sticks are `v = (1 - (1 - u)^(1/d))^(1/c)`; the prior probability of factor k is
    `v_1 ... v_k` (WAFFLe, Hao et al. 2020). The key "log_v" holds the sticks v.
    """
    stored = load("indian_buffet")
    pi, c, d, u = np.array(stored["factors"])
    v = (1 - (1 - u) ** (1 / d)) ** (1 / c)
    kl_b = bernoulli_divergence(pi, np.cumprod(v))
    kl_v = [kumaraswamy_divergence(*cd, ALPHA) for cd in zip(c, d, strict=True)]
    found = {
        "log_v": v.tolist(),
        "kl_b": kl_b.tolist(),
        "kl_v": kl_v,
        "kl": float(kl_b.sum() + sum(kl_v)),
        "prior": prior_means(5, 4),
        "prior_sums": [[f, sum(prior_means(f, f))] for f, _ in stored["prior_sums"]],
    }
    for key, value in found.items():
        yield Result("indian_buffet", (key,), value, 1e-7, 5e-10)


if __name__ == "__main__":
    main(results())
