"""The examples run and show what their texts say.

Users copy these programs.
"""

import ast
import re
import runpy

import pytest
import torch
from places import ROOT

import pflcore
from pflcore import testing

EXAMPLES = ROOT / "examples"


def test_the_ops_in_ones_own_code(capsys):
    left = runpy.run_path(str(EXAMPLES / "use_ops.py"))
    assert str(pflcore.backend()) in capsys.readouterr().out
    sent = left["sent"].double()
    before = left["before"].double()
    want = before + left["weight"] @ (sent - before)
    assert torch.allclose(left["personal"].double(), want, atol=1e-6)
    group = torch.arange(8) // 4
    assert (group[left["nearest"].index] == group[:, None]).all()
    assert (left["for_client_0"][4:] == 0).all()
    row = torch.cat([p.flatten() for p in left["models"][7].parameters()])
    assert torch.allclose(row, left["personal"][7])


def test_the_demo_says_how_many_rounds_it_needs(monkeypatch):
    pytest.importorskip("matplotlib")
    demo = runpy.run_path(str(EXAMPLES / "demo.py"), run_name="demo")
    monkeypatch.setattr("sys.argv", ["demo.py", "2"])
    with pytest.raises(SystemExit, match="expected a number of rounds, at least 5"):
        demo["main"]()


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


@pytest.mark.deep("it takes a second")
def test_choosing_on_some_clients_and_reporting_others(capsys):
    left = runpy.run_path(str(EXAMPLES / "held_out.py"))
    after = left["after"]
    before = left["before"]
    reported = left["protocol"].report_clients
    assert "| chosen |" in capsys.readouterr().out
    assert after[reported].mean() > before[reported].mean() + 0.05
    assert int(after.isnan().sum()) == 50


def test_an_algorithm_of_ones_own(capsys):
    path = EXAMPLES / "own_algorithm.py"
    # The example checks its algorithm before it trains.
    left = runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.split()
    assert "FedPer" in lines and float(lines[-1]) > float(lines[7]) + 0.03
    assert int(lines[-2]) < int(lines[6])
    statements = ast.parse(path.read_text()).body
    cls = next(n for n in statements if isinstance(n, ast.ClassDef))
    assert cls.end_lineno - cls.lineno + 2 <= 25  # with its decorator
    assert issubclass(left["FedPer"], pflcore.FedAvg)
    text = (EXAMPLES.parent / "docs" / "own_algorithm.md").read_text()
    # The document shows the code that runs.
    assert ast.get_source_segment(path.read_text(), cls) in text


@pytest.mark.deep("it takes a second")
def test_the_pages_method_with_a_server_state_keeps_the_rules():
    page = (EXAMPLES.parent / "docs" / "own_algorithm.md").read_text()
    names = {"__name__": "page"}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        if "@dataclass" in code:
            exec(compile(code, "docs/own_algorithm.md", "exec"), names)

    testing.check(names["ColumnPull"])


METHODS = {"moon": "MOON", "pfedgraph": "PFedGraph", "fedproto": "FedProto"}


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("file", METHODS)
def test_a_published_method_as_ones_own(file, capsys):
    runpy.run_path(str(EXAMPLES / f"{file}.py"), run_name="__main__")
    assert capsys.readouterr().out == f"{METHODS[file]} keeps the rules.\n"
    assert (
        f"examples/{file}.py" in (EXAMPLES.parent / "docs/own_algorithm.md").read_text()
    )


def example_method(file):
    """The class of a method among the examples."""
    return runpy.run_path(str(EXAMPLES / f"{file}.py"))[METHODS[file]]


@pytest.mark.parametrize(
    "file, option, plain, name",
    [("moon", "mu", "fedavg", "server.x"), ("fedproto", "lam", "local", "clients.w")],
)
def test_a_method_without_its_term_is_a_known_one(file, option, plain, name):
    method = example_method(file)
    known = testing.Case(pflcore.algorithm_of(plain)).recorded.states[-1]
    without = testing.Case(method(**{option: 0.0})).recorded.states[-1]
    whole = testing.Case(method()).recorded.states[-1]

    assert torch.allclose(without[name], known[name], rtol=0, atol=1e-12)
    assert not torch.allclose(whole[name], known[name], rtol=0, atol=1e-4)


def test_the_example_of_moon_is_the_librarys():
    ours = testing.Case(pflcore.algorithm_of("moon")).recorded.states[-1]
    example = testing.Case(example_method("moon")()).recorded.states[-1]

    assert torch.equal(example["server.x"], ours["server.x"])


def test_server_rules_in_ones_own_training_loop(capsys):
    path = EXAMPLES / "own_training_loop.py"
    left = runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("[") >= 2
    weights = left["target"]["weights"]
    index = left["mixed"]["index"]
    # Clients that label as client 0 does have the larger weights in its model.
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
    rows = [x for x in out.splitlines() if x.startswith(("| common", "| their"))]
    common, different = (row.split(" | ") for row in rows)
    assert [int(n) for n in common[1:5]] == [12] * 4
    assert int(different[1]) <= 8 and int(different[2]) <= 8
    assert int(different[4]) >= 11
