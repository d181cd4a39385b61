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
    most = len(ids)
    if setup.folder is not None:  # rows of all of them may not fit into memory
        most = max(1, CHUNK // max([1, *(v[0].nbytes for v in state.clients.values())]))
    with one_thread(setup.few(len(ids))):
        parts = [some(setup, state, split, part, metrics) for part in ids.split(most)]
    values = {k: torch.cat([p[k] for p in parts]).double().cpu() for k in parts[0]}
    return {"clients": ids, **values, "size": size[ids]}


def some(setup: Setup, state: State, split: str, ids: Tensor, metrics: Metrics) -> Tensors:
    """The values [S] of some clients, at once."""
    alg = setup.algorithm
    model, clients = personalized(setup, state, ids)
    found = None if own_way(alg) else clients.measure(model, split)
    scores = clients.scores(model, split, alg.predict) if metrics or found is None else []
    loss, accuracy = found or clients.worth(scores, split, returns=alg.traits.returns)
    values = {"loss": loss.double().nan_to_num(math.inf, math.inf)}
    values |= {} if accuracy is None else {"accuracy": accuracy}
    if metrics:
        pairs = [that_count(*pair) for pair in scores]
        values |= {k: measured_by(k, f, pairs, ids.tolist()) for k, f in metrics.items()}
    return values


def personalized(setup: Setup, state: State, ids: Tensor) -> tuple[Tensors, Clients]:
    """The models [S, ...] of the clients `ids` [S] as evaluation has them, and the clients with the
    statistics of batch norm that go with them.

    A client who never took part has the mean of the others' statistics, where they are local.
    """
    cohort = setup.cohort(ids, max(1, state.round), "evaluation")
    down = setup.algorithm.send(state.server, cohort)
    batch_norm = state.batch_norm[onto(ids, state.batch_norm.device)]
    if batch_norm.numel() and not setup.averages and state.seen.any():
        seen, new = (onto(v, batch_norm.device) for v in (state.seen, ~state.seen[ids]))
        batch_norm[new] = state.batch_norm[seen].mean(0)
    clients = Clients(setup.setting, ids, cohort.round, batch_norm)
    model = dict(setup.algorithm.model(down, own_rows(setup, state, ids, down), clients))
    return model, replace(clients, buffers=model.pop("batch_norm", batch_norm))


def own_way(alg: Algorithm) -> bool:
    """Whether the algorithm predicts otherwise than by one model's logits."""
    return type(alg).predict is not Algorithm.predict or alg.traits.returns != "logits"
