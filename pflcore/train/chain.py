"""Which models are a chain of layers that the kernels train whole, and the program that one is.

The calls of a private copy's own `forward` are recorded, in this thread alone, with the shapes that
go in and come out; layers are known by exact types, functions by what they do. Anything else (a
subclass, a hook, a tied or a frozen weight, a pass that differs between training and evaluation or
between sizes of the batch) leaves the model to the engines. Whether the chain is the model, the
trial says (`choose`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode

from pflcore.data.federation import Federation
from pflcore.nn import Dropout
from pflcore.nn.factorized import FactorizedLinear
from pflcore.nn.mode import forward_mode
from pflcore.ops import backend
from pflcore.ops.chain import layer
from pflcore.train.losses import CRITERIA
from pflcore.train.net import Net

MANY = 8000  # products of input and output channels from which torch's convolutions are faster
ACTS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((torch.relu, F.relu, F.relu_, Tensor.relu_, Tensor.relu), nn.ReLU),
    **dict.fromkeys((torch.tanh, Tensor.tanh), nn.Tanh),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), nn.Sigmoid),
    **dict.fromkeys((torch.log_softmax, F.log_softmax, Tensor.log_softmax), nn.LogSoftmax),
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), nn.MaxPool2d),
    F.gelu: nn.GELU,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}
VIEWS = (
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.contiguous),
)
ASKS = (
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__),
    *(getattr(Tensor, a).__get__ for a in ("shape", "ndim")),
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Line = tuple[Any, ...]  # what `pflcore.ops.chain.layer` takes
Shape = tuple[int, ...]
Place = Callable[[str], int]  # of a layer's parameter in the row


class NoChain(Exception):
    """Why a model is none, in a few words."""


class Call(NamedTuple):
    """One layer at work: what goes in and comes out of it for one sample."""

    layer: nn.Module
    into: Shape
    out: Shape


@dataclass(frozen=True)
class Chain:
    """A model and its criterion as the kernels know them."""

    program: Tensor  # [L, 9] float64, see pflcore.ops.chain.layer
    criterion: str
    shape: Shape  # [C, H, W] of one sample
    classes: int  # outputs
    dropout: bool  # whether training needs seeds
    has_conv: bool
    numbers: int  # of one sample, between all layers

    def bytes_kept(self, batch: int, itemsize: int) -> int:
        """About what a thread keeps for activations and slopes: of so many samples as it takes at
        once, bounded as in csrc/cpu."""
        at_once = min(batch, 32 if self.has_conv else 128)
        return min(1 << 26, 3 * self.numbers * at_once * itemsize)

    @property
    def head(self) -> tuple[Any, ...]:
        """The kernels' arguments that stay the same."""
        return (self.program, self.criterion, *self.shape)


def find_chain(net: Net, data: Federation) -> Chain | str:
    """The chain that `net` is on the samples of `data`, or in a few words why it is none."""
    x, y = data.x, data.y
    try:
        chain = compiled(net, tuple(data.shape))
        fits = x.dtype == net.dtype and x.is_contiguous()
        expect(fits, "samples that do not lie as the kernels read them")
        numbers = y.dtype == net.dtype and chain.criterion != "cross_entropy"
        known = y.dim() == 1 and (y.dtype == torch.int64 or numbers)
        expect(known, f"targets of {y.dtype} and shape {list(y.shape)}")
        cpu = data.device.type == "cpu" and backend().kernels
        expect(cpu or not chain.has_conv, "convolutions without the CPU's kernels")
        return chain
    except NoChain as why:
        return str(why)


def expect(fits: bool, why: str) -> None:
    if not fits:
        raise NoChain(why)


def compiled(net: Net, shape: Shape) -> Chain:
    """The chain that `net` is on samples of this shape; NoChain where it is none."""
    criterion = {f: name for name, f in CRITERIA.items()}.get(net.criterion, "")
    expect(criterion != "", "a criterion of one's own")
    expect(not net.buffer_names, "buffers")
    expect(len(shape) in (1, 3) and all(shape), f"samples of shape {list(shape)}")
    calls = calls_of(net, shape)
    lines, scores = program(net, calls), calls[-1].out
    expect(len(scores) == 1, f"scores of shape {list(scores)}")
    normal = type(calls[-1].layer) is nn.LogSoftmax
    expect(not normal or criterion == "cross_entropy", f"LogSoftmax under {criterion}")
    fits = (criterion == "cross_entropy") != (scores == (1,))
    expect(fits, f"{scores[0]} output(s) for {criterion}")
    kinds = {line[0] for line in lines}
    table = torch.tensor([layer(*line) for line in lines], dtype=torch.float64)
    numbers = prod(shape) + sum(prod(c.out) for c in calls)
    rest = (scores[0], "dropout" in kinds, "conv" in kinds, numbers)
    return Chain(table, criterion, (*shape, 1, 1)[:3], *rest)


