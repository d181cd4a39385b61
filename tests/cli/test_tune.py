"""`pflcore tune` searches a grid, and `pflcore compare --tuned` takes its choice."""

import re
from pathlib import Path

import pytest
from parts.commands import DIGITS, command

from pflcore.lab.results import read
from pflcore.simulation import Simulation

pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("sklearn")
SHORT = "--data digits --n 3 --model linear --rounds 3 --train-samples 300"
GRID = "--grid lam=.01,10 training.lr=1e-9,.2"


@pytest.fixture
def played(monkeypatch):
    """A list that gets the step size of every run that is played."""
    rates = []
    honest = Simulation.run

    def run(self, *args, **options):
        if self.state.round == 0:
            rates.append(self.config.training.lr)
        return honest(self, *args, **options)

    monkeypatch.setattr(Simulation, "run", run)
    return rates


def rows(text):
    """The table's rows as (candidate, score, note)."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if "|" in line]
    return [tuple(cell.strip() for cell in row) for row in cells[2:]]


def test_the_best_candidate_is_written_and_compared(capsys):
    assert command(f"tune ditto {SHORT} {GRID} --seeds 2 --out t") == 0
    out, err = capsys.readouterr()
    table = rows(Path("t/tuned.md").read_text())
    assert table == rows(out) and len(table) == 4
    assert table[0][0].endswith("training.lr 0.2") and table[0][2] == "chosen"
    scores = [float(score) for _, score, _ in table]
    assert scores == sorted(scores, reverse=True)
    assert err.count("/4 lam ") == 8  # four candidates with two seeds
    lam = float(re.search(r"lam ([\d.]+),", table[0][0])[1])

    assert command(f"compare ditto local --tuned t {DIGITS} --out c") == 0
    ditto, local = read("c")
    assert ditto.header["options"]["lam"] == lam
    assert ditto.header["training"]["lr"] == 0.2
    assert local.header["training"]["lr"] == 0.1  # it was not tuned
    assert command(f"compare --tuned t --ditto.lam 3 {DIGITS} --lr .3 --out d") == 0
    (alone,) = read("d")
    assert alone.header["options"]["lam"] == 3.0
    assert alone.header["training"]["lr"] == 0.3  # the flag overrides the choice

    for file in sorted(Path("c").glob("*/run.toml")):
        assert command(f"run --config {file} --quiet --out e") == 0
    for one, other in zip((ditto, local), read("e"), strict=True):
        comparison = one.compare(other)
        assert comparison.equal and not comparison.description


@pytest.mark.deep("it takes a second")
def test_a_second_call_plays_what_is_missing(played, capsys):
    words = f"tune fedavg {SHORT} --quiet --out t --grid training.lr="
    assert command(f"{words}.1,.2") == 0 and played == [0.1, 0.2]
    assert command(f"{words}.1,.2,.3") == 0 and played == [0.1, 0.2, 0.3]
    assert len(rows(Path("t/tuned.md").read_text())) == 3
    capsys.readouterr()
    assert command(f"{words}.1 --n 2") == 2
    err = capsys.readouterr().err
    assert "t holds the results of another grid or other data" in err
    assert err.count("\n") == 1


def test_a_tie_is_said(capsys):
    words = f"tune fedavg {SHORT} --quiet --out t --grid training.lr=0,.0"
    assert command(words) == 0
    out = capsys.readouterr().out
    assert "a tie with the chosen one" in out
    assert "A tie: 2 candidates have the best score; training.lr 0 is the first." in out


@pytest.mark.deep("it takes a second")
def test_test_data_take_no_part(capsys):
    """A grid search has the same result on any test samples."""
    words = f"tune ditto {SHORT} {GRID} --quiet --test-samples"
    for count in (60, 90):
        assert command(f"{words} {count} --out t{count}") == 0
    assert Path("t60/tuned.toml").read_text() == Path("t90/tuned.toml").read_text()
    assert Path("t60/tuned.md").read_text() == Path("t90/tuned.md").read_text()


@pytest.mark.deep("it takes a second")
def test_the_file_of_a_grid_repeats_it():
    assert command(f"tune ditto {SHORT} {GRID} --clip 0.5 --quiet --out a") == 0
    assert "clip = 0.5" in Path("a/run.toml").read_text()
    assert command("tune --config a/run.toml --quiet --out b") == 0
    for name in ("tuned.md", "tuned.toml", "run.toml"):
        assert Path("a", name).read_text() == Path("b", name).read_text()


# Each line: a command, and a part of its error.
BAD = """\
tune | tune: expected the name of an algorithm first
tune ditto SHORT | grid: expected options and their values, such as
tune ditto SHORT --grid lam | grid: expected options and their values, such as
tune ditto SHORT --grid lam=1 lam=2 | grid: expected each option once, got 'lam=2'
tune ditto SHORT --grid lan=1 | grid: got 'lan', did you mean 'lam'?
tune ditto SHORT --grid training.lt=1 | grid: got 'training.lt', did you mean 'training.lr'?
tune ditto SHORT --grid lam=-1 | lam: expected
tune ditto SHORT --grid training.lr=fast | lr: expected
tune ditto SHORT --grid lam=.1:1 | lam: expected
tune ditto SHORT --grid lam=1 --metric acuracy | metric
tune waffle SHORT --grid do=1 --target all | target: expected a client
tune ditte SHORT --grid lam=1 | got 'ditte', did you mean 'ditto'
compare ditto SHORT --tuned nowhere | tuned: expected a file of options in TOML, got nowhere
"""  # noqa: E501


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("line", BAD.splitlines())
def test_a_wrong_grid_is_one_sentence_and_leaves_nothing(line, tmp_path, capsys):
    words, error = line.split(" | ")
    assert command(words.replace("SHORT", SHORT)) == 2
    err = capsys.readouterr().err
    assert error in err and err.count("\n") == 1, err
    assert [*tmp_path.rglob("*")] == []


def test_a_folder_of_an_algorithm_that_does_not_run_is_refused(capsys):
    assert command(f"tune ditto {SHORT} --grid lam=1 --quiet --out t") == 0
    assert command(f"compare local fedavg {SHORT} --tuned t --out c") == 2
    words = "tuned: expected folders of the algorithms that run (local, fedavg), got"
    assert words in capsys.readouterr().err and not Path("c").exists()
