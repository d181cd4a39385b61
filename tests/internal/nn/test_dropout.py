"""Layers with dropout of their own, where nothing is dropped, are torch's layers."""

import copy

import pytest
import torch
from torch import nn
from ugly import randn

from pflcore.nn import _dropout
from pflcore.nn._context import forward_context

X = randn(1, 4, 6, 3)
OTHER = randn(2, 4, 5, 3)


@pytest.fixture
def nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(_dropout, "drop", lambda x, _: x)


def results(layer, *args, **options):
    """What torch's layer gives without dropout, and ours with it."""
    layer = layer.double()
    own = copy.deepcopy(layer)
    plain = copy.deepcopy(layer)
    plain.dropout = 0.0
    _dropout.use_own_dropout(own)
    assert type(own) is not type(layer)
    with forward_context(True, None, torch.tensor(0)):
        got = own(*args, **options)
    return got, plain(*args, **options)


@pytest.mark.parametrize(
    "kind, options, given",
    [
        (nn.LSTM, {"bidirectional": True, "batch_first": True}, (X,)),
        (nn.LSTM, {"proj_size": 2, "bidirectional": True}, (X,)),
        (nn.GRU, {"bias": False}, (X, randn(3, 2, 6, 5))),
        (nn.LSTM, {}, (X, (randn(3, 2, 6, 5), randn(4, 2, 6, 5)))),
        (nn.RNN, {"nonlinearity": "relu"}, (X[0],)),
        (nn.GRU, {}, (nn.utils.rnn.pack_padded_sequence(X, [4, 3, 3, 2, 1, 1]),)),
    ],
)
def test_recurrent_layers(nothing_is_dropped, kind, options, given):
    got, want = results(kind(3, 5, 2, dropout=0.5, **options), *given)

    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "options, call",
    [
        ({"batch_first": True}, {"need_weights": False}),
        ({}, {"average_attn_weights": False}),
        ({"bias": False}, {"key_padding_mask": torch.arange(6) >= 4}),
        ({"batch_first": True}, {"attn_mask": torch.ones(6, 6).triu(1).bool()}),
    ],
)
def test_self_attention(nothing_is_dropped, options, call):
    x = randn(1, 4, 6, 8)
    if "key_padding_mask" in call:
        x = x[0]  # without the axis of the batch
    if not options.get("batch_first") and x.dim() == 3:
        x = x.transpose(0, 1)
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, **options)

    got, want = results(layer, x, x, x, **call)

    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_attention_to_other_features(nothing_is_dropped):
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, kdim=3, vdim=7, batch_first=True)
    given = (randn(1, 4, 6, 8), OTHER, randn(3, 4, 5, 7))

    got, want = results(layer, *given)

    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_attention_drops_weights_and_scales_the_others():
    """Of values that are one-hot, the mix shows the weights."""
    layer = nn.MultiheadAttention(8, 1, dropout=0.5, bias=False, batch_first=True)
    eye = torch.eye(8)
    with torch.no_grad():
        layer.in_proj_weight[-8:] = eye
        layer.out_proj.weight.copy_(eye)
    x = eye.double()[None]

    (dropped, weights), (whole, _) = results(layer, x, x, x)

    equal = torch.isclose(dropped, 2 * whole)
    assert torch.equal(dropped, weights)
    assert torch.equal(equal | (dropped == 0), torch.ones_like(equal))
    assert 10 < equal.sum() < 54
