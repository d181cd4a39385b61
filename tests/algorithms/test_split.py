"""Properties of split models and of FedRoD, whose losses have golden values."""

import runpy

import pytest
import torch
import torch.nn as nn
from entry_points import views
from parts.edges import normal, normed
from parts.rivals import GOLDEN, close
from places import ROOT
from small import (
    F64,
    after,
    alike,
    images,
    near,
    t,
    tiny,
    tiny_model,
)

from pflcore import (
    Evaluation,
    Federation,
    Net,
    Simulation,
    Training,
    evaluate,
)
from pflcore.algorithms import (
    FedAvg,
    FedBABU,
    FedBN,
    FedPer,
    FedRep,
    FedRoD,
    LGFedAvg,
    LocalOnly,
    SplitModel,
)
from pflcore.simulation.round import RunConfig
from pflcore.testing import check


def test_the_documents_fedper_is_ours():
    theirs = runpy.run_path(str(ROOT / "examples" / "own_algorithm.py"))["FedPer"]
    cohorts = [[0, 1], [0, 2], [0]]
    one, done = after(FedPer(), tiny(batch_size=4), cohorts)
    other, also = after(theirs(), tiny(batch_size=4), cohorts)
    assert torch.equal(one.server["x"], other.server["x"]) and done == also
    assert torch.equal(one.clients["h"], other.clients["head"])


# properties -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alg", "width"),
    [
        (FedPer(), 45),
        (FedRep(), 45),
        (FedBABU(), 45),
        (LGFedAvg(), 24),
        (FedBN(), 59),
        (SplitModel(private="?.bias"), 55),
    ],
)
def test_private_columns_never_travel(alg, width):
    """The bytes are those of shared columns, and of statistics that are averaged.

    A client that never took part has the initial private columns and the others'
    statistics.
    """
    s = normal()
    state, done = after(alg, s, [[0, 2]])
    statistics = s.net.b0.numel() if alg.traits.batch_norm[0] == "average" else 0
    assert done.bytes_down == done.bytes_up == 2 * 8 * (width + statistics)
    view, local = views(alg, state, s, torch.tensor([1]))
    if not alg.finetune_epochs:  # else it is fine-tuned as everybody
        private = alg.private_mask(s.net)
        assert torch.equal(view["w"][0, private], s.net.w0[private])
        near(local.buffers[0], state.buffers[[0, 2]].mean(0))
    assert evaluate(RunConfig.of(alg, s), state)["loss"].isfinite().all()


def test_with_everything_private_it_is_local_and_with_nothing_private_fedavg():
    s = tiny()
    with pytest.warns(
        UserWarning, match=r"^private: the whole model is private, so .* shared\.$"
    ):
        alone, _ = after(SplitModel(private=("0.*", "2.*")), s, 3)
    assert torch.equal(alone.clients["h"], after(LocalOnly(), s, 3)[0].clients["w"])
    with pytest.warns(
        UserWarning, match=r"^private: the model has no batch_norm parameter, so"
    ):
        shared, _ = after(FedBN(), s, 3)
    even, _ = after(FedAvg(weighting="uniform"), s, 3)
    assert torch.equal(shared.server["x"], even.server["x"])
    assert shared.clients["h"].shape == (3, 0)


def test_a_frozen_part_never_moves_not_even_by_adamw():
    s = normal(lr=0.01, batch_size=4, local_optimizer="adamw", weight_decay=0.1)
    alg = FedBABU(finetune_epochs=0)
    state, _ = after(alg, s, 2)
    x, h = s.net.split(s.net.w0)
    assert not state.clients and (state.server["x"] != x).all()
    w = views(alg, state, s)[0]["w"]
    assert torch.equal(w, s.net.join(state.server["x"], h.expand(s.data.n, -1)))


def test_the_contract_with_batch_norm():
    # These sizes leave no batch of a single sample.
    check(FedBN(), model=normed, data=images((10, 20, 31, 20)))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"a[0]": nn.Linear(6, 5), "b": nn.Linear(5, 4)})

    def forward(self, x):
        return self.parts["b"](self.parts["a[0]"](x).tanh())


def test_heads_with_brackets_in_their_names_are_found_or_rejected():
    net = Net(Odd, head="parts.b")
    assert (
        LGFedAvg().private_mask(net).sum() == 35
        and FedPer().private_mask(net).sum() == 24
    )
    unknown = r"^patterns: 'fc\*' matches no parameter; the names are 0.weight.*\.$"
    with pytest.raises(ValueError, match=unknown):
        SplitModel(private="fc*").server_init_args(tiny().net)
    with pytest.raises(ValueError, match=r"^model: found no trainable head.*\.$"):
        FedPer().server_init_args(Net(nn.Conv2d(1, 1, 1)))


