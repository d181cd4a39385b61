"""One round of any algorithm: who takes part, what each does, what is kept; and the evaluation between rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, Commit, FedAvg, Payload, Pool, State, Tensors, Void, cohort_from, cohort_of
from pflcore.data.ragged import onto
from pflcore.metrics import Metric, measured_by
from pflcore.ops import kinds
from pflcore.simulation import rows, uploads
from pflcore.train import Local, Setting
from pflcore.train.bridge import few_threads
from pflcore.train.losses import shares_right, that_count
from pflcore.train.net import Net
from pflcore.train.random import drawn, generator_of

__all__ = ["Outcome", "begin", "evaluate", "sample", "step"]


@dataclass
class Outcome:
    """What one round did."""

    ids: list[int]
    dropped: list[int] = field(default_factory=list)  # clients whose update or new state was not finite
    void: bool = False
    bytes_down: int = 0
    bytes_up: int = 0
    train_loss: float | None = None  # mean over the cohort of the minibatch losses, weighted by share
    moved: list[float | None] | None = None  # each client's update norm over the cohort's median; None: dropped, or nothing to measure
    clipped: list[int] = field(default_factory=list)  # clients whose update was shortened to `clip`
    factor: Tensor | None = None  # [S'] how much of the update of each who was not dropped `clip` left, float64
    why: str | None = None  # the round is void for this reason of the algorithm's
    spoilt: list[str] = field(default_factory=list)  # what the server would hold that is not finite: the round is void


@kinds.takes(alg=kinds.a(FedAvg), net=kinds.a(Net), n=kinds.whole(1))
def begin(alg: FedAvg, net: Net, n: int, folder: Path | None = None, server: bool = False) -> State:
    """The state before the first round; with `folder` each client's rows, its own and the server's, are in a file there; with `server`
    without the clients' own."""
    for target in alg.required:
        if not 0 <= target < n:
            raise ValueError(f"{'target' if alg.root is None else 'root'}: expected a client from 0 to {n - 1}, got {target}.")
    g, fresh = alg.init(net, n)
    fresh = {} if server else fresh
    own = rows.OnDisk(fresh, n, folder) if folder else {k: v.expand(n, *v.shape).clone() for k, v in fresh.items()}
    on_disk = per_client(g, n) if folder else set()
    return State({k: rows.cloned(v, folder if k in on_disk else None) for k, v in g.items()}, own, net.b0.expand(n, -1).clone())


def per_client(g: Tensors, n: int) -> set[str]:
    """Which of the server's tensors are a model for each client."""
    return {k for k, v in g.items() if v.dim() == 2 and len(v) == n and v.is_floating_point() and v.dtype != torch.float64}


@kinds.takes(
    alg=kinds.a(FedAvg),
    round=kinds.whole(1),
    participation=kinds.number(0, 1, "a fraction in (0, 1]"),
    among=kinds.TENSOR,
)
def sample(alg: FedAvg, setting: Setting, round: int, participation: float = 1.0, among: Tensor | None = None) -> Tensor:
    """The ids of this round's cohort, ascending: max(1, floor(participation * n + 0.5)) of the n clients `among` (ids, ascending; default:
    all), the required ones in any case."""
    n = setting.data.n if among is None else len(among)
    m = max(1, int(participation * n + 0.5))
    order = drawn(n, m, setting.seed, round, "cohort") if m < n else torch.arange(n)
    if among is not None:
        order = among[order]
    if not alg.required:
        return order.sort().values
    first = [*alg.required, *(i for i in order.tolist() if i not in alg.required)]
    extra = 0 if among is None else sum(i not in among for i in alg.required)  # who join beside those who may take part
    return torch.tensor(sorted(first[: max(m + extra, len(alg.required))]))


Transport = Callable[[Tensors, Tensors, Cohort, torch.Generator], Tensors]
METRICS = kinds.Kind("a dict of functions by name", lambda v: isinstance(v, Mapping) and all(map(callable, v.values())))


