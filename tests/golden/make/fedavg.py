"""Golden numbers of server optimizers, q-FedAvg, and clients that are pulled.

Symbols: x is the server's model, w a client's, v and theta personal ones; p_i are the
clients' shares in a mean; D is the mean of the updates.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, main, round_results, upload_results
from clients import KINDS, begin, pull

# Servers, by their uploads ------------------------------------------------------


def momentum_server(
    rounds, x0, n, start, optimizer="heavy_ball", beta1=0.9, server_lr=1.0
) -> Iterator[dict]:
    """FedAvgM (Hsu et al. 2019): a server with momentum.

    - The paper's form, heavy ball, is `m <- beta m + D; x <- x + lr m`.
    - Nesterov's form steps along `D + beta m`.
    - The exponential mean (Motley) is `m <- beta m + (1 - beta) D`.
    """
    x = x0
    m = np.zeros_like(x0)
    for cohort, up in rounds:
        D = cohort.sizes @ up["delta"] / cohort.sizes.sum()
        share = 1 - beta1 if optimizer == "ema" else 1.0
        m = beta1 * m + share * D
        step = D + beta1 * m if optimizer == "nesterov" else m
        x = x + server_lr * step
        yield {"state": {"x": x, "m": m}}


def adam_step(m, v, D, t, kind, beta1, beta2, tau, keras):
    """FedOpt (Reddi et al. 2021, Algorithm 2): the new m and v, and the step.

    Keras multiplies the step of update t by `sqrt(1 - beta2^t) / (1 - beta1^t)`.
    """
    m = beta1 * m + (1 - beta1) * D
    if kind == "adam":
        v = beta2 * v + (1 - beta2) * D**2
    elif kind == "yogi":
        v = v - (1 - beta2) * D**2 * np.sign(v - D**2)
    else:
        v = v + D**2
    scale = np.sqrt(1 - beta2**t) / (1 - beta1**t) if keras else 1.0
    return m, v, scale * m / (np.sqrt(v) + tau)


def adaptive_server(kind: str, default_beta1: float):
    """The program of FedAdam, FedYogi or FedAdagrad, by the kind's name."""

    def program(rounds, x0, n, start, v0=None, bias_correction="none"):
        tau = 1e-3
        x = x0
        m = np.zeros_like(x0)
        v0 = tau**2 if v0 is None else v0
        v = np.full_like(x0, v0)
        keras = bias_correction == "keras"
        for t, (cohort, up) in enumerate(rounds, 1):
            D = cohort.sizes @ up["delta"] / cohort.sizes.sum()
            m, v, step = adam_step(m, v, D, t, kind, default_beta1, 0.99, tau, keras)
            x = x + 0.1 * step
            yield {"state": {"x": x}}

    return program


# Rounds of clients --------------------------------------------------------------


def qfedavg(clients, cohorts, start, q, weighting) -> Iterator[dict]:
    """q-FedAvg (Li et al. 2020, Algorithm 2), L = 1 / lr.

    - `Delta w_k = L (x - w_k)`
    - `Delta_k = F_k^q Delta w_k`
    - `h_k = q F_k^(q-1) |Delta w_k|^2 + L F_k^q`
    - `x <- x - sum_k Delta_k / sum_k h_k`

    The package keeps F at least 1e-6, and adds 1e-10 to it as the authors' code does.
    """
    x = clients.w0
    L = 1 / clients.lr
    for cohort in cohorts:
        numerator = np.zeros_like(x)
        denominator = 0.0
        for k in cohort:
            F = max(clients.loss(k, x) + 1e-10, 1e-6)
            change = L * (x - clients.train(k, x))
            numerator = numerator + F**q * change
            denominator += q * F ** (q - 1) * (change @ change) + L * F**q
        x = x - numerator / denominator
        yield {"server": {"x": x}}


