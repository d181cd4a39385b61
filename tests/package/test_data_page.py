"""docs/data.md: its tables are the code's, and its examples run."""

import re
import runpy
import shlex

import pytest
from places import ROOT

from pflcore.lab import cli

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
SECTIONS = dict(
    part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
)
# Sections whose examples run. Those of the others need data of the reader's own.
RUN = "\n".join(
    SECTIONS[title]
    for title in (
        "See the cut",
        "Your own data",
        "Columns, names and scaling",
        "A folder of files",
        "LEAF's files",
    )
)
FILES = re.findall(r"^`([\w/.]+)`:\n```\n(.*?)```", RUN, re.DOTALL | re.MULTILINE)
CODE = re.findall(r"^```python\n(.*?)```", RUN, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^pflcore (?:data|run) .*$", RUN, re.MULTILINE)


def test_the_tables_are_the_codes():
    pytest.importorskip("tyro")
    maker = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
    assert maker["page"](PAGE) == PAGE, "run python docs/make_tables.py"


@pytest.fixture
def in_a_folder_of_the_files(tmp_path, monkeypatch):
    """The working folder has the files that the page shows."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


@pytest.mark.usefixtures("in_a_folder_of_the_files")
def test_the_code_runs(capsys):
    """The examples run in one namespace, in the order of the page."""
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    names = {"__name__": "page"}

    for number, code in enumerate(CODE):
        exec(compile(code, f"docs/data.md, example {number}", "exec"), names)

    assert len(CODE) == 7 and "clients: 3" in capsys.readouterr().out
    assert names["history"].rounds[-1]["round"] == 2


@pytest.mark.usefixtures("in_a_folder_of_the_files")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command, tmp_path, capsys):
    for package in ("tyro", "tqdm", "matplotlib", "mlxtend"):
        pytest.importorskip(package)

    assert cli.main(shlex.split(command)[1:]) == 0

    if "--out" in command:
        assert (tmp_path / command.split()[-1]).is_file()
    assert {f for f, _ in FILES} == {
        "sites/north.csv",
        "sites/south.csv",
        "notes/train/part.json",
        "notes/test/part.json",
    }
