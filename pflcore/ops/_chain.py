"""Whole local training, gradients and evaluation of models that are a chain of layers,
many clients in one call.

A model is a *program*: a table of layers with their shapes and the places of their
weights in a flat row (see `encode_layer`). The kernels keep a client's row, activations
and gradients in the caches of one core; results depend neither on the threads nor on
who else takes part. Gradients have a reference in differentiable torch, which takes all
clients at once: that is what runs on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import define, kernels, mark_written

KINDS = ("linear", "conv", "pool", "act", "flatten", "dropout", "norm", "scale")
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    F.gelu,
)
FIELDS_PER_LAYER = 8
REFERENCE_CHUNK_SAMPLES = 256  # samples of a client that the references take at once

# 2^64 / golden ratio, as int64: successive counters land far apart
_STEP = -7046029254386353131
# the multipliers of the 64-bit finaliser of SplitMix (Steele et al. 2014)
_MIX = (-4658895280553007687, -7723592293110705685)


def encode_layer(kind: str, *fields: float) -> list[float]:
    """One line of a program: the number of its kind, and

    - linear: outputs, place of the weight [O, I], of the bias (-1: none)
    - conv: outputs, kernel height, width, stride, padding above, left, place of the
      weight [O, C, KH, KW], of the bias
    - pool: 1 maximum or 2 mean, window height, width, stride down, across
    - act: 1 ReLU, 2 tanh, 3 sigmoid, 4 GELU · flatten · dropout: the probability, above
      0
    - norm: groups, features that share a weight, eps, place of the weight, of the bias
      (-1: none)
    - scale: place of a factor for each feature; 0 gives 0 whatever it meets
    """
    return [
        float(KINDS.index(kind)),
        *fields,
        *[0.0] * (FIELDS_PER_LAYER - len(fields)),
    ]


# --- references -------------------------------------------------------------


def logical_shift(z: Tensor, by: int) -> Tensor:
    # >> repeats the sign bit; a hash needs zeros
    return (z >> by) & ((1 << (64 - by)) - 1)


def splitmix_hash(z: Tensor) -> Tensor:
    """A bijective hash of int64 numbers, elementwise: bits of the result look
    independent even for successive numbers."""
    z = (z ^ logical_shift(z, 30)) * _MIX[0]
    z = (z ^ logical_shift(z, 27)) * _MIX[1]
    return z ^ logical_shift(z, 31)


def hashed_integers(
    seed: Tensor, layer: int, shape: torch.Size | tuple[int, ...]
) -> Tensor:
    """Integers from 0 to 2^24 - 1, [..., *shape] for seeds [...], a function of the
    seed, `layer` and each element's place alone."""
    places = torch.arange(math.prod(shape), device=seed.device) * _STEP
    # wrapped by hand: Python's numbers do not overflow
    jump = (layer * _STEP + (1 << 63)) % (1 << 64) - (1 << 63)
    return logical_shift(
        splitmix_hash(splitmix_hash(seed + jump)[..., None] + places), 40
    ).view(*seed.shape, *shape)


def forward_program(  # noqa: C901 (a kind of layer each)
    program: Tensor, w: Tensor, x: Tensor, seeds: Tensor | None
) -> Tensor:
    """Scores [s, B, C] of the models `w` [s, Q] on `x` [s, B, ...]; with `seeds` [s] in
    training mode."""
    s = len(w)
    random = 0

    def part(at: int, *sizes: int) -> Tensor:
        return w[:, at : at + math.prod(sizes)].view(s, *sizes)

    for kind, *field in program.tolist():
        match KINDS[int(kind)], [int(f) for f in field]:
            case "linear", [outputs, weight, bias, *_]:
                x = x.flatten(2)
                y = torch.bmm(x, part(weight, outputs, x.shape[2]).mT)
                x = y if bias < 0 else y + part(bias, 1, outputs)
            case "conv", [outputs, height, width, stride, above, left, weight, bias]:
                filters = part(weight, outputs, x.shape[2], height, width).flatten(0, 1)
                offsets = None if bias < 0 else part(bias, outputs).flatten()
                images = x.transpose(0, 1).flatten(1, 2)
                y = F.conv2d(images, filters, offsets, stride, (above, left), groups=s)
                x = y.unflatten(1, (s, outputs)).transpose(0, 1)
            case "pool", [form, height, width, down, across, *_]:
                pool = F.max_pool2d if form == 1 else F.avg_pool2d
                y = pool(x.flatten(0, 1), (height, width), (down, across))
                x = y.unflatten(0, x.shape[:2])
            case "act", [number, *_]:
                x = ACTIVATIONS[number - 1](x)
            case "flatten", _:
                x = x.flatten(2)
            case "dropout", _:
                if seeds is not None:
                    x = apply_dropout(
                        x, field[0], hashed_integers(seeds, random, x.shape[1:])
                    )
                random += 1
            case "norm", [groups, share, _, weight, bias, *_]:
                y = x.reshape(*x.shape[:2], groups, -1)
                y = F.layer_norm(y, y.shape[-1:], eps=field[2]).flatten(2)
                if weight >= 0:
                    scale, offset = (
                        part(at, y.shape[2] // share).repeat_interleave(share, 1)[
                            :, None
                        ]
                        for at in (weight, bias)
                    )
                    y = y * scale + offset
                x = y.view(x.shape)
            case _, [factors, *_]:
                lam = part(factors, 1, x.shape[2])
                x = torch.where(lam != 0, x * lam, 0.0)
    return x.flatten(2)


