"""Attacks do what their papers say, defences give what their formulas and other libraries give, and
whoever cannot take one says so."""

from itertools import product

import numpy as np
import pytest
import torch
from doors import synthetic_clusters
from methods import Scaffold
from parts.attacks import BAD, TRAINING, N, defence, run, updates
from small import served, t
from torch import nn

from pflcore import Client, FedAvg, Net, Server
from pflcore.algorithms import Cohort, Traits
from pflcore.algorithms.fedavg import BLOCK, Defence, ascending, defended
from pflcore.results.record import group
from pflcore.results.table import table
from pflcore.simulation.accept import Trained, accept, update_norms
from pflcore.simulation.attacks import STRENGTH, Adversary

DEFENCES = Defence.__args__


@pytest.fixture(scope="module")
def data():
    return synthetic_clusters(n=N, groups=1, samples=40, classes=4, dim=8, held_out=50)


def accuracy(simulation):
    return float(simulation.run().series()[1][-1].nanmean())


def mean_of(name, rows, f=2, share=None):
    s = len(rows)
    even = torch.full((1, s), 1 / s, dtype=torch.float64) if share is None else share[None]
    kept, weight = defended(name, rows, even, f, 0)
    return (weight.to(kept) @ kept)[0]


def sent(attack, rows, bad, strength=None, **more):
    s = len(rows)
    cohort = Cohort(torch.arange(s), torch.ones(s).long(), s, 1, 1)
    gen = torch.Generator().manual_seed(0)
    trained = Trained(
        cohort, {}, {"delta": rows, **more}, {}, {}, torch.empty(s, 0), torch.zeros(s)
    )
    return Adversary(attack, bad, strength).send(trained, Traits(), {}, gen).up


def test_each_attack_is_its_formula():
    rows, bad = updates(), [2, 5]
    honest = [i for i in range(9) if i not in bad]
    m, v = rows[honest].mean(0), rows[honest].std(0, correction=0)
    for attack, want in {
        "sign_flip": -rows[bad],
        "scale": 100 * rows[bad],
        "little": (m - 1.5 * v).expand(2, -1),
        "inner_product": (-10 * m).expand(2, -1),
    }.items():
        got = sent(attack, rows, (2, 5))["delta"]
        torch.testing.assert_close(got[bad], want)
        assert torch.equal(got[honest], rows[honest])
    torch.testing.assert_close(sent("sign_flip", rows, (2, 5), 3.0)["delta"][bad], -3 * rows[bad])
    wide = updates(4, 40_000)
    noise = (sent("noise", wide, (1,))["delta"] - wide)[1]
    assert float(noise.square().mean().sqrt() / wide[1].square().mean().sqrt()) == pytest.approx(
        10, rel=0.02
    )


def test_an_uploaded_model_is_attacked_as_an_update_and_a_control_variate_by_itself():
    rows, control = updates(), updates(9, 7) + 1
    got = sent("sign_flip", rows, (4,), control=control)
    assert torch.equal(got["control"][4], -control[4]) and torch.equal(
        got["control"][:4], control[:4]
    )
    held = updates(9, 7) * 2
    cohort = Cohort(torch.arange(9), torch.ones(9).long(), 9, 1, 1)
    trained = Trained(cohort, {}, {"w": rows}, {}, {}, torch.empty(9, 0), torch.zeros(9))
    out = (
        Adversary("sign_flip", [4])
        .send(trained, Traits(models={"w": "server.w"}), {"w": held}, torch.Generator())
        .up
    )
    torch.testing.assert_close(out["w"][4], held[4] - (rows[4] - held[4]))
    # nobody is honest: they take their own
    every = sent("inner_product", rows, tuple(range(9)))["delta"]
    torch.testing.assert_close(every, (-10 * rows.mean(0)).expand(9, -1))


@pytest.mark.parametrize("attack", ["label_flip", *STRENGTH])
def test_an_attacked_run_repeats_itself_and_says_what_it_is(data, attack):
    one, two, clean = (
        run(data, rounds=2, every=1, adversary=a) for a in (*[Adversary(attack, BAD)] * 2, None)
    )
    h, again, without = one.run(), two.run(), clean.run()
    assert torch.equal(one.state.server["x"], two.state.server["x"]) and not torch.equal(
        one.state.server["x"], clean.state.server["x"]
    )
    assert h.header["adversary"] == {
        "attack": attack,
        "clients": [*BAD],
        "strength": STRENGTH.get(attack),
    }
    assert "adversary" not in without.header
    assert torch.equal(h.series("size")[1][0] > 0, torch.tensor([i not in BAD for i in range(N)]))
    assert f"{attack} by clients 8, 9" in table(group(h.lines())) and " by client" not in table(
        group(without.lines())
    )
    assert again.series("loss")[1].nansum() == h.series("loss")[1].nansum()


