"""AdamW and clipping: algorithms that train with them, or refuse them."""

from dataclasses import replace

import pytest
import torch
from entry_points import sentence
from parts.user import simulation
from places import tabled
from small import double, near, play, swept, tiny

from pflcore import Training, step
from pflcore.algorithms import ALGORITHMS, Scaffold
from pflcore.simulation.round import RunConfig, initial_state

ADAMW = {"lr": 0.01, "local_optimizer": "adamw", "weight_decay": 0.1}
REFUSED = """\
adamw | feddwa | {"guidance": "full_grad"}
adamw | apfl | {}
adamw | pfedme | {}
adamw | per_fedavg | {}
adamw | factorized_waffle | {}
adamw | scaffold | {"option": "II"}
adamw | waffle | {"option": "II"}
adamw | mocha | {}
adamw | qfedavg | {"q": 1.0}
adamw | fednova | {}
adamw | feddbe | {}
clip | feddwa | {"guidance": "full_grad"}
clip | apfl | {}
clip | pfedme | {}
clip | per_fedavg | {}
clip | factorized_waffle | {}
clip | scaffold | {"option": "I"}
clip | feddbe | {}
"""
SAID = {
    "adamw": (ADAMW, r"local_optimizer: {} .*; leave it at 'sgd'\.$"),
    "clip": ({"clip_grad": 1.0}, "clip_grad: {} .*leave it at None"),
}


@pytest.mark.parametrize("what, name, options", tabled(REFUSED))
def test_a_method_whose_formula_rests_on_plain_sgd_refuses_the_rest(
    what, name, options
):
    training, message = SAID[what]
    alg = ALGORITHMS[name](**options)
    words = message.format(type(alg).__name__)
    with sentence(words):
        simulation(alg, training=Training(**training))
    s = tiny(**training)
    s = replace(s, net=alg.prepare(s.net))
    with sentence(words):
        step(RunConfig.of(alg, s), initial_state(alg, s.net, 3), torch.arange(3))


def test_option_ii_with_clipping_is_the_mean_of_the_clipped_gradients():
    def c(option, **clip):
        s = double(tiny(batch_size=10, weight_decay=0.1, **clip))
        return play(Scaffold(option=option), s, 2)[-1][0].clients["c"]

    near(c("mean_grad", clip_grad=0.3), c("II", clip_grad=0.3))
    assert not torch.allclose(c("mean_grad", clip_grad=0.3), c("mean_grad"))


OTHERS = {*ALGORITHMS} - {
    "mocha",
    "apfl",
    "pfedme",
    "per_fedavg",
    "qfedavg",
    "factorized_waffle",
    "fednova",
    "feddbe",
}


@pytest.mark.parametrize("name", swept(OTHERS))
def test_the_others_train_by_adamw(name):
    history = simulation(name, training=Training(**ADAMW), rounds=2).run()
    assert history.rounds[-1]["eval"]["loss"]


def test_what_is_refused():
    with sentence("momentum: AdamW has betas in its place"):
        Training(local_optimizer="adamw", momentum=0.9)
    for name, value in (("betas", (0.9, 0.95)), ("eps", 1e-6)):
        with sentence(
            f"{name}: SGD has none, got .*; leave it out, or take "
            "local_optimizer='adamw"
        ):
            Training(**{name: value})
        Training(**{name: value}, local_optimizer="adamw")
    for betas in (
        (0.9,),
        (0.9, 1.0),
        (0.9, -0.1),
        0.9,
        "ab",
        (True, 0.5),
        (0.9, 0.9, 0.9),
    ):
        with sentence("betas: expected two numbers from 0 to below 1, got"):
            Training(local_optimizer="adamw", betas=betas)
    with sentence("eps: expected a finite number above 0, got 0"):
        Training(local_optimizer="adamw", eps=0)


def test_torchs_own_betas_are_the_default():
    plain, explicit = (
        simulation("ditto", training=Training(**ADAMW, **settings), rounds=2).run()
        for settings in ({}, {"betas": [0.9, 0.999], "eps": 1e-8})
    )
    other = Training(**ADAMW, betas=(0.5, 0.6))
    x = plain.state.server["x"]
    assert torch.equal(x, explicit.state.server["x"])
    assert not torch.equal(
        x, simulation("ditto", training=other, rounds=2).run().state.server["x"]
    )
    assert plain.header["training"]["betas"] is None
    assert explicit.header["training"]["betas"] == [0.9, 0.999]
