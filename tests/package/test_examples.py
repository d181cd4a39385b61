"""The examples are programs that people copy: they run, and they show what they say
they show."""

import ast
import runpy

import pytest
import torch
from places import ROOT

import pflcore

EXAMPLES = ROOT / "examples"


def test_the_ops_in_ones_own_code(capsys):
    left = runpy.run_path(str(EXAMPLES / "use_ops.py"))
    assert str(pflcore.backend()) in capsys.readouterr().out
    sent, before, weight = (
        left["sent"].double(),
        left["before"].double(),
        left["weight"],
    )
    assert torch.allclose(
        left["personal"].double(), before + weight @ (sent - before), atol=1e-6
    )
    group = torch.arange(8) // 4
    assert (group[left["nearest"].index] == group[:, None]).all()
    assert (left["for_client_0"][4:] == 0).all()
    row = torch.cat([p.flatten() for p in left["models"][7].parameters()])
    assert torch.allclose(row, left["personal"][7])


def test_a_simulation_in_ten_lines(capsys):
    left = runpy.run_path(str(EXAMPLES / "ten_lines.py"))
    out = capsys.readouterr().out
    assert out.count("round 10:") == 2 and "waffle: client 0 ends at" in out
    assert left["history"].stopped is None and left["rounds"] == list(range(1, 31))
    assert left["accuracy"][-1, 0] > 0.9


def test_simulations_are_at_hand_but_not_imported_with_the_ops():
    assert {n for n in pflcore.__all__ if getattr(pflcore, n, None) is None} == set()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = pflcore.nothing_of_the_kind


def test_choosing_on_some_clients_and_reporting_others(capsys):
    left = runpy.run_path(str(EXAMPLES / "held_out.py"))
    after, before, protocol = left["after"], left["before"], left["protocol"]
    assert "| chosen |" in capsys.readouterr().out
    assert (
        after[protocol.report_clients].mean()
        > before[protocol.report_clients].mean() + 0.05
    )
    assert int(after.isnan().sum()) == 50


def test_an_algorithm_of_ones_own(capsys):
    path = EXAMPLES / "own_algorithm.py"
    left = runpy.run_path(str(path), run_name="__main__")  # it checks itself first
    lines = capsys.readouterr().out.split()
    assert "FedPer" in lines and float(lines[-1]) > float(lines[7]) + 0.03
    assert int(lines[-2]) < int(lines[6])
    cls = next(
        n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)
    )
    assert cls.end_lineno - cls.lineno + 2 <= 25  # with its decorator
    assert issubclass(left["FedPer"], pflcore.FedAvg)
    text = (EXAMPLES.parent / "docs" / "own_algorithm.md").read_text()
    # what the document shows is what runs
    assert ast.get_source_segment(path.read_text(), cls) in text


def test_server_rules_in_ones_own_training_loop(capsys):
    path = EXAMPLES / "own_training_loop.py"
    left = runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("[") >= 2
    weights, index = left["target"]["weights"], left["mixed"]["index"]
    # client 0 is helped by those who label as it does
    assert weights[::2].sum() > weights[1::2].sum()
    assert (index % 2 == torch.arange(6)[:, None] % 2).all()
    nodes = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.stmt)
    ]
    assert len({n.lineno for n in nodes if not isinstance(n, ast.Expr)}) <= 45


def test_adapters_by_their_products(capsys, monkeypatch):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    monkeypatch.setattr("sys.argv", ["lora.py"])
    runpy.run_path(str(EXAMPLES / "lora.py"), run_name="__main__")
    out = capsys.readouterr().out
    common, own = (
        x.split(" | ")
        for x in out.splitlines()
        if x.startswith(("| common", "| their"))
    )
    assert [int(n) for n in common[1:5]] == [12] * 4
    assert int(own[1]) <= 8 and int(own[2]) <= 8 and int(own[4]) >= 11
