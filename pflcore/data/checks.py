"""What a federation refuses, each with one sentence; `fed` is a :class:`~pflcore.data.pool.Pool`,
whose file needs this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pflcore.check import shown

from .fields import IGNORED
from .ragged import Ragged

SPLITS = ("train", "val", "test")


def check_pool(
    x: Tensor, y: Tensor, classes: int | None, index: Mapping[str, Sequence[Tensor]]
) -> None:
    for what, t in (("x", x), ("y", y)):
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{what} must be a tensor, got {type(t).__name__}: use Federation.from_arrays for "
                "arrays"
            )
        if t.layout != torch.strided:
            raise TypeError(
                f"{what} must be a dense tensor, got {t.layout}: convert it with {what}.to_dense()"
            )
        if not (t.is_floating_point() or t.dtype == torch.int64):
            raise TypeError(
                f"{what} must be floating point or int64, got {t.dtype}: convert it (tokens: to "
                "int64, images: to float, then normalise)"
            )
    if x.dim() < 1 or y.dim() < 1 or len(x) != len(y):
        raise ValueError(
            f"x and y must have one row per sample, got shapes {list(x.shape)} and {list(y.shape)}"
        )
    if x.device != y.device:
        raise ValueError(f"x and y must be on one device, got {x.device} and {y.device}")
    for what, t in (("x", x), ("y", y)):
        # min and max keep NaN and Inf and need no mask as large as the pool
        if (
            t.is_floating_point()
            and t.numel()
            and not bool(torch.isfinite(torch.stack(torch.aminmax(t))).all())
        ):
            bad = int((~torch.isfinite(t)).reshape(len(t), -1).any(1).nonzero()[0])
            raise ValueError(
                f"{what} must be finite, got NaN or Inf in sample {bad}{_owner(bad, index)}: clean "
                "the data first"
            )
    if classes is None:
        return
    if classes < 1:
        raise ValueError(f"classes must be at least 1, or None for regression, got {classes}")
    if y.dtype != torch.int64:
        raise TypeError(
            f"y must hold int64 labels where classes is given ({classes}), got {y.dtype}: pass "
            "classes=None for regression"
        )
    if y.numel() and int(y.min()) == -1 and int(y.max()) <= 1 and not bool((y == 0).any()):
        raise ValueError(
            "y must hold labels in 0..1, got -1 and 1: pass (y > 0) as integers, which hinge takes "
            "too"
        )
    labels = y[y != IGNORED] if y.dim() > 1 else y
    low = int(labels.min()) if labels.numel() else 0
    if y.numel() and (low < 0 or int(y.max()) >= classes):
        raise ValueError(f"y must hold labels in 0..{classes - 1}, got {low}..{int(y.max())}")


def _owner(sample: int, index: Mapping[str, Sequence[Tensor]]) -> str:
    for split, lists in index.items():
        for i, rows in enumerate(lists):
            if isinstance(rows, Tensor) and bool((rows == sample).any()):
                return (
                    f", number {int((rows == sample).nonzero()[0])} of client {i}'s {split} samples"
                )
    return ""


def check_lists(fed: Any) -> None:
    """What came as N lists: whether each split has one list of the right kind per client."""
    unknown = [s for s in fed.index if s not in SPLITS]
    if unknown or "train" not in fed.index:
        raise ValueError(
            "index must hold the split 'train' and may hold 'val' and 'test', got "
            f"{list(fed.index)}"
        )
    n = len(fed.index["train"])
    if n == 0:
        raise ValueError("a federation needs at least one client, got none")
    for split in fed.splits:
        lists = fed.index[split]
        if len(lists) != n:
            raise ValueError(
                f"index[{split!r}] must hold one list per client ({n}), got {len(lists)}"
            )
        if isinstance(lists, Ragged):
            _check_kind(lists.flat, f"index[{split!r}]", fed.x.device)
            continue
        for i, rows in enumerate(lists):
            _check_kind(rows, f"index[{split!r}][{i}]", fed.x.device)


def check_clients(fed: Any) -> None:
    pool = len(fed.x)
    # which split holds the sample, 0: none
    where = torch.zeros(pool, dtype=torch.int8, device=fed.x.device)
    for number, split in enumerate(fed.splits, 1):
        lists = fed.lists(split)
        every = lists.flat
        if split == "train" and not bool(lists.size.all()):
            without_samples((lists.size == 0).nonzero()[:, 0].tolist())
        if not len(every):
            continue
        low, high = (int(v) for v in every.aminmax())
        if low < 0 or high >= pool:
            i = int(lists.owner()[(every < 0) | (every >= pool)][0])
            low, high = (int(v) for v in lists[i].aminmax())
            raise ValueError(f"index[{split!r}][{i}] must lie in 0..{pool - 1}, got {low}..{high}")
        if bool(where[every].any()):
            raise ValueError(
                f"a sample must belong to one split, but sample {int(every[where[every] > 0][0])} "
                f"is in {split!r} and another"
            )
        where[every] = number
        if int((where == number).sum()) == len(every):
            continue
        shared = split == "test"  # clients may share a test set, but none counts a sample twice
        key = lists.owner() * pool + every if shared else every
        key = key.sort().values
        twice = key[1:][key[1:] == key[:-1]]
        if len(twice):
            who = f"client {int(twice[0]) // pool}" if shared else "two clients, or one twice,"
            raise ValueError(
                f"index[{split!r}] must not overlap, but {who} holds sample {int(twice[0]) % pool} "
                "more than once"
            )
    _check_extras(fed, fed.n)


def without_samples(clients: Sequence[object]) -> NoReturn:
    """Refuses clients that have nothing to train on."""
    if len(clients) == 1:
        raise ValueError(
            f"client {clients[0]} has no training samples: leave it out, or give it at least one"
        )
    first = ", ".join(str(c) for c in clients[:5]) + (", ..." if len(clients) > 5 else "")
    raise ValueError(
        f"{len(clients)} clients have no training samples ({first}): leave them out, or give each "
        "at least one"
    )


def _check_kind(rows: Tensor, what: str, device: torch.device) -> None:
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        got = (
            f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        )
        raise TypeError(f"{what} must be a one-dimensional int64 tensor, got {got}")
    if rows.device != device:
        raise ValueError(f"{what} must be on the pool's device {device}, got {rows.device}")


def _check_extras(fed: Any, n: int) -> None:
    if fed.names is not None and (
        len(fed.names) != n or not all(isinstance(name, str) for name in fed.names)
    ):
        raise ValueError(f"names must be a string for each client ({n}), got {shown(fed.names)}")
    for key, value in fed.truth.items():
        if value.dim() < 1 or len(value) != n:
            raise ValueError(
                f"truth[{key!r}] must have one row per client ({n}), got shape {list(value.shape)}"
            )
    if fed.relabel is None:
        return
    if fed.classes is not None and bool((fed.y == IGNORED).any()):
        raise ValueError("relabel needs a label at every step, but some are left out")
    if fed.classes is None:
        raise ValueError("relabel needs labels, but classes is None")
    if fed.relabel.dtype != torch.int64 or tuple(fed.relabel.shape) != (n, fed.classes):
        raise ValueError(
            f"relabel must be int64 [{n}, {fed.classes}], got {fed.relabel.dtype} "
            f"{list(fed.relabel.shape)}"
        )
    if int(fed.relabel.min()) < 0 or int(fed.relabel.max()) >= fed.classes:
        raise ValueError(
            f"relabel must map to labels in 0..{fed.classes - 1}, got "
            f"{int(fed.relabel.min())}..{int(fed.relabel.max())}"
        )
    if fed.relabel.device != fed.x.device:
        raise ValueError(
            f"relabel must be on the pool's device {fed.x.device}, got {fed.relabel.device}"
        )
