"""One run, one folder: what a second call does, and the report on clients."""

from pathlib import Path

import numpy as np
import pytest
from parts.commands import DIGITS, command

from pflcore.lab.cli import main
from pflcore.lab.results import read
from pflcore.lab.results.clients import client_frame

pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("sklearn")
pytest.importorskip("scipy")
WORDS = f"compare fedavg local {DIGITS} --seeds 2 --checkpoint-every 1 --out o"


def records(folder="o"):
    """The bytes of each record, by its folder."""
    return {p.parent.name: p.read_bytes() for p in Path(folder).glob("*/record.jsonl")}


def test_each_run_has_a_folder():
    assert command(WORDS) == 0

    names = ["fedavg-seed0", "fedavg-seed1", "local-seed0", "local-seed1"]
    assert sorted(records()) == names
    for name in names:
        files = {"record.jsonl", "checkpoint.safetensors", "run.toml"}
        assert files <= {p.name for p in Path("o", name).iterdir()}


def test_whole_runs_are_not_played_again(capsys):
    assert command(WORDS) == 0
    before = records()

    assert command(WORDS) == 0
    assert records() == before
    assert capsys.readouterr().err.count("it is not played again") == 4


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("num_lines", [0, 1, 2])
def test_a_torn_run_goes_on_to_the_same_numbers(num_lines):
    assert command(WORDS) == 0
    whole = read("o")
    path = Path("o/fedavg-seed1/record.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:num_lines]) + lines[num_lines][:20])

    assert command(WORDS) == 0
    for one, other in zip(whole, read("o"), strict=True):
        assert one.compare(other).equal
        assert one.samples == other.samples


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ("--lr 0.3", "lr is 0.1 there and 0.3 here"),
        ("--participation 0.5", "participation is 1.0 there and 0.5 here"),
        ("--data-seed 4", "data_seed is 0 there and 4 here"),
        ("--rounds 1", "3 are played"),
    ],
)
def test_another_run_is_refused(words, difference, capsys):
    assert command(WORDS) == 0
    before = records()

    assert command(f"{WORDS} {words}") == 2
    assert difference in capsys.readouterr().err
    assert records() == before


@pytest.mark.deep("it takes a second")
def test_other_seeds_and_methods_are_added():
    assert command(WORDS) == 0
    assert command(f"run ditto {DIGITS} --seed 4 --baseline local --out o") == 0

    assert "ditto-seed4" in records()
    assert "| ditto" in Path("o/table.md").read_text()


def test_a_file_of_a_run_repeats_it():
    assert command(f"{WORDS} --schedule cosine --data-seed each") == 0
    for file in sorted(Path("o").glob("*/run.toml")):
        assert command(f"run --config {file} --quiet --out again") == 0

    for one, other in zip(read("o"), read("again"), strict=True):
        assert one.compare(other).equal


@pytest.mark.deep("it takes a second")
def test_a_cut_of_each_seed_is_that_of_its_data_seed():
    assert command(f"{WORDS} --data-seed each") == 0
    assert command(f"run fedavg {DIGITS} --seed 1 --data-seed 1 --out one") == 0

    assert read("o")[1].compare(read("one")[0]).round is None
    assert "2 seeds, each with a cut of its own" in Path("o/table.md").read_text()


@pytest.mark.deep("it takes a second")
def test_each_cut_has_a_model_of_its_own():
    """The texts of the fourth seed have a letter more than those of the first."""
    words = "--n 2 --samples 1 --held-out 1 --length 6 --groups 1 --letters 26"
    model = "--model lstm --every-step --hidden 4"
    data = f"--data synthetic_text --data-seed each --seeds 4 {words}"
    assert command(f"run fedavg {data} {model} --rounds 1 --quiet --out o") == 0

    assert [len(run.rounds) for run in read("o")] == [1] * 4


@pytest.mark.deep("it takes a second")
def test_outcomes_of_samples_give_the_accuracies():
    assert command(WORDS) == 0

    for run in read("o"):
        outcomes = run.samples["correct"].values()
        shares = [text.count("1") / len(text) for text in outcomes]
        assert shares == run.last_values("accuracy").tolist()


@pytest.mark.deep("it takes a second")
def test_a_client_has_its_difference_and_a_verdict(capsys):
    assert command(WORDS) == 0
    frame = client_frame(read("o"), "local")
    by_name = {run.name: run.last_values("accuracy") for run in read("o")}
    want = by_name["fedavg, seed 0"] - by_name["local, seed 0"]
    want = (want + by_name["fedavg, seed 1"] - by_name["local, seed 1"]) / 2

    assert np.allclose(frame["difference"], 100 * want)
    assert (frame["low"] <= frame["difference"]).all()
    assert (frame["difference"] <= frame["high"]).all()
    assert command("report o --per client --baseline local") == 0
    out = capsys.readouterr().out
    assert "fedavg against local: " in out and "| client | test samples |" in out


def test_few_samples_decide_nothing():
    words = "--data synthetic_clusters --n 2 --held-out 19 --rounds 2 --quiet --lr 0"
    assert command(f"compare fedavg local {words} --local.training.lr 1 --out o") == 0
    frame = client_frame(read("o"), "local")
    assert (frame["samples"] == 19).all() and set(frame["verdict"]) == {"undecided"}
    assert ((frame["low"] > 0) | (frame["high"] < 0)).any()


@pytest.mark.deep("it takes a second")
def test_a_baseline_is_one_row(capsys):
    assert command(f"run fedavg {DIGITS} --out a") == 0
    assert command(f"run local {DIGITS} --lr 0.3 --out a") == 0
    assert command(f"run local {DIGITS} --lr 0.2 --out b") == 0
    capsys.readouterr()

    for options in ("", "--per client"):
        for folders in ("a b", "b a"):
            assert command(f"report {folders} --baseline local {options}") == 2
            said = capsys.readouterr().err
            assert "baseline: expected one of the rows local (lr=0." in said
    assert main(["report", "a", "b", "--baseline", "local (lr=0.2)"]) == 0


@pytest.mark.deep("it takes a second")
def test_patience_ends_a_run():
    words = f"run fedavg {DIGITS} --rounds 40 --lr 3 --val 0.2 --eval-split val"
    assert command(f"{words} --patience 2 --out o") == 0

    (run,) = read("o")
    assert run.complete and run.rounds_played < 40
    assert command(f"{words} --patience 2 --out o") == 0
    assert command(f"run fedavg {DIGITS} --patience 2") == 2
