"""Scores, losses, accuracies and full gradients of a cohort's models.

A chain's kernels compute them where they can; otherwise the module itself does, client
after client, and on a GPU for a block of clients at once. `Clients` calls these
functions with the cohort's data.

Symbols: S clients of the cohort; s clients of a group; P weights of the model; b
numbers of batch norm's statistics; C classes; n samples; w rows of weights; x, y
samples and labels; z scores. A place is the number of a sample in the federation's
pool; a position is the number of a client in the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain as concatenate
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pflcore._device import to_device
from pflcore.data._ragged import Ragged
from pflcore.nn._context import forward_context
from pflcore.ops._chain import chain_eval, chain_grad
from pflcore.ops._sums import index_add
from pflcore.train._body import Body
from pflcore.train._context import TrainContext
from pflcore.train._engines import Tensors, gradients
from pflcore.train._losses import LOSSES, fraction_correct
from pflcore.train._net import Net
from pflcore.train._schedule import EVAL_BATCH, even_sample_slices, split_by_block
from pflcore.train._validate import check_rows

ALIGNMENT_BYTES = 64  # a multiple of it is where torch begins a tensor's memory
MIN_PROBABILITY = 1e-12  # the smallest one of which a loss takes the logarithm
# model of one client, net, x -> scores
Predict = Callable[[Tensors, Net, Tensor], Tensor]
# each client's scores [n, ...] and labels [n, ...]
ScoresAndLabels = list[tuple[Tensor, Tensor]]


def predict_features(model: Tensors, net: Net, x: Tensor) -> Tensor:
    """The features [B, H] of a batch `x` that the head of the model "w" sees."""
    return net.features(model["w"], x)


def predict_row(model: Tensors, net: Net, x: Tensor) -> Tensor:
    """Scores [n, ...] of a model that is one row, {"w": [P]}."""
    return net(model["w"], x)


def align_memory(v: Tensor) -> Tensor:
    """The values of `v` [...] in memory that begins at torch's alignment.

    The last digits of a product with a row depend on where the row's memory begins, and
    so on the row's position among the others.
    """
    return v if v.data_ptr() % ALIGNMENT_BYTES == 0 else v.clone()


# scores -----------------------------------------------------------------------


def is_one_model(model: Tensors) -> bool:
    """True where the rows [S, ...] are one row, expanded to several clients."""
    return all(len(v) > 1 and v.stride(0) == 0 for v in model.values())


def equal_buffer_groups(
    block_numbers: Tensor,  # [S]
    buffers: Tensor,  # [S, b]
) -> list[list[int]]:
    """Positions of clients by block, where the block has one set of statistics.

    A client of another block is a group by itself.
    """
    groups: list[list[int]] = []
    positions = torch.arange(len(block_numbers))
    for block in split_by_block(positions, block_numbers):
        if _has_equal_buffers(block, buffers):
            groups.append(block.tolist())
        else:
            groups += block[:, None].tolist()
    return groups


def _has_equal_buffers(block: Tensor, buffers: Tensor) -> bool:
    """True where the clients at the positions `block` have the same statistics."""
    if len(block) < 2 or not buffers.shape[1]:
        return True
    rows = buffers[to_device(block, buffers.device)]
    return bool((rows == rows[:1]).all())


def client_scores(
    context: TrainContext,
    model: Tensors,  # [S, ...]
    buffers: Tensor,  # [S, b]
    lists: Ragged,  # places of each client's samples
    groups: list[list[int]],  # positions of the clients that share batches
    predict: Predict,
) -> list[Tensor]:  # [n, ...] of each client
    """Each client's scores in evaluation mode."""
    client_places = list(lists)
    batches: list[tuple[int, Tensor]] = []  # position of a client, places
    for group in groups:
        places = torch.cat([client_places[i] for i in group])
        # All clients of the group have the model and the statistics of the first one.
        for batch_places in places.split(EVAL_BATCH):
            batches.append((group[0], batch_places))

    def batch_scores(batch: tuple[int, Tensor]) -> Tensor:
        position, places = batch
        client_model = {name: align_memory(v[position]) for name, v in model.items()}
        return _batch_scores(context, client_model, buffers[position], places, predict)

    z = torch.cat(context.workers.map(batch_scores, batches))
    positions = list(concatenate.from_iterable(groups))
    pieces = z.split([len(client_places[i]) for i in positions])
    scores = dict(zip(positions, pieces, strict=True))
    return [scores[i] for i in range(len(client_places))]


def _batch_scores(
    context: TrainContext,
    client_model: Tensors,  # [...]
    buffers: Tensor,  # [b]
    places: Tensor,  # [n]
    predict: Predict,
) -> Tensor:  # [n, ...]
    """Scores of samples by the model of one client.

    Where scores by a chain's kernels are not finite, the module has the last word, as
    in `Clients.evaluate`.
    """
    x = context.data.x.index_select(0, places)

    def scores_by(body: Body | None) -> Tensor:
        with (
            torch.no_grad(),
            forward_context(
                train=False, buffers=buffers, single_client=True, body=body
            ),
        ):
            return predict(client_model, context.net, x)

    body = context.engine.body
    scores = scores_by(body)
    check_rows(scores, len(places))
    if body is not None and not scores.isfinite().all():
        scores = scores_by(None)
    return scores


