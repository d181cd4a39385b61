"""What every op needs of torch, and of the compiled kernels where there are any.

The default body of an op is its reference and the compiled library only adds kernels, so the dispatcher is the fallback.
This is the only file that knows that `pflcore._C` exists.
"""

import importlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

BUDGET = 1 << 22  # elements of a temporary: what a reference may hold beside its result

lib = torch.library.Library("pflcore", "FRAGMENT")


def define(schema: str, reference: Any, fake: Any) -> Any:
    """A new op `pflcore::NAME` with its reference as default body and `fake` for its result's shape; returns what calls it."""
    name = schema[: schema.index("(")]
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pflcore::{name}", fake, lib=lib)
    return getattr(torch.ops.pflcore, name).default


def changed(*tensors: Tensor | None) -> None:
    """Tell autograd that an op wrote into these: a tensor that it has saved for a backward pass is not what it was."""
    if torch.compiler.is_compiling():
        return
    for t in tensors:
        if t is not None:
            increment_version(t)


def forward_mode() -> bool:
    """Is forward-mode differentiation (`torch.func.jvp`, `forward_ad.dual_level`) on? An op knows backward formulas only and would drop
    the tangents without a word; plain torch is right there.
    """
    return forward_ad._current_level >= 0


def nothing(*args: Any) -> None:
    """The fake of an op that returns nothing."""


# --- the compiled kernels ---------------------------------------------------------------------------------------------------------

BUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


@dataclass(frozen=True)
class Backend:
    """What runs the ops. `str()` of it is one line."""

    kernels: bool  # compiled kernels are loaded
    isa: str | None  # "plain", "avx2" or "avx512": the path of the CPU kernels
    cuda: bool  # CUDA kernels were built
    threads: int  # torch's intra-op threads
    torch: str
    why: str  # one sentence: why this and not another
    fix: str | None  # the command that mends it, where the kernels could be had

    def __str__(self) -> str:
        what = f"kernels ({self.isa}, {self.threads} threads, {'with' if self.cuda else 'no'} CUDA)" if self.kernels else "references"
        return f"{what}, torch {self.torch}: {self.why}" + (f"; to mend it: {self.fix}" if self.fix else "")


def _load() -> tuple[Any, str, str | None]:
    if os.environ.get("PFLCORE_KERNELS", "1") == "0":
        return None, "PFLCORE_KERNELS=0 leaves the kernels unloaded", None
    if tuple(int("".join(filter(str.isdigit, part)) or 0) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 10):
        return None, "the kernels need torch >= 2.10", None
    try:
        module = importlib.import_module("pflcore._C")
    except ModuleNotFoundError:
        failed = Path(__file__).parent.parent / "_C.failed"  # left there by setup.py
        if failed.exists():
            return None, f"building the kernels failed ({failed.read_text().strip()})", BUILD
        return None, "the kernels are not built (they need torch and a C++ compiler when pflcore is installed)", BUILD
    except ImportError as error:
        return None, f"the kernels do not load beside this torch ({error})", BUILD
    return module, f"built with {module.compiler} against torch {module.torch_version}", None


_C, _why, _fix = _load()
on_references = _fix is not None  # although kernels could be had: the first op call says so


def backend() -> Backend:
    """What runs the ops and why: compiled kernels or references, the CPU path, threads, CUDA."""
    loaded = _C is not None
    return Backend(loaded, _C.isa() if loaded else None, bool(loaded and _C.cuda), torch.get_num_threads(), torch.__version__, _why, _fix)


def warn_once() -> None:
    """Say, at the first op, that the references run although the kernels could be had."""
    global on_references
    if not on_references:
        return
    on_references = False
    warnings.warn(f"pflcore runs its pure-PyTorch references: {_why}. To mend it, in pflcore's folder: {BUILD}", stacklevel=3)
