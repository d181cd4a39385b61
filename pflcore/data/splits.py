"""Motley's two protocols as functions of a federation: clients held out (cross-device) and samples
held out (cross-silo)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pflcore.check import Seed32, checked, shown, some
from pflcore.data.pool import SPLITS, Pool, Scaling
from pflcore.data.ragged import Ragged, starts

Rule = Callable[[int], dict[str, Tensor]]  # of n samples: the positions of each split
P = TypeVar("P", bound=Pool)  # a federation stays one
STANDARDIZED = "features standardised by each client's own training statistics"


class ClientGroups(NamedTuple):
    """Who trains, who chooses hyper-parameters, who is reported: disjoint client ids, each int64
    and sorted."""

    train: Tensor
    val: Tensor
    test: Tensor


@checked
def subset(
    fed: P, clients: Annotated[Sequence[int] | Tensor, some("clients' numbers in a list")]
) -> P:
    """Only these clients [S], renumbered 0.. in the given order; the pool is shared."""
    ids = _ids(fed, clients)
    index = {s: fed.lists(s).take(torch.tensor(ids)) for s in fed.splits}
    rows = torch.tensor(ids, device=fed.device)
    relabel = None if fed.relabel is None else fed.relabel[rows]
    names = None if fed.names is None else tuple(fed.names[i] for i in ids)
    scaling = None if fed.scaling is None else Scaling(*(v[torch.tensor(ids)] for v in fed.scaling))
    truth = {k: v[rows.to(v.device)] for k, v in fed.truth.items()}
    return replace(fed, index=index, relabel=relabel, truth=truth, names=names, scaling=scaling)


@checked
def split_clients(
    fed: Pool, train: float = 0.8, val: float = 0.1, test: float = 0.1, seed: Seed32 = 13
) -> ClientGroups:
    """Split the clients at random (Motley's cross-device setting).

    Each of ``train``, ``val``, ``test`` is a number of clients (int) or a fraction of them (float);
    one permutation by ``seed``: its first ids are validation clients, the next test clients, then
    training clients. Fractions that add up to 1 use every client:
    validation and test are rounded to the nearest number, training gets the rest.
    """
    given = {"train": train, "val": val, "test": test}
    for key, value in given.items():
        if not value >= 0:
            raise ValueError(f"{key} must be a number of clients or a fraction >= 0, got {value}")
    number = {
        k: int(v) if isinstance(v, Integral) else math.floor(v * fed.n + 0.5)
        for k, v in given.items()
    }
    if (
        not isinstance(train, Integral)
        and abs(sum(v for v in given.values() if not isinstance(v, Integral)) - 1) < 1e-9
    ):
        number["train"] = fed.n - number["val"] - number["test"]
    if sum(number.values()) > fed.n or number["train"] < 1:
        got = ", ".join(f"{k} {number[k]}" for k in given)
        raise ValueError(
            f"train, val and test must share {fed.n} clients with at least one to train, got {got}"
        )
    order = torch.from_numpy(np.random.RandomState(seed).permutation(fed.n))
    val_ids, test_ids, train_ids = (
        order[: number["val"]],
        order[number["val"] :][: number["test"]],
        order[number["val"] + number["test"] :],
    )
    return ClientGroups(
        train_ids[: number["train"]].sort().values, val_ids.sort().values, test_ids.sort().values
    )


@checked
def halves(
    fed: P,
    clients: Sequence[int] | Tensor | None = None,
    seed: Seed32 = 13,
    pool: Sequence[str] | None = None,
) -> P:
    """Personalization and evaluation halves of these clients' [S] (None: all clients') samples.

    The client's samples of the splits in ``pool`` (None: all it has) are shuffled once by ``seed``;
    the first floor(n/2) become its "train" list (personalization), the others its "test" list
    (evaluation); it has no "val". Other clients stay as they are. Nothing but scoring may look at
    an evaluation half.
    """
    ids = torch.tensor(_ids(fed, range(fed.n) if clients is None else clients))
    mine = _joined(fed, pool).take(ids)
    for i in (mine.size < 2).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"client {int(ids[i])} must have at least 2 samples to be halved, got "
            f"{int(mine.size[i])}: leave it out (subset)"
        )

    def rule(n: int) -> dict[str, Tensor]:
        order = _permutation(n, seed, fed)
        return {"train": order[: n // 2], "test": order[n // 2 :]}

    new = _dealt(mine, rule)
    index = {
        s: fed.lists(s) if s in fed.index else _none(fed, fed.n)
        for s in SPLITS
        if s in fed.index or s == "test"
    }
    return replace(
        fed,
        index={
            s: _exchanged(lists, ids, new.get(s, _none(fed, len(ids))))
            for s, lists in index.items()
        },
    )


def keep(fed: P, fraction: float, clients: Sequence[int] | Tensor | None = None) -> P:
    """The first ``fraction`` of each training list, rounded up: keep(.25) is part of keep(.5).
    Other splits, and those of clients other than `clients` [S], stay."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
    lists, size = fed.lists("train"), fed.size()
    ids = torch.tensor(_ids(fed, range(fed.n) if clients is None else clients))
    size = size.index_copy(
        0, ids, (fraction * size[ids].double() - 1e-9).ceil().clamp(min=1).long()
    )
    return replace(fed, index={**fed.index, "train": lists.take(torch.arange(fed.n), size)})


