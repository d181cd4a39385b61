"""Tests of WAFFLe's measures and tables, and of the attack on it."""

import json
from pathlib import Path

import pytest
import torch
from places import tabled

from bench.papers import table
from pflcore import History
from pflcore.lab.cli import main


def test_subpopulations():
    values = torch.tensor(
        [96.0, 97.0, 95.0, 98.0, 94.0, 70.0, 60.0], dtype=torch.float64
    )
    got = table.measures(values, [0, 0, 0, 0, 0, 1, 1])
    assert (got["majority"], got["minority"], got["gap"]) == (96, 65, 31)
    assert got["variance"] == pytest.approx(204.6938775510, rel=1e-9)
    values[0] = torch.nan
    assert table.measures(values, [0, 0, 1, 1, 1, 1, 1])["majority"] == 97
    assert table.largest_share([0, -1, 1, 1, -1]) == pytest.approx(2 / 3)


HEAD = json.loads("""{
"data": "mnist", "seed": 0, "rounds": 1, "options": {}, "parameters": 7,
"group": [0, 0, 1], "training": {"epochs": 1}, "takes_part": 1
}""")


def run(*values, measure="accuracy"):
    """A record with these evaluations; each round sends 10 bytes.

    Each of `values` holds the values of all clients.
    """
    line = {"seconds": 2.0, "bytes_down": 10, "bytes_up": 0, "cohort": [0]}
    seen = [{"accuracy": [None], measure: v, "size": [1] * len(v)} for v in values]
    return History(
        HEAD, [line | {"round": r, "eval": e} for r, e in enumerate(seen, 1)]
    )


# The metric, the values of one client, and the bytes until it is near enough.
ENOUGH = """\
accuracy | [[0.489], [0.491]] | 20
accuracy | [[0.489], [0.489]] | null
loss | [[0.511], [0.509]] | 20
"""


@pytest.mark.parametrize("measure, values, want", tabled(ENOUGH))
def test_near_enough_is_two_percent_worse(measure, values, want):
    """The bytes that a method sends until it is near enough.

    Near enough is at most 2 % worse than the last value of the first method. A method
    that never comes so near has no number.
    """
    first = run([0.1], [0.5], measure=measure)
    other = run(*values, measure=measure)
    plan = {"methods": {"A": {}, "B": {}}, "settings": {"": {}}, "grid": {}}
    plan |= {"reported": {}, "expected": {}}
    rows = table.rows_of(plan, {("", "A", ""): [first], ("", "B", ""): [other]})
    assert rows[1]["to_goal"] == want


def test_the_table_has_every_way_to_evaluate():
    plan = {
        "about": "",
        "reported": {"multimodal": {"A": {"accuracy": 95.41, "gap": 2.07}}},
    }
    runs = {
        ("multimodal", "A", ""): [run([0.9, 0.8, 0.4]), run([0.9, 0.8, 0.6])],
        ("multimodal", "A, mean", ""): [run([0.5, 0.5, 0.5])] * 2,
    }
    rows = table.rows_of_groups(plan, runs)
    # The text of the table without the padding of its cells.
    text = " ".join(table.table_of_groups(plan, rows).split())
    assert (
        "| A | 7 | 73.33 ± 4.71 | 85.00 ± 0.00 | 50.00 ± 14.14 | 35.00 ± 14.14 |"
        in text
    )
    assert "| 95.41 | 2.07 |" in text and "| A, mean | 7 | 50.00 ± 0.00 |" in text


@pytest.mark.deep("it takes seconds")
def test_reproduce_plays_a_plan_of_groups(tmp_path):
    path = Path(__file__).with_name("groups.json")
    out = tmp_path / "out"
    words = ["reproduce", str(path), "--out", str(out), "--workers", "1", "--quiet"]
    assert main(words) == 0
    text = (out / "table.md").read_text()
    assert "| WAFFLe, mean |" in text and "| minority |" in text
    rows = json.loads((out / "result.json").read_text())["rows"]
    assert [r["method"] for r in rows] == ["FedAvg", "WAFFLe", "WAFFLe, mean"]
    assert rows[1]["parameters"] < rows[0]["parameters"]


@pytest.mark.deep("a whole attack")
def test_attack_prints_its_table(tmp_path, capsys):
    small = (
        "--clients 2 --samples 20 --rounds 1 --epochs 1 --shadows 1 --ratios 2 "
        "--steps 5"
    )
    words = (
        f"attack --data digits --out {tmp_path} {small} --views random adaptive own"
    ).split()
    words += ["--workers", "1", "--quiet"]
    assert main(words) == 0
    output = capsys.readouterr().out
    cells = " ".join(output.split())
    assert cells.count("| fedavg | upload |") == 3
    for view in ("random", "adaptive", "own"):
        assert cells.count(f"| factorized_waffle | {view} |") == 3
    # The second call prints the stored results.
    assert main(words) == 0 and capsys.readouterr().out == output
