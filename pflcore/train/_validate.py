"""Checks whether model, data and loss fit together, and texts of errors.

Checks raise MismatchError. Its text is one sentence in the user's words, with the
user's value, the expected one, and a remedy. Functions `explain_...` return the text
for an error that was raised elsewhere.

Symbols: B samples of a batch; C classes; x, y samples and labels or targets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore.data._federation import Federation
from pflcore.data._inputs import IGNORED_LABEL
from pflcore.metrics import has_one_score_each
from pflcore.nn._context import forward_context
from pflcore.train import _memory as memory
from pflcore.train._losses import LOSSES, loss_name
from pflcore.train._net import Net, scores_of
from pflcore.train._random import IsolatedDraws

# Attributes of a layer that say the width of its input.
WIDTH_ATTRIBUTES = ("in_features", "in_channels", "num_features", "input_size")
# Losses of targets -1 and 1.
SIGNED_LOSSES = (
    nn.SoftMarginLoss,
    F.soft_margin_loss,
    nn.HingeEmbeddingLoss,
    F.hinge_embedding_loss,
)


class MismatchError(ValueError, TypeError):
    """Model, data and loss do not fit together.

    The text is the whole sentence. The error is a TypeError too, since dtypes may be
    the reason.
    """


class NoBatchAxis(MismatchError):
    """A model's scores of a single sample have no batch axis."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__(
            f"model: of one sample it gives scores of shape {list(shape)}, without the "
            "axis of the batch, as squeeze() leaves it; name the axis, as in "
            "squeeze(-1) or flatten(1)."
        )


