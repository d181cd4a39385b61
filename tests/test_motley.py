"""Motley's metrics against hand values, and whole small plans: what is chosen, what is kept, what is said."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from pflcore.algorithms import FedAvg
from pflcore.algorithms.finetune import FineTune
from pflcore.algorithms.hypcluster import HypCluster, picks
from pflcore.algorithms.knnper import KnnPer
from pflcore.data import federation_of
from pflcore.data.roles import cross_device
from pflcore.local import Engine, Setting, Training
from pflcore.local.net import Net
from pflcore.reproduce import study
from pflcore.reproduce.motley import Benchmark, pictures, protocols, reproduce, seeds_of
from pflcore.round import begin, step

PLANS = Path(__file__).parent.parent / "pflcore" / "reproduce" / "plans"
DEVICE = {
    "data": "synthetic_clusters",
    "protocol": {
        "setting": "cross-device",
        "seeds": [0],
        "train": 8,
        "val": 4,
        "test": 4,
        "federation": {"n": 16, "groups": 2, "classes": 3},
    },
    "model": "linear",
    "rounds": 6,
    "participation": 0.5,
    "marks": 3,
    "training": {"lr": 0.1, "batch_size": 20},
    "methods": {
        "FedAvg": {"algorithm": "fedavgm", "vary": {}},
        "Local": {
            "algorithm": "finetune",
            "rounds": 0,
            "before": "FedAvg",
            "grid": {"finetune_lr": [0.01, 0.5], "finetune_epochs": [0, 5]},
        },
        "FT": {
            "algorithm": "finetune",
            "state_of": "FedAvg",
            "before": "FedAvg",
            "sizes": True,
            "grid": {"finetune_epochs": [0, 2, 6]},
            "vary": {"finetune_epochs": [1, 3], "finetune_lr": [0.01, 0.1]},
        },
        "HypCluster": {"algorithm": "hypcluster", "before": "FedAvg", "options": {"warm": 2}, "grid": {"k": [2, 3]}, "vary": {}},
        "kNN": {
            "algorithm": "knnper",
            "state_of": "FedAvg",
            "before": "FedAvg",
            "grid": {"lam": [0.0, 0.5]},
            "vary": {"lam": [0.0, 0.5, 1.0]},
        },
    },
}
SILO = {
    "data": "synthetic_linear",
    "protocol": {
        "setting": "cross-silo",
        "seeds": [1, 2],
        "federation": {"n": 6, "groups": 2, "fractions": {"train": 0.6, "val": 0.2, "test": 0.2}},
    },
    "model": "linear",
    "model_options": {"zero": True},
    "criterion": "half_squared",
    "rounds": 8,
    "training": {"lr": 0.1, "batch_size": 16},
    "methods": {
        "Local": {"algorithm": "local"},
        "FedAvg": {"algorithm": "fedavg"},
        "FT": {
            "algorithm": "finetune",
            "state_of": "FedAvg",
            "before": "FedAvg",
            "options": {"choose": "client", "finetune_epochs": 8, "lr_grid": [0.05, 0.2]},
        },
        "HypCluster": {"algorithm": "hypcluster", "options": {"k": 2}, "before": "FedAvg"},
    },
    "expected": {"Local": 0.5},
    "checks": {
        "tolerance": 0.5,
        "hurt": {"FT": [0, 100]},
        "largest": {"HypCluster": [50, 50]},
        "below": {"FedAvg": ["Local", "FT"]},
        "above": {"FT": ["FedAvg"]},
    },
}


def quiet(text):
    pass


# metrics ---------------------------------------------------------------------------------------------------------------------------
def test_a_summary_by_hand():
    nan = math.nan
    before = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.95, 0.5, 0.85, 0.75, 0.65, 0.55, nan])
    after = torch.tensor([0.92, 0.8, 0.75, 0.58, 0.97, 0.6, 0.8, 0.9, 0.66, 0.55, nan])
    found = study.summary(after.double(), before.double())
    assert found == pytest.approx({"mean": 0.753, "std": 0.1429020644, "hurt": 20, "worst_decile": 0.55, "percentile": 0.577}, abs=1e-6)
    loss = study.summary(torch.tensor([0.1, 0.4, 0.2, 0.3]), torch.tensor([0.2, 0.3, 0.2, 0.2]), higher_is_better=False)
    assert (loss["hurt"], loss["worst_decile"]) == (50, pytest.approx(0.4)) and loss["percentile"] == pytest.approx(0.37)


class Majority(nn.Module):
    """One weight: class 1 for everything where it is positive."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(x)


