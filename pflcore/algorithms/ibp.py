"""The Indian buffet process over a layer's F factors, and the beliefs that a client holds about
which of them it uses.

Prior: v_k ~ Beta(alpha, 1), b_k ~ Bernoulli(v_1 ... v_k), so later factors are rarer. Beliefs, mean
field: b_k ~ Bernoulli(sigmoid(l_k)), v_k ~ Kumaraswamy(c_k, d_k), whose distribution function is
1 - (1 - v^c)^d. All functions are elementwise or run along the last axis, [..., F], in the inputs'
dtype, and are differentiable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EULER = 0.5772156649015329
# a product of v's stays this far below 1 (in its logarithm), where the divergence would be infinite
NEAR_ONE = -1e-6


def prior_mean(alpha: float, factors: int) -> Tensor:
    """The prior's probability of each factor, (alpha / (alpha + 1))^k, within [.001, .999]:
    float64 [F]."""
    k = torch.arange(1, factors + 1, dtype=torch.float64)
    return ((alpha / (alpha + 1)) ** k).clamp(0.001, 0.999)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact to rounding at both ends, and its gradient too."""
    far = torch.log1p(-torch.exp(x.clamp(max=-math.log(2))))
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), far)


def harmonic(d: Tensor) -> Tensor:
    """H_d = psi(d + 1) + Euler's constant; E[log v] = -H_d / c."""
    return torch.digamma(d + 1) + EULER


def kl_slope(
    logit: Tensor, log_c: Tensor, log_d: Tensor, log_rest: Tensor, alpha: Tensor, sizes: list[int]
) -> Tensor:
    """The gradient of both divergences in (logit, log c, log d), [s, 3 F], written out: autograd
    takes three times as long. They are KL(Bernoulli(sigmoid(logit)) || Bernoulli(v_1 ... v_k)) and
    KL(Kumaraswamy(c, d) || Beta(alpha, 1)) (Nalisnick and Smyth 2017).

    Arguments are [s, F], layers of `sizes` factors side by side; `log_rest` is log(1 - u) of the
    draws of v = (1 - (1 - u)^(1/d))^(1/c).
    """
    pi, c, d = logit.sigmoid(), log_c.exp(), log_d.exp()
    s = log_rest / d
    log_v = log1mexp(s) / c
    log_p = along(log_v, sizes).clamp_(max=NEAR_ONE)
    logit_p = log_p - log1mexp(log_p)
    by_p = ((1 - pi) * logit_p.exp() - pi) * (log_p < NEAR_ONE)  # at the bound nothing moves
    by_v = along(by_p.flip(1), sizes[::-1]).flip(1)  # v_k is part of every later p
    rest = 1 - alpha / c
    by_c = 1 - alpha * harmonic(d) / c - by_v * log_v
    by_s = by_v * s / (c * torch.expm1(s)) * s.exp()
    by_d = 1 - 1 / d - rest * d * torch.polygamma(1, d + 1) - by_s
    return torch.cat([pi * (1 - pi) * (logit - logit_p), by_c, by_d], 1)


def along(values: Tensor, sizes: list[int]) -> Tensor:
    """Sums over the factors up to each, layer by layer: [s, F]."""
    return torch.cat([part.cumsum(1) for part in values.split(sizes, 1)], 1)


def concrete(logit: Tensor, noise: Tensor, tau: float | Tensor) -> Tensor:
    """A binary concrete sample, the soft b, for `noise` = logit u with u uniform on (0, 1)
    (Maddison et al. 2017)."""
    return torch.sigmoid((logit + noise) / tau)
