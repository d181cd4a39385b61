"""Shared values of the tests of kNN-Per and FedFomo."""

from types import SimpleNamespace

import torch
from places import golden
from small import near, t

from pflcore.algorithms import SharedRows

GOLDEN = golden("feddwa_family")
# Stored samples of kNN-Per, and a query among them.
Z = t([[0, 0], [1, 0], [0, 2], [3, 1], [2, 2]])
QUERY = t([[0.5, 0.25]])


def close(got, want, rtol=1e-8, atol=1e-10):
    near(got, want, rtol, atol)


# FedFomo --------------------------------------------------------------------


class Losses:
    """A cohort of one with a given validation loss for each model.

    Training changes nothing.
    """

    def __init__(self, losses, n):
        self.losses = losses
        self.context = SimpleNamespace(data=SimpleNamespace(n=n))

    def loss(self, rows, split):
        assert split == "val"
        return t([self.losses[tuple(row.tolist())] for row in rows])

    def fit(self, start):
        return SimpleNamespace(w=start)


def fomo(alg, previous, candidates, before, after):
    rows = t(candidates)
    local = Losses(
        {
            tuple(map(float, c)): l
            for c, l in zip([previous, *candidates], [before, *after], strict=True)
        },
        len(candidates),
    )
    index = torch.arange(len(candidates) - 1)[None]
    return alg.train(
        {"w": SharedRows(rows, index)}, {"w": rows[-1:], "old": t([previous])}, local
    )[:2]
