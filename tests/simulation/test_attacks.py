"""Attacks do what their papers say, defences give what their formulas and other libraries give, and whoever cannot take one says so."""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from methods import FedAvgM, Scaffold, Waffle
from simulation_help import group, swept
from small import images, tiny_model
from torch import nn

from pflcore import ALGORITHMS, Client, FedAvg, Net, Server, Simulation, Training
from pflcore.algorithms import Cohort
from pflcore.data import FEDERATIONS, Federation
from pflcore.results.table import table
from pflcore.simulation.attacks import Adversary

DEFENCES = ("clip", "median", "trimmed_mean", "krum", "multi_krum", "fltrust")
TRAINING = Training(lr=0.1, batch_size=10)
N, BAD = 10, (8, 9)


@pytest.fixture(scope="module")
def data() -> Federation:
    return FEDERATIONS["synthetic_clusters"](n=N, groups=1, samples=40, classes=4, dim=8, held_out=50)


def run(data: Federation, algorithm: Any = "fedavg", **options: Any) -> Simulation:
    options = {"rounds": 10, "eval_every": 10, "workers": 1} | options
    return Simulation(algorithm, options.pop("model", lambda: nn.Linear(8, 4)), data, TRAINING, **options)


def accuracy(simulation: Simulation) -> float:
    return float(simulation.run().series()[1][-1].nanmean())


def defence(name: str, f: int = len(BAD)) -> dict[str, Any]:
    return {"defence": name, "hostile": f, **({"root": 0} if name == "fltrust" else {})}


