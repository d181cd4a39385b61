"""The protocol, which is FedAvg.

State is two dicts of tensors: `g` (the server's) and `own` (one row per client). Hyper-parameters are a frozen dataclass;
nothing else remembers anything. What travels is a dict: `down` and `up`; the bytes of a round are counted from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore.local import Local, Setting
from pflcore.local.net import Net
from pflcore.local.workers import onto

Tensors = dict[str, Tensor]


Payload = dict[str, Any]  # Tensor or Pool


class Stop(Exception):
    """Ends the run: an algorithm raises it with one sentence where going on makes no sense."""


class Pool(NamedTuple):
    """M of R shared rows for each client, without the copies; what travels is M rows a client."""

    rows: Tensor  # [R, P]
    index: Tensor  # type: ignore[assignment]  # [S, M]; hides tuple.index


class Cohort(NamedTuple):
    """The clients of one round."""

    ids: Tensor  # [S]
    share: Tensor  # [S] float64, sums to 1: samples / all samples of the cohort, or 1 / S
    size: Tensor  # [S] training samples
    n: int  # N, all clients of the federation
    round: int  # 1-based
    rounds: int  # R


@dataclass(frozen=True)
class FedAvg:
    """McMahan et al. 2017, Algorithm 1.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).
    `x <- x + server_lr * sum_i share_i delta_i`; `weighting` is `"samples"` (the paper's n_i / n) or `"uniform"`.
    """

    server_lr: float = 1.0  # step size of the server
    weighting: str = "samples"  # or uniform

    returns: ClassVar[str] = "logits"  # what `predict` gives: "logits", "probabilities" or "values"
    server_only: ClassVar[bool] = False  # needs nothing of a client but its model: other code bases can call it
    required: ClassVar[tuple[int, ...]] = ()  # clients that join every round
    unused: ClassVar[tuple[str, ...]] = ()  # inherited options that play no part in this method: no command line or grid offers them
    late: ClassVar[tuple[str, ...]] = ()  # options that play no part in training: they can be tuned on one trained state
    needs_val: ClassVar[bool] = False  # needs a split "val"; a simulation holds 20 % of the training samples out where there is none

    def __post_init__(self) -> None:
        if self.weighting not in ("samples", "uniform"):
            raise ValueError(f"weighting: expected 'samples' or 'uniform', got {self.weighting!r}.")

    def init(self, net: Net, n: int) -> tuple[Tensors, Tensors]:
        """The server's state and ONE client's fresh state."""
        return {"x": net.w0}, {}

    def send(self, g: Tensors, cohort: Cohort, gen: torch.Generator) -> Payload:
        """What each client of the cohort receives: tensors [S, ...] or a `Pool`."""
        return {"x": g["x"].expand(len(cohort.ids), -1)}

    def client(self, down: Payload, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
        """All clients' work of the round: their new state and what they upload, [S, ...] each."""
        return own, {"delta": local.fit(down["x"]).w - down["x"]}

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        """The server's new state. It owns `g` and may write rows into it in place, by `Commit` or `written`: all of them or none."""
        return {**g, "x": ops.aggregate(up["delta"], onto(cohort.share[None], g["x"].device), base=g["x"], lr=self.server_lr)[0]}

    def personal(self, down: Payload, own: Tensors, local: Local) -> Tensors:
        """Each client's view for evaluation, [S, ...]; never stored."""
        return {"w": down["x"]}

    def predict(self, view: Tensors, net: Net, x: Tensor) -> Tensor:
        """One client's scores on `x` [B, ...] from its slice of the view."""
        return net(view["w"], x)

    def report(self, g: Tensors) -> Tensors:
        """Small tensors worth a line in the round's record; "weights" are the mixing weights, [N] or [M, N]."""
        return {}


@dataclass
class State:
    """Everything that changes over a run."""

    g: Tensors
    own: Tensors  # [N, ...]
    buffers: Tensor  # [N, b]
    round: int = 0  # rounds played
    void: int = 0  # void rounds in a row


def cohort_of(alg: FedAvg, setting: Setting, ids: Tensor, round: int) -> Cohort:
    size = setting.data.size("train").cpu()[ids]
    share = size.double() if alg.weighting == "samples" else torch.ones(len(ids), dtype=torch.float64)
    return Cohort(ids, share / share.sum(), size, setting.data.n, round, setting.rounds)


class Commit:
    """Rows [S, ...] to be written into the rows `ids` of [N, ...]. What needs memory is done at once; `write` asks for none, so that a
    round that runs out of memory has written everything or nothing."""

    def __init__(self, ids: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
        at = {into.device: onto(ids, into.device) for into, _ in pairs}
        self.pairs = [(into, at[into.device], rows.to(into)) for into, rows in pairs]

    def write(self) -> None:
        for into, at, rows in self.pairs:
            into[at] = rows


@contextmanager
def written(into: Tensor, ids: Tensor, rows: Tensor) -> Iterator[None]:
    """The rows `ids` of `into` are `rows` from here on; where the block fails they are again what they were."""
    new, old = Commit(ids, (into, rows)), Commit(ids, (into, into[onto(ids, into.device)]))
    new.write()
    try:
        yield
    except BaseException:
        old.write()
        raise
