"""The interval of a client's difference to a baseline."""

import numpy as np
import pytest

from pflcore.lab.results.clients import bootstrap_mean

pytest.importorskip("scipy")


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([1.0] * 8 + [0.0] * 12, "helped"),
        ([-1.0] * 8 + [0.0] * 12, "hurt"),
        ([1.0, -1.0] * 10, "undecided"),
        ([0.0] * 20, "undecided"),
        ([1.0] + [0.0] * 19, "undecided"),
    ],
)
def test_a_verdict_needs_an_interval_without_0(differences, verdict):
    assert bootstrap_mean(np.array(differences)).verdict == verdict
