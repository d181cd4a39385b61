"""GRU, LSTM and RNN in elementary operations, which vmap supports.

torch's own layers are one operation each, which has no rule for vmap. Without vmap, one
client after another, a small model spends most of its time outside of their arithmetic.

torch's layer still computes a call for a single client, and a call with packed
sequences, initial states or projections. Dropout is that of `pflcore.nn._dropout`.

Symbols: T steps of a sequence; B samples; I inputs; H hidden features; x the input, h
the hidden state, c the cell state of an LSTM.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore.nn._context import forward_state
from pflcore.nn._dropout import GRU, LSTM, RNN, drop, drops_by_seed

State = tuple[Tensor, ...]  # h [B, H], and an LSTM's c [B, H]


class _Unrolled(nn.RNNBase):
    """Recurrent layer whose forward pass is a loop over the steps.

    A subclass has `cell(x, h, state)`, which returns the next state. Its `x` and `h`
    are the gates' products with the input and with the last hidden state, each with its
    bias.
    """

    cell: Any

    def forward(self, x: Any, hx: Any = None) -> Any:
        is_plain = isinstance(x, Tensor) and x.dim() == 3 and hx is None
        drops = drops_by_seed(self, self.dropout)
        draws_globally = self.training and self.dropout and not drops
        has_options = self.proj_size or draws_globally
        if forward_state.single_client or not is_plain or has_options:
            return super().forward(x, hx)
        if self.batch_first:
            x = x.transpose(0, 1)
        # Here x is [T, B, I]. The states are in torch's order: layer by layer, forwards
        # before backwards.
        last_states: list[State] = []
        for layer in range(self.num_layers):
            if layer > 0 and drops:
                x = self._drop_outputs(x)
            output, state = self._run_direction(x, f"_l{layer}", step=1)
            outputs = [output]
            last_states.append(state)
            if self.bidirectional:
                output, state = self._run_direction(x, f"_l{layer}_reverse", step=-1)
                outputs.append(output)
                last_states.append(state)
            x = torch.cat(outputs, 2)
        # h and, for an LSTM, c: [layers x directions, B, H]
        states = [torch.stack(parts) for parts in zip(*last_states, strict=True)]
        if self.batch_first:
            x = x.transpose(0, 1)
        return x, tuple(states) if len(states) > 1 else states[0]

    def _drop_outputs(self, x: Tensor) -> Tensor:
        """Outputs [T, B, H] of a layer after dropout.

        The mask is that of the outputs as torch's layer gives them.
        """
        if not self.batch_first:
            return drop(x, self.dropout)
        return drop(x.transpose(0, 1), self.dropout).transpose(0, 1)

    def _run_direction(
        self, x: Tensor, suffix: str, step: int
    ) -> tuple[Tensor, State]:  # [T, B, H]
        """Hidden states of all steps, and the state after the last step.

        A `step` of 1 goes forwards through the sequence, and -1 backwards. `suffix`
        ends the names of the weights.
        """
        weight_x: Any = getattr(self, f"weight_ih{suffix}")
        weight_h: Any = getattr(self, f"weight_hh{suffix}")
        bias_x: Any = getattr(self, f"bias_ih{suffix}", None)
        bias_h: Any = getattr(self, f"bias_hh{suffix}", None)
        zeros = x.new_zeros(x.shape[1], self.hidden_size)
        state: State = (zeros, zeros) if self.mode == "LSTM" else (zeros,)
        outputs = []
        # The products with the input do not depend on the state, so all steps have them
        # by one matrix product.
        for x_step in F.linear(x, weight_x, bias_x).unbind(0)[::step]:
            state = self.cell(x_step, F.linear(state[0], weight_h, bias_h), state)
            outputs.append(state[0])
        # Backwards, the last step of the sequence comes first.
        return torch.stack(outputs[::step]), state


class _RNN(_Unrolled, RNN):
    """An Elman network."""

    def cell(self, x: Tensor, h: Tensor, state: State) -> State:
        return (getattr(torch, self.nonlinearity)(x + h),)


class _GRU(_Unrolled, GRU):
    """A GRU by torch's formula."""

    def cell(self, x: Tensor, h: Tensor, state: State) -> State:
        # The columns are those of the gates "reset" and "update", then of the new
        # state.
        gates = 2 * self.hidden_size
        sums = x[..., :gates] + h[..., :gates]
        reset, update = sums.sigmoid().chunk(2, -1)
        new = torch.addcmul(x[..., gates:], reset, h[..., gates:]).tanh()
        return (torch.lerp(new, state[0], update),)


class _LSTM(_Unrolled, LSTM):
    """An LSTM by torch's formula, without projections."""

    def cell(self, x: Tensor, h: Tensor, state: State) -> State:
        input_gate, forget_gate, new, output_gate = (x + h).chunk(4, -1)
        kept = forget_gate.sigmoid() * state[1]
        c = torch.addcmul(kept, input_gate.sigmoid(), new.tanh())
        return output_gate.sigmoid() * c.tanh(), c


UNROLLED: dict[type[nn.Module], type[nn.Module]] = {
    **dict.fromkeys((nn.RNN, RNN), _RNN),
    **dict.fromkeys((nn.GRU, GRU), _GRU),
    **dict.fromkeys((nn.LSTM, LSTM), _LSTM),
}


def unroll_recurrent(module: nn.Module) -> None:
    """Changes the class of the recurrent layers in `module`, in place.

    Their parameters stay. The module must be a copy that belongs to the caller alone.
    """
    for layer in module.modules():
        layer.__class__ = UNROLLED.get(type(layer), type(layer))