@checked
def split_samples(
    fed: P, fractions: Mapping[str, float], seed: Seed32 = 100, pool: Sequence[str] | None = None
) -> P:
    """Split each client's own samples (Motley's cross-silo setting).

    ``fractions``: of "train", "val", "test", adding up to 1. ``pool``: the splits whose samples are
    divided anew (None: all). Test samples go first, ceil(test * n); then validation, ceil(val / (1
    - test) * rest); each by a fresh permutation from ``seed``. That is
    ``train_test_split(random_state=seed)`` of scikit-learn called twice, as the Motley code does,
    index for index. A client with so few samples that a split would leave it none to train on has
    none in that split; a note counts them. ValueError where no client has enough.
    """
    want = {s: float(fractions.get(s, 0.0)) for s in SPLITS}
    adds_up = all(v >= 0 for v in want.values()) and abs(sum(want.values()) - 1) <= 1e-9
    if set(fractions) - set(SPLITS) or not adds_up or want["train"] == 0:
        raise ValueError(
            "fractions must be of 'train' (above 0), 'val' and 'test' and add up to 1, got "
            f"{dict(fractions)}"
        )
    shares = {"test": want["test"], "val": want["val"] / (1 - want["test"])}
    lists, short = _joined(fed, pool), set()

    def rule(n: int) -> dict[str, Tensor]:
        rest, dealt = torch.arange(n, device=fed.device), {}
        for split, share in shares.items():
            if share == 0:
                continue
            order, cut = _permutation(len(rest), seed, fed), math.ceil(share * len(rest))
            if cut >= len(rest):
                short.add(n)
                cut = 0
            dealt[split], rest = rest[order[:cut]], rest[order[cut:]]
        return {**dealt, "train": rest}

    index = _dealt(lists, rule)
    small = torch.isin(lists.size, torch.tensor(sorted(short), dtype=torch.int64))
    if bool(small.all()):
        raise ValueError(
            f"every client has too few samples (at most {int(lists.size.max())}) for the fractions "
            f"{dict(fractions)}"
        )
    kept = {s: fed.index[s] for s in fed.splits if pool is not None and s not in pool}
    if set(kept) & set(index):
        raise ValueError(
            f"fractions must not name a split outside pool {list(pool or [])}, got "
            f"{sorted(set(kept) & set(index))}"
        )
    note = (
        f"{int(small.sum())} of {fed.n} clients have too few samples for every split: they lack "
        "validation or test samples"
    )
    return replace(
        fed, index={**kept, **index}, notes=[*fed.notes, note] if bool(small.any()) else fed.notes
    )


