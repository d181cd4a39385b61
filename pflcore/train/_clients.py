"""The clients of a cohort in training: what an algorithm's hooks receive.

`Clients` never changes: `fit` returns what it did, and `after(fit)` are the same
clients with batch norm's statistics as the training left them.

Symbols: S clients of the cohort, in the order of `ids`; s some of them; P weights of
the model; Q columns of a row; b numbers of batch norm's statistics; C classes; n
samples; w rows of weights; x, y samples and labels; z scores. A place is the number of
a sample in the federation's pool; a position is the number of a client in the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain as concatenate
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pflcore._device import to_device
from pflcore.data._federation import Federation
from pflcore.data._ragged import Ragged
from pflcore.nn._context import forward_context
from pflcore.ops._chain import chain_eval, chain_grad, has_kernels
from pflcore.ops._sums import index_add
from pflcore.train._batches import Batches, BatchPlan
from pflcore.train._engines import (
    RUN_LOSS,
    Chunk,
    Engine,
    Objective,
    Tensors,
    gradients,
    slice_terms,
    train_chunk,
)
from pflcore.train._graphs import GradientGraphs
from pflcore.train._losses import LOSSES, fraction_correct
from pflcore.train._net import Net
from pflcore.train._random import client_seeds
from pflcore.train._training import Training
from pflcore.train._validate import MismatchError, NoBatchAxis
from pflcore.train._workers import Workers

EVAL_BATCH = 125  # a forward batch of 1,000 or more costs twice as much a sample
SHARED_BATCH_SAMPLES = 64 * EVAL_BATCH  # samples of the clients that share batches
CPU_BLOCK_CLIENTS = 64  # clients of a block under vmap, on a CPU
GPU_BLOCK_CLIENTS = 128
ALIGNMENT_BYTES = 64  # a multiple of it is where torch begins a tensor's memory
# Weights of a cohort from which two threads share it.
TWO_BLOCKS_MIN_WEIGHTS = 1 << 18
# A chain's cohort is trained in parts; its work is its samples times its weights.
FOUR_PARTS_MIN_WORK = 1 << 22
SIXTEEN_PARTS_MIN_WORK = 1 << 28
# Where Python takes the steps: the work of one step of a part that outweighs Python's.
PYTHON_STEP_WORK = 1 << 23
CHAIN_EVAL_PARTS = 8  # parts of an evaluation by a chain's kernels, for much work
CHAIN_EVAL_PARTS_MIN_WORK = 1 << 24
MIN_PROBABILITY = 1e-12  # of which a loss takes the logarithm
# rows, grad, taken
Update = Callable[[Tensors, Callable[..., Tensor], Tensor], Tensors]
# one client's model, net, x -> scores
Predict = Callable[[Tensors, Net, Tensor], Tensor]


class TrainContext(NamedTuple):
    """What stays the same over a run."""

    net: Net
    data: Federation
    training: Training
    engine: Engine
    workers: Workers
    seed: int = 0
    rounds: int = 1
    clients_per_block: int = CPU_BLOCK_CLIENTS  # clients of a block under vmap, at most
    sample_activation_bytes: int = 0  # bytes that a training step keeps of one sample
    graphs: GradientGraphs | None = None  # on a GPU


def predict_row(model: Tensors, net: Net, x: Tensor) -> Tensor:
    """The scores of a model of the run's kind."""
    return net(model["w"], x)


class Fit(NamedTuple):
    """What training did."""

    rows: Tensors  # [S, ...] the trained rows
    buffers: Tensor  # [S, b] batch norm's statistics afterwards
    loss: Tensor  # [S] float64, mean over the minibatches, each before its step
    steps: Tensor  # [S] float64, steps that each client took

    @property
    def w(self) -> Tensor:
        """The trained models [S, Q]."""
        return self.rows["w"]

    @property
    def grad(self) -> Tensor:
        """Mean minibatch gradient [S, Q].

        It is clipped and includes SGD's weight decay, but no other term.
        """
        return self.rows["grad"]


def client_means(values: Tensor, lists: Ragged) -> Tensor:
    """Each client's mean [S] float64 of values [n] of the samples in its list."""
    zeros = values.new_zeros(len(lists)).double()
    sums = index_add(zeros, lists.owners(), values.double())
    return sums / to_device(lists.size, values.device)


def client_nanmeans(values: Tensor, lists: Ragged) -> Tensor:
    """Each client's mean [S] float64 of those values [n] that are not NaN."""
    is_value = ~values.isnan()
    return client_means(values.nan_to_num(0.0), lists) / client_means(is_value, lists)


