"""Evaluation of all clients side by side says what evaluating them one after another says."""

import torch
import torch.nn as nn
from parts.evaluate import setting

from pflcore import Clients, Federation, Net, evaluate
from pflcore.algorithms import FedAvg
from pflcore.metrics import right
from pflcore.simulation.round import Setup, begin


def test_engines_evaluate_alike():
    settings = [setting("cross_entropy", 4, engine) for engine in ("chain", "vmap", "loop")]
    found = [evaluate(Setup(FedAvg(), s), begin(FedAvg(), s.net, 5)) for s in settings]
    for key in ("loss", "accuracy", "size"):
        for other in found[1:]:
            torch.testing.assert_close(found[0][key], other[key], rtol=1e-5, atol=1e-6)


def test_what_may_differ_is_looked_at_one_by_one():
    s = setting("cross_entropy", 4, "loop")
    rows = s.net.w0.expand(5, -1)
    weighted = Net(s.net.module, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])))
    for net, w, buffers in (
        (s.net, rows.clone(), torch.empty(5, 0)),
        (s.net, rows, torch.arange(5.0)[:, None]),
        (weighted, rows, torch.empty(5, 0)),
    ):
        loss, _ = Clients(s._replace(net=net), torch.arange(5), 1, buffers).measure(
            {"w": w}, "train"
        )
        for i, places in enumerate(s.data.index["train"]):
            by_hand = net.loss(w[i], s.data.x[places], s.data.labels(i, "train"))
            torch.testing.assert_close(loss[i].float(), by_hand.detach(), rtol=1e-5, atol=1e-6)


def test_a_client_without_test_samples_is_not_looked_at():
    s = setting("cross_entropy", 4)
    index = {
        **s.data.index,
        "test": [i if k != 2 else i[:0] for k, i in enumerate(s.data.index["test"])],
    }
    s = s._replace(data=Federation(s.data.x, s.data.y, index, 4))
    found = evaluate(Setup(FedAvg(), s), begin(FedAvg(), s.net, 5))
    assert (
        found["loss"].isnan().tolist() == [False, False, True, False, False]
        and found["size"][2] == 0
    )


def test_a_model_with_nan_has_a_nan_loss_and_spoils_nobody_else():
    s = setting("cross_entropy", 4)
    local = Clients(s, torch.arange(5), 1, s.net.b0.expand(5, -1))
    rows = s.net.w0.repeat(5, 1)
    rows[2, 0] = torch.nan
    loss, _ = local.measure({"w": rows}, "test")
    assert loss.isnan().tolist() == [False, False, True, False, False]


def test_a_score_that_is_nan_is_no_right_answer():
    """A NaN for one class alone, the largest number for an argmax, is not the answer of the samples
    of that class."""
    s = setting("cross_entropy", 4)
    rows = s.net.w0.repeat(5, 1)
    rows[2, -1] = torch.nan  # the last layer's bias for the last class
    _, accuracy = Clients(s, torch.arange(5), 1, s.net.b0.expand(5, -1)).measure(
        {"w": rows}, "test"
    )
    assert (
        (s.data.labels(2, "test") == 3).any()
        and accuracy[2] == 0
        and (accuracy[[1, 3, 4]] > 0).all()
    )


def test_right():
    y = torch.tensor([[0, 1], [2, 1]])
    scores = torch.tensor([[[3.0, 1, 2], [0, 1, 0]], [[1.0, 0, 0], [0, 2, 1]]])
    assert right(scores, y).tolist() == [[True, True], [False, True]]
    assert right(torch.tensor([[0.5], [-0.5]]), torch.tensor([1, 1])).tolist() == [True, False]
    assert right(torch.tensor([0.5, -0.5]), torch.tensor([1.0, -1.0])).tolist() == [True, True]
