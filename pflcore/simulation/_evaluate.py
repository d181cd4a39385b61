"""The personalized models of a state, and what they are worth on their clients' data."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pflcore.algorithms._protocol import Algorithm, Tensors
from pflcore.check import checked, need
from pflcore.data._ragged import onto
from pflcore.metrics import Metric, measured_by
from pflcore.simulation.round import Setup, State, own_rows
from pflcore.train import Clients
from pflcore.train._card import REPEATING
from pflcore.train._clients import blocks, parted
from pflcore.train._losses import that_count
from pflcore.train._workers import one_thread

CHUNK = 1 << 26  # bytes of rows in files that are read at once
Metrics = Mapping[str, Metric] | None


@checked
def evaluate(
    setup: Setup,
    state: State,
    split: str = "test",
    clients: Tensor | None = None,
    metrics: Metrics = None,
) -> Tensors:
    """Every client's personalized model on its own data: "loss" [N], "size" [N], for classes
    "accuracy" [N], and each of `metrics` [N].

    A client without samples of `split`, or not among `clients` (ids; default: all), is not looked
    at: NaN, and size 0. A loss that is not finite is infinite, never NaN: a mean
    shows it. There is an accuracy where the criterion scores classes.
    """
    n = setup.setting.data.n
    values = measured(setup, state, split, torch.arange(n) if clients is None else clients, metrics)
    ids = values.pop("clients")
    unseen = dict.fromkeys(values, torch.full((n,), torch.nan, dtype=torch.float64))
    unseen["size"] = torch.zeros(n, dtype=torch.int64)
    return {k: unseen[k].index_copy(0, ids, v) for k, v in values.items()}


def measured(setup: Setup, state: State, split: str, ids: Tensor, metrics: Metrics) -> Tensors:
    """The values of `evaluate` of those of `ids` who have samples, and of nobody else: each [S],
    their ids in "clients"."""
    size = setup.setting.data.size(split)
    ids = ids[size[ids] > 0]
    need(len(ids), "split", "a split of which somebody has samples", split)
    block = blocks(setup.setting, ids, size[ids])
    places = parts_of(setup, state, block)
    repeating = REPEATING.set_for(setup.setting.net.w0.device)
    with one_thread(setup.few(len(ids))), repeating:
        parts = [some(setup, state, split, ids[at], metrics, block[at]) for at in places]
    order = torch.cat(places).argsort()
    values = {k: torch.cat([p[k] for p in parts]).double().cpu()[order] for k in parts[0]}
    return {"clients": ids, **values, "size": size[ids]}


def parts_of(setup: Setup, state: State, block: Tensor) -> list[Tensor]:
    """Places of the clients who are evaluated in one go, of whole blocks, by the block [S] of each:
    all, or where rows are in files as many as memory has room for."""
    everybody = torch.arange(len(block))
    if setup.folder is None:
        return [everybody]
    most = max(1, CHUNK // max([1, *(v[0].nbytes for v in state.clients.values())]))
    parts, count = list[list[Tensor]](), most
    for places in parted(everybody, block):
        if count + len(places) > most:
            parts.append([])
            count = 0
        parts[-1].append(places)
        count += len(places)
    return [torch.cat(part).sort().values for part in parts]


def some(
    setup: Setup, state: State, split: str, ids: Tensor, metrics: Metrics, block: Tensor
) -> Tensors:
    """The values [S] of some clients, in one go."""
    alg = setup.algorithm
    model, clients = personalized(setup, state, ids, block)
    found = None if own_way(alg) else clients.measure(model, split)
    scores = clients.scores(model, split, alg.predict) if metrics or found is None else []
    loss, accuracy = found or clients.worth(scores, split, returns=alg.traits.returns)
    values = {"loss": loss.double().nan_to_num(math.inf, math.inf)}
    values |= {} if accuracy is None else {"accuracy": accuracy}
    if metrics:
        pairs = [that_count(*pair) for pair in scores]
        values |= {k: measured_by(k, f, pairs, ids.tolist()) for k, f in metrics.items()}
    return values


def personalized(
    setup: Setup, state: State, ids: Tensor, block: Tensor | None = None
) -> tuple[Tensors, Clients]:
    """The models [S, ...] of the clients `ids` [S] as evaluation has them, and the clients with the
    statistics of batch norm that go with them; `block` [S] where they are a part of those who are
    evaluated.

    A client who never took part has the mean of the others' statistics, where they are local.
    """
    everybody = setup.algorithm.beside(setup.setting.data, ids)
    if len(everybody) > len(ids):
        model, clients = _personalized(setup, state, everybody, None)
        at = onto(torch.searchsorted(everybody, ids), clients.buffers.device)
        model, buffers = {k: v[at] for k, v in model.items()}, clients.buffers[at]
        return model, replace(clients, ids=ids, buffers=buffers, block=block)
    return _personalized(setup, state, ids, block)


def _personalized(
    setup: Setup, state: State, ids: Tensor, block: Tensor | None
) -> tuple[Tensors, Clients]:
    cohort = setup.cohort(ids, max(1, state.round), "evaluation")
    down = setup.algorithm.send(state.server, cohort)
    batch_norm = state.batch_norm[onto(ids, state.batch_norm.device)]
    if batch_norm.numel() and not setup.averages and state.seen.any():
        seen, new = (onto(v, batch_norm.device) for v in (state.seen, ~state.seen[ids]))
        batch_norm[new] = state.batch_norm[seen].mean(0)
    clients = Clients(setup.setting, ids, cohort.round, batch_norm, block)
    model = dict(setup.algorithm.model(down, own_rows(setup, state, ids, down), clients))
    return model, replace(clients, buffers=model.pop("batch_norm", batch_norm))


def own_way(alg: Algorithm) -> bool:
    """Whether the algorithm predicts otherwise than by one model's logits."""
    return type(alg).predict is not Algorithm.predict or alg.traits.returns != "logits"
