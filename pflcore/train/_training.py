"""The options of local training, and the step size of every round.

All step sizes are computed before the first round, from a function or from a scheduler
of torch.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Annotated, Any, Literal

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pflcore.check import (
    Expectation,
    Momentum,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_fields,
)

Schedule = Callable[[int, int], float] | Callable[[Optimizer], LRScheduler]
SCHEDULE_TEXT = (
    "a function of (round, rounds) that multiplies lr, or one of an optimizer that "
    "makes a scheduler of torch's, such as lambda optimizer: "
    "CosineAnnealingLR(optimizer, T_max=20)"
)
DEFAULT_BETAS = (0.9, 0.999)
DEFAULT_EPS = 1e-8  # AdamW's, as torch has them by default


def _are_betas(value: Any) -> bool:
    pair = isinstance(value, tuple | list) and len(value) == 2
    numbers = pair and all(
        isinstance(b, Real) and not isinstance(b, bool) for b in value
    )
    return bool(numbers) and all(0 <= b < 1 for b in value)


Betas = Annotated[
    tuple[float, float], Expectation("two numbers from 0 to below 1", _are_betas)
]


@lru_cache(maxsize=64)
def learning_rates(schedule: Schedule, lr: float, rounds: int) -> tuple[float, ...]:
    """The step size of each round, 1 to `rounds`.

    Raises ValueError in one sentence where `schedule` gives none.
    """
    rates: list[float] = []
    try:
        for rate in _learning_rates(schedule, lr, rounds):
            if not 0 <= float(rate) < math.inf:
                raise ValueError(f"it gave {float(rate)}, which is no step size")
            rates.append(float(rate))
    except Exception as error:
        # A user's code may raise anything. OneCycleLR, for example, ends after some
        # rounds, and so does a list of factors.
        hint = ""
        if _takes_one(schedule) and not inspect.isclass(schedule):
            hint = (
                "; a function of one argument is given an optimizer, so of the round "
                "alone write lambda round, rounds: ..."
            )
        raise ValueError(
            f"schedule: expected {SCHEDULE_TEXT}; after round {len(rates)} of {rounds} "
            f"it raised {type(error).__name__}: {str(error).rstrip('.')}{hint}."
        ) from error
    return tuple(rates)


def _learning_rates(
    function: Callable[..., Any], lr: float, rounds: int
) -> Iterator[Any]:
    """The step sizes, round by round, as the user's function gives them."""
    if not _takes_one(function):
        for round in range(1, rounds + 1):
            yield float(function(round, rounds)) * lr
        return
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = function(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"it made {type(scheduler).__name__}")
    if optimizer.param_groups[0]["momentum"]:
        raise ValueError(
            "this scheduler of torch's moves the momentum too, which is the run's; "
            "give it cycle_momentum=False"
        )
    with warnings.catch_warnings():
        # torch warns that lr_scheduler.step() came before optimizer.step().
        warnings.simplefilter("ignore")
        for round in range(rounds):
            yield optimizer.param_groups[0]["lr"]
            if round + 1 < rounds:
                scheduler.step()


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a schedule takes one argument, an optimizer, and not (round, rounds)."""
    try:
        inspect.signature(function).bind(1, 1)
    except TypeError:
        return True
    return inspect.isclass(function)


@dataclass(frozen=True)
class Training:
    """How every client trains. These options belong to the run, not to an algorithm.

    `lr` is the step size of round 1, and without a `schedule` of all rounds. A
    `schedule` is one of these:

    - a function of (round, rounds), whose result multiplies `lr`
    - a function of an optimizer that makes a scheduler of torch, which takes one step a
      round: `lambda optimizer: CosineAnnealingLR(optimizer, T_max=20)`

    `local_optimizer` is SGD or AdamW; its moments start at zero in every round. AdamW
    has the formula of `torch.optim.AdamW` with its `betas` and `eps`. Its weight decay
    is decoupled from the gradient, and it needs an lr some hundred times smaller.

    A method adds its terms to the gradient after clipping, and before the optimizer
    sees it. Columns that it masks never move. A method whose formula holds for SGD's
    steps alone rejects AdamW in one sentence.
    """

    # step size of round 1
    lr: NonNegativeFloat = 0.1
    # samples of a minibatch
    batch_size: PositiveInt = 32
    # local epochs of a round
    epochs: PositiveInt = 1
    momentum: Momentum = 0.0  # its buffer starts at zero in every round
    # added to the gradient as weight_decay * w; AdamW: decoupled
    weight_decay: NonNegativeFloat = 0.0
    # leave out the last minibatch where it is smaller than the others; one of a single
    # sample, on which a model (batch norm) cannot train, joins the one before it
    drop_last: bool = False
    reshuffle: bool = True  # False: one order of the samples for the whole run
    schedule: Annotated[Schedule, Expectation(SCHEDULE_TEXT, callable)] | None = None
    local_optimizer: Literal["sgd", "adamw"] = "sgd"  # of each client
    # no minibatch's gradient is longer (Euclidean norm); None: any
    clip_grad: PositiveFloat | None = None
    betas: Betas | None = None  # AdamW's, of mean and square; None: 0.9 and 0.999
    eps: PositiveFloat | None = None  # AdamW's; None: 1e-8

    def __post_init__(self) -> None:
        check_fields(self)
        if self.local_optimizer == "adamw" and self.momentum:
            raise ValueError(
                f"momentum: AdamW has betas in its place, got {self.momentum}; leave "
                "momentum out, or take SGD."
            )
        if self.betas is not None:
            object.__setattr__(self, "betas", tuple(map(float, self.betas)))
        for name in ("betas", "eps"):
            value = getattr(self, name)
            if self.local_optimizer == "sgd" and value is not None:
                raise ValueError(
                    f"{name}: SGD has none, got {value}; leave it out, or take "
                    "local_optimizer='adamw'."
                )

    @property
    def gradient_decay(self) -> float:
        """The weight decay that is a part of the gradient, which AdamW's is not."""
        return self.weight_decay if self.local_optimizer == "sgd" else 0.0

    def lr_at(self, round: int, rounds: int) -> float:
        """The step size of `round` (from 1) of `rounds`."""
        if self.schedule is None:
            return self.lr
        rates = learning_rates(self.schedule, self.lr, max(round, rounds))
        return rates[round - 1]
