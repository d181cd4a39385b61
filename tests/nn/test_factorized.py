"""Factorized layers against their dense twins, in models, rows, engines and the written-out
gradient; initial scales; `factorize`."""

from itertools import product

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from parts.factorized import D, model
from torch import Tensor

from pflcore import Net
from pflcore.nn import FactorizedConv2d, FactorizedLinear, factorize
from pflcore.nn.models import model_for


def randomised(module, seed=0):
    gen = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=gen, dtype=D)
    return module


def linear_twin(layer):
    twin = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=D)
    twin.weight.data = layer.weight.detach().clone()
    if layer.bias is not None:
        twin.bias.data = layer.bias.detach().clone()
    return twin


@pytest.mark.parametrize("bias, factors", [*product((False, True), (1, 3, 9))])
def test_linear_is_its_dense_twin(bias, factors):
    layer = randomised(FactorizedLinear(7, 5, factors, bias, dtype=D))
    twin = linear_twin(layer)
    for shape in ((7,), (4, 7), (2, 3, 7)):
        x = torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(1))
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = layer(a), twin(b)
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
        gx, gw, *gb = torch.autograd.grad(
            y.square().sum(), [a, layer.strength, *([layer.bias] if bias else [])]
        )
        hx, dense, *hb = torch.autograd.grad(
            z.square().sum(), [b, twin.weight, *([twin.bias] if bias else [])]
        )
        torch.testing.assert_close(gx, hx, rtol=1e-12, atol=1e-11)
        # the chain rule from the dense weight's gradient
        want = torch.einsum("of,oi,fi->f", layer.w_a, dense, layer.w_b)
        torch.testing.assert_close(gw, want.detach(), rtol=1e-11, atol=1e-11)
        for g, h in zip(gb, hb, strict=True):
            torch.testing.assert_close(g, h, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    "bias, how", [*product((False, True), ({}, {"stride": 2, "padding": 1}, {"padding": (1, 0)}))]
)
def test_convolution_is_its_dense_twin_both_ways(bias, how):
    layer = randomised(FactorizedConv2d(3, 4, (3, 2), 5, bias=bias, dtype=D, **how))
    x = torch.randn(
        2, 3, 7, 6, dtype=D, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    y = layer(x)
    z = F.conv2d(x, layer.weight.view(4, 3, 3, 2), layer.bias, **how)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    leaves = [x, *layer.parameters()]
    for g, h in zip(
        torch.autograd.grad(y.square().sum(), leaves),
        torch.autograd.grad(z.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(g, h, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("outputs, inputs", [(5, 7), (7, 5), (6, 6)])
def test_as_many_factors_as_the_smaller_side_can_be_any_layer(outputs, inputs):
    dense = torch.randn(outputs, inputs, dtype=D, generator=torch.Generator().manual_seed(2))
    u, s, v = torch.linalg.svd(dense, full_matrices=False)
    layer = FactorizedLinear(inputs, outputs, min(outputs, inputs), dtype=D)
    layer.w_a.data, layer.strength.data, layer.w_b.data = u, s, v
    torch.testing.assert_close(layer.weight, dense, rtol=1e-12, atol=1e-12)
    fewer = torch.linalg.matrix_rank(
        randomised(FactorizedLinear(inputs, outputs, 3, dtype=D)).weight
    )
    assert fewer == 3


def test_rows_under_vmap():
    net = Net(lambda: factorize(model_for("fmnist_cnn", (1, 8, 8), 3).double(), 6))
    rows = torch.stack([net.init(i) for i in range(3)])
    x, y = (
        torch.randn(3, 2, 1, 8, 8, dtype=D, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[0, 1], [2, 0], [1, 1]]),
    )
    alone = torch.stack([net.loss(rows[i], x[i], y[i]) for i in range(3)])
    torch.testing.assert_close(torch.vmap(net.loss)(rows, x, y), alone, rtol=1e-12, atol=1e-12)


# -- initial values ----------------------------------------------------------


def test_initial_scales():
    torch.manual_seed(0)
    layer = FactorizedLinear(784, 200, 120)
    pi = (120 / 121) ** torch.arange(1, 121)
    # the variance of sum_k b_k a_k w_k, with E[b_k] = pi_k
    expected = (layer.w_a**2).mean() * (layer.w_b**2).mean() * pi.sum()
    torch.testing.assert_close(expected, torch.tensor(2 / 984), rtol=0.03, atol=0)
    assert bool((layer.strength == 1).all())
    literal = FactorizedLinear(784, 200, 120, init="ibpwf")
    assert 0.08 < literal.strength.std() < 0.12
    for w in (literal.w_a, literal.w_b):
        torch.testing.assert_close(w.var(), torch.tensor(2 / sum(w.shape)), rtol=0.03, atol=0)
    assert literal.weight.std() < 0.2 * layer.weight.std()  # why it learns slowly


@pytest.mark.parametrize(
    "bad, word",
    [
        ({"factors": 0}, "factors"),
        ({"factors": 2, "init": "x"}, "init"),
        ({"factors": 2, "alpha": 0}, "alpha"),
    ],
)
def test_what_is_refused(bad, word):
    with pytest.raises(ValueError, match=rf"^{word}: expected"):
        FactorizedLinear(4, 3, **{"factors": 2, **bad})


# -- factorize ---------------------------------------------------------------


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_the_papers_parameter_counts():
    mnist = model_for("mlp", (1, 28, 28), 10, bias=False)
    assert (count(mnist), count(factorize(mnist, 120))) == (158_800, 120_200)
    fashion = model_for("fmnist_cnn", (1, 28, 28), 10)
    # the paper's 18,155 takes the second layer's inputs for 25
    assert (count(fashion), count(factorize(fashion, 25))) == (28_880, 27_555)
    lenet = model_for("lenet5", (3, 32, 32), 10, bias=False, activation="relu", pool="max")
    # 42,780 in the paper
    assert (count(lenet), count(factorize(lenet, (10, 10, 60, 40)))) == (61_770, 42_790)
    text = model_for("cifar_cnn_small", (3, 32, 32), 10)
    assert (count(text), count(factorize(text, (10, 10, 80, 40)))) == (54_216, 60_850)


def test_what_is_replaced():
    plain = model()
    before = {n: p.clone() for n, p in plain.named_parameters()}
    made = factorize(plain)
    assert [type(m) for m in made] == [
        nn.Flatten,
        FactorizedLinear,
        nn.ReLU,
        FactorizedLinear,
        nn.Tanh,
        nn.Linear,
    ]
    # 3 for 5 outputs, rounded up
    assert [m.factors for m in made if isinstance(m, FactorizedLinear)] == [5, 5]
    assert made[1].bias is not None and made[3].bias is None and made[1].w_a.dtype == D
    assert torch.equal(made[5].weight, plain[5].weight) and made[5].weight is not plain[5].weight
    assert all(torch.equal(p, before[n]) for n, p in plain.named_parameters())
    again = factorize(made)
    assert torch.equal(again[1].w_a, made[1].w_a)  # factorized layers stay
    named = factorize(plain, 2, head="1")
    assert type(named[1]) is nn.Linear and isinstance(named[5], FactorizedLinear)
    with pytest.raises(ValueError, match=r"^ranks: expected one number"):
        factorize(plain, (2, 3, 4))
    with pytest.raises(ValueError, match=r"^module: the convolution 0 has groups"):
        factorize(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2)))


def test_a_factorized_model_is_a_model():
    net = Net(lambda: factorize(model(), 4), seed=3)
    assert torch.equal(net.init(3), net.w0) and not torch.equal(net.init(4), net.w0)
    from_module = Net(factorize(model(), 4))
    assert not torch.equal(from_module.init(1), from_module.init(2))
    x: Tensor = torch.ones(2, 9, dtype=D)
    torch.testing.assert_close(net.head(net.w0, net.features(net.w0, x)), net(net.w0, x))


def test_a_layer_that_is_called_twice_stays_one():
    layer = nn.Linear(6, 6, bias=False)
    made = factorize(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 2)), 4)
    assert (
        made[0] is made[2] and isinstance(made[0], FactorizedLinear) and type(made[3]) is nn.Linear
    )
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="module: 0 shares its weight with another layer"):
        factorize(tied, 4)
