"""A model as one row: any `nn.Module` becomes a function of a flat row of its trainable parameters.

A federation's models are rows of one [N, P] matrix, so that the ops see matrices and algorithms see
vectors. Float buffers (batch norm's running statistics) live in a row of their own, [b]; integer
buffers are no model and are never averaged.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parameter import is_lazy

from pflcore.check import Seed, checked
from pflcore.data.inputs import Fields
from pflcore.nn import Dropout
from pflcore.nn.mode import context
from pflcore.train.losses import LOGITS, REGRESSION, Loss, loss_of
from pflcore.train.random import OwnDraws
from pflcore.train.recurrent import write_out

RANDOM_MODULES = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


class _Bound:
    """One thread's private copy of the module (or of a part), whose tensors are replaced before
    each call."""

    def __init__(self, module: nn.Module, params: dict[int, str], buffers: dict[int, str]) -> None:
        self.module = copy.deepcopy(module)
        for m in self.module.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                # nothing reads the count, and adding to it in place is no function of the row
                m.num_batches_tracked = None
        write_out(self.module)
        every = dict(self.module.named_parameters(remove_duplicate=False))
        floats = dict(self.module.named_buffers(remove_duplicate=False))
        self.params = [(i, self._places(n, every, "_parameters")) for i, n in params.items()]
        self.buffers = [(i, self._places(n, floats, "_buffers")) for i, n in buffers.items()]

    def _places(
        self, name: str, every: dict[str, Any], kind: str
    ) -> list[tuple[dict[str, Any], str]]:
        # tied weights stand in several places
        same = [n for n, t in every.items() if t is every[name]]
        return [
            (getattr(self.module.get_submodule(n.rpartition(".")[0]), kind), n.rpartition(".")[2])
            for n in same
        ]

    def bind(self, pieces: Sequence[Tensor], shapes: list[torch.Size]) -> None:
        for i, places in self.params:
            for owner, name in places:
                owner[name] = pieces[i].view(shapes[i])

    def bind_buffers(self, pieces: Sequence[Tensor], shapes: list[torch.Size]) -> None:
        for i, places in self.buffers:
            for owner, name in places:
                owner[name] = pieces[i].view(shapes[i])


@checked
class Net:
    """An `nn.Module` as a function of a flat row.

    `build` is a module (its weights become `w0`) or a function without arguments that makes one
    (then `w0 = init(seed)`: what it draws from torch's global generator comes from one of the net's
    own, whatever `torch.manual_seed` it calls). `criterion` is `"cross_entropy"`, `"squared"`,
    `"half_squared"`, `"hinge"`, or a function or `nn.Module` of (scores, y); `head` names the
    submodule that counts as the head. Default: what gives the scores, found when the model first
    meets data; before that an attribute `head` of the model, its only `nn.Linear`, or the last one
    of plain `nn.Sequential`s. `nn.Dropout` layers become `pflcore.nn.Dropout`.

    >>> net = Net(nn.Linear(4, 3))
    >>> net(net.w0, torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        build: nn.Module | Callable[[], nn.Module],
        criterion: Loss = "cross_entropy",
        head: str | None = None,
        seed: Seed = 0,
    ) -> None:
        self.criterion = loss_of(criterion, "criterion")
        self.build, self.seed = build, seed
        self.fields: Fields | None = None  # what `reading` gave its module
        self.module = self._module()
        trainable = _trainable(self.module)
        self.dtype = next(iter(trainable.values())).dtype
        self.names = list(trainable)
        self.shapes = [p.shape for p in trainable.values()]
        self.sizes = [p.numel() for p in trainable.values()]
        self.size = sum(self.sizes)  # P
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        self.slices = {
            n: slice(e - s, e) for n, s, e in zip(self.names, self.sizes, ends, strict=True)
        }
        self.buffer_names = [n for n, b in self.module.named_buffers() if b.is_floating_point()]
        floats = dict(self.module.named_buffers())
        self.buffer_shapes = [floats[n].shape for n in self.buffer_names]
        self.buffer_sizes = [floats[n].numel() for n in self.buffer_names]
        owners = zip(self.buffer_names, self.buffer_sizes, strict=True)
        # [b]
        self.variances = torch.tensor(
            [n.endswith("running_var") for n, size in owners for _ in range(size)], dtype=torch.bool
        )
        self.w0 = self.row(self.module)  # [P]
        self.b0 = torch.cat(
            [floats[n].detach().reshape(-1).to(self.dtype) for n in self.buffer_names]
            or [torch.empty(0, dtype=self.dtype)]
        )  # [b]
        self.head_name, self._asked = self._find_head(head), head is not None
        # does a last batch of one sample, on which it cannot train, join the one before? once a
        # client has one
        self.joins = False
        # does the model give one score for each label? once a batch was seen
        self.one_score = False
        self._threads = threading.local()

    def _module(self) -> nn.Module:
        """A module of the net's own, with what it may hold."""
        build = self.build
        if isinstance(build, nn.Module):
            module = _copied(build)
        elif callable(build):
            module = self._made(self.seed)
        else:
            raise TypeError(
                "build: expected an nn.Module or a function that makes one, got "
                f"{type(build).__name__}."
            )
        if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            raise ValueError(
                "build: the model has lazy layers, whose sizes are not known yet; give it a batch "
                "first, or name the sizes."
            )
        for m in module.modules():
            if type(m) is nn.Dropout:
                m.__class__ = Dropout  # type: ignore[assignment]
        refuse_random(module)
        # hooks of parameters do not survive a copy
        refuse_detours(build if isinstance(build, nn.Module) else module)
        return module

    @property
    def scores_classes(self) -> bool:
        """Whether integer targets are labels, so that there is an accuracy: of one score a label
        only a loss of logits says so."""
        return self.criterion not in REGRESSION and (
            not self.one_score or any(c in LOGITS for c in (self.criterion, type(self.criterion)))
        )

    # rows and modules -------------------------------------------------------
    def row(self, module: nn.Module) -> Tensor:
        """The trainable parameters of `module` (of this architecture) as a new row [P]."""
        params = dict(module.named_parameters())
        missing = [
            n
            for n in self.names
            if n not in params or params[n].shape != self.shapes[self.names.index(n)]
        ]
        if missing:
            raise ValueError(
                f"module: parameter {missing[0]!r} is absent or of another shape; give a module of "
                "the same architecture."
            )
        return torch.cat([params[n].detach().reshape(-1) for n in self.names])

    def load(self, module: nn.Module, row: Tensor, buffers: Tensor | None = None) -> nn.Module:
        """Write `row` [P] (and float `buffers` [b]) into `module` and return it."""
        self._check(row)
        params, floats = dict(module.named_parameters()), dict(module.named_buffers())
        with torch.no_grad():
            for n, s in self.slices.items():
                params[n].copy_(row[s].view_as(params[n]))
            if buffers is not None:
                for n, b in zip(self.buffer_names, buffers.split(self.buffer_sizes), strict=True):
                    floats[n].copy_(b.view_as(floats[n]))
        return module

    def init(self, seed: int) -> Tensor:
        """A freshly drawn row [P]; torch's global random state is neither read nor changed."""
        return self.row(self._made(seed))

    def mask(self, *patterns: str) -> Tensor:
        """Bool [P] on the CPU, true where the parameter's name matches one of the shell patterns:
        `mask("head.*")`."""
        m = torch.zeros(self.size, dtype=torch.bool)
        for pattern in patterns:
            for n in self._matches(pattern):
                m[self.slices[n]] = True
        return m

    def split(self, row: Tensor, *patterns: str) -> tuple[Tensor, Tensor]:
        """A model's columns in two: (shared, private). Private are the parameters whose names
        match, without patterns the head.

        `row` [..., P] -> [..., P - K], [..., K]; `join` puts them together again. What only the
        shared part of travels is counted so.
        """
        self._check(row)
        blocks = self._blocks(patterns)
        pieces = row.split([size for size, _ in blocks], -1)
        shared, private = (
            [p for p, (_, mine) in zip(pieces, blocks, strict=True) if mine is side]
            for side in (False, True)
        )
        return torch.cat(shared, -1) if shared else row[..., :0], torch.cat(
            private, -1
        ) if private else row[..., :0]

    def join(self, shared: Tensor, private: Tensor, *patterns: str) -> Tensor:
        """The model [..., P] of which `split` with the same patterns gives `shared` and `private`;
        leading axes are broadcast."""
        blocks = self._blocks(patterns)
        sizes = [[size for size, mine in blocks if mine is side] for side in (False, True)]
        if [shared.shape[-1], private.shape[-1]] != [sum(s) for s in sizes]:
            raise ValueError(
                f"shared and private: expected {sum(sizes[0])} and {sum(sizes[1])} columns, got "
                f"{shared.shape[-1]} and "
                f"{private.shape[-1]}; give join the patterns that split was given."
            )
        axes = torch.broadcast_shapes(shared.shape[:-1], private.shape[:-1])
        both = [
            iter(t.expand(*axes, -1).split(s, -1))
            for t, s in zip((shared, private), sizes, strict=True)
        ]
        return torch.cat([next(both[mine]) for _, mine in blocks], -1)

    def _blocks(self, patterns: tuple[str, ...]) -> list[tuple[int, bool]]:
        """The row as neighbouring columns of one kind: (how many, whether they are private)."""
        for pattern in patterns:
            self._matches(pattern)
        if not patterns:
            self.head_slice  # noqa: B018  (says in a sentence that there is none)
        blocks: list[tuple[int, bool]] = []
        for name, size in zip(self.names, self.sizes, strict=True):
            mine = any(fnmatchcase(name, p) for p in patterns) if patterns else self._in_head(name)
            blocks = (
                [*blocks[:-1], (blocks[-1][0] + size, mine)]
                if blocks and blocks[-1][1] is mine
                else [*blocks, (size, mine)]
            )
        return blocks

    def _matches(self, pattern: str) -> list[str]:
        """The parameters whose names match; ValueError where none does."""
        hits = [n for n in self.names if fnmatchcase(n, pattern)]
        if not hits:
            raise ValueError(
                f"patterns: {pattern!r} matches no parameter; the names are "
                f"{', '.join(self.names)}."
            )
        return hits

    def __getstate__(self) -> dict[str, Any]:
        # bound modules are made anew in each thread
        return {k: v for k, v in vars(self).items() if k != "_threads"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _threads=threading.local())

    def to(self, device: torch.device | str) -> Net:
        """The same net with its rows and constants on `device`."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).to(device)
        other.w0, other.b0, other._threads = (
            self.w0.to(device),
            self.b0.to(device),
            threading.local(),
        )
        if isinstance(self.criterion, nn.Module):  # class weights, for instance
            other.criterion = copy.deepcopy(self.criterion).to(device)
        return other

    def reading(self, fields: Fields | None) -> Net:
        """The same net for a pool of several fields: its module takes the dict of them that a batch
        of rows holds."""
        if fields is None or fields == self.fields:
            return self
        other = copy.copy(self)
        other.fields = fields
        other.module, other._threads = copy.deepcopy(self.module), threading.local()
        other.module.register_forward_pre_hook(fields)
        return other

    # the function of a row
    # -------------------------------------------------------------------------------------------
    def __call__(self, row: Tensor, x: Tensor) -> Tensor:
        """Scores of the model with parameters `row` [P] on a batch `x` [B, ...]."""
        return self._run("whole", row, x)

    def leaves(self, row: Tensor) -> list[Tensor]:
        """The parameters as leaf views of `row` [P]: bound in this thread until the next call of
        another kind, for `on_leaves`.

        A training loop that moves the row in place saves the cutting of the row, and the joining of
        its gradient, in every step.
        """
        self._check(row)
        leaves = [
            piece.view(shape).requires_grad_()
            for piece, shape in zip(row.detach().split(self.sizes), self.shapes, strict=True)
        ]
        for i, places in self._bound("whole").params:
            for owner, name in places:
                owner[name] = leaves[i]
        return leaves

    def on_leaves(self, x: Tensor) -> Tensor:
        """Scores of the model with the parameters that `leaves` bound on a batch `x` [B, ...]."""
        return self._forward(self._bound("whole"), x)

    def features(self, row: Tensor, x: Tensor) -> Tensor:
        """What the head sees, [B, H]."""
        return self._run("body", row, x)

    def head(self, row: Tensor, z: Tensor) -> Tensor:
        """The head's scores on features `z` [B, H]; `row` is a whole row [P] or the head's part
        alone."""
        s = self.head_slice
        h = row if row.shape[-1] == s.stop - s.start else row[s]
        bound = self._bound("head")
        bound.bind(
            h.split(self.sizes[self._head_first : self._head_first + len(bound.params)]),
            self.shapes[self._head_first :],
        )
        return bound.module(z)  # type: ignore[no-any-return]

    @property
    def head_slice(self) -> slice:
        """Where the head's parameters stand in a row."""
        mine = [s for n, s in self.slices.items() if self._in_head(n)]
        if not mine:
            raise ValueError(
                "model: found no trainable head: no attribute `head`, and no nn.Linear that is "
                "known to give the scores before the model "
                "has met data; name it with Net(..., head='name')."
            )
        return slice(mine[0].start, mine[-1].stop)

    @property
    def classes(self) -> int:
        """How many scores the head gives."""
        return int(self.module.get_submodule(self.head_name or "").out_features)  # type: ignore

    @property
    def has_conv(self) -> bool:
        """Whether the model has a convolution."""
        return any(isinstance(m, nn.modules.conv._ConvNd) for m in self.module.modules())

    def loss(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The criterion's value for the model `row` [P] on one batch [B, ...]: a scalar []."""
        return self.criterion(self(row, x), y)

    # inside -----------------------------------------------------------------
    def _run(self, part: str, row: Tensor, x: Tensor) -> Tensor:
        self._check(row)
        bound = self._bound(part)
        bound.bind(row.split(self.sizes), self.shapes)
        return self._forward(bound, x)

    def _forward(self, bound: _Bound, x: Tensor) -> Tensor:
        if bound.module.training != context.train:
            bound.module.train(context.train)
        if bound.buffers:
            buffers = self.b0.clone() if context.buffers is None else context.buffers
            # copies: under vmap batch norm writes into contiguous tensors only, and silently not
            # into views
            pieces = [p.clone() for p in buffers.split(self.buffer_sizes)]
            bound.bind_buffers(pieces, self.buffer_shapes)
        context.layer = 0
        try:
            scores = bound.module(x)
        except _Features as seen:
            (scores,) = seen.args
        if bound.buffers and context.train:
            for i, ((owner, name), *_) in bound.buffers:
                # a forward may have put another tensor there
                pieces[i] = owner[name].detach().reshape(-1)
            context.buffers = torch.cat(pieces)
        return scores  # type: ignore[no-any-return]

    def _bound(self, part: str) -> _Bound:
        bound = self._threads.__dict__.get(part)
        if bound is None:
            params, buffers = dict(enumerate(self.names)), dict(enumerate(self.buffer_names))
            if part == "whole":
                bound = _Bound(self.module, params, buffers)
            elif part == "body":
                self.head_slice  # noqa: B018  (says in a sentence that there is none)
                params, buffers = (
                    {i: n for i, n in d.items() if not self._in_head(n)} for d in (params, buffers)
                )
                bound = _Bound(_without(self.module, self.head_name or ""), params, buffers)
            else:
                mine = [n for n in self.names if self._in_head(n)]
                own = {i: n[len(self._prefix) :] for i, n in enumerate(mine)}
                bound = _Bound(self.module.get_submodule(self.head_name or ""), own, {})
            self._threads.__dict__[part] = bound
        return bound

    @property
    def _prefix(self) -> str:
        return f"{self.head_name}." if self.head_name else ""

    def _in_head(self, name: str) -> bool:
        return self.head_name is not None and name.startswith(self._prefix)

    @property
    def _head_first(self) -> int:
        return next(i for i, n in enumerate(self.names) if self._in_head(n))

    def _made(self, seed: int) -> nn.Module:
        with OwnDraws(seed):
            if not isinstance(self.build, nn.Module):
                made = self.build()
                if not isinstance(made, nn.Module):
                    raise TypeError(
                        "build: expected a function that makes an nn.Module, got one that makes "
                        f"{type(made).__name__}."
                    )
                return made
            module = copy.deepcopy(self.build)
            named = dict(module.named_modules())
            at = {name: i for i, name in enumerate(named)}
            inside_out = sorted(
                named,
                key=lambda n: [
                    *(at[p] for p in accumulate(n.split("."), "{}.{}".format) if p),
                    math.inf,
                ],
            )
            for name, m in ((n, named[n]) for n in inside_out):  # a parent has the last word
                if hasattr(m, "reset_parameters"):
                    m.reset_parameters()
                elif any(p.requires_grad for p in m.parameters(recurse=False)):
                    raise ValueError(
                        f"model: {name or type(m).__name__} holds parameters but has no "
                        "reset_parameters(); "
                        "give Net a function that makes the model."
                    )
        return module

    def _find_head(self, head: str | None) -> str | None:
        if head is not None:
            if head not in dict(self.module.named_modules()):
                raise ValueError(
                    f"head: the model has no submodule {head!r}; its children are "
                    f"{[n for n, _ in self.module.named_children()]}."
                )
            return head
        if isinstance(getattr(self.module, "head", None), nn.Module):
            return "head"
        linear = [n for n, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        # "" where the whole model is one nn.Linear
        return linear[0] if len(linear) == 1 else _last(self.module)

    def see(self, used: list[str], called: list[str]) -> None:
        """The head, where nobody named one: of the layers in the order of their calls the last
        `nn.Linear`, or the part `head` around it, that holds some of the parameters `used`, those
        on which the loss depends."""
        for name in reversed([] if self._asked else called):
            if any(n.startswith(f"{name}." if name else "") for n in used):
                named = name.split(".")[0] == "head"
                if named or isinstance(self.module.get_submodule(name), nn.Linear):
                    self.head_name, self._threads = "head" if named else name, threading.local()
                    return

    def _check(self, row: Tensor) -> None:
        if row.shape[-1] != self.size:
            raise ValueError(
                f"row: expected {self.size} parameters for this model, got {tuple(row.shape)}; cut "
                "extra columns off first."
            )


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except RuntimeError as e:  # torch.nn.utils.weight_norm keeps a tensor that is no leaf
        raise ValueError(
            "build: the model cannot be copied, and every thread trains a copy; instead of "
            "torch.nn.utils.weight_norm take "
            "torch.nn.utils.parametrizations.weight_norm, and keep no computed tensors in the "
            "model."
        ) from e


class _Features(Exception):
    """What the head was given."""


class _Stop(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        raise _Features(z)


def _without(module: nn.Module, name: str) -> nn.Module:
    """`module`, which ends where its head `name` begins."""
    if not name:
        return nn.Identity()
    body = copy.deepcopy(module)
    parent, _, leaf = name.rpartition(".")
    setattr(body.get_submodule(parent), leaf, _Stop())
    return body


def _last(module: nn.Module, name: str = "") -> str | None:
    """The `nn.Linear` that plain `nn.Sequential`s call last; None where another forward decides."""
    if isinstance(module, nn.Linear):
        return name
    children = module.named_children() if type(module) is nn.Sequential else ()
    for child, m in reversed([*children]):
        if any(isinstance(part, nn.Linear) for part in m.modules()):
            return _last(m, f"{name}.{child}".lstrip("."))
    return None


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, at least one, of one dtype."""
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    dtypes = {p.dtype for p in trainable.values()}
    if not trainable:
        raise ValueError(
            "build: the model has no trainable parameter; set requires_grad on what should be "
            "trained."
        )
    if len(dtypes) > 1:
        raise ValueError(
            f"build: parameters have dtypes {sorted(map(str, dtypes))}; convert the model to one, "
            "for example model.float()."
        )
    return trainable


def refuse_random(module: nn.Module) -> None:
    """Refuse modules that draw from torch's global generator: two threads share it, so results
    would not repeat."""
    for name, m in module.named_modules():
        if isinstance(m, RANDOM_MODULES) and getattr(m, "p", 1) != 0:
            raise ValueError(
                f"model: {name or 'the module'} is nn.{type(m).__name__}, which draws from the "
                "global generator; "
                "use pflcore.nn.Dropout, which draws from the client's own."
            )
        if isinstance(m, nn.RNNBase | nn.MultiheadAttention) and m.dropout > 0:
            raise ValueError(
                f"model: {name or 'the module'} drops out with the global generator; set its "
                "dropout to 0."
            )
        if (
            isinstance(m, nn.modules.batchnorm._BatchNorm)
            and m.track_running_stats
            and m.momentum is None
        ):
            raise ValueError(
                f"model: {name or 'the module'} averages its statistics by an integer count, which "
                "no policy can share; give it a momentum."
            )


def refuse_detours(module: nn.Module) -> None:
    """Refuse what clients' copies of a model would leave behind: hooks of parameters, and a forward
    that holds the original."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "model: a scripted or traced module takes no parameters of a client; give the module "
            "that it was made of."
        )
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"model: parameter {name!r} has a gradient hook, which clients' copies would not "
                "run; put what it does into the forward pass."
            )
    for name, m in module.named_modules():
        own = vars(m).get("forward")
        if own is not None and getattr(own, "__self__", None) is not m:
            raise ValueError(
                f"model: {name or type(m).__name__} was given a forward of its own, which may hold "
                "the original's parameters and not a "
                "client's; write it as a method of a class, and of a compiled module give its "
                "_orig_mod."
            )
