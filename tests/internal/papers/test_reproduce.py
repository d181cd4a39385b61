"""The runner of reproductions: it resumes, refuses what does not fit, selects on validation data,
and counts costs."""

import json

import pytest
import torch
import torch.nn as nn
from methods import L2C, FedDWA, FedFomo, Mocha

from bench.papers import costs, runs
from bench.papers import plan as plans
from bench.papers import run as reproduce
from pflcore import Net, Simulation, cli
from pflcore.algorithms import FedAvg
from pflcore.cli.experiment import algorithm, model_of, partition_of
from pflcore.results import mixing as figures
from pflcore.results.record import group, read

pytest.importorskip("sklearn")


def plan(tmp_path, **more):
    made = {
        "about": "A small plan",
        "options": {"data": "digits", "n": 4, "rounds": 2, "model": "linear"},
        "seeds": [0],
        "training": {"lr": 0.1, "batch_size": 20},
        "equal_compute": {"epochs": 2},
        "settings": {
            "two classes": {"partition": "pathological", "partition_options": {"k": 2}},
            "iid": {"partition": "iid"},
        },
        "methods": {
            "FedDWA": {"algorithm": "feddwa", "options": {"k": 2}, "looks_ahead": True},
            "FedAvg": {"algorithm": "fedavg"},
            "FedFomo": {"algorithm": "fedfomo"},
        },
        "reported": {"two classes": {"FedDWA": 92.97}},
    }
    path = tmp_path / "small.json"
    path.write_text(json.dumps(made | more))
    return str(path)


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    monkeypatch.setattr(reproduce.study, "draw", lambda *_: None)


def test_rows_records_and_table(tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        cli.main(["reproduce", plan(tmp_path), "--out", str(out), "--seeds", "2", "--quiet"]) == 0
    )
    rows = json.loads((out / "result.json").read_text())["rows"]
    assert [(r["method"], r["setting"]) for r in rows] == [
        (m, s) for s in ("two classes", "iid") for m in ("FedDWA", "FedAvg", "FedFomo")
    ]
    first = rows[0]
    assert set(first) >= {
        "method",
        "data",
        "setting",
        "best",
        "best_std",
        "final",
        "std",
        "paper",
        "seeds",
    }
    assert (first["data"], first["paper"], first["seeds"], first["rounds"]) == (
        "digits",
        92.97,
        2,
        2,
    )
    assert (
        0 <= first["final"] <= first["best"] <= 100
        and first["best_std"] >= 0
        and rows[1]["paper"] is None
    )
    assert abs(first["models_a_round"] - 3) < 1e-9 and abs(rows[1]["models_a_round"] - 2) < 1e-9
    runs = read(out)
    assert len(runs) == 2 * 3 * 2 and all(len(r.rounds) == 2 for r in runs)
    best = [max(r.curve()[1]) for r in read(out / "records" / "two_classes" / "FedDWA-seed0.jsonl")]
    other = [
        max(r.curve()[1]) for r in read(out / "records" / "two_classes" / "FedDWA-seed1.jsonl")
    ]
    assert abs(first["best"] - 50 * (best[0] + other[0])) < 1e-9
    table = capsys.readouterr().out
    assert "| FedDWA |" in table and "92.97" in table and "selected on test data" in table
    assert all(
        any("held out" in note for note in r.header["notes"]) == (r.algorithm == "fedfomo")
        for r in runs
    )


