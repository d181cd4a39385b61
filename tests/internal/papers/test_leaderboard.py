"""Tests of the plans in which every method is played on equal terms, and of their page.

Both plans are played whole at a tiny size, in pieces as well.
"""

import json
import math
import runpy

import pytest
import torch
from places import ROOT

from bench.papers import plan as plans
from bench.papers import run as reproduce
from bench.papers import runs, search, table
from pflcore import FedAvg, Simulation, Training
from pflcore.algorithms import FedDBE, FedDWA, HypCluster, PFedMe
from pflcore.lab.cli._experiment import make_algorithm
from pflcore.lab.results._verdicts import compare_with_baseline
from pflcore.lab.tuning import Trial, Tuned, candidate_of, check_grid
from pflcore.simulation.record import read

pytest.importorskip("sklearn")
pytest.importorskip("tyro")
pytest.importorskip("scipy")

MAKER = runpy.run_path(str(ROOT / "docs" / "make_leaderboard.py"))
TINY = {"n": 2, "train_samples": 60, "test_samples": 40, "workers": 1}


def tiny(name, *methods, settings=1, rounds=1):
    """A plan of this name with tiny data, a linear model and few methods and values."""
    plan = plans.load(name)
    digits = {"data": "digits", "partition": "iid"}
    plan["settings"] = {f"cut {i}": digits for i in range(settings)}
    own = {"model": "linear", "rounds": rounds, "eval_every": 1}
    plan["options"] = plan["options"] | TINY | own
    if name == "leaderboard":
        plan["options"]["val"] = 0.2
    plan["model_options"] = {}
    names = methods or plan["methods"]
    plan["methods"] = {method: dict(plan["methods"][method]) for method in names}
    for method in plan["methods"].values():
        if "grid" in method:
            method["grid"] = {option: v[:2] for option, v in method["grid"].items()}
    if "FedPer" in plan["methods"]:
        # The patterns of a grid are names of LeNet-5.
        plan["methods"]["FedPer"] |= {"grid": {"training.lr": [0.05, 0.1]}}
    plan["widen"] = False
    if plan["baseline"] not in plan["methods"]:
        plan["baseline"] = None
    plan["search_targets"] = plan["search_targets"] and [0]
    return plan


def play(plan, folder, **options):
    """The reproduction of a plan, without pictures."""
    return reproduce.reproduce(plan, folder, quiet=True, draw=False, **options)


BOARD = plans.load("leaderboard")


def test_the_leaderboard_is_complete():
    methods = [*BOARD["methods"]]

    assert len(methods) == 29 and methods[:3] == ["Local", "FedAvg", "FedAvg + FT"]
    assert sum(name.endswith(", 2 epochs") for name in methods) == 3
    assert len(BOARD["settings"]) == len(BOARD["seeds"]) == 5
    assert BOARD["baseline"] == "FedAvg + FT" and BOARD["widen"]
    for method, options in BOARD["methods"].items():
        assert method == "Local" or options["before"] == "Local"
        assert options["source"] and options["work"] >= 1


def test_every_grid_of_the_leaderboard_has_twelve_candidates():
    todo = plans.tasks(BOARD, seeds=1)

    assert len(todo) == 5 * 29 - 5
    for task in todo:
        assert math.prod(map(len, task.grid.values())) == 12, task.key
        assert any(key.endswith("lr") for key in task.grid), task.key
        algorithm = make_algorithm(task.job.algorithm, task.job.algorithm_options)
        check_grid(algorithm, task.job.training, task.grid)


def test_the_leaderboard_is_played_setting_by_setting():
    settings = [*BOARD["settings"]][:2]

    todo = plans.tasks(BOARD, seeds=2, settings=settings, methods=["Local", "FedAvg"])

    order = [(task.setting, task.options.seed, task.method) for task in todo]
    assert order == [
        (setting, seed, method)
        for setting in settings
        for seed in (0, 1)
        for method in ("Local", "FedAvg")
    ]
    # Each seed has its own cut.
    assert all(task.options.data_seed == task.options.seed for task in todo)


def test_a_setting_says_what_it_leaves_out():
    left_out = BOARD["settings"]["School"]["leaves_out"]

    todo = plans.tasks(BOARD, seeds=1, settings=["School"])

    assert {*BOARD["methods"]} - {task.method for task in todo} == {*left_out}
    text = MAKER["tables"](BOARD, {})
    assert f"Left out: {', '.join(left_out)}; it needs the classes" in text


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
        # Two candidates and a run of Local, and a candidate of WAFFLE.
        if len(played) == 4:
            over.append(True)
        return honest(self, *args, **options)

    monkeypatch.setattr(Simulation, "run", run)
    part = play(plan, tmp_path / "parts", seeds=1)
    assert [*part.skipped] == [("cut 0", "WAFFLE", "")]
    assert [row["method"] for row in part.write_rows()] == ["Local"]

    over.clear()
    rest = play(plan, tmp_path / "parts", seeds=1)
    # Of WAFFLE one candidate was there: three others, and a run for each target.
    assert not rest.skipped and len(played) == 4 + 3 + 2
    for key, (run,) in whole.runs.items():
        (other,) = rest.runs[key]
        for name in ("accuracy", "val"):
            assert torch.equal(run.series(name)[1], other.series(name)[1])


