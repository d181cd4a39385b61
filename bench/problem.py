"""Timed problems: one op at one size, with several providers.

All providers get the same data.

Symbols: N clients with models of P parameters.
"""

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

FREE = 0.6  # the share of the free memory that one problem may use

Call = Callable[[], Any]
Calls = dict[str, Call]
Facts = dict[str, Any]
Size = Facts
Sizes = Iterator[Size]
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One op at one size.

    Args:
        op: the op's name
        size: the sizes by name
        providers: calls without arguments on the same data, by the providers' names
        error: a result's relative error against float64; None where the right result is
            not known
        reads: bytes that must be read, every input once
        writes: bytes that must be written, the result once
        operations: float32 additions and multiplications that must be done
        mix: the instructions that do them: "fma", or "sub_fma" for a subtraction and a
            multiply-add
        costs: providers whose work is a multiple of `operations`, with that multiple
        published: providers' times as their authors say
    """

    op: str
    size: Size
    providers: Calls
    error: Callable[[Any], float | None] = lambda got: None
    reads: int = 0
    writes: int = 0
    operations: float = 0.0
    mix: str = "fma"
    costs: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)

    def limit(self, machine: Mapping[str, float]) -> float | None:
        """The least seconds that this machine needs; None: not known.

        They are those of the memory traffic, or those of the arithmetic if it takes
        longer.
        """
        if not machine or not self.operations:
            return None
        memory = self.reads / machine["read"] + self.writes / machine["write"]
        return max(memory, self.operations / machine[self.mix])


class Measured(list[float]):
    """Seconds that a call has measured itself.

    Such a call times a framework's rounds without its start.
    """


class Absent(ImportError):
    """A provider that does not run here; its text is the reason.

    As a call it raises itself.
    """

    def __call__(self) -> NoReturn:
        raise self


def parsed(cls: type[T], prog: str, about: str | None, argv: Sequence[str] | None) -> T:
    """A command's options, as an instance of the dataclass `cls`.

    The options' help is in the class's docstring. `--help` and a malformed option end
    the program (SystemExit 0 and 2). Raises ValueError where a value is out of bounds.
    """
    cli = import_optional("tyro").cli
    got: T = cli(cls, prog=prog, description=about, args=argv)
    check_fields(got)
    return got


def fits(*elements: int) -> bool:
    """True where float32 tensors of these sizes fit into the free memory.

    It is the memory that the system, or the card, calls available. A system that does
    not say it counts as one with 8 GiB.
    """
    if torch.get_default_device().type == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        kilobytes = fact("meminfo", "MemAvailable", str(8 << 20)).split()[0]
        free = 1024 * int(kilobytes)
    return 4 * sum(elements) <= FREE * free


def fact(file: str, name: str, unknown: str) -> str:
    """The text under a name in a file of /proc, or `unknown`."""
    with contextlib.suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return unknown


def generator(seed: int = 0) -> torch.Generator:
    """A generator on the device of a problem.

    It is the CPU, or a card inside `torch.device("cuda")`.
    """
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def on_cpu(calls: Calls) -> Calls:
    """The calls; an empty dict where the problem is on a GPU.

    They run on a CPU only.
    """
    return calls if torch.get_default_device().type == "cpu" else {}


def cohorts(quick: bool) -> Sizes:
    """Sizes of N clients' models of P parameters."""
    most = 2_000_000 if quick else 1_000_000_000
    clients = (10, 20, 100, 1000)
    for n, p in itertools.product(clients, (62_006, 1_000_000, 10_000_000)):
        if n * p <= most:
            yield {"N": n, "P": p}


def gram(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances [N, M] as |a|^2 + |b|^2 - 2 a b.

    Most code bases compute distances so.
    """
    return a.square().sum(1)[:, None] + b.square().sum(1) - 2 * (a @ b.T)


def models(n: int, p: int, seed: int = 0) -> Tensor:
    """Models [n, p] of n clients after a round.

    Their weights are of size 1 and differ by .001.
    """
    gen = generator(seed)
    rows = torch.randn(n, p, generator=gen).mul_(1e-3)
    return rows.add_(torch.randn(p, generator=gen))


def relative(got: Tensor, want: Tensor) -> float:
    """The largest relative error; NaN counts as infinite.

    It is relative to the size of the numbers.
    """
    size = want.abs().max().clamp(min=1e-300)
    error = float((got.double() - want).abs().max() / size)
    return math.inf if math.isnan(error) else error
