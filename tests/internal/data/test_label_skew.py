"""WAFFLe's partitions, the measures of its Table 2, and the reproduction's table."""

import json

import pytest

from bench.papers import groups
from bench.papers.plan import load
from pflcore.cli import main
from pflcore.results.record import Run


def test_the_table_has_every_way_to_evaluate():
    def run(accuracy):
        head = {"data": "mnist", "rounds": 1, "options": {}, "parameters": 7, "group": [0, 0, 1]}
        return Run(head, [{"round": 1, "seconds": 2.0, "eval": {"accuracy": accuracy}}])

    plan = {"about": "", "reported": {"multimodal": {"A": {"accuracy": 95.41, "gap": 2.07}}}}
    runs = {
        ("multimodal", "A", ""): [run([0.9, 0.8, 0.4]), run([0.9, 0.8, 0.6])],
        ("multimodal", "A, mean", ""): [run([0.5, 0.5, 0.5])] * 2,
    }
    rows = groups.rows_of(plan, runs)
    assert [r["method"] for r in rows] == ["A", "A, mean"]
    assert [
        rows[0]["ours"][k] for k in ("accuracy", "majority", "minority", "gap")
    ] == pytest.approx([220 / 3, 85, 50, 35])
    assert rows[0]["std"]["minority"] == pytest.approx(10) and rows[1]["ours"]["variance"] == 0
    text = " ".join(groups.table(plan, rows).split())  # without the columns' padding
    assert (
        "| A | 7 | 73.33 ± 3.33 | 85.00 ± 0.00 | 50.00 ± 10.00 | 35.00 ± 10.00 |" in text
        and "| 95.41 | 2.07 |" in text
    )
    assert "| A, mean | 7 | 50.00 ± 0.00 |" in text


@pytest.mark.parametrize("name", ["factorized-table1", "factorized-fashion", "factorized-cifar"])
def test_the_plans(name):
    plan = load(name)
    assert (
        plan["options"]["rounds"] == 100
        and plan["options"]["participation"] == 0.1
        and plan["training"]["epochs"] == 5
    )
    assert set(plan["reported"]["unimodal"]) <= set(plan["methods"]) and {
        "Local",
        "FT",
        "Ditto",
    } <= set(plan["methods"])


def test_reproduce_plays_and_goes_on(tmp_path, capsys):
    ranks = {"ranks": [6]}
    plan = {
        "about": "small",
        "groups": True,
        "options": {"data": "digits", "n": 12, "rounds": 2, "participation": 0.5, "model": "mlp"},
        "training": {"lr": 0.1, "batch_size": 16},
        "model_options": {"hidden": [12]},
        "settings": {
            "multimodal": {"partition": "multimodal", "partition_options": {"minority_clients": 2}}
        },
        "methods": {
            "FedAvg": {"algorithm": "fedavg"},
            "WAFFLe": {"algorithm": "factorized_waffle", "options": ranks},
            "WAFFLe, mean": {
                "algorithm": "factorized_waffle",
                "options": {**ranks, "eval_mode": "mean"},
                "state_of": "WAFFLe",
            },
        },
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    asked = [
        "reproduce",
        str(tmp_path / "plan.json"),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
        "--quiet",
    ]
    assert main(asked) == 0
    first = (tmp_path / "out" / "table.md").read_text()
    assert "| WAFFLe, mean |" in first and "| minority |" in first
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.jsonl")}
    assert (
        main(asked) == 0
        and {p: p.stat().st_mtime_ns for p in before} == before
        and len(before) == 3
    )
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    assert [r["method"] for r in rows] == ["FedAvg", "WAFFLe", "WAFFLe, mean"] and rows[1][
        "parameters"
    ] < rows[0]["parameters"]
