"""First batch: a trial of model, data and loss before round 1.

One batch runs through a copy of the module, which shows whether they fit together. It
also shows facts of the model that only data can show, such as its head. Those are set
in the net.

Symbols: B samples of a batch; x, y samples and labels.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pflcore.check import warn_caller
from pflcore.data._federation import Federation
from pflcore.nn._context import forward_context
from pflcore.train import _validate as validate
from pflcore.train._augment import check_augment
from pflcore.train._net import Net, Target, scores_of
from pflcore.train._training import Precision, Training, autocast
from pflcore.train._validate import MismatchError

FIRST_BATCH_SIZE = 8  # samples
MAX_NAMED_PARAMETERS = 4  # in the text of a warning


def prepare_net(net: Net, data: Federation, training: Training) -> None:
    """Runs a batch through the module, and sets facts of `net`.

    The facts are: which part is the head, the kind of a target, whether there is one
    score for each label, which parameters play no part (`unused_names`), and whether
    the module can train on a single sample (`merge_last_sample`). Raises MismatchError
    where model, data and loss do not fit together. Warns of parameters without a part
    that weight decay shrinks.
    """
    validate.check_torch_modes()
    validate.check_has_training(data)
    validate.check_modes(net)
    validate.check_dtypes(net, data)
    validate.check_precision(net, training.precision)
    count = max(2, min(training.batch_size, FIRST_BATCH_SIZE))
    x, y = spread_samples(data, count)
    check_augment(training.transforms, data, x)
    net.target = Target(y.dtype, tuple(y.shape[1:]))
    # Other data may have shown another fact before.
    net.merge_last_sample = False
    for train in (False, True):
        precision = training.precision if train else None
        run = partial(first_batch_loss, net, data, x, y, train, precision)
        validate.run_without_global_draws(run)
    if training.weight_decay:
        _warn_of_unused_weights(net)
    plan_single_samples(net, data, training)


def _warn_of_unused_weights(net: Net) -> None:
    """Warns of weights that weight decay shrinks, and nothing else moves."""
    if not net.unused_names:
        return
    names = ", ".join(net.unused_names[:MAX_NAMED_PARAMETERS])
    rest = len(net.unused_names) - MAX_NAMED_PARAMETERS
    if rest > 0:
        names += f" and {rest} more"
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
        precision = training.precision
        first_batch_loss(net, data, x, y, train=True, precision=precision)
    except MismatchError as error:
        net.merge_last_sample = True
        if not has_only_singles.any():
            return
        if isinstance(error, validate.NoBatchAxis):
            raise  # its text names the remedy
        client = int(has_only_singles.nonzero()[0])
        (name,) = data.names_of([client])
        reason = _single_sample_reason(net, error)
        raise MismatchError(
            f"data: client {name} ({int(size[client])} samples, batch_size "
            f"{batch_size}) has a batch of one sample, on which this model cannot "
            f"train{reason}; take another batch_size, or leave clients of one sample "
            "out."
        ) from error


def _single_sample_reason(net: Net, error: MismatchError) -> str:
    """End of a sentence on a model that cannot train on one sample."""
    layers = net.module.modules()
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in layers):
        return ", as batch norm cannot"
    return f" ({str(error).rstrip('.')})"


def first_batch_loss(
    net: Net,
    data: Federation,
    x: Tensor,  # [B, ...]
    y: Tensor,  # [B, ...]
    train: bool,
    precision: Precision = None,
) -> Tensor:
    """Loss of one batch by a copy of the module.

    Sets `net.single_score`. In training mode the backward pass runs too, and the head
    and the unused parameters of `net` are found. Raises MismatchError where a pass
    fails.
    """
    module = copy.deepcopy(net.module)
    net.set_mode(module, train)
    calls = _record_calls(module)

    def explain_forward_error(error: Exception) -> str:
        text = validate.explain_layer_error(*calls[-1], data, error)
        if precision is None:
            return text
        # In evaluation, which is in float32, it did not fail.
        return f"{text.rstrip('.')}; leave out precision={precision!r}."

    seed = x.new_zeros((), dtype=torch.int64)
    with (
        forward_context(train, None, seed),
        torch.enable_grad(),
        autocast(precision, x.device),
    ):
        with validate.reraise_as(explain_forward_error):
            scores = scores_of(module(x))
        validate.check_scores(net, data, scores, y)
        net.single_score = scores.numel() == y.numel()
        with validate.reraise_as(partial(validate.explain_loss_error, net, scores, y)):
            loss = net.batch_loss(scores, y)
        validate.check_loss(loss)
    if train:
        layers = [name for name, _, _ in calls[1:]]
        _first_batch_backward(net, module, loss, layers)
    return loss.detach()


def _record_calls(module: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    """List to which each call of a layer adds (name, layer, inputs).

    The layers are those without submodules, and every `nn.Linear`. The list begins with
    the module itself, so an error before the first layer has a last call, too. The
    inputs of that entry are None.
    """
    calls: list[tuple[str, nn.Module, Any]] = [("", module, (None,))]

    def record(name: str, layer: nn.Module, inputs: Any) -> None:
        calls.append((name, layer, inputs))

    for name, layer in module.named_modules():
        is_leaf = not layer._modules
        # A parametrized `nn.Linear` has submodules and is still the head of a model.
        if is_leaf or isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(partial(record, name))
    return calls


def _first_batch_backward(
    net: Net,
    module: nn.Module,
    loss: Tensor,
    layers: list[str],  # names in the order of the calls
) -> None:
    """Runs the backward pass, which shows the net its head and unused parameters.

    `Net.locate_head` takes the last of the called layers that has such a parameter.
    """

    def explain_backward_error(error: Exception) -> str:
        return f"model: its backward pass fails: {validate.first_line(error)}."

    parameters = dict(module.named_parameters())
    trained = [parameters[name] for name in net.names]
    with validate.reraise_as(explain_backward_error):
        # The loss is a scalar, or has one element. `allow_unused`: the gradient of a
        # parameter that is not used is None.
        grads = torch.autograd.grad(loss.sum(), trained, allow_unused=True)
    validate.check_gradients(grads)
    named_grads = zip(net.names, grads, strict=True)
    used = [name for name, grad in named_grads if grad is not None]
    net.unused_names = [name for name in net.names if name not in used]
    net.locate_head(used, layers)


def spread_samples(data: Federation, count: int) -> tuple[Tensor, Tensor]:
    """Training samples [B, ...] and labels [B, ...], B = `count`.

    They lie at even distances in the list of all clients' samples, and repeat where the
    federation has fewer.
    """
    samples = data.lists("train").flat
    positions = torch.linspace(0, len(samples) - 1, count).long()
    index = samples[positions.to(samples.device)]
    return data.x[index], data.y[index]
