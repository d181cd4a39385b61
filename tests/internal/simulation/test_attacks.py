"""Tests of attacks and defences against their formulas and Flower's defences."""

from itertools import product

import numpy as np
import pytest
import torch
from parts.attacks import BAD, MEANS, N, run, updates
from small import equals, served, t

from pflcore import ALGORITHMS, FedAvg
from pflcore.algorithms import Cohort, FedDWA, Scaffold, Traits, Waffle
from pflcore.ops import waffle_weights
from pflcore.ops._robust import SORT_BLOCK_COLUMNS
from pflcore.results.record import group_runs
from pflcore.results.table import table
from pflcore.robust import Bulyan, CenteredClipping, FLTrust, median
from pflcore.simulation._attacks import DEFAULT_STRENGTH, Adversary
from pflcore.simulation._rows import CohortRows
from pflcore.simulation._uploads import CohortResult, accept, update_norms

# All but "private", which is no robust mean.
DEFENCES = tuple(name for name in MEANS if name != "private")


def accuracy(simulation):
    return float(simulation.run().series()[1][-1].nanmean())


def mean_of(name, rows, size=None):
    s = len(rows)
    size = torch.ones(s, dtype=torch.float64) if size is None else size
    few = {"bulyan": Bulyan(1), "centered_clipping": CenteredClipping(10.0, 5)}
    mean = few.get(name, MEANS[name])
    kept, mix, _ = mean(rows, Cohort(torch.arange(s), size, s))
    return (mix.weight.to(kept) @ kept)[0]


def trained(up, ids=None):
    s = len(next(iter(up.values())))
    ids = torch.arange(s) if ids is None else torch.tensor(ids)
    cohort = Cohort(ids, torch.ones(s, dtype=torch.long), s)
    rows = CohortRows({}, torch.empty(s, 0), up=up, loss=torch.zeros(s))
    return CohortResult(cohort, {}, {}, rows)


def sent(attack, up, bad, strength=None, traits=None, server=None, victims=None):
    adversary = Adversary(attack, bad, strength, victims)
    return adversary.attack_uploads(trained(up), traits or Traits(), server or {}).up


def test_each_attack_is_its_formula():
    rows = updates()
    bad = [2, 5]
    honest = [i for i in range(9) if i not in bad]
    m = rows[honest].mean(0)
    v = rows[honest].std(0, correction=0)
    for attack, strength, want in (
        ("sign_flip", None, -rows[bad]),
        ("sign_flip", 3.0, -3 * rows[bad]),
        ("scale", None, 100 * rows[bad]),
        ("little", None, (m - 1.5 * v).expand(2, -1)),
        ("inner_product", None, (-10 * m).expand(2, -1)),
    ):
        got = sent(attack, {"delta": rows}, bad, strength)["delta"]
        torch.testing.assert_close(got[bad], want)
        equals(got[honest], rows[honest])
    wide = updates(4, 40_000)
    noise = (sent("noise", {"delta": wide}, (1,))["delta"] - wide)[1]
    ratio = float(noise.square().mean().sqrt() / wide[1].square().mean().sqrt())
    assert ratio == pytest.approx(10, rel=0.02)


def test_an_uploaded_model_is_attacked_as_an_update_and_a_control_variate_by_itself():
    rows = updates()
    control = updates() + 1
    got = sent("sign_flip", {"delta": rows, "control": control}, (4,))["control"]
    equals((got[4], got[:4]), (-control[4], control[:4]))
    models = updates() * 2
    traits = Traits(model_uploads={"w": "server.w"})
    got = sent("sign_flip", {"w": rows}, [4], None, traits, {"w": models})
    torch.testing.assert_close(got["w"][4], models[4] - (rows[4] - models[4]))
    # No client is honest. The attack then takes the mean of all updates.
    every = sent("inner_product", {"delta": rows}, tuple(range(9)))["delta"]
    torch.testing.assert_close(every, (-10 * rows.mean(0)).expand(9, -1))


