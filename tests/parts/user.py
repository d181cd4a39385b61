"""What the tests of user share."""

from small import grouped, images, tiny_model

from pflcore import FedAvg, Simulation, Training

TRAINING = Training(lr=0.1, batch_size=8)


class Mine(FedAvg):
    pass


def simulation(algorithm="fedavg", data=None, **options):
    return Simulation(
        algorithm,
        tiny_model(),
        images() if data is None else data,
        TRAINING,
        **grouped({"rounds": 3, **options}),
    )