def check_torch_modes() -> None:
    """Raises MismatchError for global modes of torch that would change a training."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise MismatchError(
            f"torch: the default device is {device}; call "
            f"torch.set_default_device('cpu') and pass device='{device}' to the run."
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise MismatchError(
            f"torch: training needs gradients, and torch.{mode}() is on; set up and "
            "run the simulation outside of it."
        )
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise MismatchError(
            "torch: autocast is on, and clients train in the model's own dtype; set up "
            "and run the simulation outside of it, and for mixed precision take "
            "Training(precision='bf16')."
        )


def check_has_training(data: Federation) -> None:
    """Raises MismatchError where no client has training samples."""
    if not len(data.lists("train").flat):
        raise MismatchError(
            "data: no client has training samples with a label that counts; nothing is "
            "left to be learnt."
        )


def check_modes(net: Net) -> None:
    """Raises MismatchError for a module whose `train()` or `eval()` changes tensors."""
    module = copy.deepcopy(net.module)
    net.set_mode(module, train=True)
    before = {name: t.detach().clone() for name, t in module.state_dict().items()}
    net.set_mode(module, train=False)
    for name, tensor in module.state_dict().items():
        if name in before and not are_equal(tensor, before[name]):
            raise MismatchError(
                f"model: its eval() changes {name!r}, as merging an adapter does, and "
                "clients' models are put there before each pass; switch the merging "
                "off."
            )


def check_dtypes(net: Net, data: Federation) -> None:
    """Raises MismatchError where dtypes or signs of targets do not fit."""
    if net.dtype not in (torch.float32, torch.float64):
        raise MismatchError(
            f"model: its parameters are {net.dtype}, in which small steps are lost; "
            "train it in float32, by model.float()."
        )
    for name, t in (("x", data.x), ("y", data.y)):
        if t.is_floating_point() and t.dtype != net.dtype:
            raise MismatchError(
                f"data: {name} is {t.dtype} and the model's parameters are "
                f"{net.dtype}; give both one dtype, for example by model.to({t.dtype}) "
                f"or Federation.from_clients(..., dtype={net.dtype})."
            )
    _check_signed_targets(net, data)


def check_precision(net: Net, precision: str | None) -> None:
    """Raises MismatchError for mixed precision of a model that is not in float32.

    Autocast casts float32 alone.
    """
    if precision is not None and net.dtype != torch.float32:
        raise MismatchError(
            f"precision: expected a model in float32 for {precision!r}, got "
            f"{net.dtype}; convert it with model.float(), and the data with "
            "Federation.from_clients(..., dtype=torch.float32)."
        )


def _check_signed_targets(net: Net, data: Federation) -> None:
    """Raises MismatchError for a signed loss whose targets are unsigned.

    A signed loss takes targets of -1 and 1. A label 0 would add nothing to it.
    """
    is_signed = net.loss_fn in SIGNED_LOSSES or type(net.loss_fn) in SIGNED_LOSSES
    if is_signed and not bool((data.y.abs() == 1).all()):
        raise MismatchError(
            f"loss: {loss_name(net.loss_fn)} takes targets of -1 and 1, and these are "
            "others; take loss='hinge' or 'binary_cross_entropy' for labels 0 and 1, "
            "or give the federation the targets as floats."
        )


def check_scores(net: Net, data: Federation, scores: Any, y: Tensor) -> None:
    """Raises MismatchError where the model's outputs do not fit the targets.

    Losses of pflcore are known, so their targets are checked in detail.
    """
    if not isinstance(scores, Tensor):
        raise MismatchError(
            "model: expected its forward pass to give one tensor of scores, alone or "
            f"as `logits`, got a {type(scores).__name__}; return the scores alone."
        )
    shape = list(scores.shape)
    targets = list(y.shape)
    if shape[:1] != targets[:1] and len(y) == 1:
        raise NoBatchAxis(shape)
    if shape[:1] != targets[:1]:
        raise MismatchError(
            f"model: expected one row of scores for each of {len(y)} samples, got "
            f"shape {shape}; keep the batch as the first axis."
        )
    name = loss_name(net.loss_fn)
    if net.loss_fn not in LOSSES.values():
        _check_void_labels(net, data, scores, y)
    elif name != "cross_entropy":
        _check_numbers(name, data, scores, y)
    elif not y.is_floating_point():
        _check_classes(data, scores, y)
    elif shape != targets:
        raise MismatchError(
            "loss: 'cross_entropy' takes int64 labels, or probabilities of the scores' "
            f"shape {shape}, and the targets are {y.dtype} of shape {targets}; give "
            "labels as integers, or take loss='squared' for numbers."
        )


def _check_void_labels(net: Net, data: Federation, scores: Tensor, y: Tensor) -> None:
    """Raises MismatchError for labels of steps without an output of the model.

    A user's loss may leave such a label out, but the accuracy does not know that.
    """
    has_steps = y.dim() > 1 and scores.dim() == y.dim() + 1
    outputs = scores.shape[1] if has_steps else 0
    if outputs < 2 or y.is_floating_point() or not net.scores_classes:
        return
    labels = data.y[data.y != IGNORED_LABEL]
    void_labels = labels[(labels < 0) | (labels >= outputs)]
    if void_labels.numel():
        void = int(void_labels[0])
        raise MismatchError(
            f"data: there are labels {void}, and the model has {outputs} outputs; of "
            "labels that count in nothing take "
            f"nn.CrossEntropyLoss(ignore_index={void}) as the loss, or make them "
            f"{IGNORED_LABEL}."
        )


def _check_numbers(name: str, data: Federation, scores: Tensor, y: Tensor) -> None:
    """Raises MismatchError where targets do not fit a loss of single numbers.

    Such a loss compares outputs and targets one by one.
    """
    outputs = scores[0].numel()
    targets = y[0].numel()
    has_steps = scores.dim() > 2 and y.dim() > 2
    if outputs == targets and has_steps and not has_one_score_each(scores, y):
        raise MismatchError(
            f"loss: {name!r} compares outputs and targets one by one, and the model "
            f"gives scores {list(scores.shape)} for targets {list(y.shape)}; transpose "
            "one of them."
        )
    if outputs != targets:
        raise MismatchError(
            f"loss: {name!r} compares outputs and targets one by one, and the model "
            f"gives {outputs} for {targets} target(s) a sample; change the model's "
            "outputs, or take loss='cross_entropy' for classes."
        )
    smallest, largest = torch.aminmax(data.y)
    low = float(smallest)
    high = float(largest)
    are_labels = data.classes is not None and not data.y.is_floating_point()
    if are_labels and low == IGNORED_LABEL:
        raise MismatchError(
            f"loss: {name!r} would count the steps that the mask leaves out; take "
            f"'cross_entropy', or a function that leaves out labels of {IGNORED_LABEL}."
        )
    if name == "hinge" and not (low >= -1 and high <= 1):
        raise MismatchError(
            f"loss: 'hinge' takes two classes, and these labels go from {low:g} to "
            f"{high:g}; take 'cross_entropy'."
        )
    if name == "binary_cross_entropy" and not (low >= 0 and high <= 1):
        raise MismatchError(
            "loss: 'binary_cross_entropy' takes targets from 0 to 1, and these go from "
            f"{low:g} to {high:g}."
        )


def _check_classes(data: Federation, scores: Tensor, y: Tensor) -> None:
    """Raises MismatchError where labels do not fit the outputs, for cross entropy."""
    if scores.dim() != y.dim() + 1 or scores.shape[2:] != y.shape[1:]:
        raise MismatchError(
            "model: 'cross_entropy' takes scores [B, C] for labels [B], or [B, C, ...] "
            f"for [B, ...], and got scores {list(scores.shape)} for labels "
            f"{list(y.shape)}; make labels of one column [n], reshape or transpose "
            "what the model returns, or make the targets floating point."
        )
    labels = data.y if data.relabel is None else data.relabel
    outputs = scores.shape[1]
    labels = labels[labels != IGNORED_LABEL]
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= outputs:
        remedy = "one for each class, and count them from 0"
        if outputs == 1:
            remedy = "or one and loss='binary_cross_entropy' or 'hinge'"
        if data.classes is None:
            remedy = f"{remedy}, or take loss='squared', as classes is None"
        raise MismatchError(
            f"model: it has {outputs} output(s), and the labels go from {low} to "
            f"{high}; give it {high + 1}, {remedy}."
        )


def explain_loss_error(net: Net, scores: Tensor, y: Tensor, e: BaseException) -> str:
    """Text of an error that the loss raised."""
    remedy = ""
    if net.has_own_loss and scores.shape != y.shape and has_one_score_each(scores, y):
        scores = scores.reshape(y.shape)
        y = y.to(scores.dtype)
        remedy = "; with one score for each target, it gets them in the targets' shape"
    if "BCE" in loss_name(net.loss_fn) and scores.numel() != y.numel():
        remedy = (
            "; it compares them one by one: let the model give one output for each "
            "target"
        )
    return (
        f"loss: it fails on scores of shape {list(scores.shape)} and targets of shape "
        f"{list(y.shape)} ({y.dtype}): {first_line(e)}{remedy}."
    )


def check_loss(loss: Any) -> None:
    """Raises MismatchError unless a loss is one number with a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = type(loss).__name__
        if isinstance(loss, Tensor):
            got = f"shape {list(loss.shape)}"
        raise MismatchError(
            f"loss: expected one number for a batch, got {got}; take the mean over its "
            "samples."
        )
    if not loss.requires_grad:
        raise MismatchError(
            "model: the loss depends on no trainable parameter; compute it from the "
            "scores, without detach() or no_grad()."
        )