# FedRoD -----------------------------------------------------------------------


def test_golden_fedrod_losses():
    """FedRoD's losses and scores have golden values.

    The model is linear, and its generic logits are its input, which begins with 1.
    """
    j1 = GOLDEN["J1_fedrod_bsm"]
    j2 = GOLDEN["J2_fedrod_personal"]
    net = Net(nn.Linear(3, 3, bias=False).double())
    x = t([j1["logits"]])
    w = torch.eye(3, dtype=F64).view(-1)
    extra = {"class_counts": t(j1["counts"])}

    def head(logits):
        return nn.functional.pad(t(logits)[:, None], (0, 2)).view(-1)

    def loss(y, gamma=1.0, logits=None):
        row = torch.cat([w, head(logits or [0.0] * 3)])
        return FedRoD(gamma=gamma).loss(net, row, x, torch.tensor([y]), extra)

    for *given, want in GOLDEN["fedrod_losses"]:
        close(loss(*given), want)
    assert loss(1) == torch.inf
    scores = FedRoD().predict({"w": w, "h": head(j2["p_logits"])}, net, x)[0]
    close(scores, t(j2["g_logits"]) + t(j2["p_logits"]))


def test_fedrods_heads_move():
    assert after(FedRoD(), tiny(), 3)[0].clients["h"].abs().sum() > 0.1


def test_a_newcomer_to_fedrod_predicts_as_the_generic_model():
    s = tiny()
    alg = FedRoD()
    state, _ = after(alg, s, [[0, 1]])
    view = views(alg, state, s, torch.tensor([2]))[0]
    x = s.data.client(2, "test")[0]
    got = alg.predict({k: v[0] for k, v in view.items()}, s.net, x)
    alike(got, s.net(state.server["x"], x))


def rod(data, model=None, **options):
    training = Training(lr=0.1)
    return Simulation(
        "fedrod", model or tiny_model(), data, training, rounds=2, **options
    ).run()


@pytest.mark.deep("it takes a second")
def test_fedrod_goes_by_the_runs_loss_and_takes_a_model_that_knows_more_classes():
    smooth = nn.CrossEntropyLoss(label_smoothing=0.3)
    weights = nn.CrossEntropyLoss(torch.tensor([1.0, 5, 5, 1]))
    plain = rod(images(), loss=None).state.server["x"]
    for loss in (smooth, weights):
        assert not torch.equal(rod(images(), loss=loss).state.server["x"], plain)
    more = rod(images(), tiny_model(classes=6)).state
    assert more.server["x"].isfinite().all() and more.clients["h"].isfinite().all()
    binary = Federation.from_clients(
        [{"train": (torch.randn(9, 6), torch.arange(9) % 2)}] * 2
    )
    with pytest.raises(
        ValueError, match=r"^loss: FedRoD balances the scores of classes"
    ):
        rod(
            binary.split(test=0.3), lambda: nn.Linear(6, 1), loss="binary_cross_entropy"
        )


class Ends(nn.Module):
    """Models whose head is not their last step, or has no weights of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.e = nn.Linear(4, 4)
        self.h = nn.Linear(4, 4)
        out = 4 if kind == "tied" else 3
        self.head = nn.Linear(4, out)
        if kind == "statistics":
            self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, out))
        if kind == "tied":
            self.head.weight = self.e.weight

    def forward(self, x):
        y = self.head(torch.tanh(self.e(x)))
        if self.kind == "after":
            return y.relu()
        return y + self.h(x)[:, :3] if self.kind == "beside" else y


@pytest.mark.parametrize("kind", ["tied", "after", "beside", "statistics", "plain"])
def test_fedrods_head_is_the_last_that_the_model_does(kind):
    pair = torch.randn(12, 4), torch.arange(12) % 3
    classes = 4 if kind == "tied" else 3
    data = Federation.from_clients([pair, pair], classes=classes)
    model = Ends(kind)
    if kind == "plain":
        assert not rod(data, model, evaluation=Evaluation(split="train")).stopped
        return
    with pytest.raises(ValueError, match=r"^model: FedRoD adds a second head's scores"):
        rod(data, model, evaluation=Evaluation(split="train"))
