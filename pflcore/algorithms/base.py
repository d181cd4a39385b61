"""The protocol, which is FedAvg.

State is two dicts of tensors: `g` (the server's) and `own` (one row per client). Hyper-parameters are a frozen dataclass;
nothing else remembers anything. What travels is a dict: `down` and `up`; the bytes of a round are counted from it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pflcore import kinds, ops
from pflcore.local import Local, Setting, Training
from pflcore.local.net import Net
from pflcore.local.workers import onto

Tensors = dict[str, Tensor]


Payload = dict[str, Any]  # Tensor or Pool


class Stop(Exception):
    """Ends the run: an algorithm raises it with one sentence where going on makes no sense."""


class Pool(NamedTuple):
    """At most M of R shared rows for each client, without the copies; what travels is the rows whose numbers are not -1."""

    rows: Tensor  # [R, P]
    index: Tensor  # type: ignore[assignment]  # [S, M], -1: nothing; hides tuple.index


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
    buffers: ClassVar[tuple[str, ...]] = ("average", "local")  # what may become of batch norm's running statistics; "auto" is the first
    needs_val: ClassVar[bool] = False  # needs a split "val"; a simulation holds 20 % of the training samples out where there is none

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{f.name}: expected a finite number, got {value}.")
        if not (isinstance(self.server_lr, Real) and self.server_lr >= 0):
            raise ValueError(f"server_lr: expected a finite number >= 0, got {kinds.shown(self.server_lr)}.")
        if self.weighting not in ("samples", "uniform"):
            raise ValueError(f"weighting: expected 'samples' or 'uniform', got {self.weighting!r}.")

    def check_training(self, training: Training) -> None:
        """ValueError in one sentence where the method cannot train so; see `only_sgd`."""

    def prepare(self, net: Net) -> Net:
        """The model that is trained, made of the one given: a simulation asks for it once, before `init`."""
        return net

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

    def statistics(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensor:
        """With `buffers="average"`: how the cohort's running statistics are mixed, weights [1, S] (one mean for all N clients) or [N, S]
        (a row of zeros: the client keeps its own) by which the models themselves are mixed; `g` is the server's new state."""
        return cohort.share[None]

    def report(self, g: Tensors) -> Tensors:
        """Small tensors worth a line in the round's record; "weights" are the mixing weights, [N] or [M, N]; sparse
        they are "weight" and "index", [S] or, for the clients "rows" [S], [S, K]."""
        return {}


@dataclass
class State:
    """Everything that changes over a run."""

    g: Tensors
    own: Tensors  # [N, ...]
    buffers: Tensor  # [N, b]
    round: int = 0  # rounds played
    void: int = 0  # void rounds in a row
    joined: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # [N]: who has ever taken part; by default nobody
    moments: Tensors = field(default_factory=dict)  # [N, ...] AdamW's, by what is trained, where clients keep them

    def __post_init__(self) -> None:
        if not len(self.joined):
            self.joined = torch.zeros(len(self.buffers), dtype=torch.bool)


def cohort_of(alg: FedAvg, setting: Setting, ids: Tensor, round: int) -> Cohort:
    return cohort_from(alg, ids, setting.data.size("train")[ids], setting.data.n, round, setting.rounds)


def cohort_from(alg: FedAvg, ids: Tensor, size: Tensor, n: int, round: int, rounds: int) -> Cohort:
    """The cohort of the clients `ids` [S] with so many samples `size` [S]."""
    share = size.double() if alg.weighting == "samples" else torch.ones(len(ids), dtype=torch.float64)
    return Cohort(ids, share / share.sum(), size, n, round, rounds)


def only_sgd(alg: FedAvg, training: Training, why: str, clip: bool = False) -> None:
    """Refuses AdamW for `alg`, and clipped gradients where they do not fit either (`clip` says that they do)."""
    name = type(alg).__name__
    if training.local_optimizer != "sgd":
        raise ValueError(f"local_optimizer: {name} {why}, and AdamW's steps are others; take local_optimizer='sgd'.")
    if training.clip_grad is not None and not clip:
        raise ValueError(f"clip_grad: {name} {why}, which are not clipped; leave clip_grad out.")


def plain_steps(alg: FedAvg, local: Local) -> None:
    """Warns where the run's momentum or weight decay plays no part in the steps of `alg`."""
    t = local.setting.training
    if t.momentum or t.weight_decay:
        name = type(alg).__name__
        warnings.warn(
            f"{name}: its local steps are its paper's, without momentum and weight decay; momentum={t.momentum:g} and "
            f"weight_decay={t.weight_decay:g} play no part.",
            stacklevel=3,
        )


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
