"""`--target all`: a run for each client, as one run of the record; and algorithms from outside on
the command line."""

import sys

import pytest

from pflcore.cli import main
from pflcore.results.record import read

pytest.importorskip("tyro")
DATA = [
    "--data",
    "digits",
    "--n",
    "3",
    "--rounds",
    "2",
    "--train-samples",
    "90",
    "--test-samples",
    "60",
    "--quiet",
]
OWN = '''
from dataclasses import dataclass
from pflcore import FedAvg

@dataclass(frozen=True)
class Half(FedAvg):
    """Half of everything."""

    strength: float = 0.5  # how much of it

    def client(self, down, own, local):
        return own, {"delta": self.strength * (local.fit(down["x"]).w - down["x"])}
'''


def test_a_run_for_each_client(tmp_path, capsys):
    assert (
        main(
            [
                "compare",
                "--algorithms",
                "waffle",
                "fedavg",
                "--target",
                "all",
                *DATA,
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    assert "Made for each client in a run of its own: waffle." in capsys.readouterr().out
    each, shared = read(tmp_path)
    assert (
        each.header["made_for"] == "each client"
        and each.target is None is shared.target
        and shared.header["made_for"] is None
    )
    assert each.header["options"]["target"] == "each client"
    assert (
        len(each.rounds) == len(shared.rounds) == 2
        and len(each.rounds[0]["report"]["weights"]) == 3
    )
    assert each.sent()[-1] == 3 * 2 * shared.sent()[-1]  # three runs, and two rows each way


def test_an_algorithm_from_outside(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    (tmp_path / "an_algorithm_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    name = "an_algorithm_of_mine:Half"
    assert main(["run", name, "--strength", "0.25", "--metrics", "auc", *DATA, "--out", "a"]) == 0
    (run,) = read("a")
    assert (
        run.algorithm == "Half"
        and run.header["options"]["strength"] == 0.25
        and len(run.rounds[-1]["eval"]["auc"]) == 3
    )
    assert (
        main(
            [
                "compare",
                "--algorithms",
                "local",
                name,
                "--Half.strength",
                "1",
                "--baseline",
                "Half",
                *DATA,
                "--out",
                "b",
            ]
        )
        == 0
    )
    assert [r.algorithm for r in read("b")] == [
        "local",
        "Half",
    ] and "% hurt vs Half" in capsys.readouterr().out
    assert main(["run", "an_algorithm_of_mine:Quarter", *DATA]) == 2
    assert capsys.readouterr().err.strip() == (
        "pflcore: algorithm: importing 'an_algorithm_of_mine:Quarter' failed with AttributeError: "
        "module 'an_algorithm_of_mine' has no attribute 'Quarter'; check the name, or change "
        "folder."
    )
