"""Evaluation of all clients side by side says what evaluating them one after another says."""

import pytest
import torch
import torch.nn as nn
from small import make_setting

from pflcore import Clients, Federation, Net, Training
from pflcore.algorithms import FedAvg
from pflcore.simulation.evaluate import one_by_one
from pflcore.train.losses import CRITERIA

SIZES = [1, 300, 7, 125, 126]
SPLIT = {"train": list(torch.arange(sum(SIZES)).split(SIZES))}


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("relabel", [False, True])
def test_side_by_side_is_one_by_one(criterion, relabel):
    gen, n = torch.Generator().manual_seed(0), sum(SIZES)
    labels = criterion in ("cross_entropy", "hinge")
    classes = 4 if criterion == "cross_entropy" else 2
    x = torch.randn(n, 6, generator=gen)
    y = torch.randint(classes, (n,), generator=gen) if labels else torch.rand(n, generator=gen)
    own = torch.stack([torch.randperm(classes, generator=gen) for _ in SIZES])
    known = (classes, own if relabel else None) if labels else (None,)
    head = nn.Linear(5, classes if criterion == "cross_entropy" else 1)
    net = Net(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), head), criterion)
    s = make_setting(net, Federation(x, y, SPLIT, *known), Training(), 3, "chain", workers=1)
    for ids in (torch.arange(5), torch.tensor([3, 1])):
        local = Clients(s, ids, 1, s.net.b0.expand(len(ids), -1))
        rows = {"w": s.net.w0 + torch.randn(len(ids), s.net.size, generator=gen)}
        loss, hits = local.measure(rows, "train")
        want, right = one_by_one(FedAvg(), local, local.scores(rows, "train"))
        torch.testing.assert_close(loss, want.double(), rtol=1e-5, atol=1e-6)
        assert (hits is None) == (right is None) == (not labels)
        if hits is not None:  # exactly: a share of whole samples
            torch.testing.assert_close(hits, right, rtol=0, atol=1e-9)


MODELS = {
    "mlp": (lambda: (nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), (6,)),
    "batch norm": (lambda: (nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)), (6,)),
    "conv": (
        lambda: (nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4)),
        (1, 6, 6),
    ),
    "scores per place": (lambda: (nn.Conv1d(2, 4, 1),), (2, 3)),
}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("relabel", [False, True])
def test_one_model_for_all_is_one_pass_over_all_samples(engine, model, relabel, monkeypatch):
    build, shape = MODELS[model]
    gen, n = torch.Generator().manual_seed(0), sum(SIZES)
    y = torch.randint(4, (n, 3) if model == "scores per place" else (n,), generator=gen)
    own = torch.stack([torch.randperm(4, generator=gen) for _ in SIZES]) if relabel else None
    data = Federation(torch.randn(n, *shape, generator=gen), y, SPLIT, 4, own)
    net = Net(lambda: nn.Sequential(*build()))
    s = make_setting(net, data, Training(), 3, engine=engine, workers=2)
    # somebody is not looked at
    local = Clients(s, torch.tensor([4, 0, 1, 3]), 1, s.net.b0.expand(4, -1) + 0.5)
    row = s.net.w0 + torch.randn(s.net.size, generator=gen)
    want = one_by_one(FedAvg(), local, local.scores({"w": row.repeat(4, 1)}, "train"))
    batches, forward = [], Net.__call__

    def counted(net, w, x):
        batches.append(len(x))
        return forward(net, w, x)

    monkeypatch.setattr(Net, "__call__", counted)
    loss, hits = local.measure({"w": row.expand(4, -1)}, "train")
    assert sorted(batches) == sorted(len(c) for c in torch.arange(n - SIZES[2]).split(125))
    torch.testing.assert_close(loss, want[0].double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hits, want[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(local.loss(row.expand(4, -1)), want[0], rtol=1e-5, atol=1e-6)
