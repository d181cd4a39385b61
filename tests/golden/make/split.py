"""Golden numbers of models with private columns: FedPer, LG-FedAvg, FedRep and others.

The model is a linear layer of one input and two outputs, batch norm, and a linear head.
Its 11 parameters are, in this order: the layer's weight [2] and bias [2], batch norm's
gain [2] and shift [2], the head's weight [2] and bias [1].

Symbols: w [11] is a client's model, x its shared columns and h its private ones; the
statistics are batch norm's running mean [2] and variance [2].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cases import Result, main, round_results
from clients import Clients

EPSILON = 1e-5  # added to a variance
DECAY = 0.1  # weight of a minibatch in the running statistics
COLUMNS = np.arange(11)
HEAD = COLUMNS >= 8
BATCH_NORM = (COLUMNS >= 4) & (COLUMNS < 8)


class NormedModel:
    """The model's gradient and loss; half the squared error of samples x, y [n]."""

    @staticmethod
    def parts(w: np.ndarray) -> tuple[np.ndarray, ...]:
        """Weight, bias, gain, shift and head weight [2] each, and the head's bias."""
        return (*w[:10].reshape(5, 2), w[10])

    @staticmethod
    def gradient(w, x, y) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The gradient [11] with the minibatch's own statistics, and these statistics.

        The variance that counts in the running statistics is divided by n - 1.
        """
        weight, bias, gain, shift, head, head_bias = NormedModel.parts(w)
        n = len(y)
        z = x * weight + bias  # [n, 2]
        mean = z.mean(0)
        deviation = np.sqrt(z.var(0) + EPSILON)
        unit = (z - mean) / deviation
        error = (unit * gain + shift) @ head + head_bias - y
        by_score = error / n  # [n]
        by_normed = by_score[:, None] * head  # [n, 2]
        by_unit = by_normed * gain
        centred = by_unit - by_unit.mean(0) - unit * (by_unit * unit).mean(0)
        by_z = centred / deviation
        slopes = [
            (by_z * x).sum(0),
            by_z.sum(0),
            (by_normed * unit).sum(0),
            by_normed.sum(0),
            by_score @ (unit * gain + shift),
            [by_score.sum()],
        ]
        return np.concatenate(slopes), mean, z.var(0, ddof=1)

    @staticmethod
    def loss(w, mean, variance, x, y) -> float:
        """The mean loss of a model that is evaluated with running statistics."""
        weight, bias, gain, shift, head, head_bias = NormedModel.parts(w)
        unit = (x * weight + bias - mean) / np.sqrt(variance + EPSILON)
        scores = (unit * gain + shift) @ head + head_bias
        return float(0.5 * ((scores - y) ** 2).mean())


def normed(clients, w0, lr=0.1, epochs=1) -> Clients:
    """Clients of the model above, whose parameters are w0 at first."""
    samples = []
    for x, y in clients:
        samples.append((np.array(x, float)[:, None], np.array(y, float)))
    return Clients(NormedModel, samples, w0, lr, epochs)


def train(clients, i, w, statistics, columns, epochs) -> tuple[np.ndarray, np.ndarray]:
    """Client i's model and statistics [2, 2] after SGD on some columns of w.

    All samples of a client are one minibatch.
    """
    for _ in range(epochs):
        slope, mean, variance = NormedModel.gradient(w, *clients.samples[i])
        w = w - clients.lr * slope * columns
        of_batch = np.array([mean, variance])
        statistics = (1 - DECAY) * statistics + DECAY * of_batch
    return w, statistics


class Preset:
    """A method: which columns are private, and how a client trains and is evaluated.

    - "joint": shared and private columns at once.
    - "alternate": the private ones for `private_epochs`, which leave the statistics as
      they are, then the shared ones.
    - "body": the shared ones alone; all clients have the first private columns.

    Before an evaluation all columns train for `finetune_epochs`, whose results are
    thrown away. Batch norm's statistics are a mean over the round's clients, or with
    `own_statistics` each client's own.
    """

    def __init__(
        self, private, order="joint", weighting="samples", own_statistics=False
    ) -> None:
        self.private = private
        self.order = order
        self.weighting = weighting
        self.own_statistics = own_statistics

    def local_round(self, clients, i, w, statistics, private_epochs):
        """Client i's model and statistics after its training in a round."""
        private = self.private
        if self.order == "joint":
            return train(clients, i, w, statistics, True, clients.epochs)
        if self.order == "alternate":
            w, _ = train(clients, i, w, statistics, private, private_epochs)
        return train(clients, i, w, statistics, ~private, clients.epochs)

    def __call__(
        self, clients, cohorts, start, private_epochs=0, finetune_epochs=0
    ) -> Iterator[dict]:
        """The server takes `x <- sum_i p_i x_i` of the shared columns."""
        private = self.private
        w = np.tile(clients.w0, (clients.n, 1))  # the shared columns are the server's
        statistics = np.tile([[0.0, 0.0], [1.0, 1.0]], (clients.n, 1, 1))
        for cohort in cohorts:
            for i in cohort:
                w[i], statistics[i] = self.local_round(
                    clients, i, w[i], statistics[i], private_epochs
                )
            share = clients.shares(cohort, self.weighting)
            x = share @ w[cohort][:, ~private]
            w[:, ~private] = x
            if not self.own_statistics:
                statistics[:] = np.tensordot(share, statistics[cohort], 1)
            losses = []
            for i in range(clients.n):
                model, of_model = train(
                    clients, i, w[i], statistics[i], True, finetune_epochs
                )
                losses.append(NormedModel.loss(model, *of_model, *clients.samples[i]))
            yield {
                "server": {"x": x},
                "clients": {"h": w[:, private]},
                "evaluation": {"loss": losses},
            }


ROUNDS = {
    # Arivazhagan et al. 2019, Algorithms 1 and 2: the head stays with its client.
    "fedper": Preset(HEAD),
    # Liang et al. 2020, Algorithm 1: the layers below the head stay.
    "lg_fedavg": Preset(~HEAD, own_statistics=True),
    # Collins et al. 2021, Algorithm 1: the head first, then the body.
    "fedrep": Preset(HEAD, "alternate", "uniform"),
    # Oh et al. 2022, Algorithm 1: the body alone trains; evaluation fine-tunes.
    "fedbabu": Preset(HEAD, "body"),
    # Li et al. 2021, Algorithm 1: batch norm stays.
    "fedbn": Preset(BATCH_NORM, weighting="uniform", own_statistics=True),
}


def results() -> Iterator[Result]:
    """The numbers of this family in rounds.json."""
    yield from round_results(ROUNDS, {"normed": normed})


if __name__ == "__main__":
    main(results())
