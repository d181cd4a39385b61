"""The papers' networks: sizes, shapes, options."""

from functools import partial

import pytest
import torch
import torch.nn as nn
from entry_points import sentence
from places import golden, tabled

from pflcore import Evaluation, Federation, Hardware, Net, Simulation, Training
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
lstm | {"shape": [1, 28, 28]} | shape: lstm takes sequences of tokens
resnet18 | {"shape": [3, 8, 8], "width": 12, "norm": "group"} | groups: expected a number that divides
transformer | {"shape": [9], "heads": 5} | heads: expected a number that divides
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


# The first is the published number of a ResNet-18 for CIFAR-10. The others are counted
# by hand: a block of c to d channels has 9cd + 9dd weights, and 4d of its two norms.
SIZES = """\
resnet18 | [3, 32, 32] | {} | 11173962
resnet18 | [3, 32, 32] | {"norm": "group"} | 11173962
resnet18 | [3, 32, 32] | {"width": 16} | 701466
lstm | [80] | {"vocabulary": 90} | 802010
transformer | [80] | {"vocabulary": 90} | 111498
"""


@pytest.mark.parametrize("name, shape, options, parameters", tabled(SIZES))
def test_numbers_of_parameters(name, shape, options, parameters):
    model = model_for(name, shape, 10, **options)
    assert sum(p.numel() for p in model.parameters()) == parameters


TEXTS = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TRAINED = {
    "resnet18": (IMAGES, {"width": 8}),
    "resnet18 group": (IMAGES, {"width": 8, "norm": "group"}),
    "lstm": (TEXTS, {"vocabulary": 9, "hidden": 4, "dropout": 0.2}),
    "lstm steps": (TEXTS, {"hidden": 4, "every_step": True}),
    "transformer": (TEXTS, {"vocabulary": 9, "width": 8}),
    "transformer steps": (TEXTS, {"width": 8, "every_step": True}),
}


LARGE = pytest.mark.deep("a larger model")


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=LARGE if c.startswith("resnet") else ()) for c in TRAINED],
)
def test_a_round_on_each_engine(case, engine):
    x, options = TRAINED[case]
    y = TEXTS if options.get("every_step") else torch.arange(6) % 3
    name = case.split()[0]
    classes = 9 if options.get("every_step") else 3
    make = partial(model_for, name, tuple(x.shape[1:]), classes, **options)
    assert make()(x).shape[:2] == (6, classes)
    data = Federation.from_clients([(x, y)] * 2, classes=classes)
    run = Simulation(
        "fedavg",
        make,
        data,
        Training(lr=0.1, batch_size=3),
        rounds=1,
        evaluation=Evaluation(split="train"),
        hardware=Hardware(engine=engine, workers=1),
    )
    history = run.run()
    assert history.stopped is None and history.last_values("loss").isfinite().all()


def test_a_transformer_of_every_step_does_not_look_ahead():
    model = model_for("transformer", (5,), 9, every_step=True, width=8).eval()
    other = TEXTS.clone()
    other[:, 3:] = (other[:, 3:] + 1) % 9

    got, want = model(other), model(TEXTS)

    torch.testing.assert_close(got[..., :3], want[..., :3])
    assert not torch.isclose(got[..., 3:], want[..., 3:]).any()
