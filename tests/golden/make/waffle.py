"""Golden numbers of SCAFFOLD, WAFFLE and Weight Erosion.

Symbols: x is the server's model, c and c_i are control variates, y_i a client's trained
model; K are local steps; d [N] are the distances of updates to the target's; Omega and
Psi say how global a round is; a [N] are WAFFLE's weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from cases import Result, load, main, round_results, upload_results
from clients import KINDS, begin

HISTORY = 2  # earlier rounds that WAFFLE averages its weights with


# SCAFFOLD -------------------------------------------------------------------------


def local_scaffold(clients, i, x, c, c_i, option):
    """SCAFFOLD's local training (Karimireddy et al. 2020, Algorithm 1).

    Each step takes `g_i(y) - c_i + c`, weight decay counting as part of g_i. The new
    control variate is

    - option I: `g_i(x)`, the whole gradient;
    - option II: `c_i - c + (x - y) / (K lr)`; with momentum m, K is the sum of `(1 -
      m^k) / (1 - m)` over k = 1 .. K, since the first steps count that often;
    - "mean_grad": the mean of the minibatch gradients, which option II is without
      momentum.

    Returns the trained y and the new c_i.
    """
    m = clients.momentum
    decay = clients.weight_decay
    y = x
    velocity = np.zeros_like(x)
    slopes = []
    for batch in clients.batches(i):
        slope = clients.gradient(i, y, batch) + decay * y
        slopes.append(slope)
        velocity = m * velocity + slope - c_i + c
        y = y - clients.lr * velocity
    if option == "I":
        return y, clients.gradient(i, x) + decay * x
    if option == "mean_grad":
        return y, np.mean(slopes, 0)
    K = sum((1 - m**k) / (1 - m) for k in range(1, len(slopes) + 1))
    return y, c_i - c + (x - y) / (K * clients.lr)


def scaffold(clients, cohorts, start, option) -> Iterator[dict]:
    """SCAFFOLD's server (Algorithm 1), with a step size of 1.

    `x <- x + mean_S (y_i - x)` and `c <- c + |S| / N mean_S (c_i' - c_i)`.
    """
    zeros = np.zeros_like(clients.w0)
    server = begin(start, "server", x=clients.w0, c=zeros)
    x = server["x"]
    c = server["c"]
    c_i = begin(start, "clients", c=np.tile(zeros, (clients.n, 1)))["c"]
    for cohort in cohorts:
        updates = []
        controls = []
        for i in cohort:
            y, new = local_scaffold(clients, i, x, c, c_i[i], option)
            updates.append(y - x)
            controls.append(new - c_i[i])
            c_i[i] = new
        x = x + np.mean(updates, 0)
        c = c + len(cohort) / clients.n * np.mean(controls, 0)
        yield {"server": {"x": x, "c": c}, "clients": {"c": c_i}}


# WAFFLE's weights -------------------------------------------------------------------


def omega(round_number, rounds, do=3.2) -> float:
    """WAFFLE's Omega (Beaussart et al. 2021, Eq. 4).

    It is `1 / (1 + exp(do (2 round / R - 1)))`.
    """
    z = do * (round_number / (rounds / 2) - 1)
    if z > 700:  # exp(z) would overflow
        return 0.0
    return 1 / (1 + math.exp(z))


def distance_weights(d, target, omega, psi=None) -> np.ndarray:
    """WAFFLE's weights by distances (Algorithm 1, lines 3 to 6 and 9).

    These are Eqs. 2 and 3. With h and l the largest and the smallest distance of the
    others, the target's own distance counts as `d* = l (1 - (h - l) / h (1 - Omega))`,
    and a client weighs `max(0, Psi - (d_i - d*) / (h - min d))`, divided by the sum;
    the minimum includes d*. The paper leaves open two cases:

    - All others are equally far: this is the limit of h -> l. There all others are
      nearest, and `(l - d*) / (h - min d)` tends to `(1 - Omega) / (2 - Omega)`, or for
      Omega > 1 to `1 - Omega`.
    - All distances are 0: all weigh alike.
    """
    psi = omega if psi is None else psi
    d = np.maximum(np.array(d, float), 0)
    others = np.delete(d, target)
    h = others.max()
    l = others.min()
    if h == 0:
        return np.full(len(d), 1 / len(d))
    if h == l:
        ratio = (1 - omega) / (2 - omega) if omega <= 1 else 1 - omega
        place = np.full(len(d), ratio)
        place[target] = 0.0
    else:
        d[target] = l * (1 - (h - l) / h * (1 - omega))
        place = (d - d[target]) / (h - d.min())
    raw = np.maximum(psi - place, 0)
    if raw.sum() == 0:
        raw[target] = 1.0
    return raw / raw.sum()


def round_weights(d, target, round_number, rounds, do=3.2) -> np.ndarray:
    """The weights of one round.

    From 0.95 R on the target is alone (Algorithm 1, lines 7 and 8).
    """
    if 20 * round_number >= 19 * rounds:
        return np.eye(len(d))[target]
    return distance_weights(d, target, omega(round_number, rounds, do))


class Smoothing:
    """The mean of this round's weights and the last two (Algorithm 1, line 10).

    The history begins at 1 / N.
    """

    def __init__(self, n: int) -> None:
        self.history = [np.full(n, 1 / n)] * HISTORY

    def mean(self, weights: np.ndarray) -> np.ndarray:
        """The smoothed weights of a round; remembers the round's own ones."""
        smooth = (weights + sum(self.history)) / (1 + HISTORY)
        self.history = [weights, *self.history[:-1]]
        return smooth


