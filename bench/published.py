"""Rounds of workloads that others have published times of: pflcore, a plain torch loop,
Flower and pfl in one run on one machine."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench import peers, table
from bench.problem import Absent, Calls, Facts, Measured, Problem
from bench.workload import (
    WORKLOADS,
    Workload,
    federation,
    is_real,
    plain_loop,
    scored,
    simulation,
)
from pflcore.train._workers import single_threaded


def title(w: Workload) -> str:
    what = w.data if is_real(w.data) else f"made-up data of the shape of {w.data}"
    sizes = w.sizes
    return (
        f"{w.name}: {w.model} on {what}, {w.n} clients of {min(sizes)} to {max(sizes)} "
        f"samples, {w.cohort} a round, {w.epochs} epoch(s) in batches of {w.batch}, lr "
        f"{w.lr:g}; medians of {w.rounds} rounds."
    )


def problem(w: Workload) -> Problem:
    """A round; its least time is the arithmetic of the model over the rate of
    multiply-adds."""
    calls: Calls = {
        "pflcore": lambda: ours(w),
        "plain loop": lambda: plain(w),
        "flwr": lambda: peers.flower(w),
        "pfl": lambda: peers.apple(w),
    }
    calls |= {who: Absent("not run here") for who in w.published if who not in calls}
    forward, step = flops(w)
    # of a cohort of mean size
    once = w.samples * w.cohort / w.n * w.epochs * step + w.tests * forward * w.evaluate
    size = {"evaluate": w.evaluate}
    return Problem(w.name, size, calls, operations=once, published=w.published)


def flops(w: Workload) -> tuple[float, float]:
    """Additions and multiplications of one sample: forward, and in a step of training
    (the images need no gradient)."""
    model, (x, y) = w.build(), federation(w).client(0, "train")
    counts = []
    for back in (False, True):
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            loss = F.cross_entropy(model(x[:1]), y[:1])
            if back:
                loss.backward()  # type: ignore[no-untyped-call]
        counts.append(float(counter.get_total_flops()))
    return counts[0], counts[1]


@torch.enable_grad()  # as a user would
def ours(w: Workload) -> Measured:
    rounds = simulation("fedavg", w).iterate()
    next(rounds)
    return clocked(lambda: next(rounds), w.rounds)


def plain(w: Workload) -> Measured:
    """`plain_loop` on the workload's cohorts, with its evaluation."""
    model, gen = w.build(), torch.Generator().manual_seed(0)
    train, size = plain_loop(model, w), torch.tensor(w.sizes, dtype=torch.float64)

    @single_threaded()
    def round() -> None:
        cohort = torch.randperm(w.n, generator=gen)[: w.cohort]
        train(cohort.tolist(), (size[cohort] / size[cohort].sum()).tolist())
        for i in range(w.n if w.evaluate else 0):
            scored(model, *federation(w).client(i, "test"))

    round()
    return clocked(round, w.rounds)


def clocked(call: Callable[[], object], times: int) -> Measured:
    return Measured(table.clock(call)[0] for _ in range(times))


def run(
    names: tuple[str, ...], rounds: int | None, machine: table.Machine
) -> tuple[Facts, str]:
    """Prints the table of the workloads, with and without evaluation."""
    whole = [replace(WORKLOADS[n], rounds=rounds or WORKLOADS[n].rounds) for n in names]
    todo = (
        problem(replace(w, evaluate=evaluate))
        for w in whole
        for evaluate in (False, True)
    )
    aside, about = {"gb_per_s", "error"}, [*map(title, whole)]
    return table.play(todo, machine, aside, 0.0, math.inf, about)
