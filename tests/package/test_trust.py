"""The tests that documents name exist."""

import re
from dataclasses import replace

import pytest
import torch
from places import ROOT
from small import after, images, make_setting, tiny_model

from pflcore import Net, Training
from pflcore.algorithms import FedAvg

PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [
    *[page.relative_to(ROOT) for page in PAGES],
    "tests/README.md",
    "CONTRIBUTING.md",
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def named(text):
    return NAMED.findall(text)


def missing(text):
    """The tests that a text names and that do not exist."""
    out = []
    for file, name in named(text):
        path = ROOT / file
        code = path.read_text(encoding="utf-8") if path.is_file() else None
        # A document may also name a whole file.
        has_test = not name or re.search(rf"^def {name}\(", code or "", re.M)
        if code is None or not has_test:
            out.append(f"{file}::{name}")
    return out


@pytest.mark.parametrize("doc", DOCUMENTS, ids=str)
def test_every_test_that_is_named_exists(doc):
    assert not missing((ROOT / doc).read_text(encoding="utf-8"))


def test_every_line_about_bits_names_its_proof():
    text = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- .*", text, re.M)
    assert len(lines) > 30
    assert all(any(name for _, name in named(line)) for line in lines)


def test_other_numbers_are_other_draws():
    """Clients in another order make another run, as their numbers differ.

    The number of a client determines its random draws.
    """
    s = make_setting(
        Net(tiny_model()), images((20, 20)), Training(lr=0.1, batch_size=4)
    )
    reordered = replace(s, data=s.data.subset([1, 0]))
    one, two = (after(FedAvg(), setting)[0].server["x"] for setting in (s, reordered))
    assert not torch.equal(one, two)
