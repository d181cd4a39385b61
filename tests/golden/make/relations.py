"""Golden numbers of FedAMP, HeurFedAMP, SFL and MOCHA.

Symbols: w [N, P] are the clients' latest models, u their mixed models; xi and A [N, N]
are mixing weights; L is the number of layers of SFL's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from cases import Result, load, main, round_results, upload_results
from clients import KINDS, begin, pull


def square_distances(rows: np.ndarray) -> np.ndarray:
    """The squared distances [N, N] between rows [N, P]."""
    return ((rows[:, None] - rows[None]) ** 2).sum(2)


# FedAMP -----------------------------------------------------------------------------


def fedamp_weights(w, has_model, alpha=1.0, sigma=1.0) -> np.ndarray:
    """FedAMP (Huang et al. 2021) with the attraction A(z) = 1 - exp(-z / sigma).

    `xi_ij = alpha A'(|w_i - w_j|^2) = alpha / sigma exp(-|w_i - w_j|^2 / sigma)`, and
    xi_ii is the rest of 1. Others that weigh more than 1 are scaled down to 1.
    """
    xi = alpha / sigma * np.exp(-square_distances(w) / sigma)
    np.fill_diagonal(xi, 0.0)
    xi = xi * np.outer(has_model, has_model)
    for row in xi:
        row /= max(row.sum(), 1.0)
    return xi + np.diag(1 - xi.sum(1))


def heurfedamp_weights(w, has_model, sigma=5.0, xi_self=None) -> np.ndarray:
    """HeurFedAMP (Huang et al. 2021): `xi_ij ~ exp(sigma cos(w_i, w_j))`.

    The client's own weight is xi_self, or 1 / N; a cosine with a model of zeros is 0.
    """
    n = len(w)
    own = 1 / n if xi_self is None else xi_self
    xi = np.zeros((n, n))
    for i in range(n):
        others = [j for j in range(n) if j != i and has_model[i] and has_model[j]]
        power = np.array([np.exp(sigma * cosine(w[i], w[j])) for j in others])
        xi[i, others] = (1 - own) * power / power.sum()
        xi[i, i] = 1 - xi[i].sum()
    return xi


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two vectors; 0 where one of them is 0."""
    length = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / length) if length > 0 else 0.0


def cosines(w: np.ndarray) -> np.ndarray:
    """The cosines [n, n] of the rows of w."""
    return np.array([[cosine(a, b) for b in w] for a in w])


def amp_server(weights_of, pairs, compare):
    """The server of FedAMP or HeurFedAMP, by its function for the weights.

    It keeps what `compare` finds for all models by the name `pairs`. A client receives
    `u_i = sum_j xi_ij w_j`. The latest models of absent clients stay, and a client that
    never took part mixes its first model alone.
    """

    def program(rounds, x0, n, start, **options):
        w = np.tile(x0, (n, 1))
        last = np.zeros(n)
        xi = np.eye(n)
        for cohort, up in rounds:
            down = {"u": xi[cohort.ids] @ w}
            w[cohort.ids] = up["w"]
            last[cohort.ids] = cohort.round
            xi = weights_of(w, last > 0, **options)
            state = {"w": w, "last": last, "weights": xi}
            state[pairs] = compare(w)
            yield {"down": down, "state": state, "report": {"weights": xi}}

    return program


def fedamp(clients, cohorts, start, lam, alpha) -> Iterator[dict]:
    """FedAMP's clients (Algorithm 1): `F_i(w) + lam / (2 alpha) |w - u_i|^2`."""
    w0 = np.tile(clients.w0, (clients.n, 1))
    latest = begin(start, "server", w=w0)["w"]
    own = begin(start, "clients", w=w0)["w"]
    xi = np.eye(clients.n)
    has_model = np.zeros(clients.n)
    for cohort in cohorts:
        u = xi @ latest
        for i in cohort:
            own[i] = clients.train(i, own[i], pull(lam / alpha, u[i]))
            latest[i] = own[i]
            has_model[i] = 1
        xi = fedamp_weights(latest, has_model, alpha)
        yield {
            "server": {"w": latest},
            "clients": {"w": own},
            "evaluation": {"loss": clients.losses(own)},
        }


# SFL --------------------------------------------------------------------------------


def sfl_weights(
    w, has_model, k=5, layers=3, s=1.0, adjacency=None, **options
) -> np.ndarray:
    """SFL's weights `s A^L + (1 - s) I` (Chen et al. 2022).

    The rows of A sum to 1. Without `adjacency`, A joins a client to itself and to its k
    nearest models; of equally near ones the lower number counts first. A client without
    a model gets the mean of the others' rows.
    """
    n = len(w)
    A = np.eye(n)
    if adjacency is not None:
        A = np.array(adjacency)
        A = A + np.diag(A.diagonal() == 0)
    else:
        distance = square_distances(w)
        for i in range(n):
            others = [j for j in range(n) if j != i and has_model[j]]
            others.sort(key=lambda j, of_i=distance[i]: (of_i[j], j))
            A[i, others[:k]] = 1.0
    A = A * has_model
    for i in range(n):
        A[i] = A[i] / A[i].sum() if A[i].sum() > 0 else np.eye(n)[i]
    weights = s * np.linalg.matrix_power(A, layers) + (1 - s) * np.eye(n)
    if any(has_model):
        weights[~has_model] = weights[has_model].mean(0)
    return weights