def updates(s: int = 9, p: int = 7, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    gen = torch.Generator().manual_seed(3)
    return torch.randn(p, generator=gen, dtype=dtype) + 0.3 * torch.randn(s, p, generator=gen, dtype=dtype)


def mean_of(name: str, rows: torch.Tensor, f: int = 2, share: torch.Tensor | None = None) -> torch.Tensor:
    s = len(rows)
    even = torch.full((s,), 1 / s, dtype=torch.float64) if share is None else share
    kept, weight = FedAvg(**defence(name, f)).defended(rows, Cohort(torch.arange(s), even, torch.ones(s), s, 1, 1))
    return (weight.to(kept) @ kept)[0]


def sentence(error: pytest.ExceptionInfo[BaseException]) -> None:
    text = str(error.value)
    assert text.endswith(".") and text.count(". ") == 0 and "\n" not in text, text


# attacks ------------------------------------------------------------------------------------------------------------------------------
def sent(attack: str, rows: torch.Tensor, bad: tuple[int, ...], strength: float | None = None, **more: torch.Tensor) -> Any:
    s = len(rows)
    cohort = Cohort(torch.arange(s), torch.full((s,), 1 / s), torch.ones(s).long(), s, 1, 1)
    gen = torch.Generator().manual_seed(0)
    return Adversary(attack, bad, strength).send({"delta": rows, **more}, {}, cohort, gen)  # type: ignore[arg-type]


def test_each_attack_is_its_formula() -> None:
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
    assert float(noise.square().mean().sqrt() / wide[1].square().mean().sqrt()) == pytest.approx(10, rel=0.02)


def test_an_uploaded_model_is_attacked_as_an_update_and_a_control_variate_by_itself() -> None:
    rows, control = updates(), updates(9, 7) + 1
    got = sent("sign_flip", rows, (4,), control=control)
    assert torch.equal(got["control"][4], -control[4]) and torch.equal(got["control"][:4], control[:4])
    held = updates(9, 7) * 2
    cohort = Cohort(torch.arange(9), torch.full((9,), 1 / 9), torch.ones(9).long(), 9, 1, 1)
    out = Adversary("sign_flip", [4]).send({"w": rows}, {"w": held}, cohort, torch.Generator())
    torch.testing.assert_close(out["w"][4], held[4] - (rows[4] - held[4]))
    every = sent("inner_product", rows, tuple(range(9)))["delta"]  # nobody is honest: they take their own
    torch.testing.assert_close(every, (-10 * rows.mean(0)).expand(9, -1))


def test_flipped_labels_are_the_bad_ones_alone(data: Federation) -> None:
    poisoned = run(data, adversary=Adversary("label_flip", BAD)).data
    for i in range(N):
        want = 3 - data.labels(i) if i in BAD else data.labels(i)
        assert torch.equal(poisoned.labels(i), want)
    turned = images()  # whose clients permute their labels already
    assert turned.relabel is not None
    assert torch.equal(run(turned, model=tiny_model(), adversary=Adversary("label_flip", [1])).data.labels(1), 3 - turned.labels(1))


@pytest.mark.parametrize("attack", ["label_flip", "sign_flip", "scale", "noise", "little", "inner_product"])
def test_an_attacked_run_repeats_itself_and_says_what_it_is(data: Federation, attack: Any) -> None:
    one, two, clean = (run(data, rounds=2, eval_every=1, adversary=a) for a in (*[Adversary(attack, BAD)] * 2, None))
    h, again, without = one.run(), two.run(), clean.run()
    assert torch.equal(one.state.g["x"], two.state.g["x"]) and not torch.equal(one.state.g["x"], clean.state.g["x"])
    assert h.header["adversary"] == {"attack": attack, "clients": [*BAD], "strength": Adversary(attack, BAD).strength}
    assert "adversary" not in without.header
    assert torch.equal(h.series("size")[1][0] > 0, torch.tensor([i not in BAD for i in range(N)]))
    assert f"{attack} by clients 8, 9" in table(group(h.lines())) and " by client" not in table(group(without.lines()))
    assert again.series("loss")[1].nansum() == h.series("loss")[1].nansum()


def test_an_attacked_run_goes_on_from_its_checkpoint(data: Federation, tmp_path: Any) -> None:
    pytest.importorskip("safetensors")
    options: dict[str, Any] = {"rounds": 4, "adversary": Adversary("noise", BAD), "algorithm": FedAvg(**defence("trimmed_mean"))}
    whole = run(data, **options)
    whole.run()

    class Enough(Exception):
        pass

    def crash(round: int, record: Any) -> None:
        if round == 3:
            raise Enough

    from pflcore import Checkpoint

    with pytest.raises(Enough):
        run(data, **options).run(crash, Checkpoint(tmp_path, every=2))
    rest = Simulation.load(tmp_path, model=lambda: nn.Linear(8, 4), data=data)
    rest.run()
    assert rest.adversary == options["adversary"] and torch.equal(rest.state.g["x"], whole.state.g["x"])
    with pytest.raises(ValueError, match=r"another run: (adversary|eval_clients)"):
        run(data, **{**options, "adversary": None}).restore(tmp_path)


@pytest.mark.parametrize("name", swept(sorted(set(ALGORITHMS) - {"local"})))
def test_every_algorithm_can_be_attacked(name: str, data: Federation) -> None:
    quiet, loud = (run(data, name, rounds=1, model=tiny_model(8), adversary=a) for a in (None, Adversary("scale", BAD, 1e4)))
    record = loud.run().rounds[0]
    quiet.run()
    assert min(record["moved"][i] for i in BAD) > 100 > max(record["moved"][:8]), record["moved"]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"attack": "unknown"}, "attack: expected one of label_flip"),
        ({"clients": [10]}, "adversary: expected ids of clients from 0 to 9"),
        ({"clients": [1, 1]}, "adversary: expected each client once"),
        ({"clients": [-1]}, "clients: expected a list of clients' numbers"),
        ({"clients": []}, "adversary: expected ids"),
        ({"clients": range(N)}, "adversary: expected at least one honest client"),
        ({"strength": math.nan}, "strength: expected a finite number above 0"),
        ({"attack": "label_flip", "strength": 2.0}, "strength: labels are flipped or not"),
    ],
)
def test_an_adversary_that_cannot_be(data: Federation, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}") as e:
        run(data, adversary=Adversary(**{"attack": "sign_flip", "clients": BAD, **options}))
    sentence(e)


