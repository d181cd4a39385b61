"""`pflcore bench --against` compares ratios to the best right peer of each run."""

import json

import pytest
from entry_points import sentence
from hypothesis import given
from hypothesis import strategies as st

import bench
from bench import against


def row(provider, ms, error=1e-8, op="sqdist", size=None):
    size = {"N": 10} if size is None else size
    return {"op": op, "size": size, "provider": provider, "ms": ms, "error": error}


def run_of(*rows, cpu="one"):
    return {"machine": {"cpu": cpu}, "rows": [*rows]}


BEFORE = run_of(
    row("pflcore", 1.0),
    row("pflcore, fresh result", 0.1),
    row("wrong", 0.2, error=0.5),
    row("slow", 9.0),
    row("torch", 2.0, error=1e-5),
    row("absent", None, error=None),
    row("pflcore", 3.0, op="step", size={"S": 2}),
    row("plain loop", 6.0, error=None, op="step", size={"S": 2}),
)
STEP = ("step", "S=2")
SQDIST = ("sqdist", "N=10")


def scaled(measured, factor, ours=1.0):
    """The run on a machine that takes `factor` times as long."""
    rows = []
    for measurement in measured["rows"]:
        ms = measurement["ms"]
        if ms is not None:
            ms *= factor
            if measurement["provider"] == "pflcore":
                ms *= ours
        rows.append({**measurement, "ms": ms})
    return {**measured, "rows": rows}


def test_the_best_right_peer_is_the_yardstick():
    found = against.ratios(BEFORE)
    assert found[SQDIST] == (1.0, "torch", 0.5)
    assert found[STEP] == (3.0, "plain loop", 0.5)


@given(machine=st.floats(0.01, 100), ours=st.floats(0.5, 2))
def test_only_growth_beside_the_peers_counts(machine, ours):
    now = scaled(BEFORE, machine, ours)
    result = against.compare(BEFORE, now)
    if abs(ours - 1.1) > 1e-6:
        assert result.slower == ([SQDIST, STEP] if ours > 1.1 else [])
    assert result.unmatched == []


def test_a_row_of_one_run_alone_is_named():
    now = run_of(*BEFORE["rows"][:6], row("pflcore", 1.0, op="new"))
    now["rows"].append(row("torch", 1.0, op="new"))
    result = against.compare(BEFORE, now)
    assert list(result.pairs) == [SQDIST]
    assert result.unmatched == [("new", "N=10"), STEP]


def test_runs_without_a_common_row_are_refused():
    now = run_of(row("pflcore", 1.0, op="new"), row("torch", 1.0, op="new"))
    with sentence("against: expected ops and sizes of this run, .* got none of them"):
        against.compare(BEFORE, now)


def command(tmp_path, monkeypatch, now):
    """The exit status of the command, which measures `now`."""
    pytest.importorskip("tyro")
    path = tmp_path / "before.json"
    path.write_text(json.dumps(BEFORE))
    monkeypatch.setattr(bench, "_measure", lambda options: (now, ""))
    return bench.main(["--against", str(path), "--json", str(path)])


def test_the_command_fails_and_names_what_is_slower(tmp_path, monkeypatch, capsys):
    now = run_of(*BEFORE["rows"], cpu="another")
    now["rows"][6] = row("pflcore", 3.4, op="step", size={"S": 2})

    assert command(tmp_path, monkeypatch, now) == 1

    output = capsys.readouterr().out
    assert "1 of 2 became slower: step S=2" in output
    lines = [line for line in output.splitlines() if "slower |" in line]
    assert len(lines) == 1
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells == [
        "step",
        "S=2",
        "0.500 of plain loop",
        "0.567 of plain loop",
        "+13%",
        "slower",
    ]
    assert "of another machine" in output
    assert json.loads((tmp_path / "before.json").read_text()) == now


def test_the_command_succeeds_where_nothing_is_slower(tmp_path, monkeypatch, capsys):
    assert command(tmp_path, monkeypatch, scaled(BEFORE, 3.0, 1.05)) == 0
    output = capsys.readouterr().out
    assert "No ratio grew by more than 10%." in output
    assert "another machine" not in output


BAD = {
    "no JSON": ("{", r".*before.json \(Expecting"),
    "a list": ("[]", ".*before.json without its rows"),
    "no rows": ('{"machine": {}}', ".*before.json without its rows"),
    "other rows": ('{"rows": [{"n": 100}]}', ".*before.json without its rows"),
    "no peer": (
        json.dumps(run_of(row("pflcore", 1.0))),
        ".*before.json without a time of pflcore beside a peer's",
    ),
    "a folder": (None, ".*before.json "),
}


@pytest.mark.parametrize("name", BAD)
def test_another_file_is_refused_before_a_time_is_measured(name, tmp_path, monkeypatch):
    pytest.importorskip("tyro")
    text, got = BAD[name]
    path = tmp_path / "before.json"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    monkeypatch.setattr(bench, "_measure", None)
    expected = r"a file that `pflcore bench --json` wrote"
    with sentence(f"against: expected {expected}, got {got}"):
        bench.main(["--against", str(path)])


def test_measurements_without_peers_are_refused(tmp_path):
    pytest.importorskip("tyro")
    with sentence("against: expected ops or a workload, got .*scale"):
        bench.main(["--op", "scale", "--against", str(tmp_path / "before.json")])


def test_what_the_bench_writes_can_be_read(tmp_path, capsys):
    pytest.importorskip("tyro")
    path = tmp_path / "before.json"
    words = f"--quick --seconds 0.001 --op weights --json {path}"
    assert bench.main(words.split()) == 0
    before = against.read(path)
    names = {op for op, _ in against.ratios(before)}
    assert names == {"feddwa_weights", "waffle_weights"}
    assert against.show(before, before) == 0
