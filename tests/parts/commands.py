"""Helpers of the tests of the command line."""

import sys
from pathlib import Path

from pflcore.lab import cli

DIGITS = "--data digits --n 4 --model linear --rounds 3 --quiet"


def command(words, *more):
    """The exit code of a command."""
    return cli.main([*words.split(), *map(str, more)])


def draw_nothing(monkeypatch):
    """Turns the pictures off, which take longer than the runs of tests."""
    nothing = {
        "pflcore.lab.results._run_pictures.draw": lambda *_: [],
        "pflcore.lab.cli._report._draw_federation": lambda *_: Path("none"),
    }
    for name, function in nothing.items():
        monkeypatch.setattr(name, function)


def block(monkeypatch, *packages):
    """Makes `import package` fail as if it were not installed."""
    for package in packages:
        for name in [m for m in sys.modules if m.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
