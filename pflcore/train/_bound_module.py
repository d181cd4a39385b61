"""A copy of a module whose parameters are replaced before each call.

So one module computes with the parameters of any client. A module keeps its tensors in
dicts. A slot is an entry of such a dict, and a tied tensor has several slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore.nn._copy import copy_module
from pflcore.train._recurrent import unroll_recurrent

# The slots of one tensor: (dict, key) each.
TensorSlots = list[tuple[dict[str, Any], str]]


class BoundModule:
    """One thread's copy of a module.

    Args:
        module: The module that is copied, in the modes in which it trains.
        names: The names of the parameters that are replaced, in the order of a row.
        buffers: The names of the buffers that are replaced.

    Attributes:
        module: The copy.
        params: The slots of each parameter.
        buffers: The slots of each buffer.
        shapes: The shapes of the parameters.
        sizes: The numbers of elements of the parameters.
    """

    def __init__(
        self, module: nn.Module, names: Iterable[str], buffers: Iterable[str]
    ) -> None:
        self.module = copy_module(module)
        self._eval_modules = names_in_evaluation(module)
        self._train: bool | None = None  # the mode that was set, None before the first
        for layer in self.module.modules():
            if isinstance(layer, _BatchNorm):
                # Nothing reads this count of batches, and a model that adds to it in
                # place is no function of its row.
                layer.num_batches_tracked = None
        tensors = named_tensors(self.module)
        slots = _tensor_slots(self.module)
        self.params = [slots[id(tensors[name])] for name in names]
        self.buffers = [slots[id(tensors[name])] for name in buffers]
        self.shapes = [tensors[name].shape for name in names]
        self.sizes = [shape.numel() for shape in self.shapes]
        unroll_recurrent(self.module)

    def set_mode(self, train: bool) -> None:
        """Puts the copy into training or evaluation mode, where it is in the other."""
        # A forward pass may leave another mode behind than it found.
        if self._train != train or self.module.training != train:
            set_mode(self.module, train, self._eval_modules)
            self._train = train

    def cut(self, row: Tensor) -> list[Tensor]:
        """The pieces of `row` [P] in the shapes of the parameters."""
        pieces = zip(row.split(self.sizes), self.shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]


def start_training_mode(module: nn.Module) -> list[str]:
    """Puts a module into training mode; the names of what stays in evaluation mode.

    Those are the submodules that are in evaluation mode while `module` itself is in
    training mode, and those that a `train` of the user's keeps there. A module that is
    itself in evaluation mode trains as after `module.train()`.
    """
    eval_modules = names_in_evaluation(module) if module.training else []
    set_mode(module, train=True, eval_modules=eval_modules)
    return names_in_evaluation(module)


def names_in_evaluation(module: nn.Module) -> list[str]:
    """The names of the submodules that are in evaluation mode."""
    return [name for name, layer in module.named_modules() if not layer.training]


def set_mode(module: nn.Module, train: bool, eval_modules: Iterable[str]) -> None:
    """Puts a module into training or evaluation mode.

    In training mode the submodules of the names `eval_modules` stay in evaluation mode.
    """
    # A `train` of the user's may return nothing, so calls are not chained.
    module.train(train)
    if train:
        for name in eval_modules:
            module.get_submodule(name).training = False


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _tensor_slots(module: nn.Module) -> dict[int, TensorSlots]:
    """The slots of every parameter and buffer, by the tensor's `id`."""
    slots: dict[int, TensorSlots] = {}
    for layer in module.modules():
        for owner in (layer._parameters, layer._buffers):
            for name, tensor in owner.items():
                slots.setdefault(id(tensor), []).append((owner, name))
    return slots


def bind_tensors(slots: list[TensorSlots], tensors: Iterable[Tensor]) -> None:
    """Puts each tensor into all of its slots."""
    for tensor_slots, tensor in zip(slots, tensors, strict=True):
        for owner, name in tensor_slots:
            owner[name] = tensor