def sfl_server(rounds, x0, n, start, **options) -> Iterator[dict]:
    """SFL's server.

    u_i is row i of the smoothed models, x is the mean of the rows.
    """
    w = np.tile(x0, (n, 1))
    has_model = np.zeros(n, bool)
    weights = np.eye(n)
    for cohort, up in rounds:
        smoothed = weights @ w
        x = np.tile(smoothed.mean(0), (len(cohort.ids), 1))
        down = {"u": smoothed[cohort.ids], "x": x}
        w[cohort.ids] = up["w"]
        has_model[cohort.ids] = True
        weights = sfl_weights(w, has_model, **options)
        found = {"weights": weights}
        yield {"down": down, "state": found, "report": found}


def sfl(clients, cohorts, start, lam1, lam2) -> Iterator[dict]:
    """SFL's clients.

    A client minimises `F_i(w) + lam1 / 2 |w - u_i|^2 + lam2 / 2 |w - x|^2`. It starts
    from the readout x. In the first round the weights are still I.
    """
    latest = begin(start, "server", w=np.tile(clients.w0, (clients.n, 1)))["w"]
    (cohort,) = cohorts
    x = latest.mean(0)
    u = latest.copy()

    for i in cohort:
        to_u = pull(lam1, u[i])
        to_x = pull(lam2, x)
        latest[i] = clients.train(i, x, add(to_u, to_x))
    yield {"server": {"w": latest}}


def add(first: Callable, second: Callable) -> Callable:
    """The sum of two functions."""
    return lambda w: first(w) + second(w)


# MOCHA ------------------------------------------------------------------------------


def mocha(clients, cohorts, start, lam, **options) -> Iterator[dict]:
    """MOCHA in primal form (Smith et al. 2017) with a fixed relation Omega.

    Client t descends `F_t(w_t) + lam / 2 tr(W^T Omega W)` in its own row of W, the
    others' rows frozen: the regulariser's gradient is `lam sum_j Omega_tj w_j`.
    """
    W = np.tile(clients.w0, (clients.n, 1))
    omega = begin(start, "server", omega=np.eye(clients.n))["omega"]

    def regulariser(t, frozen):
        rest = omega[t] @ frozen - omega[t, t] * frozen[t]
        return lambda w: lam * (omega[t, t] * w + rest)

    for cohort in cohorts:
        frozen = W.copy()
        for t in cohort:
            W[t] = clients.train(t, frozen[t], regulariser(t, frozen))
        yield {"server": {"w": W}, "clients": {"w": W}}


def task_relations(W, delta) -> tuple[np.ndarray, np.ndarray]:
    """MOCHA's relations (Smith et al. 2017) Sigma and Omega of models W [N, P].

    `Sigma = (W W^T)^(1/2) / trace`, with eigenvalues of W W^T of at least 1e-8, and
    `Omega = ((1 - delta) Sigma + delta I / N)^-1`.
    """
    W = np.array(W, float)
    values, vectors = np.linalg.eigh(W @ W.T)
    root = vectors @ np.diag(np.sqrt(np.maximum(values, 1e-8))) @ vectors.T
    sigma = root / np.trace(root)
    mixed = (1 - delta) * sigma + delta * np.eye(len(W)) / len(W)
    return sigma, np.linalg.inv(mixed)


ROUNDS = {"fedamp": fedamp, "sfl": sfl, "mocha": mocha}
UPLOADS = {
    "fedamp": amp_server(fedamp_weights, "sqdist", square_distances),
    "heurfedamp": amp_server(heurfedamp_weights, "cosine", cosines),
    "sfl": sfl_server,
}


def family_results() -> Iterator[Result]:
    """The numbers of mocha.json, and of FedAMP in feddwa_family.json."""
    for i, case in enumerate(load("mocha")):
        sigma, omega = task_relations(case["w"], case["delta"])
        yield Result("mocha", (i, "sigma"), sigma.tolist(), 1e-7, 5e-10)
        yield Result("mocha", (i, "omega"), omega.tolist(), case["rtol"], 5e-10)
    key = "C2_fedamp_unstable_alpha"
    w = np.array(load("feddwa_family")[key]["W"])
    xi = np.exp(-square_distances(w))
    np.fill_diagonal(xi, 0.0)
    xi = xi + np.diag(1 - xi.sum(1))  # alpha = sigma = 1, nothing scaled down
    yield Result("feddwa_family", (key, "xi"), xi.tolist())
    yield Result("feddwa_family", (key, "U"), (xi @ w).tolist())


def results() -> Iterator[Result]:
    """The numbers of this family in four golden files."""
    yield from round_results(ROUNDS, KINDS)
    yield from upload_results(UPLOADS)
    yield from family_results()


if __name__ == "__main__":
    main(results())
