"""The options of local training, and the step size of every round.

A schedule gives the step size of every round: a function, or a scheduler of torch,
which a run plays from the first round to the last before it needs the first of them.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from numbers import Real
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pflcore.check import (
    Expectation,
    Momentum,
    NonNegativeFloat,
    OnCommandLine,
    PositiveFloat,
    PositiveInt,
    check_fields,
    import_object,
    require,
    require_arguments,
)
from pflcore.train._random import generator_of
from pflcore.train._transforms import (
    AUGMENT_TEXT,
    AugmentFunction,
    augment_entries,
    is_augment,
)

RoundSchedule = Callable[[int, int], float]  # (round, rounds) -> factor of lr
SchedulerMaker = Callable[[Optimizer], LRScheduler]
SCHEDULE_TEXT = (
    "a function of (round, rounds) that multiplies lr, or one of an optimizer that "
    "makes a scheduler of torch's, such as lambda optimizer: "
    "CosineAnnealingLR(optimizer, T_max=20)"
)
Schedule = Annotated[
    RoundSchedule | SchedulerMaker, Expectation(SCHEDULE_TEXT, callable)
]
SCHEDULE_NAMES = "cosine, linear, step:ROUNDS:FACTOR or package.module:function"


def _is_schedule_name(value: Any) -> bool:
    """True for the name of a schedule, or for the place of a function."""
    return isinstance(value, str) and (value in ("cosine", "linear") or ":" in value)


ScheduleName = Annotated[str, Expectation(SCHEDULE_NAMES, _is_schedule_name)]
# (round, client, generator) -> steps
StepsRule = Callable[[int, int, torch.Generator], int]
STEPS_RULE_TEXT = (
    "a function of (round, client, generator) that returns a whole number, at least 1"
)
STEPS_TEXT = (
    "a whole number, at least 1, a function of (round, client, generator) that returns "
    "one, or where one is: 'package.module:function'"
)


def _are_steps(value: Any) -> bool:
    """True for a number of steps, a function, or the place of a function."""
    if isinstance(value, str):
        return ":" in value
    return callable(value) or _is_count(value)


def _is_count(value: Any) -> bool:
    """True for a whole number, at least 1, that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


Steps = Annotated[int | str | StepsRule, Expectation(STEPS_TEXT, _are_steps)]
Precision = Literal["bf16"] | None
Augment = Annotated[
    str | AugmentFunction | Sequence[str | AugmentFunction],
    Expectation(AUGMENT_TEXT, is_augment),
    OnCommandLine(tuple[str, ...] | None),
]
# The defaults of `torch.optim.AdamW`.
DEFAULT_BETAS = (0.9, 0.999)
DEFAULT_EPS = 1e-8


def _are_betas(value: Any) -> bool:
    """True for a pair of numbers from 0 to below 1."""
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    return is_pair and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


