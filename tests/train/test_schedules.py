"""Step sizes over the rounds, from functions and from torch's schedulers."""

import pytest
import torch
from parts.user import simulation
from small import images, tiny_model
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from pflcore import (
    Simulation,
    Training,
)


def test_a_schedule_of_torchs_gives_its_rates():
    def rates(schedule, rounds=4, lr=0.1):
        return [Training(lr=lr, schedule=schedule).lr_at(r, rounds) for r in range(1, rounds + 1)]

    assert rates(lambda optimizer: StepLR(optimizer, 2, 0.5)) == pytest.approx(
        [0.1, 0.1, 0.05, 0.05]
    )
    assert rates(lambda o: ExponentialLR(o, 0.5)) == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    # eta_min is no multiplier
    assert rates(lambda o: CosineAnnealingLR(o, T_max=2, eta_min=0.02), 3) == pytest.approx(
        [0.1, 0.06, 0.02]
    )
    assert rates(lambda o: OneCycleLR(o, 0.4, total_steps=4, cycle_momentum=False))[
        0
    ] == pytest.approx(0.4 / 25)
    with pytest.raises(ValueError, match="schedule: torch's scheduler ends after round 4 of 5"):
        rates(lambda o: OneCycleLR(o, 0.4, total_steps=3, cycle_momentum=False), 5)
    factors = [1, 0.5, 0.25]
    # no step beyond the last
    assert rates(lambda o: LambdaLR(o, lambda step: factors[step]), 3) == pytest.approx(
        [0.1, 0.05, 0.025]
    )
    with pytest.raises(
        ValueError,
        match="schedule: torch's scheduler ends after round 3 of 4: list index out of range",
    ):
        rates(lambda o: LambdaLR(o, lambda step: factors[step]))
    assert rates(lambda r, n: 1 - r / n) == pytest.approx([0.075, 0.05, 0.025, 0])
    a = simulation().run()
    slow = Simulation(
        "fedavg",
        tiny_model(),
        images(),
        Training(lr=0.1, batch_size=8, schedule=lambda o: StepLR(o, 1, 0.0)),
        rounds=3,
    ).run()
    assert (
        slow.rounds[0]["eval"] == a.rounds[0]["eval"]
        and slow.rounds[1]["eval"] == slow.rounds[2]["eval"]
    )


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (ReduceLROnPlateau, "ReduceLROnPlateau looks at results"),
        (lambda o: ReduceLROnPlateau(o), "ReduceLROnPlateau looks at results"),
        (
            ExponentialLR,
            "expected a function of .* missing 1 required positional argument: 'gamma'",
        ),
        (
            ExponentialLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), 0.5),
            "got a ExponentialLR that has an optimizer",
        ),
        (lambda o: None, "it made NoneType"),
        (lambda r, n: None, "in round 1 it gave NoneType"),
        (
            lambda r, n: -1.0,
            "expected a finite step size >= 0 in every round, got -0.1 in round 1 of 3",
        ),
        (lambda r, n: 1 / (r - 2), "for round 2 of 3 it raised ZeroDivisionError"),
        (
            lambda o: OneCycleLR(o, 0.1, total_steps=9),
            "this scheduler of torch's moves the momentum too",
        ),
        (lambda o: OneCycleLR(o, 0.1, total_steps=-9), "torch's scheduler was not made"),
        (0.9, "expected a function of"),
    ],
)
def test_what_is_no_schedule_is_said_before_the_first_round(schedule, sentence):
    with pytest.raises(
        (ValueError, TypeError), match=f"^schedule: .*{sentence}|^schedule: {sentence}"
    ):
        Simulation("fedavg", tiny_model(), images(), Training(schedule=schedule), rounds=3)
