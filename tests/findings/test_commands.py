"""What the command line leaves out of its tables, looks at too late, or cannot be told."""

import json
import sys

import numpy as np
import pytest
from torch import nn

from pflcore import Simulation, Training
from pflcore.cli import main
from pflcore.data import federation_of
from pflcore.results.record import group, read
from pflcore.results.table import table

SHORT = [
    "--data",
    "digits",
    "--n",
    "3",
    "--rounds",
    "1",
    "--train-samples",
    "60",
    "--test-samples",
    "60",
    "--quiet",
]


@pytest.fixture
def hospitals(tmp_path):
    """Two clients' files: a column of 0 to 1 beside one of 0 to 600, and whole numbers as
    targets."""
    rng = np.random.RandomState(0)
    for name in "ab":
        x = rng.rand(30, 2) * [1, 600]
        rows = [f"{a:.4f},{b:.2f},{int(20 + 30 * a)}" for a, b in x]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.csv").write_text("\n".join(["share,sugar,age", *rows]) + "\n")
    return f"folder:{tmp_path / 'data'}"


def test_every_job_is_looked_at_before_the_first_round(tmp_path, capsys):
    out = tmp_path / "out"
    late = ["--local-optimizer", "adamw", "--lr", "0.001", "--out", str(out)]
    assert main(["compare", "--algorithms", "local", "pfedme", *SHORT, *late]) == 2
    assert "PFedMe" in capsys.readouterr().err and not out.exists()
    assert main(["compare", "--algorithms", "local", "apfl", *SHORT, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.index("local: ") < said.index("apfl: ")


def test_a_comparison_that_fails_leaves_the_table_of_what_was_played(tmp_path, capsys, monkeypatch):
    (tmp_path / "late.py").write_text(
        "from pflcore import FedAvg\nclass Late(FedAvg):\n    def update(self, state, up, "
        "cohort):\n        raise OSError('away')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    assert main(["compare", "--algorithms", "local", "late:Late", *SHORT, "--out", str(out)]) == 1
    assert "| local " in (out / "table.md").read_text()
    sys.modules.pop("late", None)


def test_metrics_that_were_asked_for_are_in_the_table(tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(["run", "fedavg", *SHORT, "--metrics", "balanced_accuracy", "auc", "--out", str(out)])
        == 0
    )
    (head,) = [
        line
        for line in (out / "table.md").read_text().splitlines()
        if line.startswith("| algorithm")
    ]
    assert (
        head.index("worst decile")
        < head.index("auc")
        < head.index("balanced_accuracy")
        < head.index("bytes")
    )
    (run,) = read(out)
    assert f"{run.last('balanced_accuracy').nanmean():.4f}" in (out / "table.md").read_text()


def test_a_half_done_folder_is_met_with_the_word_resume(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["run", "local", *SHORT, "--out", str(out)]) == 0
    assert main(["run", "local", *SHORT, "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err


def test_whole_numbers_may_be_targets_and_columns_may_be_scaled(hospitals, tmp_path, capsys):
    out = tmp_path / "out"
    words = [
        "run",
        "local",
        "--data",
        hospitals,
        "--criterion",
        "squared",
        "--rounds",
        "30",
        "--lr",
        "0.1",
        "--quiet",
    ]
    assert main([*words, "--standardize", "True", "--out", str(out)]) == 0
    (run,) = read(out)
    assert run.measure == "loss" and bool((run.last("loss") < 30).all())
    with pytest.warns(UserWarning, match=r"vary by 1 and by \d+; scale them by --standardize"):
        main([*words, "--out", str(tmp_path / "raw")])


def test_a_model_of_ones_own(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef small():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, "
        "10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    assert main(["run", "local", *SHORT, "--model", "mine:small", "--out", str(out)]) == 0
    assert (
        json.loads((out / "record.jsonl").read_text().splitlines()[0])["header"]["parameters"]
        == 650
    )
    assert main(["run", "local", *SHORT, "--model", "mine:none", "--out", str(tmp_path / "b")]) == 2
    assert "model: the module 'mine' has no 'none'" in capsys.readouterr().err


def test_a_methods_alpha_is_not_the_partitions(tmp_path, capsys):
    out = tmp_path / "out"
    words = [
        "compare",
        "--algorithms",
        "local",
        "apfl",
        *SHORT,
        "--partition",
        "dirichlet",
        "--alpha",
        "0.3",
        "--out",
        str(out),
    ]
    assert main(words) == 0
    assert "alpha=" not in (out / "table.md").read_text()


def test_runs_on_other_cuts_are_no_seeds_of_one():
    lines = []
    for seed, alpha in ((0, 0.05), (1, 5.0)):
        data = federation_of("digits", "dirichlet", n=3, alpha=alpha, train_samples=90, min_size=1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        lines += Simulation("local", model, data, Training(), rounds=1, seed=seed).run().lines()
    assert "seeds" not in table(group(lines))