def test_numbers_have_no_labels_to_flip() -> None:
    parts = [(torch.randn(8, 2), torch.randn(8)) for _ in range(3)]
    numbers = Federation.from_arrays(parts, test=parts)
    with pytest.raises(ValueError, match=r"^adversary: label_flip needs labels") as e:
        run(numbers, model=lambda: nn.Linear(2, 1), adversary=Adversary("label_flip", [1]))
    sentence(e)


# defences -----------------------------------------------------------------------------------------------------------------------------
def test_each_defence_is_its_formula() -> None:
    for s in (9, 8):
        rows, n = updates(s), updates(s).numpy()
        np.testing.assert_allclose(mean_of("median", rows), np.median(n, 0))
        np.testing.assert_allclose(mean_of("trimmed_mean", rows), np.sort(n, 0)[2:-2].mean(0))
        score = [sorted(((n[i] - n[j]) ** 2).sum() for j in range(s) if j != i)[: s - 4] for i in range(s)]
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
def test_a_defence_is_a_mean_of_equals_and_bounded_whatever_one_sends(name: str) -> None:
    rows = updates(9, 50, torch.float32)
    torch.testing.assert_close(mean_of(name, rows[:1].expand(9, -1).contiguous()), rows[0])
    for value in (1e30, -1e30, 0.0):
        one = rows.clone()
        one[5] = value
        assert float(mean_of(name, one).norm()) <= 1.01 * float(rows.norm(dim=1).max())
    assert mean_of(name, torch.zeros(9, 5)).eq(0).all()


