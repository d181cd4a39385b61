"""Training, gradients and evaluation of models that are a chain of layers.

One call computes many clients. A model is a *program*: a table of its layers, with
their shapes and the columns of their weights in a flat row (see `encode_layer`). Each
layer takes the output of the one before it. Two kinds of lines name another output, by
the number of its line: one from which a branch begins, and one that is added. The
kernels keep a client's row, activations and gradients in the caches of one core.
Results depend neither on the threads nor on which other clients take part.

- `chain_train_` trains, by SGD or AdamW, and `chain_eval` evaluates. Both are kernels
  of the CPU alone.
- `chain_grad` computes gradients. It has a reference in differentiable torch, which
  takes all clients at once. That is what runs on a GPU.

How a kind of layer is added, and what a chain cannot hold: csrc/README.md.

Symbols: S or s clients; Q columns of a row; L layers; B samples of a client, n of a
pool; C scores of a sample, or channels; w rows of weights; x, y samples and labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import define, kernels, mark_written

# The order of the kinds, and that of the activations from 1 on, are those of the
# kernels: ChainLayer::Kind in csrc/chain/chain.h, and Act in csrc/chain/tile.h.
KINDS = (
    "linear",
    "conv",
    "pool",
    "act",
    "flatten",
    "dropout",
    "norm",
    "scale",
    "leaky",
    "batch_norm",
    "branch",
    "add",
)
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    F.gelu,
)
FIELDS_PER_LAYER = 8
REFERENCE_CHUNK_SAMPLES = 256  # samples of a client that the reference takes at once

# The random numbers of dropout have no state: each is a hash of the client's seed, the
# layer and the place. So a kernel, the reference and `pflcore.nn.Dropout` draw the same
# ones, in any order.
# 2^64 / golden ratio, as int64: successive counters become numbers far apart.
_STEP = -7046029254386353131
# The multipliers of SplitMix's 64-bit finaliser (Steele et al. 2014).
_MIX = (-4658895280553007687, -7723592293110705685)
RANDOM_BITS = 24  # of a random integer


def encode_layer(kind: str, *fields: float) -> list[float]:
    """One line [9] of a program: its kind's number and its fields.

    Zeros fill the fields that a kind does not have. A weight is the number of its first
    column in the row; -1 stands for no bias.

    - linear: outputs, weight [O, I], bias
    - conv: outputs, kernel height, width, stride, padding above, left, weight
      [O, C, KH, KW], bias
    - pool: 1 maximum or 2 mean, window height, width, stride down, across, padding
      above, left. Padding counts as 0 in a mean, and in no maximum
    - act: 1 ReLU, 2 tanh, 3 sigmoid, 4 GELU
    - flatten: no field
    - dropout: the probability, above 0
    - norm: groups, features that share a weight, eps, weight, bias
    - scale: factors, one for each feature; a factor of 0 gives 0, also for NaN
    - leaky: the factor of numbers below 0
    - batch_norm: features of a channel, eps, weight, bias, running mean, running
      variance, momentum, and 1 if the running statistics never change. They are
      numbers of columns of a row of statistics. Frozen ones normalize in training, too
    - branch: an earlier line, counted from 0, or -1 for the samples. The next layer
      takes its output
    - add: an earlier line, or -1. Its output is added to that of the line before

    Args:
        kind: One of `KINDS`.
        fields: The fields in this order, as the kernels read them by their numbers.
    """
    padding = [0.0] * (FIELDS_PER_LAYER - len(fields))
    return [float(KINDS.index(kind)), *fields, *padding]


# the reference ----------------------------------------------------------------


def logical_shift(z: Tensor, bits: int) -> Tensor:
    """The int64 numbers `z`, shifted right with zeros in front.

    Torch's `>>` repeats the sign bit instead.
    """
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def splitmix_hash(z: Tensor) -> Tensor:
    """A bijective hash of int64 numbers, elementwise.

    The bits of the result look independent, even for successive numbers.
    """
    z = (z ^ logical_shift(z, 30)) * _MIX[0]
    z = (z ^ logical_shift(z, 27)) * _MIX[1]
    return z ^ logical_shift(z, 31)


def hashed_integers(
    seed: Tensor,  # [...] int64
    layer: int,
    shape: torch.Size | tuple[int, ...],
) -> Tensor:  # [..., *shape] int64
    """Random integers from 0 to 2^24 - 1.

    They depend on the seed, on `layer` and on each element's place alone.

    Args:
        layer: The number of a layer among those that draw random numbers.
    """
    places = torch.arange(math.prod(shape), device=seed.device) * _STEP
    # Python's numbers do not overflow, so the product is wrapped to int64 here.
    layer_step = (layer * _STEP + (1 << 63)) % (1 << 64) - (1 << 63)
    layer_seed = splitmix_hash(seed + layer_step)
    words = splitmix_hash(layer_seed[..., None] + places)
    return logical_shift(words, 64 - RANDOM_BITS).view(*seed.shape, *shape)


@dataclass
class ForwardPass:
    """Values that all layers of one forward pass share.

    Values between layers are [s, B, features] or [s, B, C, H, W].

    Attributes:
        w: Rows of weights [s, Q].
        seeds: Seeds of dropout [s]; None where nothing is dropped.
        statistics: The running statistics [s, b], changed in training.
        is_sample: True where a position holds a sample, [s, B]; None in evaluation
            mode.
        outputs: The samples, and then the output of each line so far.
        dropout_layers: The number of layers so far that have drawn random numbers.
    """

    w: Tensor
    seeds: Tensor | None
    statistics: Tensor | None
    is_sample: Tensor | None
    outputs: list[Tensor]
    dropout_layers: int = 0

    def part(self, first: float, *sizes: int) -> Tensor:  # [s, *sizes]
        """The weights of this shape whose columns begin at `first`."""
        start = int(first)
        columns = self.w[:, start : start + math.prod(sizes)]
        return columns.view(len(self.w), *sizes)


def forward_program(
    program: Tensor,  # [L, 9]
    w: Tensor,  # [s, Q]
    x: Tensor,  # [s, B, ...]
    seeds: Tensor | None,  # [s]; None: nothing is dropped
    statistics: Tensor | None = None,  # [s, b], changed in training
    is_sample: Tensor | None = None,  # [s, B]; None: evaluation mode
) -> Tensor:  # [s, B, C]
    """The scores of the models `w`, each on its own samples.

    In training mode a batch norm's statistics are those of the samples where
    `is_sample`.
    """
    run = ForwardPass(w, seeds, statistics, is_sample, [x])
    for kind, *fields in program.tolist():
        x = FORWARDS[KINDS[int(kind)]](run, x, fields)
        run.outputs.append(x)
    return x.flatten(2)


# One function for each kind of layer. It takes the pass, the layer's input and the
# fields of its line, and returns its output.


def linear_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of a linear layer on flattened features."""
    outputs, weight, bias = (int(f) for f in fields[:3])
    x = x.flatten(2)
    y = torch.bmm(x, run.part(weight, outputs, x.shape[2]).mT)
    return y if bias < 0 else y + run.part(bias, 1, outputs)