def program(net: Net, calls: list[Call]) -> list[Line]:
    """The lines of a model's program."""
    names = {id(p): n for n, p in net.module.named_parameters() if n in net.slices}
    used: list[str] = []
    lines: list[Line] = []
    for m, into, out in calls:
        behind = any(type(c.layer) is nn.LogSoftmax for c in calls[:-1])
        expect(not behind, "a layer behind LogSoftmax")

        def place(parameter: str, m: nn.Module = m) -> int:
            own = getattr(m, parameter)
            if own is None:
                return -1
            name = names.get(id(own), "")
            expect(name != "", "a frozen weight, or one that stands in two places")
            expect(name not in used, "a weight that stands in two places")
            used.append(name)
            return int(net.slices[name].start)

        lines += LAYERS[type(m)](m, place, into, out)
    whole = used and sum(net.sizes[net.names.index(n)] for n in used) == net.size
    expect(bool(whole), "weights that the chain does not use")
    return lines


def is_plain(m: nn.Module) -> bool:
    """Whether calling `m` runs its class's forward and nothing else: no hooks, no forward of the
    instance's own. Who writes a layer out also compares its exact type."""
    return not ("forward" in vars(m) or any(getattr(m, h) for h in HOOKS) or _has_any_global_hook())


# which layers does a forward pass call? -----------------------------------------------------------


