"""Tests of attacks on uploads.

They have golden numbers. An attack finds the private data that are there, and finds
nothing where there are none.
"""

import re

import pytest
import torch
from entry_points import sentence, strengths
from places import golden, tabled
from small import layers, near

from bench.papers import privacy
from pflcore import Federation, Net, Training
from pflcore.algorithms import ALGORITHMS, FactorizedWaffle
from pflcore.nn import factorize

D = torch.float64


def noise(n):
    """Samples with random labels.

    A model can only learn them by heart.
    """
    gen = torch.Generator().manual_seed(0)
    return torch.randn(n, 12, generator=gen), torch.randint(0, 3, (n,), generator=gen)


def model():
    return layers("Linear 12 40, ReLU, Linear 40 3")


def federation():
    index = list(torch.arange(120).split(30))
    return Federation(*noise(120), {"train": index[:2], "test": index[2:]}, 3)


# -- measures ----------------------------------------------------------------


def test_accuracy_and_f1():
    score = torch.tensor([1.0] * 40 + [0.0] * 10 + [1.0] * 12 + [0.0] * 38)
    got = privacy.measures(score, torch.arange(100) < 50)
    assert (got["accuracy"], got["f1"]) == pytest.approx((0.78, 0.7843137255), rel=1e-9)


def test_auc_and_true_positives_against_counting():
    member = torch.rand(400) < 0.5
    # The rounded scores have many ties.
    score = (torch.randn(400) + member).mul(4).round()
    inside = score[member]
    out = score[~member]
    pairs = (inside[:, None] > out).double() + 0.5 * (inside[:, None] == out).double()
    got = privacy.measures(score, member)
    assert got["auc"] == pytest.approx(pairs.mean().item())
    few = [t for t in score.unique() if (out > t).sum() <= 0.01 * len(out)]
    best = max((inside > t).double().mean().item() for t in few)
    assert got["tpr"] == pytest.approx(best)
    low, high = privacy.intervals(score, member)["auc"]
    assert low < got["auc"] < high < low + 0.15


# -- uploads -----------------------------------------------------------------


def caught(algorithm, data, lr=0.3, epochs=20):
    training = Training(lr=lr, batch_size=10, epochs=epochs)
    return privacy.intercept(algorithm, model, data, training, 3, workers=1)


@pytest.mark.parametrize(
    "name", ["fedavg", "feddwa", "scaffold", "fedfomo", "factorized_waffle"]
)
def test_the_upload_is_the_clients_model(name):
    alg = ALGORITHMS[name]()
    data = federation()
    if alg.traits.needs_val:
        data = data.split(val=0.2, seed=100, of=("train",))
    got = caught(alg, data)
    assert got.row.shape == (2, got.net.size) and not torch.equal(
        got.row[0], got.row[1]
    )
    for i, row in enumerate(got.row):
        x, y = data.client(i)
        # The client's model has learned the client's noise by heart.
        assert (got.net(row, x).argmax(1) == y).float().mean() > 0.8


# An algorithm, the learning rate, the size of the attack, and words of the error.
REFUSED = """\
local | 0.3 | {} | algorithm: its upload (nothing) sh
mrmtl | 0.3 | {} | algorithm: MR-MTL uploads how far
fedavg | 1e30 | {"samples": 5, "shadows": 1} | training: client(s) [0, 1] sent updates
fedavg | 0.3 | {"samples": 400} | samples: expected at most 12 of these data a client, got 400
fedavg | 0.3 | {"clients": 0} | clients: expected a whole number
fedavg | 0.3 | {"shadows": -1} | shadows: expected a whole number
"""  # noqa: E501


@pytest.mark.parametrize("name, lr, size, words", tabled(REFUSED))
def test_what_cannot_be_attacked_is_one_sentence(name, lr, size, words):
    with sentence(re.escape(words)):
        how = privacy.Played(**{"clients": 2, "samples": 9, "workers": 1} | size)
        args = model, noise(210), 3, Training(lr=lr, batch_size=10)
        privacy.membership(ALGORITHMS[name](), *args, how)


@pytest.mark.deep("it takes a second")
def test_views_of_a_dictionary():
    alg = FactorizedWaffle(ranks=(10,), lr_var=1.0)
    data = federation()
    got = caught(alg, data, lr=0.1, epochs=10)
    at = strengths(got.net)
    known = noise(60)
    seen = privacy.views(alg, got, known)
    b = {k: rows[:, at] / got.row[:, at] for k, rows in seen.items()}
    elsewhere = torch.ones(got.net.size, dtype=torch.bool).index_fill(0, at, False)
    assert all(
        torch.equal(rows[:, elsewhere], got.row[:, elsewhere]) for rows in seen.values()
    )
    prior = alg.init_client({}, got.net, 1)["q"][0][:10].sigmoid()
    torch.testing.assert_close(b["all"], torch.ones(2, 10))
    torch.testing.assert_close(b["prior"], prior.expand(2, -1))
    assert set(b["random"].round(decimals=4).unique().tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(b["own"], got.own["q"][:, :10].sigmoid())
    losses = {k: got.net.loss(rows[0], *known) for k, rows in seen.items()}
    assert losses["adaptive"] < min(losses["all"], losses["prior"], losses["random"])
    assert set(privacy.views(ALGORITHMS["fedavg"](), got, known)) == {"upload"}


def test_an_update_betrays_the_factors_that_were_used():
    """The difference of download and upload shows the factors in use.

    A factor with b = 0 gets no gradient.
    """
    net = Net(lambda: factorize(model(), 10))
    used = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1, 0, 1])
    at, x, y = strengths(net), *noise(40)
    w = net.w0.clone()
    for _ in range(20):
        row = w.index_copy(0, at, w[at] * used).requires_grad_()
        (g,) = torch.autograd.grad(net.loss(row, x, y), row)
        w -= 0.1 * g.index_copy(0, at, g[at] * used)
    found = privacy.trace(net, privacy.Upload(net, net.w0[None], w[None], {}))[0]
    assert torch.equal(found > 0.2, used > 0) and bool((found[used == 0] == 0).all())


