"""Tests of random numbers, which depend on their key only."""

import numpy as np
from places import golden

from pflcore.train._random import (
    client_seeds,
    client_shuffles,
    client_uniforms,
    draw_without_replacement,
    seed_of,
)


def test_random_numbers_are_these_on_every_machine():
    """The numbers are written down here.

    They depend on the key only, and not on the machine, the process or Python's hash
    seed.
    """
    seeds = client_seeds(np.array([0, 1, 7]), 0, 3, "fit", 0)
    assert golden("random_numbers") == {
        "seed": seed_of("a", 1, 2.5),
        "seeds": seeds.tolist(),
        "shuffles": client_shuffles(seeds, [5, 4, 3]).tolist(),
        "uniforms": [round(float(v), 7) for v in client_uniforms(seeds, 2).flatten()],
        "4 of 1000": draw_without_replacement(1000, 4, 0, 1, "cohort").tolist(),
        # A draw of a quarter comes from a permutation of all.
        "4 of 16": draw_without_replacement(16, 4, 0, 1, "cohort").tolist(),
    }
