"""FedAMP, SFL and MOCHA at and over their edges."""

import warnings

import pytest
import torch
from parts.rivals import GOLDEN, close
from small import after, images, lead, points, some, t, tiny, tiny_model

from pflcore import Simulation
from pflcore.algorithms import SFL, FedAMP, FedDWAQP, HeurFedAMP, Mocha, Stop


def test_golden_fedamp_with_too_large_a_step():
    c2 = GOLDEN["C2_fedamp_unstable_alpha"]
    w = t(c2["W"])
    with pytest.warns(UserWarning, match=r"alpha <= sigma / 3"):
        ((safe, _),) = lead(FedAMP(), w[0], 4, [({"w": w}, some(4))])
    others = t(c2["xi"]).fill_diagonal_(0)
    close(safe["weights"], others / others.sum(1, keepdim=True))


@pytest.mark.parametrize(
    "count, alpha, warns", [(2, 1.0, False), (3, 1.0, True), (5, 0.25, False)]
)
def test_fedamp_warns_where_equal_models_would_weigh_more_than_all(count, alpha, warns):
    """All models are equal at first; alpha <= sigma / (N - 1) never warns."""
    w = torch.ones(count, 6, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ((state, _),) = lead(
            FedAMP(alpha=alpha), w[0], count, [({"w": w}, some(count))]
        )
    assert bool(caught) is warns
    assert (state["weights"].diagonal() >= 0).all()


def test_fedamp_reports_the_rounds_of_its_models_and_who_was_scaled_down():
    w = torch.ones(4, 6, dtype=torch.float64)
    with pytest.warns(UserWarning, match="scaled down"):
        ((state, _),) = lead(FedAMP(), w[0], 4, [({"w": w[:3]}, some(4, 7, [0, 1, 3]))])
    report = FedAMP().report(state, None, some(4))
    assert report["last"].tolist() == [7, 7, 0, 7] and int(report["rescaled"]) == 3
    ((calm, _),) = lead(
        FedAMP(alpha=0.1), w[0], 4, [({"w": w[:3]}, some(4, 7, [0, 1, 3]))]
    )
    assert int(FedAMP(alpha=0.1).report(calm, None, some(4))["rescaled"]) == 0


def distant_models(scale):
    gen = torch.Generator().manual_seed(0)
    return scale * torch.randn(4, 50, generator=gen, dtype=torch.float64)


@pytest.mark.parametrize(
    "alg, scale, count",
    [
        (FedAMP(), 3.0, 1),
        (FedAMP(alpha=0.1), 0.01, 0),
        (HeurFedAMP(xi_self=0.999), 3.0, 0),
    ],
)
def test_a_run_warns_once_of_models_too_far_for_sigma(alg, scale, count):
    """Each round of the three has other models, and so another distance in words."""
    rounds = [({"w": distant_models(scale * r)}, some(4, r)) for r in (1, 2, 3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states = lead(alg, torch.zeros(50).double(), 4, rounds)
    texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(texts) == count
    assert all("in the median: give sigma near that, got 1" in text for text in texts)
    assert bool(states[-1][0]["warned"]) is (count == 1)


def test_a_client_alone_is_not_too_far_from_others():
    w = distant_models(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        lead(FedAMP(), w[0], 4, [({"w": w[:1]}, some(4, 1, [2]))])


def test_fedamp_evaluates_the_trained_model_also_from_a_mixed_start():
    """Running statistics stay with their client, from either start."""
    alg = FedAMP(start="u")
    own = torch.zeros(2, 3)
    mixed = torch.ones(2, 3)

    assert alg.model({"u": mixed}, {"w": own}, None)["w"] is own
    assert alg.traits.batch_norm == ("local",)


def test_sfl_of_another_graph_is_another():
    ring = torch.eye(3).roll(1, 0)
    line = torch.eye(3)
    assert SFL(ring) == SFL(ring.clone()) and hash(SFL(ring)) == hash(SFL(ring.clone()))
    for other in (SFL(line), SFL(), SFL(torch.eye(4)), SFL(ring, k=3), FedAMP()):
        assert SFL(ring) != other and other != SFL(ring)
    assert SFL() == SFL() and SFL(k=3) != SFL()


@pytest.mark.parametrize("ridge, share", [(0.0, 0.75), (1e-10, None)])
def test_feddwa_qp_tells_models_apart_that_are_a_millionth_of_the_way_to_the_guide(
    ridge, share
):
    """The mixture is the point of two models' segment that is nearest to the guide.

    The default ridge makes an even mix instead.
    """
    a = 1e-6
    w = t([[-a, 0.0], [3 * a, 0.0]])
    guide = t([[0.0, 1.0]] * 2)
    weight, index = FedDWAQP(k=2, ridge=ridge).mixing_weights(guide, w)
    first = weight.gather(1, index.argsort(1))[:, 0]
    want, tolerance = (0.5, 0.05) if share is None else (share, 1e-3)
    assert first.tolist() == pytest.approx([want] * 2, abs=tolerance)


@pytest.mark.parametrize("wrong", [torch.ones(2, 3), -torch.eye(3)])
def test_sfl_of_a_graph_that_is_none(wrong):
    with pytest.raises(ValueError, match=r"^adjacency: expected 3 x 3 numbers >= 0"):
        SFL(wrong).adjacency_matrix(torch.zeros(3, 3), torch.ones(3))


def test_a_run_goes_on_without_the_client_whose_step_size_is_not_the_others():
    """The round is that of the other clients; the record says which was dropped."""

    class Odd(Mocha):
        def train(self, down, client_state, clients):
            new, up, fit = super().train(down, client_state, clients)
            return (
                new,
                up | {"lr": up["lr"].clone().index_fill_(0, torch.tensor([2]), 1e3)},
                fit,
            )

    with pytest.warns(
        RuntimeWarning, match="client number 2: its 'lr' holds 1000, expected a number"
    ):
        history = Simulation(Odd(), tiny_model(), images((12,) * 4), rounds=4).run()
    assert [r["dropped"] for r in history.rounds] == [[2]] * 4
    assert history.stopped is None and not any(r["void"] for r in history.rounds)
    assert all(r["relative_update_norm"][2] is None for r in history.rounds)


def test_an_unstable_mocha_stops_with_a_sentence():
    with pytest.raises(
        Stop, match=r"lr 0\.1, lam 6 and delta 0\.01 .* must be below 2.*\.$"
    ):
        after(Mocha(lam=6.0), tiny(), 20)
    # The first relation is checked, too.
    with pytest.raises(Stop, match=r"^MOCHA is unstable from round 1 on"):
        after(Mocha(lam=2.0, outer=50), points([1.0] * 6, 0.5))