# -- membership --------------------------------------------------------------


def attack(rounds, lr):
    t = Training(lr=lr, batch_size=10, epochs=10)
    how = privacy.Played(2, 40, rounds, shadows=2, ratios=6, workers=1)
    found = privacy.membership(
        ALGORITHMS["fedavg"](), model, noise(2000), 3, t, how
    ).verdicts
    return {(v.view, v.attack): v for v in found}


@pytest.mark.deep("it takes seconds")
def test_members_of_an_overfitted_model_are_found():
    found = attack(5, 0.3)
    assert set(found) == {("upload", "shadow models"), ("upload", "LiRA")}
    for verdict in found.values():
        assert verdict.train > 0.9 and verdict.test < 0.6
        least = {"auc": 0.9, "accuracy": 0.8, "f1": 0.8}
        assert all(verdict.value[k] > v for k, v in least.items())


@pytest.mark.deep("it takes a second")
def test_a_model_that_learned_nothing_gives_nothing_away():
    for verdict in attack(1, 1e-6).values():
        low, high = verdict.interval["auc"]
        assert (
            low - 0.02 < 0.5 < high + 0.02
            and abs(verdict.value["accuracy"] - 0.5) < 0.15
        )


def test_lira_is_the_likelihood_ratio():
    inside = torch.rand(200, 300) < 0.5
    centre = torch.randn(300)
    noisy = torch.randn(200, 300) * torch.where(inside, 0.5, 0.8)
    shadow = centre + inside.float() + noisy
    target = centre + 0.3
    normal = torch.distributions.Normal
    want = normal(centre + 1, 0.5).log_prob(target) - normal(centre, 0.8).log_prob(
        target
    )
    got = privacy.lira(shadow, inside, target)
    assert (got - want).abs().mean() < 0.15
    z = torch.randn(5, 4, dtype=D)
    y = torch.tensor([0, 1, 2, 3, 0])
    p = z.softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(privacy.confidence(z, y), (p / (1 - p)).log())


def test_a_class_that_the_shadows_hardly_know():
    """The attack model of all classes judges the members of this class."""

    def records(n, rare):
        y = torch.cat([torch.full((rare,), 2), torch.arange(n - rare) % 2])
        member = torch.arange(n) % 2 == 0
        z = torch.randn(n, 3)
        return z.scatter_add(1, y[:, None], 6.0 * member[:, None].float()), y, member

    z, y, member = records(400, 10)
    score = privacy.shokri(records(400, 10), (z, y), 3)
    for n in (400, 10):
        assert privacy.measures(score[:n], member[:n])["auc"] > 0.9


# -- inversion ---------------------------------------------------------------


def test_model_inversion_step_by_step():
    hand = golden("inversion")
    w, bias = (torch.tensor(hand[k], dtype=D) for k in ("weight", "bias"))

    def scores(x):
        return x @ w.T + bias

    begin = torch.zeros(1, 3, dtype=D), torch.tensor([1])
    for steps, want in enumerate(hand["steps"]):
        got = privacy.invert(scores, *begin, steps=steps)
        for value, one in zip(got, want, strict=False):
            near(value[0], one, rtol=1e-7, atol=5e-10)
    got, sure = privacy.invert(
        scores, torch.zeros(2, 3, dtype=D), torch.tensor([0, 1]), lr=2.0
    )
    # The inversion stops where the model is confident.
    assert bool((sure >= 0.99).all()) and bool((sure < 0.995).all())
    for low, high in ((-0.01, 0.02), (torch.full((3,), -0.01, dtype=D), 0.02)):
        held, _ = privacy.invert(scores, *begin, low=low, high=high)
        assert (float(held.min()), float(held.max())) == pytest.approx((-0.01, 0.02))


def test_likeness():
    a, b = torch.rand(2, 3, 1, 16, 16)
    same, other = (privacy.likeness(a, v, 1.0) for v in (a, b))
    assert same == pytest.approx({"correlation": 1, "ssim": 1, "mse": 0}, abs=1e-5)
    assert abs(other["correlation"]) < 0.2 and other["ssim"] < 0.3
    assert other["mse"] == pytest.approx(1 / 6, rel=0.1)
    assert privacy.likeness(-2 * a, a, 1.0)["correlation"] == pytest.approx(-1)