def block_scores(
    context: TrainContext,
    w: Tensor,  # [S, P]
    buffers: Tensor,  # [S, b]
    lists: Ragged,  # places of each client's samples
    groups: list[list[int]],  # positions of the clients that share batches
    block_numbers: Tensor,  # [S]
) -> list[Tensor]:  # [n, ...] of each client
    """Each client's scores in evaluation mode, by vmap over the groups of a block.

    There is a client with samples. All groups of a block take their k-th batches at
    once; a short batch ends with copies of its last sample.
    """
    positions = list(concatenate.from_iterable(groups))
    places = lists.take(torch.tensor(positions)).flat
    size = torch.tensor([int(lists.size[group].sum()) for group in groups])
    first = torch.tensor([group[0] for group in groups])
    begin = size.cumsum(0) - size
    pieces: list[list[Tensor]] = [[] for _ in groups]
    block_positions = torch.arange(len(groups))
    for block in split_by_block(block_positions, block_numbers[first]):
        longest = int(size[block].max())
        batch = torch.arange(min(longest, EVAL_BATCH))
        for start in range(0, longest, EVAL_BATCH):
            members = block[size[block] > start]
            last = size[members] - 1
            index = begin[members, None] + (start + batch).minimum(last[:, None])
            x_places = places[to_device(index, places.device)]
            rows = to_device(first[members], w.device)
            z = _vmap_scores(context, w[rows], buffers[rows], x_places)
            for i, scores in zip(members.tolist(), z, strict=True):
                pieces[i].append(scores[: int(size[i]) - start])
    z = torch.cat(list(concatenate.from_iterable(pieces)))
    by_position = z.split(lists.size[positions].tolist())
    scores_of = dict(zip(positions, by_position, strict=True))
    return [scores_of[i] for i in range(len(lists))]


