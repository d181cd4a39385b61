"""Distributions that a package requires."""

import importlib.metadata as metadata
import re

import pytest
from places import ROOT

# Finds only the distributions that the arguments name, as if no others were installed.
REQUIRED_ALONE = """
import importlib.metadata as metadata, re, sys

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

class Finder:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        owners = OWNERS.get(name.partition(".")[0])
        if owners and not {canonical(owner) for owner in owners} & ALLOWED:
            return None
        return self.finder.find_spec(name, path, target)

OWNERS = metadata.packages_distributions()
ALLOWED = {*sys.argv[1:]}
sys.meta_path[:] = map(Finder, sys.meta_path)
"""


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def listed_requirements(key):
    """The requirements in a list of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(rf"^{key} = \[(.*?)\]", text, re.M)
    return re.findall(r'"([^"]*)"', listed)


def required_distributions(requirements):
    """Names of the distributions that are installed with these requirements."""
    requirement_of = pytest.importorskip("packaging.requirements").Requirement
    seen = set()  # names with an extra, or with "" for none
    todo = [(requirement_of(text), "") for text in requirements]
    while todo:
        requirement, of_extra = todo.pop()
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": of_extra}):
            continue
        name = canonical(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                others = map(requirement_of, metadata.requires(name) or [])
                todo += [(other, extra) for other in others]
    return {name for name, _ in seen}
