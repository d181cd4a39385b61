"""Where the project and its golden values are, for tests in any folder."""

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
    """The rows of a table whose cells, apart by " | ", are JSON or plain words."""
    return [[*map(cell, line.split(" | "))] for line in text.splitlines()]


def cell(words):
    try:
        return json.loads(words)
    except json.JSONDecodeError:
        return words


def listed():
    """What docs/api.md lists: (module, name), and (module, "") for each module."""
    module, text = "", (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for section, name in re.findall(r"^(?:## `(pflcore[\w.]*)`|- `(\w+)`)", text, re.M):
        module = section or module
        yield module, name


def ran(*words, **options):
    """Another Python with these words, and what it said."""
    options = {"cwd": ROOT, "check": False, **options}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, **options
    )
