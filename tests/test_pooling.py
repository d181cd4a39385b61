"""The 2x2 pooling kernel against torch's own, bit for bit."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from pflcore.context import forward_mode
from pflcore.flat import Net
from pflcore.ops.library import pool2x2, pool2x2_backward

SHAPES = [(1, 1, 2, 2), (3, 2, 28, 28), (2, 5, 7, 9), (1, 3, 33, 2), (4, 1, 2, 67), (0, 3, 8, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("average", [False, True])
def test_equal_to_torch_bit_for_bit(shape, dtype, average):
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, shape, generator=gen).to(dtype)  # many ties: the gradient goes to the first of equals
    x = x + (torch.rand(shape, generator=gen) < 0.5) * torch.randn(shape, generator=gen, dtype=dtype)
    z = x.clone().requires_grad_()
    want = F.avg_pool2d(z, 2) if average else F.max_pool2d(z, 2)
    assert torch.equal(pool2x2(x, average), want)
    grad = torch.randn(want.shape, generator=gen, dtype=dtype)
    (g,) = torch.autograd.grad(want, z, grad)
    assert torch.equal(pool2x2_backward(grad, x, average), g)


def test_a_nan_spreads_to_its_window_alone():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    x[0, 0, 1, 0] = torch.nan
    y = pool2x2(x, False)
    assert y.isnan().tolist() == [[[[True, False], [False, False]]]]


@pytest.mark.parametrize(
    "layer", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True)]
)
def test_a_models_layers_are_replaced_without_a_trace(layer):
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 3), layer))
    x = torch.randn(5, 1, 13, 12, generator=torch.Generator().manual_seed(1))
    outs = []
    for alone in (False, True):
        w = net.w0.clone().requires_grad_()
        with forward_mode(True, alone=alone):
            y = net(w, x)
        outs.append((y, *torch.autograd.grad(y.square().sum(), w)))
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)
    assert isinstance(net.module[1], type(layer))  # the caller's own model keeps its layers
