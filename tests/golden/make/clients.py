"""Clients with small losses of known gradients, and their local SGD, in float64.

Symbols: N clients; a model w has P numbers; client i has n_i samples (x, y) and the
mean loss f_i(w) of them.

A minibatch is a run of neighbouring samples. All cases either take whole batches, or
have equal samples in a client, so the order of the samples plays no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

ALL = slice(None)


class ElementwiseModel:
    """Scores `x * w`, element by element; the loss is half the squared error."""

    @staticmethod
    def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        """The mean loss of samples x, y [n, P]."""
        return float(0.5 * ((x * w - y) ** 2).sum(1).mean())

    @staticmethod
    def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The gradient [P] of the mean loss."""
        return ((x * w - y) * x).mean(0)


class LinearModel:
    """Scores `x . w` of x [n, P]; the loss is half the squared error."""

    @staticmethod
    def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        """The mean loss of samples x [n, P], y [n]."""
        return float(0.5 * ((x @ w - y) ** 2).mean())

    @staticmethod
    def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The gradient [P] of the mean loss."""
        return x.T @ (x @ w - y) / len(y)


class TwoLayers:
    """Scores `V tanh(U x)` of 2 features, by 2 hidden numbers, for 3 classes.

    A model w is U [2, 2] and V [3, 2], row by row. The loss is cross entropy.
    """

    @staticmethod
    def features(w: np.ndarray, x: np.ndarray) -> np.ndarray:
        """What V sees, [n, 2]."""
        return np.tanh(x @ w[:4].reshape(2, 2).T)

    @staticmethod
    def scores(w: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Scores [n, 3] of samples x [n, 2]."""
        return TwoLayers.features(w, x) @ w[4:].reshape(3, 2).T

    @staticmethod
    def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> complex:
        """The mean loss of samples x [n, 2] and labels y [n]."""
        scores = TwoLayers.scores(w, x)
        own = scores[np.arange(len(y)), y]
        return (np.log(np.exp(scores).sum(1)) - own).mean()

    @staticmethod
    def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The gradient [10] of the mean loss."""
        return slope_of(lambda v: TwoLayers.loss(v, x, y), w)


def slope_of(f: Callable[[np.ndarray], complex], w: np.ndarray) -> np.ndarray:
    """The gradient of an analytic function, by complex steps of 1e-30.

    Nothing is subtracted, so that the error is that of rounding alone.
    """
    steps = 1e-30j * np.eye(len(w))
    return np.array([f(w + step).imag for step in steps]) / 1e-30


class Clients:
    """N clients with their samples, a model, and the options of local SGD."""

    def __init__(
        self,
        model: type,
        samples: Sequence[tuple[np.ndarray, np.ndarray]],
        w0: Sequence[float],
        lr: float = 0.1,
        epochs: int = 1,
        batch_size: int = 100,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.model = model
        self.samples = samples
        self.w0 = np.array(w0, float)
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.n = len(samples)
        self.sizes = np.array([len(y) for _, y in samples], float)

    def loss(self, i: int, w: np.ndarray) -> float:
        """Client i's mean loss f_i(w)."""
        return self.model.loss(w, *self.samples[i])

    def losses(self, models: Sequence[np.ndarray]) -> list[float]:
        """The loss of each client with a model of its own."""
        return [self.loss(i, w) for i, w in enumerate(models)]

    def gradient(self, i: int, w: np.ndarray, batch: slice = ALL) -> np.ndarray:
        """The gradient of client i's loss on a minibatch."""
        x, y = self.samples[i]
        return self.model.gradient(w, x[batch], y[batch])

    def batches(self, i: int, epochs: int | None = None) -> list[slice]:
        """The minibatches of all epochs of client i's local training."""
        starts = range(0, int(self.sizes[i]), self.batch_size)
        epoch = [slice(first, first + self.batch_size) for first in starts]
        return epoch * (self.epochs if epochs is None else epochs)

    def train(
        self,
        i: int,
        w: np.ndarray,
        term: Callable[[np.ndarray], np.ndarray | float] = lambda w: 0.0,
        lr: float | None = None,
        epochs: int | None = None,
    ) -> np.ndarray:
        """Client i's model after local SGD from w.

        A step is `v <- momentum v + gradient + weight_decay w + term(w); w <- w - lr v`
        with v = 0 at first.
        """
        lr = self.lr if lr is None else lr
        velocity = np.zeros_like(w)
        for batch in self.batches(i, epochs):
            slope = self.gradient(i, w, batch) + self.weight_decay * w + term(w)
            velocity = self.momentum * velocity + slope
            w = w - lr * velocity
        return w

    def shares(self, ids: Sequence[int], weighting: str = "samples") -> np.ndarray:
        """The clients' shares [S] in a mean.

        They are n_i / sum n_j, or 1 / S with "uniform".
        """
        weight = self.sizes[list(ids)]
        if weighting == "uniform":
            weight = np.ones(len(ids))
        return weight / weight.sum()


# The functions that make clients, by the names that rounds.json uses -----------


def quadratics(a, b, lr=0.1, start=None, **training) -> Clients:
    """Clients of one sample with the losses `sum_k a_ik (w_k - b_ik)^2 / 2`."""
    a, b = np.array(a), np.array(b)
    root = np.sqrt(a)
    samples = [(x[None], y[None]) for x, y in zip(root, root * b, strict=True)]
    w0 = [0.0] * a.shape[1] if start is None else start
    return Clients(ElementwiseModel, samples, w0, lr, **training)


def points(targets, lr=0.1, start=0.0, **training) -> Clients:
    """Clients whose model is a number w, with the losses `mean (w - target)^2 / 2`."""
    samples = []
    for target in targets:
        y = np.array(target, float).reshape(-1, 1)
        samples.append((np.ones_like(y), y))
    return Clients(ElementwiseModel, samples, [start], lr, **training)


def regression(clients, w0=(0.0,), lr=0.1, **training) -> Clients:
    """Clients of linear regression; without `w0` by a weight and a bias."""
    samples = []
    for x, y in clients:
        x = np.array(x, float).reshape(len(y), -1)
        if w0 is None:
            x = np.hstack([x, np.ones_like(x)])
        samples.append((x, np.array(y, float)))
    # A case without w0 states the model at which it starts.
    w0 = [np.nan, np.nan] if w0 is None else w0
    return Clients(LinearModel, samples, w0, lr, **training)


def two_layers(clients, start, lr=0.1, **training) -> Clients:
    """Clients of a model of two layers, by their samples and labels."""
    samples = [(np.array(x, float), np.array(y)) for x, y in clients]
    return Clients(TwoLayers, samples, start, lr, **training)


KINDS = {
    "quadratics": quadratics,
    "points": points,
    "regression": regression,
    "two_layers": two_layers,
}


def pull(strength: float, anchor: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The gradient of `strength / 2 |w - anchor|^2`, a term of local training."""
    return lambda w: strength * (w - anchor)


def begin(start: dict, part: str, **defaults: np.ndarray) -> dict[str, np.ndarray]:
    """Copies of the state at the start: the case's own numbers, else the defaults."""
    given = start.get(part, {})
    return {k: np.array(given.get(k, v), float) for k, v in defaults.items()}