class _Recorder(TorchFunctionMode):
    """The layers that a private copy of a model calls, one after another; a function is the layer
    that does the same."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.last, self.calls = x, []  # type: tuple[Tensor, list[Call]]
        self.copy = copy.deepcopy(module)
        for mine, own in zip(module.modules(), self.copy.modules(), strict=True):
            torchs = type(own).__module__.startswith("torch.nn") and type(own) is not nn.Sequential
            if type(own) in LAYERS or torchs:
                own.forward = partial(self.call, mine, own.forward)

    def call(self, m: nn.Module, forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
        follows = len(given) == 1 and not options and given[0] is self.last
        expect(
            follows,
            "layers that do not follow one another, or one that is called with more than its input",
        )
        with torch._C.DisableTorchFunction():
            return self.note(m, forward(*given))

    def note(self, m: nn.Module, out: Tensor) -> Tensor:
        expect(type(m) in LAYERS, type(m).__name__)
        if type(m) is not nn.Identity:
            self.calls.append(Call(m, tuple(self.last.shape[1:]), tuple(out.shape[1:])))
        self.last = out
        return out

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ASKS:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        more = any(isinstance(v, Tensor) for v in (*args[1:], *kwargs.values()))
        follows = bool(args) and args[0] is self.last and not more
        expect(follows, f"layers that do not follow one another, at {name}")
        expect(function in VIEWS or function in FUNCTIONS, name)
        if function in VIEWS:
            out = function(*args, **kwargs)
            return self.note(nn.Identity() if out.shape == self.last.shape else nn.Flatten(), out)
        options = {k: v for k, v in kwargs.items() if k != "_stacklevel" and v is not None}
        return self.note(FUNCTIONS[function](*args[1:], **options), function(*args, **kwargs))


def calls_of(net: Net, shape: Shape) -> list[Call]:
    """The layers that a forward pass calls, a repeated one each time: the same in training and
    evaluation, for small batches and larger."""
    for name, m in net.module.named_modules():
        own = f"a hook on {name or 'the model'}, or a forward of its own"
        expect(is_plain(m), own)
    seed, passes = torch.zeros((), dtype=torch.int64, device=net.w0.device), []
    for train, batch in ((True, 2), (False, 3)):
        recorder = _Recorder(net.module, net.w0.new_zeros(batch, *shape))
        try:
            with torch.no_grad(), forward_mode(train, None, seed), recorder:
                out = recorder.copy.train(train)(recorder.last)
        except NoChain:
            raise
        except Exception as error:
            why = f"a forward that cannot be followed ({type(error).__name__})"
            raise NoChain(why) from error
        expect(out is recorder.last, "an output that is not the last layer's")
        passes.append(recorder.calls)
    one, other = ([(repr(c), id(next(c.layer.parameters(), None))) for c in p] for p in passes)
    same = one == other
    expect(
        same,
        "a forward that differs between training and evaluation, or between batches of two and "
        "three samples",
    )
    return passes[0]


# layers: a module, the places of its parameters, the shapes of input and output -------------------


def _linear(m: nn.Linear, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    expect(len(into) == 1, f"a linear layer on shape {list(into)}")
    yield "linear", *out, at("weight"), at("bias")


def _factorized(m: FactorizedLinear, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    expect(len(into) == 1, f"a linear layer on shape {list(into)}")
    yield "linear", m.factors, at("w_b"), -1
    yield "scale", at("strength")
    yield "linear", *out, at("w_a"), at("bias")


def _conv(m: nn.Conv2d, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    left, right, above, below = m._reversed_padding_repeated_twice
    plain = m.groups == 1 and m.dilation == (1, 1) and m.padding_mode == "zeros"
    fits = plain and m.stride in ((1, 1), (2, 2)) and (left, above) == (right, below)
    expect(fits, "a convolution with steps, gaps, groups or borders that the kernels do not have")
    channels = f"{m.in_channels} x {m.out_channels}"
    few = m.in_channels * m.out_channels < MANY
    expect(few, f"a convolution of {channels} channels, where torch is faster")
    yield "conv", out[0], *m.kernel_size, m.stride[0], above, left, at("weight"), at("bias")


def _pool(m: Any, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    (window, step), mean = (_both(m.kernel_size), _both(m.stride)), isinstance(m, nn.AvgPool2d)
    odd = m.ceil_mode or _both(m.padding) != (0, 0)
    more = m.divisor_override if mean else m.return_indices or _both(m.dilation) != (1, 1)
    expect(not (odd or more), "pooling with padding, gaps, indices, a divisor or ceil_mode")
    yield "pool", 1 + mean, *window, *step


def _whole(m: nn.AdaptiveAvgPool2d, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    expect(out[1:] == (1, 1), "adaptive pooling to more than one value")
    yield "pool", 2, *into[1:], *into[1:]


def _both(value: Any) -> Shape:
    return (value, value) if isinstance(value, int) else tuple(value)


def _flatten(m: nn.Flatten, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    expect(out == (prod(into),), "a view that is no flatten")
    yield ("flatten",)


def _act(m: nn.Module, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    expect(getattr(m, "approximate", "none") == "none", "an approximate GELU")
    yield "act", 1 + ACTS.index(type(m))


def _dropout(m: Dropout, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    if m.p > 0:
        yield "dropout", m.p


def _group_norm(m: nn.GroupNorm, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    yield "norm", m.num_groups, prod(into[1:]), m.eps, at("weight"), at("bias")


def _layer_norm(m: nn.LayerNorm, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    whole = tuple(m.normalized_shape) == into and (m.weight is None) == (m.bias is None)
    expect(whole, f"a layer norm over {list(m.normalized_shape)} on shape {list(into)}")
    yield "norm", 1, 1, m.eps, at("weight"), at("bias")


def _log_softmax(m: nn.LogSoftmax, at: Place, into: Shape, out: Shape) -> Iterator[Line]:
    expect(m.dim in (1, -1), "a LogSoftmax over another axis")
    yield from ()  # the criterion's own takes the logarithms as they are


LAYERS: dict[type[nn.Module], Callable[..., Iterator[Line]]] = {
    nn.Linear: _linear,
    FactorizedLinear: _factorized,
    nn.Conv2d: _conv,
    nn.MaxPool2d: _pool,
    nn.AvgPool2d: _pool,
    nn.AdaptiveAvgPool2d: _whole,
    nn.Flatten: _flatten,
    nn.Identity: lambda *_: iter(()),
    Dropout: _dropout,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.LogSoftmax: _log_softmax,
    **dict.fromkeys(ACTS, _act),
}
