"""Models that are a chain of layers, as programs for the kernels.

A chain is a program for the kernels of `pflcore.ops._chain`. A line of it is one layer,
and each layer takes the output of the one before it. Lines of two kinds name another
output: a branch begins at an earlier one, and an addition adds an earlier one.

A copy of the model runs forward, and the functions that it calls are recorded with the
shapes of their inputs and outputs. A known function becomes a line of the program. A
model is no chain where its forward pass

- calls another function, or one on something else than the samples and outputs,
- computes an output that nothing takes, or changes one in place that is taken later,
- has hooks, or uses a tied or frozen weight,
- differs between training and evaluation by more than dropout and batch norm's mode, or
  between sizes of the batch.

The trial before round 1 (`_select_engine`) tells whether the program computes what the
model computes.

Symbols: L lines of a program; S clients of the cohort; C, H, W channels, height and
width of a sample; in functions of lines, `c` is the call of a layer and `m` the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from pflcore.data._federation import Federation
from pflcore.nn import Dropout
from pflcore.nn._context import forward_context
from pflcore.nn._copy import copy_module
from pflcore.nn._factorized import FactorizedLinear
from pflcore.ops._chain import has_kernels
from pflcore.ops._chain_program import encode_layer
from pflcore.train._losses import LOSSES, loss_name
from pflcore.train._net import Net

# From this product of input and output channels on, torch's convolutions are faster.
CONV_MAX_CHANNEL_PRODUCTS = 8000
SHAPE_QUERIES = (
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
)
# Samples of a client that the kernels take at a time (`most_samples` in csrc/chain).
KERNEL_SAMPLES = 128
KERNEL_CONV_SAMPLES = 32
KERNEL_MAX_BYTES = 1 << 26  # of activations in one thread
# The same where a batch is not cut. Of larger batches torch is faster.
WHOLE_BATCH_MAX_BYTES = 1 << 27
HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# The same of all modules.
GLOBAL_HOOK_DICTS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)
Shape = tuple[int, ...]
Lines = Iterator[tuple[Any, ...]]  # arguments of `encode_layer`
# It stands for no layer of the kernels: a log softmax before the cross entropy changes
# nothing.
LOG_SOFTMAX_LINE = ("log_softmax",)


class NotAChain(Exception):
    """The error for a model that is no chain; its text is the reason."""


class LayerCall(NamedTuple):
    """A call of a layer in a forward pass.

    Attributes:
        into: The shape of the input, of one sample.
        out: The shape of the output, of one sample.
        taken: The numbers of the outputs that it takes.
        at: Gives the first column of a weight in a row, and -1 for None.
        statistic_at: Gives the first column of a buffer in a row of statistics, and
            True where it is a constant.
    """

    into: Shape
    out: Shape
    taken: list[int]
    at: Callable[[Tensor | None], int]
    statistic_at: Callable[[Tensor], tuple[int, bool]]


@dataclass(frozen=True)
class Chain:
    """A model and its loss in the form that the kernels take.

    Attributes:
        program: The layers, [L, 9] float64; see `pflcore.ops._chain_program`.
        loss_name: The name of the loss.
        shape: The shape (C, H, W) of one sample.
        classes: The number of the model's outputs.
        dropout: True where the model drops out, so that training needs seeds.
        has_conv: True where there is a convolution.
        normalizes_batches: True where there is a batch norm that training does not
            leave in evaluation mode, so that a batch is not cut.
        fixed_statistics: The statistics of batch norms in evaluation mode, [k]. They
            are constants, and follow the model's buffers in a row of statistics.
        numbers_per_sample: The numbers that a forward pass has of one sample: the
            sample itself and the outputs of all layers.
    """

    program: Tensor
    loss_name: str
    shape: Shape
    classes: int
    dropout: bool
    has_conv: bool
    normalizes_batches: bool
    fixed_statistics: Tensor
    numbers_per_sample: int

    def activation_bytes(self, batch: int, itemsize: int) -> int:
        """Estimate of the bytes that a thread keeps for activations and gradients.

        A minibatch has `batch` samples, and a number takes `itemsize` bytes.
        """
        # Of each number between the layers a thread keeps about three: activations and
        # gradients.
        sample_bytes = 3 * self.numbers_per_sample * itemsize
        if self.normalizes_batches:
            return batch * sample_bytes
        max_samples = KERNEL_CONV_SAMPLES if self.has_conv else KERNEL_SAMPLES
        return min(KERNEL_MAX_BYTES, min(batch, max_samples) * sample_bytes)

    @property
    def fixed_args(self) -> tuple[Any, ...]:
        """The kernels' first arguments after the rows, fixed for a run."""
        return (self.program, self.loss_name, *self.shape)

    def kernel_args(
        self, data: Federation, relabel: Tensor | None, clients: slice
    ) -> tuple[Any, ...]:
        """The kernels' arguments that all their calls have, for some clients.

        `relabel` [S, classes] are labels as each client of the cohort knows them.
        """
        client_labels = None if relabel is None else relabel[clients]
        return (*self.fixed_args, data.x, data.y, client_labels)

    def kernel_statistics(self, buffers: Tensor) -> Tensor | None:
        """Rows [s, b + k] of statistics for the kernels, from buffers [s, b].

        It is None for a model without batch norm.
        """
        if not self.normalizes_batches and not len(self.fixed_statistics):
            return None
        fixed = self.fixed_statistics.to(buffers).expand(len(buffers), -1)
        return torch.cat([buffers, fixed], 1)


