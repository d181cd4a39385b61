"""rank1_linear: value and gradients against the dense weight in float64; inactive factors; clients'
axes, stacked and under vmap."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tolerance import F16, F32, F64, FLOATS, assert_close
from ugly import randn, refuses, same_for_any_threads

from pflcore.ops import rank1_linear, reference

SIZES = st.sampled_from([1, 2, 3, 7, 8, 13, 17, 31, 64])
NAMES = ("x", "w_a", "lam", "w_b")


def dense(x, w_a, lam, w_b):
    """x times the dense weight sum_f lam_f w_a[:, f] w_b[f, :], clients' axes broadcast."""
    return x @ (w_a * lam[..., None, :] @ w_b).mT


def inputs(
    b,
    i,
    f,
    o,
    dtype=F64,
    leads=((),) * 4,
    active=1.0,
    seed=0,
):
    shapes = ((b, i), (o, f), (f,), (f, i))
    x, w_a, lam, w_b = (
        randn(seed + n, *lead, *shape)
        for n, (lead, shape) in enumerate(zip(leads, shapes, strict=True))
    )
    gen = torch.Generator().manual_seed(seed)
    lam = lam * (torch.rand(lam.shape, generator=gen, dtype=F64) < active)
    return [t.to(dtype) for t in (x, w_a, lam, w_b)]


def check(got, args):
    wide = [t.double() for t in args]
    assert got.dtype == args[0].dtype
    assert_close(got, dense(*wide), "rank1", size=dense(*[t.abs() for t in wide]))


def gradients(args, call, grad):
    leaves = [t.detach().clone().requires_grad_() for t in args]
    return torch.autograd.grad(call(*leaves), leaves, grad)


def check_gradients(args, seed=9):
    """Against autograd through the dense weight in float64, the error measured by the gradient of
    the absolute values."""
    wide = [t.double() for t in args]
    y = dense(*wide)
    grad = randn(seed, *y.shape, dtype=args[0].dtype)
    got = gradients(args, rank1_linear, grad)
    want = gradients(wide, dense, grad.double())
    size = gradients([t.abs() for t in wide], dense, grad.double().abs())
    for g, w, s, t in zip(got, want, size, args, strict=True):
        assert g.dtype == t.dtype and g.shape == t.shape
        assert_close(g, w, "rank1", size=s)


# --- right ------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 99))
def test_definition_and_gradients(dtype, b, i, f, o, active, seed):
    args = inputs(b, i, f, o, dtype, active=active, seed=seed)
    check(rank1_linear(*args), args)
    check_gradients(args)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    "axes",
    list(itertools.product([False, True], repeat=4)),
    ids=lambda a: "".join("n" if x else "-" for x in a),
)
def test_clients_axis(dtype, axes):
    """An input without the clients' axis is shared, and its gradient summed."""
    args = inputs(5, 7, 6, 3, dtype, tuple((4,) if a else () for a in axes), 0.6)
    check(rank1_linear(*args), args)
    check_gradients(args)


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
    args = inputs(5, 7, 6, 3, F64, leads)
    check(rank1_linear(*args), args)
    check_gradients(args)


def test_one_sample_and_no_samples():
    x, w_a, lam, w_b = inputs(1, 7, 6, 3)
    assert torch.equal(rank1_linear(x[0], w_a, lam, w_b), rank1_linear(x, w_a, lam, w_b)[0])
    for b, i, f, o in ((0, 7, 6, 3), (5, 0, 6, 3), (5, 7, 0, 3), (5, 7, 6, 0)):
        args = inputs(b, i, f, o)
        assert torch.equal(rank1_linear(*args), torch.zeros(b, o, dtype=F64))
        check_gradients(args)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64])
def test_any_stride(dtype):
    args = inputs(5, 17, 13, 7, dtype)
    want = rank1_linear(*args)
    ugly = [torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0] for t in args]
    turned = [t.mT.contiguous().mT if t.dim() > 1 else t for t in args]
    for other in (ugly, turned):
        assert not any(t.is_contiguous() for t in other if t.dim() > 1)
        torch.testing.assert_close(rank1_linear(*other), want)
        check_gradients(other)


