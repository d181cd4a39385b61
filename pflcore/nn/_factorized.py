"""Layers whose weight is a sum of rank-1 factors.

The weight is W = W_a diag(strength) W_b. The layers are those of Hao et al. 2020, Eqs.
2 to 4. A client uses a subset of the factors: its model is the row whose strengths are
multiplied by 0 or 1. So the layer itself knows nothing of clients.

Symbols: O outputs and M inputs of the weight; F factors; I input features or channels;
B samples; kh, kw height and width of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair

from pflcore import ops
from pflcore.check import (
    Expectation,
    PositiveFloat,
    PositiveInt,
    checked,
    reject,
    require,
)
from pflcore.nn._copy import copy_module

Init = Literal["match", "ibpwf"]


def _is_module(value: object) -> bool:
    """True for a module."""
    return isinstance(value, nn.Module)


# A check by annotation, whose text is that of other arguments.
Module = Annotated[nn.Module, Expectation("a Module", _is_module)]


class _Factorized(nn.Module):
    """A layer with the factors of a weight [O, M].

    The factors are w_a [O, F], strength [F] and w_b [F, M]. There may be a plain bias
    [O].
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        factors: int,
        bias: bool,
        init: Init,
        alpha: float | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.factors = factors
        self.init = init
        self.alpha = float(factors) if alpha is None else float(alpha)
        self.w_a = nn.Parameter(torch.empty(outputs, factors, dtype=dtype))
        self.strength = nn.Parameter(torch.empty(factors, dtype=dtype))
        self.w_b = nn.Parameter(torch.empty(factors, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws factors from Glorot's uniform distribution, and sets the rest.

        The strengths depend on the option `init`; the bias is 0.

        - "ibpwf": strengths are drawn from N(0, 0.1^2), as in the authors' earlier
          code.
        - "match": strengths are 1, and the factors are scaled. A client uses factor k
          with the prior's probability. With the scale, the weight of its model has
          Glorot's variance 2 / (O + M).
        """
        nn.init.xavier_uniform_(self.w_a)
        nn.init.xavier_uniform_(self.w_b)
        if self.init == "ibpwf":
            nn.init.normal_(self.strength, std=0.1)
        else:
            nn.init.ones_(self.strength)
            self._match_variance()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _match_variance(self) -> None:
        """Scales the factors so that the weight has Glorot's variance.

        That is the variance for a client that uses factor k with the prior's
        probability (alpha / (alpha + 1))^k.
        """
        outputs, factors = self.w_a.shape
        inputs = self.w_b.shape[1]
        k = torch.arange(1, factors + 1, dtype=torch.float64)
        probability = (self.alpha / (self.alpha + 1)) ** k
        expected_factors = probability.sum().item()
        variance_a = 2 / (outputs + factors)
        variance_b = 2 / (factors + inputs)
        variance = expected_factors * variance_a * variance_b
        wanted_variance = 2 / (outputs + inputs)
        # The weight's variance grows with the fourth power of a scale of both factors.
        scale = (wanted_variance / variance) ** 0.25
        with torch.no_grad():
            self.w_a.mul_(scale)
            self.w_b.mul_(scale)

    @property
    def weight(self) -> Tensor:
        """The dense weight [O, M]."""
        return (self.w_a * self.strength) @ self.w_b


@checked
class FactorizedLinear(_Factorized):
    """`nn.Linear` with a factorized weight.

    y = ((x W_b^T) * strength) W_a^T + bias.

    Args:
        in_features: The number I of input features.
        out_features: The number O of outputs.
        factors: The number F of factors.
        bias: True for a bias.
        init: The initial values, see `reset_parameters`.
        alpha: The alpha of the prior, for the initial scale; by default the number of
            factors.
        dtype: The dtype of the parameters; by default torch's.

    >>> FactorizedLinear(784, 200, 120)(torch.zeros(2, 784)).shape
    torch.Size([2, 200])
    """

    def __init__(
        self,
        in_features: PositiveInt,
        out_features: PositiveInt,
        factors: PositiveInt,
        bias: bool = False,
        init: Init = "match",
        alpha: PositiveFloat | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        super().__init__(out_features, in_features, factors, bias, init, alpha, dtype)

    def forward(self, x: Tensor) -> Tensor:  # [..., I] -> [..., O]
        rows = x.reshape(-1, x.shape[-1])
        y = ops.rank1_linear(rows, self.w_a, self.strength, self.w_b)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, factors={self.factors}, "
            f"bias={self.bias is not None}"
        )


@checked
class FactorizedConv2d(_Factorized):
    """`nn.Conv2d` whose kernel, as a matrix [O, I kh kw], is factorized.

    See appendix A of the paper. There are no groups, and padding is zeros. The other
    arguments are those of `nn.Conv2d`.

    Args:
        factors: The number F of factors.
        init: The initial values, see `reset_parameters`.
        alpha: The alpha of the prior, for the initial scale; by default the number of
            factors.
    """

    def __init__(  # noqa: PLR0913 (as nn.Conv2d)
        self,
        in_channels: PositiveInt,
        out_channels: PositiveInt,
        kernel_size: PositiveInt | Sequence[PositiveInt],
        factors: PositiveInt,
        stride: int | tuple[int, int] = 1,
        padding: int | str | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = False,
        init: Init = "match",
        alpha: PositiveFloat | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = _pair(kernel_size)
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        size = in_channels * self.kernel_size[0] * self.kernel_size[1]
        super().__init__(out_channels, size, factors, bias, init, alpha, dtype)

    def forward(self, x: Tensor) -> Tensor:  # [B, I, H, W] -> [B, O, H', W']
        shape = (self.out_channels, self.in_channels, *self.kernel_size)
        kernel = self.weight.view(shape)
        options: Any = (self.stride, self.padding, self.dilation)
        return F.conv2d(x, kernel, self.bias, *options)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"factors={self.factors}, stride={self.stride}, padding={self.padding}, "
            f"bias={self.bias is not None}"
        )


@checked
def factorize(
    module: Module,
    ranks: PositiveInt | Sequence[PositiveInt] = (),
    init: Init = "match",
    alpha: PositiveFloat | None = None,
    head: str | None = None,
) -> nn.Module:
    """A copy of a model whose linear layers and convolutions are factorized.

    The head stays, and so do layers that are factorized already. The factors are newly
    drawn. Raises ValueError for a convolution with groups or with other padding than
    zeros, and for tied weights.

    Args:
        module: The model.
        ranks: The number of factors of each layer in the order of `named_modules`, or
            one number for all layers. By default there are three factors for five
            outputs, the paper's proportion on MNIST.
        init: The initial values, see `reset_parameters` of the layers.
        alpha: The alpha of the prior, for the initial scale; by default the number of
            factors.
        head: The name of the layer that stays; by default the last `nn.Linear`.
    """
    module = copy_module(module)
    if head is not None and head not in dict(module.named_modules()):
        children = ", ".join(name for name, _ in module.named_children())
        reject("head", f"one of the model's modules {children}", head)
    layers = _layers_without_head(module, head)
    numbers = [ranks] if isinstance(ranks, int) else list(ranks)
    names = ", ".join(layers)
    expected = f"one number of factors, or one for each of the layers {names}"
    require(len(numbers) in (0, 1, len(layers)), "ranks", expected, ranks)
    for i, (name, layer) in enumerate(layers.items()):
        _check_untied(module, name, layer)
        if numbers:
            factors = numbers[i % len(numbers)]
        else:
            factors = math.ceil(3 * len(layer.weight) / 5)
        factorized = _factorized_layer(name, layer, factors, init, alpha)
        _replace_layer(module, layer, factorized.to(layer.weight.device))
    return module


def _layers_without_head(module: nn.Module, head: str | None) -> dict[str, Any]:
    """The linear layers and convolutions by name, without those of the head.

    `head` is the name of the head; None means the last linear layer.
    """
    layers: dict[str, Any] = {}
    for name, layer in module.named_modules():
        if type(layer) in (nn.Linear, nn.Conv2d):
            layers[name] = layer
    if head is None:
        linear = [name for name in layers if isinstance(layers[name], nn.Linear)]
        head = linear[-1] if linear else None
    if head is None:
        return layers
    in_head = [name for name in layers if name == head or name.startswith(f"{head}.")]
    return {name: layer for name, layer in layers.items() if name not in in_head}


def _check_untied(module: nn.Module, name: str, layer: Any) -> None:
    """Raises ValueError where a layer shares its weight with another one."""
    users = 0  # layers that have the weight as a parameter
    for other in module.modules():
        users += sum(p is layer.weight for p in other._parameters.values())
    if users > 1:
        raise ValueError(
            f"module: {name} shares its weight with another layer, which factors "
            "cannot; untie them first."
        )


def _replace_layer(module: nn.Module, layer: nn.Module, new: nn.Module) -> None:
    """Puts `new` into all places of `layer`, which may have several names."""
    named = list(module.named_modules(remove_duplicate=False))
    for name, other in named:
        if other is layer:
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, new)


def _factorized_layer(
    name: str, layer: Any, factors: int, init: Init, alpha: float | None
) -> nn.Module:
    """A new factorized layer with the shapes and options of `layer`."""
    options: Any = (layer.bias is not None, init, alpha, layer.weight.dtype)
    if isinstance(layer, nn.Linear):
        sizes = (layer.in_features, layer.out_features, factors)
        return FactorizedLinear(*sizes, *options)
    if layer.groups != 1 or layer.padding_mode != "zeros":
        raise ValueError(
            f"module: the convolution {name} has groups or pads with other things than "
            "zeros, which cannot be factorized."
        )
    return FactorizedConv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        factors,
        layer.stride,
        layer.padding,
        layer.dilation,
        *options,
    )


def factorized_layers(module: nn.Module) -> dict[str, _Factorized]:
    """The factorized layers of a model by name, in `named_modules` order."""
    named = module.named_modules()
    return {name: layer for name, layer in named if isinstance(layer, _Factorized)}