@pytest.mark.deep("it takes a second")
def test_no_time_reads_what_is_there(tmp_path):
    plan = tiny("leaderboard", "Local", "FedAvg")
    play(plan, tmp_path, seeds=1, methods=["Local"])

    made = play(plan, tmp_path, minutes=0)

    assert {key[1]: len(group) for key, group in made.runs.items()} == {"Local": 1}
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["Local"]


@pytest.mark.deep("it takes a second")
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


# the search -------------------------------------------------------------------


# The values of an option, the chosen one, and those beyond it.
BEYOND = [
    ([0.01, 0.1], 0.1, [1.0]),
    ([0.01, 0.03, 0.1], 0.1, [0.33]),
    ([0.01, 0.03, 0.1], 0.01, [0.0033]),
    ([2, 5, 10], 10, [20]),
    ([100, 150], 150, [225]),
    ([2, 3], 2, [1.3, 1]),
    ([2, 10, 50], 2, [0.4, 0]),
    ([2, 3, 4], 2, [1.3, 1]),
    ([2, 3, 4], 4, [5.3, 5]),
    ([1, 2], 1, [0.5, 0]),
    ([0.0, 0.1], 0.0, []),
    ([0.0, 0.1], 0.1, []),
]


@pytest.mark.parametrize("values, chosen, want", BEYOND)
def test_a_step_beyond_a_grid_has_its_ratio(values, chosen, want):
    assert search.values_beyond(values, chosen) == want


def tuned(grid, score):
    """A search of a grid of FedAvg, with the scores of a function."""
    trials = []
    for lr in grid["training.lr"]:
        for server_lr in grid["server_lr"]:
            options = {"training.lr": lr, "server_lr": server_lr}
            candidate = candidate_of(FedAvg(), Training(lr=0.1), options)
            values = torch.tensor([score(lr, server_lr)], dtype=torch.float64)
            trials.append(Trial(candidate, [values]))
    return Tuned(trials, [], lambda *_: None)


def test_each_edge_and_all_of_them_are_widened():
    grid = {"training.lr": [0.1, 0.2, 0.4], "server_lr": [0.5, 1.0]}

    wider = search.grid_beyond(tuned(grid, lambda lr, server_lr: lr * server_lr), grid)

    assert wider == {"training.lr": [0.4, 0.8], "server_lr": [1.0, 2.0]}
    inner = tuned(grid, lambda lr, server_lr: -abs(lr - 0.2) - server_lr)
    assert search.grid_beyond(inner, grid) == {
        "training.lr": [0.2],
        "server_lr": [0.5, 0.25],
    }


def test_a_value_that_an_option_cannot_have_is_not_tried():
    options = {"momentum": 0.9}
    trials = [
        Trial(
            candidate_of(FedAvg(), Training(lr=0.1), {"training.momentum": momentum}),
            [torch.tensor([momentum])],
        )
        for momentum in (0.5, options["momentum"])
    ]

    wider = search.grid_beyond(
        Tuned(trials, [], lambda *_: None), {"training.momentum": [0.5, 0.9]}
    )

    assert wider == {"training.momentum": [0.9]}


@pytest.mark.parametrize(
    "algorithm, key, values, want",
    [
        (FedDBE(), "kappa", [2, 10, 50], 0.4),
        (PFedMe(), "lam", [1, 4, 15], 0.25),
        (FedDWA(), "k", [2, 5, 10], 1),
        (HypCluster(), "k", [2, 3, 4], 1),
    ],
)
def test_whole_numbers_are_tried_where_an_option_takes_no_others(
    algorithm, key, values, want
):
    """A pull is not switched off because its grid has whole numbers."""
    trials = [
        Trial(
            candidate_of(algorithm, Training(lr=0.1), {key: value}),
            [torch.tensor([1.0 / value])],
        )
        for value in values
    ]

    wider = search.grid_beyond(Tuned(trials, [], lambda *_: None), {key: values})

    assert wider == {key: [values[0], want]}


@pytest.mark.deep("it takes a second")
def test_a_choice_beyond_which_all_diverge_stands(tmp_path):
    plan = tiny("leaderboard", "Local", rounds=3) | {"widen": True}
    plan["options"] |= {"train_samples": 600, "test_samples": 100}
    plan["methods"]["Local"]["grid"] = {"training.lr": [1e-40, 0.1]}

    (row,) = play(plan, tmp_path, seeds=1).write_rows()

    assert row["training"]["lr"] == 0.1 and row["edges"] == {}


