"""Fine-tuning: everybody starts from the shared model and trains on, on their own data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflcore.algorithms.base import Payload, Tensors
from pflcore.algorithms.fedopt import FedOpt
from pflcore.data.ragged import onto
from pflcore.metrics import right
from pflcore.ops.kinds import NonNegative, Whole
from pflcore.train import Local
from pflcore.train.net import Net

Choose = Literal["fixed", "global", "client"]


@dataclass(frozen=True)
class FineTune(FedOpt):
    """FedAvg + fine-tuning (Wang et al. 2019; Yu et al. 2020; Motley, section 4.1).

    server: x [P] and the optimizer's state · client: nothing · down: x (1 model) · up: delta (1 model). Trains as `FedOpt`; every
    evaluation fine-tunes x on each client's training data by the run's optimizer, all layers or the last one, and throws the result away.
    `choose="fixed"` takes `finetune_epochs` epochs. "client" and "global" try each step size of `lr_grid` with 1 .. `finetune_epochs`
    epochs and keep what is best on the clients' validation split, for each client or for all clients together (mean over clients); ties
    go to the earlier candidate, 0 epochs first. A client without validation samples takes what is best for all the others together.
    Momentum and AdamW's moments start at zero in every epoch.
    Acceptance (the remark of section 4.1): a client with less than `min_size` samples, or whose validation value does not beat x's by more
    than `margin` (without validation samples it cannot), keeps x.
    """

    late: ClassVar[tuple[str, ...]] = (
        "finetune_lr",
        "finetune_epochs",
        "layers",
        "choose",
        "lr_grid",
        "zero",
        "min_size",
        "margin",
    )

    mu: NonNegative = 0.0  # FedProx's pull towards x while x is trained: FedProx + fine-tuning
    finetune_lr: NonNegative | None = None  # step size; default: the run's
    finetune_epochs: Whole = 5  # epochs, or the most that are tried
    layers: str = "all"  # "all", "last", or a pattern of parameter names such as "fc*"
    choose: Choose = "fixed"
    lr_grid: tuple[float, ...] = ()  # step sizes to choose from; default: finetune_lr alone
    zero: bool = True  # no fine-tuning is a candidate too (Motley's silo code: not)
    min_size: Whole = 0  # clients with fewer training samples keep x
    margin: float | None = None  # by how much a tuned model must beat x on the validation split

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choose != "fixed" and self.finetune_epochs < 1:
            raise ValueError(f"finetune_epochs: expected at least 1 to choose from, got {self.finetune_epochs}.")
        if self.choose == "fixed" and self.lr_grid:
            raise ValueError("lr_grid: nothing chooses from it with choose='fixed'; set finetune_lr, or choose='client' or 'global'.")

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        x = down["x"]
        return own, {"delta": local.fit(x, prox=(self.mu, x) if self.mu else None).w.sub_(x)}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        x, buffers = down["x"], local.buffers.clone()
        mask = layer_mask(local.net, self.layers)
        keep = onto(local.size, x.device) < self.min_size
        before = None if self.margin is None else value(local, x)
        if self.choose == "fixed":
            w = x
            for _, _, w in lengths(local, x, (self.finetune_lr,), self.finetune_epochs, mask):  # noqa: B007
                pass
        else:
            w = self.chosen(x, local, mask)
        if before is not None and self.margin is not None:
            keep = keep | ~(value(local, w) > before + self.margin)
        local.buffers = torch.where(keep[:, None], buffers, local.buffers)
        return {"w": x if w is x else torch.where(keep[:, None], x, w)}

    def chosen(self, x: Tensor, local: Local, mask: Tensor | None) -> Tensor:
        """The best candidate of each client (or of all together) on the validation split: [S, P]."""
        before = local.buffers.clone()
        best = self.judged(value(local, x))
        best = best if self.zero else torch.full_like(best, -torch.inf)
        w, buffers = x.clone(), before.clone()
        for _, _, rows in lengths(local, x, self.lr_grid or (self.finetune_lr,), self.finetune_epochs, mask):
            now = self.judged(value(local, rows))
            better = (now > best)[:, None]
            best, w = torch.where(better[:, 0], now, best), torch.where(better, rows, w)
            buffers = torch.where(better, local.buffers, buffers)
        local.buffers = buffers
        return w

    def judged(self, values: Tensor) -> Tensor:
        """What counts for each client [S]: its own value, or the mean where all choose together or it has none."""
        everybody = values.nanmean().expand(len(values))
        return everybody if self.choose == "global" else torch.where(values.isnan(), everybody, values)


def layer_mask(net: Net, layers: str) -> Tensor | None:
    """Which parameters "all", "last" or a pattern of names leaves free: bool [P], None for all."""
    if layers == "all":
        return None
    if layers != "last":
        return net.mask(layers)
    mask = torch.zeros(net.size, dtype=torch.bool, device=net.w0.device)
    mask[net.head_slice] = True
    return mask


def lengths(
    local: Local, start: Tensor, lrs: tuple[float | None, ...], epochs: int, mask: Tensor | None = None
) -> Iterator[tuple[int, int, Tensor]]:
    """(which lr, epochs so far, rows [S, P]) after every epoch of fine-tuning from `start` with every step size.

    With frozen layers batch norm's statistics stay frozen as well.
    """
    before = local.buffers.clone()
    shuffles = local.setting.training.reshuffle
    for i, lr in enumerate(lrs):
        local.buffers, rows = before.clone(), start
        for epoch in range(1, epochs + 1):
            stream = f"finetune {epoch}" if shuffles else "finetune"
            rows = local.fit(rows, epochs=1, lr=lr, mask=mask, stream=stream, probe=mask is not None).w
            yield i, epoch, rows


def value(local: Local, rows: Tensor, split: str = "val") -> Tensor:
    """How good each client's model is on `split`: accuracy, or minus the loss where there is none. float64 [S].

    A model whose outputs hold a NaN counts as worst, minus infinity; a client without samples of `split` has NaN.
    """
    some = local.setting.data.size(split)[local.ids] > 0 if local.has(split) else torch.zeros(len(rows), dtype=torch.bool)
    if not bool(some.any()):
        raise ValueError(
            f"choose: fine-tuning is tuned on the clients' {split!r} split, which these clients lack; make one with "
            "Federation.split_samples, or choose on validation clients with pflcore.tuning."
        )
    seen, mine = local, rows
    if not bool(some.all()):
        at = onto(some, rows.device)
        seen, mine = Local(local.setting, local.ids[some], local.round, local.buffers[at]), rows[at]
    if local.setting.data.y.is_floating_point() or not local.net.scores_classes:
        values = -seen.loss(mine, split).double().nan_to_num(torch.inf, torch.inf)
    else:
        found = seen.scores(lambda view, net, x: net(view["w"], x), {"w": mine}, split)
        values = torch.stack([_accuracy(scores, y) for scores, y in found])
    return values.new_full((len(rows),), torch.nan).masked_scatter(onto(some, rows.device), values)


def _accuracy(scores: Tensor, y: Tensor) -> Tensor:
    return torch.where(scores.isnan().any(), -torch.inf, right(scores, y).double().mean())
