"""The clients of a cohort in training, which an algorithm's hooks receive.

A hook trains its clients (`fit`, `each_batch`) and looks at their samples (`scores`,
`loss`, `grad`, ...). `_schedule` divides that work among threads, `_engines` trains,
and `_evaluate` computes scores, losses and gradients.

Symbols: S clients of the cohort, in the order of `ids`; s some of them; P weights of
the model; Q columns of a row; b numbers of batch norm's statistics; C classes; H
features that the head sees; n samples; w rows of weights; x, y samples and labels; z
scores. A place is the number of a sample in the federation's pool; a position is the
number of a client in the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.nn.utils.rnn import pad_sequence

from pflcore._device import to_device
from pflcore.data._ragged import Ragged
from pflcore.ops._chain import has_kernels
from pflcore.train._batches import Batches, BatchPlan
from pflcore.train._context import TrainContext
from pflcore.train._engines import (
    RUN_LOSS,
    Chunk,
    Engine,
    Objective,
    Tensors,
    slice_terms,
)
from pflcore.train._evaluate import (
    Predict,
    ScoresAndLabels,
    accuracies,
    block_scores,
    client_scores,
    equal_buffer_groups,
    evaluate_by_kernels,
    gradients_by_kernels,
    is_one_model,
    log_probabilities,
    mean_gradient,
    mean_losses,
    predict_features,
    predict_row,
)
from pflcore.train._net import Net
from pflcore.train._optimizers import train_chunk
from pflcore.train._random import client_seeds
from pflcore.train._schedule import (
    assign_blocks,
    even_parts,
    num_kernel_parts,
    order_by_size,
    split_by_block,
)
from pflcore.train._validate import MismatchError

# rows, grad, taken -> rows
Update = Callable[[Tensors, Callable[..., Tensor], Tensor], Tensors]


class Fit(NamedTuple):
    """The results of a training of S clients.

    Attributes:
        rows: The trained rows, [S, ...] each. "w" are the models, where `Clients.fit`
            trained them.
        buffers: Batch norm's statistics after the training, [S, b].
        loss: Each client's mean loss over its minibatches, [S] float64. A minibatch's
            loss is the one before the step on that minibatch.
        steps: The number of steps that each client took, [S] float64.
    """

    rows: Tensors
    buffers: Tensor
    loss: Tensor
    steps: Tensor

    @property
    def w(self) -> Tensor:
        """The trained models [S, Q]."""
        return self.rows["w"]

    @property
    def grad(self) -> Tensor:
        """Mean gradient [S, Q] of a client's minibatches.

        Gradients are clipped and include SGD's weight decay, but no other term. They
        are there where `Clients.fit` was called with `mean_grad=True`.
        """
        return self.rows["grad"]


class ClassFeatures(NamedTuple):
    """Sums over S clients' features of each class, in float64.

    Attributes:
        counts: Number of samples of each class, [S, C].
        sums: Sum of the features of a class's samples, [S, C, H].
        square: Sum of the squared lengths of all samples' features, [S].
    """

    counts: Tensor
    sums: Tensor
    square: Tensor

    @property
    def means(self) -> Tensor:
        """Mean features [S, C, H] of each class; zeros where it has no sample."""
        return self.sums / self.counts.clamp(min=1)[..., None]


@dataclass(frozen=True)
class Clients:
    """A cohort of clients with their data.

    Its methods take and return rows [S, Q] and models, which are dicts of tensors
    [S, ...], in the order of `ids`. No method changes a cohort or its arguments: `fit`
    returns its results, and `after(fit)` is the cohort with batch norm's statistics as
    the training left them.

    Attributes:
        context: The model, the data and the options of the run.
        ids: The clients' numbers in the federation, [S] int64.
        round: The number of the round, from 1. It is a part of the key of the random
            streams.
        buffers: Each client's statistics of batch norm, [S, b].
        known_blocks: The number of each client's block, [S], where these clients are a
            part of a cohort and the blocks are those of the whole cohort. None means
            that they are all of it.
    """

    context: TrainContext
    ids: Tensor
    round: int
    buffers: Tensor
    known_blocks: Tensor | None = None

    def take(self, mask: Tensor) -> Clients:
        """The clients where `mask`, bool [S], is true."""
        return self.at(mask.cpu().nonzero()[:, 0])

    def at(self, positions: Tensor) -> Clients:
        """The clients at ascending positions, int64 [s] on the CPU."""
        if len(positions) == len(self.ids):
            return self
        return replace(
            self,
            ids=self.ids[positions],
            buffers=self.buffers[to_device(positions, self.buffers.device)],
            known_blocks=self.block_numbers[positions],
        )

    def after(self, fit: Fit) -> Clients:
        """The same clients with the statistics that `fit` left."""
        return replace(self, buffers=fit.buffers)

    @property
    def net(self) -> Net:
        """The model as a function of a row."""
        return self.context.net

    @property
    def lr(self) -> float:
        """The step size of this round."""
        return self.context.training.lr_at(self.round, self.context.rounds)

    @property
    def run_lr(self) -> float:
        """The run's `lr`, whatever the round.

        It is for what begins anew in every round or evaluation: with the step size of a
        schedule's end that would stay where it began.
        """
        return self.context.training.lr

    # data ---------------------------------------------------------------------
    @cached_property
    def num_samples(self) -> Tensor:
        """Number of each client's training samples, [S]."""
        return self.context.data.size("train")[self.ids]

    @cached_property
    def have_samples(self) -> Tensor:
        """Mask of the clients with training samples, bool [S], on the CPU."""
        return self.num_samples > 0

    @property
    def class_counts(self) -> Tensor:
        """Number of each client's training samples of each class, [S, C]."""
        return self.context.data.counts("train", self.ids)

    @cached_property
    def own_steps(self) -> Tensor | None:
        """Number of steps [S] of each client by the run's option `steps`.

        None where the clients train for epochs.
        """
        context = self.context
        return context.training.steps_of(self.round, self.ids, context.seed)

    def has_split(self, split: str) -> bool:
        """True where the federation has this split."""
        return split in self.context.data.index

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
        """The clients' labels [n, ...] of a split, client after client.

        They are those that the clients know, which may differ from the federation's.
        """
        lists = self.sample_lists(split)
        y = self.context.data.y.index_select(0, lists.flat)
        if self._relabel is None:
            return y
        relabel = self._relabel.index_select(0, lists.owners())
        columns = y[:, None].flatten(1)  # [n, 1], or [n, steps]
        return relabel.gather(1, columns).view_as(y)

    # training -----------------------------------------------------------------
    def fit(
        self,
        w: Tensor,  # [S, Q]
        objective: Objective = RUN_LOSS,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        lr: float | None = None,
        stream: str = "fit",
        mean_grad: bool = False,
    ) -> Fit:
        """Trains by minibatches, with the run's optimizer and options.

        Args:
            w: The rows from which the training starts. They stay as they are.
            objective: The loss and the terms that are minimized; by default the run's
                loss alone.
            epochs: The number of epochs; by default the run's, or its steps.
            steps: The number of steps of each client, instead of epochs.
            lr: The step size; by default that of the round.
            stream: The name of the shuffle. Two trainings of one hook that shall take
                different minibatches need two names.
            mean_grad: If true, the result has the mean gradient (`Fit.grad`).

        A client without training samples takes no step: its row stays.
        """
        rows = {"w": w}
        if mean_grad:
            rows["grad"] = w.new_zeros(()).expand_as(w)
        step_size = self.lr if lr is None else lr
        work = partial(train_chunk, self.context.training, step_size)
        plan = BatchPlan(epochs, steps, 1, stream, together=steps is None)
        fit = self._train(rows, work, objective, plan, objective.terms(w))
        if mean_grad:
            fit.grad.div_(fit.steps.clamp(min=1)[:, None].to(w.dtype))
        return fit

    def each_batch(
        self,
        rows: Tensors,  # [S, ...]
        update: Update,
        objective: Objective = RUN_LOSS,
        *,
        batches: int = 1,
        epochs: int | None = None,
        steps: int | None = None,
        stream: str = "fit",
        together: bool = False,
    ) -> Fit:
        """Trains by steps of the caller: slower than `fit`, and more general.

        Each step calls `update(rows, grad, taken) -> rows` with the rows [s, ...] of
        some clients. `update` must treat each client by itself. It may change the rows
        in place, and then need not return them.

        - `grad(w, which=0)` is the gradient [s, Q] of the objective's loss, at any `w`,
          on the step's minibatch number `which`.
        - `taken` [s] is the number of steps that each client took before.

        Args:
            rows: The rows from which the training starts. They stay as they are.
            update: The function that takes a step.
            objective: The objective, whose loss alone is used.
            batches: The number of minibatches of a step. Each of them comes from
                another shuffle.
            epochs: The number of epochs; by default the run's, or its steps.
            steps: The number of steps of each client, instead of epochs.
            stream: The name of the shuffles, as in `fit`.
            together: If true, clients of all sizes take their k-th minibatches at once.
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

    def _train(
        self,
        rows: Tensors,  # [S, ...]
        work: Callable[[Chunk, Tensors, Tensors], None],
        objective: Objective,
        plan: BatchPlan,
        terms: Tensors | None = None,
    ) -> Fit:
        """Calls `work(chunk, rows, terms)` on every part of the cohort.

        Rows and terms are those of the part's clients; `work` changes its rows in
        place. `terms` are the objective's terms, where the optimizer takes the steps;
        None means that Python code of an algorithm takes them.
        """
        device = self.buffers.device
        engine = objective.engine_for(self.context.engine)
        # Computed here once: otherwise several threads might compute it.
        _ = self._relabel
        _ = self.own_steps
        loss, steps = self.buffers.new_zeros(2, len(self.ids), dtype=torch.float64)
        new_rows = {name: v.new_empty(v.shape) for name, v in rows.items()}
        if not self.have_samples.all():
            # A client without training samples takes no step, and has no loss.
            loss.fill_(torch.nan)
            new_rows = {name: v.clone() for name, v in rows.items()}
        fit = Fit(new_rows, self.buffers.clone(), loss, steps)
        if not self.have_samples.any():
            return fit

        def train_part(positions: Tensor) -> None:
            index = to_device(positions, device)
            chunk = self._chunk(positions, index, engine, objective, plan)
            chunk_rows = {name: v[index] for name, v in rows.items()}
            work(chunk, chunk_rows, slice_terms(terms or {}, index))
            for name, v in chunk_rows.items():
                fit.rows[name][index] = v
            fit.buffers[index] = chunk.buffers
            taken = to_device(chunk.batches.taken, device).double()
            fit.steps[index] = taken
            fit.loss[index] = chunk.losses / taken

        width = max(v[0].numel() for v in rows.values())
        in_python = terms is None or bool(self.context.training.transforms)
        parts = self._training_parts(engine, width, steps_in_python=in_python)
        self.context.workers.map(train_part, parts)
        return fit

    def _chunk(
        self,
        positions: Tensor,  # [s] on the CPU
        index: Tensor,  # [s] the same on the cohort's device
        engine: Engine,
        objective: Objective,
        plan: BatchPlan,
    ) -> Chunk:
        """The clients at these positions with copies of their tensors."""
        context = self.context
        if plan.epochs is None and plan.steps is None and self.own_steps is not None:
            plan = plan._replace(steps=tuple(self.own_steps[positions].tolist()))
        relabel = None
        if self._relabel is not None:
            relabel = self._relabel[index]
        batches = Batches(
            context.data,
            context.training,
            (context.seed, self.round),
            self.ids[positions],
            plan,
            ragged=engine.chain is not None or engine.pads,
            merge_single=self.net.merge_last_sample,
        )
        return Chunk(
            self.net,
            context.data,
            batches,
            relabel=relabel,
            buffers=self.buffers[index],
            engine=engine,
            loss=objective.loss,
            extra={name: v[index] for name, v in objective.extra.items()},
            graphs=context.graphs,
            precision=context.training.precision,
            transforms=context.training.transforms,
        )

    def _training_parts(
        self, engine: Engine, width: int, *, steps_in_python: bool
    ) -> Sequence[Tensor]:
        """Positions of the clients of each part, those of most samples first.

        The parts do not depend on the number of workers. The rows have `width` columns.
        """
        order = order_by_size(self.num_samples, self.ids)
        order = order[: int(self.have_samples.sum())]
        if engine.chain is not None and has_kernels(self.buffers.device):
            parts = num_kernel_parts(
                self.context, self.num_samples, width, steps_in_python=steps_in_python
            )
            return even_parts(order, min(parts, len(order)))
        if engine.autograd == "vmap":
            return split_by_block(order, self.block_numbers[order])
        single_clients: Sequence[Tensor] = order.split(1)
        return single_clients

    # evaluation ---------------------------------------------------------------
    def scores(
        self, model: Tensors, split: str, predict: Predict = predict_row
    ) -> ScoresAndLabels:
        """Each client's scores [n, ...] in evaluation mode and labels [n, ...].

        Clients of one block share batches where all of them have one model.

        Args:
            model: The clients' models, [S, ...] each.
            split: The split whose samples are scored.
            predict: The function (a client's model, net, x [n, ...]) -> scores. By
                default the model is {"w": row} and gives the scores of the net.
        """
        lists = self.sample_lists(split)
        groups = self._evaluation_groups(model)
        if self.context.engine.evaluates and predict is predict_row and len(lists.flat):
            scores = block_scores(
                self.context,
                model["w"],
                self.buffers,
                lists,
                groups,
                self.block_numbers,
            )
        else:
            scores = client_scores(
                self.context, model, self.buffers, lists, groups, predict
            )
        labels = self.labels(split).split(lists.size.tolist())
        return list(zip(scores, labels, strict=True))

    def features(self, w: Tensor, split: str = "train") -> tuple[Tensor, Tensor]:
        """Features [S, n, H] that each client's head sees, and labels [S, n].

        Clients of fewer samples are padded with zeros and with labels of -1.
        """
        pairs = self.scores({"w": w}, split, predict_features)
        features = [z for z, _ in pairs]
        labels = [y for _, y in pairs]
        return (
            pad_sequence(features, batch_first=True),
            pad_sequence(labels, batch_first=True, padding_value=-1),
        )

    def class_features(self, w: Tensor) -> ClassFeatures:
        """Sums of each class's features, which the head of `w` [S, P] sees.

        They are those of the training samples. A client's sums do not depend on who
        else is in the cohort. Samples without a label count in no class. Raises
        ValueError where targets are not one label for each sample.
        """
        y = self.context.data.y
        if y.is_floating_point() or y.dim() != 1:
            raise ValueError(
                "data: a mean feature of each class needs one label for each sample, "
                f"and the targets are {y.dtype} of the shape {list(y.shape[1:])}."
            )
        rows = []
        for z, labels in self.scores({"w": w}, "train", predict_features):
            z = z.double()
            # What has no label is in a last class, which is left out.
            of_class = labels.where(labels >= 0, self.net.classes)
            member = one_hot(of_class, self.net.classes + 1).to(z)[:, :-1]  # [n, C]
            square = (member.sum(1) * z.square().sum(1)).sum()
            rows.append((member.sum(0), member.T @ z, square))
        counts, sums, square = map(torch.stack, zip(*rows, strict=True))
        return ClassFeatures(counts, sums, square)

    def loss(self, w: Tensor, split: str = "train") -> Tensor:
        """Each client's mean loss [S] at `w` [S, P] over its samples.

        The model is in evaluation mode.
        """
        return self.evaluate({"w": w}, split)[0].to(w)

    def evaluate(
        self,
        model: Tensors,  # [S, ...]
        split: str,
        predict: Predict = predict_row,
    ) -> tuple[Tensor, Tensor | None]:
        """Each client's mean loss and, for classes, its accuracy: [S] float64.

        The model is in evaluation mode. Both are NaN for a client without samples of
        the split. The arguments are those of `scores`.
        """
        has_samples = self.sample_lists(split).size > 0
        if not has_samples.all():
            return self._evaluate_some(has_samples, model, split, predict)
        by_chain = self.context.engine.chain is not None and predict is predict_row
        if by_chain and has_kernels(model["w"].device):
            return self._evaluate_by_kernels(model, split)
        pairs = self.scores(model, split, predict)
        if self.context.engine.evaluates:
            positions = torch.arange(len(self.ids))
            blocks = split_by_block(positions, self.block_numbers)
            groups = [block.tolist() for block in blocks]
        else:
            groups = [g for g in self._evaluation_groups(model) if len(g) > 1]
        return self.loss_and_accuracy(pairs, split, groups)

    def _evaluate_by_kernels(
        self, model: Tensors, split: str
    ) -> tuple[Tensor, Tensor | None]:
        """The result of `evaluate`, by the chain's kernels.

        Where a client's loss is not finite, the module itself has the last word: which
        sums leave the range of floats, and what they are then, depends on the order in
        which their terms are added.
        """
        lists = self.sample_lists(split)
        losses, accuracy = evaluate_by_kernels(
            self.context, model["w"], lists, self._relabel, self.buffers
        )
        is_lost = ~losses.isfinite()
        if is_lost.any():
            lost = self.take(is_lost)
            lost_model = {name: v[is_lost] for name, v in model.items()}
            pairs = lost.scores(lost_model, split)
            new_losses, new_accuracy = lost.loss_and_accuracy(pairs, split)
            losses[is_lost] = new_losses.double()
            if new_accuracy is not None:
                accuracy[is_lost] = new_accuracy
        return losses, accuracy if self._has_accuracy else None

    def _evaluate_some(
        self, mask: Tensor, model: Tensors, split: str, predict: Predict
    ) -> tuple[Tensor, Tensor | None]:
        """The result of `evaluate` for the clients where `mask`, NaN for the others."""
        device = self.buffers.device
        no_values = torch.full(mask.shape, torch.nan, dtype=torch.float64)
        no_values = no_values.to(device)
        if not mask.any():
            return no_values, no_values if self._has_accuracy else None
        on_device = to_device(mask, device)
        of_some = {name: v[on_device] for name, v in model.items()}
        loss, accuracy = self.take(mask).evaluate(of_some, split, predict)
        all_losses = no_values.masked_scatter(on_device, loss.double())
        if accuracy is None:
            return all_losses, None
        return all_losses, no_values.masked_scatter(on_device, accuracy.double())

    def loss_and_accuracy(
        self,
        pairs: ScoresAndLabels,
        split: str,
        groups: Iterable[list[int]] = (),
        returns: str = "logits",
    ) -> tuple[Tensor, Tensor | None]:
        """Loss and accuracy [S] as in `evaluate`, from the result of `scores`.

        Args:
            pairs: Each client's scores [n, ...] and labels [n, ...].
            split: The split of which they are.
            groups: Positions of clients whose samples go through the loss at once.
            returns: The kind of the scores, "logits" or "probabilities".
        """
        lists = self.sample_lists(split)
        accuracy = None
        if self._has_accuracy:
            accuracy = accuracies(pairs, lists)
            if returns == "probabilities":
                pairs = log_probabilities(pairs)
        return mean_losses(self.net, pairs, lists, groups), accuracy

    def grad(self, w: Tensor, split: str = "train") -> Tensor:
        """Each client's gradient [S, P] of `loss` at `w` [S, P].

        With batch norm, and on "train", it is the mean over minibatches in training
        mode, because training normalizes by the batch. They are taken in the order of
        the samples, and a last one of a single sample joins the one before it. It is
        zero for a client without samples of the split.
        """
        lists = self.sample_lists(split)
        train = split == "train" and bool(self.net.buffer_names)
        if self.context.engine.chain is not None and not train:
            return gradients_by_kernels(
                self.context, w, lists, self._relabel, self.buffers
            )
        key = (self.context.seed, self.round, "grad")
        seeds = torch.from_numpy(client_seeds(self.ids, *key).view(np.int64))
        seeds = to_device(seeds, w.device)
        labels = self.labels(split).split(lists.size.tolist())

        def client_gradient(i: int) -> Tensor:
            buffers = self.buffers[i : i + 1]
            seed = seeds[i : i + 1]
            return mean_gradient(
                self.context, w[i], lists[i], labels[i], buffers, seed, train=train
            )

        return torch.stack(self.context.workers.map(client_gradient, range(len(lists))))

    # facts of the cohort --------------------------------------------------------
    @property
    def _has_accuracy(self) -> bool:
        """True where targets are labels, so that scores have an accuracy."""
        return self.net.scores_classes and not self.context.data.y.is_floating_point()

    @cached_property
    def block_numbers(self) -> Tensor:
        """Number [S] of each client's block."""
        if self.known_blocks is not None:
            return self.known_blocks
        return assign_blocks(self.context, self.ids)

    def _evaluation_groups(self, model: Tensors) -> list[list[int]]:
        """Positions of the clients that share batches in an evaluation.

        The clients of a block do, where the whole cohort has one model and the block
        has one set of batch norm's statistics.
        """
        if not is_one_model(model):
            return [[i] for i in range(len(self.ids))]
        return equal_buffer_groups(self.block_numbers, self.buffers)

    @cached_property
    def _relabel(self) -> Tensor | None:
        """Labels [S, C] as each client knows them; None: the federation's."""
        data = self.context.data
        if data.relabel is None:
            return None
        return data.relabel[to_device(self.ids, data.device)]
