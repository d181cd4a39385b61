"""Recurrent layers written out: torch's own, value and gradient, in everything they take."""

import copy
import itertools

import pytest
import torch
import torch.nn as nn

from pflcore.nn.mode import forward_mode
from pflcore.train.recurrent import write_out

KINDS = [(nn.GRU, {}), (nn.LSTM, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})]
SHAPES = [
    dict(zip(("bidirectional", "bias", "batch_first"), c, strict=True))
    for c in itertools.product((False, True), repeat=3)
]


def pair(kind, **options):
    torch.manual_seed(0)
    own = kind(3, 5, 2, **options).double()
    other = copy.deepcopy(own)
    write_out(other)
    return own, other


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_it_is_torchs_own(kind, more, options):
    own, other = pair(kind, **more, **options)
    x = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want, states = own(x)
    with forward_mode(True, torch.empty(0), torch.tensor(0), alone=False):
        got, found = other(x)
    torch.testing.assert_close((got, found), (want, states), rtol=0, atol=1e-14)
    weight = torch.randn(
        want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    for a, b in zip(
        *(
            torch.autograd.grad((y * weight).sum(), list(m.parameters()))
            for y, m in ((want, own), (got, other))
        ),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_many_clients_at_once():
    own, other = pair(nn.GRU, batch_first=True)
    rows = {
        n: torch.stack([p.detach() * c for c in (1.0, 0.5, 2.0)]) for n, p in own.named_parameters()
    }
    x = torch.randn(3, 4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with forward_mode(True, torch.empty(0), torch.tensor(0), alone=False):
        got = torch.vmap(lambda w, x: torch.func.functional_call(other, w, (x,))[0])(rows, x)
    for i in range(3):
        want = torch.func.functional_call(own, {n: w[i] for n, w in rows.items()}, (x[i],))[0]
        torch.testing.assert_close(got[i], want, rtol=0, atol=1e-14)


def test_what_is_not_written_out_is_torchs_own():
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    for kind, options, args in (
        (nn.LSTM, {"proj_size": 2}, (x,)),
        (nn.GRU, {}, (x[0],)),
        (nn.GRU, {}, (x, torch.ones(2, 6, 5, dtype=torch.float64))),
        (nn.GRU, {}, (nn.utils.rnn.pack_padded_sequence(x, [4, 3, 3, 2, 1, 1]),)),
    ):
        own, other = pair(kind, **options)
        with forward_mode(True, torch.empty(0), torch.tensor(0), alone=False):
            assert torch.equal(
                torch.as_tensor(other(*args)[0][0]), torch.as_tensor(own(*args)[0][0])
            )
    own, other = pair(nn.GRU)
    with forward_mode(True, torch.empty(0), torch.tensor(0), alone=True):
        assert torch.equal(other(x)[0], own(x)[0])
