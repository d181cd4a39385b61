"""docs/ops.md has each op, whose facts name tests, and its examples run."""

import re

import pytest
from places import ROOT

from pflcore import ops

PAGE = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
OPS = sorted({*ops.__all__} - {"backend"})
KEYS = ["dtypes", "gradient", "memory", "work", "error", "bits"]


def test_the_page_has_each_op():
    assert sorted(re.findall(r"`(\w+)`", " ".join(SECTIONS))) == OPS


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_its_facts_and_their_tests(name):
    section = SECTIONS[f"`{name}`"]
    facts = re.findall(r"^- \*\*(\w+)\*\*: (.*)$", section, re.M)
    assert [key for key, _ in facts] == KEYS
    for key, fact in facts:
        is_plain = key == "work" or fact.startswith("none")
        assert re.search(r"`tests/[\w/]+\.py::\w+`", fact) or is_plain, (name, key)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_examples_run(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.S)
    assert len(examples) == 1
    exec(compile(examples[0], f"docs/ops.md, {title}", "exec"), {"__name__": "ops"})
