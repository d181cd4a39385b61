"""Definition of the ops in torch, and the library of compiled kernels.

An op has one name in torch and several bodies, of which torch's dispatcher takes the
one that belongs to the device of the tensors:

- The reference, in plain PyTorch, is the default body. It runs where no other is
  registered. So without the compiled library every op still works, and no code here
  asks which of them runs.
- The compiled library `lib_pflcore.so` registers kernels for the CPU, and for CUDA
  where they were built, when it is loaded.
- The fake body computes shapes and dtypes only. `torch.compile` and tensors on the
  device "meta" need it. The reference serves as the fake where it has no loop over a
  size. A compiler would unroll a loop, and the code would hold for that size only.

This is the only file that knows of the compiled library. One library serves every
Python, and every torch from 2.10 on, because it asks for that version's stable ABI.
"""

import ctypes
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map_only

lib = torch.library.Library("pflcore", "FRAGMENT")
references: dict[Any, Callable[..., Any]] = {}  # the default body of each op
R = TypeVar("R")
# Builds the kernels anew, against the torch that is there.
REINSTALL = (
    "pip install --force-reinstall --no-deps . (in the folder of pflcore's sources)"
)


def define(
    schema: str, reference: Callable[..., R] | None, fake: Any = None
) -> Callable[..., R]:
    """Defines the op `pflcore::NAME`, and returns the function that calls it.

    Args:
        schema: The op's name, arguments and results, as torch writes them. "(a!)"
            marks a tensor that the op writes into.
        reference: The default body; None where there are kernels alone.
        fake: The body that computes shapes and dtypes only; by default the reference.
    """
    name = schema[: schema.index("(")]
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    if reference is not None:
        # CompositeExplicitAutograd is torch's name for a body for every device whose
        # gradient is registered apart.
        lib.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pflcore::{name}", fake or reference, lib=lib)
    op: Callable[..., R] = getattr(torch.ops.pflcore, name).default
    if reference is not None:
        references[op] = reference
    lib.impl(name, run_on_cpu(op), "MPS")
    return op


def run_on_cpu(op: Any) -> Any:
    """The body of an op for a device without float64.

    That is Apple's "mps". The body runs the op on copies in the CPU's memory, and then
    copies back what the op wrote. Results of float64 become float32.
    """

    def copy_to_cpu(t: Tensor) -> Tensor:
        return t.to("cpu", copy=True)

    def run(*args: Any) -> Any:
        device = next(t.device for t in args if isinstance(t, Tensor))
        warn_of_copies(str(device))
        copies = tree_map_only(Tensor, copy_to_cpu, args)
        out = op(*copies)
        # Arguments with a default may be missing at the end, hence `strict=False`.
        for argument, t, copy in zip(op._schema.arguments, args, copies, strict=False):
            if argument.is_write and isinstance(t, Tensor):
                t.copy_(copy)

        def copy_back(t: Tensor) -> Tensor:
            return float64_to_float32(t).to(device)

        return tree_map_only(Tensor, copy_back, out)

    return run


def float64_to_float32(t: Tensor) -> Tensor:
    """The tensor as float32 where it is float64, else itself."""
    return t.float() if t.dtype == torch.float64 else t


@cache
def warn_of_copies(device: str) -> None:
    """Warns, once for each device, that ops copy its tensors."""
    warnings.warn(
        f"pflcore's ops have no kernels for {device}, which has no float64: their "
        "tensors go to the CPU and back, which takes longer than the op where they "
        "are large, and float64 results come back as float32",
        stacklevel=4,  # above this function, the op's body and torch's call of it
    )


class RunReferences(TorchDispatchMode):
    """A context in which the ops run their references, on any device.

    It stands between autograd and the kernels, so gradients are those of the ops.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The result of the reference of `func`, or of `func` where it has none."""
        body = references.get(func, func)
        return body(*args, **(kwargs or {}))


def runs_references() -> bool:
    """True inside of `RunReferences`."""
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, RunReferences) for mode in modes)


def mark_written(*tensors: Tensor | None) -> None:
    """Tells autograd that an op wrote into these tensors.

    Autograd keeps a version counter in each tensor, and compares it in a backward pass
    with the version that was saved for the gradient. Torch's own ops count it up where
    they write. A kernel does not; without this call a backward pass would silently take
    the new numbers in place of those that were saved.
    """
    if torch.compiler.is_compiling():
        return
    for t in tensors:
        if t is not None:
            increment_version(t)


def in_forward_ad() -> bool:
    """True where forward-mode differentiation or `torch.func.grad` is on.

    Forward mode is `torch.func.jvp` or `forward_ad.dual_level`. The ops have backward
    formulas only. They would silently drop the tangents of forward mode, and their
    formulas do not have the form that `torch.func.grad` needs. There the ops run plain
    torch operations instead.
    """
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    interpreters = functorch.get_interpreter_stack() or ()
    return any(i.key() == functorch.TransformType.Grad for i in interpreters)


