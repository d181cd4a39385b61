"""The table of layers that describes a model which is a chain.

A *program* is a table [L, 9] with a line for each layer: its shape, and the columns of
its weights in a flat row. Each layer takes the output of the one before it. Two kinds
of lines name another output, by the number of its line: one from which a branch begins,
and one that is added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# The order of the kinds, and that of the activations from 1 on, are those of the
# kernels: ChainLayer::Kind in csrc/chain/chain.h, and Act in csrc/chain/tile.h.
KINDS = (
    "linear",
    "conv",
    "pool",
    "act",
    "flatten",
    "dropout",
    "norm",
    "scale",
    "leaky",
    "batch_norm",
    "branch",
    "add",
)
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    F.gelu,
)
FIELDS_PER_LAYER = 8


def encode_layer(kind: str, *fields: float) -> list[float]:
    """One line [9] of a program: its kind's number and its fields.

    Zeros fill the fields that a kind does not have. A weight is the number of its first
    column in the row; -1 stands for no bias.

    - linear: outputs, weight [O, I], bias
    - conv: outputs, kernel height, width, stride, padding above, left, weight
      [O, C, KH, KW], bias
    - pool: 1 maximum or 2 mean, window height, width, stride down, across, padding
      above, left. Padding counts as 0 in a mean, and in no maximum
    - act: 1 ReLU, 2 tanh, 3 sigmoid, 4 GELU
    - flatten: no field
    - dropout: the probability, above 0
    - norm: groups, features that share a weight, eps, weight, bias
    - scale: factors, one for each feature; a factor of 0 gives 0, also for NaN
    - leaky: the factor of numbers below 0
    - batch_norm: features of a channel, eps, weight, bias, running mean, running
      variance, momentum, and 1 if the running statistics never change. They are
      numbers of columns of a row of statistics. Frozen ones normalize in training, too
    - branch: an earlier line, counted from 0, or -1 for the samples. The next layer
      takes its output
    - add: an earlier line, or -1. Its output is added to that of the line before

    Args:
        kind: One of `KINDS`.
        fields: The fields in this order, as the kernels read them by their numbers.
    """
    padding = [0.0] * (FIELDS_PER_LAYER - len(fields))
    return [float(KINDS.index(kind)), *fields, *padding]