def find_chain(net: Net, data: Federation, batch_size: int) -> Chain:
    """The chain that computes what `net` computes on the samples of `data`.

    Raises NotAChain where the model is no chain, or the data or their minibatches of
    `batch_size` samples do not fit the kernels.
    """
    x = data.x
    y = data.y
    chain = compile_chain(net, tuple(data.shape))
    fits = x.dtype == net.dtype and x.is_contiguous()
    require(fits, "samples that do not lie as the kernels read them")
    are_labels = y.dtype == torch.int64
    are_numbers = y.dtype == net.dtype and chain.loss_name != "cross_entropy"
    fits = y.dim() == 1 and (are_labels or are_numbers)
    require(fits, f"targets of {y.dtype} and shape {list(y.shape)}")
    fits = has_kernels(data.device) or not chain.has_conv
    require(fits, "convolutions without the CPU's kernels")
    fits = has_kernels(data.device) or not chain.normalizes_batches
    require(fits, "batch norm without the CPU's kernels")
    batch = min(batch_size, int(data.size("train").max()))
    batch_bytes = chain.activation_bytes(batch, x.element_size())
    fits = batch_bytes <= WHOLE_BATCH_MAX_BYTES
    require(fits, f"batch norm on batches of {batch} samples, where torch is faster")
    return chain


def require(fits: Any, reason: str) -> None:
    """Raises NotAChain unless `fits`."""
    if not fits:
        raise NotAChain(reason)


def compile_chain(net: Net, shape: Shape) -> Chain:
    """The chain that computes what `net` computes on samples of this shape.

    Raises NotAChain where the model is no chain.
    """
    loss = loss_name(net.loss_fn)
    require(LOSSES.get(loss) is net.loss_fn, "a loss of one's own")
    require(len(shape) in (1, 3) and all(shape), f"samples of shape {list(shape)}")
    _check_no_hooks(net.module)
    # Two passes whose modes and batches differ must have the same lines, up to dropout.
    recorder = record_forward(net, shape, train=True, batch=2)
    other_recorder = record_forward(net, shape, train=False, batch=3)
    evaluation_lines = [line for line in recorder.lines if line[0] != "dropout"]
    require(
        other_recorder.lines == evaluation_lines,
        "a forward that differs between training and evaluation, or between batches "
        "of two and three samples",
    )
    lines = recorder.program_lines()
    scores = tuple(recorder.last.shape[1:])
    require(set(recorder.used) == {*net.names}, "weights that the chain does not use")
    statistics = {*net.buffer_names} == set(recorder.used_buffers)
    require(statistics, "buffers that are no batch norm's")
    has_readers = recorder.read == {*range(len(recorder.last_lines) - 1)}
    require(has_readers, "an output that no layer takes")
    require(len(scores) == 1, f"scores of shape {list(scores)}")
    takes_labels = loss == "cross_entropy"
    has_one_score = scores == (1,)
    require(takes_labels != has_one_score, f"{scores[0]} output(s) for {loss}")
    if lines[-1] == LOG_SOFTMAX_LINE:
        require(takes_labels, f"LogSoftmax under {loss}")
        lines = lines[:-1]
    require(LOG_SOFTMAX_LINE not in lines, "a layer behind LogSoftmax")
    kinds = {line[0] for line in lines}
    program = [encode_layer(*line) for line in lines]
    return Chain(
        torch.tensor(program, dtype=torch.float64),
        loss,
        shape=(*shape, 1, 1)[:3],  # a vector is C channels of one number
        classes=scores[0],
        dropout="dropout" in kinds,
        has_conv="conv" in kinds,
        normalizes_batches=bool(net.buffer_names),
        fixed_statistics=torch.cat([net.b0[:0], *recorder.fixed_statistics]),
        numbers_per_sample=recorder.numbers,
    )


