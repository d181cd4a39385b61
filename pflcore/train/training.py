"""How every client trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pflcore.check import Count, Kind, Momentum, NonNegative, Positive, check_fields, of_hint
from pflcore.train.schedules import Schedule, rates

SCHEDULE = Kind(
    "a function of (round, rounds) or of an optimizer",
    lambda v: callable(v) or hasattr(v, "optimizer"),
)
BETAS = Kind(
    "two numbers in [0, 1)",
    lambda v: (
        isinstance(v, tuple | list) and len(v) == 2 and all(of_hint(Momentum).fits(b) for b in v)
    ),
)


@dataclass(frozen=True)
class Training:
    """How every client trains; the run's, not an algorithm's.

    `lr` is the step size of round 1 (default schedule: of all rounds). `schedule` is a function of
    (round, rounds), which multiplies it, or one of an optimizer that makes a scheduler of torch's:
    `lambda optimizer: CosineAnnealingLR(optimizer, T_max=20)`, one step a round. Its optimizer is
    SGD or AdamW (`torch.optim.AdamW`'s formula; weight decay is then decoupled from the gradient,
    and lr wants to be some hundred times smaller); its moments start at zero in every round. What a
    method adds to the gradient is added before the optimizer sees it, and after clipping; columns
    that it masks never move. A method whose formula rests on SGD's steps refuses AdamW in one
    sentence.
    """

    # step size of round 1
    lr: NonNegative = 0.1
    # samples of a minibatch
    batch_size: Count = 32
    # local epochs of a round
    epochs: Count = 1
    momentum: Momentum = 0.0  # its buffer starts at zero in every round
    # added to the gradient as weight_decay * w; AdamW: decoupled
    weight_decay: NonNegative = 0.0
    # leave out the last minibatch where it is smaller than the others
    drop_last: bool = False
    # where a model (batch norm) cannot train on one sample, a last batch of one joins the one
    # before it
    join_last: bool = True
    reshuffle: bool = True  # False: one order of the samples for the whole run
    schedule: Annotated[Schedule, SCHEDULE] | None = None
    local_optimizer: Literal["sgd", "adamw"] = "sgd"  # of each client
    # AdamW's, of the mean gradient and of the mean square
    betas: Annotated[tuple[float, float], BETAS] = (0.9, 0.999)
    eps: NonNegative = 1e-8  # AdamW's, added to the root of the mean square
    # no minibatch's gradient is longer (Euclidean norm); None: any
    clip_grad: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.local_optimizer == "sgd" and (self.betas, self.eps) != ((0.9, 0.999), 1e-8):
            raise ValueError(
                f"betas, eps: SGD has none, got {self.betas} and {self.eps}; leave them out, or "
                "take local_optimizer='adamw'."
            )
        if self.local_optimizer == "adamw" and self.momentum:
            raise ValueError(
                f"momentum: AdamW has betas in its place, got {self.momentum}; leave momentum out, "
                "or take SGD."
            )

    @property
    def gradient_decay(self) -> float:
        """The weight decay that is a part of the gradient: AdamW's is none."""
        return self.weight_decay if self.local_optimizer == "sgd" else 0.0

    def lr_at(self, round: int, rounds: int) -> float:
        """The step size of `round` (from 1) of `rounds`."""
        return (
            self.lr
            if self.schedule is None
            else rates(self.schedule, self.lr, max(round, rounds))[round - 1]
        )
