"""Chains of layers of all kinds, and problems for them.

A problem has clients with samples, and trains, differentiates or evaluates a chain.
"""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
from laws import integers
from tolerance import F32
from ugly import randn

import pflcore.nn
from pflcore import Net
from pflcore.ops import _chain as chain
from pflcore.ops._chain_reference import grad_reference
from pflcore.ops._sgd import clipped, corrected
from pflcore.ops._sgd import reference as sgd_reference
from pflcore.train._chain import compile_chain
from pflcore.train._losses import LOSSES

# By the model's name: the shape of one input, and the layers. A layer has a kind, its
# arguments and its options. The arguments of a "Sum" are branches, lists of layers.
MODELS = json.loads(Path(__file__).with_suffix(".json").read_text())


class Sum(nn.Module):
    """The sum of the outputs of branches, which all take the same input."""

    def __init__(self, *branches):
        super().__init__()
        made = (nn.Sequential(*(layer(*words) for words in b)) for b in branches)
        self.branches = nn.ModuleList(made)

    def forward(self, x):
        total = self.branches[0](x)
        for branch in self.branches[1:]:
            total = total + branch(x)
        return total


def layer(kind, taken=(), options=None):
    """A layer of pflcore if it has this kind, else of torch.

    The kind "FrozenBatchNorm2d" is a batch norm that stays in evaluation mode.
    """
    if kind == "Sum":
        return Sum(*taken)
    if kind == "FrozenBatchNorm2d":
        frozen = nn.BatchNorm2d(*taken).eval()
        frozen.running_mean.normal_()
        frozen.running_var.uniform_(0.5, 2)
        return frozen
    cls = getattr(pflcore.nn, kind, None) or getattr(nn, kind)
    return cls(*taken, **(options or {}))


INF = torch.inf
ONE_OUTPUT = [m for m in MODELS if m.endswith("one output")]
KINDS = [(m, "cross_entropy") for m in MODELS if m not in ONE_OUTPUT]
OF_ONE_OUTPUT = sorted(set(LOSSES) - {"cross_entropy"})
KINDS += [(m, c) for m in ONE_OUTPUT for c in OF_ONE_OUTPUT]
# The linear loss has a target for each score.
LINEAR = "linear", "mlp", "mlp, one output", "lenet", "residual, batch norm"
KINDS += [(m, "linear") for m in LINEAR]


def linear(scores, y):
    return (scores * y).sum(1).mean()


CHAIN_LOSSES = {**LOSSES, "linear": linear}


def by_steps(w, *args, statistics=None, merge_single=False):
    """The result of `chain_train_`, computed step by step from gradients."""
    *head, names = args[:8]
    order, size, steps, batch, drop_last, seeds = args[8:14]
    lr, shift, mask, _, mu, anchor, momentum, decay, clip, rates, sums = args[14:]
    velocity = torch.zeros_like(w)
    own_steps = None
    if rates is not None:
        own_steps = [AdamWSteps(row, lr, rates, decay) for row in w.split(1)]
    loss = torch.zeros(len(w), dtype=torch.float64)
    for i, n in enumerate(size.tolist()):
        some = slice(i, i + 1)
        whole = min(n, batch)
        shift_i, anchor_i, mu_i, names_i = (
            t if t is None else t[some] for t in (shift, anchor, mu, names)
        )
        bounds = [*range(0, n, whole), n]
        if n % whole and (drop_last or (merge_single and n % whole == 1)):
            del bounds[-1 if drop_last else -2]
        cuts = len(bounds) - 1
        for k in range(int(steps[i])):
            epoch, turn = divmod(k, cuts)
            at = order[some, epoch, bounds[turn] : bounds[turn + 1]]
            seed = None if seeds is None else seeds[some, epoch] + turn
            own = (*head, names_i, at, torch.tensor([at.shape[1]]), seed)
            moving = None if statistics is None else statistics[some]
            grad, value, moved = grad_reference(w[some], *own, moving, train=True)
            if statistics is not None:
                statistics[some] = moved
            grad = clipped(grad, clip)
            loss[some] += value
            if sums is not None:
                sums[some] += grad if own_steps else grad + decay * w[some]
            if own_steps:
                d = corrected(w[some], grad, shift_i, 0.0, mu_i, anchor_i)
                own_steps[i].step(d, mask)
                continue
            pull = (0.0, mu_i, anchor_i, momentum, velocity[some], decay)
            sgd_reference(w[some], grad, lr, shift_i, mask, *pull)
    return loss


class AdamWSteps:
    """Steps of `torch.optim.AdamW` on a row, which they change in place."""

    def __init__(self, row, lr, rates, decay):
        self.row = row
        self.weight = row.clone()
        *betas, eps = rates.tolist()
        self.optimizer = torch.optim.AdamW(
            [self.weight], lr, betas, eps, weight_decay=decay
        )

    def step(self, grad, mask):
        self.weight.copy_(self.row)
        self.weight.grad = grad
        self.optimizer.step()
        step = self.weight - self.row
        self.row += step if mask is None else mask * step


