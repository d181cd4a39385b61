"""The commands of pages on many runs work as they stand there."""

import re
import shlex
from pathlib import Path

import pytest
from places import ROOT

from pflcore.lab import cli
from pflcore.lab.results import read

pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("sklearn")


def text_of(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files of the pages, in an empty folder, with fewer rounds."""
    monkeypatch.syspath_prepend(tmp_path)
    for page in ("many_runs.md", "paper_table.md"):
        for text in re.findall(r"```toml\n(.*?)```", text_of(page), re.S):
            name = re.match(r"# (\S+)", text)[1]
            Path(name).write_text(text.replace("rounds = 20", "rounds = 2"))
    (code,) = re.findall(r"```python\n(.*?)```", text_of("paper_table.md"), re.S)
    Path("mine.py").write_text(code)


def commands(page="many_runs.md"):
    """The commands of a page in their order, with fewer seeds."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.M | re.S)
    text = "".join(block for kind, block in blocks if kind in ("", "bash"))
    lines = text.replace("\\\n", "").replace("srun ", "").splitlines()
    lines = [line for line in lines if line.startswith("pflcore ")]
    lines = [line.replace('"$SLURM_ARRAY_TASK_ID"', "4") for line in lines]
    return [line.replace("/$SLURM_ARRAY_TASK_ID", "/4") for line in lines]


@pytest.mark.deep("all commands of a page")
def test_every_command_of_the_page_works():
    """They run one after another."""
    lines = commands()
    assert len(lines) == 14
    for line in lines:
        words = shlex.split(line.replace("--seeds 3", "--seeds 2"), comments=True)
        # The folder of `diff` has runs that are added later.
        assert cli.main(words[1:]) == 0, line
    names = {run.name for run in read("table")}
    assert len(names) == 8 and "feddwa, seed 1" in names
    chosen = Path("tuned/ditto/tuned.toml").read_text()
    (tuned, *_) = read("compared")
    assert tuned.algorithm == "ditto"
    assert f"\nlam = {tuned.header['options']['lam']}\n" in chosen
    assert Path("both/table.md").read_text().count("over 2 seeds") == 1
    assert "| ditto " in Path("table/table.md").read_text()


@pytest.mark.deep("all commands of a page")
def test_the_way_to_a_papers_table_can_be_gone():
    for line in commands("paper_table.md"):
        line = re.sub(r"--seeds \d", "--seeds 2", line)
        assert cli.main(shlex.split(line)[1:]) == 0, line
    table = Path("table/table.tex").read_text()
    assert "\\toprule" in table
    assert all(name in table for name in ("local", "fedavg", "ditto", "Mine"))


def test_the_page_has_the_commands_and_files_that_it_names():
    assert {path.name for path in Path().glob("*.toml")} == {
        "paper.toml",
        "table.toml",
        "tune.toml",
    }
    named = {line.split()[1] for line in commands()}
    assert named == {"compare", "diff", "tune", "report", "run"}
