"""Evaluation of all clients side by side says what evaluating them one after another says."""

import pytest
import torch
import torch.nn as nn
from small import make_setting

from pflcore import Federation, Local, Net, Training, evaluate
from pflcore.algorithms import FedAvg
from pflcore.local.losses import CRITERIA
from pflcore.metrics import right
from pflcore.simulation.round import begin, one_by_one

SIZES = [1, 300, 7, 125, 126]


def setting(criterion, outputs, engine="chain", relabel=False, test=None):
    gen = torch.Generator().manual_seed(0)
    sizes = [n + (test or n) for n in SIZES]
    x = torch.randn(sum(sizes), 6, generator=gen)
    labels = criterion in ("cross_entropy", "hinge")
    classes = max(2, outputs) if labels else None
    y = torch.randint(classes, (len(x),), generator=gen) if labels else torch.rand(len(x), generator=gen)
    index = [i.split([n, len(i) - n]) for i, n in zip(torch.arange(len(x)).split(sizes), SIZES, strict=True)]
    own = torch.stack([torch.randperm(classes, generator=gen) for _ in SIZES]) if relabel else None
    data = Federation(x, y, {"train": [a for a, _ in index], "test": [b for _, b in index]}, classes, own)
    net = Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)), criterion=criterion)
    return make_setting(net, data, Training(batch_size=5), 3, engine=engine, workers=1)


@pytest.mark.parametrize(("criterion", "outputs"), [("cross_entropy", 4), *((c, 1) for c in sorted(CRITERIA) if c != "cross_entropy")])
@pytest.mark.parametrize("relabel", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_side_by_side_is_one_by_one(criterion, outputs, relabel, split):
    s = setting(criterion, outputs, relabel=relabel and criterion in ("cross_entropy", "hinge"))
    for ids in (torch.arange(5), torch.tensor([3, 1])):
        local = Local(s, ids, 1, s.net.b0.expand(len(ids), -1))
        rows = s.net.w0 + torch.randn(len(ids), s.net.size, generator=torch.Generator().manual_seed(1))
        measured = local.measure(rows, split)
        assert measured is not None
        for got, want in zip(measured, one_by_one(FedAvg(), {"w": rows}, local, split), strict=True):
            assert (got is None) == (want is None) == (s.data.classes is None and got is not measured[0])
            if got is not None and want is not None:
                torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-6)
        if measured[1] is not None:  # exactly: a share of whole samples
            counted = measured[1] * s.data.size(split)[ids]
            torch.testing.assert_close(counted, counted.round(), rtol=0, atol=1e-9)


def test_engines_evaluate_alike():
    settings = [setting("cross_entropy", 4, engine) for engine in ("chain", "vmap", "threads")]
    found = [evaluate(FedAvg(), begin(FedAvg(), s.net, 5), s) for s in settings]
    for key in ("loss", "accuracy", "size"):
        for other in found[1:]:
            torch.testing.assert_close(found[0][key], other[key], rtol=1e-5, atol=1e-6)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), (6,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)), (6,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4)), (1, 6, 6)),
    "scores per place": (lambda: nn.Conv1d(2, 4, 1), (2, 3)),
}


@pytest.mark.parametrize("engine", ["threads", "vmap"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("relabel", [False, True])
def test_one_model_for_all_is_one_pass_over_all_samples(engine, model, relabel, monkeypatch):
    build, shape = MODELS[model]
    gen, n = torch.Generator().manual_seed(0), sum(SIZES)
    y = torch.randint(4, (n, 3) if model == "scores per place" else (n,), generator=gen)
    own = torch.stack([torch.randperm(4, generator=gen) for _ in SIZES]) if relabel else None
    data = Federation(torch.randn(n, *shape, generator=gen), y, {"train": list(torch.arange(n).split(SIZES))}, 4, own)
    s = make_setting(Net(build), data, Training(), 3, engine=engine, workers=2)
    local = Local(s, torch.tensor([4, 0, 1, 3]), 1, s.net.b0.expand(4, -1) + 0.5)  # somebody is not looked at
    row = s.net.w0 + torch.randn(s.net.size, generator=gen)
    want = one_by_one(FedAvg(), {"w": row.repeat(4, 1)}, local, "train")
    batches = []
    forward = Net.__call__
    monkeypatch.setattr(Net, "__call__", lambda net, w, x: batches.append(len(x)) or forward(net, w, x))
    loss, hits = local.measure(row.expand(4, -1), "train")
    assert sorted(batches) == sorted(len(c) for c in torch.arange(n - SIZES[2]).split(125))
    torch.testing.assert_close(loss, want[0].double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hits, want[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(local.loss(row.expand(4, -1)), want[0], rtol=1e-5, atol=1e-6)


def test_what_may_differ_is_looked_at_one_by_one():
    s = setting("cross_entropy", 4, "threads")
    rows = s.net.w0.expand(5, -1)
    weighted = Net(s.net.module, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])))
    for net, w, buffers in (
        (s.net, rows.clone(), torch.empty(5, 0)),
        (s.net, rows, torch.arange(5.0)[:, None]),
        (weighted, rows, torch.empty(5, 0)),
    ):
        assert Local(s._replace(net=net), torch.arange(5), 1, buffers).measure(w, "train") is None
    assert Local(s, torch.arange(5), 1, torch.empty(5, 0)).measure(rows, "train") is not None


def test_a_client_without_test_samples_is_not_looked_at():
    s = setting("cross_entropy", 4)
    index = {**s.data.index, "test": [i if k != 2 else i[:0] for k, i in enumerate(s.data.index["test"])]}
    s = s._replace(data=Federation(s.data.x, s.data.y, index, 4))
    found = evaluate(FedAvg(), begin(FedAvg(), s.net, 5), s)
    assert found["loss"].isnan().tolist() == [False, False, True, False, False] and found["size"][2] == 0


def test_a_model_with_nan_has_a_nan_loss_and_spoils_nobody_else():
    s = setting("cross_entropy", 4)
    local = Local(s, torch.arange(5), 1, s.net.b0.expand(5, -1))
    rows = s.net.w0.repeat(5, 1)
    rows[2, 0] = torch.nan
    loss, _ = local.measure(rows, "test")
    assert loss.isnan().tolist() == [False, False, True, False, False]


def test_a_score_that_is_nan_is_no_right_answer():
    """A NaN for one class alone, the largest number for an argmax, is not the answer of the samples of that class."""
    s = setting("cross_entropy", 4)
    rows = s.net.w0.repeat(5, 1)
    rows[2, -1] = torch.nan  # the last layer's bias for the last class
    _, accuracy = Local(s, torch.arange(5), 1, s.net.b0.expand(5, -1)).measure(rows, "test")
    assert (s.data.labels(2, "test") == 3).any() and accuracy[2] == 0 and (accuracy[[1, 3, 4]] > 0).all()


def test_right():
    y = torch.tensor([[0, 1], [2, 1]])
    scores = torch.tensor([[[3.0, 1, 2], [0, 1, 0]], [[1.0, 0, 0], [0, 2, 1]]])
    assert right(scores, y).tolist() == [[True, True], [False, True]]
    assert right(torch.tensor([[0.5], [-0.5]]), torch.tensor([1, 1])).tolist() == [True, False]
    assert right(torch.tensor([0.5, -0.5]), torch.tensor([1.0, -1.0])).tolist() == [True, True]
