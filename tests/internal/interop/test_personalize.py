"""One call is one step of the algorithm's server; Krum and clusters by their definitions."""

import numpy as np
import pytest
import torch
from parts.personalize import N, P, rows

from pflcore import personalize
from pflcore.algorithms import ALGORITHMS, Cohort, apply


def one_round(name, first, last, more, **options):
    """What the server of a simulation sends after everybody's upload, of one round or of two."""
    alg, size = ALGORITHMS[name](**options), torch.ones(N, dtype=torch.long)
    state = alg.init(torch.zeros(P, dtype=torch.float64), N)
    for r, w in enumerate([last] if first is None else [first, last], 1):
        cohort = Cohort(torch.arange(N), size, N, r, 2)
        state = apply(state, alg.update(state, {"w": w, **more}, cohort)[0])
    return alg.send(state, cohort)


@pytest.mark.parametrize(
    "options",
    [{"sigma": 3.0, "alpha": 0.5}, {"alpha": 5.0}],
)
@pytest.mark.filterwarnings("ignore:FedAMP")
def test_fedamp_is_its_servers_step(options):
    torch.testing.assert_close(
        personalize(rows(), "fedamp", **options),
        one_round("fedamp", None, rows(), {}, **options)["u"],
        rtol=0,
        atol=0,
    )


def test_heurfedamp_is_its_servers_step():
    assert torch.equal(
        personalize(rows(), "heurfedamp", sigma=2.0, xi_self=0.3),
        one_round("heurfedamp", None, rows(), {}, sigma=2.0, xi_self=0.3)["u"],
    )


def test_sfl_is_its_servers_step(tmp_path):
    graph = str(tmp_path / "graph.npy")
    np.save(graph, np.random.default_rng(0).random((N, N)))
    for options in ({"k": 2, "layers": 2, "s": 0.7}, {"adjacency": graph}):
        assert torch.equal(
            personalize(rows(), "sfl", **options),
            one_round("sfl", None, rows(), {}, **options)["u"],
        )


@pytest.mark.parametrize("name", ["feddwa", "feddwa_qp"])
def test_feddwa_is_its_servers_step(name):
    guide = rows() + 0.1 * rows(1)
    assert torch.equal(
        personalize(rows(), name, guidance=guide, k=3),
        one_round(name, None, rows(), {"g": guide}, k=3)["x"],
    )
    last = {"k": 3, "guidance": "previous"}
    assert torch.equal(
        personalize(rows(), name, previous=rows(1), k=3),
        one_round(name, rows(1), rows(), {}, **last)["x"],
    )