def test_a_table_says_who_was_dropped_and_who_ran_away(tmp_path, capsys, monkeypatch):
    honest = FedAvg.train

    def train(self, down, own, clients):
        new, up, fit = honest(self, down, own, clients)
        up = {k: v.clone() for k, v in up.items()}
        for v in up.values():
            v[1 if clients.round == 2 else 2] = torch.nan if clients.round == 2 else 1e3
        return new, up, fit

    monkeypatch.setattr(FedAvg, "train", train)
    settings = {"iid": {"partition": "iid"}}
    path = plan(
        tmp_path,
        settings=settings,
        methods={"FedAvg": {"algorithm": "fedavg"}, "Local": {"algorithm": "local"}},
        reported={},
    )
    assert (
        cli.main(["reproduce", path, "--out", str(tmp_path / "out"), "--quiet", "--workers", "1"])
        == 0
    )
    table = capsys.readouterr().out
    assert "| 1 times a client was dropped |" in table and "| Local " in table
    assert "\nFedAvg, moved far: client 2 by up to " in table and "Local, moved far" not in table


def test_a_target_alone_is_tested_and_each_setting_has_options_of_its_own(tmp_path):
    """As WAFFLE's Table 1: client 0's accuracy, the paper's number with its deviation; Local's
    target needs nobody else."""
    settings = {
        "a": {"partition": "iid", "method_options": {"WE": {"p_d": 0.5}}},
        "b": {"partition": "iid"},
    }
    methods = {
        "Local": {"algorithm": "local"},
        "WE": {"algorithm": "weight_erosion", "options": {"p_s": 1.0}},
    }
    options = {"data": "digits", "n": 4, "rounds": 3, "model": "linear", "target": 2}
    made = plan(
        tmp_path,
        settings=settings,
        methods=methods,
        options=options,
        reported={"a": {"Local": [92.5, 0.25]}},
    )
    assert cli.main(["reproduce", made, "--out", str(tmp_path / "out"), "--quiet"]) == 0
    runs = {(r.header["setting"], r.header["method"]): r for r in read(tmp_path / "out")}
    assert [runs[s, "WE"].header["options"]["p_d"] for s in "ab"] == [0.5, None]
    assert all(r.header["options"]["p_s"] == 1 for (_, m), r in runs.items() if m == "WE")
    assert (
        runs["a", "Local"].rounds[0]["cohort"] == [2]
        and len(runs["a", "WE"].rounds[0]["cohort"]) == 4
    )
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    for row in rows:
        accuracy = runs[row["setting"], row["method"]].last("accuracy")
        assert accuracy.isnan().tolist() == [True, True, False, True] and row[
            "final"
        ] == pytest.approx(100 * accuracy[2].item())
        assert row["std"] is row["worst_decile"] is None
    text = (tmp_path / "out" / "table.md").read_text()
    assert (
        (rows[0]["paper"], rows[0]["paper_std"]) == (92.5, 0.25)
        and "92.50 ± 0.25" in text
        and "of the target alone" in text
    )
    (task, *_) = plans.tasks(plans.load(made))
    data = task.protocol().data
    everybody = task.job.simulation(
        data, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    ).run()
    assert everybody.rounds[-1]["eval"]["accuracy"][2] == rows[0]["final"] / 100


def test_what_is_there_is_not_played_again(tmp_path, monkeypatch):
    out, small = tmp_path / "out", plan(tmp_path)
    argv = ["reproduce", small, "--out", str(out), "--settings", "iid", "--quiet"]
    assert cli.main([*argv, "--methods", "FedAvg"]) == 0
    path = out / "records" / "iid" / "FedAvg-seed0.jsonl"
    before = path.read_bytes()
    played = []
    run = Simulation.run
    monkeypatch.setattr(
        Simulation, "run", lambda self, *a: played.append(self.name) or run(self, *a)
    )
    assert cli.main(argv) == 0
    assert played == ["feddwa", "fedfomo"] and path.read_bytes() == before
    # the process was killed here
    path.write_bytes(b"\n".join(before.splitlines()[:2]) + b'\n{"round": 2, "cut off')
    played.clear()
    assert cli.main(argv) == 0
    assert played == ["fedavg"]
    again = read(path)[0]
    assert again.rounds[-1]["eval"] == json.loads(before.splitlines()[-1])["eval"]


