"""A model as one row: any `nn.Module` becomes a function of a flat row of its trainable
parameters.

A federation's models are rows of one [N, P] matrix, so that the ops see matrices and
algorithms see vectors. Float buffers (batch norm's running statistics) live in a row of
their own, [b]; integer buffers are no model and are never averaged.
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
# where a tensor stands: tied ones in several
TensorSlots = list[tuple[dict[str, Any], str]]


class _BoundModule:
    """One thread's private copy of a module, whose tensors are replaced before each
    call."""

    def __init__(
        self, module: nn.Module, names: Iterable[str], buffers: Iterable[str]
    ) -> None:
        self.module = copy.deepcopy(module)
        found: dict[int, TensorSlots] = {}
        for m in self.module.modules():
            if isinstance(m, _BatchNorm):
                # nothing reads the count, and adding to it in place is no function of
                # the row
                m.num_batches_tracked = None
            for owner in (m._parameters, m._buffers):
                for name, t in owner.items():
                    found.setdefault(id(t), []).append((owner, name))
        own = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.params = [found[id(own[n])] for n in names]
        self.buffers = [found[id(own[n])] for n in buffers]
        self.shapes = [own[n].shape for n in names]
        self.sizes = [shape.numel() for shape in self.shapes]
        unroll_recurrent(self.module)

    def cut(self, row: Tensor) -> list[Tensor]:
        """The parameters that a row holds."""
        pieces = zip(row.split(self.sizes), self.shapes, strict=True)
        return [piece.view(shape) for piece, shape in pieces]


def _bind(places: list[TensorSlots], tensors: Iterable[Tensor]) -> None:
    for spots, tensor in zip(places, tensors, strict=True):
        for owner, name in spots:
            owner[name] = tensor


@checked
class Net:
    """An `nn.Module` as a function of a flat row.

    `build` is a module (its weights become `w0`) or a function without arguments that
    makes one (then `w0 = init(seed)`: what it draws from torch's global generator comes
    from one of the net's own, whatever `torch.manual_seed` it calls). `loss` is
    `"cross_entropy"`, `"squared"`, `"half_squared"`, `"hinge"`, or a function or
    `nn.Module` of (scores, y); `head` names the submodule that counts as the head.
    Default: what gives the scores, found when the model first meets data; before that
    an attribute `head` of the model, its only `nn.Linear`, or the last one of plain
    `nn.Sequential`s. `nn.Dropout` layers become `pflcore.nn.Dropout`.

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
        made = build if isinstance(build, nn.Module) else self._build_module(seed)
        module = _copy_module(made)
        _check_weights(module)
        _check_layers(module)
        _check_hooks(made)
        for m in module.modules():
            if type(m) is nn.Dropout:
                m.__class__ = Dropout  # type: ignore[assignment]
        self.module = module
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.names = list(trainable)
        self.shapes = [p.shape for p in trainable.values()]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.w0 = self.row(module)  # [P]
        self.size, self.dtype = len(self.w0), self.w0.dtype  # P
        cuts = [slice(*ends) for ends in pairwise([0, *accumulate(self.sizes)])]
        self.slices = dict(zip(self.names, cuts, strict=True))
        floats = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
        self.buffer_names = list(floats)
        self.buffer_shapes = [b.shape for b in floats.values()]
        self.buffer_sizes = [shape.numel() for shape in self.buffer_shapes]
        rows = (b.detach().reshape(-1).to(self.w0) for b in floats.values())
        self.b0 = torch.cat([self.w0[:0], *rows])  # [b]
        self.variances = torch.tensor(  # [b]
            [
                n.endswith("running_var")
                for n, b in floats.items()
                for _ in range(b.numel())
            ],
            dtype=torch.bool,
        )
        self.head_name = self._find_head(head)
        self._head_given = head is not None
        # does a last batch of one sample, where it cannot train, join another?
        self.merge_last_sample = False
        # is there one score for each label? known once a batch was seen
        self.single_score = False
        # how its loss takes one score a label, known then too
        self.argument_form = ArgumentForm()
        self._threads = threading.local()

    @property
    def scores_classes(self) -> bool:
        """Whether integer targets are labels, so that there is an accuracy: of one
        score a label only a loss of logits says so."""
        loss = self.loss_fn.func if isinstance(self.loss_fn, partial) else self.loss_fn
        return loss not in REGRESSION_LOSSES and (
            not self.single_score or any(c in LOGIT_LOSSES for c in (loss, type(loss)))
        )

    @property
    def ignored_label(self) -> int:
        """The label that the loss leaves out; in a run's data it is `IGNORED`."""
        return ignored_label(self.loss_fn)

    # rows and modules -------------------------------------------------------
    def row(self, module: nn.Module) -> Tensor:
        """The trainable parameters of `module` (of this architecture) as a new row
        [P]."""
        params = dict(module.named_parameters())
        for n, shape in zip(self.names, self.shapes, strict=True):
            if n not in params or params[n].shape != shape:
                raise ValueError(
                    f"module: parameter {n!r} is absent or of another shape; give a "
                    "module of the "
                    "same architecture."
                )
        return torch.cat([params[n].detach().reshape(-1) for n in self.names])

    def load(
        self, module: nn.Module, row: Tensor, buffers: Tensor | None = None
    ) -> nn.Module:
        """Write `row` [P] (and float `buffers` [b]) into `module` and return it."""
        self._check(row)
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        pieces = dict(zip(self.names, row.split(self.sizes), strict=True))
        if buffers is not None:
            pieces |= zip(
                self.buffer_names, buffers.split(self.buffer_sizes), strict=True
            )
        with torch.no_grad():
            for name, piece in pieces.items():
                own[name].copy_(piece.view_as(own[name]))
        return module

    def init(self, seed: int) -> Tensor:
        """A freshly drawn row [P]; torch's global random state is neither read nor
        changed."""
        return self.row(self._build_module(seed))

    def mask(self, *patterns: str) -> Tensor:
        """Bool [P] on the CPU, true where the parameter's name matches one of the shell
        patterns: `mask("head.*")`."""
        m = torch.zeros(self.size, dtype=torch.bool)
        for pattern in patterns:
            hits = [s for n, s in self.slices.items() if fnmatchcase(n, pattern)]
            if not hits:
                raise ValueError(
                    f"patterns: {pattern!r} matches no parameter; the names are "
                    f"{', '.join(self.names)}."
                )
            for s in hits:
                m[s] = True
        return m

    def split(self, row: Tensor, *patterns: str) -> tuple[Tensor, Tensor]:
        """A model's columns in two: (shared, private). Private are the parameters whose
        names match, without patterns the head.

        `row` [..., P] -> [..., P - K], [..., K]; `join` puts them together again. What
        only the shared part of travels is counted so.
        """
        self._check(row)
        shared, private = (row[..., columns] for columns in self._columns(patterns))
        return shared, private

    def join(self, shared: Tensor, private: Tensor, *patterns: str) -> Tensor:
        """The model [..., P] of which `split` with the same patterns gives `shared` and
        `private`; leading axes are broadcast."""
        parts = (shared, private)
        columns = self._columns(patterns)
        sizes = [len(c) for c in columns]
        if [t.shape[-1] for t in parts] != sizes:
            raise ValueError(
                f"shared and private: expected {sizes[0]} and {sizes[1]} columns, got "
                f"{shared.shape[-1]} and {private.shape[-1]}; give join the patterns "
                "that split "
                "was given."
            )
        axes = torch.broadcast_shapes(shared.shape[:-1], private.shape[:-1])
        order = torch.cat(columns).argsort()
        return torch.cat([t.expand(*axes, -1) for t in parts], -1)[..., order]

    def _columns(self, patterns: tuple[str, ...]) -> list[Tensor]:
        """The shared columns [P - K] and the private ones [K]."""
        if not patterns:
            self.head_slice  # noqa: B018  (says in a sentence that there is none)
        private = self.mask(*(patterns or [f"{self._prefix}*"]))
        return [m.nonzero()[:, 0].to(self.w0.device) for m in (~private, private)]

    def fixed_tensors(self) -> list[Tensor]:
        """The tensors [...] that this thread's copy of the module holds beside the row:
        frozen weights and integer buffers."""
        module = self._bound().module
        bound = {*self.names, *self.buffer_names}
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        return [tensor for name, tensor in own.items() if name not in bound]

    def __getstate__(self) -> dict[str, Any]:
        # bound modules are made anew in each thread
        return {k: v for k, v in vars(self).items() if k != "_threads"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _threads=threading.local())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Net:
        """The same net with its rows and constants on `device`, and in `dtype` if
        that is given."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).to(device, dtype)
        other.w0, other.b0 = self.w0.to(device, dtype), self.b0.to(device, dtype)
        other.dtype = other.w0.dtype
        if isinstance(self.loss_fn, nn.Module):  # class weights, for instance
            other.loss_fn = copy.deepcopy(self.loss_fn).to(device, dtype)
        return other

    def with_fields(self, fields: Fields | None) -> Net:
        """The same net for a pool of several fields: its module takes the dict of them
        that a batch of rows holds."""
        if fields is None or fields == self.fields:
            return self
        other = copy.copy(self)
        other.fields, other.module = fields, copy.deepcopy(self.module)
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
        """The parameters as leaf views of `row` [P]: bound in this thread until its
        next call, for `forward_bound`.

        A training loop that moves the row in place saves the cutting of the row, and
        the joining of its gradient, in every step.
        """
        bound = self._bound()
        leaves = [piece.requires_grad_() for piece in bound.cut(row.detach())]
        _bind(bound.params, leaves)
        return leaves

    def forward_bound(self, x: Tensor) -> Tensor:
        """Scores of the model with the parameters that are bound on a batch `x`
        [B, ...]."""
        bound = self._bound()
        if bound.module.training != forward_state.train:
            bound.module.train(forward_state.train)
        if bound.buffers:
            buffers = (
                self.b0 if forward_state.buffers is None else forward_state.buffers
            )
            pieces = zip(
                buffers.split(self.buffer_sizes), self.buffer_shapes, strict=True
            )
            # copies: under vmap batch norm writes into contiguous tensors only, and
            # silently not into views
            _bind(bound.buffers, [piece.clone().view(shape) for piece, shape in pieces])
        forward_state.random_layer = 0
        scores = bound.module(x)
        if bound.buffers and forward_state.train:
            # a forward may have put another tensor there
            after = [
                owner[name].detach().reshape(-1) for (owner, name), *_ in bound.buffers
            ]
            forward_state.buffers = torch.cat(after)
        return scores  # type: ignore[no-any-return]

    def features(self, row: Tensor, x: Tensor) -> Tensor:
        """What the head sees, [B, H]."""
        self.head_slice  # noqa: B018  (says in a sentence that there is none)
        head = self._bound().module.get_submodule(self.head_name or "")
        seen: list[Tensor] = []
        with head.register_forward_pre_hook(lambda _, given: seen.extend(given)):
            self(row, x)
        return seen[0]

    def head(self, row: Tensor, z: Tensor) -> Tensor:
        """The head's scores on features `z` [B, H]; `row` is a whole row [P] or the
        head's part alone."""
        s = self.head_slice
        bound = self._bound("head")
        alone = row.shape[-1] == s.stop - s.start
        _bind(bound.params, bound.cut(row if alone else row[s]))
        bound.module.train(forward_state.train)
        return bound.module(z)  # type: ignore[no-any-return]

    @property
    def head_slice(self) -> slice:
        """Where the head's parameters stand in a row."""
        mine = [s for n, s in self.slices.items() if self._in_head(n)]
        if not mine:
            raise ValueError(
                "model: found no trainable head: no attribute `head`, and no nn.Linear "
                "that is "
                "known to give the scores before the model "
                "has met data; name it with Net(..., head='name')."
            )
        return slice(mine[0].start, mine[-1].stop)

    @property
    def classes(self) -> int:
        """How many scores the head gives."""
        return int(self.module.get_submodule(self.head_name or "").out_features)  # type: ignore

    def loss(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of the model `row` [P] on one batch [B, ...]: a scalar []."""
        return self.batch_loss(self(row, x), y)

    def batch_loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch's scores and targets [B, ...], handed to it in the form
        that it takes, and with the label that it leaves out: a scalar []."""
        scores, y = self.argument_form.convert(scores, y)
        if self.ignored_label != IGNORED_LABEL and not y.is_floating_point():
            y = y.masked_fill(y == IGNORED_LABEL, self.ignored_label)
        return self.loss_fn(scores, y)

    # inside -----------------------------------------------------------------
    def _bound(self, part: str = "whole") -> _BoundModule:
        bound: _BoundModule | None = self._threads.__dict__.get(part)
        if bound is None:
            module = self.module
            names = self.names
            buffers = self.buffer_names
            if part == "head":
                module = module.get_submodule(self.head_name or "")
                buffers = []
                names = [
                    n.removeprefix(self._prefix) for n in names if self._in_head(n)
                ]
            bound = self._threads.__dict__[part] = _BoundModule(module, names, buffers)
        return bound

    @property
    def _prefix(self) -> str:
        return f"{self.head_name}." if self.head_name else ""

    def _in_head(self, name: str) -> bool:
        return self.head_name is not None and name.startswith(self._prefix)

    def _build_module(self, seed: int) -> nn.Module:
        with IsolatedDraws(seed):
            if isinstance(self.build, nn.Module):
                # a parent has the last word
                return copy.deepcopy(self.build).apply(_reset)
            made = self.build() if callable(self.build) else self.build
        if not isinstance(made, nn.Module):
            raise TypeError(
                "build: expected an nn.Module or a function that makes one, got "
                f"{type(made).__name__}."
            )
        return made

    def _find_head(self, asked: str | None) -> str | None:
        """The head's name, as far as it is known without data."""
        modules = dict(self.module.named_modules())
        if asked is None and isinstance(getattr(self.module, "head", None), nn.Module):
            return "head"
        if asked is not None:
            children = [n for n, _ in self.module.named_children()]
            if asked not in modules:
                raise ValueError(
                    f"head: the model has no submodule {asked!r}; its children are "
                    f"{children}."
                )
            return asked
        linear = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
        if len(linear) < 2:
            return linear[0] if linear else None
        last = linear[-1]  # is it what plain nn.Sequentials call last?
        around = [m for n, m in modules.items() if last.startswith(f"{n}." if n else n)]
        return last if all(type(m) is nn.Sequential for m in around) else None

    def locate_head(self, used: list[str], called: list[str]) -> None:
        """The head, where nobody named one: of the layers in the order of their calls
        the last `nn.Linear`, or the part `head` around it, that holds some of the
        parameters `used`, those on which the loss depends."""
        for name in reversed([] if self._head_given else called):
            if any(n.startswith(f"{name}." if name else "") for n in used):
                named = name.split(".")[0] == "head"
                if named or isinstance(self.module.get_submodule(name), nn.Linear):
                    self.head_name, self._threads = (
                        "head" if named else name,
                        threading.local(),
                    )
                    return

    def _check(self, row: Tensor) -> None:
        if row.shape[-1] != self.size:
            raise ValueError(
                f"row: expected {self.size} parameters for this model, got "
                f"{tuple(row.shape)}; cut "
                "extra columns off first."
            )


def _reset(m: nn.Module) -> None:
    own: Any = getattr(m, "reset_parameters", None)
    if own is not None:
        own()
    elif any(p.requires_grad for p in m.parameters(recurse=False)):
        raise ValueError(
            f"model: {type(m).__name__} holds parameters but has no "
            "reset_parameters(); give Net a "
            "function that makes the model."
        )


def _copy_module(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except RuntimeError as e:
        # torch.nn.utils.weight_norm keeps a tensor that is no leaf
        raise ValueError(
            "build: the model cannot be copied, and every thread trains a copy; "
            "instead of "
            "torch.nn.utils.weight_norm take "
            "torch.nn.utils.parametrizations.weight_norm, and keep no computed tensors "
            "in the "
            "model."
        ) from e


# what cannot be trained -------------------------------------------------------


def _check_weights(module: nn.Module) -> None:
    """At least one parameter is trained, and all have one dtype."""
    if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "build: the model has lazy layers, whose sizes are not known yet; give it "
            "a batch "
            "first, or name the sizes."
        )
    if any(p.is_meta for p in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "build: the model is on the device 'meta', which holds no numbers; make it "
            "on the CPU, "
            "outside of torch.device('meta')."
        )
    dtypes = {str(p.dtype) for p in module.parameters() if p.requires_grad}
    if not dtypes:
        raise ValueError(
            "build: the model has no trainable parameter; set requires_grad on what "
            "should be "
            "trained."
        )
    if len(dtypes) > 1:
        raise ValueError(
            f"build: parameters have dtypes {sorted(dtypes)}; convert the model to "
            "one, for "
            "example model.float()."
        )


def _check_layers(module: nn.Module) -> None:
    """Two threads share torch's global generator, so results of what draws from it
    would not repeat."""
    for name, m in module.named_modules():
        who = f"model: {name or 'the module'}"
        random = isinstance(m, RANDOM_MODULES) and type(m) is not nn.Dropout
        if random and getattr(m, "p", 1) != 0:
            raise ValueError(
                f"{who} is nn.{type(m).__name__}, which draws from the global "
                "generator; use "
                "pflcore.nn.Dropout, which draws from the client's own."
            )
        if isinstance(m, nn.RNNBase | nn.MultiheadAttention) and m.dropout > 0:
            raise ValueError(
                f"{who} drops out with the global generator; set its dropout to 0."
            )
        if isinstance(m, nn.SyncBatchNorm):
            raise ValueError(
                f"{who} is nn.SyncBatchNorm, which makes one batch of several "
                "processes', and "
                "clients share none; give the model before convert_sync_batchnorm, "
                "with "
                "nn.BatchNorm1d, 2d or 3d."
            )
        if isinstance(m, _BatchNorm) and m.track_running_stats and m.momentum is None:
            raise ValueError(
                f"{who} averages its statistics by an integer count, which no policy "
                "can share; "
                "give it a momentum."
            )


def _check_hooks(module: nn.Module) -> None:
    """Clients' copies of a model would leave behind hooks of parameters, and a forward
    that holds the original."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "model: a scripted or traced module takes no parameters of a client; give "
            "the module "
            "that it was made of."
        )
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"model: parameter {name!r} has a gradient hook, which clients' copies "
                "would not "
                "run; put what it does into the forward pass."
            )
    for name, m in module.named_modules():
        own = vars(m).get("forward")
        if own is not None and getattr(own, "__self__", None) is not m:
            raise ValueError(
                f"model: {name or type(m).__name__} was given a forward of its own, "
                "which may hold "
                "the original's parameters and not a "
                "client's; write it as a method of a class, and of a compiled module "
                "give its "
                "_orig_mod."
            )
