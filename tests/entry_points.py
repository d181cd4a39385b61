"""Data and defaults by their public names, under shorter ones."""

from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch

from pflcore import Federation, Net, data, evaluate
from pflcore.data import federation_of
from pflcore.simulation.round import RunConfig

synthetic_clusters, synthetic_linear, synthetic_quadratic = (
    data.FEDERATIONS[f"synthetic_{n}"] for n in ("clusters", "linear", "quadratic")
)
femnist, school, vehicle = (
    data.FEDERATIONS[n] for n in ("femnist", "school", "vehicle")
)


def folder(path, **options):
    """A folder of files as it comes: no split, no scale of its own."""
    return federation_of(f"folder:{path}", fractions={}, **options)


def leaf(path, **options):
    return federation_of(f"leaf:{path}", fractions={}, **options)


def held_out(data):
    """The same federation with every fifth of a client's training samples as "val",
    where it has five."""
    index = {split: list(rows) for split, rows in data.index.items()}
    index["val"] = [rows[4::5] for rows in index["train"]]
    index["train"] = [rows[torch.arange(len(rows)) % 5 != 4] for rows in index["train"]]
    return Federation(data.x, data.y, index, data.classes, data.relabel)


IGNORED = -100  # a label that counts in nothing, torch's own


def spread(p, near, n):
    """Weights [M, K] of the clients `near` [M, K] as a matrix [M, n]."""
    return torch.zeros(len(p), n, dtype=p.dtype).scatter_add_(1, near, p)


def strengths(net):
    """Where the factors' strengths stand in a row: [F], layer after layer."""
    return torch.cat(
        [
            torch.arange(s.start, s.stop)
            for name, s in net.slices.items()
            if name.split(".")[-1] == "strength"
        ]
    )


def views(alg, state, setting, ids=None):
    """The personalized models [S, ...] of the clients `ids`, or of everybody, as an
    evaluation has them, and what their hook was given."""
    ids, seen = torch.arange(setting.data.n) if ids is None else ids, []

    class Watched(type(alg)):
        def model(self, down, client_state, clients):
            made = dict(super().model(down, client_state, clients))
            seen.append(
                (
                    made,
                    replace(clients, buffers=made.get("batch_norm", clients.buffers)),
                )
            )
            return made

    options = {f.name: getattr(alg, f.name) for f in fields(alg)}
    evaluate(
        RunConfig(Watched(**options), setting),
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
    """One sentence is raised, which begins with these words, a regular expression."""
    with pytest.raises(error, match=f"^{words}") as raised:
        yield
    said = str(raised.value)
    assert said.endswith(".") and ". " not in said and "\n" not in said, said
