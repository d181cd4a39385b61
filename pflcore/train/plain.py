"""Which modules are exactly what their class says: only those may be written out in another form."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn.modules.module import _has_any_global_hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(m: nn.Module) -> bool:
    """Whether calling `m` runs its class's forward and nothing else: no hooks, no forward of the instance's own.

    Who writes a layer out also compares its exact type: a subclass or a parametrized layer computes what it likes.
    """
    return not ("forward" in vars(m) or any(getattr(m, h) for h in HOOKS) or _has_any_global_hook())


def refuse_detours(module: nn.Module) -> None:
    """Refuse what clients' copies of a model would leave behind: hooks of parameters, and a forward that holds the original."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError("model: a scripted or traced module takes no parameters of a client; give the module that it was made of.")
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"model: parameter {name!r} has a gradient hook, which clients' copies would not run; put what it does into the forward pass."  # noqa: E501
            )
    for name, m in module.named_modules():
        own = vars(m).get("forward")
        if own is not None and getattr(own, "__self__", None) is not m:
            raise ValueError(
                f"model: {name or type(m).__name__} was given a forward of its own, which may hold the original's parameters and not a "
                "client's; write it as a method of a class, and of a compiled module give its _orig_mod."
            )
