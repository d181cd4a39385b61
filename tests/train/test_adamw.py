"""AdamW, fresh in every round; who refuses it, and what a record says."""

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from methods import (
    APFL,
    FactorizedWaffle,
    FedDWA,
    LocalOnly,
    Mocha,
    PerFedAvg,
    PFedMe,
    QFedAvg,
    Scaffold,
    Waffle,
)
from small import images, make_setting, near, play, swept, tiny_model
from torch import Tensor

from pflcore import Clients, Federation, Net, Objective, Simulation, Training, step
from pflcore.algorithms import ALGORITHMS
from pflcore.simulation.round import Setup, begin

ADAMW: dict[str, Any] = {
    "lr": 0.01,
    "batch_size": 10,
    "local_optimizer": "adamw",
    "weight_decay": 0.1,
}


def federation():
    data = images()
    return Federation(data.x.double(), data.y, data.index, data.classes, data.relabel)


def build():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def made(training, engine="loop", rounds=3):
    return make_setting(Net(build), federation(), training, rounds, engine)


def batches(s, client, round):
    """What the client trains on in a round, in order."""
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(net, w, x, y, extra):
        seen.append((x.clone(), y.clone()))
        return net.loss(w, x, y)

    pool = make_setting(s.net, s.data, s.training, s.rounds)
    Clients(pool, torch.tensor([client]), round, torch.empty(1, 0)).fit(
        s.net.w0[None], Objective(loss=loss)
    )
    return seen


@pytest.mark.parametrize("engine", ["loop", "vmap", "chain"])
def test_every_round_is_an_optimizer_of_torchs(engine):
    s = made(Training(**ADAMW), engine)
    cohorts = [[0, 1, 2], [0, 2], [0, 1, 2]]
    state = play(LocalOnly(), s, 3, lambda r: cohorts[r - 1])[-1][0]
    for i in range(3):
        module = s.net.load(build(), s.net.w0)
        for r in [r for r, ids in enumerate(cohorts, 1) if i in ids]:
            adamw = torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1)
            for x, y in batches(s, i, r):
                adamw.zero_grad()
                F.cross_entropy(module(x), y).backward()
                adamw.step()
        near(state.clients["w"][i], s.net.row(module))


@pytest.mark.parametrize(
    "alg",
    [
        Scaffold(option="II"), Waffle(option="II"), FedDWA(guidance="full_grad"), Mocha(),
        APFL(), PFedMe(), PerFedAvg(), QFedAvg(q=1.0), FactorizedWaffle(),
    ],
)  # fmt: skip
def test_a_method_that_rests_on_sgd_refuses_adamw(alg):
    with pytest.raises(
        ValueError,
        match=rf"^local_optimizer: {type(alg).__name__} .*; take local_optimizer='sgd'\.$",
    ):
        Simulation(alg, build, federation(), Training(**ADAMW))
    s = made(Training(**ADAMW))
    net = alg.prepare(s.net)
    with pytest.raises(ValueError, match=r"^local_optimizer: "):
        step(Setup(alg, s._replace(net=net)), begin(alg, net, 3), torch.arange(3))


@pytest.mark.parametrize(
    "alg",
    [
        Scaffold(option="I"),
        FedDWA(guidance="full_grad"),
        APFL(),
        PFedMe(),
        PerFedAvg(),
        FactorizedWaffle(),
    ],
)
def test_a_method_of_whole_gradients_refuses_clipping(alg):
    with pytest.raises(
        ValueError, match=rf"^clip_grad: {type(alg).__name__} .*leave clip_grad out"
    ):
        Simulation(alg, build, federation(), Training(clip_grad=1.0))


def test_option_ii_with_clipping_is_the_mean_of_the_clipped_gradients():
    def c(option, **clip):
        s = made(Training(lr=0.1, batch_size=10, weight_decay=0.1, **clip))
        return play(Scaffold(option=option), s, 2)[-1][0].clients["c"]

    near(c("mean_grad", clip_grad=0.3), c("II", clip_grad=0.3))
    assert not torch.allclose(c("mean_grad", clip_grad=0.3), c("mean_grad"))


REFUSED = {"mocha", "apfl", "pfedme", "per_fedavg", "qfedavg", "factorized_waffle"}


@pytest.mark.parametrize("name", swept({*ALGORITHMS} - REFUSED))
def test_the_others_train_by_adamw(name):
    simulation = Simulation(name, Net(tiny_model()), images(), Training(**ADAMW), rounds=2)
    assert simulation.run().rounds[-1]["eval"]["loss"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": -1.0}, "lr: expected"),
        ({"batch_size": 0}, "batch_size: expected"),
        ({"epochs": 0}, "epochs: expected"),
        ({"momentum": 1.0}, "momentum: expected"),
        ({"weight_decay": -0.1}, "weight_decay: expected"),
        ({"local_optimizer": "adam"}, "local_optimizer: expected 'sgd' or 'adamw', got 'adam'"),
        ({"betas": (0.9, 1.0)}, "betas: expected"),
        ({"eps": -1.0}, "eps: expected"),
        ({"local_optimizer": "adamw", "momentum": 0.9}, "momentum: AdamW has betas in its place"),
        ({"clip_grad": 0.0}, "clip_grad: expected a finite number above 0"),
    ],
)
def test_what_is_refused(given, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        Training(**given)
