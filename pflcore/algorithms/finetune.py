"""Fine-tuning: everybody starts from the shared model and trains on, on their own data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pflcore.algorithms.fedopt import FedOpt
from pflcore.algorithms.protocol import Payload, Tensors, Traits
from pflcore.check import NonNegative, Whole, refuse
from pflcore.data.ragged import onto
from pflcore.metrics import right
from pflcore.train import Clients, Fit, Net, Objective
from pflcore.train.clients import Predict, by_row

AT_EVALUATION = (
    "finetune_lr",
    "finetune_epochs",
    "layers",
    "choose",
    "lr_grid",
    "zero",
    "min_size",
    "margin",
)


@dataclass(frozen=True)
class FineTune(FedOpt):
    """FedAvg + fine-tuning (Wang et al. 2019; Yu et al. 2020; Motley, section 4.1).

    server: x [P] and the optimizer's state · client: nothing · down: x (1 model) · up: delta (1
    model). Trains as `FedOpt`; every evaluation fine-tunes x on each client's training data by the
    run's optimizer, all layers or the last one, and throws the result away.
    `choose="fixed"` takes `finetune_epochs` epochs. "client" and "global" try each step size of
    `lr_grid` with 1 .. `finetune_epochs` epochs and keep what is best on the clients' validation
    split, for each client or for all clients together (mean over clients); ties go to the earlier
    candidate, 0 epochs first. A client without validation samples takes what is best for all the
    others together. Momentum and AdamW's moments start at zero in every epoch.
    Acceptance (the remark of section 4.1): a client with less than `min_size` samples, or whose
    validation value does not beat x's by more than `margin` (without validation samples it cannot),
    keeps x.
    """

    mu: NonNegative = 0.0  # FedProx's pull towards x while x is trained: FedProx + fine-tuning
    finetune_lr: NonNegative | None = None  # step size; default: the run's
    finetune_epochs: Whole = 5  # epochs, or the most that are tried
    layers: str = "all"  # "all", "last", or a pattern of parameter names such as "fc*"
    # who chooses step size and epochs on validation data: fixed, all clients together, or each
    # client
    choose: Literal["fixed", "global", "client"] = "fixed"
    lr_grid: tuple[float, ...] = ()  # step sizes to choose from; default: finetune_lr alone
    zero: bool = True  # no fine-tuning is a candidate too (Motley's silo code: not)
    min_size: Whole = 0  # clients with fewer training samples keep x
    margin: float | None = None  # by how much a tuned model must beat x on the validation split

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choose != "fixed" and self.finetune_epochs < 1:
            refuse("finetune_epochs", "at least 1 to choose from", self.finetune_epochs)
        if self.choose == "fixed" and self.lr_grid:
            raise ValueError(
                "lr_grid: nothing chooses from it with choose='fixed'; set finetune_lr, or "
                "choose='client' or 'global'."
            )

    @property
    def traits(self) -> Traits:
        return super().traits._replace(late=AT_EVALUATION)

    def train(self, down: Payload, own: Tensors, clients: Clients) -> tuple[Tensors, Tensors, Fit]:
        x = down["x"]
        fit = clients.fit(x, Objective(prox=(self.mu, x) if self.mu else None))
        return own, {"delta": fit.w.sub_(x)}, fit

    def model(self, down: Payload, own: Tensors, clients: Clients) -> Tensors:
        x = down["x"]
        if not self.finetune_epochs:
            return {"w": x}
        w, batch_norm = self.tuned(x, clients)
        keep = onto(clients.size, x.device) < self.min_size
        if self.margin is not None:
            tuned = value(replace(clients, buffers=batch_norm), w)
            keep = keep | ~(tuned > value(clients, x) + self.margin)
        keep = keep[:, None]
        batch_norm = torch.where(keep, clients.buffers, batch_norm)
        return {"w": torch.where(keep, x, w), "batch_norm": batch_norm}

    def tuned(self, x: Tensor, clients: Clients) -> tuple[Tensor, Tensor]:
        """The fine-tuned models [S, P], or the best candidate of each client (or of all together)
        on the validation split; and their batch norm's statistics."""
        lrs, mask = self.lr_grid or (self.finetune_lr,), layer_mask(clients.net, self.layers)
        tried = (fit for *_, fit in lengths(clients, x, lrs, self.finetune_epochs, mask))
        if self.choose == "fixed":
            last = deque(tried, 1)[0]
            return last.w, last.buffers
        w, batch_norm = x, clients.buffers
        best = self.judged(value(clients, x))
        best = best if self.zero else torch.full_like(best, -torch.inf)
        for fit in tried:
            now = self.judged(value(clients.after(fit), fit.w))
            better = (now > best)[:, None]
            best = torch.maximum(now, best)
            w = torch.where(better, fit.w, w)
            batch_norm = torch.where(better, fit.buffers, batch_norm)
        return w, batch_norm

    def judged(self, values: Tensor) -> Tensor:
        """What counts for each client [S]: its own value, or the mean where all choose together or
        it has none."""
        everybody = values.nanmean().expand(len(values))
        if self.choose == "global":
            return everybody
        return torch.where(values.isnan(), everybody, values)


