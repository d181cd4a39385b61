"""The commands of docs/many_runs.md work as they stand there."""

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
TEXT = (ROOT / "docs" / "many_runs.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files of the page, in an empty folder, with fewer rounds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pflcore.lab.results._run_pictures.draw", lambda *_: [])
    for text in re.findall(r"```toml\n(.*?)```", TEXT, re.S):
        name = re.match(r"# (\S+)", text)[1]
        Path(name).write_text(text.replace("rounds = 20", "rounds = 2"))


def commands():
    """The commands of the page in their order, with fewer seeds."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
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


def test_the_page_has_the_commands_and_files_that_it_names():
    assert {path.name for path in Path().glob("*.toml")} == {"table.toml", "tune.toml"}
    named = {line.split()[1] for line in commands()}
    assert named == {"compare", "diff", "tune", "report", "run"}
