"""Small sizes: what a call of an op costs, and its kernel beside torch's best call.

Where the rows lie in the caches, a kernel takes microseconds, and the way to it counts.
Two ratios tell how good both are:

- The call of an op: the op on two rows of one column, which is nearly all overhead. It
  is divided by `torch.cdist` on the same rows.
- The kernel of an op: the op at a size, less its call. It is divided by the whole time
  of torch's best call whose result is right.

Times are minima. All calls of a size take turns, so that a busy machine is as busy for
one as for another.

Symbols: N models of P parameters; M results, each a mixture of K models.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch

from bench import against, aggregate, sqdist, table
from bench.problem import Call, Facts, Problem, Size, models

FRESH = "fresh result"
HEAD = (
    "threads | op | N | P | call, us | of cdist's | kernel, us | torch, us | "
    "of torch's | torch's call"
)
# A peer that takes so many times as long as the fastest one is timed no further.
MAX_PEER_TIME = 4.0
RUNS_OF_A_TURN = 3


class Case(NamedTuple):
    """One op at one size.

    Attributes:
        op: the op and its result in words
        size: N and P
        problem: the op and its peers at that size
        smallest: the op on two rows of one column
        provider: pflcore's call in both problems
    """

    op: str
    size: Size
    problem: Problem
    smallest: Problem
    provider: str


@dataclass
class Row:
    """The measurements of one case, in microseconds.

    Attributes:
        threads: torch's threads
        op: the op and its result in words
        n: models
        p: parameters
        call: the op on two rows of one column
        of_cdist: that, over torch.cdist's time on the same
        kernel: the op at this size, less `call`
        torch: torch's best right call
        of_torch: `kernel` over `torch`
        peer: the name of torch's call
    """

    threads: int
    op: str
    n: int
    p: int
    call: float
    of_cdist: float
    kernel: float
    torch: float
    of_torch: float
    peer: str


def cases(clients: Sequence[int], parameters: Sequence[int]) -> Iterator[Case]:
    """Mixtures and distances at all sizes.

    Raises MemoryError for a size that does not fit the free memory.
    """
    for n, p in itertools.product(clients, parameters):
        neighbours = min(aggregate.NEIGHBOURS, n - 1)
        for op, m, k in (
            ("one result", 1, n),
            ("N results", n, n),
            ("N by index", n, neighbours),
        ):
            few = 1 if k < n else 2
            problem = fitting(aggregate, {"N": n, "P": p, "M": m, "K": k})
            smallest = fitting(aggregate, {"N": 2, "P": 1, "M": min(m, 2), "K": few})
            for words, provider in (("", "pflcore"), (", fresh", f"pflcore, {FRESH}")):
                yield Case(op + words, {"N": n, "P": p}, problem, smallest, provider)
        problem = fitting(sqdist, {"N": n, "P": p})
        smallest = fitting(sqdist, {"N": 2, "P": 1})
        yield Case("distances", {"N": n, "P": p}, problem, smallest, "pflcore")


def fitting(suite: ModuleType, size: Size) -> Problem:
    """The suite's problem of a size; MemoryError where the memory is too small."""
    made: Problem | None = suite.problem(size)
    if made is None:
        words = table.size_of(size)
        raise MemoryError(f"not enough free memory for {words}; use --quick")
    return made


def peers(case: Case) -> dict[str, Call]:
    """Torch's calls for the same result whose error is small."""
    found = {}
    for name, call in case.problem.providers.items():
        is_torch = name.startswith(("torch", "F."))
        if not is_torch or (FRESH in name) != (FRESH in case.provider):
            continue
        error = case.problem.error(call())
        if error is not None and error <= against.MAX_PEER_ERROR:
            found[name] = call
    seconds = {name: table.clock(call)[0] for name, call in found.items()}
    longest = MAX_PEER_TIME * min(seconds.values())
    return {name: call for name, call in found.items() if seconds[name] <= longest}


def minima(calls: Sequence[Call], seconds: float) -> list[float]:
    """The least seconds of each call; they take turns for about `seconds`."""
    least = [math.inf] * len(calls)
    end = time.perf_counter() + seconds
    turns = 0
    while turns < 3 or time.perf_counter() < end:
        turns += 1
        for i, call in enumerate(calls):
            for _ in range(RUNS_OF_A_TURN):
                least[i] = min(least[i], table.clock(call)[0])
    return least


def measure(case: Case, seconds: float) -> Row:
    """The measurements of a case, in about `seconds`."""
    rivals = peers(case)
    two_rows = models(2, 1)
    calls: list[Call] = [
        case.problem.providers[case.provider],
        case.smallest.providers[case.provider],
        partial(torch.cdist, two_rows, two_rows),
        *rivals.values(),
    ]
    whole, call, cdist, *others = [1e6 * s for s in minima(calls, seconds)]
    best = min(others)
    kernel = max(0.0, whole - call)
    return Row(
        threads=torch.get_num_threads(),
        op=case.op,
        n=case.size["N"],
        p=case.size["P"],
        call=call,
        of_cdist=call / cdist,
        kernel=kernel,
        torch=best,
        of_torch=kernel / best,
        peer=list(rivals)[others.index(best)],
    )


def run(quick: bool, seconds: float) -> tuple[Facts, str]:
    """Prints a line for each op and size; returns the measurements and the table.

    Args:
        seconds: the time for each line, about
    """
    clients: tuple[int, ...] = (2, 10, 20, 100)
    parameters: tuple[int, ...] = (100, 1_000, 7_850, 62_006, 600_000)
    threads: tuple[int, ...] = (1, 2)
    if quick:
        clients, parameters, threads = (10,), (100, 7_850), (1,)
        seconds = min(seconds, 0.1)
    machine = table.Machine.measure(128)
    lines = table.Table(HEAD, about=machine.lines())
    before = torch.get_num_threads()
    rows = []
    try:
        for count in threads:
            torch.set_num_threads(count)
            for case in cases(clients, parameters):
                row = measure(case, seconds)
                rows.append(asdict(row))
                lines.add(
                    f"{count} | {row.op} | {row.n} | {row.p:,} | {row.call:.1f} | "
                    f"{row.of_cdist:.2f} | {row.kernel:.1f} | {row.torch:.1f} | "
                    f"{row.of_torch:.2f} | {row.peer}"
                )
    finally:
        torch.set_num_threads(before)
    return {"machine": asdict(machine), "rows": rows}, lines.text()