def conv_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of a convolution."""
    outputs, height, width, stride, above, left, weight, bias = map(int, fields)
    s = len(x)
    # All clients in one convolution: each is a group of its channels.
    filters = run.part(weight, outputs, x.shape[2], height, width).flatten(0, 1)
    offsets = None if bias < 0 else run.part(bias, outputs).flatten()
    images = x.transpose(0, 1).flatten(1, 2)
    y = F.conv2d(images, filters, offsets, stride, (above, left), groups=s)
    by_client: Tensor = y.unflatten(1, (s, outputs))
    return by_client.transpose(0, 1)


def pool_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of a pooling layer."""
    form, height, width, down, across, above, left = (int(f) for f in fields[:7])
    pool = F.max_pool2d if form == 1 else F.avg_pool2d
    y = pool(x.flatten(0, 1), (height, width), (down, across), (above, left))
    pooled: Tensor = y.unflatten(0, x.shape[:2])
    return pooled


def act_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of an activation."""
    return ACTIVATIONS[int(fields[0]) - 1](x)


def flatten_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The features of each sample as a vector."""
    return x.flatten(2)


def dropout_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of dropout, which is its input without seeds."""
    if run.seeds is not None:
        numbers = hashed_integers(run.seeds, run.dropout_layers, x.shape[1:])
        x = apply_dropout(x, fields[0], numbers)
    run.dropout_layers += 1
    return x


def norm_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of a group norm or a layer norm."""
    groups, share, _, weight, bias = (int(f) for f in fields[:5])
    y = x.reshape(*x.shape[:2], groups, -1)
    y = F.layer_norm(y, y.shape[-1:], eps=fields[2]).flatten(2)
    if weight >= 0:
        # Neighbouring features share a weight: those of a channel.
        count = y.shape[2] // share
        scale = run.part(weight, count).repeat_interleave(share, 1)
        offset = run.part(bias, count).repeat_interleave(share, 1)
        y = y * scale[:, None] + offset[:, None]
    return y.view(x.shape)


