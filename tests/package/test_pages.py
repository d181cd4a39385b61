"""The pages of the methods are those of the code, and the site has every page."""

import re
import runpy

import pytest
from places import ROOT

from pflcore.algorithms import ALGORITHMS

MAKER = runpy.run_path(str(ROOT / "docs" / "make_methods.py"))
MAKE = "run: PYTHONPATH=. python docs/make_methods.py"
TUTORIALS = ROOT / "docs" / "tutorials"
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


@pytest.mark.parametrize("slug", MAKER["FAMILIES"])
def test_a_familys_page_is_made_from_the_code(slug):
    page = ROOT / "docs" / "methods" / f"{slug}.md"
    made = MAKER["family_page"](page.read_text(), MAKER["FAMILIES"][slug])
    assert page.read_text() == made, MAKE


@pytest.mark.parametrize("slug", MAKER["FAMILIES"])
def test_every_method_of_a_family_has_its_costs(slug):
    page = (ROOT / "docs" / "methods" / f"{slug}.md").read_text()
    table = page.partition(MAKER["COSTS_HEADING"])[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert rows == list(MAKER["FAMILIES"][slug]), MAKE
    assert table.strip().startswith(MAKER["ABOUT_COSTS"]), MAKE


@pytest.mark.deep("each method plays two rounds, twice")
@pytest.mark.parametrize("slug", MAKER["FAMILIES"])
def test_a_familys_costs_are_counted(slug):
    page = (ROOT / "docs" / "methods" / f"{slug}.md").read_text()
    counted = MAKER["costs_table"](MAKER["FAMILIES"][slug])
    assert counted in page, MAKE


def test_every_method_stands_on_one_page():
    names = [name for family in MAKER["FAMILIES"].values() for name in family]
    assert sorted(names) == sorted(ALGORITHMS)


def test_every_method_but_local_names_its_paper():
    without = [
        name
        for family in MAKER["FAMILIES"].values()
        for name, addresses in family.items()
        if not addresses
    ]
    assert without == ["local"]


def test_the_site_lists_every_page():
    listed = set(re.findall(r"[\w/]+\.md", NAV))
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    notebooks = {f"tutorials/{p.stem}.md" for p in TUTORIALS.glob("*.ipynb")}
    assert notebooks and listed == pages | notebooks | {"index.md"}


def parts_of_methods():
    """The part of a page about each method, by the method's name."""
    parts = {}
    for slug, methods in MAKER["FAMILIES"].items():
        page = (ROOT / "docs" / "methods" / f"{slug}.md").read_text()
        for name in methods:
            _, _, rest = page.partition(f"\n## `{name}`\n")
            parts[name] = rest.partition("\n## ")[0]
    return parts


def options_on_pages(name, parts):
    """The options that a method's part lists, or those to which it links."""
    options = set(re.findall(r"^- `(\w+)=", parts[name], re.MULTILINE))
    for line in re.findall(r"The other options are those of .*", parts[name]):
        for other in re.findall(r"\[`(\w+)`\]", line):
            options |= options_on_pages(other, parts)
    return options


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_is_described_or_linked(name):
    options = {*ALGORITHMS[name].__dataclass_fields__} - {"traits"}

    assert options <= options_on_pages(name, parts_of_methods())
