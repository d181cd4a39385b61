"""Refuses modules that clients cannot train.

Every thread trains a copy of the module, whose parameters are replaced by those of a
client before each call. So the copy must compute what the original computes, from its
parameters alone.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pflcore.nn._dropout import OWN_LAYERS

# Layers that draw from torch's global generator.
RANDOM_MODULES = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


# Models of different shapes, as users ask for them.
ONE_MODEL_TEXT = "all clients train one model, whose layers have one shape for all"
OTHER_SHAPES_REMEDY = (
    "for layers that differ in their weights alone take FedPer with private=, and run "
    "clients of other shapes apart"
)


def check_makes_one_model(build: Any) -> None:
    """Raises TypeError for a model that would be another one for each client.

    That is a function with an argument such as the client's number, and modules in a
    list or a dict.
    """
    is_collection = isinstance(build, Mapping | Sequence) and not isinstance(build, str)
    if is_collection:
        kind = type(build).__name__
        raise TypeError(
            f"model: {ONE_MODEL_TEXT}, and this is a {kind} of {len(build)}; "
            f"{OTHER_SHAPES_REMEDY}."
        )
    names = required_arguments(build)
    if names:
        raise TypeError(
            f"model: {ONE_MODEL_TEXT}, so a function that makes it takes no arguments, "
            f"and this one takes {', '.join(names)}; {OTHER_SHAPES_REMEDY}."
        )


def required_arguments(function: Any) -> list[str]:
    """The names of the arguments without which a function cannot be called.

    They are none for a module, and where Python does not know them.
    """
    if isinstance(function, nn.Module) or not callable(function):
        return []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty]
    return [p.name for p in required if p.kind not in variadic]


def check_weights(module: nn.Module) -> None:
    """Raises ValueError unless there are trained parameters, all of one dtype.

    They must also hold numbers, so lazy layers and the device "meta" are refused.
    """
    if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "build: the model has lazy layers, whose sizes are not known yet; give it "
            "a batch first, or name the sizes."
        )
    if any(p.is_meta for p in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "build: the model is on the device 'meta', which holds no numbers; make it "
            "on the CPU, outside of torch.device('meta')."
        )
    dtypes = {str(p.dtype) for p in module.parameters() if p.requires_grad}
    if not dtypes:
        raise ValueError(
            "build: the model has no trainable parameter; set requires_grad on what "
            "should be trained."
        )
    if len(dtypes) > 1:
        raise ValueError(
            f"build: parameters have dtypes {sorted(dtypes)}; convert the model to "
            "one, for example model.float()."
        )


def check_layers(module: nn.Module) -> None:
    """Raises ValueError for layers that clients cannot train.

    Among them are layers that draw from torch's global generator. Threads share that
    generator, so the results of a run would not repeat.
    """
    for name, m in module.named_modules():
        layer = f"model: {name or 'the module'}"
        is_random = isinstance(m, RANDOM_MODULES) and type(m) is not nn.Dropout
        if is_random and getattr(m, "p", 1) != 0:
            raise ValueError(
                f"{layer} is nn.{type(m).__name__}, which draws from the global "
                "generator; use pflcore.nn.Dropout, which draws from the client's own."
            )
        drops = isinstance(m, nn.RNNBase | nn.MultiheadAttention) and m.dropout > 0
        if drops and type(m) not in OWN_LAYERS:
            raise ValueError(
                f"{layer} is a class of its own that drops out with the global "
                "generator; set its dropout to 0, or take torch's class."
            )
        adds_keys = isinstance(m, nn.MultiheadAttention) and (
            m.bias_k is not None or m.add_zero_attn
        )
        if drops and adds_keys:
            raise ValueError(
                f"{layer} drops out and adds keys of its own; set its dropout to 0, or "
                "leave out add_bias_kv and add_zero_attn."
            )
        if isinstance(m, nn.SyncBatchNorm):
            raise ValueError(
                f"{layer} is nn.SyncBatchNorm, which makes one batch of several "
                "processes', and clients share none; give the model before "
                "convert_sync_batchnorm, with nn.BatchNorm1d, 2d or 3d."
            )
        if isinstance(m, _BatchNorm) and m.track_running_stats and m.momentum is None:
            raise ValueError(
                f"{layer} averages its statistics by an integer count, which no policy "
                "can share; give it a momentum."
            )


def check_hooks(module: nn.Module) -> None:
    """Raises ValueError for code that a copy of the model would not run.

    Refused are hooks of parameters, scripted modules, and a `forward` that holds the
    original module.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "model: a scripted or traced module takes no parameters of a client; give "
            "the module that it was made of."
        )
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
