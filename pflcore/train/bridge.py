"""A cohort as algorithms' hooks know it: the statistics of batch norm are assigned, and the loss of the
last training is kept. It stands on `Clients`, which change nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from pflcore.data.ragged import onto
from pflcore.train.clients import Clients, Fit, Setting
from pflcore.train.engines import Objective, Tensors
from pflcore.train.net import Net
from pflcore.train.workers import one_thread

P = ParamSpec("P")
T = TypeVar("T")
SMALL_RUN = 1 << 22  # weights of all clients that are looked at together: little work for all cores
TERMS = ("prox", "shift", "mask", "loss", "extra", "alone")


class Path(NamedTuple):
    """How a model is trained, and why so."""

    engine: str  # "loop" or "vmap"
    form: str  # "chain", "vmap" or "module"
    why: str


def few_threads(f: Callable[P, T]) -> Callable[P, T]:
    """For a function of (algorithm, state, setting, ...): with small models the calling thread works
    alone, since on a busy machine waking others takes longer."""

    @functools.wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        setting: Any = kwargs["setting"] if "setting" in kwargs else args[2]
        given = (*args[3:], *kwargs.values())
        ids = next((a for a in given if isinstance(a, Tensor)), None)  # of the clients, where not all
        count = setting.data.n if ids is None else len(ids)
        with one_thread(count * setting.net.size < SMALL_RUN):
            return f(*args, **kwargs)

    return wrapped


class Trained(NamedTuple):
    """What local training gives back."""

    w: Tensor  # [S, Q] the trained rows
    lr_sum: Tensor  # [S, 1] sum of the step sizes taken
    loss: Tensor  # [S] mean loss of the minibatches, at the rows before each step
    grad: Tensor | None  # [S, Q] mean minibatch gradient, clipped, SGD's weight decay included


class Local:
    """What an algorithm's hook may do with its cohort's data. Rows are [S, Q]; S clients in the order of
    `ids`."""

    def __init__(
        self,
        setting: Setting,
        ids: Tensor,
        round: int,
        buffers: Tensor,
        joined: Tensor | None = None,
    ) -> None:
        self.setting, self.ids, self.round, self.buffers = setting, ids, round, buffers
        self.joined = joined  # [S] bool: who took part in a round before; None: everybody
        self.train_loss: Tensor | None = None  # [S] of the last training that was no probe

    @property
    def clients(self) -> Clients:
        """The cohort with the statistics that were assigned last."""
        return Clients(self.setting, self.ids, self.round, self.buffers)

    @property
    def net(self) -> Net:
        """The model as a function of a row."""
        return self.setting.net

    @property
    def rounds(self) -> int:
        """R, all rounds of the run."""
        return self.setting.rounds

    @property
    def lr(self) -> float:
        """The step size of this round."""
        return self.clients.lr

    @property
    def size(self) -> Tensor:
        """Training samples of each client, [S]."""
        return self.clients.size

    @property
    def counts(self) -> Tensor:
        """Training samples of each client and class, [S, C]."""
        return self.clients.counts

    def newcomers(self, device: torch.device) -> Tensor:
        """Bool [S, 1] on `device`: who takes part for the first time, or has not yet."""
        everybody = torch.ones(len(self.ids), dtype=torch.bool)
        return onto(~(everybody if self.joined is None else self.joined)[:, None], device)

    def has(self, split: str) -> bool:
        """Whether the federation has this split."""
        return self.clients.has(split)

    def fit(self, start: Tensor, *, probe: bool = False, want_grad: bool = False, **how: Any) -> Trained:
        """Minibatch training from `start` [S, Q]: `Clients.fit` with the terms of its `Objective`."""
        terms = {k: how.pop(k) for k in TERMS if k in how}
        fit = self.clients.fit(start, Objective(**terms), mean_grad=want_grad, **how)
        self._keep(fit, probe)
        rate = self.lr if how.get("lr") is None else how["lr"]
        lr_sum = onto((fit.steps * rate)[:, None], start.device).to(start)
        return Trained(fit.w, lr_sum, fit.loss.to(start), fit.rows.get("grad"))

    def each_batch(
        self,
        rows: Tensors,
        update: Callable[[Tensors, Callable[..., Tensor], int], Tensors],
        *,
        probe: bool = False,
        **how: Any,
    ) -> Tensors:
        """The general, slower form, `update(rows, grad, k)`: see `Clients.each_batch`."""
        terms = {k: v for k in TERMS if (v := how.pop(k, None)) is not None}

        def step(rows: Tensors, grad: Callable[..., Tensor], taken: Tensor) -> Tensors:
            return update(rows, grad, int(taken[0]))

        fit = self.clients.each_batch(rows, step, Objective(**terms), **how)
        self._keep(fit, probe)
        return fit.rows

    def _keep(self, fit: Fit, probe: bool) -> None:
        if not probe:
            self.buffers, self.train_loss = fit.buffers, fit.loss

    def loss(self, rows: Tensor, split: str = "train") -> Tensor:
        """Each client's mean loss [S] at `rows` [S, P]."""
        return self.clients.loss(rows, split)

    def grad(self, rows: Tensor, split: str = "train") -> Tensor:
        """Each client's gradient [S, P] of `loss`."""
        return self.clients.grad(rows, split)

    def features(self, rows: Tensor, split: str = "train") -> tuple[Tensor, Tensor]:
        """What each client's head sees, [S, n, H], and the labels [S, n]."""
        return self.clients.features(rows, split)

    def measure(self, rows: Tensor, split: str) -> tuple[Tensor, Tensor | None] | None:
        """Losses [S] and shares of right answers [S]; None where there is no such split."""
        return self.clients.measure({"w": rows}, split) if self.has(split) else None

    def scores(self, predict: Any, view: Tensors, split: str) -> list[tuple[Tensor, Tensor]]:
        """Each client's (scores [n, ...], labels [n])."""
        return self.clients.scores(view, split, predict)