def test_a_record_of_something_else_is_never_taken_or_overwritten(tmp_path, capsys):
    out, small = tmp_path / "out", plan(tmp_path)
    argv = [
        "reproduce",
        small,
        "--out",
        str(out),
        "--settings",
        "iid",
        "--methods",
        "FedAvg",
        "--quiet",
    ]
    assert cli.main(argv) == 0
    before = (out / "records" / "iid" / "FedAvg-seed0.jsonl").read_bytes()
    capsys.readouterr()
    assert cli.main([*argv, "--rounds", "3"]) == 2
    assert "other options" in capsys.readouterr().err
    assert (out / "records" / "iid" / "FedAvg-seed0.jsonl").read_bytes() == before


def test_equal_compute_stands_beside_it(tmp_path):
    out = tmp_path / "out"
    argv = [
        "reproduce",
        plan(tmp_path),
        "--out",
        str(out),
        "--settings",
        "iid",
        "--methods",
        "FedDWA",
        "FedAvg",
        "--equal-compute",
        "--quiet",
    ]
    assert cli.main(argv) == 0
    rows = json.loads((out / "result.json").read_text())["rows"]
    assert [(r["method"], r["variant"], r["epochs"]) for r in rows] == [
        ("FedDWA", "", 1),
        ("FedAvg", "", 1),
        ("FedAvg", "equal compute", 2),
    ]
    line = next(x for x in (out / "table.md").read_text().splitlines() if x.startswith("| FedDWA"))
    # a method that looks ahead has one number for both
    assert line.split("|")[2] == line.split("|")[4]


def test_a_grid_is_chosen_on_validation_data(tmp_path, monkeypatch):
    small = plan(
        tmp_path,
        methods={
            "FedAvg": {
                "algorithm": "fedavg",
                "grid": {"training.lr": [1e-6, 0.2], "server_lr": [1.0]},
            }
        },
    )
    splits = []
    run = Simulation.run

    def spy(self, *a, **more):
        splits.append((self.evaluation.split, self.training.lr, int(self.data.size().sum())))
        return run(self, *a, **more)

    monkeypatch.setattr(Simulation, "run", spy)
    out = tmp_path / "out"
    assert (
        cli.main(
            ["reproduce", small, "--out", str(out), "--settings", "iid", "--seeds", "2", "--quiet"]
        )
        == 0
    )
    whole = splits[-1][2]
    part = splits[0][2]
    assert (
        splits == [("val", lr, part) for lr in (1e-6, 0.2)] * 2 + [("test", 0.2, whole)] * 2
        and part < whole
    )
    (row,) = json.loads((out / "result.json").read_text())["rows"]
    assert row["seeds"] == 2 and len(read(out)) == 2
    assert "training.lr 0.2" in (out / "table.md").read_text()
    splits.clear()
    assert (
        cli.main(
            ["reproduce", small, "--out", str(out), "--settings", "iid", "--seeds", "2", "--quiet"]
        )
        == 0
        and not splits
    )