def _check_no_hooks(module: nn.Module) -> None:
    """Raises NotAChain where a layer has hooks or its own forward.

    The kernels would leave both out.
    """
    for name, layer in module.named_modules():
        has_hook = any(getattr(layer, hooks) for hooks in HOOK_DICTS)
        has_forward = "forward" in vars(layer)
        changes_layer = has_hook or has_forward or _has_global_hook()
        reason = f"a hook on {name or 'the model'}, or a forward of its own"
        require(not changes_layer, reason)


def _has_global_hook() -> bool:
    """True where a hook is called with every module's forward or backward pass.

    The oldest torch that pflcore takes has no function for it.
    """
    return any(getattr(torch_module, hooks) for hooks in GLOBAL_HOOK_DICTS)


# recording a forward pass -----------------------------------------------------


class _Output(NamedTuple):
    """An output of a call, or the samples.

    Attributes:
        tensor: The output. It is kept, so that no other tensor has its `id`.
        number: 0 for the samples, then the number of the call, counted from 1.
        version: Torch's count of changes in place at the time of the call.
    """

    tensor: Tensor
    number: int
    version: int


class _Recorder(TorchFunctionMode):
    """Context that records the calls of a model as lines of a program.

    A branch and an addition name the number of an output, not of a line: a dropout has
    a line in training alone, so that numbers of lines differ between the modes.

    Attributes:
        copy: The copy of the model.
        last: The output of the last call.
        outputs: The samples and the outputs of all calls, by `id`.
        read: The numbers of the outputs that calls took.
        numbers: The numbers of one sample between all layers.
        lines: The lines of the program.
        last_lines: The last line of each output, by its number; -1 for the samples.
        used: The names of the weights that the calls used.
        used_buffers: The names of the buffers that they used, without the constant
            ones.
        fixed_statistics: The constant buffers that they used.
    """

    def __init__(self, net: Net, x: Tensor) -> None:
        super().__init__()
        self.net = net
        self.last = x
        self.outputs = {id(x): _Output(x, 0, x._version)}
        self.read: set[int] = set()
        self.numbers = x[0].numel()
        self.lines: list[tuple[Any, ...]] = []
        self.last_lines = [-1]
        self.used: list[str] = []
        self.used_buffers: list[str] = []
        self.fixed_statistics: list[Tensor] = []
        self.copy = copy_module(net.module)
        self.names: dict[int, str] = {}  # of trained parameters, by `id`
        for name, parameter in self.copy.named_parameters():
            if name in net.slices:
                self.names[id(parameter)] = name
        for layer in self.copy.modules():
            if type(layer) in OWN_LAYERS:
                # A layer of pflcore is one call. The calls inside it are not recorded.
                layer_lines = partial(OWN_LAYERS[type(layer)], layer)
                layer.forward = partial(self.record_call, layer_lines, layer.forward)

    def record_call(
        self,
        layer_lines: Any,
        function: Callable[..., Tensor],
        *args: Any,
        **options: Any,
    ) -> Tensor:
        """Calls `function`, records it, and returns its output.

        Raises NotAChain where the call does not take an earlier call's output.

        Args:
            layer_lines: The function that makes the lines of the program, or None for a
                function that the kernels do not know.
            function: The function with its arguments.
        """
        name = getattr(function, "__name__", str(function))
        require(layer_lines, name)
        inputs = list(args)
        if layer_lines is _add and len(args) > 1 and args[1] is self.last:
            inputs[:2] = args[1], args[0]  # a + b = b + a, and no branch begins at b
        # The calls inside are no part of the model.
        with torch._C.DisableTorchFunction():
            count = 2 if layer_lines is _add else 1
            taken = [self.output_number(x, name) for x in inputs[:count]]
            require(len(taken) == count, f"{name} without arguments by their places")
            if taken[0] != len(self.last_lines) - 1:
                self.lines.append(("branch", taken[0]))
            into = tuple(inputs[0].shape[1:])
            version = inputs[0]._version
            out = function(*args, **options)
            if out is inputs[0] and out._version == version:
                out = out.view_as(out)  # dropout in evaluation: another output, too
            shapes = (into, tuple(out.shape[1:]))
            call = LayerCall(*shapes, taken, self.weight_offset, self.statistic_offset)
            self.lines += layer_lines(call, *inputs[1:], **options)
            self.numbers += out[0].numel()
            self.outputs[id(out)] = _Output(out, len(self.last_lines), out._version)
        self.last_lines.append(len(self.lines) - 1)
        self.last = out
        return out

    def output_number(self, x: Any, name: str) -> int:
        """The number of an earlier output, which a call of this name takes."""
        output = self.outputs.get(id(x))
        if output is None:
            raise NotAChain(f"{name} of something else than an earlier layer's output")
        require(x._version == output.version, f"{name} of what changed in place")
        self.read.add(output.number)
        return output.number

    def program_lines(self) -> list[tuple[Any, ...]]:
        """The lines, with numbers of lines in place of those of outputs."""
        lines = []
        for kind, *fields in self.lines:
            if kind in ("branch", "add"):
                fields = [self.last_lines[fields[0]]]
            lines.append((kind, *fields))
        return lines

    def weight_offset(self, weight: Tensor | None) -> int:
        """The first column of a weight in the row; -1 for None."""
        if weight is None:
            return -1
        name = self.names.get(id(weight), "")
        is_new = name and name not in self.used
        require(is_new, "a frozen weight, or one that stands in two places")
        self.used.append(name)
        return int(self.net.slices[name].start)

    def statistic_offset(self, buffer: Tensor) -> tuple[int, bool]:
        """The first column of a buffer in a row, and True for a constant."""
        net = self.net
        (name,) = [k for k, b in self.copy.named_buffers() if b is buffer]
        if name in net.buffer_names:
            require(name not in self.used_buffers, "a batch norm in two places")
            self.used_buffers.append(name)
            return sum(net.buffer_sizes[: net.buffer_names.index(name)]), False
        self.fixed_statistics.append(buffer.detach())
        fixed_sizes = [len(b) for b in self.fixed_statistics[:-1]]
        return len(net.b0) + sum(fixed_sizes), True

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in SHAPE_QUERIES:
            return function(*args)
        layer_lines = KNOWN_FUNCTIONS.get(function)
        return self.record_call(layer_lines, function, *args, **(kwargs or {}))


