"""Helpers of the tests of the command line."""

import sys

from pflcore.lab import cli

DIGITS = "--data digits --n 4 --model linear --rounds 3 --quiet"


def command(words, *more):
    """The exit code of a command."""
    return cli.main([*words.split(), *map(str, more)])


def block(monkeypatch, *packages):
    """Makes `import package` fail as if it were not installed."""
    for package in packages:
        for name in [m for m in sys.modules if m.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
