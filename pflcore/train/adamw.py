"""AdamW on the rows of many clients at once."""

from __future__ import annotations

from torch import Tensor

from pflcore.train.training import Training


class AdamW:
    """Loshchilov and Hutter 2019, Algorithm 2, as `torch.optim.AdamW` has it: one for each row of `rows` [s, Q]."""

    def __init__(self, training: Training, rows: Tensor) -> None:
        self.training = training
        self.moments = rows.new_zeros(len(rows), 2 * rows.shape[1] + 1)  # mean gradient, mean square, steps taken

    def step(
        self,
        s: slice,  # the clients that take it
        w: Tensor,  # [s, Q], changed
        grad: Tensor,  # [s, Q]
        lr: float,
        mask: Tensor | None,  # [Q] or [s, Q]
    ) -> None:
        """`w -= lr * mask * (mean / (sqrt(square) + eps) + weight_decay * w)`, the two moments with their bias corrected."""
        (first, second), q = self.training.betas, w.shape[1]
        mean, square, steps = self.moments[s].split([q, q, 1], 1)
        steps += 1
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        whole = [(1 - beta ** steps.double()).to(w) for beta in (first, second)]  # in float32, 1 - beta would lose its digits
        move = mean / (square.sqrt().div_(whole[1].sqrt()).add_(self.training.eps).mul_(whole[0]))
        if self.training.weight_decay:
            move.add_(w, alpha=self.training.weight_decay)
        w.sub_(move.mul_(lr) if mask is None else move.mul_(lr).mul_(mask))
