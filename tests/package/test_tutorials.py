"""The tutorials run, and print what is stored in them.

The notebooks docs/tutorials/*.ipynb are kept with their outputs. `make tutorials`
executes and stores them.
"""

import json
import os
import re
import runpy
import sys

import pytest
from places import ROOT

FOLDER = ROOT / "docs" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
# Packages that a notebook needs beside nbclient, ipykernel and the core's own.
NEEDED = {
    "compare": ("matplotlib", "mlxtend", "pandas"),
    "sites": ("matplotlib", "sklearn", "pandas", "tyro"),
    "own_method": ("matplotlib", "sklearn"),
    "ops": ("matplotlib",),
    "flower": ("flwr", "ray"),
    "ranks": (),
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
DIGEST = re.compile(r"\b[0-9a-f]{16}\b")
MAX_BYTES = 150_000


def read_notebook(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def output_texts(cell):
    """The texts that a cell printed or returned, without tables in HTML."""
    texts = []
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        text = data.get("text/markdown", data.get("text/plain", ""))
        texts.append("".join(text))
    return texts


def output_kinds(cell):
    """The media types of each output; none for printed text."""
    return [sorted(output.get("data", ())) for output in cell["outputs"]]


def words_and_numbers(text):
    """The words of a text with a mark in place of each number, and the numbers.

    Digests of models differ between machines, and are left out. So are the spaces,
    rules and bold numbers of tables, which depend on the numbers.
    """
    text = DIGEST.sub("DIGEST", text)
    numbers = NUMBER.findall(text)
    return re.sub(r"[\s|:*-]+", " ", NUMBER.sub("#", text)), numbers


def are_close(got, want):
    """True for numbers that another processor may print.

    Whole numbers are counts and are equal. Others are shares or percent, of clients or
    of samples: one of twelve clients is 8.3 points.
    """
    if "." not in want and "e" not in want:
        return got == want
    allowed = 0.09 if abs(float(want)) <= 1 else 9
    return abs(float(got) - float(want)) <= allowed


@pytest.mark.parametrize(
    "got, want, close",
    [
        ("12", "12", True),
        ("12", "13", False),
        ("0.91", "0.93", True),
        ("0.91", "0.80", False),
        ("88.5", "91.0", True),
        ("48.9", "92.1", False),
    ],
)
def test_numbers_are_held_to_a_tolerance(got, want, close):
    assert are_close(got, want) == close


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_begins_with_its_aim_and_time(name):
    first = "".join(read_notebook(name)["cells"][0]["source"])
    assert re.match(r"# .+\n(At the end you .+?\.)", first)
    assert "It takes" in first.replace("\n", " ") and "minute" in first


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_those_of_one_run(name):
    cells = code_cells(read_notebook(name))
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "execute_result", "display_data"}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_small_and_names_no_machine(name):
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text.encode()) < MAX_BYTES
    for place in (str(ROOT), os.path.expanduser("~"), sys.prefix, "/tmp/"):
        assert place not in text
    metadata = read_notebook(name)["metadata"]
    assert metadata["language_info"] == {"name": "python"}
    assert metadata["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_all_cells_and_pictures(name):
    page = runpy.run_path(str(ROOT / "docs" / "notebook_pages.py"))["notebook_page"]
    made = page(FOLDER / f"{name}.ipynb")
    notebook = read_notebook(name)

    for cell in code_cells(notebook):
        assert "".join(cell["source"]) in made.markdown
    shown = re.findall(r"!\[[^\]]*\]\((\w+\.png)\)", made.markdown)
    assert shown == list(made.pictures)
    stored = json.dumps(notebook).count('"image/png"')
    assert len(shown) == stored
    assert all(data.startswith(b"\x89PNG") for data in made.pictures.values())


@pytest.mark.long("half a minute for each notebook")
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_prints_what_is_stored(name):
    for package in ("nbclient", "ipykernel", *NEEDED[name]):
        pytest.importorskip(package)
    maker = runpy.run_path(str(ROOT / "docs" / "make_tutorials.py"))

    got = maker["executed"](FOLDER / f"{name}.ipynb")

    stored = code_cells(read_notebook(name))
    for cell, want in zip(code_cells(got), stored, strict=True):
        # The tag says that other processors print something else.
        if "varies" not in want["metadata"].get("tags", ()):
            assert_same_outputs(cell, want)


def assert_same_outputs(got, want):
    """Raises AssertionError, with the cell's source, where the outputs differ."""
    source = "".join(want["source"])
    assert output_kinds(got) == output_kinds(want), source
    for mine, theirs in zip(output_texts(got), output_texts(want), strict=True):
        words, numbers = words_and_numbers(mine)
        stored_words, stored_numbers = words_and_numbers(theirs)
        assert words == stored_words, source
        assert all(map(are_close, numbers, stored_numbers)), (source, mine, theirs)


@pytest.mark.parametrize(
    "change",
    [("Test accuracy", "Train accuracy"), (" 88.55 ", " 48.55 "), ("12 cl", "13 cl")],
)
def test_another_output_is_noticed(change):
    cells = code_cells(read_notebook("compare"))
    cell = next(cell for cell in cells if "| fedavg" in "".join(output_texts(cell)))
    text = json.dumps(cell)
    assert change[0] in text

    assert_same_outputs(json.loads(text), cell)
    with pytest.raises(AssertionError):
        assert_same_outputs(json.loads(text.replace(*change)), cell)
