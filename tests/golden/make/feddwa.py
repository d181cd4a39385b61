"""Golden numbers of FedDWA and of its quadratic programme.

Symbols: w_j are the trained models, g_i a client's guidance, D_ij = |g_i - w_j|^2; p_ij
are the mixing weights, k of them in a row; x_i is a client's next model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from cases import Result, load, main, round_results, upload_results
from clients import KINDS

# The weights ------------------------------------------------------------------------


def nearest(distances: np.ndarray, k: int) -> list[int]:
    """The k smallest distances' positions, nearest first; ties by position."""
    return sorted(range(len(distances)), key=lambda j: (distances[j], j))[:k]


def inverse_weights(distances: np.ndarray, power: float = 1.0) -> np.ndarray:
    """FedDWA (Liu et al. 2023), Eq. 15: `p_j ~ 1 / D_j^power`, with sum 1.

    Distances of 0 share all the weight. Weights are computed relative to the smallest
    distance, so that no power overflows.
    """
    smallest = distances.min()
    if smallest == 0:
        raw = (distances == 0).astype(float)
        if power == 0:
            raw = np.ones(len(distances))
    else:
        raw = (smallest / distances) ** power
    return raw / raw.sum()


def simplex_weights(points: np.ndarray, guide: np.ndarray) -> np.ndarray:
    """FedDWA's weights by Eq. 12.

    They are the p >= 0 with sum 1 that minimise `|guide - sum p_j w_j|^2`.

    Every set of models is tried: the best p with sum 1 on that set is a linear system,
    of whose solutions the shortest is taken. Among the sets whose p is not negative the
    least objective wins, and of equal objectives the shortest p.
    """
    count = len(points)
    candidates = []
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            p = np.zeros(count)
            p[list(support)] = best_on_plane(points[list(support)], guide)
            if p.min() > -1e-12:
                objective = ((guide - p @ points) ** 2).sum()
                candidates.append((round(objective, 13), p @ p, p))
    return min(candidates, key=lambda c: c[:2])[2].clip(min=0)


def best_on_plane(points: np.ndarray, guide: np.ndarray) -> np.ndarray:
    """The shortest p with sum 1 that minimises `|guide - sum p_j w_j|^2`.

    With p = 1 / n + B z, B an orthonormal base of the vectors of sum 0, it is a least
    squares problem in z.
    """
    n = len(points)
    even = np.full(n, 1 / n)
    base = np.linalg.svd(np.ones((1, n)))[2][1:].T  # [n, n - 1]
    z = np.linalg.lstsq(points.T @ base, guide - even @ points, rcond=1e-10)[0]
    return even + base @ z


def equation_15(distances, models, guide) -> np.ndarray:
    """The weights of Eq. 15 by the distances alone, for `mix`."""
    return inverse_weights(distances)


# Servers ----------------------------------------------------------------------------


def scaled_guidance(g: np.ndarray, w: np.ndarray, stride: float) -> np.ndarray:
    """Guidance at `stride` times the distance from w_i to the nearest other model.

    A client whose guidance is its own model, or that is alone, keeps its guidance.
    """
    scaled = g.copy()
    for i in range(len(w)):
        to_others = [np.linalg.norm(w[i] - w[j]) for j in range(len(w)) if j != i]
        length = np.linalg.norm(g[i] - w[i])
        if to_others and length > 0:
            scaled[i] = w[i] + stride * min(to_others) / length * (g[i] - w[i])
    return scaled