def record_forward(net: Net, shape: Shape, train: bool, batch: int) -> _Recorder:
    """The record of a forward pass of `batch` samples.

    Raises NotAChain where the pass is no chain of known calls.
    """
    recorder = _Recorder(net, net.w0.new_zeros(batch, *shape))
    seed = net.w0.new_zeros((), dtype=torch.int64)
    try:
        with torch.no_grad(), forward_context(train, None, seed), recorder:
            net.set_mode(recorder.copy, train)
            out = recorder.copy(recorder.last)
    except NotAChain:
        raise
    except Exception as error:
        raise NotAChain(
            f"a forward that cannot be followed ({type(error).__name__})"
        ) from error
    require(out is recorder.last, "an output that is not the last layer's")
    return recorder


# lines of known layers --------------------------------------------------------
#
# Each function takes the call of the layer, and torch's arguments behind the layer's
# input. It yields the arguments of `encode_layer` for each line of the program.

# Codes of `encode_layer` for kinds of pooling and of activations.
MAX_POOL = 1
MEAN_POOL = 2
RELU = 1
TANH = 2
SIGMOID = 3
GELU = 4
POOL_OPTIONS = "pooling with gaps, indices, a divisor or ceil_mode"


def _linear(c: LayerCall, weight: Tensor, bias: Tensor | None = None) -> Lines:
    """The line of a linear layer."""
    require(len(c.into) == 1, f"a linear layer on shape {list(c.into)}")
    yield "linear", *c.out, c.at(weight), c.at(bias)


