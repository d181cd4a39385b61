"""The protocol, which is FedAvg, and one round of it: `step`.

State is two dicts of tensors: `g` (the server's) and `own` (one row per client). Hyper-parameters are a frozen dataclass;
nothing else remembers anything. What travels is a dict: `down` and `up`; the bytes of a round are counted from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore.engine import few_threads, onto
from pflcore.flat import Net
from pflcore.local import Local, Setting, right
from pflcore.streams import generator_of

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
    `x <- x + lr * sum_i share_i delta_i`; `weighting` is `"samples"` (the paper's n_i / n) or `"uniform"`.
    """

    lr: float = 1.0
    weighting: str = "samples"

    returns: ClassVar[str] = "logits"  # what `predict` gives: "logits", "probabilities" or "values"
    server_only: ClassVar[bool] = False  # needs nothing of a client but its model: other code bases can call it
    required: ClassVar[tuple[int, ...]] = ()  # clients that join every round
    late: ClassVar[tuple[str, ...]] = ()  # options that play no part in training: they can be tuned on one trained state
    needs_val: ClassVar[bool] = False  # needs a split "val"; a simulation holds 20 % of the training samples out where there is none

    def __post_init__(self) -> None:
        if self.weighting not in ("samples", "uniform"):
            raise ValueError(f"weighting: expected 'samples' or 'uniform', got {self.weighting!r}.")

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
        return {**g, "x": ops.aggregate(up["delta"], onto(cohort.share[None], g["x"].device), base=g["x"], lr=self.lr)[0]}

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


@dataclass
class Outcome:
    """What one round did."""

    ids: list[int]
    dropped: list[int] = field(default_factory=list)  # clients whose update or new state was not finite
    void: bool = False
    bytes_down: int = 0
    bytes_up: int = 0
    train_loss: float | None = None  # mean over the cohort of the minibatch losses, weighted by share


def begin(alg: FedAvg, net: Net, n: int) -> State:
    """The state before the first round."""
    for target in alg.required:
        if not 0 <= target < n:
            raise ValueError(f"target: expected a client from 0 to {n - 1}, got {target}.")
    g, fresh = alg.init(net, n)
    own = {k: v.expand(n, *v.shape).clone() for k, v in fresh.items()}
    return State({k: v.clone() for k, v in g.items()}, own, net.b0.expand(n, -1).clone())


def cohort_of(alg: FedAvg, setting: Setting, ids: Tensor, round: int) -> Cohort:
    size = setting.data.size("train").cpu()[ids]
    share = size.double() if alg.weighting == "samples" else torch.ones(len(ids), dtype=torch.float64)
    return Cohort(ids, share / share.sum(), size, setting.data.n, round, setting.rounds)


def sample(alg: FedAvg, setting: Setting, round: int, participation: float = 1.0, among: Tensor | None = None) -> Tensor:
    """The ids of this round's cohort, ascending: max(1, floor(participation * n + 0.5)) of the n clients `among` (default: all),
    the required ones in any case."""
    clients = torch.arange(setting.data.n) if among is None else among.sort().values
    n = len(clients)
    m = max(1, int(participation * n + 0.5))
    if m >= n and set(alg.required) <= set(clients.tolist()):
        return clients
    order = clients[torch.randperm(n, generator=generator_of(setting.seed, round, "cohort"))].tolist()
    first = [*alg.required, *(i for i in order if i not in alg.required)]
    return torch.tensor(sorted(first[: max(m, len(alg.required))]))