# defences -------------------------------------------------------------------
def test_each_defence_is_its_formula():
    for s in (9, 8):
        rows, n = updates(s), updates(s).numpy()
        np.testing.assert_allclose(mean_of("median", rows), np.median(n, 0))
        np.testing.assert_allclose(mean_of("trimmed_mean", rows), np.sort(n, 0)[2:-2].mean(0))
        score = [
            sorted(((n[i] - n[j]) ** 2).sum() for j in range(s) if j != i)[: s - 4]
            for i in range(s)
        ]
        order = np.argsort([sum(x) for x in score])
        np.testing.assert_allclose(mean_of("krum", rows), n[order[0]])
        np.testing.assert_allclose(mean_of("multi_krum", rows), n[order[: s - 2]].mean(0))
        norm = np.linalg.norm(n, axis=1)
        share = torch.arange(1.0, s + 1, dtype=torch.float64) / sum(range(s + 1))
        want = (share.numpy()[:, None] * n * np.minimum(1, np.median(norm) / norm)[:, None]).sum(0)
        np.testing.assert_allclose(mean_of("clip", rows, share=share), want)
        turned = rows.clone()
        turned[3] *= -1
        n = turned.numpy()
        trust = np.maximum(0, n @ n[0] / norm / norm[0])
        assert trust[3] == 0
        want = (trust[:, None] * n * (norm[0] / norm)[:, None]).sum(0) / trust.sum()
        np.testing.assert_allclose(mean_of("fltrust", turned), want)


@pytest.mark.parametrize("name", DEFENCES)
def test_a_defence_is_a_mean_of_equals_and_bounded_whatever_one_sends(name):
    rows = updates(9, 50, torch.float32)
    torch.testing.assert_close(mean_of(name, rows[:1].expand(9, -1).contiguous()), rows[0])
    for value in (1e30, -1e30, 0.0):
        one = rows.clone()
        one[5] = value
        assert float(mean_of(name, one).norm()) <= 1.01 * float(rows.norm(dim=1).max())
    assert mean_of(name, torch.zeros(9, 5)).eq(0).all()


def test_figures_of_byzfl_on_the_same_updates():
    byzfl = pytest.importorskip("byzfl")
    for s, f in ((9, 2), (20, 4)):
        rows = updates(s, 200)
        rows[:f] += 3
        peers = {
            "trimmed_mean": byzfl.TrMean(f),
            "krum": byzfl.Krum(f),
            "multi_krum": byzfl.MultiKrum(f),
        }
        # of an even number it takes the lower one of the middle
        peers |= {"median": byzfl.Median()} if s % 2 else {}
        for name, peer in peers.items():
            want = peer(rows)  # some of them in float32
            torch.testing.assert_close(
                mean_of(name, rows, f),
                want.double(),
                rtol=1e-5,
                atol=1e-6,
                msg=lambda m, name=name: f"{name}: {m}",
            )


def test_figures_of_flower_on_the_same_updates():
    pytest.importorskip("flwr")
    from flwr.server.strategy import aggregate as flower

    for s, f in ((9, 2), (20, 4)):
        rows = updates(s, 200)
        rows[:f] += 3
        results = [([row.numpy()], 1) for row in rows]
        np.testing.assert_allclose(
            mean_of("median", rows), flower.aggregate_median(results)[0], rtol=1e-6
        )
        np.testing.assert_allclose(
            mean_of("trimmed_mean", rows, f),
            flower.aggregate_trimmed_avg(results, f / s)[0],
            rtol=1e-6,
        )
        assert np.isin(mean_of("krum", rows, f)[0], rows[f:, 0]) and np.isin(
            flower.aggregate_krum(results, f, 0)[0][0], rows[f:, 0]
        )
        np.testing.assert_allclose(
            mean_of("krum", rows, f), flower.aggregate_krum(results, f, 0)[0], rtol=1e-6
        )
        np.testing.assert_allclose(
            mean_of("multi_krum", rows, f), flower.aggregate_krum(results, f, s - f)[0], rtol=1e-6
        )


def test_krum_finds_the_outlier_among_models_that_differ_little():
    """Where expanding |a - b|^2 in float32 sees noise only."""
    rows = 1 + 1e-4 * updates(9, 5000, torch.float32)
    rows[4] += 2e-4
    exact = mean_of("krum", rows.double())
    assert float((mean_of("krum", rows).double() - exact).abs().max()) < 1e-6


@pytest.mark.parametrize("attack", ["inner_product", "noise"])
def test_defences_hold_where_the_mean_does_not(data, attack):
    adversary = Adversary(attack, BAD, 30.0)
    clean, broken = accuracy(run(data)), accuracy(run(data, adversary=adversary))
    assert broken < clean - 0.2
    for name, method in product(set(DEFENCES) - {"clip"}, (FedAvg, Scaffold)):
        assert accuracy(run(data, method(**defence(name)), adversary=adversary)) > clean - 0.1, (
            name,
            method,
        )


