"""Options as a TOML file, and the file of a run, which repeats it."""

import sys
from pathlib import Path

import pytest
from parts.commands import DIGITS, command

from pflcore.lab.results import read

pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("sklearn")


def config(text, name="c.toml"):
    """A file with these options."""
    Path(name).write_text(text)
    return name


def run_files(folder):
    """The files of options of the runs in a folder."""
    return sorted(Path(folder).glob("*/run.toml"))


def assert_equal_records(*folders):
    """Checks that the runs have equal headers, and equal bits but for seconds."""
    first, second = (read(folder) for folder in folders)
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        comparison = one.compare(other)
        assert comparison.equal and comparison.description == {}, comparison


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize(
    "words",
    [
        "run ditto --lam 0.3 --lr 0.2 --no-reshuffle --participation 0.5",
        "run waffle --target 1 --val 0.2 --eval-split val --seed 7 --metrics f1",
        "run apfl --partition dirichlet --alpha 0.5 --apfl-alpha 0.1 --no-adaptive",
        "compare fedavg apfl --partition dirichlet --alpha 0.5 --apfl.alpha 0.1 "
        "--seeds 2 --baseline fedavg --momentum 0.5",
        "run fedavg --attack noise --attack-clients 1 2 --clip 3 --engine loop",
    ],
)
def test_the_file_of_a_run_repeats_it_bit_for_bit(words):
    assert command(f"{words} {DIGITS} --out a") == 0
    files = run_files("a")
    for file in files:
        assert command(f"run --config {file} --quiet --out b") == 0
    assert_equal_records("a", "b")
    assert [f.read_text() for f in files] == [f.read_text() for f in run_files("b")]


OWN = """
from dataclasses import dataclass
from pflcore import FedAvg

@dataclass(frozen=True)
class Half(FedAvg):
    part: float = 0.5  # of everything
"""