def _vmap_scores(
    context: TrainContext,
    w: Tensor,  # [s, P]
    buffers: Tensor,  # [s, b]
    places: Tensor,  # [s, B]
) -> Tensor:  # [s, B, ...]
    """Scores of samples by the models of several clients."""

    def model_scores(row: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        with forward_context(train=False, buffers=buffers):
            return context.net(row, x)

    x = context.data.x.index_select(0, places.flatten()).unflatten(0, places.shape)
    with torch.no_grad():
        scores = torch.vmap(model_scores)(w, buffers, x)
    check_rows(scores[0], places.shape[1])
    return scores


# losses and accuracies --------------------------------------------------------


def client_means(values: Tensor, lists: Ragged) -> Tensor:
    """Each client's mean [S] float64 of the values [n] of its samples."""
    zeros = values.new_zeros(len(lists)).double()
    sums = index_add(zeros, lists.owners(), values.double())
    return sums / to_device(lists.size, values.device)


def client_nanmeans(values: Tensor, lists: Ragged) -> Tensor:
    """Each client's mean [S] float64 of values [n], without NaN."""
    is_value = ~values.isnan()
    return client_means(values.nan_to_num(0.0), lists) / client_means(is_value, lists)


def accuracies(pairs: ScoresAndLabels, lists: Ragged) -> Tensor:
    """Each client's accuracy [S] float64, from its scores and labels."""
    z = torch.cat([scores for scores, _ in pairs])
    y = torch.cat([labels for _, labels in pairs])
    return client_nanmeans(fraction_correct(z, y), lists)


def log_probabilities(pairs: ScoresAndLabels) -> ScoresAndLabels:
    """The pairs with the logarithms of their scores, which are probabilities.

    Scores that are not probabilities of several classes stay as they are.
    """
    first_scores, first_labels = pairs[0]
    has_classes = first_scores.dim() > first_labels.dim() and first_scores.shape[1] > 1
    if not has_classes:
        return pairs
    return [(p.clamp(min=MIN_PROBABILITY).log(), y) for p, y in pairs]


def mean_losses(
    net: Net,
    pairs: ScoresAndLabels,
    lists: Ragged,  # places of each client's samples
    groups: Iterable[list[int]],  # positions of clients
) -> Tensor:
    """Each client's mean loss [S], from its scores and labels.

    The samples of the clients of a group go through the loss at once.
    """
    losses: dict[int, Tensor] = {}  # by position
    # Only for these losses is the mean of the samples' losses the batch's loss.
    is_mean_over_samples = net.loss_fn in LOSSES.values()
    for group in groups:
        if is_mean_over_samples:
            group_lists = lists.take(torch.tensor(group))
            group_losses = _group_losses(net, [pairs[i] for i in group], group_lists)
            losses |= zip(group, group_losses.unbind(), strict=True)
    for i, (z, y) in enumerate(pairs):
        if i not in losses:
            losses[i] = net.batch_loss(z, y).double()
    return torch.stack([losses[i] for i in range(len(pairs))])


def _group_losses(net: Net, pairs: ScoresAndLabels, lists: Ragged) -> Tensor:
    """Some clients' mean losses [s] float64, by one call of the loss."""
    # Each sample is a batch of one for vmap.
    z = torch.cat([scores for scores, _ in pairs])[:, None]
    y = torch.cat([labels for _, labels in pairs])[:, None]
    return client_means(torch.vmap(net.loss_fn)(z, y), lists)


# gradients --------------------------------------------------------------------


def mean_gradient(
    context: TrainContext,
    w: Tensor,  # [P]
    places: Tensor,  # [n]
    labels: Tensor,  # [n, ...]
    buffers: Tensor,  # [1, b]
    seed: Tensor,  # [1]
    *,
    train: bool,
) -> Tensor:  # [P]
    """One client's mean gradient over batches of its samples, in their order.

    In training mode the batches have the size of the run's, and a last one of a single
    sample joins the one before it: batch norm cannot train on one sample.
    """
    batch = context.training.batch_size if train else EVAL_BATCH
    n = len(labels)
    row = align_memory(w)[None]
    total = torch.zeros_like(w)
    bounds = batch_bounds(n, batch, merge_single=train)
    for k, (first, last) in enumerate(bounds):
        x = context.data.x.index_select(0, places[first:last])
        y = labels[None, first:last]
        _, grads, _ = gradients(
            context.net,
            row,
            x[None],
            y,
            buffers,
            seed + k,
            vmap=False,
            train=train,
            body=context.engine.body,
        )
        total += grads[0] * ((last - first) / n)
    return total


def batch_bounds(n: int, batch: int, merge_single: bool) -> list[tuple[int, int]]:
    """First sample and end of each batch of `n` samples in order.

    With `merge_single` a last batch of one sample joins the batch before it.
    """
    if n == 0:
        return []
    last_cut = n - 1 if merge_single and n > 1 else n
    return list(pairwise([0, *range(batch, last_cut, batch), n]))


# by a chain's kernels ---------------------------------------------------------


def evaluate_by_kernels(
    context: TrainContext,
    w: Tensor,  # [S, P]
    lists: Ragged,  # places of each client's samples
    relabel: Tensor | None,  # [S, C]
    buffers: Tensor,  # [S, b]
) -> tuple[Tensor, Tensor]:  # [S], [S] float64
    """Each client's mean loss and accuracy, by the chain's kernels."""
    classes = 0  # so the op returns no scores

    def evaluate_part(
        w: Tensor, statistics: Tensor | None, pool: tuple[Any, ...], part: Ragged
    ) -> Tensor:
        losses, hits, _ = chain_eval(
            w, *pool, part.flat, part.begin, classes, statistics
        )
        return torch.stack([losses, hits.double()])

    parts = _map_chain(context, w, buffers, lists, relabel, evaluate_part)
    losses, hits = torch.cat(parts, 1)
    return client_means(losses, lists), client_means(hits, lists)


def gradients_by_kernels(
    context: TrainContext,
    w: Tensor,  # [S, P]
    lists: Ragged,  # places of each client's samples
    relabel: Tensor | None,  # [S, C]
    buffers: Tensor,  # [S, b]
) -> Tensor:  # [S, P]
    """Each client's mean gradient in evaluation mode, by the chain's op."""

    def part_gradients(
        w: Tensor, statistics: Tensor | None, pool: tuple[Any, ...], part: Ragged
    ) -> Tensor:
        index = pad_sequence(list(part), batch_first=True)
        counts = to_device(part.size, index.device)
        seeds = None  # nothing is dropped
        grads, _, _ = chain_grad(w, *pool, index, counts, seeds, statistics)
        return grads

    return torch.cat(_map_chain(context, w, buffers, lists, relabel, part_gradients))


def _map_chain(
    context: TrainContext,
    w: Tensor,  # [S, P]
    buffers: Tensor,  # [S, b]
    lists: Ragged,
    relabel: Tensor | None,  # [S, C]
    function: Callable[[Tensor, Tensor | None, tuple[Any, ...], Ragged], Tensor],
) -> list[Tensor]:
    """Results of a function on parts of the cohort.

    Its arguments are (rows, statistics, kernel arguments, lists).
    """
    chain = context.engine.chain
    assert chain is not None
    statistics = chain.kernel_statistics(buffers)
    if statistics is not None and bool((statistics == statistics[:1]).all()):
        # An expanded row tells the kernels that all clients have the same.
        statistics = statistics[:1].expand(len(w), -1)

    def part_result(clients: slice) -> Tensor:
        arguments = chain.kernel_args(context.data, relabel, clients)
        part_statistics = None if statistics is None else statistics[clients]
        return function(w[clients], part_statistics, arguments, lists[clients])

    parts = even_sample_slices(lists, context.net.size)
    return context.workers.map(part_result, parts)
