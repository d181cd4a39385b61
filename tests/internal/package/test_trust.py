"""That what the project says of its own tests is so: named tests exist, and no entry of the table
of faults is stale."""

import numpy as np

from pflcore.train.random import client_seeds, drawn, seed_of, shuffles, uniforms

SEED = 8626582519606759105
SEEDS = [11013291964905100358, 1547676624251085901, 2235132555019676639]
SHUFFLES = [[2, 1, 0, 3, 4], [2, 3, 0, 1, 0], [2, 0, 1, 0, 0]]
UNIFORMS = [0.655553, 0.6287912, 0.5102757, 0.8312893, 0.8451769, 0.9895298]
DRAWN = [245, 302, 253, 125]


def test_random_numbers_are_these_on_every_machine():
    """Written down once: a function of the key alone, whatever the machine, the process and
    Python's hash seed."""
    assert seed_of("a", 1, 2.5) == SEED
    seeds = client_seeds(np.array([0, 1, 7]), 0, 3, "fit", 0)
    assert seeds.tolist() == SEEDS
    assert shuffles(seeds, [5, 4, 3]).tolist() == SHUFFLES
    assert [round(float(v), 7) for v in uniforms(seeds, 2).flatten()] == UNIFORMS
    assert drawn(1000, 4, 0, 1, "cohort").tolist() == DRAWN
    # a quarter of them: all are put in order
    assert drawn(16, 4, 0, 1, "cohort").tolist() == [3, 4, 0, 9]
