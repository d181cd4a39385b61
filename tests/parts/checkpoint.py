"""Shared data and runs of the tests of checkpoints."""

import warnings
from typing import Any

from parts.user import simulation
from small import images

from pflcore import Stop, Training

DATA = images((8, 20, 30, 9, 12))
TRAINING = Training(lr=0.1, batch_size=5)
OPTIONS: dict[str, Any] = {"rounds": 4, "participation": 0.6}


def make(algorithm="fedavg", **options):
    return simulation(
        algorithm, **{"data": DATA, "training": TRAINING, **OPTIONS, **options}
    )


def broken_off(run, after):
    """Plays `after` rounds of a run, then stops it."""

    def stop(round, _):
        if round == after:
            raise Stop("Enough.")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run.run(stop)


def saved(folder, after=2, **options):
    run = make(**options)
    broken_off(run, after)
    run.save(folder)
    return folder
