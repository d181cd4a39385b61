"""The command line, end to end on real images; whatever goes wrong is one sentence and never costs
a record."""

import ast
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from doors import synthetic_clusters
from parts.commands import DIGITS, block
from places import ROOT
from small import grouped
from torch import nn

import pflcore
from pflcore import ALGORITHMS, Checkpoint, EarlyStopping, Simulation, Training, cli
from pflcore.cli import main
from pflcore.data import federation_of
from pflcore.results.record import group, read
from pflcore.results.table import table
from pflcore.simulation.checkpoint import lock

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
    assert "model: importing 'mine:none' failed" in capsys.readouterr().err


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


def test_whether_more_of_ones_own_metric_is_better_is_asked():
    with pytest.raises(ValueError, match=r"^higher: expected True or False for 'mse'"):
        EarlyStopping(3, "mse")
    assert EarlyStopping(3, "mse", higher=False).sign == -1 and EarlyStopping(3, "auc").sign == 1


@pytest.mark.parametrize("command", [["info"], ["report", "."], ["run", "fedavg", "--help"]])
def test_a_command_imports_nothing_from_the_current_folder(command, tmp_path, monkeypatch, capsys):
    """Not even where a file there has the name of a package that the command wants."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    before = list(sys.path)
    with contextlib.suppress(SystemExit):
        main(command)
    assert sys.path == before


def test_the_current_folder_comes_last_where_an_algorithm_of_ones_own_is_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    main(["run", "nothing_here:Mine"])
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("fedavg", {"hostile": 3}, "hostile: expected its default beside defence=None"),
        (
            "fedavg",
            {"defence": "median", "hostile": 3},
            "hostile: expected its default beside defence='median'",
        ),
        ("fedavgm", {"beta2": 0.5}, "beta2: expected its default beside optimizer='heavy_ball'"),
        ("fedavgm", {"tau": 0.1}, "tau: expected its default beside optimizer='heavy_ball'"),
        ("fedadagrad", {"beta2": 0.5}, "beta2: expected its default beside optimizer='adagrad'"),
        ("waffle", {"weighting": "samples"}, "weighting: expected 'uniform'"),
    ],
)
def test_an_option_that_plays_no_part_is_refused(name, options, sentence):
    with pytest.raises(ValueError, match=rf"^{sentence}.*, got .*\.$"):
        ALGORITHMS[name](**options)


def test_an_option_that_plays_no_part_in_a_method_is_none_of_its():
    with pytest.raises(TypeError, match="unexpected keyword argument 'server_lr'"):
        ALGORITHMS["feddwa"](server_lr=0.5)


def test_sgd_has_no_betas():
    with pytest.raises(ValueError, match=r"^betas, eps: SGD has none"):
        Training(betas=(0.8, 0.9))
    assert Training(betas=(0.8, 0.9), local_optimizer="adamw", lr=0.01).betas == (0.8, 0.9)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")


COMMAND = ["run", "fedavg", "--data", "synthetic_clusters", "--rounds", "3", "--quiet", "--out"]


@pytest.fixture(scope="module")
def data():
    return synthetic_clusters(n=4, groups=1, samples=20, classes=3, dim=5, held_out=20)


def make(data, algorithm="fedavg", **options):
    return Simulation(
        algorithm,
        lambda: nn.Linear(5, 3),
        data,
        Training(lr=0.1, batch_size=10),
        **grouped({"workers": 1, "rounds": 3, **options}),
    )


def sentence(text):
    assert (
        text.endswith(".")
        and text.count(". ") == 0
        and "\n" not in text
        and "Traceback" not in text
    ), text


def command(capsys, *argv):
    pytest.importorskip("tyro")
    from pflcore.cli import main

    code = main(list(argv))
    return code, capsys.readouterr().err.strip()


# folders --------------------------------------------------------------------
def unwritable(tmp_path):
    """Below a file; below the kernel's own files, where not even root may make one; and, but for
    root, in a folder without the right."""
    (tmp_path / "file").write_text("mine")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    return [
        tmp_path / "file" / "run",
        *([Path("/proc/run")] if os.path.isdir("/proc/self") else []),
        *([closed] if os.getuid() else []),
    ]


@pytest.mark.skipif(os.name == "nt", reason="no such rights")
def test_a_folder_that_cannot_be_written(data, tmp_path, capsys):
    for folder in unwritable(tmp_path):
        played: list[int] = []
        with pytest.raises(ValueError, match=r"^out: expected a folder that can be written") as e:
            make(data).run(lambda r, record, played=played: played.append(r), Checkpoint(folder))
        sentence(str(e.value))
        assert not played  # it is said before the first round
        code, said = command(capsys, *COMMAND, str(folder))
        assert code == 2 and "expected a folder that can be written" in said
        sentence(said)
    assert (tmp_path / "file").read_text() == "mine"


def test_two_runs_in_one_folder(data, tmp_path, capsys):
    before = make(data)
    before.run(checkpoint=tmp_path)
    kept = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with lock(tmp_path):
        with pytest.raises(ValueError, match=r"^out: another run is writing into") as e:
            make(data).run(checkpoint=tmp_path)
        sentence(str(e.value))
        code, said = command(capsys, *COMMAND, str(tmp_path))
        assert code == 2 and "another run is writing" in said
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == kept


# a full disk ----------------------------------------------------------------
def test_a_disk_that_becomes_full_ends_a_command_with_one_sentence(tmp_path, capsys):
    """By a limit on the size of files, which the kernel answers as it answers on a full disk."""
    resource = pytest.importorskip("resource")
    pytest.importorskip("tyro")
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, kept[1]))
        code, said = command(
            capsys,
            *COMMAND[:4],
            "--rounds",
            "400",
            "--quiet",
            "--checkpoint-minutes",
            "0",
            "--out",
            str(tmp_path),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    last = said.splitlines()[-1]
    assert (
        code == 1
        and "failed: File too large; the record up to there is" in last
        and "--resume" in last
    ), said
    sentence(last)
    lines = (tmp_path / "record.jsonl").read_text().split("\n")
    # all but the one that the disk cut off
    assert len(lines) > 3 and all(json.loads(line) for line in lines[:-1])


@pytest.mark.deep("another process")
@linux
def test_nowhere_to_print_to(tmp_path):
    """A pipe or terminal that takes nothing loses the text, not the files."""
    pytest.importorskip("tyro")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pflcore", *COMMAND, str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert (
        done.returncode != 0 and "Traceback" not in done.stderr and "No space left" in done.stderr
    ), done.stderr
    assert (tmp_path / "table.md").read_text().startswith("### ")


# time -----------------------------------------------------------------------
def test_a_clock_that_jumps_changes_nothing(data, tmp_path, monkeypatch):
    plain = make(data).run()
    now = [2e9]

    def backwards():
        now[0] -= 3600.0
        return now[0]

    monkeypatch.setattr(time, "time", backwards)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * backwards()))
    history = make(data).run(checkpoint=Checkpoint(tmp_path, minutes=1e-9))
    assert all(0 <= r["seconds"] < 60 for r in history.rounds) and len(history.rounds) == 3
    assert (
        history.state is not None
        and plain.state is not None
        and torch.equal(history.state.server["x"], plain.state.server["x"])
    )
    assert (tmp_path / "checkpoint.json").exists()


def test_nothing_measures_a_duration_by_a_clock_that_can_jump():
    jumping = {
        ("time", "time"),
        ("time", "time_ns"),
        ("datetime", "now"),
        ("datetime", "utcnow"),
        ("datetime", "today"),
    }
    used = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "pflcore").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", getattr(node.value, "attr", "")), node.attr) in jumping
    ]
    assert used == []


# hours ----------------------------------------------------------------------
def anonymous():
    """This process' own memory, bytes: RssAnon."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


@pytest.mark.deep("another process")
@linux
@pytest.mark.parametrize("name", ["fedavg", "waffle"])
def test_memory_does_not_grow_with_rounds(data, name):
    """1,500 rounds that nobody keeps the records of: at a round a minute they are a day and
    more."""
    seen = {}
    for record in make(data, name, rounds=1500, every=50).iterate():
        if record.get("round") in (300, 1500):
            seen[record["round"]] = anonymous()
    assert seen[1500] - seen[300] < 1.2e6, seen  # a leak of a kilobyte a round