@kinds.takes(
    buffers=kinds.BUFFERS,
    alg=kinds.a(FedAvg),
    state=kinds.a(State),
    setting=kinds.a(Setting),
    ids=kinds.TENSOR,
    clip=kinds.POSITIVE,
    transport=kinds.FUNCTION,
)
@few_threads
def step(
    alg: FedAvg,
    state: State,
    setting: Setting,
    ids: Tensor,
    buffers: str = "auto",
    clip: float | None = None,
    transport: Transport | None = None,
) -> tuple[State, Outcome]:
    """One round with the clients `ids`, in any order; gives the new state, or the old one (with the round counted) where it is void.
    `state` is used up: its rows may be written in place. No update is longer than `clip` (Euclidean norm) where that is given.

    `buffers` says what becomes of batch norm's running statistics: see `buffers_of`. `transport` is what happens to the uploads on their
    way: a function of (uploads [S, ...], server's state, cohort, generator) that gives what reaches the server.
    A client with anything not finite in its upload or its new state is absent from the round: it keeps its old state and the
    others' shares are renormalised. Without a required client, without anybody, or where the server's own new state is not finite,
    the round is void.
    """
    alg.check_training(setting.training)
    absent = set(alg.required) - set(ids.tolist())
    if absent:
        raise ValueError(f"ids: the target {min(absent)} must take part in every round, got {ids.tolist()}; `sample` picks it.")
    policy = buffers_of(alg, setting.net, buffers)
    given, ids = ids, ids.unique()  # ascending
    if len(ids) < len(given):
        raise ValueError(f"ids: expected each client once, got {given.tolist()}.")
    round = state.round + 1
    cohort = cohort_of(alg, setting, ids, round)
    at = onto(ids, state.buffers.device)
    local = Local(setting, ids, round, state.buffers[at], joined=state.joined[ids])
    down = alg.send(state.g, cohort, generator_of(setting.seed, round, "send"))
    rows.see(state.own, ids)
    new, up = alg.client(down, {k: v[at if v.device == at.device else ids] for k, v in state.own.items()}, local)
    if transport is not None:
        up = transport(up, state.g, cohort, generator_of(setting.seed, round, "transport"))
    outcome = Outcome(ids.tolist(), bytes_down=nbytes(down), bytes_up=nbytes(up))
    if policy == "average":
        outcome.bytes_down, outcome.bytes_up = (n + nbytes({"": local.buffers}) for n in (outcome.bytes_down, outcome.bytes_up))
    return receive(alg, state, cohort, up, new, local.buffers, outcome, policy, clip, local.train_loss), outcome


def receive(
    alg: FedAvg,
    state: State,
    cohort: Cohort,
    up: Tensors,  # [S, ...]
    new: Tensors,  # [S, ...] the clients' own state
    buffers: Tensor,  # [S, b]
    outcome: Outcome,
    policy: str,
    clip: float | None = None,
    loss: Tensor | None = None,  # [S]
) -> State:
    """The server's part of a round, `step`'s second half: the state that follows; `outcome` is told what happened."""
    ids, round = cohort.ids, cohort.round
    fine = finite([*up.values(), *new.values(), buffers], len(ids))
    outcome.dropped = ids[~fine].tolist()
    outcome.void = not bool(fine.any()) or any(t in outcome.dropped for t in alg.required)
    if loss is not None and fine.any():
        kept = cohort.share * fine
        outcome.train_loss = float((loss.double().cpu()[fine] * kept[fine]).sum() / kept.sum())
    if outcome.void:
        return replace(state, round=round, void=state.void + 1)
    if outcome.dropped:
        ids = ids[fine]
        cohort = cohort_from(alg, ids, cohort.size[fine], cohort.n, round, cohort.rounds, len(outcome.dropped))
        up, new = ({k: v[fine.to(v.device)] for k, v in d.items()} for d in (up, new))
        buffers = buffers[fine.to(buffers.device)]
    norm = uploads.norms(up, state.g, ids, cohort.n)
    if norm is not None:
        relative = uploads.ratios(norm)
        if relative is not None:
            each = iter(relative.tolist())
            outcome.moved = [next(each) if one else None for one in fine.tolist()] if outcome.dropped else list(each)
        if clip is not None:
            outcome.clipped = ids[norm > clip].tolist()
            up, outcome.factor = uploads.shortened(up, state.g, ids, cohort.n, norm, clip)
            if new and outcome.clipped:
                new = alg.kept(new, rows.read(state.own, ids), outcome.factor[:, None])
    commit = Commit(ids, *((state.own[k], v) for k, v in new.items()), (state.joined, torch.ones(len(ids), dtype=torch.bool)))
    averaged = policy == "average" and buffers.shape[1] > 0
    statistics = None if averaged else Commit(ids, (state.buffers, buffers))
    # of its own where more can fail after the server
    try:
        g = alg.server({k: v.clone() for k, v in state.g.items()} if averaged else state.g, up, cohort)
    except Void as void:
        outcome.void, outcome.why = True, str(void)
        return replace(state, round=round, void=state.void + 1)
    outcome.spoilt = uploads.not_finite(state.g, g)
    if outcome.spoilt:
        outcome.void = True
        return replace(state, round=round, void=state.void + 1)
    if statistics is None:
        mixed = mixed_statistics(state.buffers, buffers, alg.statistics(g, up, cohort))
        statistics = Commit(torch.arange(len(mixed)), (state.buffers, mixed))
    commit.write()  # only now: the server has accepted the round
    statistics.write()
    return replace(state, g=g, round=round, void=0)


