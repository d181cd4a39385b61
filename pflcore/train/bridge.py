"""The trainer as callers of the older form know it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore.data.federation import Federation
from pflcore.train import choose, clients
from pflcore.train.chain import Chain
from pflcore.train.clients import Clients
from pflcore.train.clients import Fit as Done
from pflcore.train.engines import Engine as Choice
from pflcore.train.engines import Objective, Tensors
from pflcore.train.losses import CRITERIA
from pflcore.train.net import Net
from pflcore.train.training import Training
from pflcore.train.workers import Workers, onto


class Engine(Workers):
    """Workers and what they train with."""

    def __init__(self, name: str = "loop", workers: int | None = None, chain: Chain | None = None) -> None:
        super().__init__(workers)
        self.name, self.chain = name, chain

    @property
    def workers(self) -> int:
        return self.count


class Path(NamedTuple):
    """How a model is trained, and why so."""

    engine: str
    form: str
    why: str


class Setting(NamedTuple):
    """What stays the same over a run."""

    net: Net
    data: Federation
    training: Training
    engine: Engine
    seed: int = 0
    rounds: int = 1


def prepared(
    net: Net,
    data: Federation,
    training: Training,
    engine: str = "auto",
    workers: int | None = None,
    seed: int = 0,
    rounds: int = 1,
) -> tuple[Setting, Path]:
    s = choose.prepared(net, data, training, engine, workers, seed, rounds)
    name, chain, why = s.engine
    form = "chain" if chain is not None else "vmap" if name == "vmap" else "module"
    own = Setting(s.net, data, training, Engine(name, workers, chain), seed, rounds)
    return own, Path(name, form, why)


class Fit(NamedTuple):
    """What local training gives back."""

    w: Tensor
    lr_sum: Tensor
    loss: Tensor
    grad: Tensor | None


class Local:
    """Clients whose fits change their statistics."""

    def __init__(
        self,
        setting: Setting,
        ids: Tensor,
        round: int,
        buffers: Tensor,
        train_loss: Tensor | None = None,
        joined: Tensor | None = None,
    ) -> None:
        self.setting, self.ids, self.round, self.buffers = setting, ids, round, buffers
        self.train_loss, self.joined = train_loss, joined

    @property
    def now(self) -> Clients:
        s = self.setting
        engine = Choice(s.engine.name, s.engine.chain)
        own = clients.Setting(s.net, s.data, s.training, engine, s.engine, s.seed, s.rounds)
        return Clients(own, self.ids, self.round, self.buffers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.now, name)

    @property
    def rounds(self) -> int:
        return self.setting.rounds

    def newcomers(self, device: torch.device) -> Tensor:
        everybody = torch.ones(len(self.ids), dtype=torch.bool)
        joined = everybody if self.joined is None else self.joined
        return onto(~joined[:, None], device)

    def fit(self, start: Tensor, probe: bool = False, want_grad: bool = False, **o: Any) -> Fit:
        terms = {k: v for k in ("prox", "shift", "mask", "loss", "extra") if (v := o.pop(k, None)) is not None}
        fit = self.now.fit(start, Objective(**terms), mean_grad=want_grad, **o)
        self._keep(fit, probe)
        rate = self.now.lr if o.get("lr") is None else o["lr"]
        lr_sum = (fit.steps * rate)[:, None].to(fit.w)
        return Fit(fit.w, lr_sum, fit.loss.to(fit.w), fit.rows.get("grad"))

    def each_batch(self, rows: Tensors, update: Any, probe: bool = False, **o: Any) -> Tensors:
        def first(rows: Tensors, grad: Any, taken: Tensor) -> Tensors:
            return update(rows, grad, int(taken[0]))  # type: ignore[no-any-return]

        terms = {k: v for k in ("loss", "extra", "alone") if (v := o.pop(k, None)) is not None}
        fit = self.now.each_batch(rows, first, Objective(**terms), **o)
        self._keep(fit, probe)
        return fit.rows

    def _keep(self, fit: Done, probe: bool) -> None:
        if not probe:
            self.buffers, self.train_loss = fit.buffers, fit.loss

    def measure(self, rows: Tensor, split: str) -> Any:
        now, chain = self.now, self.setting.engine.chain
        one = now._have_one({"w": rows}) and now.net.criterion in CRITERIA.values()
        look = now.has(split) and (chain is not None or one)
        return now.measure({"w": rows}, split) if look else None

    def scores(self, predict: Any, view: Tensors, split: str) -> list[tuple[Tensor, Tensor]]:
        return self.now.scores(view, split, predict)
