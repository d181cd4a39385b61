"""Evaluation: the personalized models of a state on the data of their clients.

Symbols: N clients of the federation; S of them are evaluated; b numbers of batch norm's
running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import Algorithm, Payload, Tensors
from pflcore.check import checked, require
from pflcore.data._federation import Federation
from pflcore.metrics import Metric, is_correct, measured_by
from pflcore.simulation._state import (
    RunConfig,
    State,
    client_rows,
    have_initial_models,
)
from pflcore.train import Clients
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._losses import without_masked
from pflcore.train._schedule import assign_blocks
from pflcore.train._workers import single_threaded

Metrics = Mapping[str, Metric] | None


@checked
def evaluate(
    config: RunConfig,
    state: State,
    split: str = "test",
    clients: Tensor | None = None,
    metrics: Metrics = None,
) -> Tensors:
    """Evaluates every client's personalized model on its own data.

    Returns "loss" [N], "size" [N], and each of `metrics` [N]. Where the loss scores
    classes there is also "accuracy" [N]. A client without samples of `split`, or not
    among `clients`, is not evaluated: its values are NaN, and its size is 0. A loss
    that is not finite is infinite, never NaN, so that a mean shows it.

    Args:
        config: The options of the run.
        state: The state whose models are evaluated.
        split: The split on which the models are evaluated.
        clients: The ids of the clients that are evaluated; None for all.
        metrics: More metrics, by name: functions of one client's (scores, labels).
    """
    n = config.data.n
    ids = torch.arange(n) if clients is None else clients
    values = evaluate_clients(config, state, split, ids, metrics)
    evaluated = values.pop("clients")
    empty = torch.full((n,), torch.nan, dtype=torch.float64)
    table = dict.fromkeys(values, empty)
    table["size"] = torch.zeros(n, dtype=torch.int64)
    return {
        name: table[name].index_copy(0, evaluated, value)
        for name, value in values.items()
    }


def evaluate_clients(
    config: RunConfig, state: State, split: str, ids: Tensor, metrics: Metrics
) -> Tensors:
    """The values [S] of `evaluate` for those clients with samples.

    The ids of these clients are in "clients". Raises ValueError where no client has
    samples. The ranks of a run share the clients.

    Args:
        config: The options of the run.
        state: The state whose models are evaluated.
        split: The split on which the models are evaluated.
        ids: The ids of the clients to evaluate, if they have samples.
        metrics: More metrics, by name.
    """
    size = config.data.size(split)
    ids = ids[size[ids] > 0]
    require(len(ids), "split", "a split of which a client has samples", split)
    ranks = config.ranks
    place = f"the evaluation on {split} after round {state.round}"
    parts = []
    for group in split_by_training(config.data, ids):
        blocks = assign_blocks(config, group, size[group])
        shares = ranks.share(size[group], blocks)
        own = shares[ranks.rank]
        values = None
        with (
            single_threaded(config.fits_one_thread(len(group))),
            REPEATABLE_FLAGS.set_for(config.net.w0.device),
        ):
            with ranks.own_work(place):
                if len(own):
                    values = _evaluate_part(
                        config, state, split, group[own], metrics, blocks[own]
                    )
            values = ranks.gather(place, values, shares)
        parts.append({"clients": group, **values, "size": size[group]})
    if len(parts) == 1:
        return parts[0]
    order = torch.cat([part["clients"] for part in parts]).argsort()
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def correct_samples(
    config: RunConfig, state: State, split: str, ids: Tensor
) -> dict[int, str]:
    """The outcome of each sample: "1" where its class is correct, else "0".

    There is a text for each of the clients `ids` [S], all of which have samples of
    `split`, in the order in which the federation has the client's samples. Samples
    without a label are left out. The targets must be classes.
    """
    outcomes = {}
    for group in split_by_training(config.data, ids):
        model, clients = personalized_models(config, state, group)
        pairs = clients.scores(model, split, config.algorithm.predict)
        for client, pair in zip(group.tolist(), pairs, strict=True):
            correct = is_correct(*without_masked(*pair)).flatten()
            outcomes[client] = "".join(map(str, correct.int().tolist()))
    return outcomes


def split_by_training(data: Federation, ids: Tensor) -> list[Tensor]:
    """The ids [S] of clients with training samples, and those of clients without.

    The last digits of what is computed together depend on each other. So a client
    without training samples, which trains nothing, changes no digit of the others. A
    group without clients is left out.
    """
    has_samples = data.size("train")[ids] > 0
    groups = [ids[has_samples], ids[~has_samples]]
    return [group for group in groups if len(group)]


def _evaluate_part(
    config: RunConfig,
    state: State,
    split: str,
    ids: Tensor,
    metrics: Metrics,
    block_numbers: Tensor,
) -> Tensors:
    """The values [S] of the clients `ids`, float64 on the CPU."""
    alg = config.algorithm
    model, clients = personalized_models(config, state, ids, block_numbers)
    result = None
    if not has_custom_predict(alg):
        # The fast way makes no scores. It returns None where it does not fit the model.
        result = clients.evaluate(model, split)
    scores: list[tuple[Tensor, Tensor]] = []
    if metrics or result is None:
        scores = clients.scores(model, split, alg.predict)
    if result is None:
        returns = alg.traits.returns
        result = clients.loss_and_accuracy(scores, split, returns=returns)
    loss, accuracy = result
    values = {"loss": loss.double().nan_to_num(math.inf, math.inf)}
    if accuracy is not None:
        values["accuracy"] = accuracy
    if metrics:
        pairs = [without_masked(*pair) for pair in scores]
        client_names = config.data.names_of(ids.tolist())
        for name, metric in metrics.items():
            values[name] = measured_by(name, metric, pairs, client_names)
    return {name: value.double().cpu() for name, value in values.items()}


def personalized_models(
    config: RunConfig, state: State, ids: Tensor, block_numbers: Tensor | None = None
) -> tuple[Tensors, Clients]:
    """The models [S, ...] with which the clients `ids` [S] are evaluated.

    Returns them with the clients, whose batch-norm statistics are those that go with
    the models; see `evaluation_buffers`.

    Args:
        config: The options of the run.
        state: The state whose models are made.
        ids: The ids of the clients.
        block_numbers: The numbers [S] of the clients' blocks, where `ids` are a part of
            the clients that are evaluated; None for all of them.
    """
    # The clients that make the models: more than `ids` where an algorithm needs more.
    makers = config.algorithm.clients_for_model(config.data, ids)
    needs_others = len(makers) > len(ids)
    if not needs_others:
        makers = ids
    cohort = config.cohort(
        makers, max(1, state.round), state.participated, "evaluation"
    )
    down = config.algorithm.send(state.server, cohort)
    client_states = client_rows(config, state, makers, down)
    buffers = evaluation_buffers(config, state, makers, down, client_states)
    blocks = None if needs_others else block_numbers
    context = config.without_augmentation()
    clients = Clients(context, makers, cohort.round, buffers, blocks)
    models = dict(config.algorithm.model(down, client_states, clients))
    buffers = models.pop("batch_norm", buffers)
    if needs_others:
        index = to_device(torch.searchsorted(makers, ids), buffers.device)
        models = {key: rows[index] for key, rows in models.items()}
        buffers = buffers[index]
    return models, replace(
        clients, ids=ids, buffers=buffers, known_blocks=block_numbers
    )


def evaluation_buffers(
    config: RunConfig,
    state: State,
    ids: Tensor,  # [S]
    down: Payload,
    client_states: Tensors,
) -> Tensor:  # [S, b]
    """Batch norm's statistics with which the clients `ids` are evaluated.

    Where they are local, a client that never took part has the mean of those that did.
    It has the initial ones where nothing of their training is in its model.
    """
    device = state.buffers.device
    buffers = state.buffers[to_device(ids, device)]
    is_new = ~state.participated[ids]
    if config.averages or not buffers.numel() or not is_new.any():
        return buffers
    is_initial = have_initial_models(config.net, down, client_states, len(ids))
    buffers[to_device(is_new & is_initial, device)] = config.net.b0.to(buffers)
    if state.participated.any():
        participated = to_device(state.participated, device)
        borrows = to_device(is_new & ~is_initial, device)
        buffers[borrows] = state.buffers[participated].mean(0)
    return buffers


def has_custom_predict(alg: Algorithm) -> bool:
    """True where an algorithm predicts otherwise than by one model's logits."""
    return type(alg).predict is not Algorithm.predict or alg.traits.returns != "logits"