# --- factors that are off ---------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lead", [(), (4,)])
def test_factors_that_are_off_change_nothing(dtype, lead):
    """With lambda 0 here and there: the same as without those factors, and their values, NaN even,
    do not count in x's gradient."""
    x, w_a, lam, w_b = inputs(5, 17, 12, 7, dtype, (lead, (), (), ()))
    off = torch.tensor([0, 3, 4, 11])
    on = torch.tensor([f for f in range(12) if f not in off.tolist()])
    lam[off] = 0
    small = [x, w_a[:, on].contiguous(), lam[on], w_b[on]]
    got = rank1_linear(x, w_a, lam, w_b)
    check(got, small)
    grad = torch.ones_like(got)
    gx, ga, glam, gb = gradients([x, w_a, lam, w_b], rank1_linear, grad)
    sx, sa, slam, sb = gradients(small, rank1_linear, grad)
    rough = {
        "rtol": 2e-2 if dtype not in (F32, F64) else 1e-4,
        "atol": 5e-2 if dtype not in (F32, F64) else 1e-4,
    }
    for a, b in ((gx, sx), (ga[:, on], sa), (glam[on], slam), (gb[on], sb)):
        torch.testing.assert_close(a, b, **rough)
    assert bool((ga[:, off] == 0).all()) and bool((gb[off] == 0).all())
    assert bool((glam[off] != 0).all())  # lambda's own gradient does not vanish at 0
    w_b[3] = torch.nan
    broken = rank1_linear(x, w_a, lam, w_b)
    check(broken, small)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    "needs", [n for n in itertools.product([False, True], repeat=4) if any(n)], ids=str
)
def test_only_the_gradients_that_are_wanted(needs):
    args = inputs(5, 7, 6, 3, F64, ((4,), (), (4,), ()), 0.5)
    leaves = [t.requires_grad_(need) for t, need in zip(args, needs, strict=True)]
    y = rank1_linear(*leaves)
    grad = randn(8, *y.shape)
    wanted = [t for t, need in zip(leaves, needs, strict=True) if need]
    got = torch.autograd.grad(y, wanted, grad)
    for g, w in zip(got, torch.autograd.grad(dense(*leaves), wanted, grad), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def test_second_derivative():
    args = inputs(3, 4, 5, 2)
    leaves = [t.requires_grad_() for t in args]

    def penalty(call):
        (g,) = torch.autograd.grad(call(*leaves).square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(g.square().sum(), leaves)

    for g, w in zip(penalty(rank1_linear), penalty(dense), strict=True):
        torch.testing.assert_close(g, w)


# --- vmap -------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    "axes",
    [a for a in itertools.product([None, 0], repeat=4) if any(v is not None for v in a)]
    + [(1, 2, 1, 0)],
    ids=str,
)
def test_vmap_forward_and_backward(axes):
    n = 4
    leads = tuple(() if a is None else (n,) for a in axes)
    args = inputs(5, 7, 6, 3, F64, leads, 0.6)
    stacked = [t if not a else t.movedim(0, a) for t, a in zip(args, axes, strict=True)]
    leaves = [t.clone().requires_grad_() for t in stacked]
    y = torch.vmap(rank1_linear, in_dims=axes)(*leaves)
    each = [
        rank1_linear(*[t[c] if a is not None else t for t, a in zip(args, axes, strict=True)])
        for c in range(n)
    ]
    torch.testing.assert_close(y, torch.stack(each), rtol=1e-12, atol=1e-12)
    grad = randn(8, *y.shape)
    got = torch.autograd.grad(y, leaves, grad)
    want = gradients(args, dense, grad)
    for g, w, a in zip(got, want, axes, strict=True):
        torch.testing.assert_close(g, w if not a else w.movedim(0, a), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inner", [((), (), (), ()), ((4,), (), (4,), ())])
def test_vmap_of_the_backward_pass(inner):
    """Several output gradients at once: the backward op itself runs under vmap."""
    args = [t.requires_grad_() for t in inputs(5, 7, 6, 3, F64, inner, 0.6)]
    y = rank1_linear(*args)
    grads = randn(8, 3, *y.shape)
    got = torch.autograd.grad(y, args, grads, is_grads_batched=True, retain_graph=True)
    for c in range(3):
        for g, w in zip(
            got, torch.autograd.grad(y, args, grads[c], retain_graph=True), strict=True
        ):
            torch.testing.assert_close(g[c], w, rtol=1e-12, atol=1e-12)


def test_vmap_in_vmap():
    args = inputs(5, 7, 6, 3, F64, ((2, 4), (), (2, 4), ()), 0.6)
    y = torch.vmap(
        torch.vmap(rank1_linear, in_dims=(0, None, 0, None)), in_dims=(0, None, 0, None)
    )(*args)
    check(y, args)


# --- laws -------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lead", [(), (6,)])
def test_threads_change_no_bit(dtype, lead):
    args = inputs(67, 257, 61, 131, dtype, (lead, (), lead, ()), 0.7)
    same_for_any_threads(lambda: rank1_linear(*args))
    grad = randn(8, *lead, 67, 131, dtype=dtype)
    for n in range(4):
        same_for_any_threads(lambda n=n: gradients(args, rank1_linear, grad)[n])


@pytest.mark.parametrize("change", range(4))
def test_linear_in_each_input(change):
    one, two = inputs(5, 7, 6, 3, seed=1), inputs(5, 7, 6, 3, seed=20)
    mixed = [
        t if n != change else 2 * t - 3 * u for n, (t, u) in enumerate(zip(one, two, strict=True))
    ]
    other = [t if n != change else u for n, (t, u) in enumerate(zip(one, two, strict=True))]
    torch.testing.assert_close(
        rank1_linear(*mixed),
        2 * rank1_linear(*one) - 3 * rank1_linear(*other),
        rtol=1e-11,
        atol=1e-11,
    )


# --- bad input --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name", "kind"),
    [
        (dict(x=[1.0]), "x", TypeError),
        (dict(x=torch.zeros(())), "x", ValueError),
        (dict(x=torch.zeros(5, 8)), "w_b", ValueError),
        (dict(x=torch.zeros(5, 7, dtype=torch.int64)), "x", TypeError),
        (dict(w_a=torch.zeros(3)), "w_a", ValueError),
        (dict(w_a=torch.zeros(3, 5)), "w_a", ValueError),
        (dict(w_a=torch.zeros(3, 6, dtype=F64)), "w_a", TypeError),
        (dict(lam=torch.zeros(5)), "lam", ValueError),
        (dict(lam=torch.zeros(6, dtype=F16)), "lam", TypeError),
        (dict(lam=torch.zeros(6, device="meta")), "lam", ValueError),
        (dict(w_b=torch.zeros(5, 7)), "w_a", ValueError),
        (dict(w_b=torch.zeros(7)), "w_b", ValueError),
        (dict(x=torch.zeros(4, 5, 7), lam=torch.zeros(3, 6)), "lam", ValueError),
    ],
)
def test_bad_input(change, name, kind):
    good = {
        "x": torch.zeros(5, 7),
        "w_a": torch.zeros(3, 6),
        "lam": torch.zeros(6),
        "w_b": torch.zeros(6, 7),
    }
    with refuses("rank1_linear", name, kind):
        rank1_linear(**{**good, **change})


def test_gradients_of_nobody_are_zero():
    """No clients: what they would share gets no gradient, not whatever lay in memory."""
    x, w_a, lam, w_b = randn(0, 5, 300), randn(1, 200, 100), torch.zeros(0, 100), randn(3, 100, 300)
    inputs = [t.float().requires_grad_() for t in (x, w_a, lam, w_b)]
    for _ in range(3):
        stale = [torch.full_like(t, torch.nan) for t in inputs]
        del stale
        grads = torch.autograd.grad(rank1_linear(*inputs).sum(), inputs)
        assert all(bool((g == 0).all()) for g in grads)


def test_a_factor_that_is_off_may_hold_anything():
    """In the kernel and in its reference alike."""
    x, w_a, lam, w_b = randn(1, 5, 4), randn(2, 3, 6), randn(3, 6), randn(4, 6, 4)
    lam[2] = 0
    want = rank1_linear(x, w_a, lam, w_b)
    w_a[:, 2], w_b[2] = torch.nan, torch.inf
    for call in (rank1_linear, reference.rank1_linear):
        torch.testing.assert_close(call(x, w_a, lam, w_b), want)


@pytest.mark.usefixtures("isa")
def test_a_factor_that_is_off_may_hold_anything_in_the_backward_pass():
    """What one side of it holds does not reach the other side's gradient, nor the input's."""
    given = [randn(1, 5, 4), randn(2, 3, 6), randn(3, 6), randn(4, 6, 4)]
    given[2][2] = 0
    grad = randn(5, 5, 3)
    want = gradients(given, rank1_linear, grad)
    for side, others in ((1, (0, 3)), (3, (1,))):
        broken = [t.clone() for t in given]
        broken[side].select(int(side == 1), 2).fill_(torch.nan)  # w_a [O, F], w_b [F, I]
        got = gradients(broken, rank1_linear, grad)
        for i in others:
            torch.testing.assert_close(got[i], want[i])
