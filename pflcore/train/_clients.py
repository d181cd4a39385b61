"""The clients of a cohort in training: what an algorithm's hook is given.

Nothing here changes anything: `fit` returns what it did, and `after(fit)` are the
clients with the statistics of batch norm that it left. S clients, rows [S, Q], in the
order of `ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pflcore.data._federation import Federation
from pflcore.data._ragged import Ragged, to_device
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
SHARED_BATCH_SAMPLES = 64 * EVAL_BATCH  # samples of the clients who share batches
CHAIN_EVAL_PARTS = 8  # of an evaluation by the kernels of a chain
CPU_BLOCK_CLIENTS = 64  # on a CPU
GPU_BLOCK_CLIENTS = 128
ALIGNMENT_BYTES = 64  # bytes at which torch begins a tensor's memory
TWO_BLOCKS_MIN_WEIGHTS = 1 << 18  # of a cohort: two threads then share it
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
    steps: Tensor  # [S] float64, how many each took

    @property
    def w(self) -> Tensor:
        """The trained models [S, Q]."""
        return self.rows["w"]

    @property
    def grad(self) -> Tensor:
        """Mean minibatch gradient [S, Q], clipped, SGD's weight decay included; no
        other term."""
        return self.rows["grad"]


def client_means(values: Tensor, lists: Ragged) -> Tensor:
    """Each client's mean [S] float64 of values [n] of the samples in its list."""
    zeros = values.new_zeros(len(lists)).double()
    sums = index_add(zeros, lists.owners(), values.double())
    return sums / to_device(lists.size, values.device)


