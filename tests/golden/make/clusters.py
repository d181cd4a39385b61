"""Golden numbers of IFCA / HypCluster and of Clustered FL.

Symbols: there are k models x_j; pick_i is the model of client i; a cluster is a leaf of
a tree of nodes, and cos(i, j) are cosines of updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from cases import Result, load, main, round_results, upload_results
from clients import KINDS, begin
from fedavg import adam_step

FLOAT_BYTES = 8
PICK_BYTES = 1


# IFCA -------------------------------------------------------------------------------


def ifca(clients, cohorts, start, k, shared="") -> Iterator[dict]:
    """IFCA (Ghosh et al. 2020, Algorithm 1, option II: averages of models).

    A client picks the model of the least loss on its samples, `j = argmin_j F_i(x_j)`,
    and trains it. Each model becomes the mean of its clients', by their samples; a
    model without clients stays. With shared="weight" (section 5) the first of two
    parameters is the mean of all clients' changes, in every model.

    The bytes of a client are k models down (shared numbers once), and a model and its
    pick up.
    """
    x = begin(start, "server", x=np.zeros((k, 2)))["x"]
    common = np.zeros(x.shape[1], bool)
    common[0] = shared == "weight"
    pick = np.zeros(clients.n, int)
    down = FLOAT_BYTES * (k * np.sum(~common) + np.sum(common))
    up = FLOAT_BYTES * x.shape[1] + PICK_BYTES
    for cohort in cohorts:
        changes = {}
        for i in cohort:
            pick[i] = np.argmin([clients.loss(i, row) for row in x])
            changes[i] = clients.train(i, x[pick[i]]) - x[pick[i]]
        new = x.copy()
        for j in range(k):
            members = [i for i in cohort if pick[i] == j]
            if members:
                mean = clients.shares(members) @ [changes[i] for i in members]
                new[j] = x[j] + mean
        of_all = clients.shares(cohort) @ [changes[i] for i in cohort]
        new[:, common] = (x + of_all)[:, common]
        x = new
        yield {
            "server": {"x": x, "pick": pick},
            "report": {"rows": cohort, "cluster": pick[cohort]},
            "done": {"bytes_down": len(cohort) * down, "bytes_up": len(cohort) * up},
        }


def ifca_server(
    rounds, x0, n, start, k, optimizer="sgd", bias_correction="none"
) -> Iterator[dict]:
    """IFCA's server with an optimizer for each model (see fedavg.py), step size 1.

    A model that no client picked stays, and so does the state of its optimizer.
    """
    x = x0.copy()
    m = np.zeros_like(x)
    v = np.full_like(x, 1e-6)  # tau^2, tau = 1e-3
    t = np.zeros(k)
    keras = bias_correction == "keras"
    for cohort, up in rounds:
        for j in range(k):
            members = up["pick"] == j
            if not members.any():
                continue
            weight = cohort.sizes[members] / cohort.sizes[members].sum()
            D = weight @ up["delta"][members]
            t[j] += 1
            if optimizer == "sgd":
                step = D
            elif optimizer == "ema":
                m[j] = 0.9 * m[j] + 0.1 * D
                step = m[j]
            else:
                m[j], v[j], step = adam_step(
                    m[j], v[j], D, t[j], "adam", 0.9, 0.99, 1e-3, keras
                )
            x[j] = x[j] + step
        yield {"state": {"x": x, "m": m, "v": v, "t": t}}


# Clustered FL -----------------------------------------------------------------------


def cosines(delta: np.ndarray) -> np.ndarray:
    """The cosines [m, m] of updates."""
    unit = delta / np.linalg.norm(delta, axis=1)[:, None]
    return unit @ unit.T


def bipartition(similarity: np.ndarray, linkage: str) -> tuple[list[int], list[int]]:
    """The two halves of agglomerative clustering, the first client's half first.

    The two groups of the largest similarity merge until two are left. Groups are as
    similar as their least similar pair ("complete"), or as their most similar one
    ("single", the optimal bipartition of Sattler et al. 2021).
    """
    of_pairs = np.min if linkage == "complete" else np.max

    def likeness(pair):
        one, other = pair
        return of_pairs(similarity[one][:, other])

    groups = [[i] for i in range(len(similarity))]
    while len(groups) > 2:
        one, other = max(combinations(groups, 2), key=likeness)
        groups.remove(one)
        groups.remove(other)
        groups.append(sorted(one + other))
    first, second = sorted(groups)
    return first, second


def splits(delta: np.ndarray, eps1: float) -> bool:
    """The condition `|mean delta| < eps1 max |delta|` for more than two clients.

    It is the one of `relative`, in place of the paper's two absolute bounds.
    """
    longest = np.linalg.norm(delta, axis=1).max()
    return len(delta) > 2 and np.linalg.norm(delta.mean(0)) < eps1 * longest


def clustered_fl(rounds, x0, n, start, relative, first, eps1=0.4) -> Iterator[dict]:
    """Clustered FL (Sattler et al. 2021, Algorithm 2) with a tree of clusters.

    A leaf of the tree is a cluster. Where it splits, its node keeps its model, and each
    half becomes a new leaf, whose model moves by the half's mean update. A client that
    was absent then is still in the old node. Its next update moves no model; it takes
    the client to the half whose mean update has the larger cosine with its own.
    """
    x = [np.array(row) for row in np.atleast_2d(start.get("x", x0))]
    child = [-1] * len(x)
    way = [np.zeros_like(x0)] * len(x)  # the mean update with which a half began
    cluster = start.get("cluster", np.zeros(n)).astype(int)
    for cohort, up in rounds:
        down = {"x": np.array([x[cluster[i]] for i in cohort.ids])}
        of_client = dict(zip(cohort.ids, up["delta"], strict=True))
        members = {j: [] for j in range(len(x)) if child[j] < 0}
        for i in cohort.ids:
            node = cluster[i]
            if child[node] < 0:
                members[node].append(i)
            else:
                halves = [child[node], child[node] + 1]
                by_cosine = [cosine(of_client[i], way[half]) for half in halves]
                cluster[i] = halves[int(np.argmax(by_cosine))]
        for leaf, ids in members.items():
            delta = np.array([of_client[i] for i in ids])
            if cohort.round > first and ids and splits(delta, eps1):
                child[leaf] = len(x)
                for half in bipartition(cosines(delta), "complete"):
                    mean = delta[half].mean(0)
                    cluster[[ids[s] for s in half]] = len(x)
                    x.append(x[leaf] + mean)
                    way.append(mean)
                    child.append(-1)
            elif ids:
                x[leaf] = x[leaf] + delta.mean(0)
        state = {"x": np.array(x), "cluster": cluster, "child": child}
        yield {"down": down, "state": state}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two vectors."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def bipartition_results() -> Iterator[Result]:
    """Clustered FL's rows of feddwa_family.json."""
    file = "feddwa_family"
    stored = load(file)
    delta = np.array(stored["G1_cfl"]["dW"])
    angle = np.deg2rad(stored["G2_cfl_single_vs_complete"]["angles_deg"])
    on_circle = np.stack([np.cos(angle), np.sin(angle)], 1)
    name = "G1_cfl"
    yield Result(file, (name, "cos"), cosines(delta).tolist())
    longest = float(np.linalg.norm(delta, axis=1).max())
    yield Result(file, (name, "max_norm"), longest)
    yield Result(file, (name, "mean_norm"), float(np.linalg.norm(delta.mean(0))))
    for linkage in ("single", "complete"):
        halves = bipartition(cosines(delta), linkage)
        yield Result(file, (name, f"bip_{linkage}"), [*halves])
    yield Result(file, (name, "alpha_cross_max"), largest_across(delta, halves))
    name = "G2_cfl_single_vs_complete"
    for linkage in ("single", "complete"):
        halves = bipartition(cosines(on_circle), linkage)
        across = largest_across(on_circle, halves)
        yield Result(file, (name, f"bip_{linkage}"), [*halves])
        yield Result(file, (name, f"alpha_cross_{linkage}"), across)


def largest_across(delta: np.ndarray, halves: tuple[list[int], list[int]]) -> float:
    """The largest cosine of two updates of different halves."""
    first, second = halves
    return float(cosines(delta)[first][:, second].max())


ROUNDS = {"hypcluster": ifca}
UPLOADS = {"hypcluster": ifca_server, "clustered_fl": clustered_fl}


def results() -> Iterator[Result]:
    """The numbers of this family in three golden files."""
    yield from round_results(ROUNDS, KINDS)
    yield from upload_results(UPLOADS)
    yield from bipartition_results()


if __name__ == "__main__":
    main(results())
