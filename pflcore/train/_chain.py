"""Which models are a chain of layers that the kernels train whole, and the program that
one is.

The functions that a private copy's own `forward` calls are recorded, in this thread
alone, with the shapes that go in and come out. Anything that is not known (another
function, a hook, a tied or a frozen weight, a pass that differs between training and
evaluation or between sizes of the batch) leaves the model to the engines. Whether the
chain is the model, the trial says (`choose`).
"""

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
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from pflcore.data._federation import Federation
from pflcore.nn import Dropout
from pflcore.nn._context import forward_context
from pflcore.nn._factorized import FactorizedLinear
from pflcore.ops._chain import encode_layer, has_kernels
from pflcore.train._losses import LOSSES, loss_name
from pflcore.train._net import Net

# products of input and output channels from which torch's convolutions are faster
CONV_MAX_CHANNEL_PRODUCTS = 8000
SHAPE_QUERIES = (
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__),
    *(getattr(Tensor, a).__get__ for a in ("shape", "ndim")),
)
HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
Shape = tuple[int, ...]
Lines = Iterator[tuple[Any, ...]]  # of what `pflcore.ops._chain.encode_layer` takes
LOG_SOFTMAX_LINE = ("log_softmax",)  # no line: the loss takes logarithms as they are


class NotAChain(Exception):
    """Why a model is none, in a few words."""


class LayerCall(NamedTuple):
    """A layer at work: the shapes that go in and come out for one sample."""

    into: Shape
    out: Shape
    at: Callable[[Tensor | None], int]  # the place of a weight in the row


@dataclass(frozen=True)
class Chain:
    """A model and its loss as the kernels know them."""

    program: Tensor  # [L, 9] float64, see pflcore.ops._chain.encode_layer
    criterion: str
    shape: Shape  # [C, H, W] of one sample
    classes: int  # outputs
    dropout: bool  # whether training needs seeds
    has_conv: bool
    numbers_per_sample: int  # of one sample, between all layers

    def activation_bytes(self, batch: int, itemsize: int) -> int:
        """About what a thread keeps for activations and slopes: of so many samples as
        it takes at once, bounded as in csrc/cpu."""
        at_once = min(batch, 32 if self.has_conv else 128)
        return min(1 << 26, 3 * self.numbers_per_sample * at_once * itemsize)

    @property
    def fixed_args(self) -> tuple[Any, ...]:
        """The kernels' arguments that stay the same."""
        return (self.program, self.criterion, *self.shape)

    def kernel_args(
        self, data: Federation, relabel: Tensor | None, some: slice
    ) -> tuple[Any, ...]:
        """The kernels' first arguments, for some of the clients who know their
        labels so."""
        return (
            *self.fixed_args,
            data.x,
            data.y,
            None if relabel is None else relabel[some],
        )


def find_chain(net: Net, data: Federation) -> Chain | str:
    """The chain that `net` is on the samples of `data`, or in a few words why it is
    none."""
    x = data.x
    y = data.y
    try:
        chain = compile_chain(net, tuple(data.shape))
        fits = x.dtype == net.dtype and x.is_contiguous()
        require(fits, "samples that do not lie as the kernels read them")
        numbers = y.dtype == net.dtype and chain.criterion != "cross_entropy"
        known = y.dim() == 1 and (y.dtype == torch.int64 or numbers)
        require(known, f"targets of {y.dtype} and shape {list(y.shape)}")
        kernels = has_kernels(data.device) or not chain.has_conv
        require(kernels, "convolutions without the CPU's kernels")
        return chain
    except NotAChain as why:
        return str(why)


def require(fits: Any, why: str) -> None:
    if not fits:
        raise NotAChain(why)


