"""Networks of papers, by name.

Every entry of `MODELS` is called with the shape of one input, the number of outputs and
its own options, and returns an `nn.Module`. The networks know nothing of federated
learning. `pflcore.Net` finds the head, the last linear layer, by itself.

In all functions `shape` is the shape of one input, (features,), (channels, height,
width) or (steps,), and `classes` is the number of outputs. In shapes, B are samples, T
steps of a text, H features of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor

from pflcore.check import PositiveInt, UnitFloat, checked, require
from pflcore.nn import Dropout

__all__ = ["model_for"]
Shape = Sequence[PositiveInt]  # of one input
Activation = Literal["relu", "tanh", "sigmoid"]
Pool = Literal["max", "avg"]
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
POOLS = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}


def linear(
    shape: Shape, classes: int, *, bias: bool = True, zero: bool = False
) -> nn.Module:
    """One linear layer on the flattened input.

    By the loss it is logistic regression, a linear SVM or least squares.

    Args:
        bias: True for a bias.
        zero: If true, all weights start at 0, as in Motley.
    """
    model = mlp(shape, classes, hidden=(), bias=bias)
    if zero:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
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
    """A multilayer perceptron: hidden layers, and a linear layer.

    On 28 x 28 inputs with 10 classes it has 159,010 parameters, 158,800 without bias.

    Args:
        hidden: The widths of the hidden layers.
        activation: The function behind each hidden layer.
        bias: True for a bias in each layer.
    """
    width = prod(shape)
    layers: list[nn.Module] = [nn.Flatten()]
    for hidden_width in hidden:
        layers.append(nn.Linear(width, hidden_width, bias=bias))
        layers.append(ACTIVATIONS[activation]())
        width = hidden_width
    layers.append(nn.Linear(width, classes, bias=bias))
    return nn.Sequential(*layers)


@checked
def cnn(
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

    The default is the CNN of McMahan et al. 2017 without padding: 582,026 parameters on
    MNIST.

    Args:
        channels: The output channels of the convolutions.
        kernel: The height and width of all kernels.
        hidden: The widths of the hidden linear layers.
        padding: One number for all convolutions, one for each, or "same".
        activation: The function behind each convolution and each hidden layer.
        pool: The kind of pooling.
        bias: True for a bias in each layer.
    """
    if padding == "same":
        padding = kernel // 2
    pads = [padding] * len(channels) if isinstance(padding, int) else [*padding]
    fits = len(pads) == len(channels) and all(isinstance(pad, int) for pad in pads)
    expected = f"a number, one for each of {len(channels)} layers, or 'same'"
    require(fits, "padding", expected, padding)
    sides = _sides(shape, kernel, pads)
    inputs = shape[0]
    layers: list[nn.Module] = []
    for outputs, pad in zip(channels, pads, strict=True):
        layers.append(nn.Conv2d(inputs, outputs, kernel, padding=pad, bias=bias))
        layers.append(ACTIVATIONS[activation]())
        layers.append(POOLS[pool](2))
        inputs = outputs
    top_shape = (channels[-1], *sides)
    top = mlp(top_shape, classes, hidden=hidden, activation=activation, bias=bias)
    return nn.Sequential(*layers, top)