def scale_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The features, each times its factor."""
    factors = run.part(fields[0], 1, x.shape[2])
    return torch.where(factors != 0, x * factors, 0.0)


def leaky_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of a leaky ReLU."""
    return F.leaky_relu(x, fields[0])


def batch_norm_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of a batch norm."""
    share, _, weight, bias = (int(f) for f in fields[:4])
    y = x.flatten(2).unflatten(2, (-1, share))
    y = normalize_channels(y, fields, run.statistics, run.is_sample)
    if weight >= 0:
        channels = y.shape[2]
        offset = run.part(bias, 1, channels, 1)
        y = y * run.part(weight, 1, channels, 1) + offset
    return y.reshape(x.shape)


def branch_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The output of an earlier line."""
    return run.outputs[1 + int(fields[0])]


def add_forward(run: ForwardPass, x: Tensor, fields: list[float]) -> Tensor:
    """The sum of the input and the output of an earlier line."""
    other = run.outputs[1 + int(fields[0])]
    return x + other.view(x.shape)  # samples of n numbers are images [n, 1, 1]


FORWARDS: dict[str, Callable[[ForwardPass, Tensor, list[float]], Tensor]] = {
    "linear": linear_forward,
    "conv": conv_forward,
    "pool": pool_forward,
    "act": act_forward,
    "flatten": flatten_forward,
    "dropout": dropout_forward,
    "norm": norm_forward,
    "scale": scale_forward,
    "leaky": leaky_forward,
    "batch_norm": batch_norm_forward,
    "branch": branch_forward,
    "add": add_forward,
}


def normalize_channels(
    x: Tensor,  # [s, B, C, places]
    fields: list[float],
    statistics: Tensor | None,  # [s, b], changed in training
    is_sample: Tensor | None,  # [s, B]; None: evaluation mode
) -> Tensor:  # [s, B, C, places]
    """The values of a batch norm's input, normalized by channel.

    Args:
        fields: The fields of the layer, see `encode_layer`.
    """
    assert statistics is not None
    eps, momentum = fields[1], fields[6]
    mean, variance, is_frozen = (int(fields[i]) for i in (4, 5, 7))
    channels = x.shape[2]
    means = statistics[:, mean : mean + channels]
    variances = statistics[:, variance : variance + channels]
    if is_sample is not None and not is_frozen:
        means, variances = move_statistics(x, is_sample, means, variances, momentum)
    deviations = (variances + eps).sqrt()[:, None, :, None]
    return (x - means[:, None, :, None]) / deviations


def move_statistics(
    x: Tensor,  # [s, B, C, places]
    is_sample: Tensor,  # [s, B]
    running_means: Tensor,  # [s, C], changed
    running_variances: Tensor,  # [s, C], changed
    momentum: float,
) -> tuple[Tensor, Tensor]:  # [s, C] each
    """Means and variances of channels over a batch, which move the running ones."""
    share = is_sample.to(x)[..., None, None]
    count = is_sample.sum(1, keepdim=True).to(x) * x.shape[3]
    means = (x * share).sum((1, 3)) / count.clamp(min=1)
    squares = (x - means[:, None, :, None]).square() * share
    variances = squares.sum((1, 3)) / count.clamp(min=1)
    # The running variance is that of a sample, which has one number less.
    unbiased = variances * count / (count - 1)
    rate = (count > 0).to(x) * momentum
    running_means.copy_(running_means.lerp(means.detach(), rate))
    running_variances.copy_(running_variances.lerp(unbiased.detach(), rate))
    return means, variances