def assign_blocks(
    context: TrainContext,
    ids: Tensor,  # [S] of the whole cohort
    eval_samples: Tensor | None = None,  # [S] samples of each, in an evaluation
) -> Tensor:
    """Number [S] of each client's block: clients of one block are computed at once.

    What torch computes over several clients has other last digits beside others: the
    elements at the end of a tensor go through other instructions than those before. So
    blocks are made of the whole cohort and of what stays the same over a run. Whoever
    computes whole blocks, in any order and in any number of threads, gets the same
    bits.

    Under vmap a block has at most `clients_per_block` clients, neighbours by size. Else
    everybody trains alone, and in an evaluation neighbours share the batches of a model
    that they all have. A GPU computes one block after another.
    """
    count = len(ids)
    if context.engine.name != "vmap":
        alone = torch.arange(count)
        return (
            alone
            if eval_samples is None
            else (eval_samples.cumsum(0) - eval_samples) // SHARED_BATCH_SAMPLES
        )
    two_threads = context.data.device.type == "cpu"
    least = (
        2 if two_threads and count * context.net.size >= TWO_BLOCKS_MIN_WEIGHTS else 1
    )
    parts = min(count, max(-(-count // context.clients_per_block), least))
    starts = torch.tensor(
        [count * j // parts for j in range(1, parts)], dtype=torch.int64
    )
    place = torch.arange(count)
    order = order_by_size(context.data.size("train")[ids], ids)
    return torch.empty_like(place).scatter_(
        0, order, torch.searchsorted(starts, place, right=True)
    )


def order_by_size(size: Tensor, ids: Tensor) -> Tensor:
    """Places [S] of clients, those of most samples first."""
    return torch.from_numpy(np.lexsort((ids.numpy(), -size.numpy())))


def align_memory(v: Tensor) -> Tensor:
    """The same values in memory that begins as that of a tensor of its own does.

    The last digits of a product with a row depend on where the row begins, so on its
    place among the others'.
    """
    return v if v.data_ptr() % ALIGNMENT_BYTES == 0 else v.clone()


def split_by_block(values: Tensor, block_numbers: Tensor) -> Sequence[Tensor]:
    """The values [S] of each block, by the blocks [S] that they are of."""
    sizes: list[int] = block_numbers.unique(return_counts=True)[1].tolist()
    parts: Sequence[Tensor] = values[block_numbers.argsort(stable=True)].split(sizes)
    return parts


def client_nanmeans(values: Tensor, lists: Ragged) -> Tensor:
    """The same over the values that are there; a sample without one is NaN."""
    there = ~values.isnan()
    return client_means(values.nan_to_num(0.0), lists) / client_means(there, lists)


@dataclass(frozen=True)
class Clients:
    """A cohort with its data; rows are [S, Q], models dicts of [S, ...]."""

    context: TrainContext
    ids: Tensor  # [S] int64
    round: int
    buffers: Tensor  # [S, b] batch norm's statistics
    # [S] in a cohort that these are a part of; None: they are all
    block_numbers: Tensor | None = None

    def take(self, mask: Tensor) -> Clients:
        """Those where `mask`, bool [S], is true."""
        buffers = self.buffers[to_device(mask, self.buffers.device)]
        at = mask.cpu()
        return replace(
            self,
            ids=self.ids[at],
            buffers=buffers,
            block_numbers=self._block_numbers[at],
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
        """Whether targets are labels, of which scores get a share right."""
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
        """Minibatch training from `w` on each client's training data, by the run's
        optimizer."""
        t = self.context.training
        rate = self.lr if lr is None else lr
        rows = {"w": w} | ({"grad": w.new_zeros(()).expand_as(w)} if mean_grad else {})
        plan = BatchPlan(epochs, steps, 1, stream, together=steps is None)
        fit = self._train(
            rows, partial(train_chunk, t, rate), objective, plan, objective.terms(w)
        )
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

        It sees s clients at once, [s, ...], and treats each alone; rows that it changes
        in place it need not return. `taken` [s] is how many steps each took before.
        `grad(w, which=0)` is the gradient [s, Q] of the objective's loss at any `w` on
        the step's `which`-th minibatch; the `batches` of a step come from as many
        shuffles.
        """

        def work(chunk: Chunk, mine: Tensors, _: Tensors) -> None:
            batches = chunk.batches
            for step in batches.steps:
                seen = {k: v[step.clients] for k, v in mine.items()}
                taken = step.epoch * batches.cuts[step.clients] + step.place
                for k, v in update(
                    seen, partial(chunk.gradient_copy, step), taken
                ).items():
                    mine[k][step.clients] = v

        plan = BatchPlan(epochs, steps, batches, stream, together)
        return self._train(rows, work, objective, plan)

    # looking ------------------------------------------------------------------
    def sample_lists(self, split: str) -> Ragged:
        """Where each client's samples of a split are in the pool."""
        data = self.context.data
        if not self.has_split(split):
            raise MismatchError(
                f"split: this federation has {', '.join(data.index)}, not {split!r}; "
                "split the "
                "clients' samples first."
            )
        return data.lists(split).take(self.ids)

    def labels(self, split: str) -> Tensor:
        """The labels [n, ...] of a split as the clients know them, client after
        client."""
        lists = self.sample_lists(split)
        y = self.context.data.y.index_select(0, lists.flat)
        if self._relabel is None:
            return y
        own = self._relabel.index_select(0, lists.owners())
        return own.gather(1, y.view(len(y), -1)).view_as(y)

    def scores(
        self, model: Tensors, split: str, predict: Predict = predict_row
    ) -> list[tuple[Tensor, Tensor]]:
        """Each client's scores [n, ...] in evaluation mode and labels [n, ...]. Clients
        of a block who all have one model share batches."""
        lists = list(self.sample_lists(split))
        net = self.net
        x = self.context.data.x
        groups = self._evaluation_groups(model)
        parts = list[tuple[int, Tensor]]()
        for group in groups:
            places = torch.cat([lists[i] for i in group])
            parts += [(group[0], part) for part in places.split(EVAL_BATCH)]

        def look(part: tuple[int, Tensor]) -> Tensor:
            i, places = part
            own = {k: align_memory(v[i]) for k, v in model.items()}
            with (
                torch.no_grad(),
                forward_context(False, self.buffers[i], single_client=True),
            ):
                found = predict(own, net, x.index_select(0, places))
            if found.shape[:1] != places.shape:
                raise NoBatchAxis(found.shape)
            return found

        order = [i for group in groups for i in group]
        z = torch.cat(self.context.workers.map(look, parts))
        scores = dict(zip(order, z.split([len(lists[i]) for i in order]), strict=True))
        labels = self.labels(split).split([len(own) for own in lists])
        return [(scores[i], y) for i, y in enumerate(labels)]

    def features(self, w: Tensor, split: str = "train") -> tuple[Tensor, Tensor]:
        """What each client's head sees, [S, n, H], and the labels [S, n]; short clients
        are padded with zeros and labels -1."""
        pairs = self.scores(
            {"w": w}, split, lambda model, net, x: net.features(model["w"], x)
        )
        z, y = zip(*pairs, strict=True)
        return pad_sequence(list(z), True), pad_sequence(
            list(y), True, padding_value=-1
        )

    def loss(self, w: Tensor, split: str = "train") -> Tensor:
        """Each client's mean loss [S] at `w` [S, P] over all samples, in evaluation
        mode."""
        return self.evaluate({"w": w}, split)[0].to(w)

    def evaluate(
        self,
        model: Tensors,
        split: str,
        predict: Predict = predict_row,
    ) -> tuple[Tensor, Tensor | None]:
        """Each client's mean loss and, for classes, its share of right answers: [S]
        float64."""
        by_kernels = self.context.engine.chain is not None and has_kernels(
            model["w"].device
        )
        if not by_kernels or predict is not predict_row:
            return self.loss_and_accuracy(
                self.scores(model, split, predict),
                split,
                self._evaluation_groups(model),
            )

        def look(w: Tensor, pool: Any, own: Ragged) -> Tensor:
            losses, hits, _ = chain_eval(w, *pool, own.flat, own.begin, 0)
            return torch.stack([losses, hits.double()])

        lists = self.sample_lists(split)
        both = torch.cat(self._map_chain(model["w"], lists, look), 1)
        loss, hits = (client_means(values, lists) for values in both)
        return loss, hits if self._labelled else None

    def loss_and_accuracy(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        split: str,
        groups: Iterable[list[int]] = (),
        returns: str = "logits",
    ) -> tuple[Tensor, Tensor | None]:
        """Losses and shares [S] as `evaluate` has them, from what `scores` gave, which
        may be probabilities; the samples of a group of clients go through the loss at
        once."""
        net = self.net
        lists = self.sample_lists(split)
        z, y = (torch.cat(each) for each in zip(*pairs, strict=True))
        right = (
            client_nanmeans(fraction_correct(z, y), lists) if self._labelled else None
        )
        if (
            self._labelled
            and returns == "probabilities"
            and z.dim() > y.dim()
            and z.shape[1] > 1
        ):
            pairs = [(z.clamp(min=1e-12).log(), y) for z, y in pairs]
        several = [g for g in groups if len(g) > 1 and net.loss_fn in LOSSES.values()]
        losses = dict[int, Tensor]()
        for group in several:
            z, y = (torch.cat([pairs[i][k] for i in group])[:, None] for k in (0, 1))
            of_each = client_means(
                torch.vmap(net.loss_fn)(z, y), lists.take(torch.tensor(group))
            )
            losses |= zip(group, of_each.unbind(), strict=True)
        for i in set(range(len(pairs))) - losses.keys():
            losses[i] = net.batch_loss(*pairs[i]).double()
        return torch.stack([losses[i] for i in range(len(pairs))]), right

    def grad(self, w: Tensor, split: str = "train") -> Tensor:
        """Each client's gradient [S, P] of `loss`.

        With batch norm, and on "train", it is the mean over minibatches in training
        mode, as they lie, no last one of a single sample: training normalizes by the
        batch.
        """
        lists = self.sample_lists(split)
        context = self.context
        train = split == "train" and bool(self.net.buffer_names)
        batch = context.training.batch_size if train else EVAL_BATCH
        seeds = client_seeds(self.ids, context.seed, self.round, "grad").view(np.int64)
        seed = to_device(torch.from_numpy(seeds), w.device)
        labels = self.labels(split).split(lists.size.tolist())

        def by_kernels(w: Tensor, pool: Any, own: Ragged) -> Tensor:
            index = pad_sequence(list(own), batch_first=True)
            return chain_grad(w, *pool, index, to_device(own.size, index.device), None)[
                0
            ]

        def by_engine(i: int) -> Tensor:
            one = slice(i, i + 1)
            at = lists[i]
            n = len(labels[i])
            row = align_memory(w[i])[None]
            total = torch.zeros_like(w[i])
            cuts = [*range(batch, n - (train and n > 1), batch), n]
            for k, (a, b) in enumerate(pairwise([0, *cuts] if n else [])):
                x = context.data.x.index_select(0, at[a:b])
                given = (
                    row,
                    x[None],
                    labels[i][None, a:b],
                    self.buffers[one],
                    seed[one] + k,
                )
                total += gradients(self.net, *given, False, train)[1][0] * ((b - a) / n)
            return total

        if context.engine.chain is not None:
            return torch.cat(self._map_chain(w, lists, by_kernels))
        return torch.stack(context.workers.map(by_engine, range(len(lists))))

    # inside -------------------------------------------------------------------
    def _train(
        self,
        rows: Tensors,
        work: Callable[[Chunk, Tensors, Tensors], None],
        objective: Objective,
        plan: BatchPlan,
        terms: Tensors | None = None,  # None: its steps are Python's
    ) -> Fit:
        """`work(chunk, its clients' rows, their terms)` on every chunk of the
        cohort."""
        context, device, count = self.context, self.buffers.device, len(self.ids)
        engine = objective.engine_for(context.engine)
        relabel = self._relabel
        sums = self.buffers.new_zeros(2, count, dtype=torch.float64)
        done = Fit(
            {k: v.new_empty(v.shape) for k, v in rows.items()},
            self.buffers.clone(),
            *sums,
        )

        def run(pos: Tensor) -> None:
            at = to_device(pos, device)
            key = (context.seed, self.round)
            mine, extra = (
                {k: v[at] for k, v in d.items()} for d in (rows, objective.extra)
            )
            which = (
                key,
                self.ids[pos],
                plan,
                engine.chain is not None,
                self.net.merge_last_sample,
            )
            batches = Batches(context.data, context.training, *which)
            own = (
                batches,
                None if relabel is None else relabel[at],
                self.buffers[at],
                engine,
            )
            chunk = Chunk(
                self.net, context.data, *own, objective.loss, extra, context.graphs
            )
            work(chunk, mine, slice_terms(terms or {}, at))
            for k, v in mine.items():
                done.rows[k][at] = v
            done.buffers[at], done.steps[at] = (
                chunk.buffers,
                to_device(batches.taken, device).double(),
            )
            done.loss[at] = chunk.losses / done.steps[at]

        width = max(v[0].numel() for v in rows.values())
        context.workers.map(
            run, self._training_chunks(engine, width, terms is not None)
        )
        return done

    def _training_chunks(
        self, engine: Engine, width: int, kernels: bool
    ) -> Sequence[Tensor]:
        """Places of the clients who train in one go, however many workers there are, on
        rows of this width; `kernels`: all their steps may be a kernel's."""
        order = order_by_size(self.num_samples, self.ids)
        count = len(self.ids)
        device = self.buffers.device
        if engine.chain is None or not has_kernels(device):
            return (
                split_by_block(order, self._block_numbers[order])
                if engine.name == "vmap"
                else order.split(1)
            )
        # No client's bits depend on the others': only arithmetic counts.
        samples = int(self.num_samples.sum()) if device.type == "cpu" else 0
        small = 2 if count * width >= 1 << 18 else 1
        parts = (
            16
            if samples * width >= 1 << 28
            else 4
            if samples * width >= 1 << 22
            else small
        )
        # so many that their arithmetic outweighs their steps' Python
        most = (
            16
            if kernels
            else max(2, count * self.context.training.batch_size * width >> 23)
        )
        parts = min(count, parts, most)
        cuts = [count * j // parts for j in range(parts + 1)]
        return [order[a:b] for a, b in pairwise(cuts)]

    @cached_property
    def _block_numbers(self) -> Tensor:
        """Number [S] of each client's block."""
        return (
            assign_blocks(self.context, self.ids)
            if self.block_numbers is None
            else self.block_numbers
        )

    def _evaluation_groups(self, model: Tensors) -> list[list[int]]:
        """Places of the clients who are looked at at once: those of a block, where all
        of the cohort have one model, rows that are one row expanded, and the block one
        statistics."""
        one = all(len(v) > 1 and v.stride(0) == 0 for v in model.values())
        groups = list[list[int]]()
        for block in (
            split_by_block(torch.arange(len(self.ids)), self._block_numbers)
            if one
            else ()
        ):
            if len(block) > 1 and self.buffers.shape[1]:
                buffers = self.buffers[to_device(block, self.buffers.device)]
                if not (buffers == buffers[:1]).all():
                    groups += block[:, None].tolist()
                    continue
            groups.append(block.tolist())
        return groups or [[i] for i in range(len(self.ids))]

    @cached_property
    def _relabel(self) -> Tensor | None:
        """Labels [S, C] as each client knows them, where they differ."""
        data = self.context.data
        return (
            None
            if data.relabel is None
            else data.relabel[to_device(self.ids, data.device)]
        )

    def _map_chain(
        self, w: Tensor, lists: Ragged, f: Callable[..., Tensor]
    ) -> list[Tensor]:
        """`f(rows, the kernels' first arguments, places)` of some of the clients at a
        time, with about as many samples each."""
        chain = self.context.engine.chain
        data = self.context.data
        relabel = self._relabel
        assert chain is not None
        count = len(self.ids)
        n = len(lists.flat)
        parts = min(count, CHAIN_EVAL_PARTS if n * self.net.size >= 1 << 24 else 1)
        inner = torch.searchsorted(lists.begin, torch.arange(1, parts) * n // parts)

        def look(s: slice) -> Tensor:
            return f(w[s], chain.kernel_args(data, relabel, s), lists[s])

        cuts = pairwise([0, *inner.tolist(), count])
        return self.context.workers.map(look, [slice(a, b) for a, b in cuts if a < b])
