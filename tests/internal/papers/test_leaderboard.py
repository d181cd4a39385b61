"""Tests of the plans in which every method is played on equal terms, and of their page.

Both plans are played whole at a tiny size, in pieces as well.
"""

import json
import runpy

import pytest
import torch
from places import ROOT

from bench.papers import plan as plans
from bench.papers import run as reproduce
from bench.papers import runs
from pflcore import Simulation
from pflcore.simulation.record import read

pytest.importorskip("sklearn")
pytest.importorskip("tyro")

MAKER = runpy.run_path(str(ROOT / "docs" / "make_leaderboard.py"))
TINY = {"n": 2, "train_samples": 60, "test_samples": 40, "workers": 1}


def tiny(name, *methods, settings=1, rounds=1):
    """A plan of this name with tiny data, a linear model and few methods and values."""
    plan = plans.load(name)
    digits = {"data": "digits", "partition": "iid"}
    plan["settings"] = {f"cut {i}": digits for i in range(settings)}
    own = {"model": "linear", "rounds": rounds, "eval_every": 1}
    plan["options"] = plan["options"] | TINY | own
    plan["model_options"] = {}
    plan["grid"] = {option: [0.05, 0.1] for option in plan["grid"]}
    plan["search_targets"] = plan["search_targets"] and [0]
    names = methods or plan["methods"]
    plan["methods"] = {method: plan["methods"][method] for method in names}
    return plan


def play(plan, folder, **options):
    """The reproduction of a plan, without pictures."""
    return reproduce.reproduce(plan, folder, quiet=True, draw=False, **options)


def test_the_leaderboard_is_complete():
    plan = plans.load("leaderboard")
    todo = plans.tasks(plan)

    assert len(plan["methods"]) == 16 and [*plan["methods"]][:2] == ["Local", "FedAvg"]
    assert len(todo) == 4 * 16 * 3
    searched = {len(v) for task in todo for v in task.grid.values()}
    assert searched == {4} and all(len(task.grid) == 1 for task in todo)
    # The first seed of all is played before the second one, and each has its own cut.
    assert [task.options.seed for task in todo] == [0] * 64 + [1] * 64 + [2] * 64
    assert all(task.options.data_seed == task.options.seed for task in todo)
    for method, options in plan["methods"].items():
        assert method == "Local" or options["before"] == "Local"


def test_the_resnet_table_is_complete():
    todo = plans.tasks(plans.load("resnet-cifar"))

    augmented = [task.job.training.augment for task in todo]
    assert augmented == [None] * 6 + [("flip", "crop:4")] * 6
    assert todo[0].method == "Local"
    assert {task.shape["width"] for task in todo} == {16}


@pytest.mark.deep("a plan is searched and run twice")
def test_a_part_is_played_and_the_rest_goes_on(tmp_path, monkeypatch):
    plan = tiny("leaderboard", "Local", "WAFFLE")
    whole = play(plan, tmp_path / "whole", seeds=1)

    played = []
    honest = Simulation.run
    over = []
    monkeypatch.setattr(runs.Reproduction, "is_over", property(lambda _: bool(over)))

    def run(self, *args, **options):
        played.append(self)
        if len(played) == 4:  # two candidates and a run of Local, and a candidate
            over.append(True)
        return honest(self, *args, **options)

    monkeypatch.setattr(Simulation, "run", run)
    part = play(plan, tmp_path / "parts", seeds=1)
    assert [*part.skipped] == [("cut 0", "WAFFLE", "")]
    assert [row["method"] for row in part.write_rows()] == ["Local"]

    over.clear()
    rest = play(plan, tmp_path / "parts", seeds=1)
    # Of WAFFLE one candidate was there: the other one, and a run for each target.
    assert not rest.skipped and len(played) == 4 + 1 + 2
    for key, (run,) in whole.runs.items():
        (other,) = rest.runs[key]
        for name in ("accuracy", "val"):
            assert torch.equal(run.series(name)[1], other.series(name)[1])


def test_no_time_reads_what_is_there(tmp_path):
    plan = tiny("leaderboard", "Local", "FedAvg")
    play(plan, tmp_path, seeds=1, methods=["Local"])

    made = play(plan, tmp_path, minutes=0)

    assert {key[1]: len(group) for key, group in made.runs.items()} == {"Local": 1}
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["Local"]


def test_a_method_with_a_target_is_run_for_each_client(tmp_path):
    made = play(tiny("leaderboard", "WAFFLE"), tmp_path, seeds=1)

    (run,) = made.runs["cut 0", "WAFFLE", ""]
    parts = read(tmp_path / "records" / "cut_0" / "WAFFLE-seed0")
    values = torch.stack([part.last_values("accuracy") for part in parts])
    assert torch.equal(values.isnan(), ~torch.eye(2, dtype=torch.bool))
    assert torch.equal(run.last_values("accuracy"), values.diagonal())
    sent = sum(part.cumulative_bytes()[-1] for part in parts)
    assert run.cumulative_bytes()[-1] == sent


