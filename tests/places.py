"""Places of the project and of its golden values."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def golden(name):
    """The numbers or cases of tests/golden/NAME.json."""
    return json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())


def tabled(text):
    """Rows of a table in a text.

    The cells are separated by " | ". Each is JSON or plain words.
    """
    return [[*map(cell, line.split(" | "))] for line in text.splitlines()]


def cell(words):
    try:
        return json.loads(words)
    except json.JSONDecodeError:
        return words


def listed():
    """Yields the names in docs/api.md as (module, name).

    Each module itself is (module, "").
    """
    module = ""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for section, name in re.findall(r"^(?:## `(pflcore[\w.]*)`|- `(\w+)`)", text, re.M):
        module = section or module
        yield module, name


def ran(*words, **options):
    """A finished process of this Python, run with these arguments."""
    options = {"cwd": ROOT, "check": False, **options}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, **options
    )
