"""Evaluation of all clients side by side says what evaluating them one after another says."""

import pytest
import torch
import torch.nn as nn
from small import engine_of

from pflcore.algorithms import FedAvg
from pflcore.data.federation import Federation
from pflcore.local import Local, Setting, Training
from pflcore.local.losses import CRITERIA
from pflcore.local.net import Net
from pflcore.metrics import right
from pflcore.round import begin, evaluate, one_by_one

SIZES = [1, 300, 7, 125, 126]


def setting(criterion, outputs, engine="chain", relabel=False, test=None):
    gen = torch.Generator().manual_seed(0)
    sizes = [n + (test or n) for n in SIZES]
    x = torch.randn(sum(sizes), 6, generator=gen)
    labels = criterion in ("cross_entropy", "hinge")
    classes = max(2, outputs) if labels else None
    y = torch.randint(classes, (len(x),), generator=gen) if labels else torch.randn(len(x), generator=gen)
    index = [i.split([n, len(i) - n]) for i, n in zip(torch.arange(len(x)).split(sizes), SIZES, strict=True)]
    own = torch.stack([torch.randperm(classes, generator=gen) for _ in SIZES]) if relabel else None
    data = Federation(x, y, {"train": [a for a, _ in index], "test": [b for _, b in index]}, classes, own)
    net = Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)), criterion=criterion)
    return Setting(net, data, Training(batch_size=5), engine_of(net, data, engine), 0, 3)


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


def test_right():
    y = torch.tensor([[0, 1], [2, 1]])
    scores = torch.tensor([[[3.0, 1, 2], [0, 1, 0]], [[1.0, 0, 0], [0, 2, 1]]])
    assert right(scores, y).tolist() == [[True, True], [False, True]]
    assert right(torch.tensor([[0.5], [-0.5]]), torch.tensor([1, 1])).tolist() == [True, False]
    assert right(torch.tensor([0.5, -0.5]), torch.tensor([1.0, -1.0])).tolist() == [True, True]