def check_gradients(grads: Iterable[Tensor | None]) -> None:
    """Raises MismatchError for sparse gradients."""
    if any(g is not None and g.is_sparse for g in grads):
        raise MismatchError(
            "model: its gradients are sparse, and a row's is not; set sparse=False in "
            "its embeddings."
        )


def explain_layer_error(
    name: str, m: nn.Module, inputs: Any, data: Federation, e: BaseException
) -> str:
    """Text of an error that the forward pass raised in a layer.

    `inputs` are those of the layer; without a tensor the text names the samples.
    """
    x: Any = next(iter(inputs), None)
    if not isinstance(x, Tensor):
        return (
            f"model: its forward pass fails on samples of shape {list(data.shape)} "
            f"({data.x.dtype}): {first_line(e)}."
        )
    layer = f"layer {name!r} ({type(m).__name__})" if name else type(m).__name__
    if isinstance(m, nn.Embedding):
        return _explain_embedding_error(layer, m, x, data)
    if not x.is_floating_point():
        return (
            f"data: x holds integers ({data.x.dtype}), and {layer} takes numbers; "
            "convert x to float, or begin the model with nn.Embedding."
        )
    return _explain_width_error(layer, m, x, data, e)


def _explain_embedding_error(
    layer: str, m: nn.Embedding, x: Tensor, data: Federation
) -> str:
    """Text on the input of an embedding that fails."""
    if x.is_floating_point():
        return (
            f"data: {layer} takes integers (tokens), and its input is {x.dtype}; give "
            "x as int64."
        )
    return (
        f"data: x holds tokens from {int(data.x.min())} to {int(data.x.max())}, and "
        f"{layer} knows 0 to {m.num_embeddings - 1}; make it larger."
    )


