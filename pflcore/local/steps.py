"""The plan of a cohort's steps: who takes which batch when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pflcore.local.training import Training


class Step(NamedTuple):
    """One step of the clients [a, b) of a piece: they take batches of one size, so one vmap serves them."""

    k: int  # the number of the step, from 0
    a: int
    b: int
    batches: list[tuple[int, int, int]]  # (epoch, first, last) of each minibatch of the step
    weight: Tensor | None = None  # [s, B] of the samples, where some clients' batches are shorter


class Plan(NamedTuple):
    """The steps of a piece: they depend on the clients' sizes alone, so a run makes them once."""

    steps: list[Step]
    taken: Tensor  # [s, 1] float64: how many steps each client takes
    passes: int  # shuffles each client needs


def make_plan(t: Training, sizes: tuple[int, ...], epochs: int | None, steps: int | None, batches: int, by_size: bool, dense: bool) -> Plan:
    cuts = [_cuts(n, t) for n in sizes]
    whole = steps is None
    epochs = epochs or max(-(-(steps or 0) // len(c)) for c in cuts)
    if dense and whole:
        found = list(_together(sizes, cuts, epochs, batches))
    elif by_size:
        found = list(_by_batch(cuts, epochs))
    else:
        found = list(_by_client(sizes, cuts, epochs, steps, batches))
    taken = torch.zeros(len(sizes), 1, dtype=torch.float64)
    for s in found:
        taken[s.a : s.b] += 1
    return Plan(found, taken, batches * epochs)


def _together(sizes: tuple[int, ...], cuts: list[list[tuple[int, int]]], epochs: int, batches: int) -> Iterator[Step]:
    """Whole epochs, everybody's k-th batch at once, short ones too: their weights end with them."""
    size = torch.tensor(sizes)
    for e in range(epochs):
        for k, (first, last) in enumerate(cuts[0]):
            b = sum(len(c) > k for c in cuts)
            own = (size[:b] - first).clamp(max=last - first)  # samples in each one's batch
            even = bool((own == last - first).all())
            weight = None if even else (torch.arange(last - first) < own[:, None]).double() / own[:, None]
            yield Step(e * len(cuts[0]) + k, 0, b, [(j * epochs + e, first, last) for j in range(batches)], weight)


def _by_batch(cuts: list[list[tuple[int, int]]], epochs: int) -> Iterator[Step]:
    """Whole epochs, everybody's k-th batch at once, grouped by the batch's size."""
    for e in range(epochs):
        for k in range(len(cuts[0])):
            a = 0
            while a < len(cuts) and k < len(cuts[a]):
                b = a
                while b < len(cuts) and k < len(cuts[b]) and cuts[b][k] == cuts[a][k]:
                    b += 1
                yield Step(e * len(cuts[0]) + k, a, b, [(e, *cuts[a][k])])
                a = b


def _by_client(sizes: tuple[int, ...], cuts: list[list[tuple[int, int]]], epochs: int, steps: int | None, batches: int) -> Iterator[Step]:
    """Clients of one size step together: their steps have one number and their batches one size throughout."""
    a = 0
    while a < len(sizes):
        b = a
        while b < len(sizes) and sizes[b] == sizes[a]:
            b += 1
        own = epochs if steps is None else -(-steps // len(cuts[a]))  # passes by the client's own size, whoever else is there
        line = [(e, *c) for e in range(own) for c in cuts[a]]
        for k, (e, first, last) in enumerate(line[:steps]):
            yield Step(k, a, b, [(j * own + e, first, last) for j in range(batches)])
        a = b


def _cuts(n: int, t: Training) -> list[tuple[int, int]]:
    """Where `DataLoader(batch_size, drop_last)` cuts n samples; a client with less than a batch has one batch of what it has."""
    cuts = [(a, min(a + t.batch_size, n)) for a in range(0, n, t.batch_size)]
    return [c for c in cuts if c[1] - c[0] == min(t.batch_size, n)] if t.drop_last else cuts
