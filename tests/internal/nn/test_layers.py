"""Models of standard layers are described and built again."""

import json

import pytest
import torch
from small import equals
from torch import nn

from pflcore.nn import Dropout, FactorizedConv2d, FactorizedLinear
from pflcore.nn._layers import build_module, describe_module
from pflcore.nn.models import MODELS, TEXT_MODELS, model_for

STANDARD = [
    nn.Linear(3, 2, bias=False),
    nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Dropout(0.3)),
    nn.Sequential(nn.Conv2d(1, 2, (3, 5), padding=(1, 2)), nn.BatchNorm2d(2, eps=1e-3)),
    nn.Sequential(nn.Conv1d(1, 2, 3, padding="same", groups=1), nn.GELU("tanh")),
    nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4, bias=False)),
    nn.Sequential(nn.MaxPool2d(2, stride=1), nn.AvgPool2d(2), nn.GroupNorm(1, 2)),
    nn.Sequential(FactorizedLinear(4, 3, 2, bias=True), Dropout(0.1), nn.Softmax(1)),
    FactorizedConv2d(2, 3, 3, 4, padding=1),
]


@pytest.mark.parametrize("module", STANDARD, ids=repr)
def test_a_standard_module_comes_back(module):
    description = json.loads(json.dumps(describe_module(module)))

    again = build_module(description)

    assert repr(again) == repr(module)
    again.load_state_dict(module.state_dict())
    for name, tensor in module.state_dict().items():
        equals(again.state_dict()[name], tensor)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_by_name_comes_back(name):
    shape = (28,) if MODELS[name] in TEXT_MODELS else (1, 28, 28)
    module = model_for(name, shape, 10)
    description = describe_module(module)
    if description is None:  # the manifest then asks for the function
        assert name not in ("linear", "mlp", "cnn", "lenet5")
        return
    again = build_module(description)
    again.load_state_dict(module.state_dict())
    x = torch.randn(2, *shape)
    equals(again.eval()(x), module.eval()(x))


class Own(nn.Linear):
    """A class whose forward pass a description does not have."""

    def forward(self, x):
        return 2 * super().forward(x)


def parametrized():
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))


def renamed():
    own = type("Linear", (Own,), {})
    return own(3, 2)


@pytest.mark.parametrize(
    "module",
    [Own(3, 2), nn.Sequential(Own(3, 2)), parametrized(), renamed(), nn.LSTM(3, 2)],
    ids=lambda module: type(module).__name__,
)
def test_a_module_that_would_not_come_back_has_no_description(module):
    assert describe_module(module) is None


def test_torchs_random_state_stays():
    module = nn.Linear(3, 2)
    before = torch.get_rng_state()
    build_module(describe_module(module))
    equals(torch.get_rng_state(), before)


def test_only_layers_are_built():
    for name in ("os.system", "torch.nn.Parameter", "torch.nn.functional", "Linear"):
        with pytest.raises(ValueError, match=r"no layer of torch\.nn"):
            build_module({"class": name, "arguments": {}})