def test_figures_of_byzfl_on_the_same_updates() -> None:
    byzfl = pytest.importorskip("byzfl")
    for s, f in ((9, 2), (20, 4)):
        rows = updates(s, 200)
        rows[:f] += 3
        peers = {"trimmed_mean": byzfl.TrMean(f), "krum": byzfl.Krum(f), "multi_krum": byzfl.MultiKrum(f)}
        peers |= {"median": byzfl.Median()} if s % 2 else {}  # of an even number it takes the lower one of the middle
        for name, peer in peers.items():
            want = peer(rows)  # some of them in float32
            torch.testing.assert_close(mean_of(name, rows, f), want.double(), rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_figures_of_flower_on_the_same_updates() -> None:
    pytest.importorskip("flwr")
    from flwr.server.strategy import aggregate as flower

    for s, f in ((9, 2), (20, 4)):
        rows = updates(s, 200)
        rows[:f] += 3
        results = [([row.numpy()], 1) for row in rows]
        np.testing.assert_allclose(mean_of("median", rows), flower.aggregate_median(results)[0], rtol=1e-6)
        np.testing.assert_allclose(mean_of("trimmed_mean", rows, f), flower.aggregate_trimmed_avg(results, f / s)[0], rtol=1e-6)
        assert np.isin(mean_of("krum", rows, f)[0], rows[f:, 0]) and np.isin(flower.aggregate_krum(results, f, 0)[0][0], rows[f:, 0])
        np.testing.assert_allclose(mean_of("krum", rows, f), flower.aggregate_krum(results, f, 0)[0], rtol=1e-6)
        np.testing.assert_allclose(mean_of("multi_krum", rows, f), flower.aggregate_krum(results, f, s - f)[0], rtol=1e-6)


def test_krum_finds_the_outlier_among_models_that_differ_little() -> None:
    """Where expanding |a - b|^2 in float32 sees noise only."""
    rows = 1 + 1e-4 * updates(9, 5000, torch.float32)
    rows[4] += 2e-4
    exact = mean_of("krum", rows.double())
    assert float((mean_of("krum", rows).double() - exact).abs().max()) < 1e-6


@pytest.mark.parametrize("attack", ["inner_product", "noise"])
def test_defences_hold_where_the_mean_does_not(data: Federation, attack: Any) -> None:
    adversary = Adversary(attack, BAD, 30.0)
    clean, broken = accuracy(run(data)), accuracy(run(data, adversary=adversary))
    assert broken < clean - 0.2
    for name, method in product(set(DEFENCES) - {"clip"}, (FedAvg, Scaffold)):
        assert accuracy(run(data, method(**defence(name)), adversary=adversary)) > clean - 0.1, (name, method)


@pytest.mark.parametrize("name", ["median", "multi_krum"])
def test_scaffold_defends_both_of_its_means(name: str) -> None:
    """A client is good in what it says of its update, and bad in its control variate, or the other way round."""
    alg, rows = Scaffold(server_lr=0.5, **defence(name)), updates()
    ids = torch.arange(len(rows))
    cohort = Cohort(ids, torch.full((len(ids),), 1 / len(ids), dtype=torch.float64), torch.ones_like(ids), 12, 1, 1)
    up = {"delta": rows, "control": rows.flip(0) + 1}
    up["delta"][0], up["control"][5] = 1e6, -1e6
    g = {k: torch.linspace(0, i, rows.shape[1], dtype=torch.float64) for i, k in enumerate(("x", "c"), 1)}
    new = alg.server(dict(g), up, cohort)
    torch.testing.assert_close(new["x"], g["x"] + 0.5 * mean_of(name, up["delta"]))
    torch.testing.assert_close(new["c"], g["c"] + 9 / 12 * mean_of(name, up["control"]))
    assert max(float(v.abs().max()) for v in new.values()) < 10


def test_server_optimizers_and_personal_models_take_one_too(data: Federation) -> None:
    adversary = Adversary("inner_product", BAD)
    for name in ("fedavgm", "fedadam", "fedprox", "ditto"):
        plain, kept = (run(data, ALGORITHMS[name](**o), adversary=adversary) for o in ({}, defence("median")))
        kept.run(), plain.run()
        assert kept.evaluate("test")["loss"].nanmean() < plain.evaluate("test")["loss"].nanmean(), name
    assert FedAvgM(defence="krum").defence == "krum"


def test_without_a_defence_nothing_changed(data: Federation) -> None:
    assert not FedAvg().required and FedAvg(defence="fltrust", root=3).required == (3,)
    whole = run(data, FedAvg(**defence("fltrust")), participation=0.3, rounds=3)
    assert all(0 in r["cohort"] for r in whole.run().rounds) and whole.header()["target"] is None


def test_a_server_without_a_simulation_defends_itself(data: Federation) -> None:
    alg = FedAvg(**defence("multi_krum", 1))
    net = Net(lambda: nn.Linear(8, 4))
    server, clients = Server(alg, net, 5, rounds=1), [Client(alg, net, data.subset([i]), TRAINING) for i in range(5)]
    uploads = {i: c.train(server.download(i)) for i, c in enumerate(clients)}
    deltas = torch.stack([up["delta"] for up, _ in uploads.values()])
    uploads[3][0]["delta"].fill_(1e30)
    before = server.state_dict()["g"]["x"]
    server.aggregate(uploads)
    deltas[3] = 1e30
    torch.testing.assert_close(server.state_dict()["g"]["x"] - before, mean_of("multi_krum", deltas, 1))


@pytest.mark.parametrize("name", [n for n, c in ALGORITHMS.items() if "defence" in c.unused])
def test_who_does_not_average_refuses_a_defence(name: str) -> None:
    with pytest.raises(ValueError, match=r"^defence: .* takes no step along the mean") as e:
        ALGORITHMS[name](defence="median")
    sentence(e)


def test_who_does() -> None:
    taken = {n for n, c in ALGORITHMS.items() if "defence" not in c.unused}
    assert {"fedavg", "fedadam", "fedprox", "ditto", "mrmtl", "finetune", "per_fedavg", "scaffold"} <= taken
    assert not taken & {"waffle", "feddwa", "fedamp", "hypcluster", "ensemble", "local", "qfedavg"}
    own = type("Own", (FedAvg,), {"server": lambda self, g, up, cohort: g})
    child = type("Child", (Waffle,), {"unused": ("weighting",)})
    for cls in (own, child):
        with pytest.raises(ValueError, match=r"^defence"):
            cls(defence="median")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"defence": "unknown"}, "defence: expected one of clip"),
        ({"defence": "krum", "hostile": -1}, "hostile: expected a number of clients"),
        ({"defence": "krum", "hostile": 1.5}, "hostile: expected a number of clients"),
        ({"defence": "fltrust"}, "root: expected a client's number"),
        ({"defence": "median", "root": 1}, "root: expected a client's number"),
        ({"defence": "fltrust", "root": 10}, "root: expected a client from 0 to 9"),
    ],
)
def test_a_defence_that_cannot_be(data: Federation, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}") as e:
        run(data, FedAvg(**options))
    sentence(e)