@few_threads
def step(alg: FedAvg, state: State, setting: Setting, ids: Tensor, buffers: str = "local") -> tuple[State, Outcome]:
    """One round with the clients `ids`; gives the new state, or the old one (with the round counted) where the round is void.

    A client with anything not finite in its upload or its new state is absent from the round: it keeps its old state and the
    others' shares are renormalised. Without a required client, or without anybody, the round is void.
    """
    absent = set(alg.required) - set(ids.tolist())
    if absent:
        raise ValueError(f"ids: the target {min(absent)} must take part in every round, got {ids.tolist()}; `sample` picks it.")
    round = state.round + 1
    cohort = cohort_of(alg, setting, ids, round)
    at = onto(ids, state.buffers.device)
    local = Local(setting, ids, round, state.buffers[at])
    down = alg.send(state.g, cohort, generator_of(setting.seed, round, "send"))
    new, up = alg.client(down, {k: v[at if v.device == at.device else ids] for k, v in state.own.items()}, local)
    fine = finite([*up.values(), *new.values(), local.buffers], len(ids))
    outcome = Outcome(ids.tolist(), ids[~fine].tolist(), bytes_down=nbytes(down), bytes_up=nbytes(up))
    outcome.void = not bool(fine.any()) or any(t in outcome.dropped for t in alg.required)
    if local.train_loss is not None and fine.any():
        kept = cohort.share * fine
        outcome.train_loss = float((local.train_loss.double().cpu()[fine] * kept[fine]).sum() / kept.sum())
    if outcome.void:
        return State(state.g, state.own, state.buffers, round, state.void + 1), outcome
    if outcome.dropped:
        ids = ids[fine]
        cohort = cohort_of(alg, setting, ids, round)
        up, new = ({k: v[fine.to(v.device)] for k, v in d.items()} for d in (up, new))
        local.buffers = local.buffers[fine.to(local.buffers.device)]
    rows = local.buffers
    if buffers == "average" and rows.shape[1]:
        rows = ops.aggregate(rows, onto(cohort.share[None], rows.device)).expand(len(state.buffers), -1)
        ids = torch.arange(len(state.buffers))
    commit = Commit(ids, *((state.own[k], v) for k, v in new.items()), (state.buffers, rows))
    g = alg.server(state.g, up, cohort)
    commit.write()  # only now: the server has accepted the round
    return State(g, state.own, state.buffers, round, 0), outcome


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


def finite(tensors: Iterable[Tensor], count: int) -> Tensor:
    """Bool [S]: which clients' rows are finite throughout. One pass: a float64 sum is finite only if all its float32 terms are; and one
    look at what a device found."""
    found: dict[torch.device, Tensor] = {}
    for v in tensors:
        if v.is_floating_point() and v.numel():
            fine = v.reshape(count, -1).sum(1, dtype=torch.float64).isfinite()
            found[v.device] = found[v.device] & fine if v.device in found else fine
    everywhere = torch.ones(count, dtype=torch.bool)
    for fine in found.values():
        everywhere &= fine.cpu()
    return everywhere


def nbytes(payload: Payload) -> int:
    """Bytes that travel: every client's slice, a pooled row as often as it is sent."""
    total = 0
    for v in payload.values():
        if isinstance(v, Pool):
            total += v.index.numel() * v.rows.shape[1:].numel() * v.rows.element_size()
        else:
            total += v.numel() * v.element_size()
    return total


@few_threads
def evaluate(alg: FedAvg, state: State, setting: Setting, split: str = "test", clients: Tensor | None = None) -> Tensors:
    """Every client's personalized model on its own data: "loss" [N], "size" [N] and, for classes, "accuracy" [N].

    A client without samples of `split`, or not among `clients` (ids; default: all), is not looked at: NaN, and size 0.
    """
    n, size = setting.data.n, setting.data.size(split)
    if clients is not None:
        size = torch.zeros_like(size).index_copy(0, clients, size[clients])
    ids = size.nonzero()[:, 0]
    if not len(ids):
        raise ValueError(f"split: none of the clients has a sample of {split!r} to be evaluated on.")
    round = max(1, state.round)
    cohort = cohort_of(alg, setting, ids, round)
    local = Local(setting, ids, round, state.buffers[ids])
    down = alg.send(state.g, cohort, generator_of(setting.seed, round, "evaluation"))
    view = alg.personal(down, state.own if len(ids) == n else {k: v[ids] for k, v in state.own.items()}, local)
    own_way = type(alg).predict is not FedAvg.predict or alg.returns != "logits"
    loss, accuracy = (None if own_way else local.measure(view["w"], split)) or one_by_one(alg, view, local, split)
    none = torch.full((n,), torch.nan, dtype=torch.float64)
    result = {"loss": loss} if accuracy is None else {"loss": loss, "accuracy": accuracy}
    return {k: none.index_copy(0, ids, v.double().cpu()) for k, v in result.items()} | {"size": size}


def one_by_one(alg: FedAvg, view: Tensors, local: Local, split: str) -> tuple[Tensor, Tensor | None]:
    """Each client's mean loss [S] and, for classes, its share of right answers [S], by the algorithm's own `predict`."""
    losses, hits = [], []
    for scores, y in local.scores(alg.predict, view, split):
        if alg.returns == "probabilities" and scores.dim() > 1 and scores.shape[1] > 1 and not y.is_floating_point():
            losses.append(torch.nn.functional.nll_loss(scores.clamp(min=1e-12).log(), y))
        else:
            losses.append(local.net.criterion(scores, y))
        if not y.is_floating_point():
            hits.append(right(scores, y).double().mean())
    return torch.stack(losses), torch.stack(hits) if hits else None
