"""Tests of `rank1_linear`.

They cover inactive factors, leading axes that broadcast, vmap and second derivatives.
"""

import itertools

import pytest
import torch
from laws import close_layer, dense, factors
from tolerance import F32, F64
from torch.testing import assert_close
from ugly import randn

from pflcore.ops import rank1_linear, reference


def gradients(args, call, grad):
    leaves = [t.detach().clone().requires_grad_() for t in args]
    return torch.autograd.grad(call(*leaves), leaves, grad)


@pytest.mark.parametrize(
    "leads",
    [
        ((2, 3), (), (2, 3), ()),
        ((2, 3), (), (), ()),
        ((3,), (), (2, 1), ()),
        ((2, 1), (3,), (), (2, 3)),
        ((), (), (2, 3), ()),
        ((1,), (), (3,), ()),
    ],
)
def test_several_leading_axes_broadcast(leads):
    close_layer(factors(5, 7, 6, 3, F64, leads))


def test_one_sample_no_samples_and_no_clients():
    """Unused inputs get a gradient of 0.

    Their gradient must not be the content of uninitialized memory.
    """
    x, *others = factors(1, 7, 6, 3)
    assert torch.equal(rank1_linear(x[0], *others), rank1_linear(x, *others)[0])
    args = factors(5, 300, 100, 200, F32, ((), (), (0,), ()))
    for _ in range(3):
        stale = [torch.full_like(t, torch.nan) for t in args]
        del stale
        assert not any(
            g.any() for g in gradients(args, rank1_linear, torch.ones(0, 5, 200))
        )


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_factor_that_is_off_may_hold_anything(isa, dtype):
    """The values of an inactive factor change neither result nor gradients.

    One side of such a factor does not enter the gradient of the other side or of the
    input. Where lam needs no gradient, a kernel does not read the factor at all.
    """
    args = factors(5, 9, 6, 7, dtype)
    args[2][2] = args[2][5] = 0
    grad = randn(8, 5, 7, dtype=dtype)
    backward = torch.ops.pflcore.rank1_linear_backward

    @torch.no_grad()  # second derivatives would need lam's gradient
    def all_of(call, t, lam_too):
        return [call(*t), *backward(grad, *t, True, True, lam_too, True)]

    want = all_of(rank1_linear, args, True)
    for side, holds, others in (
        (1, torch.nan, (0, 1, 2, 4)),
        (3, torch.inf, (0, 1, 2, 4)),
    ):
        broken = [t.clone() for t in args]
        broken[side].select(int(side == 1), 2).fill_(holds)  # w_a [O, F], w_b [F, I]
        got = all_of(rank1_linear, broken, True)
        assert all(torch.equal(got[k], want[k]) for k in others)
        on = args[2] != 0
        assert torch.equal(got[3][on], want[3][on]) and not bool(got[3][2].isfinite())
        assert_close(reference.rank1_linear(*broken), want[0])
        got = all_of(rank1_linear, broken, False)
        fewer = all_of(rank1_linear, args, False)
        equal = [torch.equal(g, w) for g, w in zip(got, fewer, strict=True)]
        assert all(equal) or isa == "references"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_the_gradients_of_a_factor_that_is_off_are_zero(shared, again):
    """Also beside lam's gradient, for infinite samples, and with `create_graph`."""
    x, w_a, lam, w_b = factors(5, 9, 6, 7, F64, ((3,), (), () if shared else (3,), ()))
    lam = lam.clone()
    lam[..., 2] = 0
    w_a[:, 2] = w_b[2] = torch.nan
    x[..., 4] = torch.inf
    leaves = [t.clone().requires_grad_() for t in (x, w_a, lam, w_b)]
    y = rank1_linear(*leaves)
    by_x, by_a, _, by_b = torch.autograd.grad(
        y, leaves, torch.ones_like(y), create_graph=again
    )
    assert by_x.isfinite().all()
    assert not by_a[:, 2].any() and not by_b[2].any()


# --- vmap -------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    "axes", [*list(itertools.product([None, 0], repeat=4))[1:], (1, 2, 1, 0)]
)
def test_vmap_forward_and_backward(axes):
    leads = [() if a is None else (4,) for a in axes]
    args = factors(5, 7, 6, 3, F64, leads, 0.6)
    stacked = [t if not a else t.movedim(0, a) for t, a in zip(args, axes, strict=True)]
    leaves = [t.clone().requires_grad_() for t in stacked]
    y = torch.vmap(rank1_linear, in_dims=axes)(*leaves)
    grad = randn(8, *y.shape)
    got = torch.autograd.grad(y, leaves, grad)
    want = [
        w if not a else w.movedim(0, a)
        for w, a in zip(gradients(args, dense, grad), axes, strict=True)
    ]
    assert_close([y, *got], [dense(*args), *want], rtol=1e-12, atol=1e-12)


def test_vmap_in_vmap():
    args = factors(5, 7, 6, 3, F64, ((2, 4), (), (2, 4), ()), 0.6)
    axes = (0, None, 0, None)
    twice = torch.vmap(torch.vmap(rank1_linear, in_dims=axes), in_dims=axes)
    assert_close(twice(*args), dense(*args), rtol=1e-12, atol=1e-12)
