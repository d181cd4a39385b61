"""`pflcore data`: lists, summaries and pictures without a run."""

import pytest
from parts.commands import block, command

from pflcore import data as rules
from pflcore.lab import data as catalogue
from pflcore.lab.data import federation_of

pytest.importorskip("tyro")
pytest.importorskip("sklearn")
BEGIN = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
CSV = "age,died,height\n" + "1,0,2\n3,1,4\n" * 10


def test_without_a_name_every_name_is_listed(capsys):
    assert command("data") == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    first_words = {row[0] for row in rows if row}
    names = *catalogue.SOURCES, *catalogue.FEDERATIONS, *rules.PARTITIONS
    assert {*names, "folder:PATH", "leaf:PATH"} <= first_words


def test_the_summary_is_that_of_the_federation(capsys):
    words = "data digits --partition dirichlet --n 6 --alpha 0.2 --data-seed 3"
    assert command(f"{words} --train-samples 300") == 0

    want = federation_of("digits", "dirichlet", 6, seed=3, alpha=0.2, train_samples=300)
    assert capsys.readouterr().out.strip() == want.summary()


FILE = """\
algorithms = ["fedavg", "ditto"]
data = "digits"
partition = "dirichlet"
alpha = 0.3
n = 5
lr = 0.05
data-seed = "each"
seed = 3
[ditto]
lam = 0.1
[ditto.training]
lr = 0.1
"""


def test_a_file_of_options_has_its_cut(tmp_path, capsys):
    (tmp_path / "many.toml").write_text(FILE)
    words = "--partition dirichlet --alpha 0.3 --n 5 --data-seed 3"
    assert command(f"data digits {words}") == 0
    wanted = capsys.readouterr().out
    assert command("data --config many.toml") == 0
    assert capsys.readouterr().out == wanted

    # The file that a run leaves has the options of its method and of its model, too.
    more = "--rounds 1 --model mlp --hidden 8 --lam 0.2 --quiet --out o"
    assert command(f"run ditto --config many.toml {more}") == 0
    capsys.readouterr()
    assert command("data --config o/ditto-seed3/run.toml") == 0
    assert capsys.readouterr().out == wanted
    assert command("data --config many.toml --alpha 9") == 0
    assert capsys.readouterr().out != wanted

    (tmp_path / "wrong.toml").write_text("n = 5\nalhpa = 0.3\n")
    assert command("data digits --partition dirichlet --config wrong.toml") == 2
    assert "did you mean 'alpha'?" in capsys.readouterr().err


def test_a_share_for_validation_samples_that_are_there_is_refused(tmp_path, capsys):
    """Data without test samples have had validation samples held out already."""
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "a.csv").write_text(CSV)
    for words in ("data folder:sites", "run fedavg --data folder:sites"):
        assert command(f"{words} --data-target died --val .2") == 2
        error = capsys.readouterr().err
        assert "val: expected no share for data that have validation samples" in error
        assert "leave --val out" in error and error.count("\n") == 1


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("kind", BEGIN)
def test_the_picture_has_the_form_of_its_name(kind, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / f"cut.{kind}"

    assert command("data synthetic_clusters --n 3 --split test --out", file) == 0

    assert file.read_bytes().startswith(BEGIN[kind])
    assert [*file.parent.iterdir()] == [file]
    assert str(file) in capsys.readouterr().out


def test_options_have_the_names_that_a_run_gives_them(tmp_path, capsys):
    """`--data-target` is no `--target`, which in a run is a client."""
    (tmp_path / "sites").mkdir()
    for name in ("a", "b"):
        (tmp_path / "sites" / f"{name}.csv").write_text(CSV)
    words = "folder:sites --data-target died --standardize False"

    assert command(f"data {words}") == 0
    out = capsys.readouterr().out
    assert command(f"run fedavg --data {words} --dry-run") == 0

    summary = out.strip()
    assert "inputs: [2]" in summary and "classes: 2" in summary
    assert capsys.readouterr().out.startswith(summary)


@pytest.mark.parametrize(
    "command_line", ["data", "run fedavg --rounds 1 --dry-run --data"]
)
def test_made_up_data_have_options(command_line, capsys):
    words = "synthetic_linear --n 4 --samples 7 --held-out 2 --groups 4"
    assert command(f"{command_line} {words}") == 0

    want = federation_of("synthetic_linear", n=4, samples=7, held_out=2, groups=4)
    assert capsys.readouterr().out.startswith(want.summary())


WRONG = [
    ("mnst", "data: got 'mnst', did you mean 'mnist'?"),
    ("digits --partition dirichlett", "partition: got 'dirichlett', did you mean"),
    ("digits --out cut.gif", "out: expected a file that ends in .png, .svg, .pdf"),
    ("digits --split val", "split: expected one of train, test, got 'val'"),
    ("synthetic_linear --partition A", "partition and samples: expected none"),
    ("--n 3", "data: expected the name of the data first"),
]


@pytest.mark.parametrize("words, message", WRONG)
def test_what_is_wrong_is_one_sentence(words, message, tmp_path, capsys):
    assert command(f"data {words}") == 2

    out, err = capsys.readouterr()
    assert err.startswith(f"pflcore: {message}") and err.count("\n") == 1
    assert out == "" and not [*tmp_path.iterdir()]


def test_without_matplotlib_the_command_names_it(monkeypatch, capsys):
    block(monkeypatch, "matplotlib")

    assert command("data digits --n 2 --out cut.png") == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert command("data digits --n 2") == 0


def test_help_shows_partitions_and_the_options_of_the_chosen_one(capsys):
    with pytest.raises(SystemExit) as e:
        command("data digits --partition pathological --help")

    out = capsys.readouterr().out
    assert e.value.code == 0
    for name in rules.PARTITIONS:
        assert f"  {name} " in out
    assert "--k INT" in out and "shards or classes of a client" in out


@pytest.mark.deep("it takes a second")
def test_labels_of_files_that_may_be_counts_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i / 7},{'ab'[i % 2]},{i % 12}\n" for i in range(40))
    (tmp_path / "all.csv").write_text(f"age,site,visits\n{rows}")
    words = "table:all.csv --client site --label visits"
    note = "12 classes; --loss squared (classes=None) if their labels are numbers"

    for line in (f"data {words}", f"run fedavg --data {words} --dry-run"):
        assert command(line) == 0
        assert note in capsys.readouterr().out
    assert command("data mnist5k") == 0
    assert "--loss squared" not in capsys.readouterr().out
