"""Rounds of workloads that others have published times of: pflcore, a plain torch loop, Flower and
pfl in one run on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench import peers, table
from bench.problem import Absent, Measured, Problem
from bench.workload import WORKLOADS, Workload, federation, is_real, test, train
from pflcore import Evaluation
from pflcore.simulation import Simulation
from pflcore.train.training import Training

HEADINGS = (
    "workload",
    "evaluation",
    "by",
    "ms a round",
    "GFLOP/s",
    "limit, ms",
    "of limit",
    "times ours",
    "a round as published",
    "",
)
WIDTHS = (14, 10, 12, 11, 8, 10, 8, 10, 48, 0)


def title(w: Workload) -> str:
    what = w.data if is_real(w.data) else f"made-up data of the shape of {w.data}"
    sizes = w.sizes
    return (
        f"{w.name}: {w.model} on {what}, {w.n} clients of {min(sizes)} to {max(sizes)} samples, "
        f"{w.cohort} a round, "
        f"{w.epochs} epoch(s) in batches of {w.batch}, lr {w.lr:g}; medians of {w.rounds} rounds."
    )


def problem(w: Workload) -> Problem:
    """A round; its least time is the arithmetic of the model over the rate of multiply-adds."""
    mine = dict(w.published)
    calls: dict[str, Callable[[], Measured]] = {
        "pflcore": lambda: ours(w),
        "plain loop": lambda: plain(w),
        "flwr": lambda: peers.flower(w),
        "pfl": lambda: peers.apple(w),
    }
    calls |= {who: published for who in mine if who not in calls}
    forward, step = flops(w)
    # of a cohort of mean size
    once = w.samples * w.cohort / w.n * w.epochs * step + w.tests * forward * w.evaluate
    return Problem(w.name, {"evaluate": w.evaluate}, calls, lambda got: None, operations=once)


def published() -> Measured:
    raise Absent("not run here")


def flops(w: Workload) -> tuple[float, float]:
    """Additions and multiplications of one sample: forward, and in a step of training (the images
    need no gradient)."""
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
    training = Training(lr=w.lr, batch_size=w.batch, epochs=w.epochs)
    how: dict[str, Any] = {"rounds": w.rounds + 1, "participation": w.cohort / w.n}
    look = Evaluation(every=int(w.evaluate))
    simulation = Simulation("fedavg", w.build, federation(w), training, evaluation=look, **how)
    rounds = simulation.iterate()
    next(rounds)
    if not w.evaluate:  # the last round of a run is evaluated in any case
        simulation.evaluation = Evaluation(every=0)
    return clocked(lambda: next(rounds), w.rounds)


def plain(w: Workload) -> Measured:
    """What one writes without a framework: one nn.Module, torch.optim.SGD, one client after
    another, on one thread."""
    model = w.build()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    gen = torch.Generator().manual_seed(0)
    size = torch.tensor(w.sizes, dtype=torch.float64)

    def round() -> None:
        cohort = torch.randperm(w.n, generator=gen)[: w.cohort]
        total = {k: torch.zeros_like(v) for k, v in state.items()}
        for i in cohort.tolist():
            model.load_state_dict(state)
            train(model, w, i)
            for k, v in model.state_dict().items():
                total[k].add_(v, alpha=float(size[i] / size[cohort].sum()))
        state.update(total)
        model.load_state_dict(state)
        if w.evaluate:
            for i in range(w.n):
                test(model, w, i)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        round()
        return clocked(round, w.rounds)
    finally:
        torch.set_num_threads(threads)


def clocked(call: Callable[[], object], times: int) -> Measured:
    seconds = Measured()
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def cells(w: Workload, row: table.Row, limit: float | None) -> tuple[str, ...]:
    def number(value: float | None, pattern: str) -> str:
        return "" if value is None else format(value, pattern)

    return (
        w.name,
        "yes" if w.evaluate else "no",
        row.provider,
        number(row.ms, ".1f"),
        number(row.gflop_per_s, ".1f"),
        number(None if limit is None else 1e3 * limit, ".2f"),
        number(row.of_limit, ".3f"),
        number(row.slower, ".2f"),
        row.published or "",
        row.note,
    )


def run(
    names: tuple[str, ...], rounds: int | None, machine: table.Machine
) -> tuple[list[table.Row], list[str]]:
    """Prints the table of each workload, with and without evaluation, and gives its rows and what
    was printed."""
    rows: list[table.Row] = []
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(text, flush=True)

    for name in names:
        whole = WORKLOADS[name]
        say(f"\n{title(replace(whole, rounds=rounds or whole.rounds))}")
        say(table.line(HEADINGS, WIDTHS))
        for evaluate in (False, True):
            w = replace(whole, rounds=rounds or whole.rounds, evaluate=evaluate)
            case = problem(w)
            for row in table.measure(case, machine, 0.0, float("inf"), {}):
                row.published = dict(w.published).get(row.provider, "")
                rows.append(row)
                say(table.line(cells(w, row, case.limit(machine.limits)), WIDTHS))
    return rows, said
