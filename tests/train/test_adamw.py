"""AdamW and clipping: who trains by them, and who refuses them."""

import pytest
import torch
from doors import sentence
from methods import (
    APFL,
    FactorizedWaffle,
    FedDWA,
    Mocha,
    PerFedAvg,
    PFedMe,
    QFedAvg,
    Scaffold,
    Waffle,
)
from small import double, images, near, play, swept, tiny, tiny_model

from pflcore import Net, Simulation, Training, step
from pflcore.algorithms import ALGORITHMS
from pflcore.simulation.round import Setup, begin

ADAMW = {"lr": 0.01, "local_optimizer": "adamw", "weight_decay": 0.1}
BOTH = (FedDWA(guidance="full_grad"), APFL(), PFedMe(), PerFedAvg(), FactorizedWaffle())
REFUSED = [  # training, method, what is said
    *(
        (ADAMW, alg, r"local_optimizer: {} .*; take local_optimizer='sgd'\.$")
        for alg in (*BOTH, Scaffold(option="II"), Waffle(option="II"), Mocha(), QFedAvg(q=1.0))
    ),
    *(
        ({"clip_grad": 1.0}, alg, "clip_grad: {} .*leave clip_grad out")
        for alg in (*BOTH, Scaffold(option="I"))
    ),
]


@pytest.mark.parametrize("training, alg, said", REFUSED)
def test_a_method_whose_formula_rests_on_plain_sgd_refuses_the_rest(training, alg, said):
    words = said.format(type(alg).__name__)
    with sentence(words):
        Simulation(alg, tiny_model(), images(), Training(**training))
    s = tiny(**training)
    s = s._replace(net=alg.prepare(s.net))
    with sentence(words):
        step(Setup(alg, s), begin(alg, s.net, 3), torch.arange(3))


def test_option_ii_with_clipping_is_the_mean_of_the_clipped_gradients():
    def c(option, **clip):
        s = double(tiny(batch_size=10, weight_decay=0.1, **clip))
        return play(Scaffold(option=option), s, 2)[-1][0].clients["c"]

    near(c("mean_grad", clip_grad=0.3), c("II", clip_grad=0.3))
    assert not torch.allclose(c("mean_grad", clip_grad=0.3), c("mean_grad"))


OTHERS = {*ALGORITHMS} - {"mocha", "apfl", "pfedme", "per_fedavg", "qfedavg", "factorized_waffle"}


@pytest.mark.parametrize("name", swept(OTHERS))
def test_the_others_train_by_adamw(name):
    simulation = Simulation(name, Net(tiny_model()), images(), Training(**ADAMW), rounds=2)
    assert simulation.run().rounds[-1]["eval"]["loss"]


def test_what_is_refused():
    with sentence("momentum: AdamW has betas in its place"):
        Training(local_optimizer="adamw", momentum=0.9)