def fedprox(clients, cohorts, start, mu) -> Iterator[dict]:
    """FedProx (Li et al. 2020, Algorithm 2).

    A client minimises `F_k(w) + mu / 2 |w - x|^2`. The server's mean weighs clients by
    their samples, as in the authors' code.
    """
    x = clients.w0
    for cohort in cohorts:
        models = [clients.train(k, x, pull(mu, x)) for k in cohort]
        x = clients.shares(cohort) @ np.array(models)
        yield {"server": {"x": x}}


def mrmtl(clients, cohorts, start, lam) -> Iterator[dict]:
    """MR-MTL (Liu et al. 2022): personal models are pulled to their mean.

    A step is `v <- v - lr (grad f(v) + lam (v - x))`. The server adds the mean change
    of the personal models v to x.
    """
    x = clients.w0
    v = np.tile(x, (clients.n, 1))
    for cohort in cohorts:
        changes = []
        for k in cohort:
            new = clients.train(k, v[k], pull(lam, x))
            changes.append(new - v[k])
            v[k] = new
        x = x + clients.shares(cohort) @ np.array(changes)
        yield {"server": {"x": x}, "clients": {"v": v}}


def ditto(clients, cohorts, start, lam) -> Iterator[dict]:
    """Ditto (Li et al. 2021, Algorithm 1): FedAvg for x, and v pulled towards x.

    `v_k <- v_k - lr (grad F_k(v_k) + lam (v_k - x))`, x as the client received it.
    """
    x = clients.w0
    v = begin(start, "clients", v=np.tile(x, (clients.n, 1)))["v"]
    for cohort in cohorts:
        models = [clients.train(k, x) for k in cohort]
        for k in cohort:
            v[k] = clients.train(k, v[k], pull(lam, x))
        x = clients.shares(cohort) @ np.array(models)
        yield {"server": {"x": x}, "clients": {"v": v}}


def pfedme(
    clients, cohorts, start, lam, personal_lr, inner_steps, server_lr=1.0
) -> Iterator[dict]:
    """Method pFedMe (Dinh et al. 2020, Algorithm 1): theta nears a proximal point of w.

    Each minibatch takes `inner_steps` steps `theta <- theta - personal_lr (grad
    f(theta) + lam (theta - w))`, which approach the minimum of `f(theta) + lam / 2
    |theta - w|^2`. Then `w <- w - lr lam (w - theta)`. The server takes `x <- (1 -
    beta) x + beta sum_k p_k w_k` with beta = server_lr. theta goes on from where the
    last minibatch left it.
    """
    x = clients.w0
    theta = np.tile(x, (clients.n, 1))
    for cohort in cohorts:
        models = []
        for k in cohort:
            w = x
            for batch in clients.batches(k):
                for _ in range(inner_steps):
                    slope = clients.gradient(k, theta[k], batch)
                    slope = slope + lam * (theta[k] - w)
                    theta[k] = theta[k] - personal_lr * slope
                w = w - clients.lr * lam * (w - theta[k])
            models.append(w)
        mean = clients.shares(cohort) @ np.array(models)
        x = (1 - server_lr) * x + server_lr * mean
        yield {
            "server": {"x": x},
            "clients": {"theta": theta},
            "evaluation": {"loss": clients.losses(theta)},
        }


ROUNDS = {
    "qfedavg": qfedavg,
    "fedprox": fedprox,
    "mrmtl": mrmtl,
    "ditto": ditto,
    "pfedme": pfedme,
}
UPLOADS = {
    "fedavgm": momentum_server,
    "fedadam": adaptive_server("adam", 0.9),
    "fedyogi": adaptive_server("yogi", 0.9),
    "fedadagrad": adaptive_server("adagrad", 0.0),
}


def results() -> Iterator[Result]:
    """The numbers of this family in rounds.json and uploads.json."""
    yield from round_results(ROUNDS, KINDS)
    yield from upload_results(UPLOADS)


if __name__ == "__main__":
    main(results())
