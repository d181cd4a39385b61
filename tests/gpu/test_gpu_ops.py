"""Every op on a GPU against its reference in float64 on the CPU, and what only a GPU can show:
streams, graphs, devices, sizes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parts.devices import on_two_devices
from torch import Tensor

from examples import examples
from pflcore import ops
from pflcore.ops import reference

OPS = torch.ops.pflcore
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (1, 31, 33, 1023, 1024, 4097, 100_003)
few = examples(25)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def relative(got, want):
    """The largest relative error; an entry that should be 0 must be 0."""
    got, want = got.cpu(), want.cpu()
    error = (got - want).abs() / want.abs()
    return float(torch.where(want == 0, torch.where(got == 0, 0.0, float("inf")), error).max())


def shifted(t, by, gap):
    """A CUDA copy of t whose rows start `by` elements off and lie `gap` elements further apart."""
    rows, cols = t.shape
    memory = torch.full((by + rows * (cols + gap) + 8,), float("nan"), dtype=t.dtype, device="cuda")
    inner = memory[by : by + rows * (cols + gap)].view(rows, cols + gap)[:, :cols]
    return inner.copy_(t)


# --- the same numbers -------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(
    m=st.sampled_from((1, 2, 17, 64, 65, 130)),
    n=st.sampled_from((0, 1, 17, 100)),
    p=st.sampled_from(SIZES),
    by=st.sampled_from((0, 1)),
    gap=st.sampled_from((0, 1, 8)),
)
def test_sqdist(dtype, m, n, p, by, gap):
    centre = normal(1, p)
    a, b = (
        (centre + 1e-3 * normal(m, p, seed=1)).to(dtype),
        (centre + 1e-3 * normal(n, p, seed=2)).to(dtype) if n else None,
    )
    on = shifted(a, by, gap)
    got = ops.pairwise_sqdist(on, None if b is None else shifted(b, 0, gap))
    assert relative(got, reference.pairwise_sqdist(a, b)) <= (
        1e-12 if dtype == torch.float64 else 1e-6
    )
    # whatever the alignment, the same bits
    assert torch.equal(got, ops.pairwise_sqdist(a.cuda(), None if b is None else b.cuda()))
    if b is None:
        moved = torch.randperm(m, generator=torch.Generator().manual_seed(3))
        assert torch.equal(ops.pairwise_sqdist(on[moved.cuda()]).cpu(), got.cpu()[moved][:, moved])


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-19, 1.0, 1e19, 1e30])
def test_sqdist_scales_and_bad_rows(scale):
    a = normal(9, 5003) * scale
    a[3] = a[1]
    got = ops.pairwise_sqdist(a.cuda()).cpu()
    assert relative(got, reference.pairwise_sqdist(a, None)) <= 1e-6 and got[1, 3] == 0
    a[2, 7], a[5, 9] = float("nan"), float("inf")
    got, want = ops.pairwise_sqdist(a.cuda()).cpu(), reference.pairwise_sqdist(a, None)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert relative(got[want.isfinite()], want[want.isfinite()]) <= 1e-6


@few
@given(
    n=st.sampled_from((1, 2, 17, 300, 3000)),
    k=st.sampled_from((1, 5, 40, 3000)),
    seed=st.integers(0, 99),
)
def test_weights(n, k, seed):
    g = torch.Generator().manual_seed(seed)
    d = torch.rand(4, n, generator=g, dtype=torch.float64)
    d[torch.rand(4, n, generator=g) < 0.3] = 0.5
    d[torch.rand(4, n, generator=g) < 0.1] = 0.0
    d[torch.rand(4, n, generator=g) < 0.05] = float("nan")
    got, want = ops.feddwa_weights(d.cuda(), k), reference.feddwa_weights(d, k)
    assert torch.equal(got.index.cpu(), want[1])
    torch.testing.assert_close(got.weight.cpu(), want[0], rtol=1e-12, atol=1e-300)
    target = torch.randint(0, n, (4,), generator=g)
    got_w = ops.waffle_weights(d.cuda(), target.cuda(), 0.7, 0.6)
    torch.testing.assert_close(
        got_w.cpu(), reference.waffle_weights(d, target, 0.7, 0.6, False), rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(
    n=st.sampled_from((1, 10, 100)),
    m=st.sampled_from((1, 7, 100)),
    p=st.sampled_from(SIZES),
    sparse=st.booleans(),
    base=st.sampled_from((None, 1, 2)),
    precise=st.booleans(),
    by=st.sampled_from((0, 1)),
    gap=st.sampled_from((0, 1, 8)),
)
def test_aggregate(dtype, n, m, p, sparse, base, precise, by, gap):
    g = torch.Generator().manual_seed(n + m)
    updates, index = (
        normal(n, p, dtype=dtype),
        torch.randint(0, n, (m, min(5, n)), generator=g) if sparse else None,
    )
    weight = torch.rand(m, n if index is None else index.shape[1], generator=g, dtype=torch.float64)
    start = None if base is None else normal(*([p] if base == 1 else [m, p]), seed=1, dtype=dtype)
    got = ops.aggregate(
        shifted(updates, by, gap),
        weight.cuda(),
        None if index is None else index.cuda(),
        None if start is None else start.cuda(),
        0.5,
        precise=precise,
    )
    want = torch.empty(m, p, dtype=torch.float64)
    reference.aggregate_out(
        updates, weight, index, None if start is None else start.double(), 0.5, True, want
    )
    size = float(updates.abs().double().max() * weight.abs().sum(1).max()) + 5
    eps = torch.finfo(dtype).eps + (1e-14 if precise or dtype == torch.float64 else 2e-6)
    assert got.dtype == dtype and float((got.cpu().double() - want).abs().max()) <= eps * size


@few
@given(
    n=st.sampled_from((1, 5)),
    b=st.sampled_from((1, 33)),
    i=st.sampled_from((17, 300)),
    f=st.sampled_from((1, 67)),
    o=st.sampled_from((1, 65)),
    own=st.tuples(*[st.booleans()] * 4),
    learn_lam=st.booleans(),
)
def test_rank1(n, b, i, f, o, own, learn_lam):
    shapes = [(b, i), (o, f), (f,), (f, i)]
    inputs = [
        normal(*([n] if mine else []), *s, seed=k)
        for k, (mine, s) in enumerate(zip(own, shapes, strict=True))
    ]
    inputs[2][..., ::3] = 0
    need = [True, True, learn_lam, True]
    here = [t.cuda().requires_grad_(k) for t, k in zip(inputs, need, strict=True)]
    wide = [t.double() for t in inputs]
    y, want = ops.rank1_linear(*here), reference.rank1_linear(*wide)
    torch.testing.assert_close(
        y.detach().cpu().double(), want, rtol=1e-4, atol=1e-5 * (float(want.abs().max()) + 1)
    )
    grad = normal(*y.shape, seed=9)
    y.backward(grad.cuda())
    for t, r, k in zip(
        here, reference.rank1_linear_backward(grad.double(), *wide, *need), need, strict=True
    ):
        assert (t.grad is not None) == k
        if t.grad is not None:
            torch.testing.assert_close(
                t.grad.cpu().double(), r, rtol=1e-3, atol=1e-5 * (float(r.abs().max()) + 1)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few
@given(
    s=st.sampled_from((1, 17)),
    q=st.sampled_from(SIZES),
    has=st.tuples(*[st.booleans()] * 4),
    by=st.sampled_from((0, 1)),
    gap=st.sampled_from((0, 1)),
)
def test_sgd_step(dtype, s, q, has, by, gap):
    w, grad = normal(s, q, dtype=dtype), normal(s, q, seed=1, dtype=dtype)
    shift, anchor, buffer = (
        normal(s, q, seed=k, dtype=dtype) if has[k] else None for k in range(3)
    )
    mu = torch.rand(s, dtype=dtype) if anchor is not None else 0.0
    mask = (normal(q, seed=7, dtype=dtype) > 0).to(dtype) if has[3] else None
    on = [None if t is None else shifted(t, by, gap) for t in (w, grad, shift, anchor, buffer)]
    momentum = 0.9 if has[2] else 0.0
    there = {
        "mask": None if mask is None else mask.cuda(),
        "mu": mu.cuda() if isinstance(mu, Tensor) else mu,
    }
    ops.sgd_step_(
        on[0],
        on[1],
        0.1,
        shift=on[2],
        anchor=on[3],
        momentum=momentum,
        buffer=on[4],
        weight_decay=0.01,
        **there,
    )
    ops.sgd_step_(w, grad, 0.1, shift, mask, mu, anchor, momentum, buffer, 0.01)
    tight = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(on[0].cpu(), w, rtol=tight, atol=tight)


def test_empty():
    zeros: Callable[..., Tensor] = lambda *s: torch.zeros(*s, device="cuda")  # noqa: E731
    assert ops.pairwise_sqdist(zeros(0, 5)).shape == (0, 0)
    assert torch.equal(ops.pairwise_sqdist(zeros(2, 0), zeros(3, 0)), zeros(2, 3).double())
    assert torch.equal(ops.aggregate(zeros(0, 5), zeros(3, 0), base=zeros(5)), zeros(3, 5))
    assert ops.feddwa_weights(zeros(0, 3), 2).weight.shape == (0, 2)
    assert ops.rank1_linear(zeros(0, 4), zeros(3, 2), zeros(2), zeros(2, 4)).shape == (0, 3)
    assert ops.waffle_weights(zeros(0, 3), 0, 0.5).shape == (0, 3)


# --- what only a GPU can show -----------------------------------------------


def calls():
    """Every op as a function of its (CUDA) inputs."""
    a = normal(20, 40_001).cuda()
    d = ops.pairwise_sqdist(a)
    top = ops.feddwa_weights(d, 5)
    x, w_a, lam, w_b = (
        normal(*s, seed=k).cuda() for k, s in enumerate([(6, 8, 50), (10, 40), (6, 40), (40, 50)])
    )
    lam[:, ::2] = 0
    need = (True, True, False, True)
    return {
        "pairwise_sqdist": (ops.pairwise_sqdist, [a]),
        "pairwise_sqdist of two": (ops.pairwise_sqdist, [a, a + 1]),
        "feddwa_weights": (lambda s: ops.feddwa_weights(s, 5), [d]),
        "waffle_weights": (
            lambda s, t: ops.waffle_weights(s, t, 0.7),
            [d.sqrt(), torch.arange(20, device="cuda")],
        ),
        "aggregate": (ops.aggregate, [a, torch.rand(20, 20, device="cuda", dtype=torch.float64)]),
        "aggregate of five rows": (
            ops.aggregate,
            [a, torch.rand(5, 20, device="cuda", dtype=torch.float64)],
        ),
        "aggregate of one row": (
            ops.aggregate,
            [a, torch.rand(1, 20, device="cuda", dtype=torch.float64)],
        ),
        "aggregate by index": (ops.aggregate, [a, top.weight, top.index]),
        "rank1_linear": (ops.rank1_linear, [x, w_a, lam, w_b]),
        "rank1_linear_backward": (
            lambda *t: OPS.rank1_linear_backward.default(*t, *need)[:2],
            [normal(6, 8, 10).cuda(), x, w_a, lam, w_b],
        ),
        "sgd_step_": (lambda w, g: (ops.sgd_step_(w, g, 0.1), w)[1], [a.clone(), a + 1]),
    }


NAMES = (
    "pairwise_sqdist",
    "pairwise_sqdist of two",
    "feddwa_weights",
    "waffle_weights",
    "aggregate",
    "aggregate of five rows",
    "aggregate of one row",
    "aggregate by index",
    "rank1_linear",
    "rank1_linear_backward",
    "sgd_step_",
)


def outputs(result):
    return [t.clone() for t in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("name", NAMES)
def test_repeats_bit_for_bit(name):
    call, inputs = calls()[name]
    first = outputs(call(*[t.clone() for t in inputs]))
    for _ in range(5):
        for got, want in zip(outputs(call(*[t.clone() for t in inputs])), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(name):
    call, inputs = calls()[name]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_follows_the_current_stream(name):
    """On a side stream behind a long wait: the op has been queued, has not run, and the default
    stream is free."""
    call, inputs = calls()[name]
    want = outputs(call(*[t.clone() for t in inputs]))
    held = [t.clone() for t in inputs]
    torch.cuda.synchronize()
    side, done, free = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)  # about a quarter of a second
        result = call(*held)
        done.record()
    free.record()
    free.synchronize()
    assert not done.query(), "the op ran on another stream than the current one, or the call waited"
    side.synchronize()
    for got, expected in zip(outputs(result), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_captured_in_a_graph(name):
    call, inputs = calls()[name]
    fresh = [t.clone() if t.dtype == torch.int64 else t * 1.5 for t in inputs]
    want = outputs(call(*[t.clone() for t in fresh]))
    held = [t.clone() for t in inputs]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # warm up, as graphs want it
        call(*[t.clone() for t in held])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*held)
    for t, new in zip(held, fresh, strict=True):
        t.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(outputs(result), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_another_device_than_the_current_one(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    call, inputs = calls()[name]
    want = outputs(call(*[t.clone() for t in inputs]))
    for got, expected in zip(outputs(call(*[t.to("cuda:1") for t in inputs])), want, strict=True):
        assert got.device.index == 1 and torch.equal(got.cpu(), expected.cpu())


def test_mixed_devices_are_refused_with_a_sentence():
    a, half, index = on_two_devices("cuda")
    # past the checks: the kernel's own
    with pytest.raises(RuntimeError, match="expected index on cuda"):
        OPS.aggregate.default(a, half, index, None, 1.0, False)


def test_an_index_out_of_range_is_nan_not_a_crash():
    a, weight = torch.ones(3, 1000, device="cuda"), torch.full((2, 1), 1.0, device="cuda")
    got = ops.aggregate(a, weight, torch.tensor([[7], [1]], device="cuda"))
    assert got[0].isnan().all() and (got[1] == 1).all()


def test_opcheck_gradients_compile_and_vmap():
    a = normal(4, 9, dtype=torch.float64).cuda().requires_grad_()
    torch.library.opcheck(OPS.pairwise_sqdist.default, (a, None))
    torch.library.opcheck(OPS.feddwa_weights.default, (a.detach() ** 2, 2))
    weight = torch.rand(3, 4, dtype=torch.float64, device="cuda", requires_grad=True)
    torch.library.opcheck(OPS.aggregate.default, (a, weight, None, None, 1.0, False))
    rank1 = [
        normal(*s, seed=k, dtype=torch.float64).cuda().requires_grad_()
        for k, s in enumerate([(2, 3, 5), (4, 6), (2, 6), (6, 5)])
    ]
    torch.library.opcheck(OPS.rank1_linear.default, tuple(rank1))
    assert torch.autograd.gradcheck(ops.pairwise_sqdist, (a,))
    assert torch.autograd.gradcheck(ops.aggregate, (a, weight))
    assert torch.autograd.gradcheck(ops.rank1_linear, tuple(rank1))
    x, w_a, lam, w_b = (t.detach() for t in rank1)
    mapped = torch.vmap(ops.rank1_linear, in_dims=(0, None, 0, None))(x, w_a, lam, w_b)
    torch.testing.assert_close(mapped, ops.rank1_linear(x, w_a, lam, w_b))
    compiled = torch.compile(
        lambda t: ops.aggregate(t, *ops.feddwa_weights(ops.pairwise_sqdist(t), 2)), fullgraph=True
    )
    torch.testing.assert_close(
        compiled(a.detach()),
        ops.aggregate(a.detach(), *ops.feddwa_weights(ops.pairwise_sqdist(a.detach()), 2)),
    )


def test_more_than_two_to_the_31_elements():
    free, _ = torch.cuda.mem_get_info()
    p = (1 << 30) + 9
    if free < 40 * p:
        pytest.skip(f"needs {40 * p >> 30} GiB of GPU memory, {free >> 30} are free")
    a = torch.empty(3, p, dtype=torch.bfloat16, device="cuda")
    for i in range(3):
        a[i].fill_(0.5 * i)
    a[2, -1] = 3.0
    want = torch.tensor(
        [[0, 0.25 * p, p - 1 + 9.0], [0, 0, 0.25 * (p - 1) + 6.25], [0, 0, 0]], dtype=torch.float64
    )
    assert relative(ops.pairwise_sqdist(a), want + want.T) <= 1e-6
    out = ops.aggregate(
        a, torch.tensor([[0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [1.0, 0.0, 0.0]], device="cuda")
    )
    assert (
        out[0, 0] == 2.5
        and out[0, -1] == 6.5
        and out[1, -1] == 1.0
        and out[1, p // 2] == 1.0
        and out[2].abs().max() == 0
    )
    out = ops.aggregate(
        a,
        torch.tensor([[0.0, 1.0, 2.0]], device="cuda").expand(9, 3)
        * torch.arange(9, device="cuda")[:, None],
    )
    assert out[:, -1].tolist() == [6.5 * i for i in range(9)] and out[8, p // 2] == 20.0
    del out
    ops_out = ops.aggregate(
        a,
        torch.tensor([[2.0]], device="cuda").expand(3, 1),
        torch.tensor([[2], [1], [0]], device="cuda"),
    )
    assert ops_out[0, -1] == 6.0 and ops_out[1, -1] == 1.0 and ops_out[2, -1] == 0.0
