"""Golden numbers of parameters of the papers' networks, counted layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from cases import Result, load, main

# Channels of the convolutions, their kernel, the hidden widths, and whether layers have
# biases, by name; McMahan et al. 2017, LeCun et al. 1998, Hao et al. 2020 (two), Liu et
# al. 2023 and Sattler et al. 2020.
CONVOLUTIONAL = {
    "cnn": ((32, 64), 5, (512,), True),
    "lenet5": ((6, 16), 5, (120, 84), True),
    "fmnist_cnn": ((16, 32), 5, (), False),
    "cifar_cnn_small": ((16, 16), 3, (80, 60), False),
    "emnist_cnn_2048": ((32, 64), 5, (2048,), True),
    "sattler_cnn": ((6, 16), 5, (), True),
}
ALWAYS_SAME_PADDING = ("fmnist_cnn",)


class Layer:
    """A linear layer or a convolution; a linear layer has a kernel of 1.

    Attributes:
        inputs: channels or features that it takes
        outputs: channels or features that it gives
        kernel: height and width of the kernel
        bias: has a bias for each output
    """

    def __init__(self, inputs: int, outputs: int, kernel=1, bias=True) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.kernel = kernel
        self.bias = bias

    def size(self) -> int:
        """The number of parameters."""
        weights = self.inputs * self.outputs * self.kernel**2
        return weights + self.bias * self.outputs

    def factorized_size(self, factors: int) -> int:
        """The number of parameters as factors (WAFFLe, Hao et al. 2020).

        The weight is `A diag(r) B` with A [outputs, F], r [F], B [F, inputs kernel^2].
        """
        columns = self.inputs * self.kernel**2
        weights = factors * (self.outputs + 1 + columns)
        return weights + self.bias * self.outputs


def linear_layers(widths: Sequence[int], bias: bool) -> list[Layer]:
    """Linear layers between these widths."""
    return [Layer(a, b, bias=bias) for a, b in pairwise(widths)]


def convolutional_layers(name, shape, outputs, padding=0, bias=None) -> list[Layer]:
    """Convolutions, each with 2 x 2 pooling behind it, and linear layers.

    LeNet-5 pads images that are smaller than 32 x 32 by 2 in its first layer.
    """
    channels, kernel, hidden, default_bias = CONVOLUTIONAL[name]
    bias = default_bias if bias is None else bias
    pads = [0] * len(channels)
    if padding == "same" or name in ALWAYS_SAME_PADDING:
        pads = [kernel // 2] * len(channels)
    elif name == "lenet5" and shape[-1] < 32:
        pads[0] = 2
    side = shape[-1]
    inputs = shape[0]
    layers = []
    for width, pad in zip(channels, pads, strict=True):
        layers.append(Layer(inputs, width, kernel, bias))
        side = (side + 2 * pad - kernel + 1) // 2
        inputs = width
    return layers + linear_layers((inputs * side**2, *hidden, outputs), bias)


def batch_norm(channels: int) -> int:
    """Parameters of batch norm: a gain and a shift for each channel."""
    return 2 * channels


def conv(inputs: int, outputs: int, kernel: int) -> int:
    """Parameters of a convolution without bias that batch norm follows."""
    return inputs * outputs * kernel**2 + batch_norm(outputs)


def residual(inputs: int, outputs: int) -> int:
    """Parameters of a residual block (He et al. 2016, option B where widths differ)."""
    around = conv(inputs, outputs, 1) if inputs != outputs else 0
    return conv(inputs, outputs, 3) + conv(outputs, outputs, 3) + around


def aggregated(inputs: int, outputs: int, depth: int) -> int:
    """Parameters of two aggregated halves and their 1 x 1 root (Yu et al. 2018)."""
    root = conv(2 * outputs, outputs, 1)
    if depth == 1:
        return residual(inputs, outputs) + residual(outputs, outputs) + root
    first = aggregated(inputs, outputs, depth - 1)
    return first + aggregated(outputs, outputs, depth - 1) + root


def cifar_cnn(shape, outputs) -> int:
    """The network of Mills et al. 2022 for CIFAR.

    It has 3 x 3 convolutions of 32 and 64 with batch norm, then 512.
    """
    side = shape[-1]
    for _ in range(2):
        side = (side - 2) // 2
    layers = [
        Layer(shape[0], 32, 3),
        Layer(32, 64, 3),
        Layer(64 * side**2, 512),
        Layer(512, outputs),
    ]
    return sum(layer.size() for layer in layers) + batch_norm(32) + batch_norm(64)


def resnet8(shape, outputs) -> int:
    """FedDWA's released ResNet-8: 16, then residual blocks of 16, 32 and 64."""
    blocks = residual(16, 16) + residual(16, 32) + residual(32, 64)
    return conv(shape[0], 16, 3) + blocks + Layer(64, outputs).size()


def dla(shape, outputs) -> int:
    """Deep layer aggregation, simple form: blocks of 64, 128, 256, 512 channels.

    Halves of equal widths but different sizes keep their shortcut, which is counted by
    the widths alone: the first half of each block widens.
    """
    stem = conv(shape[0], 16, 3) + conv(16, 16, 3) + conv(16, 32, 3)
    blocks = aggregated(32, 64, 1) + aggregated(64, 128, 2)
    blocks += aggregated(128, 256, 2) + aggregated(256, 512, 1)
    return stem + blocks + Layer(512, outputs).size()


WHOLE = {"cifar_cnn": cifar_cnn, "resnet8": resnet8, "dla": dla}


def count(name, shape, classes, options, factors) -> int:
    """The number of parameters of a row of model_sizes.json.

    With `factors`, all layers but the last are factorized: one number for all of them,
    or one each.
    """
    outputs = 1 if classes is None else classes
    if name in WHOLE:
        return WHOLE[name](shape, outputs)
    if name in CONVOLUTIONAL:
        chosen = {k: v for k, v in options.items() if k in ("padding", "bias")}
        layers = convolutional_layers(name, shape, outputs, **chosen)
    else:
        default = [200] if name == "mlp" else []
        hidden = options.get("hidden", default)
        widths = (prod(shape), *hidden, outputs)
        layers = linear_layers(widths, options.get("bias", True))
    if factors is None:
        return sum(layer.size() for layer in layers)
    *inner, head = layers
    ranks = factors
    if isinstance(factors, int):
        ranks = [factors] * len(inner)
    sizes = [layer.factorized_size(r) for layer, r in zip(inner, ranks, strict=True)]
    return sum(sizes) + head.size()


def results() -> Iterator[Result]:
    """The numbers of parameters in model_sizes.json."""
    for i, (name, shape, classes, options, _, factors) in enumerate(
        load("model_sizes")
    ):
        value = count(name, shape, classes, options, factors)
        yield Result("model_sizes", (i, 4), value, 0, 0)


if __name__ == "__main__":
    main(results())