@pytest.mark.deep("it takes a second")
def test_a_choice_at_an_edge_is_widened_once_and_marked(tmp_path):
    plan = tiny("leaderboard", "Local", rounds=3) | {"widen": True}
    plan["options"] |= {"train_samples": 600, "test_samples": 100}
    # These step sizes are far too small, so the larger one is always better.
    plan["methods"]["Local"]["grid"] = {"training.lr": [1e-4, 1e-3]}

    (row,) = play(plan, tmp_path, seeds=1).write_rows()

    assert row["training"]["lr"] == 0.01
    assert row["edges"] == {"training.lr": "largest"}
    assert "training.lr 0.01 (largest tried)" in (tmp_path / "table.md").read_text()
    again = play(plan, tmp_path, seeds=1, minutes=0).write_rows()
    assert again[0]["edges"] == row["edges"]
    # Trained states are large, and a search that is over needs none.
    assert not [*tmp_path.glob("**/state-*")]


def test_candidates_of_several_targets_become_one_search():
    grid = {"training.lr": [0.1, 0.2], "server_lr": [1.0]}
    first = tuned(grid, lambda lr, _: lr)
    second = tuned(grid, lambda lr, _: -3 * lr)
    second.trials[0].stopped = "diverged"

    merged = search.merge_trials([first, second])

    assert merged.trials[0].score == -math.inf
    assert merged.best.score == pytest.approx((0.2 - 0.6) / 2)


# a local step -------------------------------------------------------------------


@pytest.mark.deep("it takes a second")
def test_one_cell_repeats_bit_for_bit(tmp_path):
    plan = tiny("leaderboard", "Local", "FedAvg")

    first = play(plan, tmp_path / "first", seeds=1)
    # Another number of threads, and a method alone.
    second = play(plan, tmp_path / "second", seeds=1, methods=["FedAvg"], workers=2)

    key = ("cut 0", "FedAvg", "")
    (one,), (other,) = first.runs[key], second.runs[key]
    assert first.tasks[key][0].job.training == second.tasks[key][0].job.training
    for name in ("accuracy", "loss", "val", "after_step"):
        assert torch.equal(one.series(name)[1], other.series(name)[1])


@pytest.mark.deep("it takes a second")
def test_a_shared_model_is_evaluated_after_a_local_step(tmp_path):
    plan = tiny("leaderboard", "FedAvg", "FedAvg + FT", "Local")
    plan["methods"]["FedAvg + FT"]["options"] = {"finetune_epochs": 1}
    for method in plan["methods"].values():
        method["grid"] = {"training.lr": [0.1]}

    rows = {row["method"]: row for row in play(plan, tmp_path, seeds=1).write_rows()}

    assert rows["Local"]["after_step"] is None
    assert rows["FedAvg"]["after_step"] != rows["FedAvg"]["final"]
    text = (tmp_path / "table.md").read_text()
    assert "after a local step" in text


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
CELLS = MAKER["cells_of"](BOARD)


def row(method, *by_seed, hurt=None):
    """A row of outcomes with the means of several seeds."""
    facts = dict.fromkeys(MAKER["KEYS"])
    facts |= {"setting": SETTING, "method": method, "variant": "", "hurt": hurt}
    facts |= {"cell": CELLS[SETTING][method], "measure": "accuracy"}
    facts |= {"seeds": len(by_seed), "seed_numbers": [*range(len(by_seed))]}
    facts |= {"by_seed": [*by_seed], "final": sum(by_seed) / len(by_seed)}
    facts |= {"date": "2026-11-28", "machine": "a processor", "final_std": 1.5}
    edges = {"training.lr": "largest"} if method == "FedPer" else {}
    return facts | {"chosen": {"training.lr": 0.05}, "edges": edges}


