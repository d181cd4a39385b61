"""`pflcore bench`: each op at each size beside the best that torch, numpy, scipy and scikit-learn
offer, and beside the machine's limit.

The limit is measured in the same run (csrc/cpu/roofline.h): bytes that must be read over the
bandwidth of reading, plus bytes that must be written over the bandwidth of writing past the caches;
or the arithmetic over the rate of a loop of the same instructions in registers, where that takes
longer. Times are medians. Where somebody else is faster, the table says so.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Name = Literal[
    "all",
    "sqdist",
    "nearest",
    "aggregate",
    "weights",
    "rank1",
    "sgd",
    "chain",
    "factorized",
    "rounds",
    "scale",
]
Work = Literal["flute-lr", "pfllib-mnist", "blazefl-cnn"]
OPS = ("sqdist", "nearest", "aggregate", "weights", "rank1", "sgd", "chain", "factorized", "rounds")


@dataclass(frozen=True)
class Options:
    """What is timed, and for how long."""

    op: tuple[Name, ...] = ("all",)  # which ops
    # in the place of ops: rounds that others have published times of, side by side with them
    workload: tuple[Work, ...] = ()
    rounds: int | None = None  # of a workload; default: its own
    quick: bool = False  # small sizes only, about a minute
    seconds: float = 1.0  # for each provider at each size, about
    patience: float = 10.0  # a call that would take longer is left out
    threads: int | None = None  # torch's intra-op threads; default: as they are
    json: Path | None = None  # write all measurements to this file
    markdown: Path | None = None  # write the table to this file
    plot: Path | None = None  # with "scale": write its picture to this file


def suite(name: str) -> ModuleType:
    """The module of an op: `PROVIDERS`, `sizes(quick)` and `problem(size)`."""
    return importlib.import_module(f"bench.{name}")


def run(options: Options) -> int:
    """Prints the table, a line as soon as it is measured."""
    import torch

    from bench import table

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    for path in (options.json, options.markdown, options.plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"expected a file in an existing folder, got {str(path)!r}.")
    if "scale" in options.op:
        from bench import scale

        found = scale.run(options.quick, options.seconds, options.plot)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    machine = table.Machine.measure(128 if options.quick else 512)
    if options.workload:
        from bench import published

        print("\n".join(machine.lines()), flush=True)
        rows, said = published.run(options.workload, options.rounds, machine)
        return written(
            options,
            table.as_json(machine, rows),
            "\n".join([*machine.lines(), "```", *said, "```", ""]),
        )
    print("\n".join(machine.lines()), "", table.line(table.HEADINGS), sep="\n", flush=True)
    rows = []
    rates: dict[tuple[str, str], float] = {}
    budget = min(options.seconds, 0.2) if options.quick else options.seconds
    patience = min(options.patience, 3.0) if options.quick else options.patience
    for name in OPS if "all" in options.op else dict.fromkeys(options.op):
        module = suite(name)
        for size in module.sizes(options.quick):
            problem = module.problem(size)
            if problem is None:
                print(
                    table.line(
                        (
                            name,
                            table.size_of(size),
                            "",
                            "",
                            "",
                            "",
                            "",
                            "",
                            "",
                            "not enough free memory",
                        )
                    )
                )
                continue
            for row in table.measure(problem, machine, budget, patience, rates):
                rows.append(row)
                print(table.line(table.cells(row)), flush=True)
            del problem
    return written(options, table.as_json(machine, rows), table.markdown(machine, rows))


def written(options: Options, measured: Any, text: str) -> int:
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    from pflcore.cli.options import Group, of_dataclass, parse

    group = Group("bench", "", of_dataclass(Options)[0])
    got = parse(
        "pflcore bench",
        "Times the ops beside torch, numpy, scipy and scikit-learn, and beside the machine's "
        "limit.",
        [group],
        sys.argv[1:] if argv is None else argv,
    )
    return run(Options(**got["bench"]))
