"""The protocol, which is FedAvg.

State is two dicts of tensors: `g` (the server's) and `own` (one row per client). Hyper-parameters are a frozen dataclass;
nothing else remembers anything. What travels is a dict: `down` and `up`; the bytes of a round are counted from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms import defences
from pflcore.data.ragged import onto
from pflcore.ops import kinds
from pflcore.train import Local, Setting, Training
from pflcore.train.net import Net

Tensors = dict[str, Tensor]


Payload = dict[str, Any]  # Tensor or Pool


class Stop(Exception):
    """Ends the run: an algorithm raises it with one sentence where going on makes no sense."""


class Void(Exception):
    """Makes the round void, nothing changes: a `server` raises it with one sentence where so few uploads say nothing."""


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
    lost: int = 0  # clients beside these whose uploads were not finite


@dataclass(frozen=True)
class FedAvg:
    """McMahan et al. 2017, Algorithm 1.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).
    `x <- x + server_lr * sum_i share_i delta_i`; `weighting` is `"samples"` (the paper's n_i / n) or `"uniform"`.

    `defence` puts something else in the place of the mean, with `hostile` = f bad clients in a round of S; d_i are the updates. All but
    "clip" give every client one voice, since the number of its samples is its own word.
    "clip": sum_i share_i d_i min(1, M / |d_i|), M the median of the norms (Sun et al. 2019 with M for the fixed bound, which is `clip` of
    the run) · "median": coordinate by coordinate, of an even number the mean of the two in the middle (Yin et al. 2018, Definition 1) ·
    "trimmed_mean": coordinate by coordinate without the f least and f largest (Definition 2) · "krum", "multi_krum": the update, or the
    mean of the S - f updates, of the least Krum score (Blanchard et al. 2017), by exact distances · "fltrust": sum_i t_i (|r| / |d_i|) d_i
    / sum_i t_i with t_i = max(0, cos(d_i, r)) and r the update of the trusted client `root`, who joins every round (Cao et al. 2021,
    eqs. 2 to 4, where r is trained by the server on data of its own and is not part of the sum).
    Running statistics of batch norm stay each client's own then: they would be a way around the defence.
    """

    server_lr: kinds.NonNegative = 1.0  # step size of the server
    weighting: kinds.Weighting = "samples"  # or uniform
    defence: defences.Defence | None = field(default=None, kw_only=True)  # in the place of the mean update, where clients may be hostile
    hostile: kinds.Whole = field(default=1, kw_only=True)  # how many of a round's clients may be: for krum, multi_krum and trimmed_mean
    root: kinds.Whole | None = field(default=None, kw_only=True)  # the client that fltrust trusts

    returns: ClassVar[str] = "logits"  # what `predict` gives: "logits", "probabilities" or "values"
    unused: ClassVar[tuple[str, ...]] = ()  # inherited options that play no part in this method: no command line or grid offers them
    late: ClassVar[tuple[str, ...]] = ()  # options that play no part in training: they can be tuned on one trained state
    buffers: ClassVar[tuple[str, ...]] = ("average", "local")  # what may become of batch norm's running statistics; "auto" is the first
    needs_val: ClassVar[bool] = False  # needs a split "val"; a simulation holds 20 % of the training samples out where there is none

    def __post_init__(self) -> None:
        kinds.pythonic(self)
        kinds.check(self)
        if self.defence is not None and "defence" in self.unused:
            raise ValueError(
                f"defence: {type(self).__name__} takes no step along the mean of the updates, whose place a defence takes; leave it "
                "out, and limit how long an update may be with the run's clip."
            )
        for f in fields(self):
            if f.name in self.idle and getattr(self, f.name) != f.default and f.name != "defence":
                raise ValueError(f"{f.name}: it plays no part in this {type(self).__name__}, got {getattr(self, f.name)}; leave it out.")
        if (self.defence == "fltrust") != (self.root is not None):
            raise ValueError(f"root: expected a client's number with defence='fltrust', None without it, got {kinds.shown(self.root)}.")

    def __init_subclass__(cls, averages: bool | None = None) -> None:
        """A class with a `server` of its own takes no defence, unless it says that it `averages` by `defended`."""
        super().__init_subclass__()
        if not averages and ("server" in vars(cls) or any("defence" in getattr(base, "unused", ()) for base in cls.__bases__)):
            cls.unused = tuple(dict.fromkeys((*cls.unused, "defence", "hostile", "root")))

    @property
    def idle(self) -> tuple[str, ...]:
        """Options that play no part beside the others that are set."""
        return self.unused if self.defence in defences.COUNTING else (*self.unused, "hostile")

    @property
    def required(self) -> tuple[int, ...]:
        """Clients that join every round."""
        return () if self.root is None else (self.root,)

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
        return own, {"delta": local.fit(down["x"]).w.sub_(down["x"])}  # in place: no second table of updates

    def server(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        """The server's new state. It owns `g` and may write rows into it in place, by `Commit` or `written`: all of them or none."""
        return {**g, "x": ops.aggregate(*self.defended(up["delta"], cohort), base=g["x"], lr=self.server_lr)[0]}

    def defended(self, delta: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Rows and their weights [1, rows], as `ops.aggregate` takes them: the cohort's updates [S, P] and shares, or what the
        defence makes of them. Void where the cohort is too small for it."""
        share = onto(cohort.share[None], delta.device)
        if self.defence is None:
            return delta, share
        hostile = defences.fewer(self.defence, self.hostile, len(delta), cohort.lost)
        if hostile is None:
            least = 2 * self.hostile + (1 if self.defence == "trimmed_mean" else 3)
            raise Void(
                f"defence: {self.defence} against {self.hostile} hostile clients needs {least} in a round, and round {cohort.round} has "
                f"{len(delta)}; lower hostile, or raise participation."
            )
        root = 0 if self.root is None else int((cohort.ids == self.root).nonzero())
        return defences.defended(self.defence, delta, share, hostile, root)

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

    def route(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensors:
        """The state once a newcomer's upload `up` [1, ...] has shown where it belongs, and nothing else: for `History.adapt`."""
        return g

    def kept(self, new: Tensors, before: Tensors, factor: Tensor) -> Tensors:
        """The clients' new state [S, ...] where the server takes only `factor` [S, 1] of their uploads: for the run's `clip`."""
        return new

    def grown(self, g: Tensors, n: int) -> Tensors:
        """The server's state where a client joins the n that there are, beside the rows that it gets: for what is a mean over all."""
        return g

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

    def __post_init__(self) -> None:
        if not len(self.joined):
            self.joined = torch.zeros(len(self.buffers), dtype=torch.bool)


def cohort_of(alg: FedAvg, setting: Setting, ids: Tensor, round: int) -> Cohort:
    return cohort_from(alg, ids, setting.data.size("train")[ids], setting.data.n, round, setting.rounds)


def cohort_from(alg: FedAvg, ids: Tensor, size: Tensor, n: int, round: int, rounds: int, lost: int = 0) -> Cohort:
    """The cohort of the clients `ids` [S] with so many samples `size` [S]."""
    share = size.double() if alg.weighting == "samples" else torch.ones(len(ids), dtype=torch.float64)
    return Cohort(ids, share / share.sum(), size, n, round, rounds, lost)


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