def standardized(fed: P) -> P:
    """Each client's features shifted and scaled by its own *training* statistics (ddof 0).

    A feature that is constant on the client's training samples is shifted only. Statistics of other
    clients, or of held-out samples, never enter.
    """
    if not fed.x.is_floating_point() or fed.fields is not None:
        raise TypeError(f"standardized needs floating inputs, got {fed.fields or fed.x.dtype}")
    x = fed.x.clone()
    owner, scaling = torch.full((len(x),), -1, device=x.device), []
    for i in range(fed.n):
        rows = torch.cat([fed.index[s][i] for s in fed.splits])
        if bool(((owner[rows] >= 0) & (owner[rows] != i)).any()):
            raise ValueError(
                f"standardized needs samples of one client each, but client {i} shares some with "
                "another"
            )
        owner[rows] = i
        train = fed.x[fed.index["train"][i]].double()
        mean, std = train.mean(0), train.std(0, correction=0)
        scale = torch.where((train == train[0]).all(0), 1.0, std)
        x[rows] = ((fed.x[rows].double() - mean) / scale).to(x.dtype)
        scaling.append((mean.cpu(), scale.cpu()))
    kept = Scaling(*map(torch.stack, zip(*scaling, strict=True)))
    return replace(fed, x=x, notes=[*fed.notes, STANDARDIZED], scaling=kept)


def _ids(fed: Pool, clients: Sequence[int] | Tensor) -> list[int]:
    given = clients.cpu().numpy() if isinstance(clients, Tensor) else np.asarray(list(clients))
    ids: list[int] = given.tolist() if given.ndim == 1 and given.dtype.kind in "iu" else []
    if not ids or min(ids) < 0 or max(ids) >= fed.n or len(set(ids)) != len(ids):
        raise ValueError(
            f"clients must be distinct ids in 0..{fed.n - 1}, at least one, got {shown(clients)}"
        )
    return ids


def _joined(fed: Pool, pool: Sequence[str] | None) -> Ragged:
    """Each client's samples of these splits (None: all) one after the other."""
    lists = [fed.lists(s) for s in (fed.splits if pool is None else pool)]
    if len(lists) == 1:
        return lists[0]
    order = torch.cat([one.owner() for one in lists]).sort(stable=True).indices
    size = torch.stack([one.size for one in lists]).sum(0)
    return Ragged(torch.cat([one.flat for one in lists])[order], starts(size))


def _permutation(n: int, seed: int, fed: Pool) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).permutation(n)).to(fed.device)


def _none(fed: Pool, n: int) -> Ragged:
    return Ragged(
        torch.empty(0, dtype=torch.int64, device=fed.device), torch.zeros(n + 1, dtype=torch.int64)
    )


def _alike(lists: Ragged) -> Iterator[tuple[Tensor, Tensor]]:
    """Clients [m] with as many samples, which one permutation serves, and their lists [m,
    length]."""
    for n in lists.size.unique().tolist():
        mine = (lists.size == n).nonzero()[:, 0]
        yield mine, lists.flat[(lists.begin[mine][:, None] + torch.arange(n)).to(lists.flat.device)]


def _dealt(lists: Ragged, rule: Rule) -> dict[str, Ragged]:
    """Each client's samples dealt by a rule, clients with as many at once."""
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for mine, rows in _alike(lists):
        for split, positions in rule(rows.shape[1]).items():
            parts.setdefault(split, []).append((mine, rows[:, positions]))
    return {s: Ragged.of_parts(len(lists), parts[s]) for s in SPLITS if s in parts}


def _exchanged(old: Ragged, ids: Tensor, new: Ragged) -> Ragged:
    """`old` with the lists `new` for the clients `ids`."""
    which = torch.arange(len(old)).index_copy(0, ids, len(old) + torch.arange(len(ids)))
    return Ragged(torch.cat([old.flat, new.flat]), starts(torch.cat([old.size, new.size]))).take(
        which
    )
