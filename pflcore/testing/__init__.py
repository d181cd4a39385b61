"""Checks of an algorithm or an op of one's own.

`check(MyAlgorithm())` checks that an algorithm keeps its contract, and `check_op` that
an op does what its reference in plain torch does. The first fault ends the checks with
one sentence that describes it. `CHECKS` has the checks of an algorithm by name, and the
docstring of each is the property that it tests.
"""

from pflcore.testing._case import Case
from pflcore.testing._checks import CHECKS, check
from pflcore.testing._faults import Fault
from pflcore.testing._op import check_op

__all__ = ["CHECKS", "Case", "Fault", "check", "check_op"]
