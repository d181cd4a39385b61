"""The papers' networks: sizes, shapes, options."""

import pytest
import torch
import torch.nn as nn
from doors import sentence
from places import golden, tabled

from pflcore import Net
from pflcore.nn import factorize
from pflcore.nn import models as papers
from pflcore.nn.models import model_for

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(
    "name, shape, classes, options, parameters, factors", golden("model_sizes")
)
def test_parameter_counts(name, shape, classes, options, parameters, factors):
    """Of whole layers, and of the papers' factorized ones: WAFFLe's 18,155 for fmnist_cnn takes the
    second layer's inputs for 25, and its 42,780 for lenet5 are 10 fewer."""
    model = model_for(name, shape, classes, **options)
    model = factorize(model, factors) if factors else model
    assert Net(model).size == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(
    ("options", "act", "pool"),
    [({}, nn.Tanh, nn.AvgPool2d), ({"activation": "relu", "pool": "max"}, nn.ReLU, nn.MaxPool2d)],
)
def test_lenet_is_the_classic_one_by_default(options, act, pool):
    kinds = [type(m) for m in model_for("lenet5", MNIST, 10, **options).modules()]
    assert kinds.count(act) == 4 and kinds.count(pool) == 2
    assert len({nn.Tanh, nn.ReLU} & {*kinds}) == 1


@pytest.mark.parametrize("name", sorted(papers.MODELS))
def test_every_model_is_a_net_with_a_head(name):
    shape = CIFAR if "cifar" in name else MNIST
    net = Net(lambda: model_for(name, torch.Size(shape), 10))
    assert net.classes == 10
    x = torch.randn(3, *shape)
    torch.testing.assert_close(net.head(net.w0, net.features(net.w0, x)), net(net.w0, x))


def test_regression_has_one_output():
    assert model_for("linear", (5,), None)(torch.zeros(2, 5)).shape == (2, 1)


BAD = """\
lenet | {"shape": [1, 28, 28]} | model: 'lenet' is none of .*lenet5
lenet5 | {"shape": [784]} | shape: a convolutional model needs inputs
dla | {"shape": [100]} | shape: a convolutional model needs inputs
lenet5 | {"shape": [1, 6, 6]} | shape: expected inputs large enough
cifar_cnn | {"shape": [3, 8, 8]} | shape: expected inputs large enough
mlp | {"shape": [1, 28, 28], "activation": "gelu"} | activation: expected 'relu' or 'tanh'
cnn | {"shape": [1, 28, 28], "pool": "min"} | pool: expected 'max' or 'avg'
cnn | {"shape": [1, 28, 28], "padding": [1, 2, 3]} | padding: expected a number
linear | {"shape": [1, 28, 28], "width": 3} | model: linear does not take these options
"""


@pytest.mark.parametrize("name, options, words", tabled(BAD))
def test_bad_requests_get_a_sentence(name, options, words):
    with sentence(words):
        model_for(name, classes=10, **options)


def test_deep_layer_aggregation_joins_each_half_with_the_one_after_it():
    """Trees of depth 1, 2, 2 and 1 have 1, 3, 3 and 1 roots, each over two halves of its own width;
    the last three halve the image."""
    model = model_for("dla", (3, 32, 32), 10).eval()
    roots = [m for name, m in model.named_modules() if name.endswith("root")]
    assert [r[0].in_channels // r[0].out_channels for r in roots] == [2] * 8
    sizes = []
    for m in model[3:7]:
        m.register_forward_hook(lambda _m, _x, y: sizes.append(tuple(y.shape[1:])))
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert sizes == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