def _is_number(value: Any) -> bool:
    """True for a real number that is no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


Betas = Annotated[
    tuple[float, float], Expectation("two numbers from 0 to below 1", _are_betas)
]


def schedule_of(name: str) -> Schedule:
    """The schedule of a name, or the function "package.module:function".

    "cosine" and "linear" go from 1 in round 1 towards 0. "step:30:0.1" multiplies the
    step size by 0.1 after every 30 rounds. Raises ValueError for another name.
    """
    if name == "cosine":
        return lambda round, rounds: (1 + math.cos(math.pi * (round - 1) / rounds)) / 2
    if name == "linear":
        return lambda round, rounds: 1 - (round - 1) / rounds
    if not name.startswith("step:"):
        function: Schedule = import_object(name, "schedule")
        return function
    every = 0
    factor = 1.0
    with suppress(ValueError):
        _, every_text, factor_text = name.split(":")
        factor = float(factor_text)
        every = int(every_text)
    words = "rounds and a factor, such as step:30:0.1"
    require(every > 0, "schedule", words, name)
    return lambda round, rounds: factor ** ((round - 1) // every)


def learning_rates(
    schedule: Schedule | str, lr: float, rounds: int
) -> tuple[float, ...]:
    """The step sizes of the rounds 1 to `rounds`.

    Raises ValueError where `schedule` fails, or gives a number that is no step size.
    """
    if isinstance(schedule, str):
        schedule = schedule_of(schedule)
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
        if _makes_scheduler(schedule) and not inspect.isclass(schedule):
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
    if not _makes_scheduler(function):
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


def _makes_scheduler(function: Callable[..., Any]) -> bool:
    """True where a schedule takes an optimizer, and not (round, rounds)."""
    try:
        inspect.signature(function).bind(1, 1)
    except TypeError:
        return True
    # Most classes of schedulers take more arguments than the optimizer.
    return inspect.isclass(function)


class KeptSchedule:
    """A schedule whose step sizes are kept: it may give others when asked again.

    So the clients and the server of a run have the same ones.

    Args:
        schedule: The schedule, or its name.
    """

    def __init__(self, schedule: Schedule | str) -> None:
        self.schedule = schedule
        self._step_sizes: dict[tuple[float, int], tuple[float, ...]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """The answer of the schedule itself."""
        assert callable(self.schedule)
        return self.schedule(*arguments)

    def step_sizes(self, lr: float, rounds: int) -> tuple[float, ...]:
        """The step sizes of the rounds 1 to `rounds`."""
        key = (lr, rounds)
        if key not in self._step_sizes:
            self._step_sizes[key] = learning_rates(self.schedule, lr, rounds)
        return self._step_sizes[key]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Context of the forward pass and the loss of a step in this precision."""
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Training:
    """Options of local training, which are the same for every client.

    They belong to the run, not to an algorithm. An algorithm adds its terms to the
    gradient after clipping, and before the optimizer sees it. Columns that the
    algorithm masks never move. An algorithm whose formula holds for SGD's steps alone
    rejects AdamW.

    Args:
        lr: Step size of round 1, and without a schedule that of all rounds. AdamW needs
            one that is some hundred times smaller than that of SGD.
        batch_size: Samples of a minibatch.
        epochs: Local epochs of a round.
        momentum: Momentum of SGD, from 0 to below 1. Its buffer starts at zero in every
            round. With AdamW, a momentum above 0 is an error.
        weight_decay: Number >= 0. SGD adds weight_decay * w to the gradient. The decay
            of AdamW is decoupled from the gradient. It shrinks all weights that are
            trained, also those that the forward pass does not use, which torch's
            optimizers leave alone; `requires_grad_(False)` keeps them as they are.
        drop_last: Leave out the last minibatch where it is smaller than the others.
            Otherwise one of a single sample, on which a model (batch norm) cannot
            train, joins the one before it.
        reshuffle: Shuffle the samples anew in every epoch; False: one order of the
            samples for the whole run.
        schedule: Step sizes of the rounds: cosine or linear (from lr towards 0),
            step:30:0.1 (times 0.1 after every 30 rounds), or package.module:function.
            In Python also a function of (round, rounds), whose
            result multiplies lr, or a function of an optimizer that makes a scheduler
            of torch, such as `lambda optimizer: CosineAnnealingLR(optimizer,
            T_max=20)`. The scheduler takes one step a round.
        local_optimizer: Optimizer of each client. The moments of AdamW start at zero in
            every round. Its formula is that of `torch.optim.AdamW`.
        clip_grad: Largest Euclidean norm of a minibatch's gradient; a longer gradient
            is shortened to it. None: gradients of any length.
        betas: Decay rates of AdamW's means of the gradient and of its square, two
            numbers from 0 to below 1; None: 0.9 and 0.999.
        eps: Number that AdamW adds to the root of the mean square; None: 1e-8.
        steps: Local steps of each client in a round, in place of epochs: a whole
            number, at least 1, or a function of (round, client, generator) that returns
            one, or its place "package.module:function". So clients that are slow take
            fewer steps (stragglers). The function must draw by the generator alone,
            which depends on the seed, the round and the client. A hook that trains for
            epochs of its own, such as `finetune_epochs`, takes those.
        precision: "bf16" computes the forward passes and losses of local steps under
            `torch.autocast` with bfloat16. Weights, gradients and the optimizer's state
            stay in float32, and so does evaluation. None: the model's own dtype.
        augment: Random changes of the samples of every minibatch in the rounds'
            training, one after another. "flip" or "flip:P" mirrors an image left to
            right with probability P (0.5), "crop:PIXELS" takes a window of the image
            with a border of zeros (4), "cutout:PIXELS" puts a square of zeros into it
            (16). A function of (batch, generator) returns a batch of the same shape:
            samples [B, ...] of one client, and a `torch.Generator` on their device. Its
            place "package.module:function" will do.
            Evaluation, what trains in it, and `History.adapt` take samples as they are.
    """

    lr: NonNegativeFloat = 0.1
    batch_size: PositiveInt = 32
    epochs: PositiveInt = 1
    momentum: Momentum = 0.0
    weight_decay: NonNegativeFloat = 0.0
    drop_last: bool = False
    reshuffle: bool = True
    schedule: Schedule | ScheduleName | None = None
    local_optimizer: Literal["sgd", "adamw"] = "sgd"
    clip_grad: PositiveFloat | None = None
    betas: Betas | None = None
    eps: PositiveFloat | None = None
    steps: Steps | None = None
    precision: Precision = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        # A list would have no hash, which a frozen dataclass needs.
        object.__setattr__(self, "augment", self.transforms or None)
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
        if isinstance(self.steps, str):
            steps = import_object(self.steps, "steps")
            fits = not isinstance(steps, str) and _are_steps(steps)
            require(fits, "steps", STEPS_TEXT, steps)
            object.__setattr__(self, "steps", steps)
        if callable(self.steps):
            require_arguments("steps", self.steps, STEPS_RULE_TEXT, 3)
        if self.steps is not None and self.epochs != 1:
            raise ValueError(
                f"epochs: steps takes their place, got epochs={self.epochs}; leave one "
                "of them out."
            )

    def steps_of(self, round: int, ids: Tensor, seed: int) -> Tensor | None:
        """The steps [S] of the clients `ids` in a round; None where epochs count.

        Raises ValueError where a function returns no whole number, at least 1.
        """
        if self.steps is None:
            return None
        if not callable(self.steps):
            return torch.full((len(ids),), int(self.steps))
        counts = []
        for client in ids.tolist():
            generator = generator_of(seed, round, client, "steps")
            count: Any = self.steps(round, client, generator)
            if hasattr(count, "item"):
                count = count.item()
            name = f"steps, of client {client} in round {round}"
            require(_is_count(count), name, "a whole number, at least 1", count)
            counts.append(count)
        return torch.tensor(counts)

    @property
    def transforms(self) -> tuple[str | AugmentFunction, ...]:
        """The names and functions in `augment`, in their order."""
        return augment_entries(self.augment)

    @property
    def gradient_decay(self) -> float:
        """The weight decay that is added to gradients: SGD's, not AdamW's."""
        return self.weight_decay if self.local_optimizer == "sgd" else 0.0

    def step_sizes(self, rounds: int) -> tuple[float, ...]:
        """The step sizes of the rounds 1 to `rounds`.

        The schedule is asked anew by each call, but that of `with_kept_schedule`.
        """
        if self.schedule is None:
            return (self.lr,) * rounds
        if isinstance(self.schedule, KeptSchedule):
            return self.schedule.step_sizes(self.lr, rounds)
        return learning_rates(self.schedule, self.lr, rounds)

    def with_kept_schedule(self) -> Training:
        """The same options, which ask their schedule once."""
        if self.schedule is None:
            return self
        return replace(self, schedule=KeptSchedule(self.schedule))

    def lr_at(self, round: int, rounds: int) -> float:
        """The step size of `round` (from 1) of `rounds`."""
        if self.schedule is None:
            return self.lr
        return self.step_sizes(max(round, rounds))[round - 1]
