"""A model as one row: an `nn.Module` as a function of its parameters in a flat row.

A federation's models are the rows of one matrix [N, P], so the ops see matrices and
algorithms see vectors. Float buffers (batch norm's running statistics) are a row of
their own, [b]. Integer buffers and frozen weights are constants of the function: they
are never averaged.

Symbols: N clients; P trainable parameters; b numbers in float buffers; B samples of a
batch; H features that the head sees; K private columns; x, y samples and labels.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pflcore.check import Seed, checked
from pflcore.data._inputs import IGNORED_LABEL, Fields
from pflcore.metrics import ArgumentForm
from pflcore.nn import Dropout
from pflcore.nn._context import forward_state
from pflcore.train._losses import (
    LOGIT_LOSSES,
    REGRESSION_LOSSES,
    Loss,
    ignored_label,
    resolve_loss,
)
from pflcore.train._random import IsolatedDraws
from pflcore.train._recurrent import unroll_recurrent

RANDOM_MODULES = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
# The entries of modules' dicts that hold one tensor: a tied tensor has several.
TensorSlots = list[tuple[dict[str, Any], str]]


class _BoundModule:
    """One thread's copy of a module, whose tensors are replaced before each call."""

    def __init__(
        self, module: nn.Module, names: Iterable[str], buffers: Iterable[str]
    ) -> None:
        self.module = copy.deepcopy(module)
        for layer in self.module.modules():
            if isinstance(layer, _BatchNorm):
                # Nothing reads the count, and a model that adds to it in place is no
                # function of its row.
                layer.num_batches_tracked = None
        tensors = _named_tensors(self.module)
        slots = _tensor_slots(self.module)
        self.params = [slots[id(tensors[name])] for name in names]
        self.buffers = [slots[id(tensors[name])] for name in buffers]
        self.shapes = [tensors[name].shape for name in names]
        self.sizes = [shape.numel() for shape in self.shapes]
        unroll_recurrent(self.module)

    def cut(self, row: Tensor) -> list[Tensor]:
        """The pieces of a row in the shapes of the parameters."""
        pieces = zip(row.split(self.sizes), self.shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _tensor_slots(module: nn.Module) -> dict[int, TensorSlots]:
    """The slots of every parameter and buffer, by the tensor's `id`."""
    slots: dict[int, TensorSlots] = {}
    for layer in module.modules():
        for owner in (layer._parameters, layer._buffers):
            for name, tensor in owner.items():
                slots.setdefault(id(tensor), []).append((owner, name))
    return slots


def _bind(slots: list[TensorSlots], tensors: Iterable[Tensor]) -> None:
    """Puts each tensor into its slots."""
    for tensor_slots, tensor in zip(slots, tensors, strict=True):
        for owner, name in tensor_slots:
            owner[name] = tensor


@checked
class Net:
    """An `nn.Module` as a function of a flat row.

    `nn.Dropout` layers become `pflcore.nn.Dropout`.

    Args:
        build: A module, whose weights become `w0`, or a function without arguments that
            makes one; then `w0 = init(seed)`. What that function draws from torch's
            global generator comes from a generator of the net's own, whatever
            `torch.manual_seed` the function calls.
        loss: `"cross_entropy"`, `"squared"`, `"half_squared"`, `"hinge"`,
            `"binary_cross_entropy"`, or a function or `nn.Module` of (scores, y).
        head: The name of the submodule that counts as the head. By default it is the
            layer that gives the scores, which is found when the model first meets data.
            Before that it is an attribute `head` of the model, its only `nn.Linear`, or
            the last `nn.Linear` of plain `nn.Sequential`s.
        seed: The seed of the initial weights, where a function makes the module.

    >>> net = Net(nn.Linear(4, 3))
    >>> net(net.w0, torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        build: nn.Module | Callable[[], nn.Module],
        loss: Loss = "cross_entropy",
        head: str | None = None,
        seed: Seed = 0,
    ) -> None:
        self.loss_fn = resolve_loss(loss, "loss")
        self.build = build
        self.seed = seed
        self.fields: Fields | None = None  # what `with_fields` gave its module
        built_module = build
        if not isinstance(built_module, nn.Module):
            built_module = self._build_module(seed)
        self.module = _copy_module(built_module)
        _check_weights(self.module)
        _check_layers(self.module)
        _check_hooks(built_module)
        for layer in self.module.modules():
            if type(layer) is nn.Dropout:
                layer.__class__ = Dropout  # type: ignore[assignment]
        self._set_parameters()
        self._set_buffers()
        self.head_name = self._find_head(head)
        self._head_given = head is not None
        # The trial before round 1 sets the next three (`prepare_net`).
        # Whether a last batch of one sample joins the one before it.
        self.merge_last_sample = False
        # Whether there is one score for each label.
        self.single_score = False
        # How the loss takes that score.
        self.argument_form = ArgumentForm()
        self._threads = threading.local()  # one `_BoundModule` a thread and part

    def _set_parameters(self) -> None:
        """Sets what describes a row: names, shapes, slices and the initial row `w0`."""
        named = self.module.named_parameters()
        trainable = {name: p for name, p in named if p.requires_grad}
        self.names = list(trainable)
        self.shapes = [p.shape for p in trainable.values()]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.w0 = self.row(self.module)  # [P]
        self.size = len(self.w0)  # P
        self.dtype = self.w0.dtype
        cuts = pairwise([0, *accumulate(self.sizes)])
        slices = [slice(first, last) for first, last in cuts]
        self.slices = dict(zip(self.names, slices, strict=True))

    def _set_buffers(self) -> None:
        """Sets what describes the float buffers, and their initial row `b0`."""
        named = self.module.named_buffers()
        floats = {name: b for name, b in named if b.is_floating_point()}
        self.buffer_names = list(floats)
        self.buffer_shapes = [b.shape for b in floats.values()]
        self.buffer_sizes = [shape.numel() for shape in self.buffer_shapes]
        pieces = [b.detach().reshape(-1).to(self.w0) for b in floats.values()]
        # `w0[:0]` gives the row its dtype where there is no float buffer.
        self.b0 = torch.cat([self.w0[:0], *pieces])  # [b]
        is_variance: list[bool] = []
        for name, size in zip(self.buffer_names, self.buffer_sizes, strict=True):
            is_variance += [name.endswith("running_var")] * size
        self.variances = torch.tensor(is_variance, dtype=torch.bool)  # [b]

    @property
    def scores_classes(self) -> bool:
        """Whether integer targets are labels, so that there is an accuracy.

        Where there is one score for each label, only a loss of logits tells that.
        """
        loss = self.loss_fn.func if isinstance(self.loss_fn, partial) else self.loss_fn
        if loss in REGRESSION_LOSSES:
            return False
        takes_logits = loss in LOGIT_LOSSES or type(loss) in LOGIT_LOSSES
        return takes_logits or not self.single_score

    @property
    def ignored_label(self) -> int:
        """The label that the loss leaves out; in a run's data it is `IGNORED`."""
        return ignored_label(self.loss_fn)

    # rows and modules -------------------------------------------------------
    def row(self, module: nn.Module) -> Tensor:
        """The trainable parameters of `module` as a new row [P].

        Raises ValueError where the module is not of this net's architecture.
        """
        params = dict(module.named_parameters())
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in params or params[name].shape != shape:
                raise ValueError(
                    f"module: parameter {name!r} is absent or of another shape; give a "
                    "module of the same architecture."
                )
        return torch.cat([params[name].detach().reshape(-1) for name in self.names])

    def load(
        self, module: nn.Module, row: Tensor, buffers: Tensor | None = None
    ) -> nn.Module:
        """Writes `row` [P] (and float `buffers` [b]) into `module` and returns it."""
        self._check(row)
        tensors = _named_tensors(module)
        pieces = dict(zip(self.names, row.split(self.sizes), strict=True))
        if buffers is not None:
            buffer_pieces = buffers.split(self.buffer_sizes)
            pieces |= zip(self.buffer_names, buffer_pieces, strict=True)
        with torch.no_grad():
            for name, piece in pieces.items():
                tensors[name].copy_(piece.view_as(tensors[name]))
        return module

    def init(self, seed: int) -> Tensor:
        """A freshly drawn row [P].

        torch's global random state is neither read nor changed.
        """
        return self.row(self._build_module(seed))

    def mask(self, *patterns: str) -> Tensor:
        """Bool [P] on the CPU: True for parameters that match a pattern.

        Patterns are those of a shell, on the parameters' names: `mask("head.*")`.
        """
        mask = torch.zeros(self.size, dtype=torch.bool)
        for pattern in patterns:
            names = [name for name in self.names if fnmatchcase(name, pattern)]
            if not names:
                raise ValueError(
                    f"patterns: {pattern!r} matches no parameter; the names are "
                    f"{', '.join(self.names)}."
                )
            for name in names:
                mask[self.slices[name]] = True
        return mask

    def split(self, row: Tensor, *patterns: str) -> tuple[Tensor, Tensor]:
        """A model's columns in two parts: shared [..., P - K] and private [..., K].

        Private are the parameters whose names match; without patterns, the head. `join`
        puts the parts of `row` [..., P] together again. An upload or download of the
        shared part alone counts as so many numbers.
        """
        self._check(row)
        shared, private = self._columns(patterns)
        return row[..., shared], row[..., private]

    def join(self, shared: Tensor, private: Tensor, *patterns: str) -> Tensor:
        """The model [..., P] whose parts `split` gives with the same patterns.

        Leading axes are broadcast.
        """
        columns = self._columns(patterns)
        sizes = [len(part) for part in columns]
        if [shared.shape[-1], private.shape[-1]] != sizes:
            raise ValueError(
                f"shared and private: expected {sizes[0]} and {sizes[1]} columns, got "
                f"{shared.shape[-1]} and {private.shape[-1]}; give join the patterns "
                "that split was given."
            )
        axes = torch.broadcast_shapes(shared.shape[:-1], private.shape[:-1])
        parts = [shared.expand(*axes, -1), private.expand(*axes, -1)]
        order = torch.cat(columns).argsort()
        return torch.cat(parts, -1)[..., order]

    def _columns(self, patterns: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """The shared columns [P - K] and the private ones [K]."""
        if not patterns:
            self._require_head()
            patterns = (f"{self._prefix}*",)
        is_private = self.mask(*patterns)
        shared = (~is_private).nonzero()[:, 0]
        private = is_private.nonzero()[:, 0]
        device = self.w0.device
        return shared.to(device), private.to(device)

    def fixed_tensors(self) -> list[Tensor]:
        """The constants [...] of the function: frozen weights and integer buffers.

        They are those of this thread's copy of the module.
        """
        bound_names = {*self.names, *self.buffer_names}
        tensors = _named_tensors(self._bound().module)
        return [tensor for name, tensor in tensors.items() if name not in bound_names]

    def __getstate__(self) -> dict[str, Any]:
        # Bound modules are made anew in each thread.
        return {k: v for k, v in vars(self).items() if k != "_threads"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _threads=threading.local())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Net:
        """The same net on `device`, and in `dtype` unless that is None."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).to(device, dtype)
        other.w0 = self.w0.to(device, dtype)
        other.b0 = self.b0.to(device, dtype)
        other.dtype = other.w0.dtype
        if isinstance(self.loss_fn, nn.Module):  # it may hold class weights
            other.loss_fn = copy.deepcopy(self.loss_fn).to(device, dtype)
        return other

    def with_fields(self, fields: Fields | None) -> Net:
        """The same net for samples of several fields.

        A hook turns a batch of rows into the dict of fields that its module takes.
        """
        if fields is None or fields == self.fields:
            return self
        other = copy.copy(self)
        other.fields = fields
        other.module = copy.deepcopy(self.module)
        other.module.register_forward_pre_hook(fields)
        return other

    # the function of a row ---------------------------------------------------
    def __call__(self, row: Tensor, x: Tensor) -> Tensor:
        """Scores of the model with parameters `row` [P] on a batch `x` [B, ...]."""
        self._check(row)
        bound = self._bound()
        _bind(bound.params, bound.cut(row))
        return self.forward_bound(x)

    def leaves(self, row: Tensor) -> list[Tensor]:
        """The parameters as leaf views of `row` [P].

        They stay bound in this thread until its next call of the net, for
        `forward_bound`. A training loop that moves the row in place need not cut the
        row in every step, nor join the pieces of its gradient.
        """
        bound = self._bound()
        leaves = [piece.requires_grad_() for piece in bound.cut(row.detach())]
        _bind(bound.params, leaves)
        return leaves

    def forward_bound(self, x: Tensor) -> Tensor:
        """Scores of the model with the bound parameters on a batch `x` [B, ...]."""
        bound = self._bound()
        if bound.module.training != forward_state.train:
            bound.module.train(forward_state.train)
        if bound.buffers:
            _bind(bound.buffers, self._buffer_pieces())
        forward_state.random_layer = 0
        scores = bound.module(x)
        if bound.buffers and forward_state.train:
            # Read from the slots: a forward may have put another tensor there.
            pieces = []
            for (owner, name), *_ in bound.buffers:
                pieces.append(owner[name].detach().reshape(-1))
            forward_state.buffers = torch.cat(pieces)
        return scores  # type: ignore[no-any-return]

    def _buffer_pieces(self) -> list[Tensor]:
        """The float buffers of a forward pass in their shapes, as copies.

        Under vmap, batch norm writes into contiguous tensors alone, and silently not
        into views.
        """
        row = self.b0 if forward_state.buffers is None else forward_state.buffers
        pieces = zip(row.split(self.buffer_sizes), self.buffer_shapes, strict=True)
        return [piece.clone().view(shape) for piece, shape in pieces]

    def features(self, row: Tensor, x: Tensor) -> Tensor:
        """The input of the head, [B, H], of the model `row` [P] on a batch `x`."""
        self._require_head()
        head = self._bound().module.get_submodule(self.head_name or "")
        head_inputs: list[Tensor] = []

        def record(_: nn.Module, inputs: Any) -> None:
            head_inputs.extend(inputs)

        with head.register_forward_pre_hook(record):
            self(row, x)
        return head_inputs[0]

    def head(self, row: Tensor, z: Tensor) -> Tensor:
        """The head's scores on features `z` [B, H].

        `row` is a whole row [P] or the head's part of it.
        """
        columns = self.head_slice
        is_head_row = row.shape[-1] == columns.stop - columns.start
        bound = self._bound("head")
        head_row = row if is_head_row else row[columns]
        _bind(bound.params, bound.cut(head_row))
        bound.module.train(forward_state.train)
        return bound.module(z)  # type: ignore[no-any-return]

    @property
    def head_slice(self) -> slice:
        """The columns of the head's parameters in a row."""
        slices = [self.slices[name] for name in self.names if self._in_head(name)]
        if not slices:
            raise ValueError(
                "model: found no trainable head: no attribute `head`, and no nn.Linear "
                "that is known to give the scores before the model has met data; name "
                "it with Net(..., head='name')."
            )
        return slice(slices[0].start, slices[-1].stop)

    def _require_head(self) -> None:
        """Raises ValueError where the model has no head."""
        self.head_slice  # noqa: B018

    @property
    def classes(self) -> int:
        """How many scores the head gives."""
        return int(self.module.get_submodule(self.head_name or "").out_features)  # type: ignore

    def loss(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss [] of the model `row` [P] on one batch [B, ...]."""
        return self.batch_loss(self(row, x), y)

    def batch_loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss [] of a batch's scores and targets [B, ...].

        They reach `loss_fn` in the form that it takes, and with the label that it
        leaves out.
        """
        scores, y = self.argument_form.convert(scores, y)
        if self.ignored_label != IGNORED_LABEL and not y.is_floating_point():
            y = y.masked_fill(y == IGNORED_LABEL, self.ignored_label)
        return self.loss_fn(scores, y)

    # inside -----------------------------------------------------------------
    def _bound(self, part: str = "whole") -> _BoundModule:
        """This thread's copy of the whole module, or of its "head"."""
        bound: _BoundModule | None = self._threads.__dict__.get(part)
        if bound is None:
            if part == "head":
                module = self.module.get_submodule(self.head_name or "")
                head_names = [name for name in self.names if self._in_head(name)]
                names = [name.removeprefix(self._prefix) for name in head_names]
                bound = _BoundModule(module, names, [])
            else:
                bound = _BoundModule(self.module, self.names, self.buffer_names)
            self._threads.__dict__[part] = bound
        return bound

    @property
    def _prefix(self) -> str:
        return f"{self.head_name}." if self.head_name else ""

    def _in_head(self, name: str) -> bool:
        return self.head_name is not None and name.startswith(self._prefix)

    def _build_module(self, seed: int) -> nn.Module:
        with IsolatedDraws(seed):
            if isinstance(self.build, nn.Module):
                # `apply` resets the children first: a parent has the last word.
                return copy.deepcopy(self.build).apply(_reset)
            module = self.build() if callable(self.build) else self.build
        if not isinstance(module, nn.Module):
            raise TypeError(
                "build: expected an nn.Module or a function that makes one, got "
                f"{type(module).__name__}."
            )
        return module

    def _find_head(self, name: str | None) -> str | None:
        """The head's name, as far as it is known without data.

        `name` is the one that the caller chose, or None.
        """
        modules = dict(self.module.named_modules())
        if name is not None:
            if name not in modules:
                children = [child for child, _ in self.module.named_children()]
                raise ValueError(
                    f"head: the model has no submodule {name!r}; its children are "
                    f"{children}."
                )
            return name
        if isinstance(getattr(self.module, "head", None), nn.Module):
            return "head"
        linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
        if len(linear) > 1 and not self._is_called_last(linear[-1]):
            return None
        return linear[-1] if linear else None

    def _is_called_last(self, name: str) -> bool:
        """Whether the last `nn.Linear` is in plain `nn.Sequential`s alone.

        Their order of registration is the order of the calls.
        """
        for parent, module in self.module.named_modules():
            is_around = name.startswith(f"{parent}." if parent else "")
            if is_around and type(module) is not nn.Sequential:
                return False
        return True

    def locate_head(self, used: list[str], called: list[str]) -> None:
        """Sets the head, where the caller named none, from a pass through the model.

        It is the last called `nn.Linear` that holds a parameter on which the loss
        depends, or the submodule `head` around such a layer.

        Args:
            used: The parameters on which the loss depends.
            called: The layers, in the order of their calls.
        """
        if self._head_given:
            return
        for name in reversed(called):
            prefix = f"{name}." if name else ""
            if not any(parameter.startswith(prefix) for parameter in used):
                continue
            is_named_head = name.split(".")[0] == "head"
            is_linear = isinstance(self.module.get_submodule(name), nn.Linear)
            if is_named_head or is_linear:
                self.head_name = "head" if is_named_head else name
                self._threads = threading.local()  # bound heads are outdated
                return

    def _check(self, row: Tensor) -> None:
        if row.shape[-1] != self.size:
            raise ValueError(
                f"row: expected {self.size} parameters for this model, got "
                f"{tuple(row.shape)}; cut extra columns off first."
            )


def _reset(m: nn.Module) -> None:
    """Draws the parameters of one layer anew."""
    reset: Any = getattr(m, "reset_parameters", None)
    if reset is not None:
        reset()
    elif any(p.requires_grad for p in m.parameters(recurse=False)):
        raise ValueError(
            f"model: {type(m).__name__} holds parameters but has no "
            "reset_parameters(); give Net a function that makes the model."
        )


def _copy_module(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except RuntimeError as e:
        # `torch.nn.utils.weight_norm`, for example, keeps a tensor that is no leaf.
        raise ValueError(
            "build: the model cannot be copied, and every thread trains a copy; "
            "instead of torch.nn.utils.weight_norm take "
            "torch.nn.utils.parametrizations.weight_norm, and keep no computed tensors "
            "in the model."
        ) from e


# what cannot be trained -------------------------------------------------------


def _check_weights(module: nn.Module) -> None:
    """Raises ValueError unless parameters are trained, all of one dtype."""
    if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "build: the model has lazy layers, whose sizes are not known yet; give it "
            "a batch first, or name the sizes."
        )
    if any(p.is_meta for p in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "build: the model is on the device 'meta', which holds no numbers; make it "
            "on the CPU, outside of torch.device('meta')."
        )
    dtypes = {str(p.dtype) for p in module.parameters() if p.requires_grad}
    if not dtypes:
        raise ValueError(
            "build: the model has no trainable parameter; set requires_grad on what "
            "should be trained."
        )
    if len(dtypes) > 1:
        raise ValueError(
            f"build: parameters have dtypes {sorted(dtypes)}; convert the model to "
            "one, for example model.float()."
        )


def _check_layers(module: nn.Module) -> None:
    """Raises ValueError for layers that clients cannot train.

    Threads share torch's global generator, so the results of layers that draw from it
    would not repeat.
    """
    for name, m in module.named_modules():
        layer = f"model: {name or 'the module'}"
        is_random = isinstance(m, RANDOM_MODULES) and type(m) is not nn.Dropout
        if is_random and getattr(m, "p", 1) != 0:
            raise ValueError(
                f"{layer} is nn.{type(m).__name__}, which draws from the global "
                "generator; use pflcore.nn.Dropout, which draws from the client's own."
            )
        if isinstance(m, nn.RNNBase | nn.MultiheadAttention) and m.dropout > 0:
            raise ValueError(
                f"{layer} drops out with the global generator; set its dropout to 0."
            )
        if isinstance(m, nn.SyncBatchNorm):
            raise ValueError(
                f"{layer} is nn.SyncBatchNorm, which makes one batch of several "
                "processes', and clients share none; give the model before "
                "convert_sync_batchnorm, with nn.BatchNorm1d, 2d or 3d."
            )
        if isinstance(m, _BatchNorm) and m.track_running_stats and m.momentum is None:
            raise ValueError(
                f"{layer} averages its statistics by an integer count, which no policy "
                "can share; give it a momentum."
            )


def _check_hooks(module: nn.Module) -> None:
    """Raises ValueError for what the clients' copies of a model would not have.

    These are hooks of parameters, and a `forward` that holds the original.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "model: a scripted or traced module takes no parameters of a client; give "
            "the module that it was made of."
        )
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"model: parameter {name!r} has a gradient hook, which clients' copies "
                "would not run; put what it does into the forward pass."
            )
    for name, m in module.named_modules():
        forward = vars(m).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not m:
            raise ValueError(
                f"model: {name or type(m).__name__} was given a forward of its own, "
                "which may hold the original's parameters and not a client's; write it "
                "as a method of a class, and of a compiled module give its _orig_mod."
            )
