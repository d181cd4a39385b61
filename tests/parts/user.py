"""Simulations as a user starts them, with short defaults."""

from small import grouped, images, tiny_model

from pflcore import FedAvg, Simulation, Training

TRAINING = Training(lr=0.1, batch_size=8)


class Mine(FedAvg):
    pass


def simulation(algorithm="fedavg", data=None, **options):
    settings = {
        "model": tiny_model(),
        "data": images() if data is None else data,
        "rounds": 3,
    }
    return Simulation(
        algorithm, **grouped({**settings, "training": TRAINING, **options})
    )
