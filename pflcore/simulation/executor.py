"""Executors: who computes the clients of a cohort, in training and in evaluation.

A run hands its executor a function that computes the clients at some positions of a
cohort, and receives the rows of all of them. The random numbers of a client depend on
the run's seed, the round and the client alone. So an executor may compute the clients
in any order and in any place, and the run has the same bits, as long as the clients of
one block are computed together.

- `InProcess` computes all clients at once. It is what a run takes by itself.
- `AcrossRanks` shares them among the processes of `torch.distributed`. A run takes it
  by itself where torchrun started several.
- `OneByOne` computes one client after another in plain torch, and logs each of them.
  It is for debugging.

Symbols: S clients of a cohort, s of them at some positions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import SharedRows, Tensors
from pflcore.check import Words, require
from pflcore.simulation._ranks import Ranks
from pflcore.simulation._signals import allow_signals

__all__ = ["AcrossRanks", "CohortWork", "Executor", "InProcess", "OneByOne"]

LOGGER = logging.getLogger("pflcore")


class BlockPlan(NamedTuple):
    """The facts by which an executor shares out a cohort."""

    work: Tensor  # [S] int64, how much work each client is
    block_numbers: Tensor  # [S] int64, the number of each client's block


@dataclass(frozen=True)
class CohortWork:
    """The work of computing a cohort's clients.

    Attributes:
        place: The work in words, such as "training of round 3": equal on all ranks.
        ids: The clients' ids, int64 [S].
        compute: Computes the clients at positions [s], int64 and ascending, which are
            whole blocks. It returns rows [s, ...] by name, with the same names in every
            call.
        plan: Makes the cohort's plan. It is called once, and only if the executor asks
            for `work` or `block_numbers`.
    """

    place: str
    ids: Tensor
    compute: Callable[[Tensor], Tensors]
    plan: Callable[[], BlockPlan]

    @property
    def work(self) -> Tensor:
        """The work that each client is, such as its number of samples, int64 [S]."""
        return self._plan.work

    @property
    def block_numbers(self) -> Tensor:
        """The number of each client's block, int64 [S].

        The clients of a block are computed together, since the last digits of what
        torch computes over several clients depend on all of them.
        """
        return self._plan.block_numbers

    @cached_property
    def _plan(self) -> BlockPlan:
        """The plan, made once."""
        return self.plan()


def computed_rows(executor: Executor, cohort_work: CohortWork) -> Tensors:
    """The rows [S, ...] that an executor returns, by name.

    Raises ValueError where they are not those of all clients.
    """
    rows = executor.run(cohort_work)
    count = len(cohort_work.ids)
    wanted = f"one that returns rows of all {count} clients in {cohort_work.place}"
    for name, tensor in rows.items():
        got = f"{name} with {len(tensor)} rows"
        require(len(tensor) == count, "executor", wanted, Words(got))
    return rows


def take_positions(value: Any, positions: Tensor, count: int) -> Any:
    """The rows of some clients of a tensor or `SharedRows` for `count` clients.

    A row that all clients share stays one row. Without a choice nothing is copied.
    """
    if len(positions) == count:
        return value
    if isinstance(value, SharedRows):
        index = value.index[to_device(positions, value.index.device)]
        return value._replace(index=index)
    if value.stride(0) == 0:
        return value[:1].expand(len(positions), *value.shape[1:])
    return value[to_device(positions, value.device)]


@runtime_checkable
class Executor(Protocol):
    """Computes the clients of a cohort."""

    def run(self, cohort_work: CohortWork) -> Tensors:
        """The rows [S, ...] of all clients, by name, in the order of the cohort.

        `compute` is called at least once; each client is computed exactly once. What
        `compute` raises is raised.
        """
        ...


@dataclass(frozen=True)
class InProcess:
    """Computes all clients at once, in this process."""

    def run(self, cohort_work: CohortWork) -> Tensors:
        """See `Executor`."""
        return cohort_work.compute(torch.arange(len(cohort_work.ids)))


@dataclass(frozen=True)
class AcrossRanks:
    """Shares the clients among the ranks of a process group, anew in each round.

    Every rank holds the whole state, computes its share, and receives the rows of the
    others. The rows have the same bits for any number of ranks.

    Attributes:
        ranks: The ranks, from `find_ranks`.
    """

    ranks: Ranks

    def run(self, cohort_work: CohortWork) -> Tensors:
        """See `Executor`. All ranks must call it.

        Raises RankError where another rank fails, ends or is silent for too long.
        """

        def compute(positions: Tensor) -> Tensors:
            with allow_signals():
                return cohort_work.compute(positions)

        shares = self.ranks.share_clients(cohort_work.work, cohort_work.block_numbers)
        return self.ranks.gather_clients(cohort_work.place, shares, compute)


@dataclass(frozen=True)
class OneByOne:
    """Computes one client after another, and logs each of them.

    It is for debugging: with it a run takes the engine "loop" and one worker, whose
    bits it has. The lines go to the logger "pflcore" at the level DEBUG. Clients that
    share the batches of an evaluation are computed together.
    """

    def run(self, cohort_work: CohortWork) -> Tensors:
        """See `Executor`."""
        parts = []
        order = []
        for block in cohort_work.block_numbers.unique():
            positions = (cohort_work.block_numbers == block).nonzero()[:, 0]
            start = time.perf_counter()
            rows = cohort_work.compute(positions)
            if LOGGER.isEnabledFor(logging.DEBUG):
                ids = cohort_work.ids[positions].tolist()
                seconds = time.perf_counter() - start
                _log_rows(cohort_work.place, ids, rows, seconds)
            parts.append(rows)
            order.append(positions)
        index = torch.cat(order).argsort()
        gathered = {}
        for name in parts[0]:
            tensor = torch.cat([part[name] for part in parts])
            gathered[name] = tensor[to_device(index, tensor.device)]
        return gathered


def _log_rows(place: str, ids: list[int], rows: Tensors, seconds: float) -> None:
    """Logs the norm of each of the clients' rows, a line a client."""
    for i, client in enumerate(ids):
        norms = []
        for name, tensor in rows.items():
            norm = torch.linalg.vector_norm(tensor[i].double())
            norms.append(f"{name} {float(norm):.6g}")
        words = ", ".join(norms)
        LOGGER.debug(
            "%s, client %d: %s; %.3f s for %d client(s)",
            place,
            client,
            words,
            seconds,
            len(ids),
        )
