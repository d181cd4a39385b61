"""Tests of the program that reproduces papers.

It resumes plans, refuses wrong plans and folders, selects on validation data, and
counts costs.
"""

import json
import re
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from entry_points import sentence
from places import ROOT, tabled
from small import layers

import pflcore
from bench.papers import costs, figures, runs
from bench.papers import plan as plans
from bench.papers import run as reproduce
from pflcore import Net, Simulation
from pflcore.algorithms import L2C, FedAvg, FedDWA, FedFomo, Mocha
from pflcore.lab import cli
from pflcore.lab.cli._experiment import make_algorithm, model_of, partition_of
from pflcore.simulation._files import lock_folder
from pflcore.simulation.record import read

pytest.importorskip("sklearn")
pytest.importorskip("tyro")


SMALL, VARIANTS = (
    json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    for name in ("small", "variants")
)


def plan(tmp_path, variant):
    """The file of the small plan, or of a variant."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL | VARIANTS[variant]))
    return str(path)


def played(tmp_path, variant):
    """The result of a plan that Python plays."""
    return reproduce.reproduce(
        plans.load(plan(tmp_path, variant)), tmp_path / "out", quiet=True
    )


def command(tmp_path, *words, variant="small"):
    """The exit code and the rows of a plan by command line."""
    out = tmp_path / "out"
    code = cli.main(
        ["reproduce", plan(tmp_path, variant), "--out", str(out), "--quiet", *words]
    )
    return code, json.loads((out / "result.json").read_text())["rows"]


def watched(where, name):
    """A patch that records the calls of a function and makes them."""
    return mock.patch.object(
        where, name, autospec=True, side_effect=getattr(where, name)
    )


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    monkeypatch.setattr(reproduce.study, "draw", lambda *_: None)


@pytest.mark.deep("it takes a second")
def test_rows_records_and_table(tmp_path, capsys):
    words = ("--seeds", "2", "--rounds", "2")
    # A plan's checks hold only for the plan without changes.
    code, rows = command(tmp_path, *words, variant="two cuts")
    played = product(("two classes", "iid"), SMALL["methods"])
    assert code == 0 and [(r["setting"], r["method"]) for r in rows] == list(played)
    first, second = rows[:2]
    assert {
        "data": "digits",
        "paper": 92.97,
        "seeds": 2,
        "rounds": 2,
    }.items() <= first.items()
    assert second["paper"] is None
    assert (first["models_a_round"], second["models_a_round"]) == pytest.approx((3, 2))
    records = read(tmp_path / "out")
    assert len(records) == 2 * 3 * 2
    classes = read(tmp_path / "out" / "records" / "two_classes")
    best = [max(r.curve()[1]) for r in classes if r.algorithm == "feddwa"]
    assert first["best"] == pytest.approx(50 * sum(best))
    said = capsys.readouterr().out
    assert all(
        words in said for words in ("| FedDWA ", "92.97", "selected on test data")
    )


def test_a_plan_is_told_before_its_first_run(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    told = []

    def run(self, task):
        told.append((capsys.readouterr().err, out.is_dir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.Reproduction, "run", run)
    assert cli.main(["reproduce", plan(tmp_path, "small"), "--out", str(out)]) == 130
    ((text, has_folder),) = told
    assert has_folder and SMALL["about"] in text and str(out) in text
    assert str(pflcore.backend()) in text
    assert re.search(r"Plays \d+ runs, \d+ rounds in all", text)


def test_each_run_is_told_where_no_terminal_listens(tmp_path, capsys):
    path = plan(tmp_path, "FedAvg beside Local")
    words = ["reproduce", path, "--out", str(tmp_path / "out"), "--rounds", "1"]
    assert cli.main(words) == 0
    text = capsys.readouterr().err
    for record in read(tmp_path / "out"):
        assert f"{record.header['method']}, seed {record.header['seed']}\n" in text
    assert cli.main([*words, "--quiet"]) == 0
    assert ", seed" not in capsys.readouterr().err


def test_a_table_says_who_was_dropped_and_who_ran_away(tmp_path, capsys, monkeypatch):
    honest = FedAvg.train

    def train(self, down, client_state, clients):
        new, up, fit = honest(self, down, client_state, clients)
        up = {k: v.clone() for k, v in up.items()}
        for v in up.values():
            v[1 if clients.round == 2 else 2] = torch.nan if clients.round == 2 else 1e3
        return new, up, fit

    monkeypatch.setattr(FedAvg, "train", train)
    assert command(tmp_path, "--workers", "1", variant="FedAvg beside Local")[0] == 0
    said = capsys.readouterr().out
    assert "| 1 times a client was dropped" in said and "Local, moved far" not in said
    assert "\nFedAvg, moved far: client 2 by up to " in said


@pytest.mark.deep("it takes a second")
def test_a_target_alone_is_tested_and_each_setting_has_options_of_its_own(tmp_path):
    """The plan is like that of WAFFLE's Table 1.

    It reports the accuracy of one client, beside the paper's number with its deviation.
    Local's target needs no other client.
    """
    code, rows = command(tmp_path, variant="a target")
    found = {
        (r.header["setting"], r.header["method"]): r for r in read(tmp_path / "out")
    }
    options = [found[s, "WE"].header["options"] for s in "ab"]
    assert code == 0 and [(o["p_d"], o["p_s"]) for o in options] == [
        (0.5, 1),
        (None, 1),
    ]
    assert found["a", "Local"].rounds[0]["cohort"] == [2]
    assert len(found["a", "WE"].rounds[0]["cohort"]) == 4
    for row in rows:
        accuracy = found[row["setting"], row["method"]].last_values("accuracy")
        assert accuracy.isnan().tolist() == [True, True, False, True]
        assert row["final"] == pytest.approx(100 * accuracy[2].item())
        assert row["std"] is row["worst_decile"] is None
    text = (tmp_path / "out" / "table.md").read_text()
    assert (rows[0]["paper"], rows[0]["paper_std"]) == (92.5, 0.25)
    assert "92.50 ± 0.25" in text and "of the target alone" in text


def test_what_is_there_is_not_overwritten_by_something_else(tmp_path, capsys):
    assert command(tmp_path, "--methods", "FedAvg")[0] == 0
    path = tmp_path / "out" / "records" / "iid" / "FedAvg-seed0.jsonl"
    before = path.read_bytes()
    assert command(tmp_path, "--methods", "FedAvg", "--rounds", "3")[0] == 2
    assert "other options" in capsys.readouterr().err and path.read_bytes() == before


def test_two_do_not_play_into_one_folder(tmp_path):
    out = tmp_path / "out"
    with lock_folder(out), sentence("out: another run is writing into"):
        played(tmp_path, "small")
    assert not (out / "records").exists()


def test_equal_compute_stands_beside_it(tmp_path):
    code, rows = command(tmp_path, "--methods", "FedDWA", "FedAvg", "--equal-compute")
    assert code == 0 and [(r["method"], r["variant"], r["epochs"]) for r in rows] == [
        ("FedDWA", "", 1),
        ("FedAvg", "", 1),
        ("FedAvg", "equal compute", 2),
    ]
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    (line,) = (x.split("|") for x in lines if x.startswith("| FedDWA"))
    # FedDWA trains one more epoch for its guidance. It has one number for both columns.
    assert line[2].strip() == line[4].strip()


@pytest.mark.deep("it takes a second")
def test_a_grid_is_chosen_on_validation_data(tmp_path):
    with watched(Simulation, "run") as run:
        code, (row,) = command(tmp_path, "--seeds", "2", variant="a grid")
    played = [call.args[0] for call in run.call_args_list]
    splits = [
        (p.evaluation.split, p.training.lr, int(p.data.size().sum())) for p in played
    ]
    part = splits[0][2]
    whole = splits[-1][2]
    tried = [("val", lr, part) for lr in (1e-6, 0.2)] * 2
    assert (
        code == 0 and splits == [*tried, *[("test", 0.2, whole)] * 2] and part < whole
    )
    assert row["seeds"] == 2 and len(read(tmp_path / "out")) == 2
    assert "training.lr 0.2" in (tmp_path / "out" / "table.md").read_text()
    with watched(Simulation, "run") as run:
        assert (
            command(tmp_path, "--seeds", "2", variant="a grid")[0] == 0
            and not run.called
        )


WRONG = """\
reproduce nothing | name: expected one of factorized-
reproduce | --list
reproduce feddwa-table1 --methods FedSomething | methods: expected some of FedDWA
reproduce feddwa-table1 --settings pathologic | settings: expected some of pathological
reproduce feddwa-table1 --rounds 0 | rounds: expected at least 1, got 0.
reproduce feddwa-table1 --seeds 0 | seeds: expected at least 1, got 0.
reproduce motley-school --equal-compute | equal_compute: expected a plan that says
"""


@pytest.mark.parametrize("words, said", tabled(WRONG))
def test_wrong_names_are_a_sentence(words, said, capsys):
    assert cli.main(words.split()) == 2 and said in capsys.readouterr().err


# The text of a file, and a pattern of the error.
FILES = """\
{"like": "no-such-plan"} | like: expected one of factorized-alpha, .*, got
{"like": "self.json"} | like: expected one of factorized-alpha, .*, got
{"like": 3} | like: expected one of factorized-alpha, .*, got
{ | name: expected a plan in JSON, got self.json
[1] | plan: expected a dict, got \\[1\\]
{} | plan: expected methods and settings
"""


@pytest.mark.parametrize("line", FILES.splitlines())
def test_what_is_no_plan_is_one_sentence(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, said = line.split(" | ")
    Path("self.json").write_text(text)
    with sentence(said):
        plans.load("self.json")


def test_the_table_of_tables_names_every_plan_and_no_other():
    text = (ROOT / "bench" / "papers" / "results.md").read_text(encoding="utf-8")
    rows = text.split("## Papers, table by table")[1].split("## ")[0]
    third = [line.split("|")[3] for line in rows.splitlines() if line.startswith("| ")][
        1:
    ]
    named = {
        word.split()[0]
        for cell in third
        for word in re.findall(r"`([a-z][^`]*)`", cell)
    }
    aside = {"pflcore", "python", 'guidance="kept"'}
    # This plan is a variant, which the text below the table explains.
    assert named - aside == set(plans.plans()) - {"waffle-relu"}


@pytest.mark.parametrize("name", plans.plans())
def test_every_plan_is_well_formed(name):
    made = plans.load(name)
    assert any(c.isdigit() for c in made["takes"]) and made["about"]
    for m in made["methods"].values():
        alg = make_algorithm(m["algorithm"], m.get("options"))
        searched = {k for k in m.get("grid", {}) if not k.startswith("training.")}
        assert searched <= {*vars(alg)} and {*m.get("vary", {})} <= {
            *alg.traits.evaluation_only
        }
    if made["costs"]:
        return
    todo = plans.tasks(made, seeds=1, equal_compute=True)
    assert len({t.path for t in todo}) == len({t.digest for t in todo}) == len(todo)
    for t in todo:
        o = t.options
        named = model_of(t.options.model)
        cut = partition_of(o.data, o.partition)
        assert cut is None or {*t.cut} <= {*cut.defaults}, t.path
        assert {*t.shape} <= {*(named.defaults if named else ())}, t.path
    for key in ("reported", "expected"):
        assert {*made[key]} <= {*made["settings"]}
        assert all({*numbers} <= {*made["methods"]} for numbers in made[key].values())


def test_the_list_names_every_plan_and_its_data(capsys):
    assert cli.main(["reproduce", "--list"]) == 0
    said = capsys.readouterr().out
    for name in plans.plans():
        made = plans.load(name)
        assert (
            f"{name}\n  {made['about']}\n" in said
            and f"cores: {made['takes']}\n" in said
        )
    assert all(f"data: {data}" in said for data in ("school", "fashion_mnist", "none"))


# costs ----------------------------------------------------------------------


@pytest.mark.deep("it takes a second")
def test_costs_are_those_of_the_papers_table():
    """Methods move 2, 3, 1 + M or 1 + N models.

    FedDWA's guidance by one more epoch doubles the work.
    """
    net = Net(layers("Conv2d 1 4 3, ReLU, Flatten, Linear 144 300, ReLU, Linear 300 5"))
    algorithms = (FedAvg(), FedDWA(), FedFomo(m=3), L2C(), Mocha(outer=1))
    found = [
        costs.cost(a, net, (1, 8, 8), 5, n=7, samples=100, batch_size=8)
        for a in algorithms
    ]
    avg, dwa, fomo, l2c, mocha = found
    models = [(round(c.models_down, 1), round(c.models_up, 1)) for c in found[:4]]
    assert models == [(1, 1), (1, 2), (3, 1), (7, 1)]
    inner = 144 * 300 + 300 * 5
    macs = 6 * 6 * 4 * 9 + inner
    # A step computes the forward pass, the gradients of all weights, and the gradients
    # of the inputs of all layers but the first.
    assert avg.client == pytest.approx(2 * 100 * (2 * macs + inner), rel=1e-9)
    assert (dwa.client, mocha.client) == pytest.approx((2 * avg.client, avg.client))
    assert (avg.bytes, dwa.bytes) == (2 * 4 * net.size, 3 * 4 * net.size)
    assert (
        avg.server == 2 * 7 * net.size and dwa.server == (3 * 49 + 2 * 7 * 5) * net.size
    )
    assert fomo.client > 0.96 * avg.client and l2c.client > 0.8 * avg.client
    # The server computes W W^T.
    assert mocha.server > 2 * 7 * 7 * net.size


def test_a_plan_that_counts_costs(tmp_path, capsys):
    code, rows = command(tmp_path, variant="costs")
    assert code == 0 and len(rows) == 4 and rows[0]["paper"] == 9.54
    assert rows[1]["final"] == pytest.approx(1.5 * rows[0]["final"])
    (line,) = (
        x for x in capsys.readouterr().out.splitlines() if x.startswith("| FedDWA")
    )
    assert [float(c) for c in line.split("|")[2:4]] == [1, 2]


# figures --------------------------------------------------------------------


# Weights of the other clients in tenths, and the clients that the figure shows.
NEAREST = """\
[5, 3, 2, 0] | [0, 1]
[1, 1, 1, 1] | [0, 1]
[0, 0, 1, 0] | [2]
[1, 4, 4, 1] | [1, 2]
"""


def test_the_nearest_are_shown():
    w, want = zip(*tabled(NEAREST), strict=True)
    found = figures.nearest(torch.tensor(w) / 10, 2)
    assert [row.nonzero()[:, 0].tolist() for row in found] == [*want]


# one method of several -------------------------------------------------------


def test_one_method_that_diverges_leaves_the_others_their_rows(tmp_path):
    assert command(tmp_path, variant="one diverges")[0] == 1
    text = (tmp_path / "out" / "table.md").read_text()
    assert "mean over clients" in text and "FAILS: Hyp: largest not measured" in text
    assert re.search(r"\| FedAvg +\| +[89]\d\.", text)


@pytest.mark.deep("it takes a second")
def test_a_grid_of_a_target_is_searched_on_it(tmp_path):
    with watched(runs, "tune") as tune:
        played(tmp_path, "grids of a target")
    roles = [call.args[0][0] for call in tune.call_args_list]
    seen = [(p.tuning_clients.tolist(), p.train_clients.tolist()) for p in roles]
    assert seen == [([2], [2]), ([2], [0, 1, 2, 3])]


def test_a_grid_is_searched_with_the_runs_clip(tmp_path):
    with watched(runs, "tune") as tune:
        played(tmp_path, "a grid with clip")
    assert [call.kwargs["robustness"].clip for call in tune.call_args_list] == [1.0]


@pytest.mark.deep("it takes a second")
def test_a_grid_chooses_on_samples_that_no_state_was_trained_on(tmp_path):
    with watched(runs, "tune") as tune:
        played(tmp_path, "a grid on a state")
    tune.assert_called_once()
    assert tune.call_args.kwargs["states"] is None


def test_kept_states_are_evaluated_as_the_run_evaluates(tmp_path):
    with watched(Simulation, "evaluate") as evaluate:
        made = played(tmp_path, "local statistics")
    assert {call.args[0].config.batch_norm for call in evaluate.call_args_list} == {
        "local"
    }
    assert "f1" in made.runs["iid", "FT", ""][0].evaluations[-1]["eval"]


def test_a_full_disk_leaves_the_result_that_was_there(tmp_path):
    some = {"about": "A plan", "paper": "none"}
    runs.write(tmp_path, some, [], "A table.\n")
    (tmp_path / "table.md.0123abcd.part").write_text("of a killed process")
    runs.write(tmp_path, some, [], "A table.\n")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {*before} == {"result.json", "table.md"}

    def half(path, text, **_):
        path.write_bytes(text.encode()[:5])
        raise OSError(28, "No space left on device")

    with (
        mock.patch.object(Path, "write_text", half),
        pytest.raises(OSError, match="No space"),
    ):
        runs.write(tmp_path, some, [], "Another table.\n")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
