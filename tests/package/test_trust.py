"""The tests that documents name exist."""

import re
from dataclasses import replace

import pytest
import torch
from places import ROOT
from small import after, images, make_setting, tiny_model

from pflcore import Net, Training
from pflcore.algorithms import FedAvg

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def named(text):
    return NAMED.findall(text)


def missing(text):
    """The tests that a text names and that do not exist."""
    out = []
    for file, name in named(text):
        path = ROOT / file
        code = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not re.search(rf"^def {name}\(", code, re.M):
            out.append(f"{file}::{name}")
    return out


DOCUMENTS = [
    "docs/determinism.md",
    "docs/ops.md",
    "docs/trust.md",
    "tests/README.md",
    "CONTRIBUTING.md",
]


@pytest.mark.parametrize("doc", DOCUMENTS)
def test_every_test_that_is_named_exists(doc):
    assert not missing((ROOT / doc).read_text(encoding="utf-8"))


def test_every_line_about_bits_names_its_proof():
    text = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- .*", text, re.M)
    assert len(lines) > 30 and all(named(line) for line in lines)


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