def assign_blocks(
    context: TrainContext,
    ids: Tensor,  # [S] of the whole cohort
    eval_samples: Tensor | None = None,  # [S] samples of each client, in an evaluation
) -> Tensor:
    """Number [S] of each client's block: clients of one block are computed at once.

    The last digits of what torch computes over several clients depend on the others:
    the elements at the end of a tensor go through other instructions than those before.
    So blocks depend on the whole cohort, and on what stays the same over a run. Whoever
    computes whole blocks, in any order and in any number of threads, gets the same
    bits.

    Under vmap a block has at most `clients_per_block` clients, neighbours by size.
    Without vmap each client trains alone; in an evaluation neighbours share the batches
    of a model that all of them have. A GPU computes one block after another.
    """
    count = len(ids)
    if context.engine.name != "vmap":
        if eval_samples is None:
            return torch.arange(count)
        samples_before = eval_samples.cumsum(0) - eval_samples
        return samples_before // SHARED_BATCH_SAMPLES
    on_cpu = context.data.device.type == "cpu"
    two_threads = on_cpu and count * context.net.size >= TWO_BLOCKS_MIN_WEIGHTS
    min_blocks = 2 if two_threads else 1
    full_blocks = -(-count // context.clients_per_block)
    blocks = min(count, max(full_blocks, min_blocks))
    starts = [count * j // blocks for j in range(1, blocks)]
    rank = torch.arange(count)
    block_of_rank = torch.searchsorted(
        torch.tensor(starts, dtype=torch.int64), rank, right=True
    )
    order = order_by_size(context.data.size("train")[ids], ids)
    return torch.empty_like(rank).scatter_(0, order, block_of_rank)


def order_by_size(size: Tensor, ids: Tensor) -> Tensor:
    """Positions [S] of clients, those of most samples first; ties by id."""
    # The last key of `lexsort` decides first.
    return torch.from_numpy(np.lexsort((ids.numpy(), -size.numpy())))


def align_memory(v: Tensor) -> Tensor:
    """The same values in memory that begins as a tensor of its own would.

    The last digits of a product with a row depend on where the row's memory begins, and
    so on its position among the others.
    """
    return v if v.data_ptr() % ALIGNMENT_BYTES == 0 else v.clone()


def split_by_block(values: Tensor, block_numbers: Tensor) -> Sequence[Tensor]:
    """The values [S] of each block; `block_numbers` [S] says which block has which."""
    sizes: list[int] = block_numbers.unique(return_counts=True)[1].tolist()
    order = block_numbers.argsort(stable=True)
    blocks: Sequence[Tensor] = values[order].split(sizes)
    return blocks


def batch_bounds(n: int, batch: int, merge_single: bool) -> list[tuple[int, int]]:
    """Where each batch of n samples begins and ends.

    With `merge_single` a last batch of one sample joins the batch before it.
    """
    if n == 0:
        return []
    last_cut = n - 1 if merge_single and n > 1 else n
    return list(pairwise([0, *range(batch, last_cut, batch), n]))


@dataclass(frozen=True)
class Clients:
    """A cohort with its data; rows are [S, Q], models dicts of [S, ...]."""

    context: TrainContext
    ids: Tensor  # [S] int64
    round: int
    buffers: Tensor  # [S, b] batch norm's statistics
    # [S] in the cohort that these clients are a part of; None: they are all of it
    block_numbers: Tensor | None = None

    def take(self, mask: Tensor) -> Clients:
        """The clients where `mask`, bool [S], is true."""
        buffers = self.buffers[to_device(mask, self.buffers.device)]
        host_mask = mask.cpu()
        return replace(
            self,
            ids=self.ids[host_mask],
            buffers=buffers,
            block_numbers=self._block_numbers[host_mask],
        )

    @property
    def net(self) -> Net:
        """The model as a function of a row."""
        return self.context.net

    @cached_property
    def num_samples(self) -> Tensor:
        """Training samples of each client, [S]."""
        return self.context.data.size("train")[self.ids]

    @property
    def class_counts(self) -> Tensor:
        """Training samples of each client and class, [S, C]."""
        return self.context.data.counts("train", self.ids)

    @property
    def _labelled(self) -> bool:
        """Whether targets are labels, so that scores have an accuracy."""
        return self.net.scores_classes and not self.context.data.y.is_floating_point()

    def after(self, fit: Fit) -> Clients:
        """The same clients with the statistics that `fit` left."""
        return replace(self, buffers=fit.buffers)

    @property
    def lr(self) -> float:
        """The step size of this round."""
        return self.context.training.lr_at(self.round, self.context.rounds)

    def has_split(self, split: str) -> bool:
        """Whether the federation has this split."""
        return split in self.context.data.index

    # training -----------------------------------------------------------------
    def fit(
        self,
        w: Tensor,  # [S, Q]
        objective: Objective = RUN_LOSS,
        *,
        epochs: int | None = None,
        steps: int | None = None,  # so many steps instead of epochs
        lr: float | None = None,
        stream: str = "fit",  # names the shuffle: two fits of one hook take two streams
        mean_grad: bool = False,
    ) -> Fit:
        """Minibatch training from `w` on the training data, by the run's optimizer."""
        rows = {"w": w}
        if mean_grad:
            rows["grad"] = w.new_zeros(()).expand_as(w)
        step_size = self.lr if lr is None else lr
        work = partial(train_chunk, self.context.training, step_size)
        plan = BatchPlan(epochs, steps, 1, stream, together=steps is None)
        fit = self._train(rows, work, objective, plan, objective.terms(w))
        if mean_grad:
            fit.grad.div_(fit.steps[:, None].to(w.dtype))
        return fit

    def each_batch(  # noqa: PLR0913 (by name, all but two)
        self,
        rows: Tensors,  # [S, ...]
        update: Update,
        objective: Objective = RUN_LOSS,
        *,
        batches: int = 1,
        epochs: int | None = None,
        steps: int | None = None,
        stream: str = "fit",
        # clients of all sizes take their k-th minibatches at once
        together: bool = False,
    ) -> Fit:
        """The general, slower form: `update(rows, grad, taken) -> rows` takes a step.

        `update` receives the rows of s clients at once, [s, ...], and treats each
        client alone. It need not return rows that it changes in place.

        - `grad(w, which=0)` is the gradient [s, Q] of the objective's loss, at any `w`,
          on the step's minibatch number `which`. The `batches` of a step come from as
          many shuffles.
        - `taken` [s] is the number of steps that each client took before.
        """

        def take_steps(chunk: Chunk, chunk_rows: Tensors, _: Tensors) -> None:
            cuts = chunk.batches.cuts
            for step in chunk.batches.steps:
                clients = step.clients
                step_rows = {name: v[clients] for name, v in chunk_rows.items()}
                grad = partial(chunk.gradient_copy, step)
                taken = step.epoch * cuts[clients] + step.place
                new_rows = update(step_rows, grad, taken)
                for name, v in new_rows.items():
                    chunk_rows[name][clients] = v

        plan = BatchPlan(epochs, steps, batches, stream, together)
        return self._train(rows, take_steps, objective, plan)

    # evaluation ---------------------------------------------------------------
    def sample_lists(self, split: str) -> Ragged:
        """The places of each client's samples of a split."""
        data = self.context.data
        if not self.has_split(split):
            raise MismatchError(
                f"split: this federation has {', '.join(data.index)}, not {split!r}; "
                "split the clients' samples first."
            )
        return data.lists(split).take(self.ids)

    def labels(self, split: str) -> Tensor:
        """Labels [n, ...] of a split, client after client, as the clients know them."""
        lists = self.sample_lists(split)
        y = self.context.data.y.index_select(0, lists.flat)
        if self._relabel is None:
            return y
        relabel = self._relabel.index_select(0, lists.owners())
        return relabel.gather(1, y.view(len(y), -1)).view_as(y)

    def scores(
        self, model: Tensors, split: str, predict: Predict = predict_row
    ) -> list[tuple[Tensor, Tensor]]:
        """Each client's scores [n, ...] in evaluation mode and labels [n, ...].

        Clients of one block share batches where all of them have one model.
        """
        lists = list(self.sample_lists(split))
        groups = self._evaluation_groups(model)
        batches: list[tuple[int, Tensor]] = []  # position of a client, places
        for group in groups:
            places = torch.cat([lists[i] for i in group])
            for batch_places in places.split(EVAL_BATCH):
                batches.append((group[0], batch_places))

        def batch_scores(batch: tuple[int, Tensor]) -> Tensor:
            position, places = batch
            return self._batch_scores(model, position, places, predict)

        z = torch.cat(self.context.workers.map(batch_scores, batches))
        positions = list(concatenate.from_iterable(groups))
        client_scores = z.split([len(lists[i]) for i in positions])
        scores = dict(zip(positions, client_scores, strict=True))
        labels = self.labels(split).split([len(places) for places in lists])
        return [(scores[i], y) for i, y in enumerate(labels)]

    def _batch_scores(
        self, model: Tensors, position: int, places: Tensor, predict: Predict
    ) -> Tensor:
        """Scores [n, ...] of samples by the model of one client."""
        client_model = {name: align_memory(v[position]) for name, v in model.items()}
        buffers = self.buffers[position]
        x = self.context.data.x.index_select(0, places)
        with (
            torch.no_grad(),
            forward_context(train=False, buffers=buffers, single_client=True),
        ):
            scores = predict(client_model, self.net, x)
        if scores.shape[:1] != places.shape:
            raise NoBatchAxis(scores.shape)
        return scores

    def features(self, w: Tensor, split: str = "train") -> tuple[Tensor, Tensor]:
        """What each client's head sees, [S, n, H], and the labels [S, n].

        Clients of fewer samples are padded with zeros and with labels of -1.
        """

        def predict_features(model: Tensors, net: Net, x: Tensor) -> Tensor:
            return net.features(model["w"], x)

        pairs = self.scores({"w": w}, split, predict_features)
        features = [z for z, _ in pairs]
        labels = [y for _, y in pairs]
        return (
            pad_sequence(features, batch_first=True),
            pad_sequence(labels, batch_first=True, padding_value=-1),
        )

    def loss(self, w: Tensor, split: str = "train") -> Tensor:
        """Each client's mean loss [S] at `w` [S, P] over all its samples.

        The model is in evaluation mode.
        """
        return self.evaluate({"w": w}, split)[0].to(w)

    def evaluate(
        self,
        model: Tensors,
        split: str,
        predict: Predict = predict_row,
    ) -> tuple[Tensor, Tensor | None]:
        """Each client's mean loss and, for classes, its accuracy: [S] float64."""
        if self.context.engine.chain is not None and predict is predict_row:
            w = model["w"]
            if has_kernels(w.device):
                return self._evaluate_by_kernels(w, self.sample_lists(split))
        pairs = self.scores(model, split, predict)
        return self.loss_and_accuracy(pairs, split, self._evaluation_groups(model))

    def _evaluate_by_kernels(
        self, w: Tensor, lists: Ragged
    ) -> tuple[Tensor, Tensor | None]:
        def evaluate_part(w: Tensor, pool: Any, part: Ragged) -> Tensor:
            losses, hits, _ = chain_eval(w, *pool, part.flat, part.begin, 0)
            return torch.stack([losses, hits.double()])

        losses, hits = torch.cat(self._map_chain(w, lists, evaluate_part), 1)
        loss = client_means(losses, lists)
        accuracy = client_means(hits, lists)
        return loss, accuracy if self._labelled else None

    def loss_and_accuracy(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        split: str,
        groups: Iterable[list[int]] = (),
        returns: str = "logits",
    ) -> tuple[Tensor, Tensor | None]:
        """Loss and accuracy [S] as `evaluate` has them, from the result of `scores`.

        The scores are what `returns` says: "logits" or "probabilities". The samples of
        a group of clients go through the loss at once.
        """
        lists = self.sample_lists(split)
        accuracy = None
        if self._labelled:
            z = torch.cat([scores for scores, _ in pairs])
            y = torch.cat([labels for _, labels in pairs])
            accuracy = client_nanmeans(fraction_correct(z, y), lists)
            has_classes = z.dim() > y.dim() and z.shape[1] > 1
            if returns == "probabilities" and has_classes:
                pairs = [(p.clamp(min=MIN_PROBABILITY).log(), y) for p, y in pairs]
        losses = dict[int, Tensor]()
        for group in groups:
            # Only for these losses is the mean of the samples' losses the batch's loss.
            if len(group) > 1 and self.net.loss_fn in LOSSES.values():
                group_lists = lists.take(torch.tensor(group))
                group_losses = self._losses([pairs[i] for i in group], group_lists)
                losses |= zip(group, group_losses.unbind(), strict=True)
        for i, (z, y) in enumerate(pairs):
            if i not in losses:
                losses[i] = self.net.batch_loss(z, y).double()
        return torch.stack([losses[i] for i in range(len(pairs))]), accuracy

    def _losses(self, pairs: list[tuple[Tensor, Tensor]], lists: Ragged) -> Tensor:
        """Mean losses [s] float64 of some clients, by one call of the loss."""
        # Each sample is a batch of one for vmap.
        z = torch.cat([scores for scores, _ in pairs])[:, None]
        y = torch.cat([labels for _, labels in pairs])[:, None]
        return client_means(torch.vmap(self.net.loss_fn)(z, y), lists)

    def grad(self, w: Tensor, split: str = "train") -> Tensor:
        """Each client's gradient [S, P] of `loss`.

        With batch norm, and on "train", it is the mean over minibatches in training
        mode, because training normalizes by the batch. They are taken in the order of
        the samples, and a last one of a single sample joins the one before it.
        """
        lists = self.sample_lists(split)
        if self.context.engine.chain is not None:
            return self._grad_by_kernels(w, lists)
        key = (self.context.seed, self.round, "grad")
        seeds = torch.from_numpy(client_seeds(self.ids, *key).view(np.int64))
        seeds = to_device(seeds, w.device)
        labels = self.labels(split).split(lists.size.tolist())
        train = split == "train" and bool(self.net.buffer_names)

        def client_gradient(i: int) -> Tensor:
            return self._client_gradient(i, w, lists[i], labels[i], seeds, train=train)

        return torch.stack(self.context.workers.map(client_gradient, range(len(lists))))

    def _grad_by_kernels(self, w: Tensor, lists: Ragged) -> Tensor:
        def part_gradients(w: Tensor, pool: Any, part: Ragged) -> Tensor:
            index = pad_sequence(list(part), batch_first=True)
            counts = to_device(part.size, index.device)
            grads, _ = chain_grad(w, *pool, index, counts, None)
            return grads

        return torch.cat(self._map_chain(w, lists, part_gradients))

    def _client_gradient(
        self,
        i: int,  # position of the client
        w: Tensor,  # [S, P]
        places: Tensor,  # [n]
        labels: Tensor,  # [n, ...]
        seeds: Tensor,  # [S]
        *,
        train: bool,
    ) -> Tensor:  # [P]
        """One client's mean gradient over batches of its samples."""
        batch = self.context.training.batch_size if train else EVAL_BATCH
        n = len(labels)
        client = slice(i, i + 1)
        row = align_memory(w[i])[None]
        total = torch.zeros_like(w[i])
        bounds = batch_bounds(n, batch, merge_single=train)
        for k, (first, last) in enumerate(bounds):
            x = self.context.data.x.index_select(0, places[first:last])
            y = labels[None, first:last]
            _, grads, _ = gradients(
                self.net,
                row,
                x[None],
                y,
                self.buffers[client],
                seeds[client] + k,
                vmap=False,
                train=train,
            )
            total += grads[0] * ((last - first) / n)
        return total

    # inside -------------------------------------------------------------------
    def _train(
        self,
        rows: Tensors,
        work: Callable[[Chunk, Tensors, Tensors], None],
        objective: Objective,
        plan: BatchPlan,
        terms: Tensors | None = None,  # None: Python takes the steps
    ) -> Fit:
        """Calls `work(chunk, rows, terms)` on every chunk of the cohort.

        Rows and terms are those of the chunk's clients; `work` changes its rows in
        place.
        """
        device = self.buffers.device
        engine = objective.engine_for(self.context.engine)
        relabel = self._relabel  # before threads ask for it
        loss, steps = self.buffers.new_zeros(2, len(self.ids), dtype=torch.float64)
        new_rows = {name: v.new_empty(v.shape) for name, v in rows.items()}
        fit = Fit(new_rows, self.buffers.clone(), loss, steps)

        def train_part(positions: Tensor) -> None:
            index = to_device(positions, device)
            chunk_rows = {name: v[index] for name, v in rows.items()}
            extra = {name: v[index] for name, v in objective.extra.items()}
            batches = self._batches(positions, plan, ragged=engine.chain is not None)
            chunk_relabel = None if relabel is None else relabel[index]
            chunk = Chunk(
                self.net,
                self.context.data,
                batches,
                relabel=chunk_relabel,
                buffers=self.buffers[index],
                engine=engine,
                loss=objective.loss,
                extra=extra,
                graphs=self.context.graphs,
            )
            work(chunk, chunk_rows, slice_terms(terms or {}, index))
            for name, v in chunk_rows.items():
                fit.rows[name][index] = v
            fit.buffers[index] = chunk.buffers
            taken = to_device(chunk.batches.taken, device).double()
            fit.steps[index] = taken
            fit.loss[index] = chunk.losses / taken

        width = max(v[0].numel() for v in rows.values())
        parts = self._training_parts(engine, width, by_kernels=terms is not None)
        self.context.workers.map(train_part, parts)
        return fit

    def _batches(self, positions: Tensor, plan: BatchPlan, ragged: bool) -> Batches:
        """The minibatches of the clients at these positions."""
        context = self.context
        return Batches(
            context.data,
            context.training,
            (context.seed, self.round),
            self.ids[positions],
            plan,
            ragged,
            self.net.merge_last_sample,
        )

    def _training_parts(
        self, engine: Engine, width: int, by_kernels: bool
    ) -> Sequence[Tensor]:
        """Positions of the clients of each chunk, for any number of workers.

        The rows have `width` columns. With `by_kernels` a chain's kernels may take all
        steps; otherwise Python takes them.
        """
        order = order_by_size(self.num_samples, self.ids)
        count = len(self.ids)
        if engine.chain is None or not has_kernels(self.buffers.device):
            if engine.name == "vmap":
                return split_by_block(order, self._block_numbers[order])
            single_clients: Sequence[Tensor] = order.split(1)
            return single_clients
        # With a chain no client's bits depend on the others, so only work counts.
        parts = min(count, self._chain_parts(width))
        if not by_kernels:
            step_work = count * self.context.training.batch_size * width
            parts = min(parts, max(2, step_work // PYTHON_STEP_WORK))
        cuts = [count * j // parts for j in range(parts + 1)]
        return [order[first:last] for first, last in pairwise(cuts)]

    def _chain_parts(self, width: int) -> int:
        """Number of parts that share a cohort's work, before other limits."""
        on_cpu = self.buffers.device.type == "cpu"
        work = int(self.num_samples.sum()) * width if on_cpu else 0
        if work >= SIXTEEN_PARTS_MIN_WORK:
            return 16
        if work >= FOUR_PARTS_MIN_WORK:
            return 4
        return 2 if len(self.ids) * width >= TWO_BLOCKS_MIN_WEIGHTS else 1

    @cached_property
    def _block_numbers(self) -> Tensor:
        """Number [S] of each client's block."""
        if self.block_numbers is not None:
            return self.block_numbers
        return assign_blocks(self.context, self.ids)

    def _evaluation_groups(self, model: Tensors) -> list[list[int]]:
        """Positions of the clients that share batches in an evaluation.

        The clients of a block do, where the whole cohort has one model (rows that are
        one row expanded) and the block has one set of statistics.
        """
        has_one_model = all(len(v) > 1 and v.stride(0) == 0 for v in model.values())
        if not has_one_model:
            return [[i] for i in range(len(self.ids))]
        groups: list[list[int]] = []
        positions = torch.arange(len(self.ids))
        for block in split_by_block(positions, self._block_numbers):
            if self._has_equal_buffers(block):
                groups.append(block.tolist())
            else:
                groups += block[:, None].tolist()
        return groups

    def _has_equal_buffers(self, block: Tensor) -> bool:
        """Whether the clients at these positions have the same statistics."""
        if len(block) < 2 or not self.buffers.shape[1]:
            return True
        buffers = self.buffers[to_device(block, self.buffers.device)]
        return bool((buffers == buffers[:1]).all())

    @cached_property
    def _relabel(self) -> Tensor | None:
        """Labels [S, C] as each client knows them, or None where none differ."""
        data = self.context.data
        if data.relabel is None:
            return None
        return data.relabel[to_device(self.ids, data.device)]

    def _map_chain(
        self, w: Tensor, lists: Ragged, function: Callable[..., Tensor]
    ) -> list[Tensor]:
        """Results of `function(rows, kernel arguments, lists)` on parts of the cohort.

        The parts are neighbouring clients, with about as many samples each.
        """
        chain = self.context.engine.chain
        data = self.context.data
        relabel = self._relabel
        assert chain is not None
        count = len(self.ids)
        samples = len(lists.flat)
        has_much_work = samples * self.net.size >= CHAIN_EVAL_PARTS_MIN_WORK
        max_parts = CHAIN_EVAL_PARTS if has_much_work else 1
        parts = min(count, max_parts)
        shares = torch.arange(1, parts) * samples // parts
        cuts = torch.searchsorted(lists.begin, shares).tolist()
        bounds = pairwise([0, *cuts, count])

        def part_result(clients: slice) -> Tensor:
            arguments = chain.kernel_args(data, relabel, clients)
            return function(w[clients], arguments, lists[clients])

        slices = [slice(first, last) for first, last in bounds if first < last]
        return self.context.workers.map(part_result, slices)
