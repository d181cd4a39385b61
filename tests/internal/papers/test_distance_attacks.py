"""Attacks by clients that know the server's rule, against their formulas."""

import pytest
import torch
from parts.attacks import BAD, run, updates
from small import equals

from bench.distance_attacks import DistanceAdversary, distance_adversary
from pflcore.algorithms import Cohort, FedDWA, Traits, Waffle
from pflcore.ops import waffle_weights
from pflcore.simulation._attacks import Adversary
from pflcore.simulation._rows import CohortRows
from pflcore.simulation._uploads import CohortResult


def trained(up, ids=None):
    s = len(next(iter(up.values())))
    ids = torch.arange(s) if ids is None else torch.tensor(ids)
    cohort = Cohort(ids, torch.ones(s, dtype=torch.long), s)
    rows = CohortRows({}, torch.empty(s, 0), up=up, loss=torch.zeros(s))
    return CohortResult(cohort, {}, {}, rows)


def sent(attack, up, bad, strength=None, traits=None, server=None, victims=None):
    if attack == "sign_flip":
        adversary = Adversary(attack, bad, strength)
    else:
        adversary = distance_adversary(attack, tuple(bad), strength, victims)
    return adversary.attack_uploads(trained(up), traits or Traits(), server or {}).up


BOTH = torch.tensor([2, 5])
HONEST = torch.tensor([i for i in range(9) if i not in BOTH])


def feddwa_uploads():
    """Models near a common one, guidance near the models, and their traits."""
    start = updates(1).expand(9, -1)
    w = start + updates()
    up = {"w": w, "g": w + 0.1 * updates(10)[1:]}
    traits = FedDWA().traits._replace(model_uploads={"w": "server.x", "g": "server.x"})
    return up, {"traits": traits, "server": {"x": start}}


def feddwa_matrix(up, k=9):
    """FedDWA's weights [S, S] of the uploads."""
    weight, index = FedDWA(k=k).mixing_weights(up["g"], up["w"])
    return torch.zeros(9, 9, dtype=torch.float64).scatter(1, index, weight)


def waffle_row(up, target=0):
    """WAFFLE's raw weights [S] of the uploads, for the target."""
    distance = (up["delta"] - up["delta"][target]).norm(dim=1)
    return waffle_weights(distance, target, omega=0.8)


@pytest.mark.parametrize("victims", [None, (7,)])
@pytest.mark.parametrize("k", [3, 9])
def test_no_honest_client_outweighs_a_nearby_one_in_feddwa(k, victims):
    up, rest = feddwa_uploads()
    attacked = sent("nearby", up, BOTH.tolist(), victims=victims, **rest)
    weight = feddwa_matrix(attacked, k)
    for attacker, victim in zip(BOTH, (7, 7) if victims else (0, 1), strict=True):
        most = weight[victim, HONEST].max()
        assert weight[victim, attacker] >= most * (1 - 1e-9)
    equals(attacked["g"], up["g"])


def test_no_honest_client_but_the_target_outweighs_a_nearby_one_in_waffle():
    up = {"delta": updates()}
    traits = Waffle().traits
    weight = waffle_row(sent("nearby", up, BOTH.tolist(), traits=traits))
    assert (weight[BOTH] >= weight[HONEST[1:]].max() * (1 - 1e-9)).all()
    naive = waffle_row(sent("sign_flip", up, BOTH.tolist(), traits=traits))
    assert (naive[BOTH] < weight[BOTH]).all()


def test_of_uploads_that_do_as_much_harm_the_nearby_one_weighs_most():
    up, rest = feddwa_uploads()
    delta = {"delta": updates()}
    m = (up["w"] - rest["server"]["x"])[HONEST].mean(0)
    aside = torch.randn(7, generator=torch.manual_seed(0), dtype=torch.float64)
    for uploads, key, rule, along, more in (
        (up, "w", lambda u: feddwa_matrix(u)[0], m, rest),
        (delta, "delta", waffle_row, delta["delta"][HONEST].mean(0), {}),
    ):
        got = sent("nearby", uploads, BOTH.tolist(), victims=(0,), **more)
        step = aside - (aside @ along) / (along @ along) * along
        moved = got[key].clone()
        moved[2] += 0.1 * step / step.norm()
        assert rule({**got, key: moved})[2] < rule(got)[2]


@pytest.mark.parametrize("num_bad", [1, 2])
def test_feddwa_bounds_what_any_upload_can_move(num_bad):
    """The bound is sqrt(B / H) / 2, with H the sum of 1 / d^2 of honest models."""
    up, rest = feddwa_uploads()
    bad = BOTH[:num_bad]
    is_bad = torch.isin(torch.arange(9), bad)
    guide = up["g"][0]
    sqdist = (up["w"] - guide).square().sum(1)
    h = float((1 / sqdist[~is_bad]).sum())
    bound = (num_bad / h) ** 0.5 / 2
    gen = torch.Generator().manual_seed(0)

    def moved(uploads):
        weight = feddwa_matrix(uploads)[0, bad]
        return float((weight @ (uploads["w"][bad] - guide)).norm())

    for scale in torch.logspace(-4, 4, 50):
        away = scale * torch.randn(num_bad, 7, generator=gen, dtype=torch.float64)
        w = up["w"].index_put((bad,), guide + away)
        assert moved({**up, "w": w}) <= bound * (1 + 1e-9)
    # At this strength "nearby" reaches the bound, and at 1 it is not far from it.
    nearest = float(sqdist[~is_bad].min().sqrt())
    strength = (num_bad / h) ** 0.5 / nearest
    best = sent("nearby", up, bad.tolist(), strength, victims=(0,), **rest)
    assert moved(best) == pytest.approx(bound)
    plain = sent("nearby", up, bad.tolist(), victims=(0,), **rest)
    assert moved(plain) > 0.9 * bound


def test_a_blind_attacker_knows_only_the_attackers_work():
    up, rest = feddwa_uploads()
    others = {key: rows.index_fill(0, HONEST, 7.0) for key, rows in up.items()}
    for bad in (BOTH, BOTH[:1]):
        got = sent("nearby_blind", up, bad.tolist(), **rest)["w"][bad]
        equals(got, sent("nearby_blind", others, bad.tolist(), **rest)["w"][bad])
        assert not torch.equal(got, up["w"][bad])
    # Alone, and without a guidance model, it has no distance but its update's length.
    alone = sent("nearby_blind", {"delta": updates()}, (2,), 3.0)["delta"]
    torch.testing.assert_close(alone[2], -2 * updates()[2])


def test_victims_are_shared_out_and_a_control_variate_is_scaled_alone():
    rows = updates()
    up = {"delta": rows, "control": rows + 1}
    got = sent("control", up, [4], 3.0)
    equals((got["delta"], got["control"][4]), (rows, 3.0 * up["control"][4]))
    # The attackers know all honest work, and none of the victims takes part.
    ids = list(range(1, 10))
    adversary = DistanceAdversary("nearby", (1, 2), 1.0, (0, 11))
    away = adversary.attack_uploads(trained({"delta": rows}, ids), Traits(), {}).up
    every = sent("nearby", {"delta": rows}, (0, 1))
    equals(away["delta"], every["delta"])


def test_a_nearby_attacker_weighs_as_much_in_a_run():
    bad = distance_adversary("nearby", tuple(BAD), victims=(3,))
    history = run("feddwa", rounds=2, adversary=bad).run()
    assert history.header["adversary"]["victims"] == [3]
    (_, weights) = history.weights()
    for weight in weights:
        assert weight[3, BAD].min() >= weight[3, :8].max() * (1 - 1e-3)