def test_a_grid_on_regression_takes_the_smallest_loss_of_those_that_did_not_diverge(tmp_path):
    grid = {"training.lr": [1e30, 1e-9, 0.1]}
    options = {"data": "synthetic_linear", "n": 4, "rounds": 4, "model": "linear"}
    made = plans.complete(
        {
            "options": options,
            "settings": {"a": {}},
            "methods": {"FedAvg": {"algorithm": "fedavg", "grid": grid}},
        }
    )
    (runs,) = reproduce.reproduce(made, tmp_path, quiet=True, draw=False).runs.values()
    assert runs[0].header["training"]["lr"] == 0.1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "name: expected one of factorized-"),
        (["feddwa-table1", "--methods", "FedSomething"], "methods: expected some of FedDWA"),
        (["feddwa-table1", "--settings", "pathologic"], "settings: expected some of pathological"),
        (["feddwa-table1", "--rounds", "0"], "rounds: expected at least 1, got 0."),
        (["feddwa-table1", "--seeds", "0"], "seeds: expected at least 1, got 0."),
        (["motley-school", "--equal-compute"], "equal_compute: this plan does not say"),
    ],
)
def test_wrong_names_are_a_sentence(argv, message, capsys):
    assert cli.main(["reproduce", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_with_an_unknown_key_is_refused(tmp_path, capsys):
    assert cli.main(["reproduce", plan(tmp_path, metods={})]) == 2
    assert "metods" in capsys.readouterr().err


@pytest.mark.parametrize("like", ["no-such-plan", "self.json", 3])
def test_a_plan_is_like_one_that_is_there(like, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self.json").write_text(json.dumps({"like": like}))
    with pytest.raises(ValueError, match=r"^like: expected one of factorized-alpha, .*, got "):
        plans.load("self.json")


@pytest.mark.parametrize("name", plans.plans())
def test_every_plan_is_well_formed(name):
    made = plans.load(name)
    assert any(c.isdigit() for c in made["takes"]) and made["about"]
    for m in made["methods"].values():
        alg = algorithm(m["algorithm"], m.get("options"))
        assert {k for k in m.get("grid", {}) if not k.startswith("training.")} <= set(
            vars(alg)
        ) and set(m.get("vary", {})) <= set(alg.traits.late)
    if made["costs"]:
        return
    todo = plans.tasks(made, seeds=1, equal=True)
    assert len({t.path for t in todo}) == len({t.digest for t in todo}) == len(todo)
    for t in todo:
        o, named = t.job.options, model_of(t.job.options.model)
        cut = partition_of(o.data, o.partition)
        assert cut is None or set(t.cut) <= set(cut.defaults), t.path
        assert set(t.shape) <= set(named.defaults if named else ()), t.path
        algorithm(t.job.algorithm, t.job.hyper, o.target)
    for key in ("reported", "expected"):
        assert set(made[key]) <= set(made["settings"]) and all(
            set(numbers) <= set(made["methods"]) for numbers in made[key].values()
        )


def test_the_list_names_every_plan_and_its_data(capsys):
    assert cli.main(["reproduce", "--list"]) == 0
    said = capsys.readouterr().out
    for name in plans.plans():
        assert f"{name}\n" in said and plans.load(name)["about"] in said
        assert f"cores: {plans.load(name)['takes']}\n" in said
    assert "data: school" in said and "data: fashion_mnist" in said and "data: none" in said
    assert cli.main(["reproduce"]) == 2 and "--list" in capsys.readouterr().err


# costs ----------------------------------------------------------------------


def test_costs_are_those_of_the_papers_table():
    """2, 3 and 1 + M, 1 + N models; looking ahead doubles the work."""
    net = Net(
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 300),
            nn.ReLU(),
            nn.Linear(300, 5),
        )
    )
    algorithms = (FedAvg(), FedDWA(), FedFomo(m=3), L2C())
    found = {
        a: costs.cost(a, net, (1, 8, 8), 5, n=7, samples=100, batch_size=8) for a in algorithms
    }
    models = [(round(c.models_down, 1), round(c.models_up, 1)) for c in found.values()]
    assert models == [(1, 1), (1, 2), (3, 1), (7, 1)]
    avg, dwa, fomo, l2c = found.values()
    macs = 6 * 6 * 4 * 9 + 144 * 300 + 300 * 5
    inner = 144 * 300 + 300 * 5
    # forward, weights, and inputs beyond the first layer
    assert avg.client == pytest.approx(2 * 100 * (2 * macs + inner), rel=1e-9)
    assert dwa.client == pytest.approx(2 * avg.client)
    assert avg.bytes == 2 * 4 * net.size and dwa.bytes == 3 * 4 * net.size
    assert avg.server == 2 * 7 * net.size and dwa.server == (3 * 49 + 2 * 7 * 5) * net.size
    assert fomo.client > 1.2 * avg.client * 0.8 and l2c.client > avg.client * 0.8
    mocha = costs.cost(Mocha(outer=1), net, (1, 8, 8), 5, n=7, samples=100, batch_size=8)
    # W W^T is the server's
    assert (
        mocha.client == pytest.approx(avg.client, rel=1e-9) and mocha.server > 2 * 7 * 7 * net.size
    )
    table = costs.table({"FedAvg": avg, "FedDWA": dwa}, 100)
    assert table.count("\n") == 4 and "| 2.00 |" in table


def test_a_plan_that_counts_costs(tmp_path, capsys):
    made = {
        "about": "Costs",
        "costs": {
            "model": "mlp",
            "shape": [1, 8, 8],
            "classes": 4,
            "n": 3,
            "samples": 40,
            "batch_size": 8,
        },
        "methods": {"FedAvg": {"algorithm": "fedavg"}, "FedDWA": {"algorithm": "feddwa"}},
        "reported": {"MiB per client and round": {"FedAvg": 9.54}},
    }
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(made))
    assert cli.main(["reproduce", str(path), "--out", str(tmp_path / "o")]) == 0
    rows = json.loads((tmp_path / "o" / "result.json").read_text())["rows"]
    assert (
        len(rows) == 4
        and rows[0]["paper"] == 9.54
        and rows[1]["final"] == pytest.approx(1.5 * rows[0]["final"])
    )
    assert "| FedDWA | 1.00 | 2.00 |" in capsys.readouterr().out


