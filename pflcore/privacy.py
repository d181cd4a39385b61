"""Privacy of a run with noise: the accountant of the sampled Gaussian mechanism.

A server that clips every update to a length C, adds the updates of the cohort, and adds
Gaussian noise of standard deviation z C to the sum hides whether any one client is in
the federation. In every round each client joins with probability q, independently of
all others (Poisson sampling). `epsilon` says how well T such rounds together hide a
client, and `noise_multiplier` how much noise a wanted epsilon needs.

It is computed by the Renyi differential privacy (RDP) of one round (Mironov, Talwar,
Zhang 2019: "Rényi differential privacy of the sampled Gaussian mechanism", section 3),
which adds up over the rounds, and turned into (epsilon, delta) by theorem 21 of Balle
et al. 2020 ("Hypothesis testing interpretations and Rényi differential privacy").

Symbols: C largest length of an update, z noise multiplier, q sampling rate, T rounds,
`order` the order alpha > 1 of the Renyi divergence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pflcore.check import Fraction, PositiveFloat, PositiveInt, checked, require

__all__ = ["epsilon", "noise_multiplier"]

F64 = npt.NDArray[np.float64]
# The orders over which epsilon is minimized: dense where much noise makes the least
# epsilon, and wide for little noise.
ORDERS = np.concatenate(
    [np.arange(1.1, 11, 0.1), np.arange(11, 65), 2.0 ** np.arange(7, 11)]
)

# The largest mean of an integrand, in units of the noise's standard deviation.
LARGEST_MEAN = 5000.0
LEAST_NOISE_MULTIPLIER = 0.01
MOST_NOISE = 1000.0


def rdp_of_round(noise_multiplier: float, sampling_rate: float, orders: F64) -> F64:
    """The Renyi differential privacy of one round, for each of `orders`.

    The outputs with and without the client are the densities `mu = (1 - q) N(0, z^2) +
    q N(1, z^2)` and `mu0 = N(0, z^2)`, and the divergence is `log E_{x ~ mu0} [(mu(x) /
    mu0(x))^order] / (order - 1)`. The trapezoidal rule computes the expectation: the
    integrand is analytic and vanishes at both ends, so that the rule's error falls
    exponentially with the number of points.
    """
    z = noise_multiplier
    q = sampling_rate
    log_moments = np.empty_like(orders)
    for position, order in enumerate(orders):
        # The integrand's mass lies between the mean 0 and the mean `order`.
        width = max(40.0, order / z + 40.0)
        points = np.linspace(-20.0, width - 20.0, int(32 * width))  # in units of z
        log_ratio = (2 * points * z - 1) / (2 * z * z)
        log_mixture = np.logaddexp(
            np.log1p(-q) if q < 1 else -np.inf, np.log(q) + log_ratio
        )
        exponent = order * log_mixture - points**2 / 2
        largest = exponent.max()
        total = np.exp(exponent - largest).sum() * (points[1] - points[0])
        log_moments[position] = largest + np.log(total / np.sqrt(2 * np.pi))
    return np.maximum(log_moments, 0.0) / (orders - 1)


@checked
def epsilon(
    noise_multiplier: PositiveFloat,
    sampling_rate: Fraction,
    rounds: PositiveInt,
    delta: PositiveFloat,
) -> float:
    """The epsilon of (epsilon, delta)-differential privacy of whole clients.

    Two federations are neighbours where one of them has one client more. For every
    event, its probability with one federation is at most `e^epsilon` times that with
    the other, plus `delta`.

    Args:
        noise_multiplier: z, the standard deviation of the noise on the sum of the
            updates, in units of the largest length C of an update.
        sampling_rate: q, the probability with which each client joins a round,
            independently of the others. With 1 every client joins every round.
        rounds: T, the number of rounds. Void rounds count, too.
        delta: Must be below 1; usual is less than one over the number of clients.

    Returns:
        The least epsilon over many orders of the Renyi divergence: an upper bound, as
        accountants of this kind give.
    """
    require(delta < 1, "delta", "a number between 0 and 1, both excluded", delta)
    # With little noise the least epsilon is that of a small order; a large one would
    # take a wide range of points.
    orders = ORDERS[max(ORDERS[1], LARGEST_MEAN * noise_multiplier) >= ORDERS]
    rdp = rounds * rdp_of_round(noise_multiplier, sampling_rate, orders)
    log_terms = (np.log(delta) + np.log(orders)) / (orders - 1)
    bounds = rdp - log_terms + np.log1p(-1 / orders)
    return float(max(0.0, np.nanmin(bounds)))


@checked
def noise_multiplier(
    epsilon: PositiveFloat,
    sampling_rate: Fraction,
    rounds: PositiveInt,
    delta: PositiveFloat,
) -> float:
    """The least noise multiplier, to three digits, whose epsilon is not larger.

    It is at least 0.01, less than which hides nothing.

    Args:
        epsilon: The largest epsilon that is allowed.
        sampling_rate: q, see the function `epsilon`.
        rounds: T, the number of rounds.
        delta: See the function `epsilon`.

    Raises:
        ValueError: No noise multiplier up to 1,000 is enough.
    """
    low = 0.0
    high = LEAST_NOISE_MULTIPLIER
    while _epsilon(high, sampling_rate, rounds, delta) > epsilon:
        low = high
        expected = f"one that a noise multiplier of at most {MOST_NOISE:g} reaches"
        require(low < MOST_NOISE, "epsilon", expected, epsilon)
        high = min(2 * high, MOST_NOISE)
    while low and high - low > 0.001 * high:
        middle = (low + high) / 2
        if _epsilon(middle, sampling_rate, rounds, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


# `epsilon` under another name, because an argument of `noise_multiplier` hides it.
_epsilon = epsilon
