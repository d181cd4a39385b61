"""The gradient of linear models and MLPs, factorized ones too, for many clients at once, written out.

Autograd under vmap costs about 25 small calls per layer and step; for a model of some thousand parameters that is nearly all of
the time. Here a step is one batched product per layer and direction. Clients whose last batch is short take part with sample
weights that are zero beyond it, so one call serves the whole cohort: for a mean of per-sample losses that is the same gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from pflcore.data.federation import Federation
from pflcore.factorized import FactorizedLinear
from pflcore.local.losses import CRITERIA, losses_and_slopes
from pflcore.local.net import Net
from pflcore.local.plain import is_plain

SMALL = 4096  # below so many weights a product into a strided view costs several times one into fresh memory


class _Linear(NamedTuple):
    weight: slice
    bias: slice | None
    shape: tuple[int, int]  # [O, I]


class _Factors(NamedTuple):
    w_a: slice
    strength: slice
    w_b: slice
    bias: slice | None
    shape: tuple[int, int, int]  # [O, F, I]


class Dense:
    """A chain of linear layers, plain or factorized, and activations on the rows of several clients."""

    def __init__(self, layers: list[_Linear | _Factors | str], criterion: str, flat: bool) -> None:
        self.layers, self.criterion, self.flat = layers, criterion, flat  # flat: a sample of any shape becomes a vector

    @classmethod
    def of(cls, net: Net) -> Dense | None:
        """The written-out form of `net`, or None where the model or the criterion is something else."""
        criterion = {f: name for name, f in CRITERIA.items()}.get(net.criterion)
        chain = _chain(net.module) if all(is_plain(m) for m in net.module.modules()) else None
        if criterion is None or chain is None or net.buffer_names:
            return None
        layers: list[_Linear | _Factors | str] = []
        flat = False
        for name, module in chain:
            if type(module) is nn.Linear:
                weight, bias = (net.slices.get(f"{name}.{p}" if name else p) for p in ("weight", "bias"))
                if weight is None or (bias is None and module.bias is not None):
                    return None  # a frozen layer, or one that shares its weights
                layers.append(_Linear(weight, bias, (module.out_features, module.in_features)))
            elif type(module) is FactorizedLinear:
                w_a, strength, w_b, bias = (net.slices.get(f"{name}.{p}" if name else p) for p in ("w_a", "strength", "w_b", "bias"))
                if w_a is None or strength is None or w_b is None or (bias is None and module.bias is not None):
                    return None
                layers.append(_Factors(w_a, strength, w_b, bias, (module.out_features, module.factors, module.in_features)))
            elif type(module) in (nn.ReLU, nn.Tanh, nn.Sigmoid):
                layers.append(type(module).__name__)
            elif type(module) is nn.Flatten and module.start_dim == 1 and module.end_dim == -1:
                flat = flat or not layers
            elif type(module) is not nn.Identity:
                return None
        used = [p.start for layer in layers if not isinstance(layer, str) for p in layer[:-1] if p is not None]
        return cls(layers, criterion, flat) if sorted(used) == [net.slices[n].start for n in net.names] else None  # each once, none unused

    @property
    def linear(self) -> tuple[int, bool] | None:
        """(inputs, whether there is a bias) of a model that is one linear layer with its weight in front, else None."""
        if len(self.layers) != 1 or not isinstance(self.layers[0], _Linear):
            return None
        weight, bias, (outputs, inputs) = self.layers[0]
        end = outputs * inputs
        fits = weight == slice(0, end) and bias in (None, slice(end, end + outputs))
        single = outputs == 1 and self.criterion in ("squared", "half_squared", "hinge")
        return (inputs, bias is not None) if fits and (self.criterion == "cross_entropy" or single) else None

    def kernel(self, net: Net, data: Federation) -> tuple[int, bool] | None:
        """`linear` where one kernel can do the whole local training on this data, else None."""
        labels = data.y.dtype == torch.int64 or (data.y.dtype == net.dtype and self.criterion != "cross_entropy")
        numbers = data.x.dtype == net.dtype and labels and data.y.dim() == 1 and data.x.is_contiguous()
        fits = numbers and (self.flat or data.x.dim() == 2) and data.device.type == "cpu"  # elsewhere all take a step at once
        return self.linear if fits else None

    def scores(self, rows: Tensor, x: Tensor, saved: list[Tensor] | None = None, inner: dict[int, Tensor] | None = None) -> Tensor:
        """`rows` [s, P] on `x` [s, B, ...] -> [s, B, C]; `saved` collects every layer's input, `inner` h W_b of the factorized ones."""
        h = x.flatten(2) if self.flat else x
        if h.dim() != 3:
            raise ValueError(f"x: expected vectors [s, B, I], got {list(x.shape)}; begin the model with nn.Flatten().")
        for i, layer in enumerate(self.layers):
            if saved is not None:
                saved.append(h)
            if isinstance(layer, _Linear):
                w = rows[:, layer.weight].unflatten(1, layer.shape).transpose(1, 2)  # [s, I, O]
                h = torch.bmm(h, w) if layer.bias is None else torch.baddbmm(rows[:, None, layer.bias], h, w)
            elif isinstance(layer, _Factors):
                w_a, strength, w_b = _factors(rows, layer)
                z = torch.bmm(h, w_b.transpose(1, 2))
                if inner is not None:
                    inner[i] = z
                h = torch.bmm(z * strength, w_a.transpose(1, 2))
                h = h if layer.bias is None else h + rows[:, None, layer.bias]
            else:
                h = _ACTIVATE[layer](h)
        return h

    def losses(self, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Per-sample losses [s, B] and their derivative by the scores [s, B, C]."""
        return losses_and_slopes(self.criterion, scores, y)

    def loss(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """`(weight * losses).sum(1)` [s] with `weight` [s, B]; a sample with weight 0 does not count, whatever its loss."""
        losses, _ = self.losses(self.scores(rows, x), y)
        return (losses * weight).masked_fill(weight == 0, 0.0).sum(1)

    def gradient(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, out: Tensor) -> Tensor:
        """Writes the gradient of `(weight * losses).sum(1)` into `out` [s, P]; gives those sums [s].

        `weight` is [s, B]; None is the mean over the batch.
        """
        return self._backward(rows, x, y, weight, out, None)

    def descend(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, lr: float) -> Tensor:
        """`rows -= lr * gradient` in place, without the gradient ever standing in memory; gives the losses [s] before the step."""
        return self._backward(rows, x, y, weight, rows, lr)

    def _backward(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, out: Tensor, lr: float | None) -> Tensor:
        saved: list[Tensor] = []
        inner: dict[int, Tensor] = {}
        losses, slope = self.losses(self.scores(rows, x, saved, inner), y)
        slope = slope / x.shape[1] if weight is None else slope.mul_(weight[..., None])
        first = next(i for i, layer in enumerate(self.layers) if not isinstance(layer, str))
        for i in range(len(self.layers) - 1, first - 1, -1):
            layer, h, here = self.layers[i], saved[i], slope
            if isinstance(layer, str):
                slope = _BACK[layer](slope, saved[i + 1] if i + 1 < len(saved) else _ACTIVATE[layer](h))
                continue
            if isinstance(layer, _Factors):
                w_a, strength, w_b = _factors(rows, layer)
                z, t = inner[i], torch.bmm(here, w_a)
                into_h = t * strength, w_b
                products = [(layer.w_a, here, z * strength), (layer.w_b, into_h[0], h)]
                sums = [(layer.strength, (t * z).sum(1))]
            else:
                products, sums = [(layer.weight, here, h)], []
                into_h = here, rows[:, layer.weight].unflatten(1, layer.shape)
            if i > first:  # before the weights move
                slope = torch.bmm(*into_h)
            if layer.bias is not None:
                sums.append((layer.bias, here.sum(1)))
            for at, left, right in products:
                into = out[:, at].unflatten(1, (left.shape[2], right.shape[2]))
                if into[0].numel() < SMALL:
                    product = torch.bmm(left.transpose(1, 2), right)
                    into.copy_(product) if lr is None else into.sub_(product, alpha=lr)
                elif lr is None:
                    torch.bmm(left.transpose(1, 2), right, out=into)
                else:
                    into.baddbmm_(left.transpose(1, 2), right, alpha=-lr)
            for at, total in sums:
                out[:, at].copy_(total) if lr is None else out[:, at].sub_(total, alpha=lr)
        return losses.mean(1) if weight is None else (losses * weight).sum(1)


def _factors(rows: Tensor, layer: _Factors) -> tuple[Tensor, Tensor, Tensor]:
    """W_a [s, O, F], the strengths [s, 1, F] and W_b [s, F, I]."""
    o, f, i = layer.shape
    return rows[:, layer.w_a].unflatten(1, (o, f)), rows[:, None, layer.strength], rows[:, layer.w_b].unflatten(1, (f, i))


_ACTIVATE = {"ReLU": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid}
_BACK = {
    "ReLU": lambda slope, h: slope * (h > 0),
    "Tanh": lambda slope, h: slope * (1 - h * h),
    "Sigmoid": lambda slope, h: slope * (h * (1 - h)),
}


def _chain(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module]] | None:
    """The modules that a forward pass calls one after another, one as often as it is called; None where that cannot be told."""
    if type(module) is nn.Sequential:
        chain: list[tuple[str, nn.Module]] = []
        for n, m in module._modules.items():  # named_children() would leave repeats out
            part = None if m is None else _chain(m, f"{name}.{n}" if name else n)
            if part is None:
                return None
            chain += part
        return chain
    if type(module) is FactorizedLinear or (not module._modules and type(module).__module__.startswith("torch.nn.modules")):
        return [(name, module)]
    was = module.training
    try:
        training, evaluating = (_traced(module.train(mode), name) for mode in (True, False))
    finally:
        module.train(was)
    return training if training is not None and evaluating is not None and _alike(training, evaluating) else None


def _alike(a: list[tuple[str, nn.Module]], b: list[tuple[str, nn.Module]]) -> bool:
    """Whether a forward pass does the same in training and in evaluation."""
    return [(n, type(m)) for n, m in a] == [(n, type(m)) for n, m in b]


def _traced(module: nn.Module, name: str) -> list[tuple[str, nn.Module]] | None:
    """The same for a model with a `forward` of its own, where torch.fx sees a plain chain in it."""
    try:
        graph = torch.fx.symbolic_trace(module).graph
    except Exception:  # data-dependent control flow and much else: such a model goes the general way
        return None
    chain: list[tuple[str, nn.Module]] = []
    last = None
    for node in graph.nodes:
        if node.op == "placeholder" and last is None:
            last = node
            continue
        if node.op == "output":
            return chain if node.args == (last,) else None
        if not node.args or node.args[0] is not last or len(node.all_input_nodes) != 1:
            return None
        if node.op == "call_module":
            chain.append((f"{name}.{node.target}" if name else node.target, module.get_submodule(node.target)))
        elif node.target in (torch.relu, nn.functional.relu, "relu"):
            chain.append(("", nn.ReLU()))
        elif node.target in (torch.tanh, nn.functional.tanh, "tanh"):
            chain.append(("", nn.Tanh()))
        elif node.target in (torch.flatten, "flatten") and (node.args[1:] == (1,) or node.kwargs.get("start_dim") == 1):
            chain.append(("", nn.Flatten()))
        else:
            return None
        last = node
    return None
