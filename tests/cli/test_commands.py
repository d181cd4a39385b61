"""The command line, end to end on real images; whatever goes wrong is one sentence and never costs
a record."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from parts.commands import DIGITS, block

import pflcore
from pflcore import Simulation, cli
from pflcore.algorithms import ALGORITHMS
from pflcore.results.record import read

pytest.importorskip("tyro")
pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def in_an_empty_folder_and_without_pictures(tmp_path, monkeypatch):
    """Pictures take longer than these runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pflcore.results.pictures.draw", lambda *_: [])


def test_a_run_by_adamw(capsys):
    how = [
        "--local-optimizer",
        "adamw",
        "--betas",
        "0.8",
        "0.99",
        "--eps",
        "1e-6",
        "--clip-grad",
        "0.5",
        "--lr",
        "0.01",
    ]
    assert cli.main(["run", "fedavgm", "--optimizer", "nesterov", *DIGITS, *how, "--out", "o"]) == 0
    (run,) = read("o")
    training = run.header["training"]
    assert (
        training["local_optimizer"] == "adamw"
        and training["betas"] == [0.8, 0.99]
        and training["eps"] == 1e-6
    )
    assert training["clip_grad"] == 0.5 and run.header["options"]["optimizer"] == "nesterov"
    assert "AdamW" in run.header["path"]["why"] and math.isfinite(run.rounds[-1]["train_loss"])
    assert cli.main(["run", "mocha", *DIGITS, *how, "--out", "p"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("pflcore: local_optimizer: Mocha takes its regulariser")
    )


def test_several_algorithms_and_seeds_share_data_and_weights(capsys):
    argv = [
        "compare",
        "--algorithms",
        "local",
        "fedavg",
        "apfl",
        *DIGITS,
        "--seeds",
        "2",
        "--seed",
        "5",
        "--baseline",
        "local",
    ]
    assert (
        cli.main(
            [
                *argv,
                "--apfl.alpha",
                "0.25",
                "--partition",
                "dirichlet",
                "--alpha",
                "0.3",
                "--out",
                "o",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "% hurt vs local" in out and "over 2 seeds" in out
    runs = read("o")
    assert [(r.algorithm, r.header["seed"]) for r in runs] == [
        (a, s) for a in ("local", "fedavg", "apfl") for s in (5, 6)
    ]
    assert len({tuple(r.header["size"]) for r in runs}) == 1
    assert (
        runs[-1].header["options"]["alpha"] == 0.25
        and runs[0].header["partition_options"]["alpha"] == 0.3
    )
    assert runs[0].rounds[0]["bytes_up"] == 0 and runs[2].sent()[-1] > 0


def test_runs_repeat():
    for out in ("a", "b"):
        assert (
            cli.main(
                ["run", "scaffold", *DIGITS, "--participation", "0.5", "--quiet", "--out", out]
            )
            == 0
        )
    (a,), (b,) = read("a"), read("b")
    assert torch.equal(a.values()[1], b.values()[1]) and [r["cohort"] for r in a.rounds] == [
        r["cohort"] for r in b.rounds
    ]


def test_data_that_come_with_their_clients():
    assert (
        cli.main(
            [
                "run",
                "fedavg",
                "--data",
                "synthetic_linear",
                "--n",
                "5",
                "--rounds",
                "2",
                "--lr",
                "0.01",
                "--out",
                "o",
            ]
        )
        == 0
    )
    (run,) = read("o")
    assert run.header["partition"] is None and run.header["n"] == 5


def test_a_validation_split(capsys):
    assert (
        cli.main(["run", "fedavg", *DIGITS, "--val", "0.25", "--eval-split", "val", "--out", "o"])
        == 0
    )
    assert "Validation accuracy" in capsys.readouterr().out
    (run,) = read("o")
    held = run.rounds[-1]["eval"]["size"]
    assert held == [
        math.ceil((kept + v) / 4) for kept, v in zip(run.header["size"], held, strict=True)
    ]


def test_a_folder_is_made_below_runs_and_none_is_reused():
    for _ in range(2):
        assert cli.main(["run", "fedavg", "--partition", "A*", *DIGITS]) == 0
    assert sorted(os.listdir("runs")) == ["fedavg-digits-Astar", "fedavg-digits-Astar-2"]


def test_a_record_is_only_replaced_on_demand(tmp_path, capsys):
    argv = ["run", "fedavg", *DIGITS, "--out", "o"]
    assert cli.main(argv) == 0
    before = (tmp_path / "o" / "record.jsonl").read_bytes()
    assert cli.main([*argv, "--rounds", "1"]) == 2
    assert (
        "--overwrite" in capsys.readouterr().err
        and (tmp_path / "o" / "record.jsonl").read_bytes() == before
    )
    assert cli.main([*argv, "--rounds", "1", "--overwrite"]) == 0
    assert len(read("o")[0].rounds) == 1


def test_tables_and_pictures_again_from_records(tmp_path, capsys):
    for algorithm in ("local", "fedavg"):
        cli.main(["run", algorithm, *DIGITS, "--out", algorithm])
    capsys.readouterr()
    assert (
        cli.main(
            ["report", "local", "fedavg", "--out", "both", "--baseline", "local", "--last", "2"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "| local " in out and "| fedavg " in out and "mean of last 2" in out
    assert (tmp_path / "both" / "table.md").is_file()


BAD = {
    "no such command": (["fly"], "command: expected"),
    "no algorithm": (["run"], "name of an algorithm"),
    "an option for an algorithm": (["run", "--data", "digits"], "name of an algorithm"),
    "unknown algorithm": (["run", "wafle", *DIGITS], "got 'wafle'"),
    "nothing to compare": (["compare", *DIGITS], "algorithms: expected"),
    "unknown algorithm to compare": (
        ["compare", "--algorithms", "fedavg", "wafle", *DIGITS],
        "got 'wafle'",
    ),
    "unknown baseline": (
        ["compare", "--algorithms", "fedavg", *DIGITS, "--baseline", "local"],
        "baseline: expected",
    ),
    "unknown data": (["run", "fedavg", "--data", "minst"], "got 'minst'"),
    "unknown partition": (["run", "fedavg", *DIGITS, "--partition", "Z"], "got 'Z'"),
    "unknown model": (["run", "fedavg", *DIGITS, "--model", "alexnet"], "got 'alexnet'"),
    "unknown criterion": (["run", "fedavg", *DIGITS, "--criterion", "likes"], "criterion"),
    "unknown engine": (["run", "fedavg", *DIGITS, "--engine", "steam"], "engine"),
    "a model for other inputs": (["run", "fedavg", *DIGITS, "--model", "cnn"], "small"),
    "target out of range": (
        ["run", "waffle", *DIGITS, "--target", "4"],
        "target: expected a client from 0 to 3, got 4",
    ),
    "negative target": (["run", "fedavg", *DIGITS, "--target", "-1"], "target: expected"),
    "hyper-parameter": (["run", "fedprox", *DIGITS, "--mu", "-1"], "mu"),
    "learning rate": (["run", "fedavg", *DIGITS, "--lr", "-1"], "lr: expected"),
    "no rounds": (["run", "fedavg", *DIGITS, "--rounds", "0"], "rounds"),
    "a split that is not there": (
        ["run", "fedavg", *DIGITS, "--eval-split", "val"],
        "evaluation.split",
    ),
    "a validation share": (["run", "fedavg", *DIGITS, "--val", "1"], "val: expected"),
    "no clients": (["run", "fedavg", *DIGITS, "--n", "0"], "n: expected"),
    "no seeds": (["run", "fedavg", *DIGITS, "--seeds", "0"], "seeds: expected"),
    "participation": (["run", "fedavg", *DIGITS, "--participation", "0"], "participation"),
    "more clients than samples": (["run", "fedavg", *DIGITS, "--n", "5000"], "got 5000"),
    "unknown device": (["run", "fedavg", *DIGITS, "--device", "abacus"], "device"),
    "nothing to report": (["report"], "report: expected"),
    "no record to report": (["report", "nowhere"], "got nowhere"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(case, tmp_path, capsys):
    argv, words = BAD[case]
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and out == "", err
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    assert cli.main(["run", "fedavg", *DIGITS, "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err and list(tmp_path.rglob("*")) == []


def test_a_malformed_option_ends_with_code_2(tmp_path, capsys):
    for words in (["--lr", "fast"], ["--learning-rate", "1"]):
        with pytest.raises(SystemExit) as e:
            cli.main(["run", "fedavg", *DIGITS, *words])
        assert e.value.code == 2 and words[0] in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == []


def test_a_run_that_diverges_is_a_result(capsys):
    assert (
        cli.main(
            [
                "compare",
                "--algorithms",
                "fedavg",
                "local",
                *DIGITS,
                "--rounds",
                "6",
                "--lr",
                "1e38",
                "--out",
                "o",
            ]
        )
        == 1
    )
    runs = read("o")
    assert "diverged" in runs[0].stopped and len(runs[0].rounds) == 3
    assert "3 of 6 rounds" in capsys.readouterr().out
    assert len(runs) == 2


def test_a_failure_in_the_middle_keeps_the_record(capsys, monkeypatch):
    honest = Simulation.iterate

    def broken(self):
        for i, line in enumerate(honest(self)):
            if i == 2:
                raise RuntimeError("the machine is on fire\nand so on")
            yield line

    monkeypatch.setattr(Simulation, "iterate", broken)
    assert cli.main(["run", "fedavg", *DIGITS, "--out", "o", "--quiet"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the machine is on fire" in last and "and so on" not in last
    (run,) = read("o")
    assert len(run.rounds) == 2 and "on fire" in run.stopped


@pytest.mark.deep("another process")
def test_ctrl_c_leaves_a_readable_record(tmp_path):
    argv = [
        sys.executable,
        "-m",
        "pflcore",
        "run",
        "fedavg",
        "--data",
        "synthetic_clusters",
        "--rounds",
        "1000000",
        "--out",
        "o",
    ]
    root = os.path.dirname(os.path.dirname(pflcore.__file__))
    path = tmp_path / "o" / "record.jsonl"
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    )
    try:
        until = time.monotonic() + 120
        while not (path.exists() and path.read_bytes().count(b"\n") > 20):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err, err
    (run,) = read(path)
    assert len(run.rounds) >= 20 and [r["round"] for r in run.rounds] == list(
        range(1, len(run.rounds) + 1)
    )
    assert run.stopped == f"Interrupted after round {len(run.rounds)} of 1000000."
    assert "| fedavg " in out and (tmp_path / "o" / "table.md").is_file()


def test_without_tqdm_everything_but_the_bar(capsys, monkeypatch):
    block(monkeypatch, "tqdm")
    assert cli.main(["run", "fedavg", *DIGITS, "--out", "o"]) == 0
    out, err = capsys.readouterr()
    assert "| fedavg " in out and "tqdm" in err and "pflcore[cli]" in err


def test_without_tyro_one_sentence(tmp_path, capsys, monkeypatch):
    block(monkeypatch, "tyro")
    assert cli.main(["run", "fedavg", *DIGITS]) == 2
    err = capsys.readouterr().err
    assert "pflcore[cli]" in err and err.count("\n") == 1 and list(tmp_path.rglob("*")) == []
    assert cli.main(["info"]) == 0


def test_info_says_what_runs(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert pflcore.__version__ in out and torch.__version__ in out and str(pflcore.backend()) in out


def test_help_of_the_program(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*cli.COMMANDS, *ALGORITHMS])
    assert cli.main([]) == 2


def test_the_benchmarks_need_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "pflcore" / "cli" / "__init__.py"))
    assert cli.main(["bench", "--quick"]) == 2
    assert "no part of the installed package" in capsys.readouterr().err
