"""Step sizes over the rounds, from a function or from a scheduler of torch's: all of them at once,
before the first round."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

Schedule = Callable[[int, int], float] | Callable[[Optimizer], LRScheduler]
WANTED = (
    "schedule: expected a function of (round, rounds) that multiplies lr, or one of an optimizer "
    "that makes a scheduler of torch's, "
    "such as lambda optimizer: CosineAnnealingLR(optimizer, T_max=20)"
)


@lru_cache(maxsize=64)
def rates(schedule: Schedule, lr: float, rounds: int) -> tuple[float, ...]:
    """The step size of each round, 1 to `rounds`. ValueError or TypeError in one sentence where
    `schedule` gives none."""
    if schedule is ReduceLROnPlateau or isinstance(schedule, ReduceLROnPlateau):
        raise _plateau()
    if isinstance(schedule, LRScheduler):
        raise TypeError(f"{WANTED}; got a {type(schedule).__name__} that has an optimizer already.")
    if not callable(schedule):
        raise TypeError(f"{WANTED}; got {schedule!r}.")
    function: Callable[..., Any] = schedule
    rates = (
        _stepped(function, lr, rounds)
        if _takes_one(function)
        else [_factor(function, r, rounds) * lr for r in range(1, rounds + 1)]
    )
    for round, rate in enumerate(rates, 1):
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(
                f"schedule: expected a finite step size >= 0 in every round, got {rate} in round "
                f"{round} of {rounds}."
            )
    return tuple(rates)


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether it takes an optimizer, and not (round, rounds)."""
    if inspect.isclass(function) and issubclass(function, LRScheduler):
        return True
    try:
        signature = inspect.signature(function)
        signature.bind(1, 1)
    except ValueError:  # a builtin that does not say
        return False
    except TypeError:
        return True
    return False


def _factor(function: Callable[..., Any], round: int, rounds: int) -> float:
    try:
        factor = function(round, rounds)
    except Exception as error:
        raise ValueError(
            f"schedule: for round {round} of {rounds} it raised {type(error).__name__}: {error}."
        ) from error
    if not isinstance(factor, Real | torch.Tensor) or (
        isinstance(factor, torch.Tensor) and factor.numel() != 1
    ):
        raise TypeError(f"{WANTED}; in round {round} it gave {type(factor).__name__}.")
    return float(factor)


def _stepped(make: Callable[..., Any], lr: float, rounds: int) -> list[float]:
    """What a scheduler of torch's makes of an optimizer of this step size, one step a round."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    try:
        scheduler = make(optimizer)
    except TypeError as error:
        raise TypeError(f"{WANTED}; calling it with an optimizer said: {error}.") from None
    except (ValueError, KeyError) as error:
        raise ValueError(f"schedule: torch's scheduler was not made: {error}.") from None
    if isinstance(scheduler, ReduceLROnPlateau):
        raise _plateau()
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"{WANTED}; it made {type(scheduler).__name__}.")
    if optimizer.param_groups[0]["momentum"]:
        raise ValueError(
            "schedule: this scheduler of torch's moves the momentum too, which is the run's; give "
            "it cycle_momentum=False."
        )
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that lr_scheduler.step() came before optimizer.step()
        for round in range(1, rounds + 1):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            if round < rounds:
                try:
                    scheduler.step()
                except Exception as error:  # OneCycleLR ends, and a user's list of factors
                    raise ValueError(
                        f"schedule: torch's scheduler ends after round {round} of {rounds}: "
                        f"{error}."
                    ) from None
    return rates


def _plateau() -> ValueError:
    return ValueError(
        "schedule: ReduceLROnPlateau looks at results, and a schedule is fixed before the first "
        "round; use a schedule of the round, "
        "or stop early with pflcore.EarlyStopping and go on with a smaller lr from history.state."
    )