def _factorized(m: FactorizedLinear, c: LayerCall) -> Lines:
    """The lines of a factorized layer: two linear layers around a scale."""
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
    """The line of a convolution."""
    outputs, inputs, *kernel = weight.shape
    above, left = _conv_padding(kernel, padding)
    has_known_steps = _pair(stride) in ((1, 1), (2, 2)) and _pair(dilation) == (1, 1)
    reason = "a convolution with steps, gaps or groups that the kernels do not have"
    require(groups == 1 and has_known_steps, reason)
    is_small = inputs * outputs < CONV_MAX_CHANNEL_PRODUCTS
    reason = f"a convolution of {inputs} x {outputs} channels, where torch is faster"
    require(is_small, reason)
    step = _pair(stride)[0]
    yield "conv", outputs, *kernel, step, above, left, c.at(weight), c.at(bias)


def _conv_padding(kernel: list[int], padding: Any) -> tuple[int, int]:
    """The rows above and the columns left of an image."""
    if padding == "valid":
        return 0, 0
    if padding == "same":
        # torch pads an even kernel differently on two sides.
        is_odd = all(size % 2 for size in kernel)
        require(is_odd, "a convolution of an even kernel with padding='same'")
        height, width = kernel
        return height // 2, width // 2
    above, left = _pair(padding)
    return above, left


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
    """The line of a pooling layer of this kind."""
    has_options = ceil_mode or divisor_override or return_indices
    has_gaps = _pair(dilation) != (1, 1)
    require(not (has_options or has_gaps), POOL_OPTIONS)
    has_padding = _pair(padding) != (0, 0)
    has_one_divisor = kind == MAX_POOL or count_include_pad or not has_padding
    require(has_one_divisor, "a mean over windows that leaves their padding out")
    window = (*_pair(kernel_size), *_pair(stride or kernel_size))
    yield "pool", kind, *window, *_pair(padding)


