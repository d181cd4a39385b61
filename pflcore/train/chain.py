"""Which models are a chain of layers that the kernels train whole, and the program that such a model is.

The calls of a private copy's own `forward` are recorded, in this thread alone; layers are told by exact types, functions by what they do.
Anything else (a subclass, a hook, a tied or a frozen weight, a forward of an instance's own, a pass that differs between training and
evaluation or between sizes of the batch) leaves the model to the general path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pflcore.data.federation import Federation
from pflcore.nn import Dropout
from pflcore.nn.factorized import FactorizedLinear
from pflcore.nn.mode import forward_mode
from pflcore.ops import backend
from pflcore.ops.chain import layer
from pflcore.train.losses import CRITERIA
from pflcore.train.net import Net
from pflcore.train.plain import is_plain

ACTS = {nn.ReLU: 1, nn.Tanh: 2, nn.Sigmoid: 3, nn.GELU: 4}
MANY = 8000  # products of input and output channels from which torch's convolutions are faster
FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((torch.relu, F.relu, F.relu_, Tensor.relu_, Tensor.relu), nn.ReLU),
    **dict.fromkeys((torch.tanh, Tensor.tanh), nn.Tanh),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), nn.Sigmoid),
    **dict.fromkeys((torch.log_softmax, F.log_softmax, Tensor.log_softmax), nn.LogSoftmax),
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), nn.MaxPool2d),
    F.gelu: nn.GELU, F.avg_pool2d: nn.AvgPool2d, F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}  # fmt: skip
SHAPES = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.contiguous)
ASKS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, *(getattr(Tensor, a).__get__ for a in ("shape", "ndim")))


class NoChain(Exception):
    """Why a model is none, in a few words."""


@dataclass(frozen=True)
class Chain:
    """A model and its criterion as the kernels know them."""

    program: Tensor  # [L, 9] float64, see pflcore.ops.chain.layer
    criterion: str
    shape: tuple[int, int, int]  # of one sample
    classes: int
    dropout: bool  # whether training needs seeds
    has_conv: bool
    numbers: int  # of one sample, between all layers

    def bytes_kept(self, batch: int, itemsize: int) -> int:
        """About what a thread keeps for activations and slopes: of so many samples as it takes at once, bounded as in csrc/cpu."""
        return min(1 << 26, 3 * self.numbers * min(batch, 32 if self.has_conv else 128) * itemsize)

    @property
    def head(self) -> tuple[Any, ...]:
        """The ops' arguments that stay the same."""
        return (self.program, self.criterion, *self.shape)


def find_chain(net: Net, data: Federation) -> Chain | str:
    """The chain that `net` is on the samples of `data`, or in a few words why it is none that the kernels train."""
    try:
        chain = compiled(net, tuple(data.shape))
        _check_data(net, data, chain)
        return chain
    except NoChain as why:
        return str(why)


def compiled(net: Net, shape: tuple[int, ...]) -> Chain:
    criterion = {f: name for name, f in CRITERIA.items()}.get(net.criterion)
    if criterion is None:
        raise NoChain("a criterion of one's own")
    if net.buffer_names:
        raise NoChain("buffers")
    if net.dtype not in (torch.float32, torch.float64):
        raise NoChain(f"parameters of {net.dtype}")
    if len(shape) not in (1, 3) or not all(shape):
        raise NoChain(f"samples of shape {list(shape)}")
    compiler = _Compiler(net, shape)
    for m in _layers(net, shape):
        compiler.add(m)
        compiler.numbers += prod(compiler.shape)
    return compiler.finish(criterion)


def _check_data(net: Net, data: Federation, chain: Chain) -> None:
    if data.x.dtype != net.dtype or not data.x.is_contiguous():
        raise NoChain("samples that do not lie as the kernels read them")
    labels = data.y.dtype == torch.int64
    if data.y.dim() != 1 or not (labels or (data.y.dtype == net.dtype and chain.criterion != "cross_entropy")):
        raise NoChain(f"targets of {data.y.dtype} and shape {list(data.y.shape)}")
    if chain.has_conv and not (data.device.type == "cpu" and backend().kernels):
        raise NoChain("convolutions without the CPU's kernels")