def compile_chain(net: Net, shape: Shape) -> Chain:
    """The chain that `net` is on samples of this shape; NotAChain where it is none."""
    criterion = loss_name(net.loss_fn)
    require(LOSSES.get(criterion) is net.loss_fn, "a loss of one's own")
    require(not net.buffer_names, "buffers")
    require(len(shape) in (1, 3) and all(shape), f"samples of shape {list(shape)}")
    for name, m in net.module.named_modules():
        own = (
            "forward" in vars(m)
            or any(getattr(m, h) for h in HOOK_DICTS)
            or _has_any_global_hook()
        )
        require(not own, f"a hook on {name or 'the model'}, or a forward of its own")
    one, other = (record_forward(net, shape, *how) for how in ((True, 2), (False, 3)))
    require(
        one.lines == other.lines,
        "a forward that differs between training and evaluation, or between batches "
        "of two and three samples",
    )
    lines = one.lines
    scores = tuple(one.last.shape[1:])
    require(set(one.used) == {*net.names}, "weights that the chain does not use")
    require(len(scores) == 1, f"scores of shape {list(scores)}")
    classes = criterion == "cross_entropy"
    require(classes != (scores == (1,)), f"{scores[0]} output(s) for {criterion}")
    normal = lines[-1] == LOG_SOFTMAX_LINE
    lines = lines[:-1] if normal else lines
    require(classes or not normal, f"LogSoftmax under {criterion}")
    require(LOG_SOFTMAX_LINE not in lines, "a layer behind LogSoftmax")
    kinds = {line[0] for line in lines}
    table = torch.tensor([encode_layer(*line) for line in lines], dtype=torch.float64)
    rest = (scores[0], "dropout" in kinds, "conv" in kinds, one.numbers)
    return Chain(table, criterion, (*shape, 1, 1)[:3], *rest)


# which layers does a forward pass call? ---------------------------------------


class _Recorder(TorchFunctionMode):
    """The lines of what a private copy of a model calls, one after another; `last` is
    what came out of it so far."""

    def __init__(self, net: Net, x: Tensor) -> None:
        super().__init__()
        self.net = net
        self.last = x
        self.numbers = x[0].numel()
        self.lines: list[tuple[Any, ...]] = []
        self.used: list[str] = []
        self.copy = copy.deepcopy(net.module)
        self.names = {
            id(p): n for n, p in self.copy.named_parameters() if n in net.slices
        }
        for m in self.copy.modules():
            if type(m) in OWN_LAYERS:  # pflcore's layers are taken whole
                m.forward = partial(
                    self.record_call, partial(OWN_LAYERS[type(m)], m), m.forward
                )

    def record_call(
        self, known: Any, f: Callable[..., Tensor], *args: Any, **options: Any
    ) -> Tensor:
        name = getattr(f, "__name__", str(f))
        follows = bool(args) and args[0] is self.last
        require(follows, f"layers that do not follow one another, at {name}")
        require(known, name)
        # what is done here is no part of the model
        with torch._C.DisableTorchFunction():
            out = f(*args, **options)
            call = LayerCall(
                tuple(self.last.shape[1:]), tuple(out.shape[1:]), self.weight_offset
            )
            self.lines += known(call, *args[1:], **options)
            self.numbers += out[0].numel()
        self.last = out
        return out

    def weight_offset(self, weight: Tensor | None) -> int:
        if weight is None:
            return -1
        name = self.names.get(id(weight), "")
        one = name and name not in self.used
        require(one, "a frozen weight, or one that stands in two places")
        self.used.append(name)
        return int(self.net.slices[name].start)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in SHAPE_QUERIES:
            return function(*args)
        return self.record_call(
            KNOWN_FUNCTIONS.get(function), function, *args, **(kwargs or {})
        )


def record_forward(net: Net, shape: Shape, train: bool, batch: int) -> _Recorder:
    """A forward pass of `batch` samples."""
    recorder = _Recorder(net, net.w0.new_zeros(batch, *shape))
    seed = net.w0.new_zeros((), dtype=torch.int64)
    try:
        with torch.no_grad(), forward_context(train, None, seed), recorder:
            out = recorder.copy.train(train)(recorder.last)
    except NotAChain:
        raise
    except Exception as error:
        raise NotAChain(
            f"a forward that cannot be followed ({type(error).__name__})"
        ) from error
    require(out is recorder.last, "an output that is not the last layer's")
    return recorder


# layers: a call, and the function's arguments behind its input ----------------


def _linear(c: LayerCall, weight: Tensor, bias: Tensor | None = None) -> Lines:
    require(len(c.into) == 1, f"a linear layer on shape {list(c.into)}")
    yield "linear", *c.out, c.at(weight), c.at(bias)


