"""The command line under hostile use: nothing of anybody's is written over, nothing is lost, wrong
arguments are said before a record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pflcore import cli
from pflcore.results.record import read

pytest.importorskip("tyro")
RUN = ["run", "fedavg", "--data", "synthetic_clusters", "--rounds", "2", "--quiet"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pflcore.results.pictures.draw", lambda *_: [])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--workers", "-1"], "workers"),
        (["--workers", "100000"], "workers"),
        (["--last", "0"], "last"),
        (["--device", "mps"], "device"),
        (["--server-lr", "nan"], "server_lr"),
        (["--lr", "inf"], "lr"),
        (["--weight-decay", "inf"], "weight_decay"),
        (["--clip", "nan"], "clip"),
        (["--clip-grad", "0"], "clip_grad"),
        (["--local-optimizer", "adamw", "--betas", "0.9", "1"], "betas"),
        (["--local-optimizer", "adamw", "--momentum", "0.5"], "momentum"),
        (["--data-seed", "-1"], "data_seed"),
        (["--criterion", "squared"], "criterion"),
        (["--data", "synthetic_quadratic", "--criterion", "hinge"], "criterion"),
    ],
)
def test_wrong_arguments_are_said_before_anything_is_written(options, word, capsys, tmp_path):
    assert cli.main([*RUN, *options]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith(f"pflcore: {word}: ")
    assert not list(tmp_path.iterdir())


def test_data_of_another_precision_run(capsys):
    assert cli.main([*RUN[:3], "synthetic_quadratic", *RUN[4:], "--lr", "0.01"]) == 0


def test_a_seed_that_is_no_whole_number(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main([*RUN, "--seed", "1e23"])
    assert e.value.code == 2


def test_a_file_that_is_no_record_has_no_report(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n[1, 2]\nhello\n')
    assert cli.main(["report", "x.jsonl"]) == 2
    assert "holds none" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == [
        "x.jsonl"
    ]


def test_a_table_of_somebody_elses_stays(tmp_path, capsys):
    folder = tmp_path / "o"
    folder.mkdir()
    (folder / "table.md").write_text("my notes")
    assert cli.main([*RUN, "--out", "o"]) == 2
    assert (folder / "table.md").read_text() == "my notes" and not (
        folder / "record.jsonl"
    ).exists()
    assert cli.main([*RUN, "--out", "o", "--overwrite"]) == 0
    assert cli.main(["report", "o"]) == 0  # our own is made again
    (folder / "table.md").write_text("my notes")
    assert cli.main(["report", "o"]) == 2 and (folder / "table.md").read_text() == "my notes"


@pytest.mark.deep("another process")
@pytest.mark.skipif(os.name == "nt", reason="no pipes of that kind")
@pytest.mark.parametrize("ear", ["gone", "ascii"])
def test_whoever_reads_along_the_files_are_whole(ear, tmp_path):
    env = (
        os.environ
        | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
        | ({"PYTHONIOENCODING": "ascii"} if ear == "ascii" else {})
    )
    read_end, write_end = os.pipe()
    if ear == "gone":
        os.close(read_end)
    argv = [sys.executable, "-m", "pflcore", *RUN, "--seeds", "2", "--out", "o"]
    done = subprocess.run(
        argv, stdout=write_end, stderr=subprocess.PIPE, env=env, text=True, check=False, timeout=120
    )
    os.close(write_end)
    assert done.returncode == 0 and "Error" not in done.stderr and "Exception" not in done.stderr
    assert "±" in (tmp_path / "o" / "table.md").read_text(encoding="utf-8") and len(read("o")) == 2
    if ear == "ascii":
        assert b"?" in os.read(read_end, 1 << 16)
        os.close(read_end)


def test_a_bad_plan_is_one_sentence(tmp_path, capsys):
    old = {
        "data": "digits",
        "settings": {"a": {}},
        "methods": {"m": {"algorithm": "fedavg", "options": {"lr": 1}}},
    }
    for text in ("{", "[1]", "{}", json.dumps(old)):
        (tmp_path / "plan.json").write_text(text)
        assert cli.main(["reproduce", "plan.json", "--quiet"]) == 2
        err = capsys.readouterr().err.splitlines()
        assert (
            len(err) == 1
            and err[0].startswith("pflcore: ")
            and "Error" not in err[0]
            and "unexpected keyword" not in err[0]
        )


@pytest.mark.parametrize(
    "options",
    [
        ["--clients", "0"],
        ["--steps", "-3"],
        ["--ratios", "-3"],
        ["--shadows", "0", "--ratios", "0"],
        ["--out", "f/x"],
    ],
    ids=lambda o: o[0],
)
def test_an_attack_that_cannot_be_is_said_first(options, capsys, tmp_path):
    (tmp_path / "f").write_text("a file")
    assert cli.main(["attack", "--data", "digits", "--quiet", *options]) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith(f"pflcore: {options[0][2:]}") and err.count("\n") == 1 and "Errno" not in err
    )
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