def apply_dropout(
    x: Tensor,  # [...]
    p: float,
    numbers: Tensor,  # [...] of `hashed_integers`
) -> Tensor:  # [...]
    """The values, with zeros where a random number is below `p`.

    The others are divided by 1 - p. A random number is an integer in units of 2^-24.
    """
    if p >= 1:
        return x * 0
    is_kept = numbers >= round(p * (1 << RANDOM_BITS))
    return x * is_kept.to(x.dtype) / (1 - p)


def sample_losses(
    loss_name: str,
    scores: Tensor,  # [s, B, C]
    y: Tensor,  # [s, B] int64 labels, or numbers
) -> Tensor:  # [s, B]
    """The loss of each sample."""
    if loss_name == "cross_entropy":
        flat_scores = scores.flatten(0, 1)
        losses = F.cross_entropy(flat_scores, y.flatten(), reduction="none")
        return losses.view(y.shape)
    z = scores.reshape(y.shape)
    if loss_name == "hinge":
        sign = torch.where(y > 0, 1.0, -1.0).to(z.dtype)
        return (1 - sign * z).relu()
    if loss_name == "binary_cross_entropy":
        return F.binary_cross_entropy_with_logits(z, y.to(z.dtype), reduction="none")
    factor = 1.0 if loss_name == "squared" else 0.5  # else it is "half_squared"
    return (z - y.to(z.dtype)).square() * factor


