"""One line keeps tensors with their client, in an app that knows nothing of it, under a server that
knows nothing of it."""

from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from nodes import Nodes
from parts.flower_private import ROUNDS, N, app, moved, net, run

from pflcore.interop.flower import keep_private


@pytest.mark.parametrize(
    "patterns", [("2.*",), ("0.*", "1.*"), ("1.*",)], ids=["FedPer", "LG-FedAvg", "FedBN"]
)
def test_any_app_is_fedper_lg_fedavg_or_fedbn(patterns):
    seen: dict[int, list[Any]] = {}
    grid = Nodes(app(keep_private(*patterns), seen=seen), range(N))
    result = run(grid)
    start = net().state_dict()
    mine = [k for k in start if k.startswith(tuple(p[0] for p in patterns))]
    # by hand, without Flower
    shared, own = dict(start), [{k: start[k] for k in mine} for _ in range(N)]
    for _ in range(ROUNDS):
        trained = [moved({**shared, **o}, i) for i, o in enumerate(own)]
        own = [{k: t[k] for k in mine} for t in trained]
        shared |= {
            k: sum((i + 1) * t[k] for i, t in enumerate(trained)) / 10
            for k in start
            if k not in mine
        }
    for i in range(N):
        for k, v in {**shared, **own[i]}.items():
            torch.testing.assert_close(seen[i][-1][k].double(), v.double(), rtol=1e-12, atol=1e-12)
    for k, v in result.arrays.to_torch_state_dict().items():
        # the private ones are where they started
        torch.testing.assert_close(v.double(), shared[k].double(), rtol=1e-12, atol=1e-12)


def test_without_the_line_everything_is_averaged():
    seen: dict[int, list[Any]] = {}
    run(Nodes(app(seen=seen), range(N)))
    assert torch.equal(seen[0][-1]["2.weight"], seen[3][-1]["2.weight"])