@pytest.mark.parametrize("attack", ["label_flip", *DEFAULT_STRENGTH])
def test_an_attacked_run_repeats_itself_and_says_what_it_is(attack):
    bad = Adversary(attack, BAD)
    name = "scaffold" if attack == "control" else "fedavg"
    one, two, clean = (
        run(name, rounds=2, every=1, adversary=a).run() for a in (bad, bad, None)
    )
    x = one.state.server["x"]
    equals(x, two.state.server["x"])
    assert not torch.equal(x, clean.state.server["x"])
    strength = DEFAULT_STRENGTH.get(attack)
    want = {"attack": attack, "clients": [*BAD], "strength": strength}
    assert one.header["adversary"] == want and "adversary" not in clean.header
    equals(one.series("size")[1][0] > 0, torch.tensor([i not in BAD for i in range(N)]))
    assert f"{attack} by clients 8, 9" in table(group_runs(one.lines()))
    assert " by client" not in table(group_runs(clean.lines()))


# attacks on distances ---------------------------------------------------------
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
    adversary = Adversary("nearby", [1, 2], victims=[0, 11])
    away = adversary.attack_uploads(trained({"delta": rows}, ids), Traits(), {}).up
    every = sent("nearby", {"delta": rows}, (0, 1))
    equals(away["delta"], every["delta"])


# defences -------------------------------------------------------------------
@pytest.mark.parametrize("s", [8, 9])
def test_each_defence_is_its_formula(s):
    """Flower's functions have the same results."""
    rows = updates(s)
    n = updates(s).numpy()
    square = ((n[:, None] - n) ** 2).sum(2)
    order = np.argsort(np.sort(square)[:, 1 : s - 3].sum(1))
    norm = np.linalg.norm(n, axis=1)
    share = torch.arange(1.0, s + 1, dtype=torch.float64) / sum(range(s + 1))
    short = n * np.minimum(1, np.median(norm) / norm)[:, None]
    formulas = {
        "median": np.median(n, 0),
        "trimmed_mean": np.sort(n, 0)[2:-2].mean(0),
        "krum": n[order[0]],
        "multi_krum": n[order[: s - 2]].mean(0),
    }
    for name, want in formulas.items():
        np.testing.assert_allclose(mean_of(name, rows), want)
    np.testing.assert_allclose(
        mean_of("clip_to_median", rows, share), share.numpy() @ short
    )
    rows[3] *= -1
    n = rows.numpy()
    trust = np.maximum(0, n @ n[0] / norm / norm[0])
    assert trust[3] == 0
    want = (trust[:, None] * n * (norm[0] / norm)[:, None]).sum(0) / trust.sum()
    np.testing.assert_allclose(mean_of("fltrust", rows), want)
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    results = [([row], 1) for row in updates(s).numpy()]
    for name, (theirs,) in {
        "median": flower.aggregate_median(results),
        "trimmed_mean": flower.aggregate_trimmed_avg(results, 2 / s),
        "krum": flower.aggregate_krum(results, 2, 0),
        "multi_krum": flower.aggregate_krum(results, 2, s - 2),
    }.items():
        np.testing.assert_allclose(theirs, formulas[name], rtol=1e-6)


@pytest.mark.parametrize("name", DEFENCES)
def test_a_defence_is_a_mean_of_equals_and_bounded_whatever_one_sends(name):
    rows = updates(9, 50, torch.float32)
    torch.testing.assert_close(
        mean_of(name, rows[:1].expand(9, -1).contiguous()), rows[0]
    )
    for value in (1e30, -1e30, 0.0):
        one = rows.clone()
        one[5] = value
        assert float(mean_of(name, one).norm()) <= 1.01 * float(rows.norm(dim=1).max())
    assert mean_of(name, torch.zeros(9, 5)).eq(0).all()


def test_krum_finds_the_outlier_among_models_that_differ_little():
    """The outlier is found although the models hardly differ.

    |a - b|^2, expanded in float32, would be only noise here.
    """
    rows = 1 + 1e-4 * updates(9, 5000, torch.float32)
    rows[4] += 2e-4
    exact = mean_of("krum", rows.double())
    assert float((mean_of("krum", rows).double() - exact).abs().max()) < 1e-6


