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
    """Defines the op `pflcore::NAME`, and returns the function that calls it.

    Args:
        schema: The op's name, arguments and results, as torch writes them.
        reference: The default body; None where there are kernels alone.
        fake: Gives the shape of the result, where the reference would take long.
    """
    name = schema[: schema.index("(")]
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    if reference is not None:
        lib.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pflcore::{name}", fake or reference, lib=lib)
    op: Callable[..., R] = getattr(torch.ops.pflcore, name).default
    lib.impl(name, run_on_cpu(op), "MPS")
    return op


def run_on_cpu(op: Any) -> Any:
    """The body of an op for a device without float64.

    It runs the op on copies in the CPU's memory; float64 results come back as float32.
    """

    def copy_to_cpu(t: Tensor) -> Tensor:
        return t.to("cpu", copy=True)

    def run(*args: Any) -> Any:
        device = next(t.device for t in args if isinstance(t, Tensor))
        warn_of_copies(str(device))
        copies = tree_map_only(Tensor, copy_to_cpu, args)
        out = op(*copies)
        # `strict=False`: arguments with a default may be missing.
        for argument, t, copy in zip(op._schema.arguments, args, copies, strict=False):
            if argument.is_write and isinstance(t, Tensor):
                t.copy_(copy)

        def copy_back(t: Tensor) -> Tensor:
            return float64_to_float32(t).to(device)

        return tree_map_only(Tensor, copy_back, out)

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
    """Tells autograd that an op wrote into these tensors.

    A backward pass then refuses a tensor that was saved before.
    """
    if torch.compiler.is_compiling():
        return
    for t in tensors:
        if t is not None:
            increment_version(t)


def in_forward_ad() -> bool:
    """Whether forward-mode differentiation or `torch.func.grad` is on.

    Forward mode is `torch.func.jvp` or `forward_ad.dual_level`. The ops have backward
    formulas only: they would silently drop tangents, and they do not have functorch's
    form. Plain torch operations are right there.
    """
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    interpreters = functorch.get_interpreter_stack() or ()
    return any(i.key() == functorch.TransformType.Grad for i in interpreters)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves the inputs for a backward pass that needs nothing else."""
    ctx.save_for_backward(*inputs)


def fake_nothing(*args: Any) -> None:
    """The fake of an op that returns nothing."""


# the compiled kernels ---------------------------------------------------------

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
        body = "references"
        if self.kernels:
            body = f"kernels ({self.isa}, {self.threads} threads, {cuda})"
        text = f"{body}, torch {self.torch}: {self.why}"
        return f"{text}; to mend it: {self.fix}" if self.fix else text


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
    """The instruction set of the CPU kernels, or None for references.

    `wanted` chooses it for tests, as far as the machine has it.
    """
    if kernels is None:
        return None
    if wanted is None:
        return str(kernels.pflcore_isa(), "ascii")
    return str(kernels.pflcore_set_isa(wanted.encode()), "ascii")


def backend() -> Backend:
    """What runs the ops and why: kernels or references, instruction set, CUDA."""
    architectures = ""
    if kernels is not None:
        architectures = str(kernels.pflcore_architectures(), "ascii")
    return Backend(
        kernels=kernels is not None,
        isa=cpu_isa(),
        cuda=bool(architectures),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        why=_why,
        fix=_fix,
        architectures=architectures,
    )


def warn_of_references() -> None:
    """Warns at the first op, where references run although kernels could be built."""
    global references_used
    if not references_used:
        return
    references_used = False
    warnings.warn(
        f"pflcore runs its pure-PyTorch references: {_why}. To mend it, in pflcore's "
        f"folder: {REINSTALL_COMMAND}",
        stacklevel=3,
    )