class _Compiler:
    """Layers one after another, with the shape [C, H, W] or [F] of what they give."""

    def __init__(self, net: Net, shape: tuple[int, ...]) -> None:
        self.net, self.shape, self.first = net, shape, shape
        self.places: dict[int, int] = {id(p): net.slices[n].start for n, p in net.module.named_parameters() if n in net.slices}
        self.lines: list[list[float]] = []
        self.taken: set[int] = set()
        self.covered, self.numbers = 0, prod(shape)
        self.normal = False  # whether the scores are logarithms of probabilities

    def place(self, p: Tensor | None) -> int:
        if p is None:
            return -1
        if id(p) not in self.places:
            raise NoChain("a frozen weight")
        if id(p) in self.taken:
            raise NoChain("a weight that stands in two places")
        self.taken.add(id(p))
        self.covered += p.numel()
        return self.places[id(p)]

    def line(self, kind: str, *fields: float) -> None:
        self.lines.append(layer(kind, *fields))

    def add(self, m: nn.Module) -> None:
        kind, shape = type(m), self.shape
        if self.normal:
            raise NoChain("a layer behind LogSoftmax")
        if isinstance(m, nn.LogSoftmax):
            self.normal = True
        elif isinstance(m, nn.Linear):
            if shape != (m.in_features,):
                raise NoChain(f"a linear layer on shape {list(shape)}")
            self.line("linear", m.out_features, self.place(m.weight), self.place(m.bias))
            self.shape = (m.out_features,)
        elif isinstance(m, FactorizedLinear):
            if shape != (m.in_features,):
                raise NoChain(f"a linear layer on shape {list(shape)}")
            self.line("linear", m.factors, self.place(m.w_b), -1)
            self.line("scale", self.place(m.strength))
            self.line("linear", m.out_features, self.place(m.w_a), self.place(m.bias))
            self.shape = (m.out_features,)
        elif isinstance(m, nn.Conv2d):
            self._conv(m)
        elif isinstance(m, nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d):
            self._pool(m)
        elif kind in ACTS:
            self.line("act", ACTS[kind])
        elif kind is nn.Flatten:
            self.line("flatten")
            self.shape = (prod(shape),)
        elif isinstance(m, Dropout):
            if m.p > 0:
                self.line("dropout", m.p)
        elif isinstance(m, nn.GroupNorm):
            if shape[0] != m.num_channels:
                raise NoChain(f"a group norm on shape {list(shape)}")
            self.line("norm", m.num_groups, prod(shape[1:]), m.eps, self.place(m.weight), self.place(m.bias))
        elif isinstance(m, nn.LayerNorm):
            if shape != tuple(m.normalized_shape) or (m.weight is None) != (m.bias is None):
                raise NoChain(f"a layer norm over {list(m.normalized_shape)} on shape {list(shape)}")
            self.line("norm", 1, 1, m.eps, self.place(m.weight), self.place(m.bias))

    def _conv(self, m: nn.Conv2d) -> None:
        if len(self.shape) != 3 or self.shape[0] != m.in_channels:
            raise NoChain(f"a convolution on shape {list(self.shape)}")
        if m.stride not in ((1, 1), (2, 2)) or m.dilation != (1, 1) or m.groups != 1 or m.padding_mode != "zeros":
            raise NoChain("a convolution with steps, gaps, groups or borders that the kernels do not have")
        if m.in_channels * m.out_channels >= MANY:
            raise NoChain(f"a convolution of {m.in_channels} x {m.out_channels} channels, where torch is faster")
        kh, kw = m.kernel_size
        if isinstance(m.padding, str):
            if m.padding == "same" and (kh % 2 == 0 or kw % 2 == 0):
                raise NoChain("a convolution padded unevenly")
            ph, pw = (0, 0) if m.padding == "valid" else (kh // 2, kw // 2)
        else:
            ph, pw = m.padding
        stride = m.stride[0]
        high, wide = ((n + 2 * p - k) // stride + 1 for n, p, k in zip(self.shape[1:], (ph, pw), (kh, kw), strict=True))
        if high < 1 or wide < 1:
            raise NoChain(f"a convolution on shape {list(self.shape)}")
        self.line("conv", m.out_channels, kh, kw, stride, ph, pw, self.place(m.weight), self.place(m.bias))
        self.shape = (m.out_channels, high, wide)

    def _pool(self, m: nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d) -> None:
        def both(value: Any) -> tuple[int, int]:
            a, b = (value, value) if isinstance(value, int) else value
            return int(a), int(b)

        if len(self.shape) != 3:
            raise NoChain(f"pooling on shape {list(self.shape)}")
        if isinstance(m, nn.AdaptiveAvgPool2d):
            if m.output_size not in (1, (1, 1)):
                raise NoChain("adaptive pooling to more than one value")
            window = step = both(self.shape[1:])
        else:
            window, step = both(m.kernel_size), both(m.stride)
            odd = m.ceil_mode or both(m.padding) != (0, 0)
            if odd or (isinstance(m, nn.MaxPool2d) and (both(m.dilation) != (1, 1) or m.return_indices)):
                raise NoChain("pooling with padding, gaps, indices or ceil_mode")
            if isinstance(m, nn.AvgPool2d) and m.divisor_override is not None:
                raise NoChain("pooling with a divisor")
        high, wide = ((n - k) // s + 1 for n, k, s in zip(self.shape[1:], window, step, strict=True))
        if high < 1 or wide < 1:
            raise NoChain(f"pooling on shape {list(self.shape)}")
        self.line("pool", 1 if isinstance(m, nn.MaxPool2d) else 2, *window, *step)
        self.shape = (self.shape[0], high, wide)

    def finish(self, criterion: str) -> Chain:
        if len(self.shape) != 1:
            raise NoChain(f"scores of shape {list(self.shape)}")
        if not self.taken or self.covered != self.net.size:
            raise NoChain("weights that the chain does not use")
        if self.normal and criterion != "cross_entropy":
            raise NoChain(f"LogSoftmax under {criterion}")
        if (criterion == "cross_entropy") != (self.shape != (1,)):
            raise NoChain(f"{self.shape[0]} output(s) for {criterion}")
        kinds = [int(line[0]) for line in self.lines]
        shape = self.first if len(self.first) == 3 else (self.first[0], 1, 1)
        program = torch.tensor(self.lines, dtype=torch.float64)
        return Chain(program, criterion, shape, self.shape[0], 5 in kinds, 1 in kinds, self.numbers)


LEAVES = (
    nn.Linear, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity, nn.GroupNorm, nn.LayerNorm,
    nn.LogSoftmax, Dropout, FactorizedLinear, *ACTS,
)  # fmt: skip


class _Recorder(TorchFunctionMode):
    """The layers that a private copy of a model calls, one after another; a function is the layer that does the same."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.last, self.layers = x, []  # type: tuple[Tensor, list[nn.Module]]
        self.copy = copy.deepcopy(module)
        for mine, own in zip(module.modules(), self.copy.modules(), strict=True):
            if type(own) in LEAVES or (type(own).__module__.startswith("torch.nn") and not isinstance(own, nn.Sequential)):
                own.forward = partial(self.call, mine, own.forward)

    def call(self, layer: nn.Module, forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
        if len(given) != 1 or options or given[0] is not self.last:
            raise NoChain("layers that do not follow one another, or one that is called with more than its input")
        self.layers += _checked(layer)
        with torch._C.DisableTorchFunction():
            self.last = forward(*given)
        return self.last

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in ASKS:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        if not args or args[0] is not self.last or any(isinstance(v, Tensor) for v in (*args[1:], *kwargs.values())):
            raise NoChain(f"layers that do not follow one another, at {name}")
        if function not in SHAPES and function not in FUNCTIONS:
            raise NoChain(name)
        if function in FUNCTIONS:
            options = {k: v for k, v in kwargs.items() if k != "_stacklevel" and v is not None}
            self.layers += _checked(FUNCTIONS[function](*args[1:], **options))
        out = function(*args, **kwargs)
        if function in SHAPES and out.shape != self.last.shape:
            if out.shape != self.last.flatten(1).shape:
                raise NoChain("a view that is no flatten")
            self.layers.append(nn.Flatten())
        self.last = out
        return out


def _layers(net: Net, shape: tuple[int, ...]) -> list[nn.Module]:
    """The layers that a forward pass calls, a repeated one each time: the same in training and evaluation, for small batches and larger."""
    for name, m in net.module.named_modules():
        if not is_plain(m):
            raise NoChain(f"a hook on {name or 'the model'}, or a forward of its own")
    passes = []
    for train, batch in ((True, 2), (False, 3)):
        recorder = _Recorder(net.module, net.w0.new_zeros(batch, *shape))
        try:
            with torch.no_grad(), forward_mode(train, None, torch.zeros((), dtype=torch.int64, device=net.w0.device)), recorder:
                out = recorder.copy.train(train)(recorder.last)
        except NoChain:
            raise
        except Exception as error:
            raise NoChain(f"a forward that cannot be followed ({type(error).__name__})") from error
        if out is not recorder.last:
            raise NoChain("an output that is not the last layer's")
        passes.append(recorder.layers)
    one, other = ([(repr(m), id(next(m.parameters(), None))) for m in layers] for layers in passes)
    if one != other:
        raise NoChain("a forward that differs between training and evaluation, or between batches of two and three samples")
    return passes[0]


def _checked(m: nn.Module) -> list[nn.Module]:
    """The layer, or nothing where it does nothing."""
    if type(m) not in LEAVES:
        raise NoChain(type(m).__name__)
    if type(m) is nn.Flatten and (m.start_dim, m.end_dim) != (1, -1):
        raise NoChain("a flatten of some axes")
    if type(m) is nn.GELU and m.approximate != "none":
        raise NoChain("an approximate GELU")
    if type(m) is nn.LogSoftmax and m.dim not in (1, -1):
        raise NoChain("a LogSoftmax over another axis")
    return [] if type(m) is nn.Identity else [m]
