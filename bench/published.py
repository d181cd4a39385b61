"""Rounds of workloads that others have published times of.

pflcore, a plain torch loop, Flower and pfl are timed in one run on one machine.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench import peers, table
from bench.players.player import scored
from bench.problem import Absent, Calls, Facts, Measured, Problem
from bench.workload import (
    WORKLOADS,
    Workload,
    federation,
    is_real,
    plain_loop,
    simulation,
)
from pflcore.train._workers import single_threaded


def title(w: Workload) -> str:
    """A sentence that describes the workload."""
    what = w.data if is_real(w.data) else f"made-up data of the shape of {w.data}"
    sizes = w.sizes
    return (
        f"{w.name}: {w.model} on {what}, {w.n} clients of {min(sizes)} to {max(sizes)} "
        f"samples, {w.cohort} a round, {w.epochs} epoch(s) in batches of {w.batch}, lr "
        f"{w.lr:g}; medians of {w.rounds} rounds."
    )


def problem(w: Workload) -> Problem:
    """The problem of a round.

    Its least time is the arithmetic of the model over the rate of multiply-adds.
    """
    calls: Calls = {
        "pflcore": lambda: ours(w),
        "plain loop": lambda: plain(w),
        "flwr": lambda: peers.flower(w),
        "pfl": lambda: peers.apple(w),
    }
    for author in w.published:
        calls.setdefault(author, Absent("not run here"))
    forward, step = flops(w)
    # The cohort counts as one of mean size.
    operations = w.samples * w.cohort / w.n * w.epochs * step
    if w.evaluate:
        operations += w.tests * forward
    size = {"evaluate": w.evaluate}
    return Problem(w.name, size, calls, operations=operations, published=w.published)


def flops(w: Workload) -> tuple[float, float]:
    """Additions and multiplications of a sample, forward and in a step.

    The images need no gradient.
    """
    model = w.build()
    x, y = federation(w).client(0, "train")
    counts = []
    for back in (False, True):
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            loss = F.cross_entropy(model(x[:1]), y[:1])
            if back:
                loss.backward()  # type: ignore[no-untyped-call]
        counts.append(float(counter.get_total_flops()))
    return counts[0], counts[1]


@torch.enable_grad()  # A user's program has gradients enabled, too.
def ours(w: Workload) -> Measured:
    """Seconds of pflcore's rounds, after a first one."""
    rounds = simulation("fedavg", w).iterate()
    next(rounds)
    return clocked(lambda: next(rounds), w.rounds)


def plain(w: Workload) -> Measured:
    """Seconds of `plain_loop` on the workload's cohorts, with its evaluation."""
    model = w.build()
    gen = torch.Generator().manual_seed(0)
    train = plain_loop(model, w)
    size = torch.tensor(w.sizes, dtype=torch.float64)
    evaluated = range(w.n) if w.evaluate else ()

    @single_threaded()
    def round() -> None:
        cohort = torch.randperm(w.n, generator=gen)[: w.cohort]
        share = size[cohort] / size[cohort].sum()
        train(cohort.tolist(), share.tolist())
        for i in evaluated:
            scored(model, *federation(w).client(i, "test"))

    round()
    return clocked(round, w.rounds)


def clocked(call: Callable[[], object], times: int) -> Measured:
    """Seconds of each call, of `times` calls."""
    return Measured(table.clock(call)[0] for _ in range(times))


def run(
    names: tuple[str, ...], rounds: int | None, machine: table.Machine
) -> tuple[Facts, str]:
    """Prints the table of the workloads; returns the measurements and the table.

    Each workload is timed without and with evaluation.
    """
    whole = []
    for name in names:
        workload = WORKLOADS[name]
        whole.append(replace(workload, rounds=rounds or workload.rounds))
    cases = itertools.product(whole, (False, True))
    todo = (problem(replace(w, evaluate=evaluate)) for w, evaluate in cases)
    aside = {"gb_per_s", "error"}
    about = [*map(title, whole)]
    return table.play(todo, machine, aside, 0.0, math.inf, about)