def _explain_width_error(
    layer: str, m: nn.Module, x: Tensor, data: Federation, e: BaseException
) -> str:
    """Text that names the layer's width, where the input has another width."""
    sample_shape = list(data.shape)
    shapes = f"an input of shape {list(x.shape)}, from samples of shape {sample_shape}"
    attributes = [name for name in WIDTH_ATTRIBUTES if hasattr(m, name)]
    if attributes:
        width = getattr(m, attributes[0])
        if width not in x.shape[1:]:
            return (
                f"model: {layer} has {attributes[0]}={width}, and got {shapes}; make "
                "the model for samples of that shape."
            )
    return f"model: {layer} fails on {shapes}: {first_line(e)}."


def explain_impure_model(net: Net, x: Tensor, y: Tensor, mismatch: str) -> str:
    """Text for a module that is no function of its parameters.

    The text names the cause where one can be found, and otherwise the mismatch.
    """
    module = copy.deepcopy(net.module)
    for train in (True, False):
        scores = _repeated_scores(net, module, x, train, keep_modes=True)
        if not _are_all_equal(scores):
            return (
                "model: its forward pass gives other scores when it is called again on "
                "the same samples; it must use nothing that another pass has changed, "
                "such as a counter or a cache, and no random numbers but those of "
                "pflcore.nn.Dropout."
            )
        if not _are_all_equal(_repeated_scores(net, module, x, train)):
            return _explain_own_mode(net, module, train)
    losses = [net.batch_loss(scores[0], y) for _ in range(3)]
    if not _are_all_equal(losses):
        return (
            "loss: it gives another value when it is called again on the same scores "
            "and targets; it must use nothing that another call has changed, such as a "
            "counter, and no random numbers."
        )
    return (
        "model: as a function of its parameters it is not what the module computes: "
        f"{mismatch}; its forward must use the parameters where they are registered, "
        "and nothing that another pass has changed."
    )


def _repeated_scores(
    net: Net, module: nn.Module, x: Tensor, train: bool, keep_modes: bool = False
) -> list[Tensor]:
    """Scores of three passes with the initial weights, on the same samples.

    There are three, since a counter may begin with a pass that changes nothing. With
    `keep_modes` the mode is set before each pass, and otherwise before the first alone.
    """
    seed = torch.zeros((), dtype=torch.int64, device=x.device)
    net.set_mode(module, train)
    scores = []
    for _ in range(3):
        net.load(module, net.w0, net.b0)
        if keep_modes:
            net.set_mode(module, train)
        with forward_context(train, None, seed), torch.no_grad():
            scores.append(scores_of(module(x)))
    return scores


def _explain_own_mode(net: Net, module: nn.Module, train: bool) -> str:
    """Text on a module whose forward pass leaves submodules in another mode."""
    after_pass = {name: layer.training for name, layer in module.named_modules()}
    net.set_mode(module, train)
    changed = "the model"
    for name, layer in module.named_modules():
        if name and layer.training != after_pass[name]:
            changed = f"{name!r} ({type(layer).__name__})"
            break
    return (
        f"model: its forward pass leaves {changed} in another mode than it found, so "
        "the next pass computes something else; call train() and eval() outside of "
        "forward, or let it restore each submodule's own mode."
    )


def _are_all_equal(tensors: list[Tensor]) -> bool:
    """True where all tensors have the same values."""
    return all(are_equal(tensors[0], other) for other in tensors)


def are_equal(one: Tensor, other: Tensor) -> bool:
    """True where two tensors have the same values; NaN equals NaN."""
    is_equal = torch.equal(one, other)
    return is_equal or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@contextmanager
def reraise_as(sentence: Callable[[Exception], str]) -> Iterator[None]:
    """Context that raises errors as MismatchError with the text `sentence(error)`.

    A MismatchError, and running out of memory, are raised as they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MismatchError) or memory.is_out_of_memory(error):
            raise
        raise MismatchError(sentence(error)) from error


def run_without_global_draws(f: Callable[[], Tensor]) -> None:
    """Calls `f`; raises MismatchError where it draws from torch's global generator.

    That generator stays as it was.
    """
    with IsolatedDraws(0) as draws:
        f()
    if draws.used:
        raise MismatchError(
            "model: its forward pass draws from torch's global generator, which "
            "threads share, so results would not repeat; use pflcore.nn.Dropout, which "
            "draws from the client's own."
        )


def first_line(e: BaseException) -> str:
    """The type of an error and the first line of its text."""
    if not str(e):
        return type(e).__name__
    return f"{type(e).__name__}, {str(e).splitlines()[0]}".rstrip(".")