def _sides(shape: Shape, kernel: int, pads: Iterable[int]) -> list[int]:
    """Height and width behind convolutions with these paddings.

    2 x 2 pooling follows each convolution. Raises ValueError where nothing is left.
    """
    sides = list(shape[1:])
    for pad in pads:
        sides = [(side + 2 * pad - kernel + 1) // 2 for side in sides]
    expected = "inputs large enough for all convolutions and pooling"
    require(min(sides) > 0, "shape", expected, shape)
    return sides


def lenet5(
    shape: Shape,
    classes: int,
    *,
    activation: Activation = "tanh",
    pool: Pool = "avg",
    bias: bool = True,
) -> nn.Module:
    """LeNet-5 (LeCun et al. 1989/1998): 5 x 5 convolutions, then linear layers.

    The convolutions have 6 and 16 channels, the hidden layers 120 and 84 features. It
    has 61,706 parameters on MNIST (padded by 2) and 62,006 on CIFAR-10. With tanh and
    average pooling it is the classic network.

    ReLU with maximum pooling is more accurate for a single client. With control
    variates (SCAFFOLD, WAFFLE) and concept shift that variant diverges at the learning
    rate of the WAFFLE paper.

    Args:
        activation: The function behind each convolution and each hidden layer.
        pool: The kind of pooling.
        bias: True for a bias in each layer.
    """
    first_padding = 2 if shape[-1] < 32 else 0
    return cnn(
        shape,
        classes,
        channels=(6, 16),
        hidden=(120, 84),
        padding=(first_padding, 0),
        activation=activation,
        pool=pool,
        bias=bias,
    )


def fmnist_cnn(shape: Shape, classes: int, *, bias: bool = False) -> nn.Module:
    """The network of WAFFLe (Hao et al. 2020) for Fashion-MNIST.

    It has 5 x 5 convolutions of 16 and 32 channels with padding "same", and 28,880
    parameters.

    Args:
        bias: True for a bias in each layer.
    """
    return cnn(shape, classes, channels=(16, 32), hidden=(), padding="same", bias=bias)


def cifar_cnn_small(
    shape: Shape, classes: int, *, padding: int | str = 0, bias: bool = False
) -> nn.Module:
    """The network of WAFFLe (Hao et al. 2020) for CIFAR-10.

    It follows the paper's text: 3 x 3 convolutions of 16 and 16 channels, hidden layers
    of 80 and 60 features, and 54,216 parameters. The paper's table counts the 61,770
    parameters of LeNet-5 without bias instead: `lenet5` with `bias=False`,
    `activation="relu"` and `pool="max"`.

    Args:
        padding: One number for all convolutions, or "same".
        bias: True for a bias in each layer.
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
    """The network of FedDWA (Liu et al. 2023) for EMNIST.

    It has 5 x 5 convolutions of 32 and 64 channels, a hidden layer of 2,048 features,
    and 2,278,334 parameters with 62 classes. With `padding="same"` it is the network of
    the LEAF benchmark (6,603,710 parameters).

    Args:
        padding: One number for all convolutions, or "same".
    """
    return cnn(shape, classes, hidden=(2048,), padding=padding)


def sattler_cnn(shape: Shape, classes: int) -> nn.Module:
    """The network of Clustered FL (Sattler et al. 2020) for EMNIST.

    It has 5 x 5 convolutions of 6 and 16 channels, no hidden layer, and 18,506
    parameters with 62 classes.
    """
    return cnn(shape, classes, channels=(6, 16), hidden=())


def cifar_cnn(shape: Shape, classes: int, *, dropout: float = 0.5) -> nn.Module:
    """The network of Mills et al. 2022 for CIFAR, with FedDWA's dropout.

    It has 3 x 3 convolutions of 32 and 64 channels, each with ReLU, pooling and batch
    norm, then a hidden layer of 512 features with dropout and ReLU. It has 1,204,874
    parameters with 10 classes and 1,251,044 with 100. The dropout is that of Liu et al.
    2023.

    Args:
        dropout: The probability with which a feature is dropped.
    """
    sides = _sides(shape, kernel=3, pads=(0, 0))
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(32),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(64),
        nn.Flatten(),
        nn.Linear(64 * prod(sides), 512),
        Dropout(dropout),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


class _Residual(nn.Module):
    """A residual block: two 3 x 3 convolutions with a norm each.

    `around` is the shortcut. Where the shape changes, it is a 1 x 1 convolution (He et
    al. 2016, option B). `norm` makes a norm of a number of channels.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.around: nn.Module = nn.Identity()
        # The convolution is made only where it is used. Otherwise it would still draw
        # its weights, and change those that are drawn after it.
        if inputs != outputs or stride != 1:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(conv, norm(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.around(x))


def resnet8(shape: Shape, classes: int) -> nn.Module:
    """The ResNet-8 of FedDWA's released code (Liu et al. 2023) for Tiny-ImageNet.

    It has a 3 x 3 convolution of 16 channels and 3 x 3 pooling of stride 2, then
    residual blocks of 16, 32 and 64 channels, all with Kaiming initialisation. It has
    90,392 parameters with 200 classes and 78,042 with 10.
    """
    conv = nn.Conv2d(shape[0], 16, 3, 1, 1, bias=False)
    stem = nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    model = nn.Sequential(
        stem,
        _Residual(16, 16, 1),
        _Residual(16, 32, 2),
        _Residual(32, 64, 2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, classes),
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    return model


@checked
def resnet18(
    shape: Shape,
    classes: int,
    *,
    width: PositiveInt = 64,
    norm: Literal["batch", "group"] = "batch",
    groups: PositiveInt = 8,
) -> nn.Module:
    """ResNet-18 (He et al. 2016) for small images.

    The first layer is a 3 x 3 convolution of stride 1, without pooling behind it. Then
    come residual blocks of 1, 2, 4 and 8 times `width` channels, two of each; the last
    three pairs halve the image. It has 11,173,962 parameters on CIFAR-10, and 701,466
    with a width of 16.

    Args:
        width: The channels of the first blocks.
        norm: The norm behind each convolution. Batch norm has statistics that clients
            share or keep, see the option `batch_norm` of a run; group norm has none.
        groups: The groups of channels of a group norm.
    """
    make_norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    if norm == "group":
        expected = f"a number that divides the width of {width}"
        require(width % groups == 0, "groups", expected, groups)
        make_norm = partial(nn.GroupNorm, groups)
    conv = nn.Conv2d(shape[0], width, 3, 1, 1, bias=False)
    blocks: list[nn.Module] = [nn.Sequential(conv, make_norm(width), nn.ReLU())]
    inputs = width
    for factor in (1, 2, 4, 8):
        outputs = factor * width
        stride = 1 if factor == 1 else 2
        blocks.append(_Residual(inputs, outputs, stride, make_norm))
        blocks.append(_Residual(outputs, outputs, 1, make_norm))
        inputs = outputs
    top = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*blocks, *top)


def _conv_block(inputs: int, outputs: int, kernel: int) -> nn.Module:
    """A convolution that keeps the image's size, with batch norm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class _Aggregated(nn.Module):
    """Two halves, whose outputs a 1 x 1 convolution joins.

    The second half takes the output of the first one. A half is a residual block, or
    again a pair of halves.
    """

    def __init__(self, inputs: int, outputs: int, depth: int, stride: int) -> None:
        super().__init__()
        if depth == 1:
            self.first: nn.Module = _Residual(inputs, outputs, stride)
            self.second: nn.Module = _Residual(outputs, outputs, 1)
        else:
            self.first = _Aggregated(inputs, outputs, depth - 1, stride)
            self.second = _Aggregated(outputs, outputs, depth - 1, 1)
        self.root = _conv_block(2 * outputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        joined: torch.Tensor = self.root(torch.cat([first, self.second(first)], 1))
        return joined


def dla(shape: Shape, classes: int) -> nn.Module:
    """Deep layer aggregation (Yu et al. 2018) for 32 x 32 images.

    It is the simple form, in which deeper roots do not join the inputs again. There are
    convolutions of 16, 16 and 32 channels, then aggregated residual blocks of 64, 128,
    256 and 512 channels and of depths 1, 2, 2 and 1. The last three halve the image. It
    has 15,142,970 parameters on CIFAR-10. WAFFLE (Beaussart et al. 2021) uses "DLA"
    there and does not say which form.
    """
    return nn.Sequential(
        _conv_block(shape[0], 16, 3),
        _conv_block(16, 16, 3),
        _conv_block(16, 32, 3),
        _Aggregated(32, 64, depth=1, stride=1),
        _Aggregated(64, 128, depth=2, stride=2),
        _Aggregated(128, 256, depth=2, stride=2),
        _Aggregated(256, 512, depth=1, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


class _TextModel(nn.Module):
    """Scores of token sequences [B, T], by a head on hidden features [B, T, H].

    With `every_step` there are scores of each step, [B, classes, T]. Otherwise they are
    [B, classes], of the features that `summary` makes of a sequence's.
    """

    def __init__(self, hidden: int, classes: int, *, every_step: bool) -> None:
        super().__init__()
        self.every_step = every_step
        self.head = nn.Linear(hidden, classes)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden features [B, T, H] of tokens [B, T]."""
        raise NotImplementedError

    def summary(self, hidden: Tensor) -> Tensor:
        """Features [B, H] of a sequence, from those of its steps [B, T, H]."""
        return hidden[:, -1]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        if self.every_step:
            scores: Tensor = self.head(hidden).transpose(1, 2)
        else:
            scores = self.head(self.summary(hidden))
        return scores


class _LSTMModel(_TextModel):
    """The network of `lstm`."""

    def __init__(self, embedding: nn.Embedding, layers: nn.LSTM, **top: Any) -> None:
        super().__init__(layers.hidden_size, **top)
        self.embedding = embedding
        self.layers = layers

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.embedding(tokens))[0]
        return hidden


@checked
def lstm(
    shape: Shape,
    classes: int,
    *,
    vocabulary: PositiveInt | None = None,
    embedding: PositiveInt = 8,
    hidden: PositiveInt = 256,
    layers: PositiveInt = 2,
    dropout: UnitFloat = 0.0,
    every_step: bool = False,
) -> nn.Module:
    """An LSTM for text: an embedding, LSTM layers and a linear layer.

    With the defaults it has the layers of McMahan et al. 2017 for Shakespeare: 8
    features of a character and two layers of 256, of whose last state the next
    character is predicted. It has 819,920 parameters with 80 characters.

    Args:
        vocabulary: The number of tokens; None for as many as there are classes. On the
            command line None takes that of the data.
        embedding: The features of a token.
        hidden: The features of a state.
        layers: The number of LSTM layers.
        dropout: The probability with which an output between two layers is dropped.
        every_step: If true, scores [B, classes, T] of every step, for labels [B, T].
    """
    return _LSTMModel(
        nn.Embedding(vocabulary or classes, embedding),
        nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=dropout),
        classes=classes,
        every_step=every_step,
    )


