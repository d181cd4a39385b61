"""Local training of a whole cohort: one contract, two engines.

A step is `w -= lr * mask * (grad + shift + mu * (w - anchor))`, with weight decay and momentum as `torch.optim.SGD` has them, or AdamW's
for the gradient `grad + shift + mu * (w - anchor)`.
The engine of *threads* trains one client after another on each of its threads (convolutions on a CPU); the *vmap* engine takes the
same step for many clients at once (linear models, MLPs, GPUs). Both take the same batches in the same order, so their results
agree up to rounding; neither depends on the number of workers or on the order of the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pflcore.nn.mode import forward_mode
from pflcore.ops.chain import chain_eval, chain_grad
from pflcore.train.chain import Chain
from pflcore.train.group import LossFn, Piece
from pflcore.train.losses import CRITERIA, shares_right
from pflcore.train.net import Net
from pflcore.train.random import client_seeds
from pflcore.train.settings import Setting
from pflcore.train.workers import onto

T = TypeVar("T")
EVAL_BATCH = 125  # a forward batch of 1,000 or more costs twice as much per sample
PARTS = 8  # of an evaluation by the kernels of a chain


class Fit(NamedTuple):
    """What local training gives back."""

    w: Tensor  # [S, Q] the trained rows
    lr_sum: Tensor  # [S, 1] sum of the step sizes taken
    loss: Tensor  # [S] mean loss of the minibatches, at the rows before each step
    grad: Tensor | None  # [S, Q] mean minibatch gradient, clipped, SGD's weight decay included (shift and prox are not), when asked


@dataclass
class Local:
    """What an algorithm's hook may do with its cohort's data. Rows are [S, Q]; S clients in the order of `ids`."""

    setting: Setting
    ids: Tensor  # [S]
    round: int
    buffers: Tensor  # [S, b] float buffers; training writes them, a probe does not
    train_loss: Tensor | None = None  # [S] of the last training that was no probe
    joined: Tensor | None = None  # [S] bool: who took part in a round before; None: everybody
    _ids: NDArray[np.int64] = field(init=False)
    _size: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self._ids = self.ids.numpy()
        self._size = self.setting.data.size("train").numpy()[self._ids]

    @property
    def net(self) -> Net:
        """The model as a function of a row."""
        return self.setting.net

    @property
    def rounds(self) -> int:
        """R, all rounds of the run."""
        return self.setting.rounds

    @property
    def lr(self) -> float:
        """The step size of this round."""
        return self.setting.training.lr_at(self.round, self.rounds)

    @property
    def size(self) -> Tensor:
        """Training samples of each client, [S]."""
        return torch.from_numpy(self._size)

    @property
    def counts(self) -> Tensor:
        """Training samples of each client and class, [S, C]."""
        return self.setting.engine.counts(self.setting.data, self.ids)

    def newcomers(self, device: torch.device) -> Tensor:
        """Bool [S, 1] on `device`: who takes part for the first time, or has not yet."""
        joined = torch.ones(len(self._ids), dtype=torch.bool) if self.joined is None else self.joined
        return onto(~joined[:, None], device)

    def has(self, split: str) -> bool:
        """Whether the federation has this split."""
        return split in self.setting.data.index

    # training --------------------------------------------------------------------------------------------------------
    def fit(
        self,
        start: Tensor,  # [S, Q]
        *,
        shift: Tensor | None = None,  # [S, Q] added to every gradient
        prox: tuple[Tensor | float, Tensor] | None = None,  # (mu, anchor [S, Q]): adds mu * (w - anchor); mu a number, [S] or [S, 1]
        mask: Tensor | None = None,  # [Q] or [S, Q], bool or a number: where it is 0 nothing moves
        loss: LossFn | None = None,
        extra: dict[str, Tensor] | None = None,  # tensors [S, ...] whose client's slice the loss gets
        noise: int = 0,  # so many uniform numbers per client and step, in extra["noise"]
        epochs: int | None = None,
        steps: int | None = None,  # so many steps instead of epochs
        lr: float | None = None,
        stream: str = "fit",  # names the shuffle: two fits of one hook take two streams
        probe: bool = False,  # leave the buffers as they were
        want_grad: bool = False,
    ) -> Fit:
        """Minibatch training from `start` on each client's training data, by the run's optimizer."""
        rate = self.lr if lr is None else lr
        mask = None if mask is None else mask.to(start.dtype)
        count, width = start.shape
        w = torch.empty_like(start, memory_format=torch.contiguous_format)
        mean_grad = torch.zeros_like(w) if want_grad else None
        losses = torch.zeros(count, dtype=torch.float64, device=start.device)
        taken = torch.zeros(count, 1, dtype=torch.float64)

        def train(pos: Tensor) -> None:
            work = Piece(self, pos, loss, extra, noise, epochs, steps, 1, stream, probe, by_size=steps is None)
            rows = work.mine(start).contiguous()  # indexing copies
            grads = torch.zeros_like(rows) if want_grad else None
            mu, anchor = (0.0, None) if prox is None else prox
            work.train(
                rows,
                rate,
                shift=None if shift is None else work.mine(shift),
                mask=mask if mask is None or mask.dim() == 1 else work.mine(mask),
                mu=work.mine(mu.reshape(-1)) if isinstance(mu, Tensor) and mu.numel() > 1 else mu,
                anchor=None if anchor is None else work.mine(anchor),
                grads=grads,
            )
            w[work.at] = rows
            losses[work.at] = work.mean(work.losses)
            taken[pos] = work.taken
            if mean_grad is not None and grads is not None:
                mean_grad[work.at] = work.mean(grads)
            work.finish()

        self._over_pieces(train, width, self._samples(loss))
        if not probe:
            self.train_loss = losses
        return Fit(w, onto(taken * rate, start.device).to(start.dtype), losses.to(start.dtype), mean_grad)

    def each_batch(
        self,
        rows: dict[str, Tensor],  # [S, ...]; rows[*] are changed by `update` alone
        update: Callable[[dict[str, Tensor], Callable[..., Tensor], int], dict[str, Tensor]],
        *,
        loss: LossFn | None = None,
        extra: dict[str, Tensor] | None = None,
        noise: int = 0,
        batches: int = 1,
        epochs: int | None = None,
        steps: int | None = None,
        stream: str = "fit",
        probe: bool = False,
        alone: bool = False,  # never under vmap, for a loss that it cannot carry
        together: bool = False,  # clients of all sizes take their k-th batches at once (whole epochs, one batch a step)
    ) -> dict[str, Tensor]:
        """The general, slower form: `update(rows, grad, k) -> rows` takes step `k`, 0 for a client's first; the numbers grow, and a client
        that takes fewer steps an epoch than others skips some.

        `update` sees the rows of s clients at once ([s, ...]; s is 1 in the engine of threads), and must treat each alone: sums over the
        last axis, no sums over the first. `grad(w, which=0)` is the gradient [s, Q] of the loss on this step's `which`-th minibatch
        at any `w` [s, Q]; the `batches` minibatches of a step come from as many independent shuffles. `update` may change rows in place,
        and need not return those; `together` is faster where sizes differ, but then k depends on who else trains.
        """
        if together and (steps is not None or batches != 1):
            raise ValueError("together: expected whole epochs and one minibatch a step; leave out steps and batches.")
        out = {k: torch.empty_like(v, memory_format=torch.contiguous_format) for k, v in rows.items()}
        losses = torch.zeros(len(self._ids), dtype=torch.float64, device=self.buffers.device)

        def train(pos: Tensor) -> None:
            work = Piece(self, pos, loss, extra, noise, epochs, steps, batches, stream, probe, by_size=together, alone=alone)
            mine = {k: work.mine(v) for k, v in rows.items()}
            for step in work.steps:
                s = slice(step.a, step.b)
                new = update({k: v[s] for k, v in mine.items()}, work.grad_function(step), step.k)
                for k, v in new.items():
                    mine[k][s] = v
            for k, v in mine.items():
                out[k][work.at if v.device == work.at.device else pos] = v
            losses[work.at] = work.mean(work.losses)
            work.finish()

        width = max(v[0].numel() for v in rows.values())
        most = max(2, len(self._ids) * self.setting.training.batch_size * width >> 23)  # so many steps' arithmetic outweighs their Python
        self._over_pieces(train, width, 0 if alone else self._samples(loss), alone, most)
        if not probe:
            self.train_loss = losses
        return out

    # looking ---------------------------------------------------------------------------------------------------------
    def loss(self, rows: Tensor, split: str = "train", *, loss: LossFn | None = None, extra: dict[str, Tensor] | None = None) -> Tensor:
        """Each client's mean loss [S] at `rows` [S, Q] over all its samples of `split`, in evaluation mode.

        Of a loss that is no mean over samples (class weights, labels left out) it is the mean over parts of 125 samples."""
        measured = self.measure(rows, split) if loss is None else None
        if measured is not None:
            return measured[0].to(rows)

        def value(i: int) -> Tensor:
            parts = self._chunks(i, split)
            with torch.no_grad(), forward_mode(False, self.buffers[i], alone=True):
                return sum((self._value(rows[i], x, y, i, loss, extra) * (len(y) / n) for x, y, n in parts), torch.zeros(()))

        return torch.stack(self._each_client(value))

    def grad(self, rows: Tensor, split: str = "train", *, loss: LossFn | None = None, extra: dict[str, Tensor] | None = None) -> Tensor:
        """Each client's gradient [S, Q] at `rows` over all its samples of `split`, in evaluation mode: that of `loss`.

        The gradient that training takes has batch norm normalise by the batch: with batch norm, and on "train", this is the mean over
        minibatches (of the run's size, in the order of the samples, no last one of a single sample) in training mode; the running
        statistics stay.
        """
        chain = self.setting.engine.chain if loss is None else None
        if chain is not None and self.has(split):
            return self._chain_grad(chain, rows, split)
        train = split == "train" and bool(self.net.buffer_names)
        size = self.setting.training.batch_size if train else EVAL_BATCH

        def gradient(i: int) -> Tensor:
            total = torch.zeros_like(rows[i])
            seed = torch.from_numpy(client_seeds(self._ids[i : i + 1], self.setting.seed, self.round, "grad").view(np.int64))[0]
            for k, (x, y, n) in enumerate(self._chunks(i, split, size, whole=train)):
                with forward_mode(train, self.buffers[i].clone(), seed.to(x.device) + k, alone=True):
                    w = rows[i].detach().requires_grad_()
                    total += torch.autograd.grad(self._value(w, x, y, i, loss, extra), w)[0] * (len(y) / n)
            return total

        return torch.stack(self._each_client(gradient))

    def features(self, rows: Tensor, split: str = "train") -> tuple[Tensor, Tensor]:
        """What each client's head sees, [S, n, H], and the labels [S, n]; short clients are padded with zeros and labels -1."""

        def look(i: int) -> tuple[Tensor, Tensor]:
            with torch.no_grad(), forward_mode(False, self.buffers[i], alone=True):
                parts = [(self.net.features(rows[i], x), y) for x, y, _ in self._chunks(i, split)]
            return torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])

        features = self._each_client(look)
        return pad_sequence([z for z, _ in features], batch_first=True), pad_sequence(
            [y for _, y in features], batch_first=True, padding_value=-1
        )

    def scores(
        self, predict: Callable[[dict[str, Tensor], Net, Tensor], Tensor], view: dict[str, Tensor], split: str
    ) -> list[tuple[Tensor, Tensor]]:
        """Each client's (scores [n, ...], labels [n]) on `split` by `predict(its slice of view, net, x)`, in evaluation mode."""
        if self._all_alike(*view.values()) and self.has(split):
            return self._shared_scores(predict, {k: v[0] for k, v in view.items()}, split)

        def look(i: int) -> tuple[Tensor, Tensor]:
            mine = {k: v[i] for k, v in view.items()}
            with torch.no_grad(), forward_mode(False, self.buffers[i], alone=True):
                parts = [(predict(mine, self.net, x), y) for x, y, _ in self._chunks(i, split)]
            return torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])

        return self._each_client(look)

    def measure(self, rows: Tensor, split: str) -> tuple[Tensor, Tensor | None] | None:
        """Each client's mean loss [S] and, for classes, its share of right answers [S] at `rows` [S, P], all clients at once.

        None where that cannot be: the models differ and are no chain, or the loss of a batch may be another than the mean over its samples.
        """
        chain = self.setting.engine.chain
        if not self.has(split):
            return None
        if chain is not None:
            loss, hits = self._evaluated(chain, rows, split)
        elif self._all_alike(rows) and self.net.criterion in CRITERIA.values():
            loss, hits = self._of_one_model(rows[0], split)
        else:
            return None
        return loss, hits if self._scored else None

    # inside ----------------------------------------------------------------------------------------------------------
    def _all_alike(self, *rows: Tensor) -> bool:
        """Whether all clients have one model: rows that are one row expanded, and the same statistics."""
        one = bool(rows) and all(len(v) > 1 and v.stride(0) == 0 for v in rows)
        return one and (not self.buffers.shape[1] or bool((self.buffers == self.buffers[:1]).all()))

    def _of_one_model(self, row: Tensor, split: str) -> tuple[Tensor, Tensor]:
        """Each client's mean loss [S] float64 and share of right answers [S] float64 where all have one model: one pass."""
        data, engine = self.setting.data, self.setting.engine
        lists, owner = engine.lists(data, split, self._ids)
        scored = self._scored
        relabel = None if data.relabel is None else data.relabel[onto(self.ids, data.device)]

        def look(chunk: tuple[Tensor, Tensor]) -> Tensor:
            places, whose = chunk[0], onto(chunk[1], data.device)
            y = data.y.index_select(0, places)
            y = y if relabel is None else relabel.index_select(0, whose).gather(1, y.view(len(y), -1)).view_as(y)
            with torch.no_grad(), forward_mode(False, self.buffers[0], alone=True):
                scores = self.net(row, data.x.index_select(0, places))
            losses = torch.vmap(self.net.criterion)(scores[:, None], y[:, None]).double()
            hits = shares_right(scores, y) if scored else losses
            return torch.stack([losses, hits], 1)

        values = torch.cat(engine.map(look, list(zip(lists.flat.split(EVAL_BATCH), owner.split(EVAL_BATCH), strict=True))))
        total = values.new_zeros(len(self._ids), 2).index_add_(0, onto(owner, values.device), values)
        loss, hits = (total / onto(lists.size[:, None], values.device)).unbind(1)
        return loss, hits

    @property
    def _scored(self) -> bool:
        """Whether there are right answers: labels, and a criterion that takes them as such."""
        return self.net.scores_classes and not self.setting.data.y.is_floating_point()

    def _value(self, row: Tensor, x: Tensor, y: Tensor, i: int, loss: LossFn | None, extra: dict[str, Tensor] | None) -> Tensor:
        if loss is None:
            return self.net.loss(row, x, y)
        return loss(self.net, row, x, y, {k: v[i] for k, v in (extra or {}).items()})

    def _shared_scores(
        self, predict: Callable[[dict[str, Tensor], Net, Tensor], Tensor], view: dict[str, Tensor], split: str
    ) -> list[tuple[Tensor, Tensor]]:
        """The same where all clients have one model: one pass over all their samples, in batches that end where they like."""
        data, engine = self.setting.data, self.setting.engine
        lists = engine.lists(data, split, self._ids)[0]

        def look(places: Tensor) -> Tensor:
            with torch.no_grad(), forward_mode(False, self.buffers[0], alone=True):
                return predict(view, self.net, data.x.index_select(0, places))

        scores = torch.cat(engine.map(look, lists.flat.split(EVAL_BATCH))).split(lists.size.tolist())
        return [(z, data.labels(int(i), split)) for z, i in zip(scores, self._ids, strict=True)]

    def _evaluated(self, chain: Chain, rows: Tensor, split: str) -> tuple[Tensor, Tensor]:
        """Each client's mean loss [S] float64 and share of right answers [S] float64; one pass where all have one row."""
        data, engine = self.setting.data, self.setting.engine
        lists, owner = engine.lists(data, split, self._ids)
        order, begin, n, count = lists.flat, lists.begin, len(lists.flat), len(self._ids)
        relabel = None if data.relabel is None else data.relabel[onto(self.ids, data.device)]
        parts = min(count, PARTS if n * self.net.size >= 1 << 24 else 1)
        cuts = [0, *np.searchsorted(begin.numpy(), [n * j // parts for j in range(1, parts)]).tolist(), count]  # about as many samples each

        def look(clients: tuple[int, int]) -> tuple[Tensor, Tensor]:
            a, b = clients
            own = None if relabel is None else relabel[a:b]
            places, first = order[int(begin[a]) : int(begin[b])], begin[a : b + 1] - begin[a]
            losses, right, _ = chain_eval(rows[a:b], *chain.head, data.x, data.y, own, places, first, 0)
            return losses.cpu(), (right & ~losses.isnan()).cpu()  # a NaN among the scores is no answer

        found = engine.map(look, [(a, b) for a, b in pairwise(cuts) if a < b])
        values = torch.stack([torch.cat([loss for loss, _ in found]), torch.cat([right for _, right in found]).double()], 1)
        total = torch.zeros(count, 2, dtype=torch.float64).index_add_(0, owner, values) / lists.size[:, None]
        loss, hits = onto(total, rows.device).unbind(1)
        return loss, hits

    def _chain_grad(self, chain: Chain, rows: Tensor, split: str) -> Tensor:
        data = self.setting.data
        lists = data.lists(split).take(self.ids)
        size = lists.size
        relabel = None if data.relabel is None else data.relabel[onto(self.ids, data.device)]
        grads = torch.empty_like(rows, memory_format=torch.contiguous_format)

        def gradient(pos: Tensor) -> None:
            at = onto(pos, rows.device)
            own, index = None if relabel is None else relabel[at], pad_sequence(list(lists.take(pos)), batch_first=True)
            grads[at] = chain_grad(rows[at], *chain.head, data.x, data.y, own, index, size[pos], None)[0]

        self._over_pieces(gradient, rows.shape[1], int(size.sum()))
        return grads

    def _chunks(self, i: int, split: str, size: int = EVAL_BATCH, whole: bool = False) -> Iterator[tuple[Tensor, Tensor, int]]:
        """x, y of the client's samples in batches of `size`, and their number; with `whole` a last one alone joins those before it."""
        if split not in self.setting.data.index:
            raise ValueError(
                f"split: this federation has {', '.join(self.setting.data.index)}, not {split!r}; split the clients' samples first."
            )
        data, client = self.setting.data, int(self._ids[i])
        index, y = data.index[split][client], data.labels(client, split)
        for a in range(0, len(y) - (whole and len(y) > 1), size):
            b = a + size + (whole and a + size + 1 == len(y))
            yield data.x.index_select(0, index[a:b]), y[a:b], len(y)

    def _each_client(self, f: Callable[[int], T]) -> list[T]:
        return self.setting.engine.map(f, range(len(self._ids)))

    def _samples(self, loss: LossFn | None) -> int:
        """How many samples the kernels of a chain are given in a pass; 0 where the general path runs."""
        chain = self.setting.engine.chain if loss is None and self.setting.data.device.type == "cpu" else None
        return int(self._size.sum()) if chain is not None else 0

    def _over_pieces(self, f: Callable[[Tensor], None], width: int, samples: int = 0, alone: bool = False, most: int = 16) -> None:
        order = torch.from_numpy(np.lexsort((self._ids, -self._size)))  # largest first, then by id
        count = len(order) if alone else self.setting.engine.pieces(len(order), width, samples, most)
        cuts = [len(order) * j // count for j in range(count + 1)]
        self.setting.engine.map(f, [order[a:b] for a, b in pairwise(cuts)])
