"""The Indian buffet process over a layer's F factors, and the beliefs that a client holds about which of them it uses.

Prior: v_k ~ Beta(alpha, 1), b_k ~ Bernoulli(v_1 ... v_k), so later factors are rarer. Beliefs, mean field: b_k ~ Bernoulli(sigmoid(l_k)),
v_k ~ Kumaraswamy(c_k, d_k), whose distribution function is 1 - (1 - v^c)^d. All functions are elementwise or run along the last axis,
[..., F], in the inputs' dtype, and are differentiable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EULER = 0.5772156649015329
NEAR_ONE = -1e-6  # a product of v's stays this far below 1 (in its logarithm), where the divergence would be infinite


def prior_mean(alpha: float, factors: int) -> Tensor:
    """The prior's probability of each factor, (alpha / (alpha + 1))^k, within [.001, .999]: float64 [F]."""
    k = torch.arange(1, factors + 1, dtype=torch.float64)
    return ((alpha / (alpha + 1)) ** k).clamp(0.001, 0.999)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact to rounding at both ends, and its gradient too."""
    far = torch.log1p(-torch.exp(x.clamp(max=-math.log(2))))
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), far)


def log_v(u: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """log v of a Kumaraswamy(c, d) sample v = (1 - (1 - u)^(1/d))^(1/c), u uniform on (0, 1)."""
    return log1mexp(torch.log1p(-u) / d) / c


def harmonic(d: Tensor) -> Tensor:
    """H_d = psi(d + 1) + Euler's constant; E[log v] = -H_d / c."""
    return torch.digamma(d + 1) + EULER


def kl_v(c: Tensor, d: Tensor, alpha: float | Tensor, beta: float = 1.0, terms: int = 100) -> Tensor:
    """KL(Kumaraswamy(c, d) || Beta(alpha, beta)); closed for the prior's beta = 1, else a series of `terms` (Nalisnick and Smyth 2017)."""
    exact = -(1 - alpha / c) * harmonic(d) + torch.log(c * d / alpha) - (d - 1) / d
    if beta == 1:
        return exact
    a, b = torch.as_tensor(alpha, dtype=c.dtype), torch.as_tensor(beta, dtype=c.dtype)
    m = torch.arange(1, terms + 1, dtype=c.dtype)
    x = m / c[..., None]
    series = torch.exp(torch.lgamma(x) + torch.lgamma(d)[..., None] - torch.lgamma(x + d[..., None])) / (m + (c * d)[..., None])
    log_beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
    return exact + torch.log(a) + log_beta + (beta - 1) * d * series.sum(-1)


def kl_b(logit: Tensor, log_p: Tensor) -> Tensor:
    """KL(Bernoulli(sigmoid(logit)) || Bernoulli(exp(log_p))), log_p < 0."""
    pi, log_p = logit.sigmoid(), log_p.clamp(max=NEAR_ONE)
    logsigmoid = torch.nn.functional.logsigmoid
    return pi * (logsigmoid(logit) - log_p) + (1 - pi) * (logsigmoid(-logit) - log1mexp(log_p))


def kl_slope(logit: Tensor, log_c: Tensor, log_d: Tensor, log_rest: Tensor, alpha: Tensor, sizes: list[int]) -> Tensor:
    """The gradient of kl_b + kl_v in (logit, log c, log d), [s, 3 F], written out: autograd takes three times as long.

    Arguments are [s, F], layers of `sizes` factors side by side; `log_rest` is log(1 - u) of the draws of v.
    """
    pi, c, d = logit.sigmoid(), log_c.exp(), log_d.exp()
    s = log_rest / d
    log_v = log1mexp(s) / c
    log_p = along(log_v, sizes).clamp_(max=NEAR_ONE)
    logit_p = log_p - log1mexp(log_p)
    by_p = ((1 - pi) * logit_p.exp() - pi) * (log_p < NEAR_ONE)  # at the bound nothing moves
    by_v = torch.cat([g.flip(1).cumsum(1).flip(1) for g in by_p.split(sizes, 1)], 1)  # v_k is part of every later p
    rest = 1 - alpha / c
    by_c = 1 - alpha * harmonic(d) / c - by_v * log_v
    by_d = 1 - 1 / d - rest * d * torch.polygamma(1, d + 1) - by_v * s / (c * torch.expm1(s)) * s.exp()
    return torch.cat([pi * (1 - pi) * (logit - logit_p), by_c, by_d], 1)


