"""The plan of a cohort's steps: who takes which batch when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pflcore.train.training import Training


class Step(NamedTuple):
    """One step of the clients [a, b) of a piece: they take batches of one size, so one vmap serves them; of any size in a chain."""

    k: int  # the number of the step, from 0
    a: int
    b: int
    batches: list[tuple[int, int, int]]  # (epoch, first, last) of each minibatch of the step; none in a chain


class Plan(NamedTuple):
    """The steps of a piece: they depend on the clients' sizes alone, so a run makes them once."""

    steps: list[Step]
    taken: Tensor  # [s, 1] float64: how many steps each client takes
    passes: int  # shuffles each client needs


def make_plan(
    t: Training, sizes: tuple[int, ...], epochs: int | None, steps: int | None, batches: int, by_size: bool, chain: bool, join: bool
) -> Plan:
    cuts = [_cuts(n, t, join) for n in sizes]
    epochs = epochs or max(-(-(steps or 0) // len(c)) for c in cuts)
    if chain:
        found = list(_at_once(cuts, epochs, steps))
    else:
        found = list(_by_batch(cuts, epochs) if by_size else _by_client(sizes, cuts, epochs, steps, batches))
    taken = torch.zeros(len(sizes), 1, dtype=torch.float64)
    for s in found:
        taken[s.a : s.b] += 1
    return Plan(found, taken, batches * epochs)


def _at_once(cuts: list[list[tuple[int, int]]], epochs: int, steps: int | None) -> Iterator[Step]:
    """Everybody's k-th step at once, whatever the sizes: the largest clients, which come first, take the most."""
    taken = [len(c) * epochs if steps is None else min(steps, len(c) * epochs) for c in cuts]
    b = len(taken)
    for k in range(max(taken)):
        while taken[b - 1] <= k:
            b -= 1
        yield Step(k, 0, b, [])


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


def _cuts(n: int, t: Training, join: bool) -> list[tuple[int, int]]:
    """Where `DataLoader(batch_size, drop_last)` cuts n samples; a client with less than a batch has one batch of what it has.
    `join`: a last one of a single sample joins the one before."""
    cuts = [(a, min(a + t.batch_size, n)) for a in range(0, n, t.batch_size)]
    if join and not t.drop_last and len(cuts) > 1 and cuts[-1] == (n - 1, n):
        cuts[-2:] = [(cuts[-2][0], n)]
    return [c for c in cuts if c[1] - c[0] == min(t.batch_size, n)] if t.drop_last else cuts
