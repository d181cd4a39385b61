"""`pflcore compare` adds to a folder the runs that it lacks, and keeps the others."""

from pathlib import Path

import pytest
from parts.commands import DIGITS, command

from pflcore import FedAvg
from pflcore.lab.results import read

pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("sklearn")


def records(folder="o"):
    """The bytes of the record of each run in a folder."""
    return {p: p.read_bytes() for p in Path(folder).glob("*/record.jsonl")}


def names(folder="o"):
    """The names of the runs of a folder."""
    return sorted(run.name for run in read(folder))


def assert_same_runs(first, second):
    """Checks that two folders have the same runs, with equal bits, in any order."""
    by_name = {run.name: run for run in read(second)}
    runs = read(first)
    assert sorted(by_name) == sorted(run.name for run in runs)
    for run in runs:
        comparison = run.compare(by_name[run.name])
        assert comparison.equal and comparison.description == {}, comparison


@pytest.mark.deep("it takes seconds")
def test_more_algorithms_and_seeds_are_added(capsys):
    assert command(f"compare fedavg local {DIGITS} --out o") == 0
    before = records()
    words = f"compare fedavg ditto {DIGITS} --seeds 2 --baseline local"
    capsys.readouterr()
    assert command(f"{words} --out o") == 0
    assert before.items() <= records().items()
    assert names() == [
        *("ditto, seed 0", "ditto, seed 1", "fedavg, seed 0", "fedavg, seed 1"),
        "local, seed 0",
    ]
    out = capsys.readouterr().out
    assert "| local " in out and "| ditto " in out and "hurt vs local" in out

    assert command(f"compare fedavg ditto {DIGITS} --seeds 2 --out p") == 0
    assert command(f"run local {DIGITS} --out p") == 0
    assert_same_runs("o", "p")


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        ("compare fedavg", "--participation 0.5", "participation is 1.0 there and 0.5"),
        ("compare fedavg", "--rounds 2", "and 3 are played"),
        ("compare fedavg", "--n 3", "n is 4 there and 3 here"),
        ("compare ditto fedavg", "--fedavg.server-lr .5", "server_lr is 1.0 there and"),
        ("compare ditto fedavg", "--fedavg.training.lr 1", "lr is 0.1 there and 1.0"),
        ("compare pfedme", "--local-optimizer adamw", "PFedMe"),
    ],
)
def test_runs_of_another_setting_are_not_added(words, options, error, capsys):
    assert command(f"compare fedavg {DIGITS} --out o") == 0
    before = records()
    capsys.readouterr()
    assert command(f"{words} {DIGITS} {options} --out o") == 2
    err = capsys.readouterr().err
    assert error in err and err.count("\n") == 1, err
    assert records() == before


def test_a_run_that_was_broken_off_waits_for_its_own_command():
    """Another command leaves its lines and its checkpoint where they are."""
    words = f"{DIGITS} --checkpoint-every 1 --no-keep-checkpoint --out o"
    with pytest.MonkeyPatch.context() as patch:
        honest = FedAvg.update

        def update(self, state, up, cohort):
            if cohort.round == 3:
                raise KeyboardInterrupt
            return honest(self, state, up, cohort)

        patch.setattr(FedAvg, "update", update)
        assert command(f"compare fedavg {words}") == 130
    assert command(f"compare local {words}") == 0
    assert names() == ["fedavg, seed 0", "local, seed 0"]
    checkpoint = Path("o/fedavg-seed0/checkpoint.safetensors")
    assert len(read("o")[0].rounds) == 2 and checkpoint.exists()
    with pytest.MonkeyPatch.context() as patch:
        rounds = []
        honest = FedAvg.update

        def count(self, state, up, cohort):
            rounds.append(cohort.round)
            return honest(self, state, up, cohort)

        patch.setattr(FedAvg, "update", count)
        assert command(f"compare fedavg {words}") == 0
    assert 1 not in rounds and 3 in rounds  # it went on
    assert not checkpoint.exists()
    assert command(f"compare local fedavg {DIGITS} --out p") == 0
    assert_same_runs("o", "p")


@pytest.mark.deep("it takes seconds")
def test_runs_that_are_over_go_on_to_more_rounds():
    """They end with the record of a longer command, and the file of options with it."""
    words = f"{DIGITS} --quiet --target all"
    own = "--weight-erosion.p-d .01"
    assert command(f"compare weight_erosion fedavg {words} {own} --out o") == 0
    for out in "op":
        longer = f"{words} --rounds 5 {own} --out {out}"
        assert command(f"compare weight_erosion fedavg {longer}") == 0
    assert_same_runs("o", "p")
    assert [len(run.rounds) for run in read("o")] == [5, 5]
    for name in ("weight_erosion-seed0", "fedavg-seed0"):
        text = Path("o", name, "run.toml").read_text()
        assert "\nrounds = 5\n" in text
        assert text == Path("p", name, "run.toml").read_text()


@pytest.mark.deep("it takes a second")
def test_runs_that_cannot_go_on_say_why(capsys):
    keep = f"{DIGITS} --quiet --keep-checkpoint --out o"
    drop = f"{DIGITS} --quiet --no-keep-checkpoint --out p"
    cases = (
        ("waffle --target 0", keep, "--rounds 9", "and waffle goes from global to"),
        ("fedavg", drop, "--rounds 9", "there is no checkpoint to go on from"),
        ("fedavg", drop, "--rounds 2", "there is no checkpoint"),
    )
    for name, words, more, error in cases:
        folder = words.split()[-1]
        if not Path(folder).exists():
            assert command(f"run {name} {words}") == 0
        before = records(folder)
        capsys.readouterr()
        assert command(f"run {name} {words} {more}") == 2
        err = capsys.readouterr().err
        assert error in err and err.count("\n") == 1, err
        assert records(folder) == before