def call_op(op: Callable[..., R], *arguments: Any) -> R:
    """The result of an op, past autograd where no gradient is wanted.

    Autograd's body of an op is torch's Python. It takes some six microseconds, which is
    longer than a small op. Where no argument requires grad it only passes the call on.
    """
    # Whatever stands above autograd in torch's dispatcher, or replaces a call, sees it
    # as it is: compilers, `torch.func`, tensor subclasses and modes that replace
    # functions.
    needs_autograd = (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_torch_function_mode_enabled()
    )
    is_recorded = torch.is_grad_enabled()
    for argument in arguments:
        if not isinstance(argument, Tensor):
            continue
        is_plain = type(argument) is Tensor or type(argument) is Parameter
        if not is_plain or (is_recorded and argument.requires_grad):
            needs_autograd = True
    if needs_autograd:
        return op(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves the inputs for a backward pass that needs nothing else."""
    ctx.save_for_backward(*inputs)


def fake_nothing(*args: Any) -> None:
    """The fake body of an op that returns nothing."""


# the compiled library ---------------------------------------------------------


class Backend(NamedTuple):
    """The kernels or references that run the ops.

    `str()` of it is one line.

    Attributes:
        kernels: True where the compiled kernels are loaded.
        isa: The instruction set of the CPU kernels: "plain", "avx2", "avx512" or
            "neon"; None without kernels.
        cuda: True where CUDA kernels were built.
        threads: The number of torch's intra-op threads.
        torch: The version of torch.
        why: The reason for kernels or references, in one sentence.
        fix: What brings the kernels, with its command, where they could be built; else
            None.
        architectures: The GPUs that the CUDA kernels were built for, such as
            "sm_75, sm_90"; empty without CUDA kernels.
    """

    kernels: bool
    isa: str | None
    cuda: bool
    threads: int
    torch: str
    why: str
    fix: str | None
    architectures: str = ""

    def __str__(self) -> str:
        cuda = f"with CUDA for {self.architectures}" if self.cuda else "no CUDA"
        body = "references"
        if self.kernels:
            body = f"kernels ({self.isa}, {self.threads} threads, {cuda})"
        text = f"{body}, torch {self.torch}: {self.why}"
        return f"{text}; to mend it: {self.fix}" if self.fix else text


LIBRARY = Path(__file__).parent.parent / "lib_pflcore.so"


def _hidden_package() -> Path | None:
    """A pflcore with kernels that Python would import but for this one."""
    for place in sys.path:
        package = Path(place, "pflcore").resolve()
        if package != LIBRARY.parent.resolve() and (package / LIBRARY.name).is_file():
            return package
    return None


def _answer_without_kernels(why: str) -> tuple[None, str, str]:
    """The answer of `_load` where the kernels are missing in this package's folder."""
    hidden = _hidden_package()
    if hidden is None:
        return None, why, REINSTALL
    root = LIBRARY.parent.resolve().parent
    way = "start Python in another folder"
    if str(root) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        way = f"take {root} out of PYTHONPATH"
    return (
        None,
        f"{why}, and the pflcore in {root} hides the installed one in {hidden.parent}, "
        "which has kernels",
        f"{way} for those, or build kernels here by {REINSTALL}",
    )


def _load() -> tuple[Any, str, str | None]:
    """The compiled library or None, the reason, and what brings the kernels."""
    if os.environ.get("PFLCORE_KERNELS", "1") == "0":
        return None, "PFLCORE_KERNELS=0 leaves the kernels unloaded", None
    version = [int(number) for number in re.findall(r"\d+", torch.__version__)[:2]]
    if not [2, 10] <= version < [3]:  # what torch promises of its stable ABI
        return None, "the kernels need torch >= 2.10 and < 3", None
    if not LIBRARY.exists():
        # `setup.py` leaves this file where it could not build the library.
        failed = LIBRARY.with_suffix(".failed")
        why = (
            "the kernels are not built (they need torch and a C++ compiler when "
            "pflcore is installed)"
        )
        if failed.exists():
            why = f"building the kernels failed ({failed.read_text().strip()})"
        return _answer_without_kernels(why)
    try:
        # Loading looks up all functions of torch that the library calls. One that is
        # missing is an error here, and not a crash later.
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
            "the kernels do not load with this torch "
            f"({' '.join(str(error.__cause__ or error).split())})",
            REINSTALL,
        )


kernels, _why, _fix = _load()  # the library, or None
# True until the first op warns that references run although kernels could be built.
warning_is_due = _fix is not None


def cpu_isa(wanted: str | None = None) -> str | None:
    """The instruction set of the CPU kernels, or None for references.

    Args:
        wanted: The instruction set that a test chooses. A machine that does not have it
            takes the best one that it has.
    """
    if kernels is None:
        return None
    if wanted is None:
        return str(kernels.pflcore_isa(), "ascii")
    return str(kernels.pflcore_set_isa(wanted.encode()), "ascii")


def backend() -> Backend:
    """The kernels or references that run the ops, and the reason."""
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


def other_torch() -> str | None:
    """The version of torch that the kernels were built against, where it is another.

    None without kernels, and where it is the torch that runs.
    """
    if kernels is None:
        return None
    # The library's own text: "built with COMPILER against torch VERSION".
    built_against = str(kernels.pflcore_built(), "ascii").rpartition(" ")[2]
    is_same = built_against == torch.__version__.partition("+")[0]
    return None if is_same else built_against


def warn_of_references() -> None:
    """Warns once, where references run although kernels could be built.

    Every public op calls it.
    """
    global warning_is_due
    if not warning_is_due:
        return
    warning_is_due = False
    warnings.warn(
        f"pflcore runs its pure-PyTorch references: {_why}. To mend it: "
        f"{_fix or REINSTALL}",
        stacklevel=3,  # above this function and the op
    )
