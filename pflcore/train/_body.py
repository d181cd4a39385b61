"""The layers before the head, by a chain's kernels, as a function of autograd.

A loss of an algorithm's own takes features or scores. Autograd differentiates the loss
and the head, and the kernels compute the layers before it: their output, and the
gradient of the sum of its numbers, each times its slope.

Symbols: P weights of a row; B samples; H features that the head sees.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pflcore.ops._chain import chain_eval, chain_grad, has_kernels
from pflcore.ops._chain_program import KINDS
from pflcore.ops._chain_reference import forward_program
from pflcore.train._chain import Chain
from pflcore.train._net import Net

LINEAR_LOSS = "linear"  # the sum of the scores, each times its target
KERNEL_DTYPES = (torch.float32, torch.float64)


class Body:
    """The layers before the head of a model that is a chain.

    Args:
        chain: These layers with the linear loss.
        shape: The shape of one sample.
    """

    def __init__(self, chain: Chain, shape: tuple[int, ...]) -> None:
        self.chain = chain
        self.shape = shape

    def takes(self, row: Tensor, x: Tensor) -> bool:
        """True where the kernels compute what the module would compute.

        They have no gradient in `x`, and no rule for the transforms of `torch.func` and
        for forward-mode differentiation.
        """
        is_transformed = torch._C._are_functorch_transforms_active()
        is_forward_mode = forward_ad._current_level >= 0
        is_plain = not (x.requires_grad or is_transformed or is_forward_mode)
        has_dtype = x.dtype == row.dtype and row.dtype in KERNEL_DTYPES
        return is_plain and has_dtype and x.shape[1:] == self.shape

    def __call__(self, row: Tensor, x: Tensor) -> Tensor:
        """The features [B, H] of a batch `x` [B, ...] by the model `row` [P]."""
        # The kernels read a row number by number.
        features: Tensor = _BodyFunction.apply(row.contiguous(), x, self.chain)
        return features


@lru_cache(maxsize=64)  # minibatches of a run have few sizes
def batch_of_one(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places [n], bounds [2] and the count [1] of one client's batch of n samples."""
    with torch.device("cpu"):
        return torch.arange(n), torch.tensor([0, n]), torch.tensor([n])


class _BodyFunction(torch.autograd.Function):
    """The function (row [P], x [B, ...], chain) -> features [B, H]."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, x: Tensor, chain: Chain) -> Tensor:
        ctx.save_for_backward(row, x)
        ctx.chain = chain
        n = len(x)
        places, begin, _ = batch_of_one(n)
        pool = (*chain.fixed_args, x, x.new_zeros(n, chain.classes), None, places)
        _, _, features = chain_eval(row.detach()[None], *pool, begin, chain.classes)
        return features

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        row, x = ctx.saved_tensors
        chain = ctx.chain
        n = len(x)
        if torch.is_grad_enabled():
            # The caller differentiates the gradient once more.
            samples = x.reshape(1, n, *chain.shape)
            features = forward_program(chain.program, row[None], samples, None)[0]
            (grad,) = torch.autograd.grad(features, row, slopes, create_graph=True)
            return grad, None, None
        # The op's loss is the mean over samples.
        places, _, count = batch_of_one(n)
        pool = (*chain.fixed_args, x, slopes * n, None, places[None])
        grads, _, _ = chain_grad(row[None], *pool, count, None)
        return grads[0], None, None


def find_body(net: Net, chain: Chain, shape: tuple[int, ...]) -> Body | None:
    """The layers before the head of `net`, or None where there is no such part.

    There is one where the head is the chain's last layer, a linear one, and the layers
    before it have weights, and neither drop out nor normalize batches.
    """
    has_state = chain.dropout or chain.normalizes_batches or len(chain.fixed_statistics)
    if has_state or not net.has_linear_head or not has_kernels(net.w0.device):
        return None
    kind, _, weight, *_ = chain.program[-1].tolist()
    columns = net.head_slice
    ends_with_head = KINDS[int(kind)] == "linear" and weight == columns.start
    if not ends_with_head or columns == slice(0, net.size):
        return None
    features = net.num_features
    layers = chain.program[:-1]
    body = replace(chain, program=layers, loss_name=LINEAR_LOSS, classes=features)
    return Body(body, shape)