# figures --------------------------------------------------------------------


def weighted(rounds=6, n=8):
    lines = [{"header": {"algorithm": "feddwa"}}]
    for r in range(1, rounds + 1):
        w = torch.eye(n) + r * (torch.arange(n)[:, None] // 4 == torch.arange(n) // 4)
        lines.append(
            {
                "round": r,
                "algorithm": "feddwa",
                "report": {"weights": (w / w.sum(1, keepdim=True)).tolist()},
                "eval": None,
            }
        )
    return group(lines)[0]


def test_nearest_and_within():
    w = torch.tensor(
        [[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0], [0.1, 0.4, 0.4, 0.1]]
    )
    assert figures.nearest(w, 2).tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 1, 1, 0],
    ]
    inside, between = figures.within(torch.eye(4) * 0.5 + 0.1, torch.tensor([0, 0, 1, 1]))
    assert inside == pytest.approx(0.35) and between == pytest.approx(0.1)
    assert [r for r, _ in figures.of_rounds(weighted(), None)] == [1, 2, 3, 6]
    assert [r for r, _ in figures.of_rounds(weighted(), [2, 5])] == [2, 5]


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {"FedDWA": weighted(), "none": group([{"header": {}}])[0]}
    rows = [{"setting": "a", "options": {"k": k}, "best": 80.0 + k} for k in (1, 5, 3)] + [
        {"setting": "b", "options": {}, "best": 1.0}
    ]
    made = [
        figures.heat_maps(runs, tmp_path / "w.png"),
        figures.neighbours(runs, tmp_path / "n.png", k=4),
        figures.against(rows, "k", tmp_path / "k.png"),
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in made)
    assert figures.heat_maps({"none": runs["none"]}, tmp_path / "x.png") is None
    assert figures.against(rows, "ahead", tmp_path / "x.png") is None


def played(tmp_path, **more):
    return reproduce.reproduce(plans.load(plan(tmp_path, **more)), tmp_path / "out", quiet=True)


IID = {"iid": {"partition": "iid"}}