def apply_dropout(x: Tensor, p: float, drawn: Tensor) -> Tensor:
    """`x` without the elements whose number from 0 to 2^24 - 1 is below `p` times 2^24,
    the others scaled up."""
    return x * (drawn >= round(p * (1 << 24))).to(x.dtype) / (1 - p) if p < 1 else x * 0


def sample_losses(criterion: str, scores: Tensor, y: Tensor) -> Tensor:
    """Each sample's loss [s, B] of scores [s, B, C] and labels or numbers [s, B]."""
    if criterion == "cross_entropy":
        return F.cross_entropy(
            scores.flatten(0, 1), y.flatten(), reduction="none"
        ).view(y.shape)
    z = scores.reshape(y.shape)
    if criterion == "hinge":
        return (1 - torch.where(y > 0, 1.0, -1.0).to(z.dtype) * z).relu()
    if criterion == "binary_cross_entropy":
        return F.binary_cross_entropy_with_logits(z, y.to(z.dtype), reduction="none")
    return (z - y.to(z.dtype)).square() * (1.0 if criterion == "squared" else 0.5)


def grad_reference(
    w: Tensor,  # [S, Q]
    program: Tensor,  # [L, 9] float64, see `encode_layer`
    criterion: str,
    c: int,
    h: int,
    wide: int,  # of one sample
    x: Tensor,  # [n, ...]
    y: Tensor,  # [n] int64 labels, or numbers of w's dtype
    relabel: Tensor | None,  # [S, classes] a label as each client knows it
    order: Tensor,  # [S, longest] places in the pool
    size: Tensor,  # [S] how many of them each client takes
    seeds: Tensor | None,  # [S] in training mode
) -> tuple[Tensor, Tensor]:  # [S, Q], [S] float64
    """Gradients of the clients' mean losses, and these."""
    grad = torch.zeros_like(w)
    loss = torch.zeros(len(w), dtype=torch.float64, device=w.device)
    of = size.to(w.device)[:, None]
    # a mask's numbers go through the whole batch
    step = max(1, order.shape[1]) if seeds is not None else REFERENCE_CHUNK_SAMPLES
    for a in range(0, order.shape[1], step):
        index = order[:, a : a + step]
        inside = torch.arange(a, a + index.shape[1], device=w.device) < of
        weight = (inside.double() / of.clamp(min=1)).to(w)
        index = torch.where(inside, index, order[:, :1])
        labels = y[index] if relabel is None else relabel.gather(1, y[index])
        samples = x[index].reshape(*index.shape, c, h, wide)
        with torch.enable_grad():
            rows = w.detach().requires_grad_()
            each = sample_losses(
                criterion, forward_program(program, rows, samples, seeds), labels
            )
            # a sample of weight 0 does not count, whatever its loss
            total = torch.where(weight != 0, each * weight, 0.0).sum(1)
            (g,) = torch.autograd.grad(total.sum(), rows)
        grad += g
        loss += total.detach().double()
    return grad, loss


# --- as torch sees them -----------------------------------------------------

# what every call begins with, as `grad_reference` has it
_HEAD = (
    "Tensor program, str criterion, int c, int h, int w_, Tensor x, Tensor y, Tensor? "
    "relabel, "
    "Tensor order"
)


def _fake_sgd(w: Tensor, *args: Any) -> Tensor:
    return w.new_empty(len(w), dtype=torch.float64)


def _fake_grad(w: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return w.new_empty(w.shape), _fake_sgd(w)


def _fake_eval(w: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    order = args[8]
    classes = args[-1]
    scores = w.new_empty(len(order) if classes else 0, classes)
    return _fake_sgd(order), order.new_empty(len(order), dtype=torch.bool), scores


_chain_sgd_: Callable[..., Tensor] = define(
    f"chain_sgd_(Tensor(a!) w, {_HEAD}, Tensor size, Tensor steps, int batch_size, "
    "bool drop_last, "
    "Tensor? seeds, float lr, Tensor? shift, Tensor? mask, float mu, Tensor? mu_rows, "
    "Tensor? "
    "anchor, float momentum, float weight_decay, float clip, Tensor(b!)? grad_sum) -> "
    "Tensor",
    None,
    _fake_sgd,
)


def has_kernels(device: torch.device) -> bool:
    """Whether `chain_sgd_` and `chain_eval`, which are kernels alone, run there."""
    return device.type == "cpu" and kernels is not None


# [S] float64, the sum of batches' mean losses
def chain_sgd_(w: Tensor, *args: Any) -> Tensor:
    """All steps of local SGD on the rows `w` [S, Q], in place; autograd learns that
    these and the sums of gradients are not what they were.

    After the head: places in the pool [S, passes, longest]; on the CPU each client's
    samples and steps [S]; the size of a batch, and whether a short one is left out;
    seeds of dropout [S, passes], to which the place within the pass is added (None: no
    dropout); then as `sgd_step_`, the largest norm of a minibatch's gradient (inf:
    any), and what gradients are added to [S, Q].
    """
    loss = _chain_sgd_(w, *args)
    mark_written(w, args[-1])
    return loss


chain_grad = define(
    f"chain_grad(Tensor w, {_HEAD}, Tensor size, Tensor? seeds) -> (Tensor, Tensor)",
    grad_reference,
    _fake_grad,
)
# Losses [n] float64, right answers [n], scores [n, classes] of the rows `w` [S, Q], one
# expanded where all have one model. After the head: places in the pool [n], client
# after client; where each one's begin [S + 1], on the CPU; 0 classes: no scores are
# wanted.
chain_eval: Callable[..., tuple[Tensor, Tensor, Tensor]] = define(
    f"chain_eval(Tensor w, {_HEAD}, Tensor begin, int classes) -> (Tensor, Tensor, "
    "Tensor)",
    None,
    _fake_eval,
)