class Problem:
    """A model that is a chain, and clients of the given sizes.

    All clients' samples are in one pool. Each client has its own order of samples.
    """

    def __init__(
        self,
        model,
        sizes,
        dtype=F32,
        passes=1,
        seed=0,
        relabel=False,
        loss_name="cross_entropy",
    ):
        shape, layers = MODELS[model]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = nn.Sequential(*(layer(*words) for words in layers))
            named = loss_name
            if loss_name == "linear":  # it is no loss of a model
                named = "squared" if model in ONE_OUTPUT else "cross_entropy"
            self.net = Net(made.to(dtype), loss=named)
        n = len(sizes)
        pool = sum(sizes) + 3
        longest = max(sizes)
        self.w = self.net.w0 + randn(seed, n, self.net.size, dtype=dtype, scale=0.05)
        found = compile_chain(self.net, tuple(shape))
        self.chain = replace(found, loss_name=loss_name)
        buffers = self.net.b0 + randn(seed + 5, n, len(self.net.b0), dtype=dtype).abs()
        self.statistics = self.chain.kernel_statistics(buffers)
        self.sizes = torch.tensor(sizes)
        self.passes, self.dtype = passes, dtype
        self.x, self.y, self.names = (
            randn(seed + 1, pool, *shape, dtype=dtype),
            None,
            None,
        )
        if loss_name == "linear":
            self.y = randn(seed + 2, pool, self.chain.classes, dtype=dtype)
        elif loss_name in ("squared", "half_squared"):
            self.y = randn(seed + 2, pool, dtype=dtype)
        else:
            classes = self.chain.classes if loss_name == "cross_entropy" else 2
            self.y = integers(seed, 0, classes, pool)
            self.names = randn(seed + 3, n, classes).argsort(1) if relabel else None
        self.order = randn(seed + 4, n, passes, pool).argsort(2)[..., :longest]
        self.seeds = (
            integers(seed, -(2**62), 2**62, n, passes) if self.chain.dropout else None
        )
        self.begin = torch.tensor([0, *sizes]).cumsum(0)
        self.places = torch.cat([self.order[i, 0, :k] for i, k in enumerate(sizes)])

    def head(self, dtype=None):
        dtype = dtype or self.dtype
        y = self.y.to(dtype) if self.y.is_floating_point() else self.y
        return (*self.chain.fixed_args, self.x.to(dtype), y, self.names)

    def alone(self, i):
        """The same problem for client `i` only."""
        one = copy(self)
        some = slice(i, i + 1)
        one.w, one.order, one.sizes = self.w[some], self.order[some], self.sizes[some]
        one.names, one.seeds, one.statistics = (
            None if t is None else t[some]
            for t in (self.names, self.seeds, self.statistics)
        )
        return one

    @property
    def merges(self):
        """True where a last batch of one sample joins the one before it."""
        return self.chain.normalizes_batches

    def most(self, batch, drop_last=False):
        whole = self.sizes.clamp(max=batch)
        cuts = self.sizes // whole
        rest = self.sizes % whole
        if not drop_last:
            cuts += rest > int(self.merges)
        return self.passes * cuts

    def moving(self, dtype):
        """A copy of the statistics, which training moves, or None."""
        return None if self.statistics is None else self.statistics.to(dtype, copy=True)

    def train(
        self,
        op=chain.chain_train_,
        dtype=None,
        batch=16,
        drop_last=False,
        steps=None,
        **o,
    ):
        """Rows and losses after training."""
        w = self.w.clone() if dtype is None else self.w.to(dtype)
        steps = self.most(batch, drop_last) if steps is None else steps
        shift, mask, anchor = (
            None if o.get(k) is None else o[k].to(w.dtype)
            for k in ("shift", "mask", "anchor")
        )
        plan = (self.order, self.sizes, steps, batch, drop_last, self.seeds, 0.1)
        how = (
            shift,
            mask,
            0.0,
            o.get("mu"),
            anchor,
            o.get("momentum", 0.0),
            o.get("decay", 0.0),
        )
        end = (o.get("clip", INF), o.get("adamw"), o.get("sums"))
        moving = self.moving(w.dtype)
        options = {"statistics": moving, "merge_single": self.merges}
        loss = op(w, *self.head(w.dtype), *plan, *how, *end, **options)
        self.moved = w[:, :0] if moving is None else moving
        return w, loss

    def grad(self, op=chain.chain_grad, dtype=None, seeds=None, train=False):
        """Gradients and losses on each client's samples, and the statistics behind."""
        w = self.w.to(dtype or self.dtype)
        whole = (self.order[:, 0], self.sizes, seeds, self.moving(w.dtype), train)
        return op(w, *self.head(dtype), *whole)

    def evaluate(self, rows, op=chain.chain_eval, classes=None, dtype=None):
        classes = self.chain.classes if classes is None else classes
        w = rows.to(dtype or self.dtype)
        statistics = self.moving(w.dtype)
        if statistics is not None and (rows == rows[:1]).all():
            one = statistics[:1].expand(len(rows), -1)
            statistics = one if rows.stride(0) == 0 else one.contiguous()
        ends = (self.places, self.begin, classes, statistics)
        return op(w, *self.head(dtype), *ends)
