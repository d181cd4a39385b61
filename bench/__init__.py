"""`pflcore bench`: each op at each size beside the best that torch, numpy, scipy and
scikit-learn offer, and beside the machine's limit.

The limit is measured in the same run (csrc/cpu/roofline.h): bytes that must be read
over the bandwidth of reading, plus bytes that must be written over the bandwidth of
writing past the caches; or the arithmetic over the rate of a loop of the same
instructions in registers, where that takes longer. Times are medians. Where somebody
else is faster, the table says so.
"""

import importlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from bench import table
from bench.problem import Absent, Calls, Problem, Size, parsed
from pflcore.check import require
from pflcore.results._files import write_text

Op = Literal[
    "sqdist",
    "nearest",
    "aggregate",
    "weights",
    "rank1",
    "sgd",
    "chain",
    "factorized",
    "rounds",
]
OPS = Op.__args__  # type: ignore[attr-defined]
Work = Literal["flute-lr", "pfllib-mnist", "blazefl-cnn"]


@dataclass(frozen=True)
class Options:
    """What is timed, and for how long."""

    op: tuple[Literal["all", "scale"] | Op, ...] = ("all",)  # which ops
    # instead of ops: rounds that others have published times of, side by side with them
    workload: tuple[Work, ...] = ()
    rounds: int | None = None  # of a workload; default: its own
    quick: bool = False  # small sizes only, about a minute
    seconds: float = 1.0  # for each provider at each size, about
    json: Path | None = None  # write all measurements to this file
    markdown: Path | None = None  # write the table to this file
    plot: Path | None = None  # with "scale": write its picture to this file


def suite(name: str) -> ModuleType:
    """The module of an op: `sizes(quick)` and `problem(size)`."""
    return importlib.import_module(f"bench.{name}")


def run(options: Options) -> int:
    """Prints the table, a line as soon as it is measured."""
    from bench import published, scale

    for name in ("json", "markdown", "plot"):
        path = getattr(options, name)
        require(
            path is None or path.parent.is_dir(),
            name,
            "a file in an existing folder",
            str(path),
        )
    measured: Any
    if "scale" in options.op:
        measured, text = scale.run(options.quick, options.seconds, options.plot)
    else:
        machine = table.Machine.measure(128 if options.quick else 512)
        if options.workload:
            measured, text = published.run(options.workload, options.rounds, machine)
        else:
            budget = min(options.seconds, 0.2 if options.quick else math.inf)
            patience = 3.0 if options.quick else 10.0
            names = OPS if "all" in options.op else dict.fromkeys(options.op)
            todo = problems(sizes(names, options.quick))
            aside = {"limit_ms", "published"}
            measured, text = table.play(todo, machine, aside, budget, patience)
    if options.json is not None:
        write_text(options.json, json.dumps(measured, indent=1) + "\n")
    if options.markdown is not None:
        write_text(options.markdown, text)
    return 0


def sizes(names: Iterable[str], quick: bool) -> Iterator[tuple[str, Size]]:
    """Each of these ops at each of its sizes."""
    for name in names:
        for size in suite(name).sizes(quick):
            yield name, size


def problems(
    todo: Iterable[tuple[str, Size]], device: str = "cpu"
) -> Iterator[Problem]:
    """These ops at these sizes; without a provider that runs where the memory is too
    small."""
    none: Calls = {"": Absent("not enough free memory")}
    for name, size in todo:
        with torch.device(device):
            made = suite(name).problem(size)
        yield made or Problem(name, size, none)
        del made  # before the next one is made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return run(parsed(Options, "pflcore bench", __doc__, argv))
