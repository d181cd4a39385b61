"""Dropout of each client's own random numbers, alone and within torch's layers.

torch's dropout draws from a generator that threads share, so a run would not repeat.
While pflcore trains, the layers here draw from the seed of the client and its step.
Otherwise, and without dropout, they are torch's layers. `use_own_dropout` changes the
layers of a model into these.

Symbols: B samples; T and S steps of two sequences; E features; H heads; A = E / H.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pflcore.check import UnitFloat, checked
from pflcore.nn._context import forward_state
from pflcore.ops._dropout import apply_dropout, hashed_integers

# The arguments of `nn.MultiheadAttention` behind query, key and value, in their order.
ATTENTION_OPTIONS = (
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
)


def drop(x: Tensor, p: float) -> Tensor:
    """`x` [...] with elements dropped, by the seed of the forward pass.

    The mask is a hash of that seed, of the number of the random layer within the pass,
    and of the element's place.
    """
    layer = forward_state.random_layer
    forward_state.random_layer = forward_state.random_layer + 1
    numbers = hashed_integers(forward_state.seed, layer, x.shape)  # type: ignore[arg-type]
    return apply_dropout(x, p, numbers)


def drops_by_seed(layer: nn.Module, p: float) -> bool:
    """True where a layer drops elements in this pass, and the pass has a seed."""
    return layer.training and p > 0 and forward_state.seed is not None


def with_attributes(layer: nn.Module, **attributes: Any) -> Any:
    """A twin of a layer with other attributes, which shares its parameters."""
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer), **attributes)
    return twin


@checked
class Dropout(nn.Module):
    """`nn.Dropout` whose random numbers belong to the client and the step.

    So results repeat for any number of workers. While pflcore trains, the mask is a
    hash of the client's seed of this step, of the number of the random layer within the
    forward pass, and of the element's place. The mask is the same in every engine, and
    works under `torch.vmap`. Outside of pflcore such a module draws from torch's global
    generator, as `nn.Dropout` does. In evaluation mode it is the identity.

    Args:
        p: The probability with which an element is dropped.
    """

    def __init__(self, p: UnitFloat = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """`x` [...] with elements dropped, in training mode.

        The other elements are divided by 1 - p.
        """
        if drops_by_seed(self, self.p):
            return drop(x, self.p)
        if not self.training or self.p == 0:
            return x
        return F.dropout(x, self.p, training=True)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _LayerByLayer(nn.RNNBase):
    """Recurrent layers of torch, with a dropout of the client's own between them."""

    def forward(self, x: Any, hx: Any = None) -> Any:
        if not drops_by_seed(self, self.dropout) or self.num_layers == 1:
            return super().forward(x, hx)  # type: ignore[misc]
        last_states = []
        for layer in range(self.num_layers):
            if layer > 0:
                x = self._dropped(x)
            single = self._single_layer(layer)
            x, state = super(type(single), single).forward(x, self._states(hx, layer))
            last_states.append(state)
        if self.mode == "LSTM":
            return x, tuple(map(torch.cat, zip(*last_states, strict=True)))
        return x, torch.cat(last_states)

    def _dropped(self, x: Any) -> Any:
        """The outputs of a layer after dropout, also where they are packed."""
        if isinstance(x, PackedSequence):
            return x._replace(data=drop(x.data, self.dropout))
        return drop(x, self.dropout)

    def _single_layer(self, layer: int) -> Any:
        """One of the layers, as a module that shares its weights."""
        directions = 2 if self.bidirectional else 1
        width = (self.proj_size or self.hidden_size) * directions
        marks = (f"_l{layer}", f"_l{layer}_reverse")
        names = [name for name in self._flat_weights_names if name.endswith(marks)]
        single = with_attributes(
            self,
            num_layers=1,
            dropout=0.0,
            input_size=width if layer else self.input_size,
            _flat_weights_names=names,
        )
        single._init_flat_weights()
        return single

    def _states(self, hx: Any, layer: int) -> Any:
        """The initial states of one of the layers; None for zeros."""
        directions = 2 if self.bidirectional else 1
        rows = slice(layer * directions, (layer + 1) * directions)
        if isinstance(hx, tuple):
            return tuple(state[rows] for state in hx)
        return None if hx is None else hx[rows]


class RNN(_LayerByLayer, nn.RNN):
    """`nn.RNN` whose dropout belongs to the client and the step."""


class GRU(_LayerByLayer, nn.GRU):
    """`nn.GRU` whose dropout belongs to the client and the step."""


class LSTM(_LayerByLayer, nn.LSTM):
    """`nn.LSTM` whose dropout belongs to the client and the step."""


class MultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose dropout belongs to the client and the step.

    torch's layer gives the attention weights without dropout, and understands masks.
    The weights are then dropped here, and mix the values.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not drops_by_seed(self, self.dropout):
            return super().forward(query, key, value, *args, **kwargs)
        options = {**dict(zip(ATTENTION_OPTIONS, args, strict=False)), **kwargs}
        needs_weights = options.pop("need_weights", True)
        is_averaged = options.pop("average_attn_weights", True)
        plain = with_attributes(self, dropout=0.0)
        options |= {"need_weights": True, "average_attn_weights": False}
        result = nn.MultiheadAttention.forward(plain, query, key, value, **options)
        weights = drop(cast(Tensor, result[1]), self.dropout)  # [B, H, T, S]
        mixed: Tensor = self.out_proj(_mix_values(weights, self._head_values(value)))
        if not self.batch_first and mixed.dim() == 3:
            mixed = mixed.transpose(0, 1)
        if not needs_weights:
            return mixed, None
        return mixed, weights.mean(-3) if is_averaged else weights

    def _head_values(self, value: Tensor) -> Tensor:
        """The values [B, H, S, A] that the heads mix."""
        weight: Tensor | None = self.v_proj_weight
        if weight is None:
            weight = self.in_proj_weight[-self.embed_dim :]
        bias: Tensor | None = self.in_proj_bias
        bias = None if bias is None else bias[-self.embed_dim :]
        if not self.batch_first and value.dim() == 3:
            value = value.transpose(0, 1)
        projected = F.linear(value, weight, bias)
        heads: Tensor = projected.unflatten(-1, (self.num_heads, -1))
        return heads.transpose(-3, -2)


def _mix_values(weights: Tensor, values: Tensor) -> Tensor:
    """Sums [B, T, E] of values [B, H, S, A], by weights [B, H, T, S]."""
    return (weights @ values).transpose(-3, -2).flatten(-2)


OWN_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: Dropout,
    nn.RNN: RNN,
    nn.GRU: GRU,
    nn.LSTM: LSTM,
    nn.MultiheadAttention: MultiheadAttention,
}


def use_own_dropout(module: nn.Module) -> None:
    """Changes the class of the layers in `module` that drop out, in place.

    Their parameters stay. The module must be a copy that belongs to the caller alone.
    """
    for layer in module.modules():
        if getattr(layer, "dropout", 1.0) != 0:
            layer.__class__ = OWN_LAYERS.get(type(layer), type(layer))
        if type(layer) is Dropout:
            vars(layer).pop("inplace", None)  # an option of torch's class alone
