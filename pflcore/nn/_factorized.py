"""Layers whose weight is a sum of F rank-1 factors with strengths: W = W_a
diag(strength) W_b (Hao et al. 2020, Eqs. 2 to 4).

A client's own choice of factors b enters as strength * b: a model row in which the
strengths were multiplied by b is that client's model, and the layer needs to know
nothing of it.
"""

import copy
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

Init = Literal["match", "ibpwf"]


class _Factorized(nn.Module):
    """The factors of an [O, M] weight: w_a [O, F], strength [F], w_b [F, M], and a
    plain bias [O]."""

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
        self.alpha = float(factors if alpha is None else alpha)
        self.w_a = nn.Parameter(torch.empty(outputs, factors, dtype=dtype))
        self.strength = nn.Parameter(torch.empty(factors, dtype=dtype))
        self.w_b = nn.Parameter(torch.empty(factors, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform factors. "ibpwf": strengths from N(0, .1^2), as the authors'
        earlier code. "match": strengths 1, and the factors scaled so that the weight of
        a client that uses each factor k with the prior's probability has Glorot's
        variance 2 / (O + M)."""
        nn.init.xavier_uniform_(self.w_a)
        nn.init.xavier_uniform_(self.w_b)
        if self.init == "ibpwf":
            nn.init.normal_(self.strength, std=0.1)
        else:
            nn.init.ones_(self.strength)
            o, f = self.w_a.shape
            m = self.w_b.shape[1]
            k = torch.arange(1, f + 1, dtype=torch.float64)
            # factors that the prior expects a client to use
            used = ((self.alpha / (self.alpha + 1)) ** k).sum().item()
            have = used * (2 / (o + f)) * (2 / (f + m))
            with torch.no_grad():
                for w in (self.w_a, self.w_b):
                    w.mul_((2 / (o + m) / have) ** 0.25)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def weight(self) -> Tensor:
        """The dense weight [O, M]."""
        return (self.w_a * self.strength) @ self.w_b


@checked
class FactorizedLinear(_Factorized):
    """`nn.Linear` with a factorized weight: y = ((x W_b^T) * strength) W_a^T + bias.

    `alpha` is the prior's, for the initial scale (default: the number of factors).

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
    """`nn.Conv2d` (groups 1, zeros around) whose kernel, as a matrix [O, I kh kw], is
    factorized (appendix A)."""

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
        kernel = self.weight.view(
            self.out_channels, self.in_channels, *self.kernel_size
        )
        how: Any = (self.stride, self.padding, self.dilation)
        return F.conv2d(x, kernel, self.bias, *how)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"factors={self.factors}, stride={self.stride}, padding={self.padding}, "
            f"bias={self.bias is not None}"
        )


@checked
def factorize(
    module: Annotated[
        nn.Module, Expectation("a Module", lambda v: isinstance(v, nn.Module))
    ],
    ranks: PositiveInt | Sequence[PositiveInt] = (),
    init: Init = "match",
    alpha: PositiveFloat | None = None,
    head: str | None = None,
) -> nn.Module:
    """A copy of `module` with freshly drawn factors instead of every linear layer and
    convolution but the head.

    `ranks`: the number of factors of each layer in the order of `named_modules`, or one
    for all; () is three factors for five outputs, the paper's proportion on MNIST.
    `head` names the layer that stays (default: the last `nn.Linear`). Layers that are
    factorized already stay as they are. Grouped convolutions and such with other
    padding than zeros cannot be factorized: ValueError.
    """
    module = copy.deepcopy(module)
    if head is not None and head not in dict(module.named_modules()):
        children = ", ".join(n for n, _ in module.named_children())
        reject("head", f"one of the model's modules {children}", head)
    layers = {
        n: m for n, m in module.named_modules() if type(m) in (nn.Linear, nn.Conv2d)
    }
    if head is None:
        head = next(
            (n for n in reversed(layers) if isinstance(layers[n], nn.Linear)), None
        )
    layers = {
        n: m for n, m in layers.items() if n != head and not n.startswith(f"{head}.")
    }
    given = [ranks] if isinstance(ranks, int) else list(ranks)
    each = f"one number of factors, or one for each of the layers {', '.join(layers)}"
    require(len(given) in (0, 1, len(layers)), "ranks", each, ranks)
    for i, (name, m) in enumerate(layers.items()):
        if (
            sum(
                p is m.weight
                for other in module.modules()
                for p in other._parameters.values()
            )
            > 1
        ):
            raise ValueError(
                f"module: {name} shares its weight with another layer, which factors "
                "cannot; untie them first."
            )
        factors = given[i % len(given)] if given else -(-3 * len(m.weight) // 5)
        new = _like(name, m, factors, init, alpha).to(m.weight.device)
        # a layer may be called in several
        for place in [
            n for n, other in module.named_modules(remove_duplicate=False) if other is m
        ]:
            parent, _, leaf = place.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)
    return module


def _like(
    name: str, m: Any, factors: int, init: Init, alpha: float | None
) -> nn.Module:
    rest: Any = (m.bias is not None, init, alpha, m.weight.dtype)
    if isinstance(m, nn.Linear):
        return FactorizedLinear(m.in_features, m.out_features, factors, *rest)
    if m.groups != 1 or m.padding_mode != "zeros":
        raise ValueError(
            f"module: the convolution {name} has groups or pads with other things than "
            "zeros, which cannot be factorized."
        )
    size = (m.in_channels, m.out_channels, m.kernel_size)
    return FactorizedConv2d(*size, factors, m.stride, m.padding, m.dilation, *rest)


def factorized_layers(module: nn.Module) -> dict[str, _Factorized]:
    """The factorized layers of a model by name, in the order of `named_modules`."""
    return {n: m for n, m in module.named_modules() if isinstance(m, _Factorized)}