@pytest.mark.parametrize("attack", ["inner_product", "noise"])
@pytest.mark.deep("whole runs under attack")
def test_defences_hold_where_the_mean_does_not(attack):
    adversary = Adversary(attack, BAD, 30.0)
    clean = accuracy(run())
    broken = accuracy(run(adversary=adversary))
    assert broken < clean - 0.2
    others = (ALGORITHMS[name] for name in ("fedavgm", "fedadam", "fedprox", "ditto"))
    # Bulyan would need eleven clients.
    pairs = product(set(DEFENCES) - {"clip_to_median", "bulyan"}, (FedAvg, Scaffold))
    for name, method in (*pairs, *product(["median"], others)):
        if name == "centered_clipping" and method is Scaffold:
            continue  # it is refused
        defended = accuracy(run(method(mean=MEANS[name]), adversary=adversary))
        assert defended > clean - 0.1, (name, method)


@pytest.mark.parametrize("name", ["median", "multi_krum"])
def test_scaffold_defends_both_of_its_means(name):
    """The means of updates and of control variates are both defended.

    Client 0 sends a bad update and a good control variate. Client 5 does the opposite.
    """
    alg = Scaffold(server_lr=0.5, mean=MEANS[name])
    rows = updates()
    ids = torch.arange(len(rows))
    up = {"delta": rows, "control": rows.flip(0) + 1}
    up["delta"][0] = 1e6
    up["control"][5] = -1e6
    g = {k: t([0.1 * i] * rows.shape[1]) for i, k in enumerate(("x", "c"), 1)}
    new = served(alg, g, up, Cohort(ids, torch.ones_like(ids), 12, 1, 1))
    torch.testing.assert_close(new["x"], g["x"] + 0.5 * mean_of(name, up["delta"]))
    torch.testing.assert_close(new["c"], g["c"] + 9 / 12 * mean_of(name, up["control"]))
    assert max(float(v.abs().max()) for v in new.values()) < 10


@pytest.mark.parametrize("length", [0.0, 1e-30])
def test_an_upload_of_next_to_nothing_is_trusted_by_nobody(length):
    for _ in range(40):
        rows = torch.randn(5, 38)
        rows[2] *= length
        cohort = Cohort(torch.arange(5), torch.ones(5), 5)
        weight = FLTrust(0)(rows, cohort)[1].weight
        assert weight[0, 2] == 0 and bool(weight.isfinite().all()) and weight.sum() < 20


@pytest.mark.parametrize("s", [1, 2, 3, 8, 33])
def test_columns_are_sorted_whatever_their_number(s):
    many = torch.randn(s, 50).repeat(1, SORT_BLOCK_COLUMNS // 40)
    found = median(many)
    middle = many.sort(0).values[(s - 1) // 2 : s - (s - 1) // 2]
    equals(found, middle.mean(0))


# what is accepted -----------------------------------------------------------
def test_an_uploaded_model_is_measured_from_its_own_clients_last_one():
    models = torch.tensor([[0.0, 0.0], [9.0, 9.0], [3.0, 4.0], [50.0, 0.0]])
    up = {"w": torch.tensor([[0.0, 2.0], [3.0, 5.0], [50.0, 7.0]])}
    traits = Traits(model_uploads={"w": "server.w"})
    norms = update_norms(trained(up, [0, 2, 3]), traits, {"w": models})
    assert norms.tolist() == [2, 1, 7]


def test_a_clipped_update_takes_its_control_variate_along():
    """A control variate is cut by the same factor as its update.

    An update of length 5 is cut to length 1, and one of length 0.5 stays.
    """
    up = {"delta": t([[3.0, 4], [0.3, 0.4]]), "control": t([[2.0, 2], [1, 1]])}
    state = {"x": t([0.0, 0.0]), "c": t([0.0, 0.0])}
    no_variances = torch.zeros(0, dtype=torch.bool)
    result, _ = accept(trained(up), Scaffold(), state, variances=no_variances, clip=1.0)
    cut = result.up
    torch.testing.assert_close(cut["delta"], t([[0.6, 0.8], [0.3, 0.4]]))
    torch.testing.assert_close(cut["control"], t([[0.4, 0.4], [1, 1]]))
