"""Tests of recurrent layers, values and gradients, against torch's own layers."""

import copy
import itertools

import pytest
import torch
import torch.nn as nn
from small import equals
from ugly import randn

from pflcore.nn._context import forward_context
from pflcore.train._recurrent import unroll_recurrent

KINDS = [(nn.GRU, {}), (nn.LSTM, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})]
NAMES = ("bidirectional", "bias", "batch_first")
SHAPES = [
    dict(zip(NAMES, c, strict=True)) for c in itertools.product((False, True), repeat=3)
]
X = randn(1, 4, 6, 3)


def pair(kind, **options):
    torch.manual_seed(0)
    own = kind(3, 5, 2, **options).double()
    other = copy.deepcopy(own)
    unroll_recurrent(other)
    return own, other


def called(module, *given, alone=False):
    with forward_context(True, torch.empty(0), torch.tensor(0), single_client=alone):
        return module(*given)


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("kind, more", KINDS)
def test_it_is_torchs_own(kind, more, options):
    own, other = pair(kind, **more, **options)
    want = own(X)
    got = called(other, X)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    weight = torch.randn_like(want[0])
    grads = [
        torch.autograd.grad(y, list(m.parameters()), weight)
        for m, (y, _) in ((own, want), (other, got))
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "kind, options, given",
    [
        (nn.LSTM, {"proj_size": 2}, (X,)),
        (nn.GRU, {}, (X[0],)),
        (nn.GRU, {}, (X, torch.ones(2, 6, 5, dtype=torch.float64))),
        (nn.GRU, {}, (nn.utils.rnn.pack_padded_sequence(X, [4, 3, 3, 2, 1, 1]),)),
    ],
)
def test_what_is_not_written_out_is_torchs_own(kind, options, given):
    own, other = pair(kind, **options)
    got = called(other, *given)[0]
    want = own(*given)[0]
    equals(torch.as_tensor(got[0]), torch.as_tensor(want[0]))
    one, its = pair(nn.GRU)
    equals(called(its, X, alone=True)[0], one(X)[0])
