"""The personalized models of a state, and what they are worth on their clients'
data."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pflcore.algorithms._protocol import Algorithm, Tensors
from pflcore.check import checked, require
from pflcore.data._ragged import to_device
from pflcore.metrics import Metric, measured_by
from pflcore.simulation.round import RunConfig, State, client_rows
from pflcore.train import Clients
from pflcore.train._clients import assign_blocks, split_by_block
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._losses import without_masked
from pflcore.train._workers import single_threaded

EVAL_CHUNK_BYTES = 1 << 26  # bytes of rows in files that are read at once
Metrics = Mapping[str, Metric] | None


@checked
def evaluate(
    config: RunConfig,
    state: State,
    split: str = "test",
    clients: Tensor | None = None,
    metrics: Metrics = None,
) -> Tensors:
    """Every client's personalized model on its own data: "loss" [N], "size" [N], for
    classes "accuracy" [N], and each of `metrics` [N].

    A client without samples of `split`, or not among `clients` (ids; default: all), is
    not looked at: NaN, and size 0. A loss that is not finite is infinite, never NaN: a
    mean shows it. There is an accuracy where the loss scores classes.
    """
    n = config.context.data.n
    values = evaluate_clients(
        config, state, split, torch.arange(n) if clients is None else clients, metrics
    )
    ids = values.pop("clients")
    unseen = dict.fromkeys(values, torch.full((n,), torch.nan, dtype=torch.float64))
    unseen["size"] = torch.zeros(n, dtype=torch.int64)
    return {k: unseen[k].index_copy(0, ids, v) for k, v in values.items()}


def evaluate_clients(
    config: RunConfig, state: State, split: str, ids: Tensor, metrics: Metrics
) -> Tensors:
    """The values of `evaluate` of those of `ids` who have samples, and of nobody else:
    each [S], their ids in "clients"."""
    size = config.context.data.size(split)
    ids = ids[size[ids] > 0]
    require(len(ids), "split", "a split of which somebody has samples", split)
    block = assign_blocks(config.context, ids, size[ids])
    places = evaluation_parts(config, state, block)
    repeating = REPEATABLE_FLAGS.set_for(config.context.net.w0.device)
    with single_threaded(config.fits_one_thread(len(ids))), repeating:
        parts = [
            _evaluate_chunk(config, state, split, ids[at], metrics, block[at])
            for at in places
        ]
    order = torch.cat(places).argsort()
    values = {
        k: torch.cat([p[k] for p in parts]).double().cpu()[order] for k in parts[0]
    }
    return {"clients": ids, **values, "size": size[ids]}


def evaluation_parts(
    config: RunConfig, state: State, block_numbers: Tensor
) -> list[Tensor]:
    """Places of the clients who are evaluated in one go, of whole blocks, by the block
    [S] of each: all, or where rows are in files as many as memory has room for."""
    everybody = torch.arange(len(block_numbers))
    if config.folder is None:
        return [everybody]
    most = max(
        1, EVAL_CHUNK_BYTES // max([1, *(v[0].nbytes for v in state.clients.values())])
    )
    parts = list[list[Tensor]]()
    count = most
    for places in split_by_block(everybody, block_numbers):
        if count + len(places) > most:
            parts.append([])
            count = 0
        parts[-1].append(places)
        count += len(places)
    return [torch.cat(part).sort().values for part in parts]


def _evaluate_chunk(
    config: RunConfig,
    state: State,
    split: str,
    ids: Tensor,
    metrics: Metrics,
    block_numbers: Tensor,
) -> Tensors:
    """The values [S] of some clients, in one go."""
    alg = config.algorithm
    model, clients = personalized_models(config, state, ids, block_numbers)
    found = None if has_custom_predict(alg) else clients.evaluate(model, split)
    scores = (
        clients.scores(model, split, alg.predict) if metrics or found is None else []
    )
    loss, accuracy = found or clients.loss_and_accuracy(
        scores, split, returns=alg.traits.returns
    )
    values = {"loss": loss.double().nan_to_num(math.inf, math.inf)}
    values |= {} if accuracy is None else {"accuracy": accuracy}
    if metrics:
        pairs = [without_masked(*pair) for pair in scores]
        values |= {
            k: measured_by(k, f, pairs, ids.tolist()) for k, f in metrics.items()
        }
    return values


def personalized_models(
    config: RunConfig, state: State, ids: Tensor, block_numbers: Tensor | None = None
) -> tuple[Tensors, Clients]:
    """The models [S, ...] of the clients `ids` [S] as evaluation has them, and the
    clients with the statistics of batch norm that go with them; `block_numbers` [S]
    where they are a part of those who are evaluated.

    A client who never took part has the mean of the others' statistics, where they are
    local.
    """
    everybody = config.algorithm.clients_for_model(config.context.data, ids)
    if len(everybody) > len(ids):
        model, clients = _send_and_personalize(config, state, everybody, None)
        at = to_device(torch.searchsorted(everybody, ids), clients.buffers.device)
        model = {k: v[at] for k, v in model.items()}
        buffers = clients.buffers[at]
        return model, replace(
            clients, ids=ids, buffers=buffers, block_numbers=block_numbers
        )
    return _send_and_personalize(config, state, ids, block_numbers)


def _send_and_personalize(
    config: RunConfig, state: State, ids: Tensor, block_numbers: Tensor | None
) -> tuple[Tensors, Clients]:
    cohort = config.cohort(ids, max(1, state.round), "evaluation")
    down = config.algorithm.send(state.server, cohort)
    batch_norm = state.buffers[to_device(ids, state.buffers.device)]
    if batch_norm.numel() and not config.averages and state.participated.any():
        seen, new = (
            to_device(v, batch_norm.device)
            for v in (state.participated, ~state.participated[ids])
        )
        batch_norm[new] = state.buffers[seen].mean(0)
    clients = Clients(config.context, ids, cohort.round, batch_norm, block_numbers)
    model = dict(
        config.algorithm.model(down, client_rows(config, state, ids, down), clients)
    )
    return model, replace(clients, buffers=model.pop("batch_norm", batch_norm))


def has_custom_predict(alg: Algorithm) -> bool:
    """Whether the algorithm predicts otherwise than by one model's logits."""
    return type(alg).predict is not Algorithm.predict or alg.traits.returns != "logits"