class _TransformerModel(_TextModel):
    """The network of `transformer`."""

    def __init__(
        self,
        embedding: nn.Embedding,
        positions: nn.Embedding,
        layers: Iterable[nn.Module],
        **top: Any,
    ) -> None:
        super().__init__(embedding.embedding_dim, **top)
        self.embedding = embedding
        self.positions = positions
        self.layers = nn.ModuleList(layers)

    def hidden(self, tokens: Tensor) -> Tensor:
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(steps)
        mask = None
        if self.every_step:
            # A step sees none of those behind it.
            mask = steps[None, :] > steps[:, None]
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        hidden: Tensor = x
        return hidden

    def summary(self, hidden: Tensor) -> Tensor:
        """The mean over the steps."""
        return hidden.mean(1)


@checked
def transformer(
    shape: Shape,
    classes: int,
    *,
    vocabulary: PositiveInt | None = None,
    width: PositiveInt = 64,
    heads: PositiveInt = 4,
    layers: PositiveInt = 2,
    dropout: UnitFloat = 0.1,
    every_step: bool = False,
) -> nn.Module:
    """A small transformer for text (Vaswani et al. 2017, the encoder).

    Learnt embeddings of tokens and of positions are added. The feed-forward layers are
    four times as wide as the model. A linear layer scores the mean over the steps. It
    has 115,408 parameters with 80 tokens, 80 classes and sequences of 80.

    Args:
        vocabulary: The number of tokens; None for as many as there are classes. On the
            command line None takes that of the data.
        width: The features of a step.
        heads: The heads of the attention.
        layers: The number of layers.
        dropout: The probability with which an attention weight or a feature is dropped.
        every_step: If true, scores [B, classes, T] of every step, for labels [B, T]. A
            step then sees only what comes before it, and itself.
    """
    expected = f"a number that divides the width of {width}"
    require(width % heads == 0, "heads", expected, heads)
    return _TransformerModel(
        nn.Embedding(vocabulary or classes, width),
        nn.Embedding(shape[0], width),
        [
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, batch_first=True
            )
            for _ in range(layers)
        ],
        classes=classes,
        every_step=every_step,
    )


