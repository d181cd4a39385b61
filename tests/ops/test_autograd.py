"""Autograd and torch's transforms of the ops.

They are gradients of any order, version counters, forward mode, vmap, autocast, and
numbers that require a gradient.
"""

import pytest
import torch
from laws import integers
from torch.autograd import forward_ad
from torch.func import jacfwd, jacrev
from torch.testing import assert_close
from ugly import randn, refuses

from pflcore import ops

F64 = torch.float64
INDEX = torch.tensor([[0, 2], [3, 3], [1, 0]])
PADDED = torch.tensor([[0, 2], [3, -1], [1, 1]])


def mix(index=None):
    return lambda u, w, b: ops.aggregate(u, w, index, b, 0.7)


def listed(a, b=None, index=PADDED):
    """Distances of listed pairs, with 0 for padding instead of infinity."""
    return ops.pairwise_sqdist(a, b, index).nan_to_num(posinf=0.0)


CASES = {
    "sqdist": (ops.pairwise_sqdist, [(3, 5), (4, 5)]),
    "sqdist of one": (ops.pairwise_sqdist, [(3, 5)]),
    "sqdist, listed": (listed, [(3, 5), (4, 5)]),
    "sqdist of one, listed": (lambda a: listed(a, index=INDEX % 3), [(3, 5)]),
    "trimmed_mean": (lambda rows: ops.trimmed_mean(rows, 2), [(7, 3)]),
    "mean_around_median": (lambda rows: ops.mean_around_median(rows, 4), [(7, 3)]),
    "aggregate": (mix(), [(4, 7), (3, 4), (7,)]),
    "aggregate onto rows": (mix(), [(4, 7), (3, 4), (3, 7)]),
    "aggregate by index": (mix(INDEX), [(4, 7), (3, 2), (3, 7)]),
    "aggregate by index onto one": (mix(INDEX), [(4, 7), (3, 2), (7,)]),
    "rank1": (ops.rank1_linear, [(5, 4), (3, 6), (6,), (6, 4)]),
    "rank1 of clients": (ops.rank1_linear, [(2, 5, 4), (3, 6), (2, 6), (6, 4)]),
    "rank1 of one sample": (ops.rank1_linear, [(4,), (3, 6), (6,), (6, 4)]),
}


def drawn(name):
    call, shapes = CASES[name]
    return call, [randn(k, *s) for k, s in enumerate(shapes)]


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    call, x = drawn(name)
    if name.startswith("rank1"):
        # An inactive factor: the gradient of its lam is not zero.
        x[2][..., 2] = 0
    x = [t.requires_grad_() for t in x]
    assert torch.autograd.gradcheck(call, x) and torch.autograd.gradgradcheck(call, x)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name):
    """Tangents are the directional derivatives by finite differences.

    That holds under vmap too.
    """
    call, x = drawn(name)
    inputs = [t.clone().requires_grad_() for t in x]
    assert torch.autograd.gradcheck(
        call, inputs, check_forward_ad=True, check_backward_ad=False
    )
    every = tuple(range(len(x)))
    columns, rows = (jacobian(call, every)(*x) for jacobian in (jacfwd, jacrev))
    assert_close(columns, rows)
    assert_close(rows, torch.autograd.functional.jacobian(call, tuple(x)))


def test_writing_in_place_is_seen_by_autograd():
    """Backward raises where an op changed a saved tensor.

    Forward mode refuses to write in place.
    """
    w, buffer, grads, out = (randn(k, 2, 15) for k in range(4))
    for changed, call in (
        (w, lambda: ops.sgd_step_(w, grads, 0.1)),
        (buffer, lambda: ops.sgd_step_(w, grads, 0.1, momentum=0.9, buffer=buffer)),
        (out, lambda: ops.aggregate(grads, randn(3, 2, 2), out=out)),
    ):
        y = (torch.ones_like(changed, requires_grad=True) * changed).sum()
        call()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with refuses("aggregate", "out"):
        torch.func.jvp(lambda t: ops.aggregate(t, randn(3, 2, 2), out=out), (w,), (w,))
    with forward_ad.dual_level(), refuses("sgd_step_", "w"):
        ops.sgd_step_(w, w.clone(), 0.1)


def test_a_learning_rate_is_no_tensor():
    """A learning rate that requires a gradient is refused.

    The op gives no gradient for it.
    """
    w = torch.ones(2, 3)
    lr = torch.tensor(0.1, requires_grad=True)
    with refuses("aggregate", "lr", TypeError):
        ops.aggregate(w, w[:1, :2], lr=lr)
    with refuses("sgd_step_", "lr", TypeError):
        ops.sgd_step_(w, w.clone(), lr)


def test_weights_are_constants():
    d = randn(1, 3, 3).abs().requires_grad_()
    assert not ops.waffle_weights(d, 0, 0.5).requires_grad
    assert not ops.feddwa_weights(d, 2).weight.requires_grad


def test_vmap_over_index_and_target():
    """Under vmap, an op may map over an index and over targets.

    The values of mapped tensors cannot be read, so they are not checked.
    """
    updates = randn(1, 4, 7)
    weight = randn(2, 3, 2)
    index = integers(3, 0, 4, 5, 3, 2)
    d = randn(4, 5, 6).abs()
    target = torch.tensor([0, 3, 5, 1, 2])
    for call, arguments in (
        (lambda i: ops.aggregate(updates, weight, i), [index]),
        (lambda row, t: ops.waffle_weights(row, t, 0.5), [d, target]),
    ):
        want = torch.stack([call(*one) for one in zip(*arguments, strict=True)])
        assert torch.equal(torch.vmap(call)(*arguments), want)


def test_autocast():
    x, w_a, lam, w_b = (
        randn(k, *s).float() for k, s in enumerate([(5, 4), (3, 6), (6,), (6, 4)])
    )
    with torch.autocast("cpu", torch.bfloat16):
        # A bfloat16 input meets float32 factors.
        got = ops.rank1_linear(
            torch.nn.functional.linear(x, torch.eye(4)), w_a, lam, w_b
        )
    assert got.dtype == torch.bfloat16
    assert torch.equal(
        got, ops.rank1_linear(*(t.bfloat16() for t in (x, w_a, lam, w_b)))
    )


def test_weights_have_no_gradient_and_a_distance_of_zero_has_none():
    a = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    square = ops.pairwise_sqdist(a)
    assert not ops.feddwa_weights(square, 2)[0].requires_grad
    assert not ops.waffle_weights(square[0], 0, 1.0).requires_grad
    (lost,) = torch.autograd.grad(square.sqrt().sum(), a, retain_graph=True)
    assert lost.isnan().all()
    away = ~torch.eye(4, dtype=torch.bool)  # the root has no gradient at 0
    (grad,) = torch.autograd.grad(square[away].sqrt().sum(), a)
    (want,) = torch.autograd.grad(2 * torch.pdist(a).sum(), a)
    torch.testing.assert_close(grad, want)
