"""Times of each op, of other libraries, and the machine's limit.

The other libraries are torch, numpy, scipy and scikit-learn. `pflcore bench` prints the
table.

The limit is measured in the same run (csrc/cpu/roofline.h). It is the longer one of two
times:

- the bytes that must be read over the bandwidth of reading, plus the bytes that must be
  written over the bandwidth of writing past the caches
- the arithmetic over the rate of a loop of the same instructions in registers

Times are medians. Where another library is faster, the table says so.
"""

import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from bench import against, table
from bench.problem import Absent, Calls, Problem, Size, parsed
from pflcore.check import Words, reject, require
from pflcore.ops import backend
from pflcore.simulation._files import write_text

Op = Literal[
    "sqdist",
    "nearest",
    "aggregate",
    "weights",
    "robust",
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
    """The choice of timed ops and of the time for each.

    Args:
        op: which ops
        workload: instead of ops: rounds that others have published times of, side by
            side with them
        rounds: rounds of a workload; None: the workload's own number
        quick: small sizes only, about a minute
        seconds: time for each provider at each size, about
        json: write all measurements to this file
        markdown: write the table to this file
        plot: with "scale": write its picture to this file
        against: a file that `--json` wrote before: end with 1 where pflcore's time over
            the best right peer's grew by more than a tenth, and name where
        references: where no kernels run, time the references in torch in their place
        pfllib: with "frameworks": a checkout of PFLlib
        flbench: with "frameworks": a checkout of FL-bench
        fluke: with "frameworks": a checkout of fluke; None: its package
    """

    op: tuple[Literal["all", "small", "scale", "ranks", "frameworks"] | Op, ...] = (
        "all",
    )
    workload: tuple[Work, ...] = ()
    rounds: int | None = None
    quick: bool = False
    seconds: float = 1.0
    json: Path | None = None
    markdown: Path | None = None
    plot: Path | None = None
    against: Path | None = None
    references: bool = False
    pfllib: Path | None = None
    flbench: Path | None = None
    fluke: Path | None = None


def suite(name: str) -> ModuleType:
    """The module of an op: `sizes(quick)` and `problem(size)`."""
    return importlib.import_module(f"bench.{name}")


def run(options: Options) -> int:
    """Prints each line of the table when it is measured; returns the exit status.

    The status is 0, or 1 where `against` says that pflcore became slower.
    """
    found = backend()
    if not (found.kernels or options.references):
        remedy = "or add --references, which times the references"
        reject("bench", "kernels to time", Words(str(found)), remedy=remedy)
    for name in ("json", "markdown", "plot"):
        path = getattr(options, name)
        has_folder = path is None or path.parent.is_dir()
        require(has_folder, name, "a file in an existing folder", str(path))
    before = None
    if options.against is not None:
        has_peers = not {"small", "scale", "ranks", "frameworks"} & {*options.op}
        require(has_peers, "against", "ops or a workload", options.op)
        before = against.read(options.against)
    measured, text = _measure(options)
    if options.json is not None:
        write_text(options.json, json.dumps(measured, indent=1) + "\n")
    if options.markdown is not None:
        write_text(options.markdown, text)
    return 0 if before is None else against.show(before, measured)


def _measure(options: Options) -> tuple[Any, str]:
    """The measurements and the printed table."""
    from bench import frameworks, published, ranks, scale, small

    if "ranks" in options.op:
        return ranks.run(options.quick)
    if "small" in options.op:
        return small.run(options.quick, options.seconds)
    if "scale" in options.op:
        return scale.run(options.quick, options.seconds, options.plot)
    megabytes = 128 if options.quick else 512
    machine = table.Machine.measure(megabytes)
    if "frameworks" in options.op:
        checkouts = {k: getattr(options, v) for k, v in frameworks.CHECKOUTS.items()}
        return frameworks.run(options.quick, machine, checkouts)
    if options.workload:
        return published.run(options.workload, options.rounds, machine)
    budget = options.seconds
    patience = 10.0
    if options.quick:
        budget = min(budget, 0.2)
        patience = 3.0
    names = OPS if "all" in options.op else dict.fromkeys(options.op)
    todo = problems(sizes(names, options.quick))
    aside = {"limit_ms", "published"}
    return table.play(todo, machine, aside, budget, patience)


def sizes(names: Iterable[str], quick: bool) -> Iterator[tuple[str, Size]]:
    """Pairs of an op's name and one of its sizes."""
    for name in names:
        for size in suite(name).sizes(quick):
            yield name, size


def problems(
    todo: Iterable[tuple[str, Size]], device: str = "cpu"
) -> Iterator[Problem]:
    """Problems of these ops at these sizes.

    Where the memory is too small for one, its only provider is absent and says so.
    """
    none: Calls = {"": Absent("not enough free memory")}
    for name, size in todo:
        with torch.device(device):
            made = suite(name).problem(size)
        yield made or Problem(name, size, none)
        del made  # Its memory is free before the next one is made.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    return run(parsed(Options, "pflcore bench", __doc__, argv))