def mix(w, g, k, weights) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Each client's k nearest models, their weights, and the mixtures (Eq. 8).

    `weights(rows, models, guide)` gives the weights of the nearest models, by the
    squared distances and the models.
    """
    index = []
    p = []
    x = []
    for guide in g:
        distances = ((guide - w) ** 2).sum(1)
        near = nearest(distances, k)
        row = weights(distances[near], w[near], guide)
        index.append(near)
        p.append(row)
        x.append(row @ w[near])
    return index, np.array(p), np.array(x)


def feddwa_server(
    rounds, x0, n, start, k=5, power=1.0, stride=None, guidance="epoch"
) -> Iterator[dict]:
    """FedDWA's server (Algorithm 1), by Eqs. 8 and 15.

    With guidance="previous" (App. C.6, case ii) g_i is the client's last upload, and in
    its first round the present one. A client that never took part is sent x0; the
    package keeps zeros in its rows.
    """

    def weights(distances, models, guide):
        return inverse_weights(distances, power)

    x = np.zeros((n, len(x0)))
    last = np.zeros((n, len(x0)))
    seen = np.zeros(n, bool)
    for cohort, up in rounds:
        ids = cohort.ids
        down = {"x": np.where(seen[ids, None], x[ids], x0)}
        w = up["w"]
        g = up.get("g")
        if guidance == "previous":
            g = np.where(seen[ids, None], last[ids], w)
        if stride is not None:
            g = scaled_guidance(g, w, stride)
        index, p, x[ids] = mix(w, g, k, weights)
        last[ids] = w
        seen[ids] = True
        numbers = np.array(ids)[index]
        report = {"rows": ids, "index": numbers, "weight": p}
        yield {"down": down, "state": {"x": x, "last": last}, "report": report}


def feddwa_qp_server(rounds, x0, n, start, k=5, ridge=0.0) -> Iterator[dict]:
    """FedDWA's server with Eq. 12 solved on the k nearest models.

    The package's ridge is too small to show in any case, but selects the shortest p.
    """

    def weights(distances, models, guide):
        return simplex_weights(models, guide)

    for _, up in rounds:
        index, p, x = mix(up["w"], up["g"], k, weights)
        yield {"state": {"x": x}, "report": {"index": index, "weight": p}}


# Rounds of clients --------------------------------------------------------------


def feddwa(
    clients, cohorts, start, k, guidance="epoch", lookahead=1, serve="mix"
) -> Iterator[dict]:
    """FedDWA (Algorithm 1) where all samples of a client are one minibatch.

    Then an epoch, a minibatch and a step along the whole gradient (Eq. 16) are the same
    step, so all kinds of guidance agree.
    """
    x = np.tile(clients.w0, (clients.n, 1))
    for cohort in cohorts:
        w = np.array([clients.train(i, x[i]) for i in cohort])
        guides = []
        for i, trained in zip(cohort, w, strict=True):
            guides.append(ahead(clients, i, trained, lookahead))
        index, p, x[cohort] = mix(w, np.array(guides), k, equation_15)
        numbers = np.array(cohort)[index]
        evaluated = x
        if serve == "guidance":
            trained = [clients.train(i, x[i]) for i in range(clients.n)]
            evaluated = [ahead(clients, i, w, lookahead) for i, w in enumerate(trained)]
        yield {
            "report": {"rows": cohort, "index": numbers, "weight": p},
            "server": {"x": x},
            "evaluation": {"loss": clients.losses(evaluated)},
        }


def ahead(clients, i, w, steps) -> np.ndarray:
    """Client i's guidance: w after some more steps of local training."""
    return clients.train(i, w, epochs=steps)


ROUNDS = {"feddwa": feddwa}
UPLOADS = {"feddwa": feddwa_server, "feddwa_qp": feddwa_qp_server}


# feddwa_family.json -------------------------------------------------------------


def dense_weights(distances, k) -> list[float]:
    """Eq. 15 over the k nearest; 0 for the other models."""
    distances = np.array(distances)
    near = nearest(distances, k)
    row = np.zeros(len(distances))
    row[near] = inverse_weights(distances[near])
    return row.tolist()


def weight_results() -> Iterator[Result]:
    """Tables of weights, and the least value of Eq. 14, `1 / sum_j 1 / D_j`."""
    stored = load("feddwa_family")
    file = "feddwa_family"
    for i, (sqdist, k, _) in enumerate(stored["feddwa_weights"]):
        rows = [dense_weights(distances, k) for distances in sqdist]
        yield Result(file, ("feddwa_weights", i, 2), rows)
    basic = stored["A1_feddwa_basic"]
    W = np.array(basic["W"])
    G = np.array(basic["G"])
    D2 = ((G[:, None] - W[None]) ** 2).sum(2)
    yield Result(file, ("A1_feddwa_basic", "D2"), D2.tolist())
    least = (1 / (1 / D2).sum(1)).tolist()
    yield Result(file, ("A6_eq14_optimum", "opt_value"), least)


def guidance_results() -> Iterator[Result]:
    """Guidance by an epoch of minibatches or by a whole gradient (Eq. 16).

    Client i's loss is the mean of `(w - sample)^2 / 2`.
    """
    name = "A9_guidance_epoch_vs_fullgrad"
    case = load("feddwa_family")[name]
    eta = case["eta"]

    def epoch(w, batches):
        for batch in batches:
            w = w - eta * (w - np.mean(batch))
        return w

    w_hat = [epoch(case["w0"], batches) for batches in case["batches"]]
    g_epoch = [epoch(w, b) for w, b in zip(w_hat, case["batches"], strict=True)]
    g_fullgrad = []
    for w, batches in zip(w_hat, case["batches"], strict=True):
        g_fullgrad.append(w - eta * (w - np.mean(np.concatenate(batches))))
    found = {"w_hat": w_hat, "g_epoch": g_epoch, "g_fullgrad": g_fullgrad}
    for kind, guides in (("P_epoch", g_epoch), ("P_fullgrad", g_fullgrad)):
        distances = (np.array(guides)[:, None] - np.array(w_hat)) ** 2
        found[kind] = [inverse_weights(row).tolist() for row in distances]
    for key, value in found.items():
        yield Result("feddwa_family", (name, key), np.asarray(value).tolist())


def results() -> Iterator[Result]:
    """The numbers of this family in three golden files."""
    yield from round_results(ROUNDS, KINDS)
    yield from upload_results(UPLOADS)
    yield from weight_results()
    yield from guidance_results()


if __name__ == "__main__":
    main(results())
