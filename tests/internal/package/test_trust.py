"""The random numbers are a function of their key, on every machine."""

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
    """Written down once: a function of the key alone, whatever the machine, the process
    and Python's hash seed."""
    seeds = client_seeds(np.array([0, 1, 7]), 0, 3, "fit", 0)
    assert golden("random_numbers") == {
        "seed": seed_of("a", 1, 2.5),
        "seeds": seeds.tolist(),
        "shuffles": client_shuffles(seeds, [5, 4, 3]).tolist(),
        "uniforms": [round(float(v), 7) for v in client_uniforms(seeds, 2).flatten()],
        "4 of 1000": draw_without_replacement(1000, 4, 0, 1, "cohort").tolist(),
        "4 of 16": draw_without_replacement(
            16, 4, 0, 1, "cohort"
        ).tolist(),  # a quarter: all are put in order
    }
