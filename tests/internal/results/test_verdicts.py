"""How often the line on methods that differ is wrong."""

import numpy as np
import pytest

from pflcore.lab.results._verdicts import verdict_lines

pytest.importorskip("scipy")


@pytest.mark.deep("thousands of tables")
@pytest.mark.parametrize("seeds", [3, 5])
def test_equal_methods_are_told_apart_in_one_table_of_twenty_at_most(seeds):
    """Of 5 methods that are equal to the baseline but for noise, in 1,000 tables."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(1000):
        baseline = rng.normal(size=seeds)
        others = rng.normal(
            size=(5, seeds)
        )  # their differences share the baseline's noise
        differences = {str(i): other - baseline for i, other in enumerate(others)}
        (text,) = verdict_lines(differences, "fedavg", True)
        wrong += "better" in text or "worse" in text
    assert wrong <= 65  # 50 are expected at most; 65 is two deviations above
