"""Refuses modules whose copies would train as something else, without an error.

Every thread trains a copy of the module, whose parameters are replaced by those of a
client before each call. So the copy must compute what the original computes, from its
parameters alone.
"""

import torch.nn as nn


def check_weights(module: nn.Module) -> None:
    """Raises ValueError unless there are trained parameters, all of one dtype."""
    dtypes = {str(p.dtype) for p in module.parameters() if p.requires_grad}
    if len(dtypes) != 1:
        raise ValueError(
            "model: expected trainable parameters of one dtype, got "
            f"{sorted(dtypes) or 'none'}; convert them, for example by model.float(), "
            "or set requires_grad on what should be trained."
        )


def check_copies(module: nn.Module) -> None:
    """Raises ValueError for code that a copy of the model would not run as it is.

    Refused are hooks of parameters, a `forward` that holds the original module, and
    batch norm over several processes.
    """
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"model: parameter {name!r} has a gradient hook, which clients' copies "
                "would not run; put what it does into the forward pass."
            )
    for name, m in module.named_modules():
        forward = vars(m).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not m:
            raise ValueError(
                f"model: {name or type(m).__name__} was given a forward of its own, "
                "which may hold the original's parameters and not a client's; write it "
                "as a method of a class, and of a compiled module give its _orig_mod."
            )
        if isinstance(m, nn.SyncBatchNorm):
            raise ValueError(
                f"model: {name or 'the module'} is nn.SyncBatchNorm, which makes one "
                "batch of several processes', and clients share none; give the model "
                "before convert_sync_batchnorm, with nn.BatchNorm1d, 2d or 3d."
            )
