"""Checks that an algorithm keeps its contract: `pflcore.testing.check(MyAlgorithm())`.

The first fault ends the checks with one sentence that describes it. `CHECKS` has the
checks by name, and the docstring of each is the property that it tests.
"""

from pflcore.testing._case import Case
from pflcore.testing._checks import CHECKS, check
from pflcore.testing._faults import Fault

__all__ = ["CHECKS", "Case", "Fault", "check"]