def test_too_few_clients_for_a_defence_end_the_run_with_a_sentence(data: Federation) -> None:
    for name, f in (("krum", 4), ("multi_krum", 4), ("trimmed_mean", 5)):
        with pytest.warns(RuntimeWarning, match="stopped early"):
            history = run(data, FedAvg(**defence(name, f))).run()
        assert history.stopped is not None and history.stopped.startswith(
            f"defence: {name} against {f} hostile clients needs 11 in a round"
        )
        assert not history.rounds and history.stopped.count(". ") == 0


def test_running_statistics_are_no_way_around_a_defence(data: Federation) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    with pytest.raises(ValueError, match=r"^buffers: FedAvg with defence='median' knows 'local' statistics") as e:
        run(data, FedAvg(defence="median"), model=model, buffers="average")
    sentence(e)
    simulation = run(data, FedAvg(defence="median"), model=model, rounds=2)
    simulation.run()
    assert not torch.equal(simulation.state.buffers[0], simulation.state.buffers[1])


# the command line -----------------------------------------------------------------------------------------------------------------------
def test_the_command_line_poisons_and_defends(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    from pflcore.cli import main

    base = ["run", "fedavg", "--data", "synthetic_clusters", "--rounds", "2", "--quiet", "--out"]
    words = ["--poison", "inner_product", "--bad", "1", "2", "--poison-strength", "5", "--defence", "trimmed_mean", "--hostile", "2"]
    assert main([*base, str(tmp_path), *words]) == 0
    head = json.loads((tmp_path / "record.jsonl").read_text().splitlines()[0])["header"]
    assert head["adversary"] == {"attack": "inner_product", "clients": [1, 2], "strength": 5.0}
    assert head["options"]["defence"] == "trimmed_mean" and head["options"]["hostile"] == 2
    assert "inner_product by clients 1, 2" in capsys.readouterr().out
    for wrong, word in ((["--bad", "1"], "poison: expected an attack"), (["--poison", "noise"], "poison: expected an attack")):
        assert main([*base, str(tmp_path / "new"), *wrong]) == 2
        assert word in capsys.readouterr().err
    assert main([*base, str(tmp_path / "new"), "--poison", "noise", "--bad", "99"]) == 2
    assert "adversary: expected ids of clients" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("length", [0.0, 1e-30])
def test_an_upload_of_next_to_nothing_is_trusted_by_nobody(length: float) -> None:
    for seed in range(40):
        rows = torch.randn(5, 38, generator=torch.Generator().manual_seed(seed))
        rows[2] *= length
        cohort = Cohort(torch.arange(5), torch.full((5,), 0.2, dtype=torch.float64), torch.ones(5), 5, 1, 1)
        _, weight = FedAvg(**defence("fltrust", 1)).defended(rows, cohort)
        assert weight[0, 2] == 0 and bool(weight.isfinite().all()) and weight.sum() < 20


def test_the_trusted_client_joins_beside_those_who_may_take_part(data: Federation) -> None:
    cohorts = [r["cohort"] for r in run(data, FedAvg(**defence("fltrust")), clients=[1, 2, 3], rounds=3).run().rounds]
    assert cohorts == [[0, 1, 2, 3]] * 3
    some = [r["cohort"] for r in run(data, FedAvg(**defence("fltrust")), clients=[1, 2, 3, 4], participation=0.5, rounds=8).run().rounds]
    assert all(len(c) == 3 and c[0] == 0 for c in some) and {i for c in some for i in c} == {0, 1, 2, 3, 4}