def waffle(clients, cohorts, start, option, control_agg) -> Iterator[dict]:
    """WAFFLE (Algorithm 2) for client 0, of ten rounds, with all clients in each.

    SCAFFOLD with weights a for the means: `x <- x + sum a_i (y_i - x)`, and
    `c <- c + sum a_i (c_i' - c_i)` as printed ("literal"), or `c = sum a_i c_i'`
    ("recompute").
    """
    x = clients.w0
    c = np.zeros_like(x)
    c_i = np.zeros((clients.n, len(x)))
    smoothing = Smoothing(clients.n)
    for round_number, cohort in enumerate(cohorts, 1):
        y = np.empty_like(c_i)
        new = np.empty_like(c_i)
        for i in cohort:
            y[i], new[i] = local_scaffold(clients, i, x, c, c_i[i], option)
        delta = y - x
        d = np.linalg.norm(delta - delta[0], axis=1)
        a = smoothing.mean(round_weights(d, 0, round_number, 10))
        x = x + a @ delta
        literal = control_agg == "literal"
        c = c + a @ (new - c_i) if literal else a @ new
        c_i = new
        yield {
            "server": {"x": x, "c": c},
            "report": {"weights": a},
            "clients": {"c": c_i},
        }


def waffle_server(rounds, x0, n, start, target) -> Iterator[dict]:
    """WAFFLE's weights and history [N, 2] by the uploads of all clients."""
    smoothing = Smoothing(n)
    for cohort, up in rounds:
        d = np.linalg.norm(up["delta"] - up["delta"][target], axis=1)
        weights = round_weights(d, target, cohort.round, cohort.rounds)
        a = smoothing.mean(weights)
        history = np.stack(smoothing.history, 1)
        yield {"state": {"history": history}, "report": {"weights": a}}


# Weight Erosion ---------------------------------------------------------------------


def weight_erosion(rounds, x0, n, start, p_d=None, p_s=0.0) -> Iterator[dict]:
    """Weight Erosion (Grimberg et al. 2020, Algorithm 1) for client 0.

    - `alpha_i <- max(0, alpha_i - (1 + p_s passes_i) p_d |g_i - g_0| / |g_0|)`, from 1
    - `x <- x + sum alpha_i g_i / sum alpha_i`, g_i being the updates

    Where the target's update is 0, a different update is infinitely far; with p_d = 0
    nothing is taken away. Without p_d the package calibrates it by the distances that
    are finite and not 0. The one case without p_d has no such distance: p_d is 0 there.
    """
    x = x0
    alpha = begin({"server": start}, "server", alpha=np.ones(n))["alpha"]
    for cohort, up in rounds:
        g = up["delta"]
        distance = np.linalg.norm(g - g[cohort.ids.index(0)], axis=1)
        length = np.linalg.norm(g[cohort.ids.index(0)])
        for row, i in enumerate(cohort.ids):
            if distance[row] > 0 and p_d:
                relative = distance[row] / length if length > 0 else math.inf
                penalty = (1 + p_s * up["passes"][row]) * p_d * relative
                alpha[i] = max(0.0, alpha[i] - penalty)
        weight = alpha[cohort.ids]
        x = x + weight @ g / weight.sum()
        yield {"state": {"alpha": alpha, "x": x}}


ROUNDS = {"scaffold": scaffold, "waffle": waffle}
UPLOADS = {"waffle": waffle_server, "weight_erosion": weight_erosion}


def waffle_family() -> Iterator[Result]:
    """The numbers of waffle_family.json."""
    stored = load("waffle_family")
    for i, (options, round_number, rounds, _) in enumerate(stored["omega"]):
        value = omega(round_number, rounds, **options)
        yield Result("waffle_family", ("omega", i, 3), value, 0, 5e-11)
    for i, (d, target, of_round, psi, _) in enumerate(stored["weights"]):
        value = distance_weights(d, target, of_round, psi).tolist()
        yield Result("waffle_family", ("weights", i, 4), value, 0, 1.1e-10)
    for i, (do, rows) in enumerate(stored["sequences"]):
        by_round = constant_distances([0, 1, 2, 4], 20, do)
        for j, (round_number, *_) in enumerate(rows):
            value = [round_number, *by_round[round_number - 1]]
            yield Result("waffle_family", ("sequences", i, 1, j), value, 0, 1e-9)


def constant_distances(d, rounds, do) -> list[list]:
    """Each round's own and smoothed weights at distances d that stay the same."""
    smoothing = Smoothing(len(d))
    found = []
    for round_number in range(1, rounds + 1):
        weights = round_weights(d, 0, round_number, rounds, do)
        found.append([weights.tolist(), smoothing.mean(weights).tolist()])
    return found


def results() -> Iterator[Result]:
    """The numbers of this family in three golden files."""
    yield from round_results(ROUNDS, KINDS)
    yield from upload_results(UPLOADS)
    yield from waffle_family()


if __name__ == "__main__":
    main(results())
