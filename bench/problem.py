"""What is timed: one op at one size, the same data for every provider, and what the
machine could do at best."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from pflcore.check import check_fields, import_optional

FREE = 0.6  # of the machine's free memory may be used by one problem

Call = Callable[[], Any]
Calls = dict[str, Call]
Facts = dict[str, Any]
Size = Facts
Sizes = Iterator[Size]
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One op at one size. `providers` are calls without arguments on the same data;
    `error` holds a result against float64."""

    op: str
    size: Size
    providers: Calls
    # relative, None where nobody knows the right result
    error: Callable[[Any], float | None] = lambda got: None
    reads: int = 0  # bytes that must be read: every input once
    writes: int = 0  # bytes that must be written: the result once
    operations: float = 0.0  # float32 additions and multiplications that must be done
    # the instructions they come in: "fma", or "sub_fma" for a subtraction and a
    # multiply-add
    mix: str = "fma"
    # providers whose work is a multiple of `operations`
    costs: Mapping[str, float] = field(default_factory=dict)
    # providers' times as their authors say
    published: Mapping[str, str] = field(default_factory=dict)

    def limit(self, machine: Mapping[str, float]) -> float | None:
        """Seconds that this machine needs at least: for the memory traffic, or for the
        arithmetic if that takes longer."""
        if not machine or not self.operations:
            return None
        memory = self.reads / machine["read"] + self.writes / machine["write"]
        return max(memory, self.operations / machine[self.mix])


class Measured(list[float]):
    """Seconds that a call has measured itself, such as a framework's rounds without
    its start."""


class Absent(ImportError):
    """A provider that does not run here, in one sentence; as a call it raises
    itself."""

    def __call__(self) -> NoReturn:
        raise self


def parsed(cls: type[T], prog: str, about: str | None, argv: Sequence[str] | None) -> T:
    """A command's options: a dataclass, whose comments are their help. `--help` and a
    malformed option end the program (SystemExit 0 and 2). ValueError where a value is
    out of bounds."""
    cli = import_optional("tyro").cli
    got: T = cli(cls, prog=prog, description=about, args=argv)
    check_fields(got)
    return got


def fits(*elements: int) -> bool:
    """Whether so many float32 numbers fit into what the system (or the card) calls
    available, where it says so."""
    if torch.get_default_device().type == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = 1024 * int(fact("meminfo", "MemAvailable", str(8 << 20)).split()[0])
    return 4 * sum(elements) <= FREE * free


def fact(file: str, name: str, unknown: str) -> str:
    """What Linux says under this name in a file of /proc."""
    with contextlib.suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return unknown


def generator(seed: int = 0) -> torch.Generator:
    """Draws on the device of a problem: the CPU, or a card inside
    `torch.device("cuda")`."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def on_cpu(calls: Calls) -> Calls:
    """Calls that no card knows: none of them where the problem is on one."""
    return calls if torch.get_default_device().type == "cpu" else {}


def cohorts(quick: bool) -> Sizes:
    """N clients' models of P parameters."""
    for n, p in itertools.product((10, 20, 100, 1000), (62_006, 1_000_000, 10_000_000)):
        if n * p <= (2_000_000 if quick else 1_000_000_000):
            yield {"N": n, "P": p}


def gram(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances [N, M] as |a|^2 + |b|^2 - 2 a b, as most code bases write
    it."""
    return a.square().sum(1)[:, None] + b.square().sum(1) - 2 * (a @ b.T)


def models(n: int, p: int, seed: int = 0) -> Tensor:
    """n client models of p parameters after a round, [n, p]: weights of size 1 that
    differ by .001."""
    gen = generator(seed)
    rows = torch.randn(n, p, generator=gen).mul_(1e-3)
    return rows.add_(torch.randn(p, generator=gen))


def relative(got: Tensor, want: Tensor) -> float:
    """The largest error relative to the size of the numbers; NaN counts as infinite."""
    error = float(
        (got.double() - want).abs().max() / want.abs().max().clamp(min=1e-300)
    )
    return math.inf if math.isnan(error) else error