def _adaptive_pool(
    kind: int, c: LayerCall, output_size: Any, return_indices: bool = False
) -> Lines:
    """The line of pooling to an image of a given size, by windows of one size."""
    require(not return_indices, "pooling with indices")
    sizes = list(zip(c.into[1:], c.out[1:], strict=True))
    is_even = all(before % after == 0 for before, after in sizes)
    reason = (
        f"adaptive pooling of {c.into[1:]} to {c.out[1:]}, which does not divide it"
    )
    require(is_even, reason)
    window = [before // after for before, after in sizes]
    yield "pool", kind, *window, *window


def _image_mean(
    c: LayerCall, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Lines:
    """The lines of a mean over the whole image: pooling to one value."""
    axes = {axis % 4 for axis in dim} if isinstance(dim, tuple | list) else None
    is_image = len(c.into) == 3 and axes == {2, 3} and dtype is None
    require(is_image, "a mean over something else than the whole image")
    yield "pool", MEAN_POOL, *c.into[1:], *c.into[1:]
    if not keepdim:
        yield ("flatten",)


def _view(c: LayerCall, *_: Any, **__: Any) -> Lines:
    """The line of a flatten; a view that changes no shape needs no line."""
    require(c.out in (c.into, (prod(c.into),)), "a view that is no flatten")
    if c.out != c.into:
        yield ("flatten",)


def _add(c: LayerCall, other: Tensor, *, alpha: float = 1) -> Lines:
    """The line of an addition of two outputs."""
    has_one_shape = c.into == c.out == tuple(other.shape[1:])
    require(has_one_shape and alpha == 1, "an addition of two shapes, or of a multiple")
    yield "add", c.taken[1]


def _act(
    kind: int, c: LayerCall, inplace: bool = False, approximate: str = "none"
) -> Lines:
    """The line of an activation of this kind."""
    require(approximate == "none", "an approximate GELU")
    yield "act", kind


def _leaky(c: LayerCall, negative_slope: float = 0.01, inplace: bool = False) -> Lines:
    """The line of a leaky ReLU."""
    require(negative_slope >= 0, f"a LeakyReLU with the slope {negative_slope}")
    yield "leaky", negative_slope


def _dropout(m: Dropout, c: LayerCall) -> Lines:
    """The line of dropout, if it drops anything in the mode of the layer."""
    if m.p > 0 and m.training:
        yield "dropout", m.p


def _group_norm(
    c: LayerCall,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Lines:
    """The line of a group norm."""
    yield "norm", num_groups, prod(c.into[1:]), eps, c.at(weight), c.at(bias)


def _layer_norm(
    c: LayerCall,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Lines:
    """The line of a layer norm: one group, and a weight for each feature."""
    is_whole = tuple(normalized_shape) == c.into
    has_both = (weight is None) == (bias is None)
    reason = f"a layer norm over {list(normalized_shape)} on shape {list(c.into)}"
    require(is_whole and has_both, reason)
    yield "norm", 1, 1, eps, c.at(weight), c.at(bias)


def _batch_norm(m: nn.BatchNorm1d | nn.BatchNorm2d, c: LayerCall) -> Lines:
    """The line of a batch norm."""
    # Without them an evaluation depends on which samples share a batch.
    if m.running_mean is None or m.running_var is None:
        raise NotAChain("batch norm without running statistics")
    weights = (c.at(m.weight), c.at(m.bias))
    mean, is_frozen = c.statistic_at(m.running_mean)
    variance, _ = c.statistic_at(m.running_var)
    form = (prod(c.into[1:]), m.eps)
    yield "batch_norm", *form, *weights, mean, variance, m.momentum, is_frozen


def _log_softmax(
    c: LayerCall, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Lines:
    """The line that stands for a log softmax over the classes."""
    require(dim in (1, -1) and dtype is None, "a LogSoftmax over another axis")
    yield LOG_SOFTMAX_LINE


OWN_LAYERS: dict[type[nn.Module], Callable[..., Lines]] = {
    Dropout: _dropout,
    FactorizedLinear: _factorized,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
}
VIEW_FUNCTIONS = (
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.flatten,
    torch.flatten,
    Tensor.contiguous,
)
LOG_SOFTMAX_FUNCTIONS = (torch.log_softmax, F.log_softmax, Tensor.log_softmax)
ADD_FUNCTIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)
RELU_FUNCTIONS = (torch.relu, F.relu, F.relu_, Tensor.relu_, Tensor.relu)
KNOWN_FUNCTIONS: dict[Any, Callable[..., Lines]] = {
    F.linear: _linear,
    F.conv2d: _conv,
    F.avg_pool2d: partial(_pool, MEAN_POOL),
    F.adaptive_avg_pool2d: partial(_adaptive_pool, MEAN_POOL),
    F.adaptive_max_pool2d: partial(_adaptive_pool, MAX_POOL),
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.gelu: partial(_act, GELU),
    **dict.fromkeys(VIEW_FUNCTIONS, _view),
    **dict.fromkeys(ADD_FUNCTIONS, _add),
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), partial(_pool, MAX_POOL)),
    **dict.fromkeys(LOG_SOFTMAX_FUNCTIONS, _log_softmax),
    **dict.fromkeys(RELU_FUNCTIONS, partial(_act, RELU)),
    **dict.fromkeys((torch.mean, Tensor.mean), _image_mean),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), _leaky),
    **dict.fromkeys((torch.tanh, Tensor.tanh), partial(_act, TANH)),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), partial(_act, SIGMOID)),
}
