"""`pflcore diff` compares two records run by run."""

import pytest
from parts.commands import DIGITS, command

pytest.importorskip("tyro")
pytest.importorskip("sklearn")


def test_a_run_that_is_repeated_is_equal(capsys):
    for folder in "ab":
        assert command(f"run fedavg {DIGITS} --out {folder}") == 0
    capsys.readouterr()
    assert command("diff a b/fedavg-seed0/record.jsonl") == 0
    out = capsys.readouterr().out
    assert "The descriptions are equal." in out
    assert "Equal bits in all 3 rounds" in out


@pytest.mark.deep("it takes a second")
def test_single_runs_are_compared_whatever_they_are(capsys):
    assert command(f"run fedavg {DIGITS} --out a") == 0
    assert command(f"run local {DIGITS} --lr 0.2 --out b") == 0
    capsys.readouterr()
    assert command("diff a b") == 1
    out = capsys.readouterr().out
    assert "algorithm: 'fedavg' / 'local'" in out and "training.lr: 0.1 / 0.2" in out
    assert "Round 1 is the first that differs:" in out


def test_runs_of_tables_are_paired_by_name_and_seed(capsys):
    assert command(f"compare --algorithms fedavg local {DIGITS} --out a") == 0
    assert command(f"compare --algorithms ditto local fedavg {DIGITS} --out b") == 0
    capsys.readouterr()
    assert command("diff a b") == 1
    out = capsys.readouterr().out
    assert out.count("Equal bits in all 3 rounds") == 2
    assert "Only in b: ditto, seed 0." in out and "Only in a" not in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("diff", "diff: expected two folders"),
        ("diff a", "diff: expected two folders"),
        ("diff a b --last 3", "diff: expected no options"),
        ("diff a b", "which is neither"),
    ],
)
def test_wrong_words_are_one_sentence(words, error, capsys):
    assert command(words) == 2
    err = capsys.readouterr().err
    assert error in err and err.count("\n") == 1


def test_help_is_text(capsys):
    assert command("diff --help") == 0
    assert "The exit code is 0 for equal bits" in capsys.readouterr().out
