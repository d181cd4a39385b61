"""GRU, LSTM and RNN written out in elementary operations, which vmap can carry: a step
of many clients at once.

torch's own are one operation that has no rule for vmap, and client after client they
spend most of a small model's time around the arithmetic. One client's call goes to
torch's own still, and so do packed sequences, given first states, projections and
dropout.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore.nn._context import forward_state

State = tuple[Tensor, ...]  # h [B, H], and an LSTM's c [B, H]


class _Unrolled(nn.RNNBase):
    # (x, h, state) -> the next state, from what the gates have of the input and of the
    # last state, each with its bias
    cell: Any

    def forward(self, x: Any, hx: Any = None) -> Any:
        plain = isinstance(x, Tensor) and x.dim() == 3 and hx is None
        if forward_state.single_client or not plain or self.dropout or self.proj_size:
            return super().forward(x, hx)
        last = []
        x = x.transpose(0, 1) if self.batch_first else x  # [T, B, I]
        for layer in range(self.num_layers):
            both = [self._pass(x, f"_l{layer}")]
            if self.bidirectional:
                both.append(self._pass(x, f"_l{layer}_reverse"))
            x = torch.cat([y for y, _ in both], 2)
            last += [state for _, state in both]
        # [layers x ways, B, H]
        states = tuple(torch.stack(each) for each in zip(*last, strict=True))
        x = x.transpose(0, 1) if self.batch_first else x
        return x, states if len(states) > 1 else states[0]

    def _pass(self, x: Tensor, suffix: str) -> tuple[Tensor, State]:
        """One way through the sequence: h after each step [T, B, H], and the state
        after the last."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        wi, wh, bi, bh = (getattr(self, name + suffix, None) for name in names)
        way = -1 if suffix.endswith("reverse") else 1
        state: State = (x.new_zeros(x.shape[1], self.hidden_size),) * (
            1 + (self.mode == "LSTM")
        )
        found = []
        for given in F.linear(x, wi, bi).unbind(0)[::way]:  # type: ignore[arg-type]
            state = self.cell(given, F.linear(state[0], wh, bh), state)  # type: ignore[arg-type]
            found.append(state[0])
        return torch.stack(found[::way]), state


class _RNN(_Unrolled, nn.RNN):
    def cell(self, x: Tensor, h: Tensor, state: State) -> State:
        return (getattr(torch, self.nonlinearity)(x + h),)


class _GRU(_Unrolled, nn.GRU):
    def cell(self, x: Tensor, h: Tensor, state: State) -> State:
        two = 2 * self.hidden_size
        reset, keep = (x[..., :two] + h[..., :two]).sigmoid().chunk(2, -1)
        new = torch.addcmul(x[..., two:], reset, h[..., two:]).tanh()
        return (torch.lerp(new, state[0], keep),)


class _LSTM(_Unrolled, nn.LSTM):
    def cell(self, x: Tensor, h: Tensor, state: State) -> State:
        take, keep, new, give = (x + h).chunk(4, -1)
        c = torch.addcmul(keep.sigmoid() * state[1], take.sigmoid(), new.tanh())
        return give.sigmoid() * c.tanh(), c


UNROLLED: dict[type[nn.Module], type[nn.Module]] = {
    nn.RNN: _RNN,
    nn.GRU: _GRU,
    nn.LSTM: _LSTM,
}


def unroll_recurrent(module: nn.Module) -> None:
    """Let recurrent layers inside `module`, which nobody else may hold, change their
    class; their parameters stay."""
    for m in module.modules():
        m.__class__ = UNROLLED.get(type(m), type(m))
