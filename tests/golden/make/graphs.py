"""Golden numbers of pFedGraph and FedCAC.

Symbols: w [S, P] are the models that the cohort's S clients trained; p [S, S] are
mixing weights; d [S, S] dissimilarities; M [S, P] masks of critical parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from cases import Result, main, round_results
from clients import KINDS
from relations import cosine

# pFedGraph --------------------------------------------------------------------------


def quadratic_program(d: np.ndarray, share: np.ndarray, alpha: float) -> np.ndarray:
    """The p [S] of the simplex that minimises `d . p + alpha |p - share|^2`.

    It tries every set of positive numbers. Given the set, the minimum under `sum p = 1`
    solves linear equations: `2 alpha p_j + nu = 2 alpha share_j - d_j`.
    """
    best = np.inf, share
    size = len(d)
    for count in range(1, size + 1):
        for places in map(list, combinations(range(size), count)):
            matrix = np.zeros((count + 1, count + 1))
            matrix[:count, :count] = 2 * alpha * np.eye(count)
            matrix[:count, count] = matrix[count, :count] = 1
            right = np.append(2 * alpha * share[places] - d[places], 1)
            p = np.zeros(size)
            p[places] = np.linalg.solve(matrix, right)[:count]
            if (p >= 0).all():
                best = min(
                    best,
                    (d @ p + alpha * ((p - share) ** 2).sum(), p),
                    key=lambda pair: pair[0],
                )
    return best[1]


def pfedgraph(clients, cohorts, start, alpha=0.8, lam=0.01) -> Iterator[dict]:
    """Rounds of pFedGraph (Ye et al. 2023).

    From round 2 on a client minimises `F_i(w) - lam sum_j p_ij cos(w, w_j)`. The
    gradient of cos(w, v) is `(v / |v| - cos(w, v) w / |w|) / |w|`.
    """
    w0 = clients.w0
    x = np.tile(w0, (clients.n, 1))
    collaborators: dict[int, list] = {i: [] for i in range(clients.n)}
    for cohort in cohorts:
        w = []
        for i in cohort:

            def away(w, of_i=tuple(collaborators[i])):
                length = np.linalg.norm(w)
                slope = np.zeros_like(w)
                for p, v in of_i:
                    toward = v / np.linalg.norm(v) - cosine(w, v) * w / length
                    slope -= lam * p * toward / length
                return slope

            w.append(clients.train(i, x[i], away))
        share = clients.shares(cohort)
        weight = []
        for row, i in enumerate(cohort):
            d = np.array([-cosine(w[row] - w0, v - w0) for v in w])
            p = quadratic_program(d, share, alpha)
            x[i] = p @ np.array(w)
            collaborators[i] = list(zip(p, w, strict=True))
            weight.append(p)
        r = [
            sum((p * v / np.linalg.norm(v) for p, v in pairs), np.zeros_like(w0))
            for pairs in collaborators.values()
        ]
        yield {"server": {"x": x, "r": r}, "report": {"weight": weight}}


# FedCAC -----------------------------------------------------------------------------


def fedcac(clients, cohorts, start, tau=0.5, beta=100.0) -> Iterator[dict]:
    """Rounds of FedCAC (Wu et al. 2023); the model is one tensor of parameters."""
    n, size = clients.n, len(clients.w0)
    common = clients.w0.copy()
    custom = np.zeros((n, size))
    critical = [set() for _ in range(n)]
    for number, cohort in enumerate(cohorts, 1):
        models = {}
        for i in cohort:
            begun = common.copy()
            for k in critical[i]:
                begun[k] = custom[i, k]
            models[i] = clients.train(i, begun)
            sensitivity = np.abs((models[i] - begun) * models[i])
            critical[i] = set(np.argsort(-sensitivity)[: int(tau * size)])
        overlap = {}
        for i in cohort:
            for j in cohort:
                apart = len(critical[i] ^ critical[j])
                overlap[i, j] = 1 - apart / (2 * len(critical[i]))
        others = [o for (i, j), o in overlap.items() if i != j]
        mean, most = np.mean(others), max(others)
        least = mean + number / beta * (most - mean)
        for i in cohort:
            group = [j for j in cohort if j == i or overlap[i, j] >= least]
            custom[i] = np.mean([models[j] for j in group], axis=0)
        common = clients.shares(cohort) @ np.array([models[i] for i in cohort])
        mask = [[int(k in of_i) for k in range(size)] for of_i in critical]
        yield {"server": {"x": common, "custom": custom, "mask": mask}}


ROUNDS = {"fedcac": fedcac, "pfedgraph": pfedgraph}


def results() -> Iterator[Result]:
    """The numbers of this family in rounds.json."""
    yield from round_results(ROUNDS, KINDS)


if __name__ == "__main__":
    main(results())