OUTCOME = {
    SETTING: {
        facts["method"]: facts
        for facts in (
            row("Local", 60.0, 62.0, 61.0, 59.0, 63.0),
            row("FedAvg", 40.0, 42.1, 40.9, 39.2, 43.0, hurt=90.0),
            row("FedAvg + FT", 65.0, 67.0, 66.0, 64.0, 68.0, hurt=12.0),
            row("FedPer", 66.0, 68.1, 67.0, 65.1, 69.0, hurt=10.0),
            row("Ditto", 65.3, 66.9, 65.8, 64.2, 68.1, hurt=5.0),
            row("APFL", 99.0, hurt=0.0),
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
    text = MAKER["tables"](BOARD, OUTCOME)

    lines = {
        line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line
    }
    assert "26 of 145 runs are played." in text
    assert text.count("2026-11-28, a processor.") == 1
    assert "**CIFAR-10, two classes**: 0" in text
    assert "67.04 ± 1.50" in lines["FedPer"]
    assert r"lr 0.05\*" in lines["FedPer"] and r"lr 0.05\*" not in lines["Ditto"]
    assert set(lines["WAFFLE"].replace("WAFFLE", "")) == {"|", " "}


def test_rows_of_another_plan_are_not_shown():
    other = {SETTING: {"Local": OUTCOME[SETTING]["Local"] | {"cell": "another"}}}

    text = MAKER["tables"](BOARD, other)

    assert "61.00" not in text and f"**{SETTING}**: 0 of 145" in text


def test_a_cell_depends_on_the_grid_and_not_on_the_seed():
    changed = plans.load("leaderboard")
    changed["methods"]["Ditto"]["grid"] = {"lam": [0.1, 1]}
    changed["methods"]["Ditto"]["source"] = "elsewhere"

    def cells(plan, seeds):
        todo = plans.tasks(plan, seeds=seeds, settings=[SETTING])
        return {(task.method, task.cell) for task in todo}

    assert cells(BOARD, 2) == {*CELLS[SETTING].items()}
    differs = cells(BOARD, 1) - cells(changed, 1)
    assert [method for method, _ in differs] == ["Ditto"]


def test_the_verdicts_are_those_of_the_report():
    rows = [*OUTCOME[SETTING].values()]

    got = table.verdicts_of(BOARD, rows)

    baseline = OUTCOME[SETTING]["FedAvg + FT"]["by_seed"]
    differences = {}
    for facts in rows:
        if facts["method"] not in ("FedAvg + FT", "APFL"):  # APFL has one seed.
            pairs = zip(facts["by_seed"], baseline, strict=True)
            differences[facts["method"]] = [a - b for a, b in pairs]
    assert got == compare_with_baseline(differences, True)
    words = {method: verdict.word for method, verdict in got.items()}
    assert words == {
        "Local": "worse",
        "FedAvg": "worse",
        "FedPer": "better",
        "Ditto": "no difference shown",
    }
    assert "better: +1.04 (+0.97 to +1.11)" in MAKER["tables"](BOARD, OUTCOME)


def test_rows_that_are_not_played_yet_count_in_the_correction():
    rows = [*OUTCOME[SETTING].values()]
    few = table.verdicts_of(BOARD, rows)

    many = table.verdicts_of(BOARD, rows, planned=10**6)

    assert few["FedPer"].word == "better"
    assert many["FedPer"].word == "no difference shown"
    assert few["FedPer"][1:] == many["FedPer"][1:]


def test_a_method_of_much_work_is_compared_at_equal_work_too():
    equal = "FedAvg + FT, 2 epochs"
    ditto = OUTCOME[SETTING]["Ditto"]
    cell = CELLS[SETTING][equal]
    of_setting = OUTCOME[SETTING] | {equal: ditto | {"method": equal, "cell": cell}}
    rows = MAKER["rows_of_plan"](BOARD, {SETTING: of_setting})[SETTING]

    compared = MAKER["comparisons"](BOARD, SETTING, rows)

    assert "FedPer" in compared["FedAvg + FT"]
    assert [*compared[equal]] == ["Ditto"] and compared[equal]["Ditto"].difference == 0


def test_a_run_for_each_client_is_work_for_each():
    of_setting = {name: MAKER["work_of"](BOARD, name, "WAFFLE") for name in CELLS}
    assert of_setting == {name: 139 if name == "School" else 20 for name in CELLS}


def test_a_row_says_with_how_many_seeds_it_diverged():
    facts = OUTCOME[SETTING]["Ditto"]
    by_seed = [*facts["by_seed"][:3], None, None]
    lost = facts | {"stopped": "The run diverged.", "by_seed": by_seed}

    text = MAKER["tables"](BOARD, {SETTING: OUTCOME[SETTING] | {"Ditto": lost}})

    assert "diverged with 2 of 5 seeds" in text


def test_a_lower_loss_is_better():
    rows = [facts | {"measure": "loss"} for facts in OUTCOME[SETTING].values()]

    got = table.verdicts_of(BOARD, rows)

    assert (got["Local"].word, got["FedPer"].word) == ("better", "worse")


def test_lessons_are_the_verdicts():
    (line,) = MAKER["lessons"](BOARD, OUTCOME).splitlines()

    # APFL lacks seeds, so nothing is compared with it.
    assert line.endswith(
        "4 methods against FedAvg + FT. Better: FedPer. Worse: Local; FedAvg. "
        "No difference shown: Ditto."
    )
    assert "No setting" in MAKER["lessons"](BOARD, {})


@pytest.mark.deep("it takes seconds")
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
    MAKER["take"](tmp_path / "whole", outcomes)
    # A folder with fewer seeds of the same plan takes nothing away.
    assert outcomes["leaderboard"]["cut 1"]["Local"]["seeds"] == 2
