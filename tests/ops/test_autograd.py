"""What autograd and torch's transforms see of the ops: version counters, forward mode, vmap,
autocast, numbers that carry a gradient."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from ugly import randn, refuses

from pflcore import ops

F64 = torch.float64


# --- writing in place is seen -----------------------------------------------


def changes(t, call):
    """A product that has saved `t` notices that `call` changes it."""
    x = torch.ones_like(t, requires_grad=True)
    y = (x * t).sum()
    call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_step_in_place_is_seen_by_autograd():
    w, buffer, grads = randn(1, 2, 15), randn(2, 2, 15), randn(3, 2, 15)
    changes(w, lambda: ops.sgd_step_(w, grads, 0.1))
    changes(buffer, lambda: ops.sgd_step_(w, grads, 0.1, momentum=0.9, buffer=buffer))


def test_a_given_result_is_seen_by_autograd():
    out = randn(1, 2, 5)
    changes(out, lambda: ops.aggregate(randn(2, 3, 5), randn(3, 2, 3), out=out))


# --- forward mode -----------------------------------------------------------

INDEX = torch.tensor([[0, 2], [3, 3], [1, 0]])
CASES = {
    "sqdist": (ops.pairwise_sqdist, [(3, 5), (4, 5)]),
    "sqdist of one": (ops.pairwise_sqdist, [(3, 5)]),
    "aggregate": (lambda u, w, b: ops.aggregate(u, w, None, b, 0.7), [(4, 7), (3, 4), (7,)]),
    "aggregate by index": (
        lambda u, w, b: ops.aggregate(u, w, INDEX, b, 0.7),
        [(4, 7), (3, 2), (3, 7)],
    ),
    "rank1": (ops.rank1_linear, [(5, 4), (3, 6), (6,), (6, 4)]),
    "rank1 of clients": (ops.rank1_linear, [(2, 5, 4), (3, 6), (2, 6), (6, 4)]),
    "rank1 of one sample": (ops.rank1_linear, [(4,), (3, 6), (6,), (6, 4)]),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name):
    """A tangent is the derivative along it, as finite differences have it: not zero."""
    call, shapes = CASES[name]
    x, v = ([randn(10 * s + k, *shape) for k, shape in enumerate(shapes)] for s in (1, 2))
    e = 1e-6
    want = (
        call(*[a + e * b for a, b in zip(x, v, strict=True)])
        - call(*[a - e * b for a, b in zip(x, v, strict=True)])
    ) / (2 * e)
    value, tangent = torch.func.jvp(call, tuple(x), tuple(v))
    torch.testing.assert_close(value, call(*x))
    torch.testing.assert_close(tangent, want, rtol=1e-6, atol=1e-6)
    with forward_ad.dual_level():
        dual = call(*[forward_ad.make_dual(a, b) for a, b in zip(x, v, strict=True)])
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, want, rtol=1e-6, atol=1e-6)
    columns = torch.func.jacfwd(call)(*x)  # by the first argument, under vmap
    back = torch.autograd.functional.jacobian(lambda a: call(a, *x[1:]), x[0])
    torch.testing.assert_close(columns, back)


def test_forward_mode_is_not_dropped_in_place():
    w = randn(1, 2, 5)
    with refuses("aggregate", "out"):
        torch.func.jvp(
            lambda t: ops.aggregate(t, torch.ones(2, 2), out=torch.zeros(2, 5, dtype=F64)),
            (w,),
            (w,),
        )
    with forward_ad.dual_level(), refuses("sgd_step_", "w"):
        ops.sgd_step_(w, w.clone(), 0.1)


# --- what is given ----------------------------------------------------------


def test_a_learning_rate_with_a_gradient_is_refused():
    """It would come back without one."""
    lr = torch.tensor(0.1, requires_grad=True)
    with refuses("aggregate", "lr"):
        ops.aggregate(torch.ones(2, 3), torch.ones(1, 2), lr=lr)
    with refuses("sgd_step_", "lr"):
        ops.sgd_step_(torch.ones(2, 3), torch.ones(2, 3), lr)
    with torch.no_grad():
        assert torch.allclose(
            ops.aggregate(torch.ones(2, 3), torch.ones(1, 2), lr=lr), torch.full((1, 3), 0.2)
        )


def test_whole_numbers_may_be_numpys():
    d = randn(1, 3, 4).square()
    for mine, numpys in zip(
        ops.feddwa_weights(d, 2), ops.feddwa_weights(d, np.int64(2)), strict=True
    ):
        assert torch.equal(mine, numpys)
    assert torch.equal(ops.waffle_weights(d, np.int64(1), 0.5), ops.waffle_weights(d, 1, 0.5))


@pytest.mark.parametrize(
    "values", [dict(omega=1e308), dict(omega=0.5, psi=1e308), dict(omega=0.5, psi=1e101)]
)
def test_numbers_whose_sum_is_not_finite_are_refused(values):
    with refuses("waffle_weights", next(k for k, v in values.items() if v > 1)):
        ops.waffle_weights(torch.ones(5), 0, **values)
    assert ops.waffle_weights(torch.arange(5.0), 0, 0.5, 1e100).sum() == 1


def test_meta_tensors_may_be_given_to_write_into():
    out = torch.empty(2, 5, device="meta")
    assert (
        ops.aggregate(torch.empty(3, 5, device="meta"), torch.empty(2, 3, device="meta"), out=out)
        is out
    )


def test_vmap_over_index_and_target():
    """Values that vmap holds cannot be looked at, nor need they."""
    updates, weight = randn(1, 4, 7), randn(2, 3, 2)
    index = torch.randint(0, 4, (5, 3, 2), generator=torch.Generator().manual_seed(3))
    want = torch.stack([ops.aggregate(updates, weight, i) for i in index])
    assert torch.equal(torch.vmap(lambda i: ops.aggregate(updates, weight, i))(index), want)
    d, target = randn(4, 5, 6).abs(), torch.tensor([0, 3, 5, 1, 2])
    want = torch.stack([ops.waffle_weights(row, t, 0.5) for row, t in zip(d, target, strict=True)])
    assert torch.equal(torch.vmap(lambda row, t: ops.waffle_weights(row, t, 0.5))(d, target), want)


def test_compile_with_a_number_in_a_tensor():
    def step(w, grad, mu):
        ops.sgd_step_(w, grad, 0.1, mu=mu, anchor=torch.zeros_like(w))

    w, grad, mu = randn(1, 3, 8), randn(2, 3, 8), torch.tensor(0.5)
    want = w.clone()
    step(want, grad, mu)
    torch.compile(step, fullgraph=True, backend="aot_eager")(w, grad, mu)
    torch.testing.assert_close(w, want)


def test_autocast():
    x, w_a, lam, w_b = (randn(k, *s).float() for k, s in enumerate([(5, 4), (3, 6), (6,), (6, 4)]))
    with torch.autocast("cpu", torch.bfloat16):
        # bfloat16 meets float32
        got = ops.rank1_linear(torch.nn.functional.linear(x, torch.eye(4)), w_a, lam, w_b)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, ops.rank1_linear(*(t.bfloat16() for t in (x, w_a, lam, w_b))))


# --- rows that are not finite -----------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_client_spoils_no_other_gradient(bad):
    a, b = randn(1, 4, 5).requires_grad_(), randn(2, 3, 5)
    b[1, 2] = bad
    b.requires_grad_()
    keep = torch.tensor([0, 2])
    got = torch.autograd.grad(ops.pairwise_sqdist(a, b)[:, keep].sum(), (a, b))
    want = torch.autograd.grad(ops.pairwise_sqdist(a, b[keep]).sum(), (a, b))
    assert all(bool(t.isfinite().all()) for t in (*got, *want))
    torch.testing.assert_close(got, want)
    c = b.detach().clone().requires_grad_()
    (one,) = torch.autograd.grad(ops.pairwise_sqdist(c)[0, 2], c)
    torch.testing.assert_close(one[0], 2 * (c[0] - c[2]).detach())
    assert torch.equal(one[1], torch.zeros(5, dtype=F64))
    (all_pairs,) = torch.autograd.grad(ops.pairwise_sqdist(c).sum(), c)
    assert bool(all_pairs.isnan().all())  # a loss that takes the broken pairs says so


# --- functorch --------------------------------------------------------------


@pytest.mark.parametrize("name", ["sqdist", "aggregate", "top k", "rank1"])
def test_grad_of_a_function_is_autograds(name):
    index, b, dense, few, w_a, lam, w_b = (
        torch.tensor([[0, 2], [1, 0]]),
        *(
            randn(k, *size)
            for k, size in enumerate([(2, 5), (2, 4), (2, 2), (3, 6), (6,), (6, 5)], start=2)
        ),
    )
    f = {
        "sqdist": lambda t: (ops.pairwise_sqdist(t, b) ** 2).sum(),
        "aggregate": lambda t: (ops.aggregate(t, dense) ** 2).sum(),
        "top k": lambda t: (ops.aggregate(t, few, index) ** 2).sum(),
        "rank1": lambda t: (ops.rank1_linear(t, w_a, lam, w_b) ** 2).sum(),
    }[name]
    x = randn(1, 4, 5).requires_grad_()
    (want,) = torch.autograd.grad(f(x), x)
    torch.testing.assert_close(torch.func.grad(f)(x.detach()), want)
    each = torch.func.vmap(torch.func.grad(f))(torch.stack([x.detach(), 2 * x.detach()]))
    torch.testing.assert_close(each[0], want)
