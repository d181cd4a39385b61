"""The reference of a chain's gradients, in differentiable torch.

It takes all clients at once. It is what runs on a GPU, and where there are no kernels.

Symbols: S or s clients; Q columns of a row; L layers; B samples of a client, n of a
pool; C scores of a sample, or channels; w rows of weights; x, y samples and labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._chain_program import ACTIVATIONS, KINDS
from ._dropout import apply_dropout, hashed_integers

REFERENCE_CHUNK_SAMPLES = 256  # samples of a client that the reference takes at once


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
    counts = is_sample[..., None, None]
    count = is_sample.sum(1, keepdim=True).to(x) * x.shape[3]
    means = torch.where(counts, x, 0.0).sum((1, 3)) / count.clamp(min=1)
    squares = (x - means[:, None, :, None]).square()
    variances = torch.where(counts, squares, 0.0).sum((1, 3)) / count.clamp(min=1)
    # The running variance is that of a sample, which has one number less.
    unbiased = variances * count / (count - 1)
    rate = (count > 0).to(x) * momentum
    running_means.copy_(running_means.lerp(means.detach(), rate))
    running_variances.copy_(running_variances.lerp(unbiased.detach(), rate))
    return means, variances


def sample_losses(
    loss_name: str,
    scores: Tensor,  # [s, B, C]
    y: Tensor,  # [s, B] int64 labels, or numbers; [s, B, C] numbers for "linear"
) -> Tensor:  # [s, B]
    """The loss of each sample.

    "linear" is the sum of the scores, each times its own target. Its targets are the
    slopes of a loss behind the chain, which autograd knows.
    """
    if loss_name == "linear":
        return (scores * y).sum(2)
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
    y: Tensor,  # [n] int64 labels, or numbers of w's dtype; [n, C] for "linear"
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
