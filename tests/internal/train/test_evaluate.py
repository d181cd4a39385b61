"""Evaluation of all clients side by side says what evaluating them one after another says."""

import pytest
import torch
import torch.nn as nn
from parts.evaluate import SIZES, setting
from small import make_setting

from pflcore import Clients, Federation, Net, Training
from pflcore.algorithms import FedAvg
from pflcore.metrics import f1, metrics_of
from pflcore.simulation.evaluate import one_by_one
from pflcore.train.losses import CRITERIA


@pytest.mark.parametrize(
    ("criterion", "outputs"),
    [("cross_entropy", 4), *((c, 1) for c in sorted(CRITERIA) if c != "cross_entropy")],
)
@pytest.mark.parametrize("relabel", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_side_by_side_is_one_by_one(criterion, outputs, relabel, split):
    s = setting(criterion, outputs, relabel=relabel and criterion in ("cross_entropy", "hinge"))
    for ids in (torch.arange(5), torch.tensor([3, 1])):
        local = Clients(s, ids, 1, s.net.b0.expand(len(ids), -1))
        rows = s.net.w0 + torch.randn(
            len(ids), s.net.size, generator=torch.Generator().manual_seed(1)
        )
        measured = local.measure({"w": rows}, split)
        assert measured is not None
        for got, want in zip(
            measured, one_by_one(FedAvg(), local, local.scores({"w": rows}, split)), strict=True
        ):
            assert (
                (got is None)
                == (want is None)
                == (s.data.classes is None and got is not measured[0])
            )
            if got is not None and want is not None:
                torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-6)
        if measured[1] is not None:  # exactly: a share of whole samples
            counted = measured[1] * s.data.size(split)[ids]
            torch.testing.assert_close(counted, counted.round(), rtol=0, atol=1e-9)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), (6,)),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)),
        (6,),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4)
        ),
        (1, 6, 6),
    ),
    "scores per place": (lambda: nn.Conv1d(2, 4, 1), (2, 3)),
}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("relabel", [False, True])
def test_one_model_for_all_is_one_pass_over_all_samples(engine, model, relabel, monkeypatch):
    build, shape = MODELS[model]
    gen, n = torch.Generator().manual_seed(0), sum(SIZES)
    y = torch.randint(4, (n, 3) if model == "scores per place" else (n,), generator=gen)
    own = torch.stack([torch.randperm(4, generator=gen) for _ in SIZES]) if relabel else None
    data = Federation(
        torch.randn(n, *shape, generator=gen),
        y,
        {"train": list(torch.arange(n).split(SIZES))},
        4,
        own,
    )
    s = make_setting(Net(build), data, Training(), 3, engine=engine, workers=2)
    # somebody is not looked at
    local = Clients(s, torch.tensor([4, 0, 1, 3]), 1, s.net.b0.expand(4, -1) + 0.5)
    row = s.net.w0 + torch.randn(s.net.size, generator=gen)
    want = one_by_one(FedAvg(), local, local.scores({"w": row.repeat(4, 1)}, "train"))
    batches = []
    forward = Net.__call__
    monkeypatch.setattr(
        Net, "__call__", lambda net, w, x: batches.append(len(x)) or forward(net, w, x)
    )
    loss, hits = local.measure({"w": row.expand(4, -1)}, "train")
    assert sorted(batches) == sorted(len(c) for c in torch.arange(n - SIZES[2]).split(125))
    torch.testing.assert_close(loss, want[0].double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hits, want[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(local.loss(row.expand(4, -1)), want[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (["acc"], "for labels there are auc, f1, balanced_accuracy, or a function of .* got 'acc'"),
        (["mae"], "'mae' is for targets"),
        ("auc", r"expected a list such as \['auc', my_function\]"),
        ([3], r"expected a name or a function of \(scores, labels\), got 3"),
        ({"loss": min}, "'loss' is recorded anyway"),
        (["f1", f1], "'f1' is there twice"),
    ],
)
def test_what_is_no_metric_is_one_sentence(metrics, sentence):
    pytest.importorskip("sklearn")
    with pytest.raises((ValueError, TypeError), match=f"^metrics: .*{sentence}"):
        metrics_of(metrics, classes=True)
