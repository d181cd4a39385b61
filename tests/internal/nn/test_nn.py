"""Tests of Dropout, whose random numbers are those of the client."""

import itertools

import pytest
import torch
import torch.nn as nn
from small import equals

from pflcore import Net
from pflcore.nn import Dropout
from pflcore.nn._context import forward_context
from pflcore.ops._dropout import hashed_integers, splitmix_hash


def mask(seed, layers=1, n=1000, p=0.5):
    """Mask of the elements that the last of `layers` layers keeps."""
    module = Dropout(p).train()
    with forward_context(True, seed=torch.tensor(seed)):
        for _ in range(layers):
            output = module(torch.ones(n))
    return output != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_right_share_is_kept_and_scaled(p):
    x = torch.randn(100, 2000, dtype=torch.float64).requires_grad_()
    with forward_context(True, seed=torch.tensor(5)):
        y = Dropout(p).train()(x)
    mask = y != 0
    deviation = (p * (1 - p)) ** 0.5
    share = mask.double().mean()
    assert abs(float(share) - (1 - p)) < 5 * deviation / x.numel() ** 0.5
    # The share is right in each column, too.
    assert (abs(mask.double().mean(0) - (1 - p)) < 6 * deviation / 10).all()
    torch.testing.assert_close(y[mask], x[mask] / (1 - p))
    # Gradients pass where values pass.
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g, mask.to(x) / (1 - p))


def test_layers_steps_and_clients_draw_apart():
    # The seeds of a client's steps are successive numbers.
    seeds = [0, 1, 2, 3, -1, -(2**63), 2**63 - 1, 1 << 40]
    masks = [mask(s, layer, 4000) for s in seeds for layer in (1, 2, 3)]
    for a, b in itertools.combinations(masks, 2):
        agree = float((a == b).double().mean())
        assert abs(agree - 0.5) < 5 * 0.5 / 4000**0.5
    equals(mask(7), mask(7))


def test_the_hash_is_splitmix64():
    def reference(state):
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    for state in (0, 1, 2**63 - 1, 12345678901234567):
        start = (state + 0x9E3779B97F4A7C15) % 2**64
        signed = start - 2**64 if start >= 2**63 else start
        assert int(splitmix_hash(torch.tensor(signed))) % 2**64 == reference(state)
    # This is the published first output for the seed.
    assert reference(1234567) == 6457827717110365317
    draws = hashed_integers(torch.tensor(1), 0, (10_000,))
    assert int(draws.min()) >= 0 and int(draws.max()) < 2**24
    assert abs(float(draws.double().mean()) / 2**24 - 0.5) < 0.02


def test_evaluation_is_the_identity():
    x = torch.randn(4, 4)
    with forward_context(False, seed=torch.tensor(1)):
        assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    net = Net(nn.Sequential(nn.Linear(4, 4), Dropout(0.9), nn.Linear(4, 2)))
    equals(net(net.w0, x), net(net.w0, x))


def test_everything_may_be_dropped():
    with forward_context(True, seed=torch.tensor(1)):
        assert not Dropout(1.0).train()(torch.ones(5)).any()
    assert repr(Dropout(0.25)) == "Dropout(p=0.25)"
