"""First batch: a trial of model, data and loss before round 1.

One batch runs through a copy of the module, which shows whether they fit together. It
also shows facts of the model that only data can show, such as its head. Those are set
in the net.

Symbols: B samples of a batch; x, y samples and labels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from pflcore.check import name_few, warn_caller
from pflcore.data._federation import Federation
from pflcore.nn._context import forward_context
from pflcore.nn._copy import copy_module
from pflcore.train import _validate as validate
from pflcore.train._augment import check_augment
from pflcore.train._net import Net, Target, scores_of
from pflcore.train._random import IsolatedDraws
from pflcore.train._training import Precision, Training, autocast
from pflcore.train._validate import MismatchError

FIRST_BATCH_SIZE = 8  # samples


def prepare_net(net: Net, data: Federation, training: Training) -> None:
    """Runs a batch through the module, and sets facts of `net`.

    The facts are: which part is the head, the kind of a target, whether there is one
    score for each label, which parameters play no part (`unused_names`), and whether
    the module can train on a single sample (`merge_last_sample`). Raises MismatchError
    where model, data and loss would train something else than their user means, and
    torch's errors as they are. Warns of parameters without a part that weight decay
    shrinks.
    """
    validate.check_autocast()
    validate.check_has_training(data)
    validate.check_dtypes(net, data, training.precision)
    count = max(2, min(training.batch_size, FIRST_BATCH_SIZE))
    x, y = spread_samples(data, count)
    check_augment(training.transforms, data, x)
    net.target = Target(y.dtype, tuple(y.shape[1:]))
    # Other data may have shown another fact before.
    net.merge_last_sample = False
    with IsolatedDraws(0) as draws:
        try_batch(net, data, x, y, train=False)
        try_batch(net, data, x, y, train=True, precision=training.precision)
    if draws.used:
        raise MismatchError(
            "model: its forward pass draws from torch's global generator, which "
            "threads share, so results would not repeat; use pflcore.nn.Dropout, which "
            "draws from the client's own."
        )
    if training.weight_decay:
        _warn_of_unused_weights(net)
    plan_single_samples(net, data, training)


def _warn_of_unused_weights(net: Net) -> None:
    """Warns of weights that weight decay shrinks, and nothing else moves."""
    if not net.unused_names:
        return
    names = name_few(net.unused_names)
    warn_caller(
        f"weight_decay: it shrinks {names} of the model, which the first batch does "
        "not use (torch's optimizers leave weights without a gradient alone); set "
        "requires_grad_(False) on what shall stay as it is."
    )


def plan_single_samples(net: Net, data: Federation, training: Training) -> None:
    """Sets `net.merge_last_sample` where the model cannot train on a single sample.

    Batch norm, for example, cannot. Where a client's last batch would be one sample,
    that sample then joins the batch before it. Raises MismatchError where a client has
    no other batches than those of one sample.
    """
    size = data.size("train")
    batch_size = training.batch_size
    has_only_singles = (size == 1) | ((batch_size == 1) & (size > 0))
    ends_with_single = size % batch_size == 1
    if not (has_only_singles | ends_with_single).any():
        return
    x, y = spread_samples(data, 1)
    try:
        try_batch(net, data, x, y, train=True, precision=training.precision)
    except Exception as error:
        net.merge_last_sample = True
        if not has_only_singles.any():
            return
        client = int(has_only_singles.nonzero()[0])
        (name,) = data.names_of([client])
        raise MismatchError(
            f"data: client {name} ({int(size[client])} samples, batch_size "
            f"{batch_size}) has a batch of one sample, on which this model cannot "
            f"train ({validate.first_line(error)}); take another batch_size, or leave "
            "clients of one sample out."
        ) from error


def try_batch(
    net: Net,
    data: Federation,
    x: Tensor,  # [B, ...]
    y: Tensor,  # [B, ...]
    train: bool,
    precision: Precision = None,
) -> None:
    """Runs one batch through a copy of the module.

    Sets `net.single_score`. In training mode the backward pass runs too, which shows
    the net its unused parameters and its head: `Net.locate_head` takes the last of the
    called layers that has a parameter in use. Raises MismatchError for scores and
    targets that would be miscounted.
    """
    module = copy_module(net.module)
    net.set_mode(module, train)
    layers = _record_calls(module)
    seed = x.new_zeros((), dtype=torch.int64)
    with (
        forward_context(train, None, seed),
        torch.enable_grad(),
        autocast(precision, x.device),
    ):
        scores = scores_of(module(x))
        validate.check_rows(scores, len(y))
        validate.check_targets(net, data, scores, y)
        net.single_score = scores.numel() == y.numel()
        loss = net.batch_loss(scores, y)
    if not train:
        return
    parameters = dict(module.named_parameters())
    trained = [parameters[name] for name in net.names]
    # The gradient of a parameter that is not used is None.
    grads = torch.autograd.grad(loss, trained, allow_unused=True)
    named_grads = zip(net.names, grads, strict=True)
    used = [name for name, grad in named_grads if grad is not None]
    net.unused_names = [name for name in net.names if name not in used]
    net.locate_head(used, layers)


def _record_calls(module: nn.Module) -> list[str]:
    """List to which each call of a layer adds the layer's name.

    The layers are those without submodules, and every `nn.Linear`.
    """
    calls: list[str] = []

    def record(name: str, *_: Any) -> None:
        calls.append(name)

    for name, layer in module.named_modules():
        is_leaf = not layer._modules
        # A parametrized `nn.Linear` has submodules and is still the head of a model.
        if is_leaf or isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(partial(record, name))
    return calls


def spread_samples(data: Federation, count: int) -> tuple[Tensor, Tensor]:
    """Training samples [B, ...] and labels [B, ...], B = `count`.

    They lie at even distances in the list of all clients' samples, and repeat where the
    federation has fewer.
    """
    samples = data.lists("train").flat
    positions = torch.linspace(0, len(samples) - 1, count).long()
    index = samples[positions.to(samples.device)]
    return data.x[index], data.y[index]