def layer_mask(net: Net, layers: str) -> Tensor | None:
    """Which parameters "all", "last" or a pattern of names leaves free: bool [P] on the CPU, None
    for all."""
    if layers == "all":
        return None
    if layers != "last":
        return net.mask(layers)
    mask = torch.zeros(net.size, dtype=torch.bool)
    mask[net.head_slice] = True
    return mask


def lengths(
    clients: Clients,
    start: Tensor,
    lrs: tuple[float | None, ...],
    epochs: int,
    mask: Tensor | None = None,
) -> Iterator[tuple[int, int, Fit]]:
    """(which lr, epochs so far, what they made of `start` [S, P]) after every epoch of fine-tuning
    with every step size.

    With frozen layers batch norm's statistics stay frozen as well.
    """
    shuffles = clients.setting.training.reshuffle
    for i, lr in enumerate(lrs):
        now, rows = clients, start
        for epoch in range(1, epochs + 1):
            stream = f"finetune {epoch}" if shuffles else "finetune"
            fit = now.fit(rows, Objective(mask=mask), epochs=1, lr=lr, stream=stream)
            if mask is not None:
                fit = fit._replace(buffers=clients.buffers)
            now, rows = clients.after(fit), fit.w
            yield i, epoch, fit


def value(
    clients: Clients, rows: Tensor | Tensors, split: str = "val", predict: Predict = by_row
) -> Tensor:
    """How good each client's model, a row of `rows` [S, P] or of several tensors, is on `split`:
    accuracy, or minus the loss where there is none. float64 [S].

    A model whose outputs hold a NaN counts as worst, minus infinity; a client without samples of
    `split` has NaN.
    """
    data, model = clients.setting.data, rows if isinstance(rows, dict) else {"w": rows}
    some = torch.zeros(len(clients.ids), dtype=torch.bool)
    if clients.has(split):
        some = data.size(split)[clients.ids] > 0
    if not some.any():
        raise ValueError(
            f"choose: fine-tuning is tuned on the clients' {split!r} split, which these clients "
            "lack; make one with Federation.split_samples, or choose on validation clients with "
            "pflcore.tuning."
        )
    w, seen = model["w"], clients
    at = onto(some, w.device)
    if not some.all():
        seen, model = clients.take(some), {k: v[at] for k, v in model.items()}
    if data.y.is_floating_point() or not clients.net.scores_classes:
        loss = seen.measure(model, split, predict)[0].to(w)
        values = -loss.double().nan_to_num(torch.inf, torch.inf)
    else:
        values = torch.stack([_accuracy(*pair) for pair in seen.scores(model, split, predict)])
    return values.new_full((len(w),), torch.nan).masked_scatter(at, values)


def _accuracy(scores: Tensor, y: Tensor) -> Tensor:
    return torch.where(scores.isnan().any(), -torch.inf, right(scores, y).double().mean())