def test_one_method_that_diverges_leaves_the_others_their_rows(tmp_path):
    methods = {
        "Bad": {"algorithm": "fedavg", "training": {"lr": 1e38}},
        "FedAvg": {"algorithm": "fedavg", "before": "Bad"},
        "Hyp": {
            "algorithm": "hypcluster",
            "training": {"lr": 1e38},
            "options": {"k": 2},
            "before": "FedAvg",
        },
    }
    options = {"data": "digits", "n": 4, "rounds": 8, "model": "linear", "eval_every": 1000}
    made = played(
        tmp_path,
        options=options,
        methods=methods,
        settings=IID,
        reported={},
        checks={"largest": {"Hyp": [50, 10]}},
    )
    text = (made.folder / "table.md").read_text()
    assert "mean over clients" in text and "FAILS: Hyp: largest not measured" in text
    assert "| FedAvg | 9" in text or "| FedAvg | 8" in text


def test_a_grid_of_a_target_is_searched_on_it(tmp_path, monkeypatch):
    seen, tune = [], runs.tune
    monkeypatch.setattr(
        runs,
        "tune",
        lambda p, *a, **k: (
            seen.append((p[0].choose.tolist(), p[0].train.tolist())),
            tune(p, *a, **k),
        )[1],
    )
    methods = {
        "Local": {"algorithm": "local", "grid": {"training.lr": [0.05, 0.1]}},
        "FedAvg": {"algorithm": "fedavg", "grid": {"server_lr": [1.0]}},
    }
    options = {"data": "digits", "n": 4, "rounds": 2, "model": "linear", "target": 2}
    played(tmp_path, options=options, methods=methods, settings=IID, reported={})
    assert seen == [([2], [2]), ([2], [0, 1, 2, 3])]


def test_a_plan_that_cannot_mean_what_it_says_is_refused(tmp_path):
    one, grid = {"algorithm": "fedavg"}, {"algorithm": "fedavg", "grid": {"server_lr": [1.0]}}
    for words, more in (
        ("below of checks: expected no keys beside", {"checks": {"below": {"FedAvgg": ["Local"]}}}),
        ("checks: expected no keys beside", {"checks": {"belwo": {}}}),
        ("methods: FT, a and FT a would share", {"methods": {"FT, a": one, "FT a": one}}),
        (
            "grid: it is searched without clip",
            {"options": {"data": "digits", "clip": 1.0}, "methods": {"A": grid}},
        ),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            played(tmp_path, settings=IID, reported={}, **more)


def test_a_grid_chooses_on_samples_that_no_state_was_trained_on(tmp_path, monkeypatch):
    seen, tune = [], runs.tune
    monkeypatch.setattr(
        runs,
        "tune",
        lambda *a, states=None, **k: (seen.append(states), tune(*a, states=states, **k))[1],
    )
    methods = {
        "F": {"algorithm": "fedavg"},
        "kNN": {"algorithm": "knnper", "state_of": "F", "grid": {"lam": [0.0, 0.5]}},
    }
    played(tmp_path, methods=methods, settings=IID, reported={})
    assert seen == [None]


def test_kept_states_are_evaluated_as_the_run_evaluates(tmp_path, monkeypatch):
    seen, evaluate = [], runs.evaluate
    monkeypatch.setattr(
        runs, "evaluate", lambda *a: (seen.append((a[0].batch_norm, a[4])), evaluate(*a))[1]
    )
    methods = {"F": {"algorithm": "fedavg"}, "FT": {"algorithm": "finetune", "state_of": "F"}}
    options = {
        "data": "digits",
        "n": 4,
        "rounds": 2,
        "model": "linear",
        "buffers": "local",
        "metrics": ["f1"],
    }
    made = played(tmp_path, options=options, methods=methods, settings=IID, reported={})
    assert seen and all(buffers == "local" and list(metrics) == ["f1"] for buffers, metrics in seen)
    assert all(
        "f1" in r.evaluations[-1]["eval"] for (one,) in [made.runs["iid", "FT", ""]] for r in [one]
    )


def test_waffles_figure_5_has_the_labels_of_table_4():
    settings = plans.load("waffle-fig5")["settings"]
    assert {name[7]: options["partition"] for name, options in settings.items()} == {
        "A": "A",
        "C": "B",
    }