def grad_reference(
    w: Tensor,  # [S, Q]
    program: Tensor,  # [L, 9] float64
    loss_name: str,
    c: int,
    h: int,
    wide: int,
    x: Tensor,  # [n, ...]
    y: Tensor,  # [n] int64 labels, or numbers of w's dtype
    relabel: Tensor | None,  # [S, classes]
    order: Tensor,  # [S, longest] places in the pool
    size: Tensor,  # [S]
    seeds: Tensor | None,  # [S]; None: nothing is dropped
    statistics: Tensor | None = None,  # [S, b]
    train: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # [S, Q], [S] float64, [S, b]
    """Gradients of the clients' mean losses, these losses, and the new statistics.

    It is the specification of `chain_grad`.

    Args:
        program: The layers, see `encode_layer`.
        c: Channels of one sample.
        h: Height of one sample.
        wide: Width of one sample.
        x: The pool of samples, from which all clients take theirs.
        relabel: Each label of the pool as each client knows it; None for the same.
        order: The places of each client's samples.
        size: The number of places that each client takes.
        statistics: The statistics of all batch norms, in the columns that the program
            names; None for b = 0.
        train: True where the batch's statistics normalize, and move the running ones.
    """
    statistics = w.new_empty(len(w), 0) if statistics is None else statistics.clone()
    grad = torch.zeros_like(w)
    loss = torch.zeros(len(w), dtype=torch.float64, device=w.device)
    counts = size.to(w.device)[:, None]
    step = REFERENCE_CHUNK_SAMPLES
    if seeds is not None or (train and statistics.shape[1]):
        # Dropout's random numbers depend on a sample's place in the whole batch, and
        # batch norm on all of its samples, so that the batch cannot be cut.
        step = max(1, order.shape[1])
    for first in range(0, order.shape[1], step):
        index = order[:, first : first + step]
        positions = torch.arange(first, first + index.shape[1], device=w.device)
        is_sample = positions < counts
        weight = (is_sample.double() / counts.clamp(min=1)).to(w)
        # Behind a client's last sample its first one fills the place.
        index = torch.where(is_sample, index, order[:, :1])
        labels = y[index] if relabel is None else relabel.gather(1, y[index])
        samples = x[index].reshape(*index.shape, c, h, wide)
        with torch.enable_grad():
            rows = w.detach().requires_grad_()
            counted = is_sample if train else None
            scores = forward_program(program, rows, samples, seeds, statistics, counted)
            losses = sample_losses(loss_name, scores, labels)
            # A position without a sample does not count, whatever its loss.
            total = torch.where(weight != 0, losses * weight, 0.0).sum(1)
            (chunk_grad,) = torch.autograd.grad(total.sum(), rows)
        grad += chunk_grad
        loss += total.detach().double()
    return grad, loss, statistics


# registration -----------------------------------------------------------------

# The arguments that every op has after `w`, in the order of `grad_reference`.
_HEAD = (
    "Tensor program, str loss, int c, int h, int w_, Tensor x, Tensor y, Tensor? "
    "relabel, Tensor order"
)


def _fake_sgd(w: Tensor, *args: Any) -> Tensor:
    """The shape and dtype of losses [S]."""
    return w.new_empty(len(w), dtype=torch.float64)


def _fake_grad(w: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes and dtypes of gradients [S, Q], losses [S] and statistics [S, b]."""
    # The dispatcher leaves out arguments that have their default.
    statistics = args[11] if len(args) > 11 else None
    columns = 0 if statistics is None else statistics.shape[1]
    return w.new_empty(w.shape), _fake_sgd(w), w.new_empty(len(w), columns)


def _fake_eval(w: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes and dtypes of losses [n], right answers [n] and scores."""
    order = args[8]
    classes = args[10]
    num_scores = len(order) if classes else 0
    scores = w.new_empty(num_scores, classes)
    return _fake_sgd(order), order.new_empty(len(order), dtype=torch.bool), scores


_chain_train_: Callable[..., Tensor] = define(
    f"chain_train_(Tensor(a!) w, {_HEAD}, Tensor size, Tensor steps, int batch_size, "
    "bool drop_last, Tensor? seeds, float lr, Tensor? shift, Tensor? mask, float mu, "
    "Tensor? mu_rows, Tensor? anchor, float momentum, float weight_decay, float clip, "
    "Tensor? adamw, Tensor(b!)? grad_sum, Tensor(c!)? statistics=None, "
    "bool merge_single=False) -> Tensor",
    None,
    _fake_sgd,
)


def has_kernels(device: torch.device) -> bool:
    """True where `chain_train_` and `chain_eval` run, which are kernels alone."""
    return device.type == "cpu" and kernels is not None


def chain_train_(
    w: Tensor,  # [S, Q], changed
    *args: Any,
    statistics: Tensor | None = None,  # [S, b], changed
    merge_single: bool = False,
) -> Tensor:  # [S] float64
    """Takes all steps of local training on the rows `w`, in place.

    Autograd learns that `w`, the sums of gradients and the statistics were changed.

    Args:
        args: The program, loss, c, h, width, x, y and relabel of `grad_reference`; then

            - places of the samples in the pool [S, passes, longest]
            - samples and steps of each client [S], on the CPU
            - the size of a batch, and True where a short one is left out
            - seeds of dropout [S, passes], to which the number of the step within the
              pass is added; None without dropout
            - the terms of `sgd_step_`, in the order of the op; AdamW takes its decay
              from the weights, past its means
            - the largest norm of a minibatch's gradient, or infinity
            - for steps of AdamW the rates [3] float64: the betas of the mean and of
              the mean square, and eps; None for steps of SGD
            - the tensor [S, Q] to which gradients are added, or None
        statistics: See `grad_reference`.
        merge_single: True where a last batch of one sample joins the one before it.

    Returns:
        The sum of each client's mean losses of its minibatches.
    """
    loss = _chain_train_(w, *args, statistics, merge_single)
    mark_written(w, args[-1], statistics)
    return loss


chain_grad = define(
    f"chain_grad(Tensor w, {_HEAD}, Tensor size, Tensor? seeds, Tensor? statistics=None"
    ", bool train=False) -> (Tensor, Tensor, Tensor)",
    grad_reference,
    _fake_grad,
)
# It returns losses [n] float64, right answers [n] and scores [n, classes] of the rows
# `w` [S, Q]. One row may be expanded to all clients. Behind the arguments of every op
# stand the places of the samples in the pool [n], client after client; the first of
# each client's places [S + 1], on the CPU; the number of classes, or 0 for no scores;
# the statistics [S, b] of `grad_reference`, which may be expanded, too.
chain_eval: Callable[..., tuple[Tensor, Tensor, Tensor]] = define(
    f"chain_eval(Tensor w, {_HEAD}, Tensor begin, int classes, Tensor? statistics=None)"
    " -> (Tensor, Tensor, Tensor)",
    None,
    _fake_eval,
)
