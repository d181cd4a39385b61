"""Factorized layers against dense layers, initial scales, and `factorize`."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small import equals, layers, near
from ugly import randn

from pflcore import Net
from pflcore.nn import FactorizedConv2d, FactorizedLinear, factorize

D = torch.float64


def model():
    return layers(
        "Flatten, Linear 9 8, ReLU, Linear 8 7 false, Tanh, Linear 7 4"
    ).double()


def randomised(module):
    for i, p in enumerate(module.parameters()):
        p.data = randn(i, *p.shape)
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("factors", [1, 3, 9])
@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 7), (0, 7)])
def test_linear_is_its_dense_twin(bias, factors, shape):
    layer = randomised(FactorizedLinear(7, 5, factors, bias, dtype=D))
    is_its_twin(
        layer, randn(1, *shape), lambda x: F.linear(x, layer.weight, layer.bias)
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", [{}, {"stride": 2, "padding": 1}, {"padding": (1, 0)}])
def test_convolution_is_its_dense_twin_both_ways(bias, how):
    layer = randomised(FactorizedConv2d(3, 4, (3, 2), 5, bias=bias, dtype=D, **how))

    def twin(x):
        return F.conv2d(x, layer.weight.view(4, 3, 3, 2), layer.bias, **how)

    is_its_twin(layer, randn(1, 2, 3, 7, 6), twin)


def is_its_twin(layer, x, twin):
    """Asserts that value and gradients are those of the dense layer."""
    leaves = [x.requires_grad_(), *layer.parameters()]
    y = layer(x)
    z = twin(x)
    near(y.detach(), z.detach(), 1e-12, 1e-12)
    grads = (torch.autograd.grad(v.square().sum(), leaves) for v in (y, z))
    for g, h in zip(*grads, strict=True):
        near(g, h, 1e-11, 1e-10)


# -- initial values ----------------------------------------------------------


def test_initial_scales():
    torch.manual_seed(0)
    layer = FactorizedLinear(784, 200, 120)
    pi = (120 / 121) ** torch.arange(1, 121)
    # The variance of sum_k b_k a_k w_k, with E[b_k] = pi_k.
    expected = (layer.w_a**2).mean() * (layer.w_b**2).mean() * pi.sum()
    near(expected, 2 / 984, 0.03)
    assert bool((layer.strength == 1).all())
    literal = FactorizedLinear(784, 200, 120, init="ibpwf")
    assert 0.08 < literal.strength.std() < 0.12
    for w in (literal.w_a, literal.w_b):
        near(w.var(), 2 / sum(w.shape), 0.03)
    # Its small weights are the reason why it learns slowly.
    assert literal.weight.std() < 0.2 * layer.weight.std()


# -- factorize ---------------------------------------------------------------


def test_what_is_replaced():
    plain = model()
    before = [p.clone() for p in plain.parameters()]
    factorized = factorize(plain)
    made_of = (
        nn.Flatten,
        FactorizedLinear,
        nn.ReLU,
        FactorizedLinear,
        nn.Tanh,
        nn.Linear,
    )
    assert tuple(map(type, factorized)) == made_of
    # Three factors for five outputs, rounded up.
    assert factorized[1].factors == factorized[3].factors == 5
    assert (
        factorized[1].bias is not None
        and factorized[3].bias is None
        and factorized[1].w_a.dtype == D
    )
    equals(factorized[5].weight, plain[5].weight)
    assert factorized[5].weight is not plain[5].weight
    equals([*plain.parameters()], before)
    equals(factorize(factorized)[1].w_a, factorized[1].w_a)  # factorized layers stay
    assert not torch.equal(*map(Net(factorized).init, (1, 2)))  # drawn anew
    named = factorize(plain, 2, head="1")
    assert type(named[1]) is nn.Linear and isinstance(named[5], FactorizedLinear)
    with pytest.raises(ValueError, match=r"^module: the convolution 0 has groups"):
        factorize(layers("Conv2d 4 4 3 1 0 1 2, Flatten, Linear 4 2"))


def test_a_layer_that_is_called_twice_stays_one():
    layer = nn.Linear(6, 6, bias=False)
    factorized = factorize(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 2)), 4)
    assert (
        factorized[0] is factorized[2]
        and isinstance(factorized[0], FactorizedLinear)
        and type(factorized[3]) is nn.Linear
    )
    tied = layers("Linear 6 6, Linear 6 6, Linear 6 2")
    tied[1].weight = tied[0].weight
    with pytest.raises(
        ValueError, match="module: 0 shares its weight with another layer"
    ):
        factorize(tied, 4)