VECTOR_MODELS = (linear, mlp)
TEXT_MODELS = (lstm, transformer)  # all others take images
ALL_MODELS: list[Callable[..., nn.Module]] = [
    cifar_cnn,
    cifar_cnn_small,
    cnn,
    dla,
    emnist_cnn_2048,
    fmnist_cnn,
    lenet5,
    linear,
    lstm,
    mlp,
    resnet18,
    resnet8,
    sattler_cnn,
    transformer,
]
MODELS = {f.__name__: f for f in ALL_MODELS}


@checked
def model_for(
    name: str, shape: Shape, classes: PositiveInt | None, **options: object
) -> nn.Module:
    """A new model by name.

    Raises ValueError where there is no model of this name, where it does not take these
    options, or where the inputs do not fit.

    Args:
        name: One of the names of `MODELS`.
        shape: The shape of one input: (features,), (channels, height, width), or
            (steps,) of a text's tokens.
        classes: The number of outputs; None for one output, as in a regression.
        options: The options of the model.
    """
    require(name in MODELS, "model", f"one of {', '.join(MODELS)}", name, MODELS)
    is_text = MODELS[name] in TEXT_MODELS
    if is_text and len(shape) != 1:
        raise ValueError(
            f"shape: {name} takes sequences of tokens, (steps,), got {tuple(shape)}; "
            "use a model for images."
        )
    if len(shape) != 3 and not is_text and MODELS[name] not in VECTOR_MODELS:
        raise ValueError(
            "shape: a convolutional model needs inputs (channels, height, width), got "
            f"{tuple(shape)}; use linear or mlp."
        )
    try:
        outputs = 1 if classes is None else classes
        return MODELS[name](tuple(shape), outputs, **options)
    except TypeError as error:
        raise ValueError(
            f"model: {name} does not take these options: {error}."
        ) from error