def majority_setting():
    """Clients 0 .. 7 hold constant inputs; all but the even ones' labels are 1."""
    from pflcore.data import Federation

    parts = [(torch.ones(8, 1), torch.full((8,), i % 2)) for i in range(8)]
    p = cross_device(Federation.from_arrays(parts, classes=2), 2, 2, 4)
    return p, Setting(Net(Majority), p.data, Training(lr=1.0, batch_size=8), Engine("vmap", 1), 0, 1)


def test_in_and_out_of_distribution_by_hand():
    """Fine-tuned, each client answers with its own label: all right at home, right half of the time on everybody's samples."""
    p, setting = majority_setting()
    own = p.report % 2
    state = begin(FedAvg(), setting.net, 8)
    points = study.vary(FineTune(), state, setting, p, "finetune_epochs", (0, 2))
    pool = p.out_of_distribution().client(int(p.report[0]), "test")[1].double().mean().item()
    assert pool == pytest.approx(own.double().mean().item())
    for value, point in zip((0, 2), points, strict=True):
        assert point.value == value and point.own.isnan().sum() == 4
    torch.testing.assert_close(points[1].own[p.report], torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(points[1].others[p.report], torch.where(own == 1, pool, 1 - pool).double())
    assert points[0].own[p.report].tolist() == (1 - own).tolist()  # without tuning: scores tie at 0, and the first class is taken
    with pytest.raises(ValueError, match=r"^option: .*\.$"):
        study.vary(FedAvg(), state, setting, p, "server_lr", (1,))


def test_smaller_personalization_sets_reach_the_algorithm():
    p, setting = majority_setting()
    seen = []

    class Spy(KnnPer):
        def personal(self, down, own, local):
            seen.append(local.size.tolist())
            return super().personal(down, own, local)

    found = study.by_size(Spy(lam=1.0), begin(FedAvg(), setting.net, 8), setting, p)
    assert seen == [[4] * 4, [2] * 4, [1] * 4] and all(v[p.report].tolist() == [1.0] * 4 for v in found.values())


def test_who_picks_which_cluster():
    _, setting = majority_setting()
    state = begin(HypCluster(k=2), setting.net, 8)
    state.g["x"] = torch.tensor([[5.0, 0.0], [0.0, 5.0]])
    assert picks(state, setting, torch.arange(8)).tolist() == [i % 2 for i in range(8)]
    state, _ = step(HypCluster(k=2), state, setting, torch.arange(8))
    assert state.g["pick"].tolist() == [i % 2 for i in range(8)]


# plans -----------------------------------------------------------------------------------------------------------------------------
def test_a_cross_device_plan_from_grid_to_pictures(tmp_path):
    assert reproduce(DEVICE, tmp_path, say=quiet) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    rows = {r["method"]: r for r in result["rows"]}
    assert list(rows) == ["FedAvg", "Local", "FT", "HypCluster", "kNN"]
    for name in ("FT", "kNN", "HypCluster", "Local"):
        assert 0 <= rows[name]["hurt"] <= 100 and set(rows[name]["chosen"]) == set(DEVICE["methods"][name]["grid"])
    assert rows["Local"]["models"] == 0 and rows["FT"]["models"] == rows["FedAvg"]["models"] == 2 * 6 * 4 / 8
    assert 100 / 3 <= rows["HypCluster"]["largest"] <= 100 and rows["FT"]["largest"] is None
    assert rows["FT"]["mean"] > rows["FedAvg"]["mean"]  # two groups that disagree on the labels' names
    text = (tmp_path / "table.md").read_text()
    assert "Bytes sent" in text and "| FT |" in text
    pytest.importorskip("matplotlib")
    made = {f.name for f in tmp_path.glob("*.png")}
    assert made == {
        "boxes.png",
        "deltas.png",
        "cost.png",
        "distributions.png",
        "sizes.png",
        "FT-finetune_epochs.png",
        "FT-finetune_lr.png",
        "kNN-lam.png",
    }
    studies = json.loads((tmp_path / "studies.json").read_text())
    assert set(studies["distributions"]) == {"FedAvg", "FT", "HypCluster", "kNN"} and set(studies["sizes"]["FT"]) == {"1.0", "0.5", "0.25"}


def test_a_plan_goes_on_where_it_stopped(tmp_path, monkeypatch):
    plan = copy.deepcopy(SILO)
    whole = Benchmark(plan, tmp_path / "a", say=quiet)
    whole.play()
    seen = []

    def stop(text):
        seen.append(text)
        if text.startswith("FedAvg:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Benchmark(plan, tmp_path / "b", say=stop).play()
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "b").rglob("*") if f.is_file()}
    assert len(before) == 2 * 2 * 3  # records, states and results of two methods in two runs
    again = Benchmark(plan, tmp_path / "b", say=quiet)
    again.play()
    assert {f: f.stat().st_mtime_ns for f in before} == before

    def told(b):
        return [{k: v for k, v in r.items() if k != "seconds"} for r in b.rows()]

    assert told(again) == told(whole)
    plan["training"]["lr"] = 0.01  # another experiment is never taken for this one
    other = Benchmark(plan, tmp_path / "b", say=quiet)
    other.play(["Local"])
    assert other.rows()[0]["mean"] != whole.rows()[0]["mean"]


