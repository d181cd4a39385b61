"""Golden numbers of methods that share features: FedProto, FedPAC, FedAS and FedDBE.

The model is a linear layer of one input and H = 2 outputs, tanh, and a linear head of C
classes; the loss is the cross entropy. Its parameters are, in this order: the layer's
weight [H] and bias [H] (the body), the head's weight [C, H] and bias [C].

Symbols: w is a client's model; z [n, H] are the features of a client's samples, y [n]
their labels; all samples of a client are one minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from cases import Result, main, round_results
from clients import Clients
from feddwa import simplex_weights

H = 2
BODY = 2 * H  # columns of the body


class TanhModel:
    """The features, scores, losses and gradients of the model."""

    @staticmethod
    def features(w: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Features [n, H] of samples x [n]."""
        return np.tanh(x[:, None] * w[:H] + w[H:BODY])

    @staticmethod
    def scores(w: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Scores [n, C] of features z [n, H]."""
        classes = (len(w) - BODY) // (H + 1)
        head = w[BODY : BODY + classes * H].reshape(classes, H)
        return z @ head.T + w[BODY + classes * H :]

    @staticmethod
    def cross_entropy(scores: np.ndarray, y: np.ndarray) -> float:
        """The mean cross entropy of scores [n, C]."""
        largest = scores.max(1, keepdims=True)
        log_sum = np.log(np.exp(scores - largest).sum(1)) + largest[:, 0]
        return float((log_sum - scores[np.arange(len(y)), y]).mean())

    @staticmethod
    def gradient(
        w: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        offset: np.ndarray | float = 0.0,
        slope_of_features: Callable[[np.ndarray], np.ndarray] = np.zeros_like,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The gradient by w of the loss with an offset of features, and by the offset.

        `slope_of_features(z)` [n, H] is the gradient of a further term by z.
        """
        z = TanhModel.features(w, x)
        seen = z + offset
        scores = TanhModel.scores(w, seen)
        classes = scores.shape[1]
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        by_scores = (p - np.eye(classes)[y]) / len(y)
        head = w[BODY : BODY + classes * H].reshape(classes, H)
        by_seen = by_scores @ head
        slopes = [(by_scores.T @ seen).ravel(), by_scores.sum(0)]
        by_layer = (by_seen + slope_of_features(z)) * (1 - z**2)
        body = [(by_layer * x[:, None]).sum(0), by_layer.sum(0)]
        return np.concatenate([*body, *slopes]), by_seen.sum(0)


def classed(clients, w0, lr=0.1, epochs=1) -> Clients:
    """Clients of the model above with samples (x, y)."""
    samples = [(np.array(x, float), np.array(y, int)) for x, y in clients]
    return Clients(TanhModel, samples, w0, lr, epochs)


def class_means(z: np.ndarray, y: np.ndarray, classes: int) -> tuple:
    """Mean features [C, H] of each class, zeros for none, and the counts [C]."""
    counts = np.bincount(y, minlength=classes)
    means = np.zeros((classes, z.shape[1]))
    for c in range(classes):
        if counts[c]:
            means[c] = z[y == c].mean(0)
    return means, counts


class Prototypes:
    """The server's prototypes, of the classes that some client has shown."""

    def __init__(self, classes: int, weighting: str) -> None:
        self.rows = np.zeros((classes, H))
        self.known = np.zeros(classes)
        self.weighting = weighting

    def slope(self, lam: float, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """The gradient by z of `lam` times the mean squared distance to prototypes."""

        def by_features(z: np.ndarray) -> np.ndarray:
            away = (z - self.rows[y]) * self.known[y][:, None]
            return 2 * lam * away / z.size

        return by_features

    def update(self, found: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Takes the mean of the clients' class means, given with their counts."""
        for c in range(len(self.rows)):
            weights = [float(counts[c]) for _, counts in found]
            if self.weighting == "uniform":
                weights = [float(n > 0) for n in weights]
            if sum(weights):
                pairs = zip(weights, found, strict=True)
                total = sum(weight * means[c] for weight, (means, _) in pairs)
                self.rows[c] = total / sum(weights)
                self.known[c] = 1.0


def classes_of(clients: Clients) -> int:
    """The number of classes of the clients' model."""
    return (len(clients.w0) - BODY) // (H + 1)


def local_means(clients: Clients, i: int, w: np.ndarray) -> tuple:
    """The class means of client i's features by a model, and the counts."""
    x, y = clients.samples[i]
    return class_means(TanhModel.features(w, x), y, classes_of(clients))


def descend(
    clients: Clients,
    i: int,
    w: np.ndarray,
    columns: np.ndarray | float,
    slope: Callable[[np.ndarray], np.ndarray] = np.zeros_like,
    epochs: int | None = None,
) -> np.ndarray:
    """Client i's model after SGD of some columns on its loss and a term of features."""
    for _ in range(clients.epochs if epochs is None else epochs):
        gradient, _ = TanhModel.gradient(w, *clients.samples[i], 0.0, slope)
        w = w - clients.lr * columns * gradient
    return w


def fedproto(
    clients,
    cohorts,
    start,
    lam=1.0,
    prototype_weighting="samples",
    predict_by="prototypes",
) -> Iterator[dict]:
    """FedProto (Tan et al. 2022), Eqs. 3 to 6; scores are minus squared distances."""
    prototypes = Prototypes(classes_of(clients), prototype_weighting)
    w = np.tile(clients.w0, (clients.n, 1))
    for cohort in cohorts:
        found = []
        for i in cohort:
            slope = prototypes.slope(lam, clients.samples[i][1])
            w[i] = descend(clients, i, w[i], 1.0, slope)
            found.append(local_means(clients, i, w[i]))
        prototypes.update(found)
        losses = []
        for i, (x, y) in enumerate(clients.samples):
            z = TanhModel.features(w[i], x)
            scores = TanhModel.scores(w[i], z)
            if predict_by == "prototypes":
                scores = -((z[:, None] - prototypes.rows) ** 2).sum(2)
                lowest = scores.min(1, keepdims=True) - 100
                scores = np.where(prototypes.known > 0, scores, lowest)
            losses.append(TanhModel.cross_entropy(scores, y))
        yield {
            "server": {"prototypes": prototypes.rows.copy(), "known": prototypes.known},
            "clients": {"w": w.copy()},
            "evaluation": {"loss": losses},
        }


def fedpac(
    clients,
    cohorts,
    start,
    lam=1.0,
    prototype_weighting="samples",
    head_epochs=1,
    mix_heads=True,
) -> Iterator[dict]:
    """FedPAC (Xu et al. 2023): bodies by prototypes, heads by a simplex."""
    classes = classes_of(clients)
    columns = np.arange(len(clients.w0))
    is_head = columns >= BODY
    prototypes = Prototypes(classes, prototype_weighting)
    x = clients.w0[:BODY]
    heads = np.tile(clients.w0[BODY:], (clients.n, 1))
    for cohort in cohorts:
        found, statistics, variances = [], [], []
        trained = {}
        for i in cohort:
            w = np.concatenate([x, heads[i]])
            samples, y = clients.samples[i]
            z = TanhModel.features(w, samples)
            # The mean over samples of the features, in the rows of their classes.
            placed = np.eye(classes)[y][:, :, None] * z[:, None]  # [n, C, H]
            h = placed.mean(0)
            statistics.append(h)
            variances.append(((placed - h) ** 2).sum((1, 2)).mean() / len(y))
            w = descend(clients, i, w, is_head, epochs=head_epochs)
            trained[i] = descend(clients, i, w, ~is_head, prototypes.slope(lam, y))
            found.append(local_means(clients, i, trained[i]))
        rows = np.array([trained[i] for i in cohort])
        weights = np.eye(len(cohort))
        if mix_heads:
            # A variance is the squared length of a coordinate of the client's own, so
            # the best weights make the nearest point of a convex hull.
            own = np.diag(np.sqrt(variances))
            points = np.hstack([[h.ravel() for h in statistics], own])
            for k, point in enumerate(points):
                guide = np.concatenate([point[: classes * H], np.zeros(len(cohort))])
                weights[k] = simplex_weights(points, guide)
        heads[cohort] = weights @ rows[:, BODY:]
        x = clients.shares(cohort) @ rows[:, :BODY]
        prototypes.update(found)
        models = [np.concatenate([x, head]) for head in heads]
        yield {
            "server": {
                "x": x,
                "head": heads.copy(),
                "prototypes": prototypes.rows.copy(),
                "known": prototypes.known.copy(),
            },
            "evaluation": {"loss": losses_of(clients, models)},
            "report": {"weight": weights},
        }


def losses_of(clients: Clients, models, offsets=None) -> list[float]:
    """Each client's loss with a model, and an offset of its features."""
    losses = []
    for i, (x, y) in enumerate(clients.samples):
        z = TanhModel.features(models[i], x)
        if offsets is not None:
            z = z + offsets[i]
        losses.append(TanhModel.cross_entropy(TanhModel.scores(models[i], z), y))
    return losses


def fedas(clients, cohorts, start, align_epochs=1, align_lr=0.01) -> Iterator[dict]:
    """FedAS (Yang et al. 2024), by its authors' code: all samples are one minibatch."""
    is_body = np.arange(len(clients.w0)) < BODY
    x = clients.w0[:BODY]
    w = np.tile(clients.w0, (clients.n, 1))
    for cohort in cohorts:
        traces = []
        for i in cohort:
            samples, y = clients.samples[i]
            means, counts = local_means(clients, i, w[i])
            model = np.concatenate([x, w[i][BODY:]])
            for _ in range(align_epochs):
                z = TanhModel.features(model, samples)
                away = 2 * (z - means[y]) / (H * counts[y][:, None])
                by_layer = away * (1 - z**2)
                slope = [(by_layer * samples[:, None]).sum(0), by_layer.sum(0)]
                model = model.copy()
                model[is_body] -= align_lr * np.concatenate(slope)
            w[i] = descend(clients, i, model, 1.0)
            gradient, _ = TanhModel.gradient(w[i], samples, y)
            traces.append((gradient**2).sum())
        share = np.array(traces) / sum(traces)
        x = share @ w[cohort][:, :BODY]
        yield {
            "server": {"x": x},
            "clients": {"w": w.copy()},
            "evaluation": {"loss": losses_of(clients, w)},
            "report": {"weight": share, "weights": share},
        }


def mean_pull(strength: float, away: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The gradient by z [n, H] of a term whose gradient by mean(z) is `away` / H.

    Each sample's features are a part of 1 / n of their mean.
    """
    return lambda z: np.tile(strength * away / z.size, (len(z), 1))


def biased_training(clients, i, x, offset, common, kappa, momentum, moves) -> tuple:
    """Client i's model, offset and running mean after its training.

    Before there is a `common` mean, nothing pulls and the offset stays.
    """
    running = np.zeros(H)
    w = x
    samples, y = clients.samples[i]
    for _ in range(clients.epochs):
        mean = TanhModel.features(w, samples).mean(0)
        running = (1 - momentum) * running + momentum * mean
        pull = np.zeros_like
        if common is not None:
            pull = mean_pull(kappa * momentum, running - common)
        by_w, by_offset = TanhModel.gradient(w, samples, y, offset, pull)
        w = w - clients.lr * by_w
        if common is not None and moves:
            offset = offset - clients.lr * by_offset
    return w, offset, running


def feddbe(
    clients, cohorts, start, kappa=50.0, momentum=1.0, offset=True
) -> Iterator[dict]:
    """FedDBE (Zhang et al. 2023); round 1 finds the common mean feature."""
    x = clients.w0
    v = np.zeros((clients.n, H))
    common = None
    for cohort in cohorts:
        models, means = [], []
        for i in cohort:
            w, v[i], running = biased_training(
                clients, i, x, v[i], common, kappa, momentum, offset
            )
            models.append(w)
            means.append(running)
        share = clients.shares(cohort)
        if common is None:
            common = share @ np.array(means)
        else:
            x = share @ np.array(models)
        yield {
            "server": {"x": x, "mean": common},
            "clients": {"v": v.copy()},
            "evaluation": {"loss": losses_of(clients, [x] * clients.n, v)},
        }


ROUNDS = {"fedproto": fedproto, "fedpac": fedpac, "fedas": fedas, "feddbe": feddbe}


def results() -> Iterator[Result]:
    """The numbers of this family in rounds.json."""
    yield from round_results(ROUNDS, {"classed": classed})


if __name__ == "__main__":
    main(results())
