"""`pflcore compare` adds to a folder the runs that it lacks, and keeps the others."""

from pathlib import Path

import pytest
from parts.commands import DIGITS, command

from pflcore import FedAvg
from pflcore.results import read

pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pflcore.results._run_pictures.draw", lambda *_: [])


def record(folder="o"):
    """The bytes of a folder's record."""
    return Path(folder, "record.jsonl").read_bytes()


def names(folder="o"):
    """The names of the runs of a folder, in their order."""
    return [run.name for run in read(folder)]


def assert_same_runs(first, second):
    """Checks that two folders have the same runs, with equal bits, in any order."""
    by_name = {run.name: run for run in read(second)}
    runs = read(first)
    assert sorted(by_name) == sorted(run.name for run in runs)
    for run in runs:
        comparison = run.compare(by_name[run.name])
        assert comparison.equal and comparison.description == {}, comparison


def test_more_algorithms_and_seeds_are_added(capsys):
    assert command(f"compare fedavg local {DIGITS} --out o") == 0
    before = record()
    words = f"compare fedavg ditto {DIGITS} --seeds 2 --baseline local"
    capsys.readouterr()
    assert command(f"{words} --out o") == 0
    assert record().startswith(before)
    assert names() == [
        *("fedavg, seed 0", "local, seed 0", "fedavg, seed 1"),
        *("ditto, seed 0", "ditto, seed 1"),
    ]
    out = capsys.readouterr().out
    assert "| local " in out and "| ditto " in out and "hurt vs local" in out

    assert command(f"compare fedavg ditto {DIGITS} --seeds 2 --out p") == 0
    assert command(f"compare local {DIGITS} --out p") == 0
    assert_same_runs("o", "p")


def test_each_call_has_its_file_of_options():
    assert command(f"compare fedavg {DIGITS} --out o") == 0
    assert command(f"compare local {DIGITS} --out o") == 0
    assert sorted(p.name for p in Path("o").glob("run*.toml")) == [
        "run-2.toml",
        "run.toml",
    ]
    for name in ("run.toml", "run-2.toml"):
        assert command(f"compare --config o/{name} --quiet --out p") == 0
    assert_same_runs("o", "p")


def test_a_folder_that_lacks_nothing_is_left_as_it_is(capsys):
    assert command(f"compare fedavg local {DIGITS} --out o") == 0
    before = record()
    capsys.readouterr()
    assert command(f"compare local {DIGITS} --out o") == 2
    err = capsys.readouterr().err
    assert "o holds record.jsonl" in err and err.count("\n") == 1
    assert command(f"compare local {DIGITS} --out o --resume") == 0
    assert record() == before


@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        ("compare ditto", "--participation 0.5", "participation is 1.0 there and 0.5"),
        ("compare ditto", "--rounds 9", "rounds is 3 there and 9 here"),
        ("compare ditto", "--n 3", "n is 4 there and 3 here"),
        ("compare ditto fedavg", "--fedavg.server-lr .5", "server_lr is 1.0 there and"),
        ("compare ditto fedavg", "--fedavg.training.lr 1", "lr is 0.1 there and 1.0"),
        ("run ditto", "", "o holds record.jsonl"),
        ("compare pfedme", "--local-optimizer adamw", "PFedMe"),
    ],
)
def test_runs_of_another_setting_are_not_added(words, options, error, capsys):
    assert command(f"compare fedavg {DIGITS} --out o") == 0
    before = record()
    capsys.readouterr()
    assert command(f"{words} {DIGITS} {options} --out o") == 2
    err = capsys.readouterr().err
    assert error in err and err.count("\n") == 1, err
    assert record() == before


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
    assert len(read("o")[0].rounds) == 2 and Path("o/checkpoints").exists()
    with pytest.MonkeyPatch.context() as patch:
        rounds = []
        honest = FedAvg.update

        def count(self, state, up, cohort):
            rounds.append(cohort.round)
            return honest(self, state, up, cohort)

        patch.setattr(FedAvg, "update", count)
        assert command(f"compare fedavg {words} --resume") == 0
    assert 1 not in rounds and 3 in rounds  # it went on
    assert not Path("o/checkpoints").exists()
    assert command(f"compare local fedavg {DIGITS} --out p") == 0
    assert_same_runs("o", "p")


def test_runs_that_are_over_go_on_to_more_rounds(capsys):
    """All runs of a folder go on together, to the record of a longer command."""
    words = f"{DIGITS} --quiet --target all"
    own = "--weight-erosion.p-d .01"
    assert command(f"compare weight_erosion fedavg {words} {own} --out o") == 0
    before = record()
    longer = f"{words} --rounds 5"
    for names, error in (("fedavg", "rounds is 3 there and 5 here"),):
        capsys.readouterr()
        assert command(f"compare {names} {longer} --out o --resume") == 2
        assert error in capsys.readouterr().err and record() == before
    for out in ("o --resume", "p"):
        go = f"compare weight_erosion fedavg {longer} {own} --out {out}"
        assert command(go) == 0
    assert_same_runs("o", "p")
    assert [len(run.rounds) for run in read("o")] == [5, 5]
    # One file of options repeats the whole record.
    assert [path.name for path in Path("o").glob("run*.toml")] == ["run.toml"]
    assert "\nrounds = 5\n" in Path("o/run.toml").read_text()
    assert Path("o/run.toml").read_text() == Path("p/run.toml").read_text()


def test_runs_that_cannot_go_on_say_why(capsys):
    keep = f"{DIGITS} --quiet --keep-checkpoint --out o"
    drop = f"{DIGITS} --quiet --no-keep-checkpoint --out p"
    cases = (
        ("waffle --target 0", keep, "--rounds 9", "and waffle goes from global to"),
        ("fedavg", drop, "--rounds 9", "has no checkpoint there to go on from"),
        ("fedavg", drop, "--rounds 2", "has no checkpoint"),
    )
    for name, words, more, error in cases:
        folder = words.split()[-1]
        if not Path(folder).exists():
            assert command(f"run {name} {words}") == 0
        before = record(folder)
        capsys.readouterr()
        assert command(f"run {name} {words} {more} --resume") == 2
        err = capsys.readouterr().err
        assert error in err and err.count("\n") == 1, err
        assert record(folder) == before