@pytest.mark.parametrize("name", ["median", "multi_krum"])
def test_scaffold_defends_both_of_its_means(name):
    """A client is good in what it says of its update, and bad in its control variate, or the other
    way round."""
    alg, rows = Scaffold(server_lr=0.5, **defence(name)), updates()
    ids = torch.arange(len(rows))
    cohort = Cohort(ids, torch.ones_like(ids), 12, 1, 1)
    up = {"delta": rows, "control": rows.flip(0) + 1}
    up["delta"][0], up["control"][5] = 1e6, -1e6
    g = {
        k: torch.linspace(0, i, rows.shape[1], dtype=torch.float64)
        for i, k in enumerate(("x", "c"), 1)
    }
    new = served(alg, dict(g), up, cohort)
    torch.testing.assert_close(new["x"], g["x"] + 0.5 * mean_of(name, up["delta"]))
    torch.testing.assert_close(new["c"], g["c"] + 9 / 12 * mean_of(name, up["control"]))
    assert max(float(v.abs().max()) for v in new.values()) < 10


def test_a_server_without_a_simulation_defends_itself(data):
    alg = FedAvg(**defence("multi_krum", 1))
    net = Net(lambda: nn.Linear(8, 4))
    server, clients = (
        Server(alg, net, 5, rounds=1),
        [Client(alg, net, data.subset([i]), TRAINING) for i in range(5)],
    )
    uploads = {i: c.train(server.download(i)) for i, c in enumerate(clients)}
    deltas = torch.stack([up["delta"] for up, _ in uploads.values()])
    uploads[3][0]["delta"].fill_(1e30)
    before = server.state_dict()["state"]["server.x"]
    server.aggregate(uploads)
    deltas[3] = 1e30
    torch.testing.assert_close(
        server.state_dict()["state"]["server.x"] - before, mean_of("multi_krum", deltas, 1)
    )


@pytest.mark.parametrize("length", [0.0, 1e-30])
def test_an_upload_of_next_to_nothing_is_trusted_by_nobody(length):
    for seed in range(40):
        rows = torch.randn(5, 38, generator=torch.Generator().manual_seed(seed))
        rows[2] *= length
        _, weight = defended("fltrust", rows, torch.full((1, 5), 0.2, dtype=torch.float64), 1, 0)
        assert weight[0, 2] == 0 and bool(weight.isfinite().all()) and weight.sum() < 20


@pytest.mark.parametrize("s", [1, 2, 3, 5, 8, 13, 33])
def test_columns_are_sorted_whatever_their_number(s):
    rows = torch.randn(s, 50, generator=torch.Generator().manual_seed(s))
    assert torch.equal(torch.stack(ascending(rows)), rows.sort(0).values)
    many = rows.repeat(1, BLOCK // 40)
    found = defended("median", many, torch.full((1, s), 1 / s), 0, 0)[0]
    assert torch.equal(
        found, many.sort(0).values[(s - 1) // 2 : s - (s - 1) // 2].mean(0, keepdim=True)
    )


def test_an_uploaded_model_is_measured_from_its_own_clients_last_one():
    held = torch.tensor([[0.0, 0.0], [9.0, 9.0], [3.0, 4.0], [50.0, 0.0]])
    up = {"w": torch.tensor([[0.0, 2.0], [3.0, 5.0], [50.0, 7.0]])}
    cohort = Cohort(torch.tensor([0, 2, 3]), torch.ones(3, dtype=torch.long), 4)
    trained = Trained(cohort, {}, up, {}, {}, torch.empty(3, 0), torch.zeros(3))
    assert update_norms(trained, Traits(models={"w": "server.w"}), {"w": held}).tolist() == [
        2.0,
        1.0,
        7.0,
    ]


def test_a_clipped_update_takes_its_control_variate_along():
    """An update of length 5 is cut to 1, one of .5 stays; so do their control variates, by the same
    factor."""
    up = {"delta": t([[3.0, 4], [0.3, 0.4]]), "control": t([[2.0, 2], [1, 1]])}
    cohort = Cohort(torch.arange(2), torch.ones(2, dtype=torch.long), 2)
    trained = Trained(cohort, {}, up, {}, {}, torch.empty(2, 0), torch.zeros(2))
    cut = accept(trained, Traits(clipped=("control",)), {}, 1.0)[0].up
    torch.testing.assert_close(cut["delta"], t([[0.6, 0.8], [0.3, 0.4]]))
    torch.testing.assert_close(cut["control"], t([[0.4, 0.4], [1, 1]]))