def buffers_of(alg: FedAvg, net: Net, buffers: str = "auto") -> str:
    """What becomes of batch norm's running statistics: "average", by the weights that the models themselves are mixed with, for every
    client, also one that did not take part; or "local", each client's own. "auto" is what the method's paper says, else "average" where
    clients are served a mix of models, and "local" where they are served what they trained themselves.

    Under "local" a client that never trained is evaluated with the mean of those who did.
    """
    known = alg.buffers if alg.defence is None else tuple(b for b in alg.buffers if b != "average")
    if buffers == "auto":
        return known[0]
    if buffers not in ("average", "local", "models"):
        raise ValueError(f"buffers: expected 'auto', 'average' or 'local', got {buffers!r}.")
    if buffers not in known and net.buffer_names:
        what = type(alg).__name__ + (f" with defence={alg.defence!r}" if alg.defence else "")
        raise ValueError(f"buffers: {what} knows {' and '.join(map(repr, known))} statistics, got {buffers!r}.")
    return buffers


def mixed_statistics(old: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """All clients' statistics [N, b]: `weight` [1, S] or [N, S], by its sums, times the `rows` [S, b]; `old` for a row of zeros."""
    total = weight.sum(1, keepdim=True)
    mixed = ops.aggregate(rows, onto(weight / total.clamp(min=1e-300), rows.device))
    return torch.where(onto(total > 0, rows.device), mixed, old)


def finite(tensors: Iterable[Tensor], count: int) -> Tensor:
    """Bool [S]: which clients' rows are finite throughout. One pass: a float64 sum is finite only if all its terms are (those of float32
    squared, by the kernel for distances); and one look at what a device found."""
    parts: dict[torch.device, Tensor] = {}
    for v in tensors:
        if v.is_floating_point() and v.numel():
            rows = v.reshape(count, -1)
            fine = (
                rows.sum(1) if v.dtype == torch.float64 else ops.pairwise_sqdist(rows, rows.new_zeros(1, rows.shape[1]))[:, 0]
            ).isfinite()
            parts[v.device] = parts[v.device] & fine if v.device in parts else fine
    everywhere = torch.ones(count, dtype=torch.bool)
    for fine in parts.values():
        everywhere &= fine.cpu()
    return everywhere


def nbytes(payload: Payload) -> int:
    """Bytes that travel: every client's slice, a pooled row as often as it is sent."""
    total = 0
    for v in payload.values():
        if isinstance(v, Pool):
            total += int((v.index >= 0).sum()) * v.rows.shape[1:].numel() * v.rows.element_size()
        else:
            total += v.numel() * v.element_size()
    return total


@kinds.takes(
    buffers=kinds.BUFFERS,
    alg=kinds.a(FedAvg),
    state=kinds.a(State),
    setting=kinds.a(Setting),
    split=kinds.TEXT,
    clients=kinds.TENSOR,
    metrics=METRICS,
)
@few_threads
def evaluate(
    alg: FedAvg,
    state: State,
    setting: Setting,
    split: str = "test",
    clients: Tensor | None = None,
    buffers: str = "auto",
    metrics: Mapping[str, Metric] | None = None,
) -> Tensors:
    """Every client's personalized model on its own data: "loss" [N], "size" [N], for classes "accuracy" [N], and each of `metrics` [N].

    A client without samples of `split`, or not among `clients` (ids; default: all), is not looked at: NaN, and size 0. A loss that is
    not finite is infinite, never NaN: whoever takes a mean meets it. There is an accuracy where the criterion scores classes.
    """
    ids, values = looked_at(alg, state, setting, split, torch.arange(setting.data.n) if clients is None else clients, buffers, metrics)
    none = torch.full((setting.data.n,), torch.nan, dtype=torch.float64)
    size = torch.zeros(setting.data.n, dtype=torch.int64).index_copy(0, ids, values.pop("size"))
    return {k: none.index_copy(0, ids, v) for k, v in values.items()} | {"size": size}


@few_threads
def evaluate_some(
    alg: FedAvg,
    state: State,
    setting: Setting,
    split: str,
    clients: Tensor,
    buffers: str = "auto",
    metrics: Mapping[str, Metric] | None = None,
) -> Tensors:
    """The values of `evaluate` of those of `clients` who have samples of `split`, and of nobody else: each [S], their ids in "clients"."""
    ids, values = looked_at(alg, state, setting, split, clients, buffers, metrics)
    return {"clients": ids, **values}


def looked_at(
    alg: FedAvg, state: State, setting: Setting, split: str, clients: Tensor, buffers: str, metrics: Mapping[str, Metric] | None
) -> tuple[Tensor, Tensors]:
    """Who of `clients` has samples, ids [S], and their values [S], in float64, "size" in int64."""
    size = setting.data.size(split)[clients]
    ids, size = clients[size > 0], size[size > 0]
    if not len(ids):
        raise ValueError(f"split: none of the clients has a sample of {split!r} to be evaluated on.")
    most = min(map(rows.at_once, state.own.values()), default=len(ids)) if isinstance(state.own, rows.OnDisk) else len(ids)
    if len(ids) > most:
        parts = [looked_at(alg, state, setting, split, part, buffers, metrics)[1] for part in ids.split(most)]
        return ids, {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    view, local = views(alg, state, setting, ids, buffers)
    loss, accuracy = (None if own_way(alg) else local.measure(view["w"], split)) or one_by_one(alg, view, local, split)
    loss = loss.double().nan_to_num(math.inf, math.inf)
    result = {"loss": loss} if accuracy is None else {"loss": loss, "accuracy": accuracy}
    if metrics:
        pairs = [that_count(*pair) for pair in local.scores(alg.predict, view, split)]
        result |= {name: measured_by(name, f, pairs, ids.tolist()) for name, f in metrics.items()}
    return ids, {k: v.double().cpu() for k, v in result.items()} | {"size": size}


def views(alg: FedAvg, state: State, setting: Setting, ids: Tensor, buffers: str = "auto") -> tuple[Tensors, Local]:
    """The personalized views [S, ...] of the clients `ids` [S] as evaluation has them, and what their hook was given."""
    round = max(1, state.round)
    cohort = cohort_of(alg, setting, ids, round)
    joined, buffer = state.joined[ids], state.buffers[onto(ids, state.buffers.device)]
    if buffer.shape[1] and state.joined.any() and buffers_of(alg, setting.net, buffers) == "local":
        buffer[onto(~joined, buffer.device)] = state.buffers[onto(state.joined, buffer.device)].mean(0)
    local = Local(setting, ids, round, buffer, joined=joined)
    down = alg.send(state.g, cohort, generator_of(setting.seed, round, "evaluation"))
    everybody = len(ids) == setting.data.n and not isinstance(state.own, rows.OnDisk)
    own = state.own if everybody else rows.read(state.own, ids)
    return alg.personal(down, own, local), local


def own_way(alg: FedAvg) -> bool:
    """Whether the algorithm predicts otherwise than by one model's logits."""
    return type(alg).predict is not FedAvg.predict or alg.returns != "logits"


def one_by_one(alg: FedAvg, view: Tensors, local: Local, split: str) -> tuple[Tensor, Tensor | None]:
    """Each client's mean loss [S] and, for classes, its share of right answers [S], by the algorithm's own `predict`."""
    losses, hits = [], []
    for scores, y in local.scores(alg.predict, view, split):
        several = scores.dim() > y.dim() and scores.shape[1] > 1
        if alg.returns == "probabilities" and several and local.net.scores_classes and not y.is_floating_point():
            scores = scores.clamp(min=1e-12).log()
        losses.append(local.net.criterion(scores, y))
        if local.net.scores_classes and not y.is_floating_point():
            hits.append(shares_right(scores, y).mean())
    return torch.stack(losses), torch.stack(hits) if hits else None
