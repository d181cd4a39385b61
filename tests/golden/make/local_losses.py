"""Golden numbers of MOON, FedNTD, FedDyn and FedNova.

Symbols: x is the server's model, w a client's in training, last a client's model after
its last round; z are features; p_i the clients' shares in a mean.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, main, round_results
from clients import KINDS, TwoLayers, slope_of

# Losses that compare a model with the shared one ----------------------------------


def cosine(a, b):
    """The cosines [n] of the rows of a and b [n, H]."""
    return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


def contrast(w, x, last, samples, T):
    """MOON's mean term (Li et al. 2021) of samples, at a model w."""
    z = TwoLayers.features(w, samples)
    near = np.exp(cosine(z, TwoLayers.features(x, samples)) / T)
    far = np.exp(cosine(z, TwoLayers.features(last, samples)) / T)
    return -np.log(near / (near + far)).mean()


def moon(clients, cohorts, start, mu, temperature) -> Iterator[dict]:
    """MOON (Li et al. 2021); the server is FedAvg's."""
    x = clients.w0
    last = np.tile(x, (clients.n, 1))
    for cohort in cohorts:
        models = []
        for k in cohort:
            samples, _ = clients.samples[k]

            def loss(w, x=x, last=last[k], samples=samples):
                return contrast(w, x, last, samples, temperature)

            def term(w, loss=loss):
                return mu * slope_of(loss, w)

            models.append(clients.train(k, x, term))
        last[list(cohort)] = models
        x = clients.shares(cohort) @ np.array(models)
        yield {"server": {"x": x}, "clients": {"last": last}}


def not_true(w, samples, labels, T):
    """Probabilities [n, C - 1] of the classes that are not a sample's own."""
    scores = TwoLayers.scores(w, samples) / T
    rows = [np.delete(row, label) for row, label in zip(scores, labels, strict=True)]
    powers = np.exp(np.array(rows))
    return powers / powers.sum(1, keepdims=True)


def fedntd(clients, cohorts, start, beta, temperature) -> Iterator[dict]:
    """FedNTD (Lee et al. 2022): `beta T^2 KL(q_x | q)` is added to a client's loss."""
    x = clients.w0
    T = temperature
    for cohort in cohorts:
        models = []
        for k in cohort:
            samples, labels = clients.samples[k]
            target = not_true(x, samples, labels, T)

            def divergence(w, samples=samples, labels=labels, target=target):
                q = not_true(w, samples, labels, T)
                return (target * np.log(target / q)).sum(1).mean()

            def term(w, divergence=divergence):
                return beta * T**2 * slope_of(divergence, w)

            models.append(clients.train(k, x, term))
        x = clients.shares(cohort) @ np.array(models)
        yield {"server": {"x": x}}


# Servers that know more than the mean ----------------------------------------------


def feddyn(clients, cohorts, start, alpha, weighting="uniform") -> Iterator[dict]:
    """FedDyn (Acar et al. 2021).

    A client's loss is `F_k(w) - <g_k, w> + alpha / 2 |w - x|^2`, and then `g_k <- g_k -
    alpha (w_k - x)`. The server takes `h <- h - alpha / N sum_S (w_k - x)` and `x <-
    mean_S w_k - h / alpha`.
    """
    x = clients.w0
    h = np.zeros_like(x)
    g = np.zeros((clients.n, len(x)))
    for cohort in cohorts:
        models = []
        for k in cohort:
            w = clients.train(k, x, lambda w, x=x, k=k: alpha * (w - x) - g[k])
            models.append(w)
            g[k] = g[k] - alpha * (w - x)
        h = h - alpha / clients.n * sum(w - x for w in models)
        x = clients.shares(cohort, weighting) @ np.array(models) - h / alpha
        yield {"server": {"x": x, "h": h}, "clients": {"g": g}}


def fednova(clients, cohorts, start, weighting="samples") -> Iterator[dict]:
    """FedNova (Wang et al. 2020).

    The gradient of step k of t is in the update with the factors of all later steps'
    momentum, `1 + m + ... + m^(t - k)`; |a_i| is their sum. With `d_i = (x - w_i) / (lr
    |a_i|)`: `x <- x - lr sum_i p_i |a_i| sum_i p_i d_i`.
    """
    x = clients.w0
    for cohort in cohorts:
        sums = []
        directions = []
        for k in cohort:
            t = len(clients.batches(k))
            factors = [
                sum(clients.momentum**j for j in range(t - step)) for step in range(t)
            ]
            sums.append(sum(factors))
            w = clients.train(k, x)
            directions.append((x - w) / (clients.lr * sum(factors)))
        p = clients.shares(cohort, weighting)
        x = x - clients.lr * (p @ np.array(sums)) * (p @ np.array(directions))
        yield {"server": {"x": x}}


ROUNDS = {"moon": moon, "fedntd": fedntd, "feddyn": feddyn, "fednova": fednova}


def results() -> Iterator[Result]:
    """The numbers of this family in rounds.json."""
    yield from round_results(ROUNDS, KINDS)


if __name__ == "__main__":
    main(results())