def test_what_must_hold_is_checked(tmp_path):
    b = Benchmark(SILO, tmp_path, say=quiet)
    b.play()
    assert b.higher_is_better is False and [good for good, _ in b.verdicts()] == [True] * 6
    assert all(r.values.isnan().sum() == 0 and len(r.values) == 6 for found in b.results.values() for r in found)
    assert b.results["Local"][0].models == 0 and b.rows()[0]["runs"] == 2
    worse = {**SILO, "expected": {"Local": 0.5}, "checks": {"tolerance": 1e-9, "below": {"Local": ["FedAvg"]}}}
    assert reproduce(worse, tmp_path, methods=["Local", "FedAvg"], say=quiet) == 1
    assert (tmp_path / "table.md").read_text().count("FAILS") == 2


def test_a_method_brings_those_it_builds_upon(tmp_path):
    b = Benchmark(SILO, tmp_path, say=quiet)
    assert list(b.play(["FT"])) == ["FedAvg", "FT"]
    pytest.importorskip("matplotlib")
    assert {p.name for p in pictures(b, tmp_path)} == {"boxes.png", "deltas.png"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": {}}, "plan: .*method"),
        ({"methods": {"A": {"algorithm": "nothing"}}}, "algorithm: .*nothing"),
        ({"methods": {"A": {"algorithm": "fedavg", "options": {"speed": 1}}}}, "options: 'A' .*speed"),
        ({"protocol": {"setting": "cross-town", "seeds": [0]}}, "setting: .*cross-town"),
    ],
)
def test_bad_plans_are_one_sentence(change, words, tmp_path):
    with pytest.raises(ValueError, match=words) as e:
        Benchmark({**SILO, **change}, tmp_path, say=quiet).play()
    assert "\n" not in str(e.value) and str(e.value).endswith(".")
    with pytest.raises(ValueError, match=r"^methods: .*Nobody"):
        Benchmark(SILO, tmp_path, say=quiet).play(["Nobody"])


