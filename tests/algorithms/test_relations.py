"""FedAMP, SFL and MOCHA at and over their edges."""

import pytest
import torch
from methods import SFL, FedAMP, Mocha
from parts.rivals import GOLDEN, close
from small import after, images, lead, points, some, t, tiny, tiny_model

from pflcore import Simulation
from pflcore.algorithms import Stop


def test_golden_fedamp_with_too_large_a_step():
    c2 = GOLDEN["C2_fedamp_unstable_alpha"]
    w = t(c2["W"])
    with pytest.warns(UserWarning, match=r"alpha <= sigma / 3"):
        ((safe, _),) = lead(FedAMP(), w[0], 4, [({"w": w}, some(4))])
    others = t(c2["xi"]).fill_diagonal_(0)
    close(safe["weights"], others / others.sum(1, keepdim=True))


@pytest.mark.parametrize("wrong", [torch.ones(2, 3), -torch.eye(3)])
def test_sfl_of_a_graph_that_is_none(wrong):
    with pytest.raises(ValueError, match=r"^adjacency: expected 3 x 3 numbers >= 0"):
        SFL(wrong).graph(torch.zeros(3, 3), torch.ones(3))


def test_a_run_goes_on_without_the_client_whose_step_size_is_not_the_others():
    """Its round is that of the others; the record says that it was dropped."""

    class Odd(Mocha):
        def train(self, down, own, clients):
            new, up, fit = super().train(down, own, clients)
            return new, up | {"lr": up["lr"].clone().index_fill_(0, torch.tensor([2]), 1e3)}, fit

    with pytest.warns(RuntimeWarning, match="client number 2: its step size is 1000, the others'"):
        history = Simulation(Odd(), tiny_model(), images((12,) * 4), rounds=4).run()
    assert [r["dropped"] for r in history.rounds] == [[], [2], [], [2]]
    assert history.stopped is None and not any(r["void"] for r in history.rounds)
    assert [r["moved"][2] is None for r in history.rounds] == [False, True, False, True]


def test_an_unstable_mocha_stops_with_a_sentence():
    with pytest.raises(Stop, match=r"lr 0\.1, lam 6 and delta 0\.01 .* must be below 2.*\.$"):
        after(Mocha(lam=6.0), tiny(), 20)
    # the first relation is checked, too
    with pytest.raises(Stop, match=r"^MOCHA is unstable from round 1 on"):
        after(Mocha(lam=2.0, outer=50), points([1.0] * 6, 0.5))
