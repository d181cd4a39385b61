"""The papers' networks, by name.

Every entry of `MODELS` is called with the shape of one input, the number of outputs and
its own options, and returns an `nn.Module`. None of them knows anything of federated
learning; `pflcore.Net` finds the head (the last linear layer) by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Literal

import torch
import torch.nn as nn

from pflcore.check import PositiveInt, checked, require
from pflcore.nn import Dropout

__all__ = ["model_for"]
Shape = Sequence[PositiveInt]  # of one input: (features,) or (channels, height, width)
Activation = Literal["relu", "tanh", "sigmoid"]
Pool = Literal["max", "avg"]
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
POOLS = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}


def linear(
    shape: Shape, classes: int, *, bias: bool = True, zero: bool = False
) -> nn.Module:
    """Logistic regression, a linear SVM or least squares, by the loss: one linear layer
    on the flattened input.

    `zero` starts all weights at 0, as Motley does.
    """
    model = mlp(shape, classes, hidden=(), bias=bias)
    if zero:
        for p in model.parameters():
            nn.init.zeros_(p)
    return model


@checked
def mlp(
    shape: Shape,
    classes: int,
    *,
    hidden: Sequence[int] = (200,),
    activation: Activation = "relu",
    bias: bool = True,
) -> nn.Module:
    """Hidden layers of these widths. On 28 x 28 inputs with 10 classes: 159,010
    parameters, 158,800 without bias."""
    widths = [prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in zip(widths, hidden, strict=False):
        layers += [nn.Linear(a, b, bias=bias), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes, bias=bias))


@checked
def cnn(  # noqa: PLR0913 (the papers' variants)
    shape: Shape,
    classes: int,
    *,
    channels: Sequence[int] = (32, 64),
    kernel: int = 5,
    hidden: Sequence[int] = (512,),
    padding: int | Sequence[int] | str = 0,
    activation: Activation = "relu",
    pool: Pool = "max",
    bias: bool = True,
) -> nn.Module:
    """Blocks of convolution, activation and 2 x 2 pooling, then linear layers.

    `padding` is one number for all convolutions, one for each, or "same". The default
    is the CNN of McMahan et al. 2017 without padding: 582,026 parameters on MNIST.
    """
    if padding == "same":
        padding = kernel // 2
    pads = [padding] * len(channels) if isinstance(padding, int) else [*padding]
    each = len(pads) == len(channels) and all(isinstance(p, int) for p in pads)
    require(
        each,
        "padding",
        f"a number, one for each of {len(channels)} layers, or 'same'",
        padding,
    )
    sides = _sides(shape, kernel, pads)
    layers: list[nn.Module] = []
    for before, width, pad in zip([shape[0], *channels], channels, pads, strict=False):
        conv = nn.Conv2d(before, width, kernel, padding=pad, bias=bias)
        layers += [conv, ACTIVATIONS[activation](), POOLS[pool](2)]
    top = mlp(
        (channels[-1], *sides), classes, hidden=hidden, activation=activation, bias=bias
    )
    return nn.Sequential(*layers, top)


def _sides(shape: Shape, kernel: int, pads: Iterable[int]) -> list[int]:
    """Height and width behind convolutions with these borders, each with 2 x 2
    pooling."""
    sides = list(shape[1:])
    for pad in pads:
        sides = [(s + 2 * pad - kernel + 1) // 2 for s in sides]
    require(
        min(sides) > 0,
        "shape",
        "inputs large enough for all convolutions and pooling",
        shape,
    )
    return sides


def lenet5(
    shape: Shape,
    classes: int,
    *,
    activation: Activation = "tanh",
    pool: Pool = "avg",
    bias: bool = True,
) -> nn.Module:
    """LeCun et al. 1989/1998: 6 and 16 channels of 5 x 5, then 120, 84. 61,706
    parameters on MNIST (padded by 2), 62,006 on CIFAR-10.

    tanh and average pooling are the classic network; ReLU with maximum pooling is more
    accurate alone, and diverges under control variates (SCAFFOLD, WAFFLE) with concept
    shift at the WAFFLE paper's learning rate. The linear part follows `activation` too.
    """
    first = 2 if shape[-1] < 32 else 0
    return cnn(
        shape,
        classes,
        channels=(6, 16),
        hidden=(120, 84),
        padding=(first, 0),
        activation=activation,
        pool=pool,
        bias=bias,
    )


def fmnist_cnn(shape: Shape, classes: int, *, bias: bool = False) -> nn.Module:
    """WAFFLe (weight factorization, 2020), Fashion-MNIST: 5 x 5 convolutions of 16 and
    32, same padding. 28,880 parameters."""
    return cnn(shape, classes, channels=(16, 32), hidden=(), padding="same", bias=bias)


def cifar_cnn_small(
    shape: Shape, classes: int, *, padding: int | str = 0, bias: bool = False
) -> nn.Module:
    """WAFFLe (weight factorization, 2020), CIFAR-10 as the text has it: 3 x 3
    convolutions of 16 and 16, then 80, 60. 54,216 parameters.

    Their table counts LeNet-5 without bias instead (61,770): `lenet5` with
    `bias=False`, `activation="relu"`, `pool="max"`.
    """
    return cnn(
        shape,
        classes,
        channels=(16, 16),
        kernel=3,
        hidden=(80, 60),
        padding=padding,
        bias=bias,
    )


def emnist_cnn_2048(shape: Shape, classes: int, *, padding: int | str = 0) -> nn.Module:
    """Liu et al. 2023 (FedDWA), EMNIST: 5 x 5 convolutions of 32 and 64, then 2,048.
    2,278,334 parameters with 62 classes.

    `padding="same"` is the LEAF benchmark's own network (6,603,710 parameters).
    """
    return cnn(shape, classes, hidden=(2048,), padding=padding)


def sattler_cnn(shape: Shape, classes: int) -> nn.Module:
    """Sattler et al. 2020 (Clustered FL), EMNIST: 5 x 5 convolutions of 6 and 16, no
    hidden layer. 18,506 parameters with 62 classes."""
    return cnn(shape, classes, channels=(6, 16), hidden=())


def cifar_cnn(shape: Shape, classes: int, *, dropout: float = 0.5) -> nn.Module:
    """Mills et al. 2022 with FedDWA's dropout (Liu et al. 2023), CIFAR: 3 x 3
    convolutions of 32 and 64, each ReLU, pooling, batch norm.

    Then 512, dropout, ReLU. 1,204,874 parameters with 10 classes, 1,251,044 with 100.
    """
    sides = _sides(shape, 3, (0, 0))
    layers: list[nn.Module] = []
    for before, width in ((shape[0], 32), (32, 64)):
        layers += [
            nn.Conv2d(before, width, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(width),
        ]
    top = (
        nn.Linear(64 * prod(sides), 512),
        Dropout(dropout),
        nn.ReLU(),
        nn.Linear(512, classes),
    )
    return nn.Sequential(*layers, nn.Flatten(), *top)


class _Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm; a 1 x 1 convolution is the way around
    where the shape changes (He et al. 2016, option B)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.around: nn.Module = nn.Identity()
        # made only where it is used: its weights are drawn
        if before != width or stride != 1:
            conv = nn.Conv2d(before, width, 1, stride, bias=False)
            self.around = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.around(x))


def resnet8(shape: Shape, classes: int) -> nn.Module:
    """FedDWA's released ResNet-8 (Liu et al. 2023), Tiny-ImageNet: 90,392 parameters
    with 200 classes, 78,042 with 10.

    A 3 x 3 convolution of 16 and 3 x 3 pooling of stride 2, then residual blocks of 16,
    32 and 64; Kaiming initialisation.
    """
    first = nn.Conv2d(shape[0], 16, 3, 1, 1, bias=False)
    model = nn.Sequential(
        nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(_Residual(16, 16, 1), _Residual(16, 32, 2), _Residual(32, 64, 2)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, classes),
    )
    for m in model.modules():
        if isinstance(m, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(m.weight)
    return model


def _convolved(before: int, width: int, kernel: int) -> nn.Module:
    """A convolution that keeps the size, batch norm, ReLU."""
    layer = nn.Conv2d(before, width, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(width), nn.ReLU())


class _Aggregated(nn.Module):
    """Two halves, one after the other, whose outputs a 1 x 1 convolution joins; a half
    is a residual block or again such a pair."""

    def __init__(self, before: int, width: int, depth: int, stride: int) -> None:
        super().__init__()
        if depth == 1:
            self.first: nn.Module = _Residual(before, width, stride)
            self.second: nn.Module = _Residual(width, width, 1)
        else:
            self.first = _Aggregated(before, width, depth - 1, stride)
            self.second = _Aggregated(width, width, depth - 1, 1)
        self.root = _convolved(2 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        joined: torch.Tensor = self.root(torch.cat([first, self.second(first)], 1))
        return joined


def dla(shape: Shape, classes: int) -> nn.Module:
    """Deep layer aggregation (Yu et al. 2018) for 32 x 32 images, in the simple form
    without inputs joined anew at deeper roots.

    Convolutions of 16, 16 and 32, then aggregated residual blocks of 64, 128, 256 and
    512, of depths 1, 2, 2 and 1; the last three halve the image. 15,142,970 parameters
    on CIFAR-10. WAFFLE (Beaussart et al. 2021) has "DLA" there without saying which.
    """
    start = (_convolved(shape[0], 16, 3), _convolved(16, 16, 3), _convolved(16, 32, 3))
    sizes = ((32, 64, 1, 1), (64, 128, 2, 2), (128, 256, 2, 2), (256, 512, 1, 2))
    # before the top: weights are drawn in order
    trees = [_Aggregated(*size) for size in sizes]
    top = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    return nn.Sequential(*start, *trees, *top)


VECTOR_MODELS = (linear, mlp)  # all others take images
ALL_MODELS: list[Callable[..., nn.Module]] = [
    cifar_cnn,
    cifar_cnn_small,
    cnn,
    dla,
    emnist_cnn_2048,
    fmnist_cnn,
    lenet5,
    linear,
    mlp,
    resnet8,
    sattler_cnn,
]
MODELS = {f.__name__: f for f in ALL_MODELS}


@checked
def model_for(
    name: str, shape: Shape, classes: PositiveInt | None, **options: object
) -> nn.Module:
    """A fresh `MODELS[name]` for inputs of `shape` and `classes` outputs (None: one
    output, for regression)."""
    require(name in MODELS, "model", f"one of {', '.join(MODELS)}", name, MODELS)
    if len(shape) != 3 and MODELS[name] not in VECTOR_MODELS:
        raise ValueError(
            "shape: a convolutional model needs inputs (channels, height, width), got "
            f"{tuple(shape)}; use linear or mlp."
        )
    try:
        return MODELS[name](tuple(shape), 1 if classes is None else classes, **options)
    except TypeError as error:
        raise ValueError(
            f"model: {name} does not take these options: {error}."
        ) from error