def test_a_round_is_chosen_on_validation_data(tmp_path):
    made = play(tiny("leaderboard", "Local", rounds=3), tmp_path, seeds=1)

    (run,) = made.runs["cut 0", "Local", ""]
    (row,) = made.write_rows()
    val = run.series("val")[1].mean(1)
    test = 100 * run.series("accuracy")[1].mean(1)
    assert row["by_val"] == pytest.approx(test[val.argmax()].item())
    text = (tmp_path / "table.md").read_text()
    assert "by validation" in text and "selected on test data" not in text


@pytest.mark.deep("each method of both plans is searched and run")
@pytest.mark.parametrize("name", MAKER["PLANS"])
def test_every_method_is_played(name, tmp_path):
    plan = tiny(name)
    plan["options"]["model"] = "mlp"

    rows = play(plan, tmp_path, seeds=1).write_rows()

    assert [row["method"] for row in rows] == [*plan["methods"]]
    assert all(row["stopped"] is None for row in rows)


# the page ---------------------------------------------------------------------


SETTING = "CIFAR-10, Dirichlet .1"


def row(method, *values, seeds=3, hurt=None):
    """A row of outcomes: the mean on the chosen round, and its deviation."""
    mean, std = values
    facts = dict.fromkeys(MAKER["KEYS"])
    facts |= {"setting": SETTING, "method": method, "seeds": seeds, "hurt": hurt}
    facts |= {"final": mean, "final_std": std, "by_val": mean, "by_val_std": std}
    facts |= {"date": "2026-11-28", "machine": "a processor"}
    return facts | {"chosen": {"training.lr": 0.05}}


OUTCOME = {
    SETTING: {
        facts["method"]: facts
        for facts in (
            row("Local", 60.0, 1.0),
            row("FedAvg", 40.0, 2.0, hurt=90.0),
            row("FedPer", 65.0, 1.5, hurt=10.0),
            row("Ditto", 63.0, 0.6, hurt=5.0),
            row("APFL", 99.0, 0.0, seeds=1, hurt=0.0),
        )
    }
}


def test_the_pages_are_made_from_the_outcomes():
    outcomes = json.loads(MAKER["OUTCOMES"].read_text(encoding="utf-8"))
    for path, texts in MAKER["pages"](outcomes).items():
        page = path.read_text(encoding="utf-8")
        assert MAKER["with_texts"](page, texts) == page, (
            "run python docs/make_leaderboard.py"
        )


def test_a_row_that_was_not_played_is_empty():
    text = MAKER["tables"](plans.load("leaderboard"), OUTCOME)

    lines = {
        line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line
    }
    assert "13 of 48 runs are played." in text
    assert text.count("2026-11-28, a processor.") == 1
    assert "**CIFAR-10, two classes**: 0" in text
    assert "65.00 ± 1.50" in lines["FedPer"] and "lr 0.05" in lines["FedPer"]
    assert set(lines["WAFFLE"].replace("WAFFLE", "")) == {"|", " "}


def test_lessons_hold_beyond_the_deviations():
    (line,) = MAKER["lessons"](plans.load("leaderboard"), OUTCOME).splitlines()

    # A single seed has no deviation, so nothing is said of APFL.
    assert "FedPer is first with 65.00 ± 1.50 %; no different from it: Ditto." in line
    assert "Ahead of Local: FedPer, Ditto. Behind Local: FedAvg." in line
    assert "by Ditto: 5.0 %" in line and "APFL" not in line
    assert "No setting" in MAKER["lessons"](plans.load("leaderboard"), {})


def test_outcomes_are_taken_from_folders_row_by_row(tmp_path):
    plan = tiny("leaderboard", "Local", "FedAvg", settings=2)
    made = play(plan, tmp_path / "whole", seeds=1)
    play(plan, tmp_path / "part", seeds=2, settings=["cut 1"], methods=["Local"])
    outcomes = {"resnet-cifar": "stays"}

    for folder in ("whole", "part"):
        MAKER["take"](tmp_path / folder, outcomes)

    assert outcomes["resnet-cifar"] == "stays"
    seeds = {}
    for setting, rows in outcomes["leaderboard"].items():
        seeds |= {(setting, method): row["seeds"] for method, row in rows.items()}
    assert seeds == {
        ("cut 0", "Local"): 1,
        ("cut 0", "FedAvg"): 1,
        ("cut 1", "Local"): 2,
        ("cut 1", "FedAvg"): 1,
    }
    row = outcomes["leaderboard"]["cut 0"]["Local"]
    assert row["chosen"].keys() == {"training.lr"}
    assert row["final"] == pytest.approx(made.write_rows()[0]["final"], abs=1e-4)
