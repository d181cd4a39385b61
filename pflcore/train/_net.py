"""A model as one row: an `nn.Module` as a function of its parameters.

A federation's models are the rows of one matrix [N, P], so the ops see matrices and
algorithms see vectors. Float buffers (batch norm's running statistics) are a row of
their own, [b]. Integer buffers and frozen weights are constants of the function: they
are never averaged.

A module is bound when the parameters of a row stand in it. Every thread binds a copy of
its own (`_bound_module`).

Symbols: N clients; P trainable parameters; b numbers in float buffers; B samples of a
batch; H features that the head sees; K private columns; x, y samples and labels.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from pflcore._device import to_device
from pflcore.check import Seed, checked
from pflcore.data._inputs import IGNORED_LABEL, Fields
from pflcore.metrics import has_one_score_each
from pflcore.nn._context import forward_context, forward_state
from pflcore.nn._copy import copy_module
from pflcore.nn._dropout import use_own_dropout
from pflcore.train._bound_module import (
    BoundModule,
    bind_tensors,
    named_tensors,
    set_mode,
    start_training_mode,
)
from pflcore.train._losses import (
    LOGIT_LOSSES,
    LOSSES,
    REGRESSION_LOSSES,
    Loss,
    ignored_label,
    resolve_loss,
)
from pflcore.train._module_checks import check_copies, check_weights
from pflcore.train._random import IsolatedDraws


class Target(NamedTuple):
    """The kind of one sample's target.

    Attributes:
        dtype: Its dtype: int64 for labels.
        shape: Its shape; () for a single label or number.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


