"""Where the project and its golden values are, for tests in any folder."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def golden(name: str) -> Any:
    """The numbers of tests/golden/NAME.json."""
    return json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())
