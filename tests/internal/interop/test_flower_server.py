"""In Flower every algorithm gives what a simulation gives; every client its own model; what does
not fit is one sentence."""

import pytest
from nodes import Nodes
from parts.flower_server import SEED, N, maker, model

from pflcore.interop.flower import STATE, PflStrategy, client_app

pytest.importorskip("flwr")


def test_a_state_in_a_folder_does_not_travel(tmp_path):
    far, near = (
        Nodes(client_app(maker("ditto"), folder=f), range(N)) for f in (tmp_path / "new", None)
    )
    results = [PflStrategy("ditto", model, N, rounds=2, seed=SEED).start(g) for g in (far, near)]
    assert results[0].evaluate_metrics_clientapp == results[1].evaluate_metrics_clientapp
    assert set(results[0].evaluate_metrics_clientapp[2]) == {"loss", "accuracy"}
    assert [list(c.state[STATE]) for c in far.contexts.values()] == [["file"]] * N
    assert len(list((tmp_path / "new").iterdir())) == N
    assert [list(c.state[STATE]) for c in near.contexts.values()] == [["bytes"]] * N