def along(values: Tensor, sizes: list[int]) -> Tensor:
    """Sums over the factors up to each, layer by layer: [s, F]."""
    return torch.cat([part.cumsum(1) for part in values.split(sizes, 1)], 1) if len(sizes) > 1 else values.cumsum(1)


def expected_kl_b(logit: Tensor, c: Tensor, d: Tensor, terms: int = 1000) -> Tensor:
    """E_v of `kl_b` without sampling: a series of `terms`, the first factor by quadrature; the others' series is slow where d is small
    (.728 for .739 at c = 120, d = .3)."""
    pi, logsigmoid = logit.sigmoid(), torch.nn.functional.logsigmoid
    log_p = -(harmonic(d) / c).cumsum(-1)
    log_not = expected_log_not(c, d, terms)
    first = _first_log_not(c[..., :1], d[..., :1])
    log_not = torch.cat([first, log_not[..., 1:]], -1)
    return pi * (logsigmoid(logit) - log_p) + (1 - pi) * (logsigmoid(-logit) - log_not)


def expected_log_not(c: Tensor, d: Tensor, terms: int) -> Tensor:
    """E[log(1 - v_1 ... v_k)] = -sum_m (1 / m) prod_{j <= k} d_j B(1 + m / c_j, d_j), cut off after `terms`."""
    m = torch.arange(1, terms + 1, dtype=c.dtype, device=c.device)
    x, d = 1 + m / c[..., None], d[..., None]  # [..., F, M]
    moments = torch.log(d) + torch.lgamma(x) + torch.lgamma(d) - torch.lgamma(x + d)
    return -(moments.cumsum(-2).exp() / m).sum(-1)


def _first_log_not(c: Tensor, d: Tensor) -> Tensor:
    """E[log(1 - v)] of one Kumaraswamy variable, by the trapezoidal rule in logit u, which converges exponentially."""
    z = torch.linspace(-36, 36, 1441, dtype=c.dtype, device=c.device)
    weight = torch.sigmoid(z) * torch.sigmoid(-z) * (z[1] - z[0])
    log_rest = torch.nn.functional.logsigmoid(-z)  # log(1 - u)
    v = log1mexp(log_rest / d[..., None]) / c[..., None]
    return (log1mexp(v.clamp(max=-1e-30)) * weight).sum(-1)


def concrete(logit: Tensor, noise: Tensor, tau: float | Tensor) -> Tensor:
    """A binary concrete sample, the soft b, for `noise` = logit u with u uniform on (0, 1) (Maddison et al. 2017)."""
    return torch.sigmoid((logit + noise) / tau)


def concrete_ratio(logit: Tensor, log_p: Tensor, noise: Tensor, tau: float | Tensor) -> Tensor:
    """log q - log p of a concrete sample before its sigmoid (Mehta et al. 2021): one sample of the divergence of two concrete variables,
    whatever tau, which is more than `kl_b`, that of the labels they stand for (.256 for .184 at pi = .7, p = .4).

    `noise` is logit u, as in `concrete`.
    """
    y = (logit + noise) / tau
    log_p = log_p.clamp(max=NEAR_ONE)

    def density(location: Tensor) -> Tensor:
        x = location - tau * y
        return x - 2 * torch.nn.functional.softplus(x)

    return density(logit) - density(log_p - log1mexp(log_p))
