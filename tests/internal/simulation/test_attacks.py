"""Tests of attacks and defences against their formulas and Flower's defences."""

from itertools import product

import numpy as np
import pytest
import torch
from parts.attacks import BAD, MEANS, N, run, updates
from small import equals, served, t

from pflcore import ALGORITHMS, FedAvg
from pflcore.algorithms import Cohort, Scaffold, Traits
from pflcore.lab.results.table import table
from pflcore.ops._robust import SORT_BLOCK_COLUMNS
from pflcore.robust import Bulyan, CenteredClipping, FLTrust, median
from pflcore.simulation._attacks import DEFAULT_STRENGTH, Adversary
from pflcore.simulation._rows import CohortRows
from pflcore.simulation._uploads import (
    CohortResult,
    accept,
    update_norms,
    update_origins,
)
from pflcore.simulation.record import group_runs

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


def sent(attack, up, bad, strength=None, traits=None, server=None):
    adversary = Adversary(attack, bad, strength)
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
    follows = Traits(clipped_with_update=("variate",))
    up = {"delta": rows, "variate": control}
    got = sent("sign_flip", up, (4,), None, follows)["variate"]
    equals((got[4], got[:4]), (-control[4], control[:4]))
    models = updates() * 2
    traits = Traits(model_uploads={"w": "server.w"})
    got = sent("sign_flip", {"w": rows}, [4], None, traits, {"w": models})
    torch.testing.assert_close(got["w"][4], models[4] - (rows[4] - models[4]))
    # No client is honest. The attack then takes the mean of all updates.
    every = sent("inner_product", {"delta": rows}, tuple(range(9)))["delta"]
    torch.testing.assert_close(every, (-10 * rows.mean(0)).expand(9, -1))


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("attack", ["label_flip", *DEFAULT_STRENGTH])
def test_an_attacked_run_repeats_itself_and_says_what_it_is(attack):
    bad = Adversary(attack, BAD)
    one, two, clean = (
        run("fedavg", rounds=2, every=1, adversary=a).run() for a in (bad, bad, None)
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
    result = trained(up, [0, 2, 3])
    norms = update_norms(up, update_origins(result, traits, {"w": models}))
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
