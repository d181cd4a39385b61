"""Short names for public data sets, defaults and checks."""

from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch

from pflcore import Federation, Net, evaluate
from pflcore.lab import data
from pflcore.lab.data import federation_of
from pflcore.simulation.round import RunConfig

synthetic_clusters, synthetic_linear, synthetic_quadratic = (
    data.FEDERATIONS[f"synthetic_{n}"] for n in ("clusters", "linear", "quadratic")
)
femnist, school, vehicle = (
    data.FEDERATIONS[n] for n in ("femnist", "school", "vehicle")
)
synthetic_text = data.FEDERATIONS["synthetic_text"]


def folder(path, **options):
    """A folder of files as a federation, without a split and unscaled."""
    return federation_of(f"folder:{path}", fractions={}, **options)


def table(path, **options):
    return federation_of(f"table:{path}", fractions={}, **options)


def leaf(path, **options):
    return federation_of(f"leaf:{path}", fractions={}, **options)


def held_out(data):
    """The same federation with a "val" split.

    Every fifth training sample of a client becomes a validation sample, where the
    client has five.
    """
    index = {split: list(rows) for split, rows in data.index.items()}
    index["val"] = [rows[4::5] for rows in index["train"]]
    index["train"] = [rows[torch.arange(len(rows)) % 5 != 4] for rows in index["train"]]
    return Federation(data.x, data.y, index, data.classes, data.relabel)


IGNORED = -100  # torch's label that counts in nothing


def spread(p, near, n):
    """A matrix [M, n] of weights [M, K].

    The weights are those of the clients `near` [M, K].
    """
    return torch.zeros(len(p), n, dtype=p.dtype).scatter_add_(1, near, p)


def strengths(net):
    """Positions [F] of the factors' strengths in a row, layer by layer."""
    return torch.cat(
        [
            torch.arange(s.start, s.stop)
            for name, s in net.slices.items()
            if name.split(".")[-1] == "strength"
        ]
    )


def views(alg, state, setting, ids=None):
    """Personalized models [S, ...] of an evaluation, and the hook's clients.

    The models are those of the clients `ids`, or of all clients.
    """
    ids = torch.arange(setting.data.n) if ids is None else ids
    seen = []

    class Watched(type(alg)):
        def model(self, down, client_state, clients):
            models = dict(super().model(down, client_state, clients))
            seen.append(
                (
                    models,
                    replace(clients, buffers=models.get("batch_norm", clients.buffers)),
                )
            )
            return models

    options = {f.name: getattr(alg, f.name) for f in fields(alg)}
    evaluate(
        RunConfig.of(Watched(**options), setting),
        state,
        next(reversed(setting.data.index)),
        clients=ids,
    )
    return seen[0]


def loss_called(name):
    """The loss of that name, as a function of (scores, y)."""
    return Net(lambda: torch.nn.Linear(1, 1), name).loss_fn


@contextmanager
def sentence(words, error=ValueError):
    """Asserts that one sentence is raised that begins with `words`.

    `words` is a regular expression.
    """
    with pytest.raises(error, match=f"^{words}") as raised:
        yield
    message = str(raised.value)
    assert message.endswith(".") and ". " not in message and "\n" not in message, (
        message
    )