@checked
class Net:
    """An `nn.Module` as a function of a flat row.

    `nn.Dropout` layers become `pflcore.nn.Dropout`, and the dropout inside of torch's
    recurrent and attention layers draws as that does. Raises ValueError for a module
    that clients cannot train.

    A submodule that is in evaluation mode while the module is in training mode stays
    so while clients train, as in a loop that calls `eval()` on it after
    `module.train()`. So does one that a `train()` of the module's own keeps there. Its
    buffers are constants. A module that is in evaluation mode itself trains as after
    `module.train()`.

    Args:
        build: A module, whose weights become `w0`, or a function without arguments that
            makes one; then `w0 = init(seed)`. The draws of that function from torch's
            global generator come from a generator of the net instead, even where the
            function calls `torch.manual_seed`.
        loss: `"cross_entropy"`, `"squared"`, `"half_squared"`, `"hinge"`,
            `"binary_cross_entropy"`, or a function or `nn.Module` of (scores, y).
        head: The name of the submodule that counts as the head. By default it is the
            layer that gives the scores, which is found when the model first meets data.
            Before that it is an attribute `head` of the model, its only `nn.Linear`, or
            the last `nn.Linear` of plain `nn.Sequential`s.
        seed: The seed of the initial weights, where a function makes the module.

    Attributes:
        module: The net's copy of the module, in the modes in which it trains.
        eval_modules: The names of the submodules that stay in evaluation mode.
        w0: The initial row [P].
        b0: The initial row of the float buffers, [b].
        names: The names of the trainable parameters, in the order of a row.
        shapes: Their shapes.
        sizes: Their numbers of elements.
        slices: The columns of each of them in a row, by name.
        size: The length P of a row.
        dtype: The dtype of a row.
        buffer_names: The names of the float buffers, in the order of `b0`.
        variances: Mask [b] of the buffers that are running variances.
        head_name: The name of the head, or None where it is not known.
        loss_fn: The loss, a function (scores, y) -> mean loss of a batch.
        fields: The fields of a sample, where samples have several.
        merge_last_sample: True where a last batch of a single sample joins the batch
            before it, since the model cannot train on one sample.
        single_score: True where there is one score for each label.
        unused_names: The parameters on which the loss of the first batch does not
            depend.
        target: The dtype and the shape of one sample's target, or None.

    The last four, and the name of a head that only data show, are set in a run's own
    copy of the net, which is `simulation.config.net`.

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
        self.has_own_loss = self.loss_fn not in LOSSES.values()
        self.build = build
        self.seed = seed
        self.fields: Fields | None = None
        built_module = build
        if not isinstance(built_module, nn.Module):
            built_module = self._build_module(seed)
        self.module = copy_module(built_module)
        self.eval_modules = start_training_mode(self.module)
        check_weights(self.module)
        check_copies(built_module)
        use_own_dropout(self.module)
        self._set_parameters()
        self._set_buffers()
        self._set_head(self._find_head(head))
        self._head_given = head is not None
        # `prepare_net` sets the next four.
        self.merge_last_sample = False
        self.single_score = False
        self.unused_names: list[str] = []
        self.target: Target | None = None

    def _set_parameters(self) -> None:
        """Sets the names, shapes and slices of a row, and the row `w0`."""
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

    def _set_head(self, name: str | None) -> None:
        """Sets the names of the head and of its parameters."""
        self.head_name = name
        self._prefix = f"{name}." if name else ""
        names = [n for n in self.names if n.startswith(self._prefix)]
        self._head_names = [] if name is None else names
        self._threads = threading.local()  # one `BoundModule` for each thread and part

    def _set_buffers(self) -> None:
        """Sets the description of the float buffers, and their initial row `b0`."""
        floats = {}
        for name, buffer in self.module.named_buffers():
            owner = name.rpartition(".")[0]
            # No pass changes a buffer in evaluation mode, so it is a constant.
            if buffer.is_floating_point() and owner not in self.eval_modules:
                floats[name] = buffer
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
        """True where integer targets are labels, so that there is an accuracy.

        Where there is one score for each target, targets are labels only if the loss
        takes logits.
        """
        loss = self.loss_fn.func if isinstance(self.loss_fn, partial) else self.loss_fn
        if loss in REGRESSION_LOSSES:
            return False
        takes_logits = loss in LOGIT_LOSSES or type(loss) in LOGIT_LOSSES
        return takes_logits or not self.single_score

    @property
    def ignored_label(self) -> int | None:
        """The label that the loss leaves out; None where none is known.

        The data of a run have `IGNORED_LABEL` in its place.
        """
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
        tensors = named_tensors(module)
        pieces = dict(zip(self.names, row.split(self.sizes), strict=True))
        if buffers is not None:
            buffer_pieces = buffers.split(self.buffer_sizes)
            pieces |= zip(self.buffer_names, buffer_pieces, strict=True)
        with torch.no_grad():
            for name, piece in pieces.items():
                tensors[name].copy_(piece.view_as(tensors[name]))
        return module

    def init(self, seed: int) -> Tensor:
        """A newly drawn row [P].

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
        """The shared columns [..., P - K] and the private columns [..., K].

        The private columns are the parameters whose names match a pattern; without
        patterns, the head. `join` puts the parts of `row` [..., P] together again. An
        upload or download of the shared part alone counts as P - K numbers.
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
        return to_device(shared, device), to_device(private, device)

    def fixed_tensors(self) -> list[Tensor]:
        """The constants [...] of the function: frozen weights and integer buffers.

        They are those of this thread's copy of the module.
        """
        bound_names = {*self.names, *self.buffer_names}
        tensors = named_tensors(self._bound().module)
        return [tensor for name, tensor in tensors.items() if name not in bound_names]

    def __getstate__(self) -> dict[str, Any]:
        # Bound modules are made anew in each thread.
        return {k: v for k, v in vars(self).items() if k != "_threads"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _threads=threading.local())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Net:
        """The same net on `device`, and in `dtype` unless that is None."""
        other = copy.copy(self)
        other.module = copy_module(self.module).to(device, dtype)
        other.w0 = self.w0.to(device, dtype)
        other.b0 = self.b0.to(device, dtype)
        other.dtype = other.w0.dtype
        if isinstance(self.loss_fn, nn.Module):  # it may hold class weights
            other.loss_fn = copy_module(self.loss_fn).to(device, dtype)
        return other

    def with_fields(self, fields: Fields | None) -> Net:
        """The same net for samples of several fields.

        A hook turns a batch of rows into the dict of fields that its module takes.
        """
        if fields is None or fields == self.fields:
            return self
        other = copy.copy(self)
        other.fields = fields
        other.module = copy_module(self.module)
        other.module.register_forward_pre_hook(fields, with_kwargs=True)
        return other

    def module_without_fields(self) -> nn.Module:
        """A copy of the module without the hook of `with_fields`."""
        module = copy_module(self.module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Fields):
                del module._forward_pre_hooks[key]
                del module._forward_pre_hooks_with_kwargs[key]
        return module

    def set_mode(self, module: nn.Module, train: bool) -> None:
        """Puts a copy of the net's module into training or evaluation mode.

        In training mode the submodules `eval_modules` stay in evaluation mode.
        """
        set_mode(module, train, self.eval_modules)

    # the function of a row ---------------------------------------------------
    def __call__(self, row: Tensor, x: Tensor) -> Tensor:
        """Scores of the model `row` [P] on a batch `x` [B, ...]."""
        features = self._features_by_kernels(row, x)
        if features is not None:
            return self.head(row, features)
        bound = self._bound()
        bind_tensors(bound.params, bound.cut(row))
        return self.forward_bound(x)

    def _features_by_kernels(self, row: Tensor, x: Tensor) -> Tensor | None:
        """The input [B, H] of the head, where a chain's kernels compute it."""
        self._check(row)
        body = forward_state.body
        if body is None or not body.takes(row, x):
            return None
        features: Tensor = body(row, x)
        return features

    def leaves(self, row: Tensor) -> list[Tensor]:
        """The parameters as leaf views of `row` [P].

        They stay bound in this thread until the thread's next call of the net, so that
        `forward_bound` computes with them. A training loop that moves the row in place
        need not cut the row in every step, nor join the pieces of its gradient.
        """
        bound = self._bound()
        leaves = [piece.requires_grad_() for piece in bound.cut(row.detach())]
        bind_tensors(bound.params, leaves)
        return leaves

    def forward_bound(self, x: Tensor) -> Tensor:
        """Scores of the bound parameters on a batch `x` [B, ...]."""
        bound = self._bound()
        bound.set_mode(forward_state.train)
        if bound.buffers:
            bind_tensors(bound.buffers, self._buffer_pieces())
        forward_state.random_layer = 0
        scores = scores_of(bound.module(x))
        if bound.buffers and forward_state.train:
            # Read from the slots: a forward may have put another tensor there.
            pieces = []
            for (owner, name), *_ in bound.buffers:
                pieces.append(owner[name].detach().reshape(-1))
            forward_state.buffers = torch.cat(pieces)
        return scores  # type: ignore[no-any-return]

    def _buffer_pieces(self) -> list[Tensor]:
        """Copies of the float buffers of a forward pass, in their shapes.

        They are copies because batch norm under vmap writes into contiguous tensors
        only. Into a view it writes nothing, and raises no error.
        """
        row = self.b0 if forward_state.buffers is None else forward_state.buffers
        pieces = zip(row.split(self.buffer_sizes), self.buffer_shapes, strict=True)
        return [piece.clone().view(shape) for piece, shape in pieces]

    @contextmanager
    def in_evaluation_mode(self) -> Iterator[None]:
        """Context in which forward passes are those of evaluation mode.

        They leave batch norm's statistics as they are.
        """
        state = forward_state
        with forward_context(
            train=False,
            buffers=state.buffers,
            seed=state.seed,
            single_client=state.single_client,
            body=state.body,
        ):
            yield

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Context for models that a client compares with, but does not train.

        Forward passes in it are those of evaluation mode, without a gradient.
        """
        with torch.no_grad(), self.in_evaluation_mode():
            yield

    def features(self, row: Tensor, x: Tensor) -> Tensor:
        """The input [B, H] of the head, of model `row` [P] on `x` [B, ...]."""
        self._require_head()
        features = self._features_by_kernels(row, x)
        return self._pass_with_features(row, x)[0] if features is None else features

    def features_and_scores(self, row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input [B, H] of the head, and the scores [B, C], of one forward pass."""
        self._require_head()
        features = self._features_by_kernels(row, x)
        if features is None:
            return self._pass_with_features(row, x)
        return features, self.head(row, features)

    def _pass_with_features(self, row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features and scores of one forward pass of the module."""
        head = self._bound().module.get_submodule(self.head_name or "")
        head_inputs: list[Tensor] = []

        def record(_: nn.Module, inputs: Any) -> None:
            head_inputs.extend(inputs)

        with head.register_forward_pre_hook(record):
            scores = self(row, x)
        return head_inputs[0], scores

    def head(self, row: Tensor, z: Tensor) -> Tensor:
        """The head's scores on features `z` [B, H].

        `row` is a whole row [P] or the head's columns of it.
        """
        columns = self.head_slice
        is_head_row = row.shape[-1] == columns.stop - columns.start
        bound = self._bound("head")
        head_row = row if is_head_row else row[columns]
        bind_tensors(bound.params, bound.cut(head_row))
        bound.set_mode(forward_state.train)
        return bound.module(z)  # type: ignore[no-any-return]

    @property
    def head_slice(self) -> slice:
        """The columns of the head's parameters in a row."""
        if not self.has_trainable_head:
            raise ValueError(
                "model: found no trainable head: no attribute `head`, and no nn.Linear "
                "that is known to give the scores before the model has met data; name "
                "it with Net(..., head='name')."
            )
        first, last = self._head_names[0], self._head_names[-1]
        return slice(self.slices[first].start, self.slices[last].stop)

    @property
    def has_trainable_head(self) -> bool:
        """True where the head is known, and has parameters in a row."""
        return bool(self._head_names)

    def _require_head(self) -> None:
        """Raises ValueError where the model has no head."""
        self.head_slice  # noqa: B018

    @property
    def classes(self) -> int:
        """Number of scores that the head, a linear layer, gives."""
        return self._linear_head().out_features

    @property
    def num_features(self) -> int:
        """Number H of features that the head, a linear layer, sees of a sample."""
        return self._linear_head().in_features

    @property
    def has_linear_head(self) -> bool:
        """True where the head is known, and is a linear layer."""
        if self.head_name is None:
            return False
        return isinstance(self.module.get_submodule(self.head_name), nn.Linear)

    def _linear_head(self) -> nn.Linear:
        """The head; raises ValueError where it is no linear layer."""
        self._require_head()
        head = self.module.get_submodule(self.head_name or "")
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"model: expected an nn.Linear as its head, got {type(head).__name__} "
                f"({self.head_name!r}); name another with Net(..., head=...)."
            )
        return head

    def loss(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Loss [] of the model `row` [P] on a batch [B, ...]."""
        return self.batch_loss(self(row, x), y)

    def batch_loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss [] of a batch's scores and targets [B, ...].

        A loss of the user's own gets one score for each target in the shape of the
        targets, and both as floats, unless it is known to take labels: those reach it
        with the label that it leaves out.
        """
        takes_numbers = self.has_own_loss and self.ignored_label is None
        if takes_numbers and has_one_score_each(scores, y):
            scores = scores.reshape(y.shape)
            y = y if y.is_floating_point() else y.to(scores.dtype)
        # Autocast computes losses in float32. Under vmap it does not reach all of the
        # functions that they consist of.
        device_type = scores.device.type
        is_autocast = torch.amp.is_autocast_available(
            device_type
        ) and torch.is_autocast_enabled(device_type)
        if is_autocast and not forward_state.single_client:
            scores = scores.float()
        label = self.ignored_label
        if label not in (None, IGNORED_LABEL) and not y.is_floating_point():
            y = y.masked_fill(y == IGNORED_LABEL, label)
        return self.loss_fn(scores, y)

    # inside -----------------------------------------------------------------
    def _bound(self, part: str = "whole") -> BoundModule:
        """The copy of the whole module, or of its "head", that this thread has."""
        bound: BoundModule | None = self._threads.__dict__.get(part)
        if bound is None:
            if part == "head":
                module = self.module.get_submodule(self.head_name or "")
                names = [name.removeprefix(self._prefix) for name in self._head_names]
                bound = BoundModule(module, names, [])
            else:
                bound = BoundModule(self.module, self.names, self.buffer_names)
            self._threads.__dict__[part] = bound
        return bound

    def _build_module(self, seed: int) -> nn.Module:
        """A new module, whose weights are drawn by `seed`."""
        with IsolatedDraws(seed):
            if isinstance(self.build, nn.Module):
                # `apply` resets children before their parent, whose own
                # `reset_parameters` may change what theirs have drawn.
                return copy_module(self.build).apply(_reset)
            module = self.build() if callable(self.build) else self.build
        if not isinstance(module, nn.Module):
            raise TypeError(
                "build: expected an nn.Module, or a function without arguments that "
                f"makes one for all clients, got {type(module).__name__}."
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
        """True where all modules around the last `nn.Linear` are plain `nn.Sequential`.

        Their order of registration is the order of the calls.
        """
        for parent, module in self.module.named_modules():
            prefix = f"{parent}." if parent else ""
            is_around = name.startswith(prefix)
            if is_around and type(module) is not nn.Sequential:
                return False
        return True

    def locate_head(self, used: list[str], called: list[str]) -> None:
        """Sets the head from a pass through the model.

        It is the last called `nn.Linear` that holds a parameter on which the loss
        depends, or the submodule `head` around such a layer. A head that the caller
        named stays.

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
                self._set_head("head" if is_named_head else name)
                return

    def _check(self, row: Tensor) -> None:
        """Raises ValueError for a row of another length."""
        if row.shape[-1] != self.size:
            raise ValueError(
                f"row: expected {self.size} parameters for this model, got "
                f"{tuple(row.shape)}; cut extra columns off first."
            )


def scores_of(output: Any) -> Any:
    """The scores in a module's output: the output itself, or its `logits`.

    Models of transformers, and some of torchvision, return an object or a dict that has
    them under this name.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return getattr(output, "logits", output)


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
