"""Step sizes over the rounds, from functions and from torch's schedulers."""

import pytest
import torch
from entry_points import sentence
from parts.user import simulation
from small import near
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from pflcore import Training

FACTORS = [1, 0.5, 0.25]


@pytest.mark.parametrize(
    "schedule, rates",
    [
        (lambda optimizer: StepLR(optimizer, 2, 0.5), [0.1, 0.1, 0.05, 0.05]),
        (lambda o: ExponentialLR(o, 0.5), [0.1, 0.05, 0.025, 0.0125]),
        # eta_min is a rate, not a multiplier.
        (lambda o: CosineAnnealingLR(o, T_max=2, eta_min=0.02), [0.1, 0.06, 0.02]),
        # The factors end with the last round: no further step is asked for.
        (lambda o: LambdaLR(o, lambda step: FACTORS[step]), [0.1, 0.05, 0.025]),
        (LinearLR, [0.1 / 3, 0.1 / 3 + 0.1 * 2 / 15]),
        (lambda r, n: 1 - r / n, [0.075, 0.05, 0.025, 0]),
    ],
)
def test_a_schedule_of_torchs_gives_its_rates(schedule, rates):
    training = Training(lr=0.1, schedule=schedule)
    n = len(rates)
    near([training.lr_at(r, n) for r in range(1, n + 1)], rates)


def test_a_run_takes_the_rates():
    def losses(**options):
        training = Training(lr=0.1, batch_size=8, **options)
        run = simulation(training=training).run()
        return [r["eval"]["loss"] for r in run.rounds]

    plain = losses()
    slow = losses(schedule=lambda o: StepLR(o, 1, 0.0))
    assert slow[0] == plain[0] and slow[1] == slow[2]


@pytest.mark.parametrize("name", ["fedavg", "qfedavg", "mocha"])
def test_a_run_asks_its_schedule_once(name):
    """Clients and server know one step size, if the schedule draws another later."""
    asked = []

    def drawn(round, rounds):
        asked.append(round)
        return 0.5 + len(asked) / 100

    training = Training(lr=0.1, batch_size=8, schedule=drawn)
    run = simulation(name, training=training).run()

    assert asked == [1, 2, 3]
    assert not any(record["void"] for record in run.rounds)


OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


@pytest.mark.parametrize(
    "schedule, words",
    [
        (ReduceLROnPlateau, "missing 1 required positional argument: 'metrics'"),
        (ExponentialLR, "missing 1 required positional argument: 'gamma'"),
        (ExponentialLR(OPTIMIZER, 0.5), "got <torch"),
        (lambda o: None, "it made NoneType"),
        (lambda r, n: None, "after round 0 of 3 it raised TypeError: .*NoneType"),
        (
            lambda r, n: -1.0,
            "after round 0 of 3 .*: it gave -0.1, which is no step size",
        ),
        (lambda r, n: 1 / (2 - r), "after round 1 of 3 it raised ZeroDivisionError"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=9), "moves the momentum too"),
        (
            lambda o: OneCycleLR(o, 0.1, total_steps=-9),
            "after round 0 of 3 it raised ValueError",
        ),
        (
            lambda o: LambdaLR(o, lambda step: FACTORS[:2][step]),
            "after round 2 of 3 it raised IndexError: list index out of range",
        ),
        (0.9, "got 0.9"),
    ],
)
def test_what_is_no_schedule_is_said_before_the_first_round(schedule, words):
    with sentence(f"schedule: expected a function of .*{words}"):
        simulation(training=Training(schedule=schedule))
