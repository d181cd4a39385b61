"""What every op needs of torch, and of the compiled kernels where there are any.

The default body of an op is its reference and the compiled library only adds kernels,
so the dispatcher is the fallback. This is the only file that knows of that library,
which serves every Python, and torch from 2.10 on (it asks for that version's stable
ABI).
"""

import ctypes
import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

lib = torch.library.Library("pflcore", "FRAGMENT")
R = TypeVar("R")


def define(
    schema: str, reference: Callable[..., R] | None, fake: Any = None
) -> Callable[..., R]:
    """A new op `pflcore::NAME` with its reference as default body (None: there are
    kernels alone) and `fake` for its result's shape, where the reference itself would
    take long; returns what calls it."""
    name = schema[: schema.index("(")]
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    if reference is not None:
        lib.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pflcore::{name}", fake or reference, lib=lib)
    op: Callable[..., R] = getattr(torch.ops.pflcore, name).default
    lib.impl(name, run_on_cpu(op), "MPS")
    return op


def run_on_cpu(op: Any) -> Any:
    """An op for a device that has no float64: on copies in the CPU's memory and back,
    float64 results as float32."""

    def run(*args: Any) -> Any:
        device = next(t.device for t in args if isinstance(t, Tensor))
        warn_of_copies(str(device))
        copies = tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), args)
        out = op(*copies)
        for argument, to, copy in zip(op._schema.arguments, args, copies, strict=False):
            if argument.is_write and isinstance(to, Tensor):
                to.copy_(copy)
        return tree_map_only(Tensor, lambda t: float64_to_float32(t).to(device), out)

    return run


def float64_to_float32(t: Tensor) -> Tensor:
    return t.float() if t.dtype == torch.float64 else t


@cache
def warn_of_copies(device: str) -> None:
    warnings.warn(
        f"pflcore's ops have no kernels for {device}, which has no float64: their "
        "tensors go to the CPU and back, which takes longer than the op where they "
        "are large, and float64 results come back as float32",
        stacklevel=4,
    )


def mark_written(*tensors: Tensor | None) -> None:
    """Tell autograd that an op wrote into these: a tensor that it has saved for a
    backward pass is not what it was."""
    if torch.compiler.is_compiling():
        return
    for t in tensors:
        if t is not None:
            increment_version(t)


def in_forward_ad() -> bool:
    """Is forward-mode differentiation (`torch.func.jvp`, `forward_ad.dual_level`) on,
    or `torch.func.grad`? An op knows backward formulas only, which would drop the
    tangents without a word, and not in functorch's form; plain torch is right there.
    """
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    of = torch._C._functorch
    return any(
        i.key() == of.TransformType.Grad for i in of.get_interpreter_stack() or ()
    )


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Before a backward pass that needs the inputs and nothing else."""
    ctx.save_for_backward(*inputs)


def fake_nothing(*args: Any) -> None:
    """The fake of an op that returns nothing."""


# --- the compiled kernels ---------------------------------------------------

REINSTALL_COMMAND = "pip install --force-reinstall --no-deps ."


class Backend(NamedTuple):
    """What runs the ops. `str()` of it is one line."""

    kernels: bool  # compiled kernels are loaded
    isa: str | None  # "plain", "avx2", "avx512" or "neon": the path of the CPU kernels
    cuda: bool  # CUDA kernels were built
    threads: int  # torch's intra-op threads
    torch: str
    why: str  # one sentence: why this and not another
    fix: str | None  # the command that mends it, where the kernels could be had
    # the cards that the CUDA kernels were built for: "sm_75, sm_90"
    architectures: str = ""

    def __str__(self) -> str:
        cuda = f"with CUDA for {self.architectures}" if self.cuda else "no CUDA"
        what = (
            f"kernels ({self.isa}, {self.threads} threads, {cuda})"
            if self.kernels
            else "references"
        )
        return f"{what}, torch {self.torch}: {self.why}" + (
            f"; to mend it: {self.fix}" if self.fix else ""
        )


LIBRARY = Path(__file__).parent.parent / "lib_pflcore.so"


def _load() -> tuple[Any, str, str | None]:  # noqa: PLR0911 (a reason each)
    if os.environ.get("PFLCORE_KERNELS", "1") == "0":
        return None, "PFLCORE_KERNELS=0 leaves the kernels unloaded", None
    version = [int(number) for number in re.findall(r"\d+", torch.__version__)[:2]]
    if not [2, 10] <= version < [3]:  # what torch promises of its stable ABI
        return None, "the kernels need torch >= 2.10 and < 3", None
    if not LIBRARY.exists():
        failed = LIBRARY.with_suffix(".failed")  # left there by setup.py
        if failed.exists():
            return (
                None,
                f"building the kernels failed ({failed.read_text().strip()})",
                REINSTALL_COMMAND,
            )
        return (
            None,
            "the kernels are not built (they need torch and a C++ compiler when "
            "pflcore is installed)",
            REINSTALL_COMMAND,
        )
    try:
        # looks up at once all that it needs of torch: what is missing is an error here,
        # no crash later
        torch.ops.load_library(LIBRARY)
        library = ctypes.CDLL(str(LIBRARY))
        for name in (
            "pflcore_built",
            "pflcore_isa",
            "pflcore_set_isa",
            "pflcore_architectures",
        ):
            getattr(library, name).restype = ctypes.c_char_p
        return library, library.pflcore_built().decode(), None
    except (OSError, AttributeError) as error:
        return (
            None,
            "the kernels do not load beside this torch "
            f"({' '.join(str(error.__cause__ or error).split())})",
            REINSTALL_COMMAND,
        )


kernels, _why, _fix = _load()  # the library, or None
# although kernels could be had: the first op call says so
references_used = _fix is not None


def cpu_isa(wanted: str | None = None) -> str | None:
    """The path of the CPU kernels, None for references; `wanted` chooses it, for tests,
    as far as the machine has it."""
    if kernels is None:
        return None
    said = (
        kernels.pflcore_isa()
        if wanted is None
        else kernels.pflcore_set_isa(wanted.encode())
    )
    return str(said, "ascii")


def backend() -> Backend:
    """What runs the ops and why: compiled kernels or references, the CPU path,
    threads, CUDA."""
    cards = "" if kernels is None else str(kernels.pflcore_architectures(), "ascii")
    return Backend(
        kernels=kernels is not None,
        isa=cpu_isa(),
        cuda=bool(cards),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        why=_why,
        fix=_fix,
        architectures=cards,
    )


def warn_of_references() -> None:
    """Say, at the first op, that the references run although the kernels could be
    had."""
    global references_used
    if not references_used:
        return
    references_used = False
    warnings.warn(
        f"pflcore runs its pure-PyTorch references: {_why}. To mend it, in pflcore's "
        f"folder: {REINSTALL_COMMAND}",
        stacklevel=3,
    )
