"""Golden numbers of APFL, FedALA, FedFomo and L2C.

Symbols: x or w is the global model, v a personal one; alpha is APFL's share of v; W are
FedALA's weights and theta the clients' models; a are FedFomo's gains, or the logits of
L2C's weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, load, main, round_results, upload_results
from clients import KINDS, begin

FAMILY = "feddwa_family"


# APFL -------------------------------------------------------------------------------


def apfl(
    clients,
    cohorts,
    start,
    alpha_lr=None,
    alpha_decay=0.0,
    adaptive=True,
    mix="weights",
) -> Iterator[dict]:
    """APFL (Deng et al. 2020, Algorithm 1).

    A client's mixture is `m = alpha v + (1 - alpha) w`. A step takes, with the old
    values throughout,

    - `w <- w - lr grad f(w)`
    - `v <- v - lr alpha grad f(m)`
    - at a round's first step `alpha <- alpha - alpha_lr (<v - w, grad f(m)> + decay
      alpha)`, within [0, 1]

    The scores of a model that is linear in its parameters mix as the models do, so both
    kinds of `mix` agree here.
    """
    alpha_lr = clients.lr if alpha_lr is None else alpha_lr
    x = clients.w0
    state = begin(
        start,
        "clients",
        v=np.tile(x, (clients.n, 1)),
        alpha=np.full((clients.n, 1), 0.5),
    )
    v = state["v"]
    alpha = state["alpha"]
    for cohort in cohorts:
        models = []
        for i in cohort:
            w = x
            velocity_w = np.zeros_like(x)
            velocity_v = np.zeros_like(x)
            for step, batch in enumerate(clients.batches(i)):
                a = alpha[i, 0]
                by_mixture = clients.gradient(i, a * v[i] + (1 - a) * w, batch)
                slope_w = clients.gradient(i, w, batch) + clients.weight_decay * w
                slope_v = a * by_mixture + clients.weight_decay * v[i]
                if step == 0 and adaptive:
                    slope = (v[i] - w) @ by_mixture + alpha_decay * a
                    alpha[i] = np.clip(a - alpha_lr * slope, 0, 1)
                velocity_w = clients.momentum * velocity_w + slope_w
                velocity_v = clients.momentum * velocity_v + slope_v
                w = w - clients.lr * velocity_w
                v[i] = v[i] - clients.lr * velocity_v
            models.append(w)
        x = np.mean(models, 0)
        yield {"server": {"x": x}, "clients": {"v": v, "alpha": alpha}}


# FedALA -----------------------------------------------------------------------------


class AdaptiveStart:
    """FedALA's weights W of a client and their learning, on all of its samples.

    W is for the last Q = 1 or 2 parameters of a weight and a bias; all samples are one
    minibatch.
    """

    def __init__(self, layers, eta, window, threshold) -> None:
        self.columns = layers or 2
        self.eta = eta
        self.window = window
        self.threshold = threshold

    def start(self, theta, x, W) -> np.ndarray:
        """The start of Eq. 4.

        It is `theta + (x - theta) W` in the last Q columns, and x in the others.
        """
        mixed = x.copy()
        upper = slice(len(x) - self.columns, None)
        mixed[upper] = theta[upper] + (x - theta)[upper] * W
        return mixed

    def learn(self, clients, i, theta, x, W, begun) -> tuple[np.ndarray, bool]:
        """W after one epoch of Eq. 5; the first time, until the losses settle.

        `W <- clip(W - eta grad f(start) (x - theta), 0, 1)`. The first time goes on
        until the last `window` losses have a standard deviation below the threshold,
        after more than `window` epochs. Where x is theta, there is nothing to learn.
        """
        gap = (x - theta)[-self.columns :]
        if not gap.any():
            return W, begun
        losses = []
        for _ in range(100):
            model = self.start(theta, x, W)
            losses.append(clients.loss(i, model))
            slope = clients.gradient(i, model)[-self.columns :] * gap
            W = np.clip(W - self.eta * slope, 0, 1)
            settled = np.std(losses[-self.window :]) < self.threshold
            if begun or (settled and len(losses) > self.window):
                break
        return W, True


def fedala(
    clients, cohorts, start, eta, window, threshold, sample, layers=None
) -> Iterator[dict]:
    """FedALA (Zhang et al. 2023, Algorithm 1): local training from an adapted start.

    A client is evaluated with the start from the newest x, for which W is learned in
    the same way and thrown away.
    """
    rule = AdaptiveStart(layers, eta, window, threshold)
    x = begin(start, "server", x=clients.w0)["x"]
    theta = begin(start, "clients", theta=np.tile(x, (clients.n, 1)))["theta"]
    W = np.ones((clients.n, rule.columns))
    begun = [False] * clients.n
    for cohort in cohorts:
        for i in cohort:
            W[i], begun[i] = rule.learn(clients, i, theta[i], x, W[i], begun[i])
            theta[i] = clients.train(i, rule.start(theta[i], x, W[i]))
        x = clients.shares(cohort) @ theta[cohort]
        evaluated = []
        for i in range(clients.n):
            newest, _ = rule.learn(clients, i, theta[i], x, W[i], begun[i])
            evaluated.append(rule.start(theta[i], x, newest))
        yield {
            "server": {"x": x},
            "clients": {"theta": theta, "W": W},
            "evaluation": {"loss": clients.losses(evaluated)},
        }


# FedFomo ----------------------------------------------------------------------------


def fedfomo_server(rounds, x0, n, start) -> Iterator[dict]:
    """FedFomo's server: affinities p are sums of the gains.

    The weights [N, N] are the shares of this round's positive gains.
    """
    p = np.zeros((n, n))
    for cohort, up in rounds:
        weights = np.zeros((n, n))
        for i, gains in zip(cohort.ids, up["a"], strict=True):
            p[i] += gains
            positive = np.maximum(gains, 0)
            if positive.any():
                weights[i] = positive / positive.sum()
        yield {"state": {"p": p, "weights": weights}}


def fedfomo_client(previous, candidates, before, after) -> tuple[np.ndarray, list]:
    """FedFomo's mixture and gains (Zhang et al. 2021).

    `a_j = (L(old) - L(w_j)) / |w_j - old|`, then `w = old + sum_j (w_j - old) max(a_j,
    0) / sum max(a, 0)`. The last candidate is the client's own trained model, from
    which it goes on where nothing is better. A candidate at distance 0, or whose loss
    is not finite, has a gain of 0.
    """
    old = np.array(previous)
    gains = []
    for w, loss in zip(np.array(candidates), after, strict=True):
        distance = np.linalg.norm(w - old)
        usable = distance > 0 and np.isfinite(loss)
        gain = (before - loss) / distance if usable else 0.0
        gains.append(gain)
    positive = np.maximum(gains, 0)
    if not positive.any():
        return np.array(candidates[-1]), gains
    share = positive / positive.sum()
    return old + share @ (np.array(candidates) - old), gains


def fedfomo_results() -> Iterator[Result]:
    """The rows "fedfomo" of feddwa_family.json.

    The last number of a row is the uploaded gains, of which the client's own is 0; some
    rows list only the first of them.
    """
    for i, (*given, _, raw) in enumerate(load(FAMILY)["fedfomo"]):
        w, gains = fedfomo_client(*given)
        uploaded = [*gains[:-1], 0.0]
        yield Result(FAMILY, ("fedfomo", i, 4), w.tolist())
        yield Result(FAMILY, ("fedfomo", i, 5), uploaded[: len(raw)], 1e-8, 1e-10)


# L2C --------------------------------------------------------------------------------


def l2c_results() -> Iterator[Result]:
    """L2C (Li et al. 2022): one mix of updates, one step of the logits.

    - `theta <- theta - sum_j w_j Delta_j`, w the softmax of alpha
    - `dL / d alpha_j = -w_j (g . Delta_j - sum_m w_m g . Delta_m)`, g the gradient on
      the validation samples, here `theta - center`
    - Adam's first step of 0.1, with a weight decay of 0.01 in the gradient
    """
    name = "E1_l2c"
    case = load(FAMILY)[name]
    alpha = np.array(case["alpha"])
    Delta = np.array(case["Delta"])
    w = softmax(alpha)
    theta = case["theta_old"] - w @ Delta
    g = theta - case["val_center"]
    products = Delta @ g
    slope = -w * (products - w @ products)
    decayed = slope + 0.01 * alpha
    # In the first step the corrected moments are the gradient and its square.
    stepped = alpha - 0.1 * decayed / (np.abs(decayed) + 1e-8)
    found = {
        "w": w,
        "theta_new": theta,
        "val_grad": g,
        "dL_dalpha": slope,
        "alpha_after_Adam_step": stepped,
        "w_after": softmax(stepped),
    }
    for key, value in found.items():
        yield Result(FAMILY, (name, key), value.tolist(), 1e-8, 1e-10)


def softmax(logits: np.ndarray) -> np.ndarray:
    """The softmax of some logits."""
    power = np.exp(logits - logits.max())
    return power / power.sum()


ROUNDS = {"apfl": apfl, "fedala": fedala}
UPLOADS = {"fedfomo": fedfomo_server}


def results() -> Iterator[Result]:
    """The numbers of this family in three golden files."""
    yield from round_results(ROUNDS, KINDS)
    yield from upload_results(UPLOADS)
    yield from fedfomo_results()
    yield from l2c_results()


if __name__ == "__main__":
    main(results())
