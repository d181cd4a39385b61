"""The bench's arithmetic and its table. Nothing here looks at a time."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bench
from bench import problem, table

LIMITS = {"read": 10.0, "write": 5.0, "fma": 4.0, "sub_fma": 8.0}
MACHINE = table.Machine("a processor", 2, "plain", LIMITS, {"torch": "2"}, "today")
OPS = ("sqdist", "nearest", "aggregate", "weights", "rank1", "sgd", "chain", "conv")


def made(**changes: Any) -> problem.Problem:
    calls = {"pflcore": lambda: torch.ones(1), "torch": lambda: torch.ones(1)}
    return problem.Problem(**{"op": "op", "size": {"N": 1}, "providers": calls, "error": lambda got: 0.0, **changes})


@pytest.mark.parametrize("name", OPS)
def test_every_provider_is_right(name: str) -> None:
    """At a small size, where all are there; Gram's float32 distances are what the bench shows to be wrong."""
    module = bench.suite(name)
    for size in itertools.islice((s for s in module.sizes(True) if s.get("N", 10) <= 10), 6):
        small = module.problem({**size, **({"P": 3001} if "P" in size else {})})
        assert small is not None
        assert set(small.providers) <= set(module.PROVIDERS)
        assert next(iter(small.providers)) == "pflcore"
        for provider, call in small.providers.items():
            try:
                error = small.error(call())
            except problem.Absent:
                continue
            assert error is not None
            if not (provider == "Gram float32" or ("mm" in provider and name == "sqdist")):
                assert error < (1e-4 if provider.startswith(("torch", "scikit", "F.", "dense")) else 2e-6), (provider, size)


def test_limit_is_the_slower_of_memory_and_arithmetic() -> None:
    assert made(reads=20, writes=10, operations=4.0).limit(LIMITS) == 4.0
    assert made(reads=20, writes=10, operations=40.0).limit(LIMITS) == 10.0
    assert made(reads=20, writes=10, operations=40.0, mix="sub_fma").limit(LIMITS) == 5.0
    assert made(reads=20, writes=10, operations=40.0).limit({}) is None
    assert made().limit(LIMITS) is None


def test_rows_tell_errors_limits_and_what_is_left_out() -> None:
    def broken() -> None:
        raise problem.Absent("it is not installed.")

    calls = {"pflcore": lambda: torch.ones(1), "slow": lambda: torch.ones(1), "missing": broken}
    case = made(providers=calls, reads=20, operations=4.0, error=lambda got: float(got[0]) * 0.5)
    ours, slow, missing = table.measure(case, MACHINE, 0.001, 2.0, {("op", "slow"): 1.0})
    assert ours.error == 0.5
    assert ours.ms is not None and ours.of_limit is not None and ours.gb_per_s is not None and ours.runs >= 1
    assert ours.of_limit == pytest.approx(2.0 / (ours.ms / 1e3))
    assert slow.ms is None and slow.note == "left out: about 4 s"
    assert missing.ms is None and missing.note == "it is not installed."


def test_a_loss_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([[2.0], [1.0], [2.5]])
    monkeypatch.setattr(table, "timed", lambda call, budget: (next(seconds), call()))
    calls = {name: (lambda: torch.ones(1)) for name in ("pflcore", "torch", "numpy")}
    rows = list(table.measure(made(providers=calls), MACHINE, 1.0, 1.0, {}))
    assert [r.slower for r in rows] == [None, 0.5, 1.25]
    assert [r.note for r in rows] == ["", "faster than pflcore", ""]


def test_command_line_writes_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    files = tmp_path / "bench.json", tmp_path / "bench.md"
    assert bench.main(["--quick", "--seconds", "0.001", "--op", "weights", "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    told = capsys.readouterr().out
    kept = json.loads(files[0].read_text())
    assert {"cpu", "threads", "limits", "versions", "date"} <= kept["machine"].keys()
    assert {r["provider"] for r in kept["rows"]} == {"pflcore", "reference", "torch"}
    assert len(files[1].read_text().splitlines()) >= len(kept["rows"]) + 4
    assert all(r["op"] in told for r in kept["rows"])
    with pytest.raises(ValueError, match="existing folder"):
        bench.main(["--json", str(tmp_path / "none" / "x.json")])


def test_limits_of_this_machine() -> None:
    if not table.library._C:
        pytest.skip("the compiled kernels are not loaded")
    limits = table.library._C.limits(1, 1 << 20)
    assert limits.keys() == LIMITS.keys()
    assert all(v > 0 for v in limits.values())
