"""The one splitter: samples held out, personalization sets, groups of clients.

A rule says for n samples which of their positions go to which split. Clients with as many samples
are dealt at once, by one permutation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from pflcore.check import Fraction, Momentum, NonNegative, Seed32, checked, need
from pflcore.data.ragged import Ragged
from pflcore.data.samples import SPLITS, Samples, Scaling

Rule = Callable[[int], dict[str, Tensor]]  # of n samples: the positions of each split
Split = Literal["train", "val", "test"]
HeldOut = Momentum  # a share of samples, below 1


class ClientGroups(NamedTuple):
    """Who trains, who chooses hyper-parameters, who is reported: disjoint client ids, each int64
    and sorted."""

    train: Tensor
    val: Tensor
    test: Tensor


class Splits(Samples):
    """A federation's other federations: samples dealt anew, some clients, scaled features."""

    @checked
    def split(
        self,
        *,
        val: HeldOut = 0.0,
        test: HeldOut = 0.0,
        seed: Seed32 = 0,
        of: Sequence[Split] | None = ("train",),
    ) -> Self:
        """Holds out these shares of each client's samples of the splits `of` (None: all): Motley's
        cross-silo setting.

        Test samples go first, ceil(test * n); then validation, ceil(val / (1 - test) * rest); each
        by a fresh permutation from `seed`. That is `train_test_split(random_state=seed)` of
        scikit-learn called twice, as the Motley code does, index for index. A client who would have
        none left to train on keeps them all. ValueError where no client has enough, or where a
        split that is to be made exists outside `of`.
        """
        need(test + val < 1, "val and test", "shares below 1 together", [val, test])
        wanted = {"test": test, "val": val / (1 - test)}
        wanted = {s: share for s, share in wanted.items() if share > 0}
        outside = [s for s in wanted if s in self.index and of is not None and s not in of]
        need(not outside, "of", f"{outside} too, which exist, or None for all splits", of)

        def rule(n: int) -> dict[str, Tensor]:
            rest, dealt = torch.arange(n), {}
            for split, share in wanted.items():
                order, cut = permutation(len(rest), seed), math.ceil(share * len(rest))
                cut = cut if cut < len(rest) else 0
                dealt[split], rest = rest[order[:cut]], rest[order[cut:]]
            return {**dealt, "train": rest}

        new = self.dealt(rule, of=of)
        missing = [s for s in wanted if s not in new.index]
        need(not missing, "val and test", f"a client with enough samples for {missing}", wanted)
        return new

    @checked
    def halves(
        self,
        clients: Any = None,
        seed: Seed32 = 13,
        of: Sequence[Split] | None = None,
        scored: Literal["val", "test"] = "test",
    ) -> Self:
        """Personalization halves ("train", floor(n / 2)) and evaluation halves (`scored`) of these
        clients' [S] (None: all clients') samples of the splits `of` (None: all).

        By one permutation from `seed`; they have nothing else then, and the other clients stay.
        Nothing but scoring may look at an evaluation half. ValueError for a client with fewer than
        two samples.
        """
        ids, size = self._ids(clients), self._joined(of).size
        few = ids[size[ids] < 2][:5].tolist()
        need(not few, "clients", "at least 2 samples each, to be halved; leave out", few)

        def rule(n: int) -> dict[str, Tensor]:
            order = permutation(n, seed)
            none = dict.fromkeys(("val", "test"), order[:0])
            return {**none, "train": order[: n // 2], scored: order[n // 2 :]}

        return self.dealt(rule, clients, of)

    @checked
    def keep(self, fraction: Fraction, clients: Any = None) -> Self:
        """The first `fraction` of each training list, rounded up: keep(.25) is part of keep(.5).
        Other splits, and those of clients other than `clients` [S], stay."""

        def rule(n: int) -> dict[str, Tensor]:
            return {"train": torch.arange(max(1, math.ceil(fraction * n - 1e-9)))}

        return self.dealt(rule, clients, ("train",))

    def dealt(self, rule: Rule, clients: Any = None, of: Sequence[str] | None = None) -> Self:
        """These clients' [S] samples of the splits `of` (None: all) dealt anew by a rule, a
        function of their number n -> {split: positions [k] in 0..n-1}.

        What the rule names or deals from is replaced; other splits and other clients stay. A split
        that is left with no sample at all is none.
        """
        ids, lists = self._ids(clients), self._joined(of).take(self._ids(clients))
        chosen = torch.zeros(self.n, dtype=torch.bool).index_fill(0, ids, True)
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {s: [] for s in SPLITS}
        flat = lists.flat.cpu()
        for n in lists.size.unique().tolist():
            same = (lists.size == n).nonzero()[:, 0]
            for split, positions in rule(n).items():
                rows = flat[lists.begin[same, None] + positions]  # [m, k]
                parts[split].append((rows.flatten(), ids[same].repeat_interleave(len(positions))))
        for s in self.splits:
            replaced = parts[s] or of is None or s in of
            if not (replaced and clients is None):
                owner, rows = self.index[s].owner().cpu(), self.index[s].flat.cpu()
                stay = ~chosen[owner] if replaced else owner >= 0
                parts[s].append((rows[stay], owner[stay]))
        index = {s: _grouped(parts[s], self.n) for s in SPLITS if parts[s]}
        index = {s: v.to(self.device) for s, v in index.items() if len(v.flat) or s == "train"}
        new = self._with(index=index)
        new._check_index()  # clients who shared test samples may share training samples now
        return new

    def subset(self, clients: Any) -> Self:
        """Only these clients [S], renumbered 0.. in the given order; the pool is shared."""
        ids = self._ids(clients)

        def rows(t: Tensor) -> Tensor:
            return t[ids.to(t.device)]

        return self._with(
            index={s: lists.take(ids) for s, lists in self.index.items()},
            relabel=None if self.relabel is None else rows(self.relabel),
            truth={k: rows(v) for k, v in self.truth.items()},
            names=None if self.names is None else tuple(self.names[i] for i in ids.tolist()),
            scaling=None if self.scaling is None else Scaling(*map(rows, self.scaling)),
        )

    @checked
    def split_clients(
        self,
        train: NonNegative = 0.8,
        val: NonNegative = 0.1,
        test: NonNegative = 0.1,
        seed: Seed32 = 13,
    ) -> ClientGroups:
        """Split the clients at random (Motley's cross-device setting): numbers of them (int) or
        fractions (float).

        One permutation by `seed`: its first ids are validation clients, the next test clients, then
        training clients. Fractions that add up to 1 use every client: the training group takes what
        rounding leaves.
        """
        given = {"train": train, "val": val, "test": test}
        shares = [v for v in given.values() if isinstance(v, float)]
        k = {
            s: math.floor(v * self.n + 0.5) if isinstance(v, float) else v for s, v in given.items()
        }
        if isinstance(train, float) and abs(sum(shares) - 1) < 1e-9:
            k["train"] = self.n - k["val"] - k["test"]
        left = self.n - sum(k.values())
        fit = left >= 0 and k["train"] >= 1
        need(fit, "train, val and test", f"{self.n} clients in all, one to train at least", k)
        groups = permutation(self.n, seed).split([k["val"], k["test"], k["train"], left])
        return ClientGroups(*(groups[i].sort().values for i in (2, 0, 1)))

    def standardize(self) -> Self:
        """Each client's features by the mean and deviation (ddof 0) of its own *training* samples;
        a new pool, and `scaling` keeps the statistics.

        A feature that is constant there is shifted only. Statistics of other clients, or of
        held-out samples, never enter.
        """
        plain = self.x.is_floating_point() and self.fields is None
        need(plain, "x", "floats in one tensor, to be standardized", self.fields or self.x)
        lists, x = self._joined(None), self.x.clone()
        shared = int(torch.bincount(lists.flat).max()) > 1
        need(not shared, "index", "samples of one client each, to be standardized", "shared ones")
        mean, scale = (torch.empty(self.n, *self.shape, dtype=torch.float64) for _ in range(2))
        for i, (train, rows) in enumerate(zip(self.index["train"], lists, strict=True)):
            known = self.x[train].double()
            m, std = known.mean(0), known.std(0, correction=0)
            s = torch.where((known == known[0]).all(0), 1.0, std)
            x[rows] = ((self.x[rows].double() - m) / s).to(x.dtype)
            mean[i], scale[i] = m, s
        return self._with(x=x, scaling=Scaling(mean, scale))

    def _ids(self, clients: Any) -> Tensor:
        """Distinct clients [S], in the given order, on the CPU; None: all."""
        if clients is None:
            return torch.arange(self.n)
        given = clients.cpu() if isinstance(clients, Tensor) else clients
        ids = np.asarray(given if hasattr(given, "__len__") else [])
        whole = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids)
        fits = whole and ids.min() >= 0 and ids.max() < self.n and len(np.unique(ids)) == len(ids)
        need(fits, "clients", f"distinct ids in 0..{self.n - 1}, at least one", clients)
        return torch.from_numpy(ids.astype(np.int64))

    def _joined(self, of: Sequence[str] | None) -> Ragged:
        """Each client's samples of these splits (None: all) one after the other."""
        lists = [self.lists(s) for s in (self.splits if of is None else of)]
        if len(lists) == 1:
            return lists[0]
        return _grouped([(v.flat.cpu(), v.owner().cpu()) for v in lists], self.n).to(self.device)


def _grouped(parts: list[tuple[Tensor, Tensor]], n: int) -> Ragged:
    """Lists from pieces of samples [m] and their owners [m]."""
    rows, owner = map(torch.cat, zip(*parts, strict=True))
    return Ragged.grouped(rows.numpy(), owner.numpy(), n)


def permutation(n: int, seed: int) -> Tensor:
    """numpy's frozen stream: the same on every machine."""
    return torch.from_numpy(np.random.RandomState(seed).permutation(n))