@pytest.mark.deep("it takes a second")
def test_a_file_may_name_ones_own_algorithm(monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    config(OWN, "own_half.py")
    config('algorithm = "own_half:Half"\npart = 0.25\nn = 4\ndata = "digits"')
    words = "run --config c.toml --model linear --rounds 1 --quiet"
    assert command(f"{words} --out a") == 0
    (run,) = read("a")
    assert run.header["options"]["part"] == 0.25
    (file,) = run_files("a")
    assert command(f"run --config {file} --quiet --out b") == 0
    assert_equal_records("a", "b")


def test_flags_override_the_file():
    text = 'algorithms = ["ditto", "local"]\nlr = 0.5\nrounds = 9\nseed = 3\n'
    config(f"{text}reshuffle = false\n[ditto]\nlam = 0.7\n")
    words = f"compare --config c.toml {DIGITS} --lr 0.2 --ditto.lam 0.1 --reshuffle"
    assert command(f"{words} --out a") == 0
    ditto, local = read("a")
    assert ditto.header["options"]["lam"] == 0.1 and local.algorithm == "local"
    assert ditto.header["training"]["lr"] == 0.2 and ditto.header["seed"] == 3
    assert ditto.header["training"]["reshuffle"] is True
    assert ditto.header["rounds"] == 3
    assert command(f"run local --config a/ditto-seed3/run.toml {DIGITS}") == 2


# A line of the file, flags of which the last one is an option of the first, and its
# line in the file of the run.
CHOICES = [
    ('partition = "pathological"', "--partition dirichlet --alpha 0.4", "alpha = 0.4"),
    ('model = "linear"', "--model mlp --activation tanh", 'activation = "tanh"'),
    (
        'data = "synthetic_linear"',
        "--data digits --partition dirichlet --alpha 0.4",
        "alpha = 0.4",
    ),
]


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", ["run", "tune"])
@pytest.mark.parametrize("line, flags, played", CHOICES)
def test_a_flag_chooses_other_options_than_the_file(line, flags, played, name):
    """Data, partition and model decide which options there are."""
    rest = {"data": "digits", "n": 3, "rounds": 1, "partition": "dirichlet"}
    rest |= {"model": "linear"}
    del rest[line.split()[0]]
    config("\n".join([line, *(f"{k} = {v!r}" for k, v in rest.items())]))
    more = "--grid training.lr=0.1" if name == "tune" else ""
    assert command(f"{name} fedavg --config c.toml {flags} {more} --out a") == 0
    folder = "a/fedavg-seed0" if name == "run" else "a"
    assert played in Path(folder, "run.toml").read_text()


def test_a_table_of_an_algorithm_that_does_not_run_is_passed_over(capsys):
    config("[ditto]\nlam = 0.7\ntraining.lr = 3\n")
    assert command(f"compare local --config c.toml {DIGITS} --out a") == 0
    config("[ditto]\nlan = 0.7\n")
    assert command(f"compare local --config c.toml {DIGITS} --out b") == 2
    assert "'ditto.lan', did you mean 'ditto.lam'?" in capsys.readouterr().err


def test_hyphens_and_underscores_are_one_spelling():
    for folder, size, seed in (
        ("a", "batch_size", "data_seed"),
        ("b", "batch-size", "data-seed"),
    ):
        config(f'algorithm = "fedavg"\n{size} = 4\n{seed} = 3\n')
        assert command(f"run --config c.toml {DIGITS} --out {folder}") == 0
    assert_equal_records("a", "b")
    assert read("a")[0].header["training"]["batch_size"] == 4


# Each line: a command, the text of its file, and a part of the error.
BAD = """\
run fedavg | lamda = 1 | config: expected an option of `pflcore run fedavg` in c.toml, got 'lamda'
run ditto | lan = 1 | config: got 'lan', did you mean 'lam'? Expected an option of `pflcore run ditto`
run | algorithm = "ditto"; roundz = 1 | config: got 'roundz', did you mean 'rounds'?
run | rounds = 1 | name of an algorithm
compare | algorithms = ["ditto"]; [ditto]; lamb = 2 | config: got 'ditto.lamb', did you mean 'ditto.lam'?
run fedavg | graphs = "yes" | graphs: expected True or False, got 'yes'
run fedavg | lr = -1 | lr: expected
run fedavg | metrics = [[1]] | metrics: expected
run fedavg | batch-size = 1; batch_size = 2 | config: expected each option once in c.toml, got 'batch_size'
run fedavg | lr = | config: expected a file of options in TOML, got c.toml (
"""  # noqa: E501


@pytest.mark.parametrize("line", BAD.splitlines())
def test_a_wrong_file_is_one_sentence_and_leaves_nothing(line, capsys):
    words, text, error = line.split(" | ")
    config(text.replace("; ", "\n"))
    assert command(f"{words} --config c.toml {DIGITS} --out o") == 2
    err = capsys.readouterr().err
    assert error in err and err.count("\n") == 1, err
    assert not Path("o").exists()


def test_a_file_that_is_not_there_is_one_sentence(capsys):
    assert command(f"run fedavg --config nowhere.toml {DIGITS}") == 2
    err = capsys.readouterr().err
    assert "got nowhere.toml (No such file or directory)" in err


@pytest.mark.deep("it takes a second")
def test_one_file_serves_all_commands():
    config('algorithms = ["ditto", "local"]\neval_every = 2\n[ditto]\nlam = 0.7\n')
    text = Path("c.toml").read_text()
    Path("c.toml").write_text("\ufeff" + text, encoding="utf-8")  # as on Windows
    words = f"--config c.toml {DIGITS} --quiet"
    assert command(f"compare {words} --out a") == 0
    assert command(f"run ditto {words} --out b") == 0
    assert read("b")[0].header["options"]["lam"] == 0.7
    assert command(f"tune ditto {words} --grid lam=.1,1 --out t") == 0


def test_the_names_of_compare_may_stand_at_the_front(capsys):
    assert command(f"compare fedavg local {DIGITS} --out a") == 0
    assert [run.algorithm for run in read("a")] == ["fedavg", "local"]
    assert command(f"compare fedavg --algorithms local {DIGITS} --out b") == 2
    assert "algorithms: expected the names once" in capsys.readouterr().err


RULES = """
def latest(round, generator, sizes):
    return [round % 4]


def slow(round, client, generator):
    return 1 + client
"""


@pytest.mark.deep("it takes a second")
def test_rules_of_ones_own_are_options_and_stand_in_the_file(monkeypatch):
    """Who takes part, and for how many steps, by functions of the user's module."""
    Path("rules_of_mine.py").write_text(RULES)
    monkeypatch.syspath_prepend(".")
    words = f"{DIGITS} --sampling rules_of_mine:latest --steps rules_of_mine:slow"
    assert command(f"compare fedavg scaffold {words} --out o") == 0
    for file in run_files("o"):
        assert command(f"run --config {file} --quiet --out p") == 0
    for run, again in zip(read("o"), read("p"), strict=True):
        assert [r["cohort"] for r in run.rounds] == [[1], [2], [3]]
        assert run.header["sampling"] == "function latest"
        assert run.header["training"]["steps"] == "slow"
        assert run.compare(again).equal
    assert command(f"run fedavg {DIGITS} --sampling size --steps 2 --out q") == 0
    (run,) = read("q")
    assert run.header["sampling"] == "size" and run.header["training"]["steps"] == 2


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("per_fedavg", "steps", 3), ("feddbe", "momentum", 0.5)],
)
def test_an_option_called_as_one_of_training_is_the_methods(name, option, value):
    """A file for `compare` has it in the method's table; `run` reads it, too."""
    words = "--data digits --n 2 --model linear --rounds 1 --quiet"
    Path("c.toml").write_text(f"[{name}]\n{option} = {value}\n")
    assert command(f"compare {name} {words} --config c.toml --out a") == 0
    assert command(f"run {name} {words} --config c.toml --out b") == 0

    one, other = (read(folder)[0].header for folder in "ab")
    assert one["options"][option] == other["options"][option] == value
    assert one["training"] == other["training"]


@pytest.mark.parametrize("key", ["tuned", "algorithms"])
def test_a_word_in_place_of_a_list_is_one_sentence(key, capsys):
    Path("c.toml").write_text(f'{key} = "ditto"\n')
    assert command(f"compare {DIGITS} --config c.toml") == 2
    assert f"{key}: expected a list in c.toml, got 'ditto'" in capsys.readouterr().err
