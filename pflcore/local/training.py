"""How every client trains."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

from pflcore.local.schedules import Schedule, rates
from pflcore.ops import kinds

FINITE = sys.float_info.max


@kinds.takes(
    lr=kinds.number(0, FINITE, "a finite number >= 0"),
    batch_size=kinds.whole(1),
    epochs=kinds.whole(1),
    momentum=kinds.number(0, math.nextafter(1, 0), "0 <= momentum < 1"),
    weight_decay=kinds.number(0, FINITE, "a finite number >= 0"),
    schedule=kinds.Kind("a function of (round, rounds) or of an optimizer", lambda v: callable(v) or hasattr(v, "optimizer")),
    betas=kinds.many(kinds.number(0, math.nextafter(1, 0)), "two numbers in [0, 1)"),
    eps=kinds.number(0, FINITE, "a finite number >= 0"),
    clip_grad=kinds.POSITIVE,
)
@dataclass(frozen=True)
class Training:
    """How every client trains; the run's, not an algorithm's.

    `lr` is the step size of round 1 (default schedule: of all rounds). `schedule` is a function of (round, rounds), which multiplies it, or
    one of an optimizer that makes a scheduler of torch's: `lambda optimizer: CosineAnnealingLR(optimizer, T_max=20)`, one step a round.
    Its optimizer is SGD or AdamW (`torch.optim.AdamW`'s formula; weight decay is then decoupled from the gradient, and lr wants to be some
    hundred times smaller); its moments start at zero in every round. What a method adds to the gradient is added before the optimizer sees
    it, and after clipping; columns that it masks never move. A method whose formula rests on SGD's steps refuses AdamW in one sentence.
    """

    lr: float = 0.1
    batch_size: int = 32
    epochs: int = 1
    momentum: float = 0.0  # its buffer starts at zero in every round
    weight_decay: float = 0.0
    drop_last: bool = False
    join_last: bool = True  # where a model (batch norm) cannot train on one sample, a last batch of one joins the one before it
    reshuffle: bool = True  # False: one order of the samples for the whole run
    schedule: Schedule | None = None
    local_optimizer: Literal["sgd", "adamw"] = "sgd"  # of each client
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's, of the mean gradient and of the mean square
    eps: float = 1e-8  # AdamW's, added to the root of the mean square
    clip_grad: float | None = None  # no minibatch's gradient is longer (Euclidean norm); None: any

    def __post_init__(self) -> None:
        if self.local_optimizer not in ("sgd", "adamw"):
            raise ValueError(f"local_optimizer: expected 'sgd' or 'adamw', got {self.local_optimizer!r}.")
        if len(self.betas) != 2:
            raise ValueError(f"betas: expected two numbers in [0, 1), got {self.betas}.")
        if self.local_optimizer == "sgd" and (self.betas, self.eps) != ((0.9, 0.999), 1e-8):
            raise ValueError(f"betas, eps: SGD has none, got {self.betas} and {self.eps}; leave them out, or take local_optimizer='adamw'.")
        if self.local_optimizer == "adamw" and self.momentum:
            raise ValueError(f"momentum: AdamW has betas in its place, got {self.momentum}; leave momentum out, or take SGD.")

    @property
    def gradient_decay(self) -> float:
        """The weight decay that is a part of the gradient: AdamW's is none."""
        return self.weight_decay if self.local_optimizer == "sgd" else 0.0

    def lr_at(self, round: int, rounds: int) -> float:
        """The step size of `round` (from 1) of `rounds`."""
        return self.lr if self.schedule is None else rates(self.schedule, self.lr, max(round, rounds))[round - 1]
