"""What the tests of checkpoint share."""

import warnings
from typing import Any

from small import grouped, images, tiny_model

from pflcore import Simulation, Stop, Training

DATA = images((8, 20, 30, 9, 12))
TRAINING = Training(lr=0.1, batch_size=5)
OPTIONS: dict[str, Any] = {"rounds": 4, "participation": 0.6}


def make(algorithm="fedavg", **options):
    given = {"model": tiny_model(), "data": DATA, "training": TRAINING}
    return Simulation(algorithm, **grouped({**given, **OPTIONS, **options}))


def broken_off(simulation, after):
    """Plays so many rounds and stops."""

    def stop(round, _):
        if round == after:
            raise Stop("Enough.")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulation.run(stop)


def saved(folder, after=2, **options):
    simulation = make(**options)
    broken_off(simulation, after)
    simulation.save(folder)
    return folder
