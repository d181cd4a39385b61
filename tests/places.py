"""Where the project and its golden values are, for tests in any folder."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def golden(name):
    """The numbers of tests/golden/NAME.json."""
    return json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())