@pytest.mark.parametrize("name", ["motley-school", "motley-device"])
def test_the_plans_that_come_with_the_project_fit(name, tmp_path, monkeypatch):
    plan = json.loads((PLANS / f"{name}.json").read_text())
    own = {"setting": plan["protocol"]["setting"], "seeds": plan["protocol"]["seeds"]}
    small = {k: v for k, v in (DEVICE if own["setting"] == "cross-device" else SILO)["protocol"].items() if k not in own}
    plan |= {"data": (DEVICE if own["setting"] == "cross-device" else SILO)["data"], "protocol": {**small, **own}, "model": "linear"}
    plan["model_options"] = {}
    b = Benchmark(plan, tmp_path, seeds=1, say=quiet)
    for method, m in plan["methods"].items():
        b.plan["methods"][method] = {k: v for k, v in m.items() if k != "grid"}  # the options; grids are another test
        algorithm, _, _ = b.tuned(method)
        assert set(m.get("grid", {})) <= set(vars(algorithm)) and set(m.get("vary", {})) <= set(algorithm.late)
        assert all(m.get(k) in {None, *plan["methods"]} for k in ("state_of", "before"))
    for key in ("reported", "expected"):
        assert set(plan.get(key, {})) <= set(plan["methods"])


def test_school_splits_are_those_of_the_paper():
    plan = json.loads((PLANS / "motley-school.json").read_text())
    try:
        federation_of("school")
    except (OSError, ImportError):
        pytest.skip("school.mat is not here")
    first, second = protocols(plan, seeds=2)
    for p, seed in ((first, 100), (second, 1100)):
        whole = federation_of("school", fractions={"train": 1.0}, standardize=False)
        for i in (0, 138):
            import numpy as np

            n = int(whole.size()[i])
            order = np.random.RandomState(seed).permutation(n)[: math.ceil(0.15 * n)]
            assert torch.equal(p.data.index["test"][i], whole.index["train"][i][torch.from_numpy(order)])
        assert (int(p.data.size().min()), p.data.n) == (14, 139)


def test_the_command_line_plays_a_plan(tmp_path, capsys):
    from pflcore.cli import main

    plan = tmp_path / "small.json"
    plan.write_text(json.dumps(SILO))
    args = ["reproduce", str(plan), "--out", str(tmp_path / "out"), "--quiet", "--seeds", "3", "--rounds", "4", "--methods", "FT", "Local"]
    assert main(args) == 0
    said = capsys.readouterr()
    assert "| FT |" in said.out and "3 run(s)" in said.out and "4 rounds" in said.out and said.err == ""
    assert main([*args, "--equal-compute"]) == 2 and "equal_compute" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "seeds", "want"), [([1, 3], None, [1, 3]), ([1, 3], 1, [1]), ([1, 3], 4, [1, 3, 5, 7]), ([0], 3, [0, 1, 2])]
)
def test_further_seeds_go_on_as_the_plans_do(given, seeds, want):
    assert seeds_of(given, seeds) == want


def test_school_of_the_first_split(tmp_path):
    """Local .0124 and MOCHA .01205 are what an independent program gives for seed 100; the whole table takes `pflcore reproduce`."""
    plan = json.loads((PLANS / "motley-school.json").read_text())
    try:
        b = Benchmark(plan, tmp_path, seeds=1, say=quiet)
    except (OSError, ImportError):
        pytest.skip("school.mat is not here")
    b.play(["Local", "FedAvg + FT", "MOCHA, omega"])
    mean = {r["method"]: r["mean"] for r in b.rows()}
    assert mean["Local"] == pytest.approx(0.0124, abs=1e-4) and mean["MOCHA, omega"] == pytest.approx(0.01205, abs=5e-5)
    assert [good for good, _ in b.verdicts()] == [True] * 3  # FT and MOCHA below Local, FedAvg above