def _factorized(m: FactorizedLinear, c: LayerCall) -> Lines:
    yield "linear", m.factors, c.at(m.w_b), -1
    yield "scale", c.at(m.strength)
    yield from _linear(c, m.w_a, m.bias)


def _conv(
    c: LayerCall,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Lines:
    outputs, inputs, *kernel = weight.shape
    same = [k // 2 for k in kernel if k % 2]  # an even kernel's borders differ
    above, left = {"same": same, "valid": (0, 0)}.get(str(padding)) or _pair(padding)
    fits = (
        groups == 1 and _pair(dilation) == (1, 1) and _pair(stride) in ((1, 1), (2, 2))
    )
    require(
        fits, "a convolution with steps, gaps or groups that the kernels do not have"
    )
    few = inputs * outputs < CONV_MAX_CHANNEL_PRODUCTS
    require(
        few, f"a convolution of {inputs} x {outputs} channels, where torch is faster"
    )
    yield (
        "conv",
        outputs,
        *kernel,
        _pair(stride)[0],
        above,
        left,
        c.at(weight),
        c.at(bias),
    )


def _pool(  # noqa: PLR0913 (torch's of both kinds)
    kind: int,
    c: LayerCall,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    dilation: Any = 1,
    return_indices: bool = False,
) -> Lines:
    plain = not (ceil_mode or divisor_override or return_indices) and _pair(
        dilation
    ) == (1, 1)
    plain = plain and _pair(padding) == (0, 0)
    require(plain, "pooling with padding, gaps, indices, a divisor or ceil_mode")
    yield "pool", kind, *_pair(kernel_size), *_pair(stride or kernel_size)


def _global_pool(c: LayerCall, output_size: Any) -> Lines:
    require(c.out[1:] == (1, 1), "adaptive pooling to more than one value")
    yield "pool", 2, *c.into[1:], *c.into[1:]


def _view(c: LayerCall, *_: Any, **__: Any) -> Lines:
    require(c.out in (c.into, (prod(c.into),)), "a view that is no flatten")
    if c.out != c.into:
        yield ("flatten",)


def _act(
    kind: int, c: LayerCall, inplace: bool = False, approximate: str = "none"
) -> Lines:
    require(approximate == "none", "an approximate GELU")
    yield "act", kind


def _dropout(m: Dropout, c: LayerCall) -> Lines:
    if m.p > 0:
        yield "dropout", m.p


def _group_norm(
    c: LayerCall,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Lines:
    yield "norm", num_groups, prod(c.into[1:]), eps, c.at(weight), c.at(bias)


def _layer_norm(
    c: LayerCall,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Lines:
    whole = tuple(normalized_shape) == c.into and (weight is None) == (bias is None)
    require(
        whole, f"a layer norm over {list(normalized_shape)} on shape {list(c.into)}"
    )
    yield "norm", 1, 1, eps, c.at(weight), c.at(bias)


def _log_softmax(
    c: LayerCall, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Lines:
    require(dim in (1, -1) and dtype is None, "a LogSoftmax over another axis")
    yield LOG_SOFTMAX_LINE


OWN_LAYERS: dict[type[nn.Module], Callable[..., Lines]] = {
    Dropout: _dropout,
    FactorizedLinear: _factorized,
}
VIEW_FUNCTIONS = (
    *(
        Tensor.view,
        Tensor.reshape,
        torch.reshape,
        Tensor.flatten,
        torch.flatten,
        Tensor.contiguous,
    ),
)
KNOWN_FUNCTIONS: dict[Any, Callable[..., Lines]] = {
    F.linear: _linear,
    F.conv2d: _conv,
    F.avg_pool2d: partial(_pool, 2),
    F.adaptive_avg_pool2d: _global_pool,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.gelu: partial(_act, 4),
    **dict.fromkeys(VIEW_FUNCTIONS, _view),
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), partial(_pool, 1)),
    **dict.fromkeys(
        (torch.log_softmax, F.log_softmax, Tensor.log_softmax), _log_softmax
    ),
    **dict.fromkeys(
        (torch.relu, F.relu, F.relu_, Tensor.relu_, Tensor.relu), partial(_act, 1)
    ),
    **dict.fromkeys((torch.tanh, Tensor.tanh), partial(_act, 2)),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), partial(_act, 3)),
}
