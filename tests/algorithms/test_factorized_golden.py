"""The Indian buffet process and the factorized layers against golden numbers (float64, printed to
ten digits) and quadrature."""

import torch
from parts.factorized_golden import D, linear, near, t

from pflcore import Net
from pflcore.nn import FactorizedConv2d


def test_the_average_of_factors_is_not_the_average_of_products():
    one = linear([[1, 0], [0, 2]], [1, 0.5], [[1, 1], [0, 1]])
    two = linear([[0, 1], [1, 1]], [0.2, 1], [[2, 0], [1, 1]])
    near((one.weight + two.weight) / 2, [[1, 1], [0.7, 1]])
    net = Net(one)
    mean = net.load(
        linear([[0, 0], [0, 0]], [0, 0], [[0, 0], [0, 0]]), (net.row(one) + net.row(two)) / 2
    )
    near(mean.weight, [[0.6375, 0.525], [1.0125, 1.275]])


def test_convolution():
    layer = FactorizedConv2d(2, 2, 2, 2, dtype=D)
    layer.w_a.data = torch.tensor([[0.5, -0.2], [0.1, 0.3]], dtype=D)
    layer.strength.data = t(1.2, -0.5)
    layer.w_b.data = torch.arange(1, 17, dtype=D).view(2, 8) / 10
    kernel = [
        [[[0.15, 0.22], [0.29, 0.36]], [[0.43, 0.5], [0.57, 0.64]]],
        [[[-0.123, -0.126], [-0.129, -0.132]], [[-0.135, -0.138], [-0.141, -0.144]]],
    ]
    near(layer.weight.view(2, 2, 2, 2), kernel)
    y = layer(torch.arange(1, 19, dtype=D).view(1, 2, 3, 3) / 10)
    near(y[0].flatten(1), [[2.972, 3.288, 3.92, 4.236], [-0.8268, -0.9336, -1.1472, -1.254]])
