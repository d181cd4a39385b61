"""Evaluation of all clients side by side says what evaluating them one after another says."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small import make_setting, near
from torch import Tensor

from pflcore import Clients, Federation, Net, Training, evaluate
from pflcore.algorithms import FedAvg
from pflcore.metrics import right
from pflcore.simulation.round import Setup, begin

SIZES = [1, 300, 7, 125, 126]


def setting(engine="chain", empty=None):
    """`empty` has no test samples."""
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(2 * sum(SIZES), 6, generator=gen), torch.arange(2 * sum(SIZES)) % 4
    train, test = torch.arange(len(x)).view(2, -1)
    lists = [i[: 0 if k == empty else None] for k, i in enumerate(test.split(SIZES))]
    data = Federation(x, y, {"train": list(train.split(SIZES)), "test": lists}, 4)
    net = Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))
    return make_setting(net, data, Training(batch_size=5), 3, engine=engine, workers=1)


def test_engines_evaluate_alike_and_without_samples_nobody_is_looked_at():
    found = []
    for engine in ("chain", "vmap", "loop"):
        s = setting(engine, 2)
        found.append(evaluate(Setup(FedAvg(), s), begin(FedAvg(), s.net, 5)))
        assert found[-1]["loss"].isnan().tolist() == [False, False, True, False, False]
        assert found[-1]["size"].tolist() == [1, 300, 0, 125, 126]
    for key in ("loss", "accuracy"):
        for other in found[1:]:
            near(found[0][key].nan_to_num(-1), other[key].nan_to_num(-1), 1e-5, 1e-6)
    s, others = setting("loop"), [0, 1, 3, 4]
    whole = evaluate(Setup(FedAvg(), s), begin(FedAvg(), s.net, 5))
    for key in ("loss", "accuracy"):  # batches of one shared model cross clients
        near(found[-1][key][others], whole[key][others], 1e-6, 1e-7)


def weighted(scores: Tensor, y: Tensor):
    return F.cross_entropy(scores, y, torch.tensor([1.0, 2.0, 3.0, 4.0]))


@pytest.mark.parametrize("what", ["rows", "statistics", "loss"])
def test_what_may_differ_is_looked_at_one_by_one(what):
    s = setting("loop")
    rows, buffers = s.net.w0.expand(5, -1), torch.empty(5, 0)
    rows = rows.clone() if what == "rows" else rows
    buffers = torch.arange(5.0)[:, None] if what == "statistics" else buffers
    net = Net(s.net.module, weighted) if what == "loss" else s.net
    clients = Clients(s._replace(net=net), torch.arange(5), 1, buffers)
    loss, _ = clients.measure({"w": rows}, "train")
    for i, places in enumerate(s.data.index["train"]):
        by_hand = net.loss(rows[i], s.data.x[places], s.data.labels(i, "train"))
        near(loss[i], by_hand.detach(), 1e-5, 1e-6)


@pytest.mark.parametrize("engine", ["chain", "loop"])
def test_a_nan_is_no_right_answer_and_spoils_nobody_else(engine):
    """A NaN for one class alone, the largest number for an argmax, is not the answer of the samples
    of that class."""
    s = setting(engine)
    local = Clients(s, torch.arange(5), 1, s.net.b0.expand(5, -1))
    rows = s.net.w0.repeat(5, 1)
    rows[2, -1] = torch.nan  # the last layer's bias for the last class
    loss, accuracy = local.measure({"w": rows}, "test")
    assert loss.isnan().tolist() == [False, False, True, False, False]
    assert (s.data.labels(2, "test") == 3).any() and accuracy[2] == 0
    assert (accuracy[[1, 3, 4]] > 0).all()


def test_right():
    y = torch.tensor([[0, 1], [2, 1]])
    scores = torch.tensor([[[3.0, 1, 2], [0, 1, 0]], [[1.0, 0, 0], [0, 2, 1]]])
    assert right(scores, y).tolist() == [[True, True], [False, True]]
    assert right(torch.tensor([[0.5], [-0.5]]), torch.tensor([1, 1])).tolist() == [True, False]
    assert right(torch.tensor([0.5, -0.5]), torch.tensor([1.0, -1.0])).tolist() == [True, True]
