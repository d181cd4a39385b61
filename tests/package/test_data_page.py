"""docs/data.md and docs/data_sets.md: tables are the code's, and examples run."""

import re
import runpy
import shlex

import pytest
from places import ROOT

from pflcore.lab import cli

NAMES = ["data.md", "data_sets.md"]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in NAMES}
# Sections whose examples need data of the reader's own.
NOT_RUN = ["Objects", "Hugging Face", "Options of files", "What targets and inputs"]


def examples_of(page):
    """The sections of a page whose examples run."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return "\n".join(part for part in sections if not part.startswith(tuple(NOT_RUN)))


RUN = {name: examples_of(page) for name, page in PAGES.items()}
ALL = "\n".join(RUN.values())
FILES = re.findall(r"^`([\w/.]+)`:\n```\n(.*?)```", ALL, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^pflcore (?:data|run) .*$", ALL, re.MULTILINE)


@pytest.fixture(scope="module")
def maker():
    pytest.importorskip("tyro")
    return runpy.run_path(str(ROOT / "docs" / "make_tables.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_tables_are_the_codes(name, maker):
    assert maker["page"](PAGES[name]) == PAGES[name], "run python docs/make_tables.py"


def test_each_table_stands_on_one_page(maker):
    for title in maker["TABLES"]:
        marker = f"<!-- table: {title} (made by docs/make_tables.py) -->"
        assert sum(page.count(marker) for page in PAGES.values()) == 1


@pytest.fixture
def in_a_folder_of_the_files(tmp_path, monkeypatch):
    """The working folder has the files that the pages show."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


@pytest.mark.usefixtures("in_a_folder_of_the_files")
@pytest.mark.parametrize(("name", "examples"), [("data.md", 7), ("data_sets.md", 2)])
def test_the_code_runs(name, examples, capsys):
    """The examples of a page run in one namespace, in its order."""
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    blocks = re.findall(r"^```python\n(.*?)```", RUN[name], re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}

    for number, code in enumerate(blocks):
        exec(compile(code, f"docs/{name}, example {number}", "exec"), names)

    assert len(blocks) == examples
    if name == "data.md":
        assert "clients: 3" in capsys.readouterr().out
        assert names["history"].rounds[-1]["round"] == 2


@pytest.mark.deep("together they take seconds", quick=3)
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
