"""The papers' networks: sizes, shapes, options."""

import pytest
import torch
import torch.nn as nn
from entry_points import sentence
from places import golden, tabled

from pflcore import Net
from pflcore.nn import factorize
from pflcore.nn.models import model_for


@pytest.mark.parametrize(
    "name, shape, classes, options, parameters, factors", golden("model_sizes")
)
def test_parameter_counts(name, shape, classes, options, parameters, factors):
    """Models have the published sizes, and features and head compose the model.

    Some sizes are those of whole layers, others of the papers' factorized layers.
    WAFFLe's 18,155 for fmnist_cnn counts 25 inputs of the second layer, and its 42,780
    for lenet5 are 10 fewer.
    """
    model = model_for(name, shape, classes, **options)
    net = Net(factorize(model, factors) if factors else model)
    x = torch.randn(2, *shape)
    assert net.size == parameters and net.classes == (classes or 1)
    scores = net(net.w0, x)
    assert scores.shape == (2, classes or 1)
    torch.testing.assert_close(net.head(net.w0, net.features(net.w0, x)), scores)


SUMS = """\
cifar_cnn | 99.8733
cifar_cnn_small | -10.3885
cnn | 3.6623
dla | 8149.6185
lenet5 | -9.8036
resnet8 | 331.4057
"""


@pytest.mark.parametrize("name, total", tabled(SUMS))
def test_initial_weights_are_golden(name, total):
    torch.manual_seed(3)
    model = model_for(name, (3, 32, 32), 10)
    assert sum(p.double().sum().item() for p in model.parameters()) == pytest.approx(
        total, abs=1e-3
    )


@pytest.mark.parametrize("name", [name for name, _ in tabled(SUMS)])
def test_no_layer_is_drawn_and_thrown_away(name, monkeypatch):
    drawn = []
    reset = nn.modules.conv._ConvNd.reset_parameters

    def reset_parameters(layer):
        drawn.append(layer)
        reset(layer)

    monkeypatch.setattr(nn.modules.conv._ConvNd, "reset_parameters", reset_parameters)
    model = model_for(name, (3, 32, 32), 10)
    assert len(drawn) == sum(isinstance(m, nn.Conv2d) for m in model.modules())


LENETS = """\
{} | Tanh | AvgPool2d
{"activation": "relu", "pool": "max"} | ReLU | MaxPool2d
"""


@pytest.mark.parametrize("options, act, pool", tabled(LENETS))
def test_lenet_is_the_classic_one_by_default(options, act, pool):
    model = model_for("lenet5", (1, 28, 28), 10, **options)
    kinds = [type(m).__name__ for m in model.modules()]
    assert kinds.count(act) == 4 and kinds.count(pool) == 2
    assert len({"Tanh", "ReLU"} & {*kinds}) == 1


BAD = """\
lenet | {"shape": [1, 28, 28]} | model: got 'lenet', did you mean 'lenet5'. Expected one of
lenet5 | {"shape": [784]} | shape: a convolutional model needs inputs
dla | {"shape": [100]} | shape: a convolutional model needs inputs
lenet5 | {"shape": [1, 6, 6]} | shape: expected inputs large enough
cifar_cnn | {"shape": [3, 8, 8]} | shape: expected inputs large enough
mlp | {"shape": [1, 28, 28], "activation": "gelu"} | activation: got 'gelu', did you mean 'relu'
cnn | {"shape": [1, 28, 28], "pool": "min"} | pool: expected 'max' or 'avg'
cnn | {"shape": [1, 28, 28], "padding": [1, 2, 3]} | padding: expected a number
linear | {"shape": [1, 28, 28], "width": 3} | model: linear does not take these options
"""  # noqa: E501


@pytest.mark.parametrize("name, options, words", tabled(BAD))
def test_bad_requests_get_a_sentence(name, options, words):
    with sentence(words):
        model_for(name, classes=10, **options)


def test_deep_layer_aggregation_joins_each_half_with_the_one_after_it():
    """Each root of a tree joins two halves of equal width.

    Trees of depth 1, 2, 2 and 1 have 1, 3, 3 and 1 roots. The last three trees halve
    the image.
    """
    model = model_for("dla", (3, 32, 32), 10).eval()
    roots = [m for name, m in model.named_modules() if name.endswith("root")]
    assert [r[0].in_channels // r[0].out_channels for r in roots] == [2] * 8
    x = model[:3](torch.zeros(1, 3, 32, 32))
    sizes = []
    for tree in model[3:7]:
        x = tree(x)
        sizes.append(tuple(x.shape[1:]))
    assert sizes == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]
