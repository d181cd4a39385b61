"""Every op on a GPU against its float64 reference on the CPU.

Streams, graphs, devices and sizes are tested here, because only a GPU has them.
"""

import hypothesis.strategies as st
import laws
import pytest
import torch
from hypothesis import given
from parts.devices import on_two_devices
from small import equals
from tolerance import F32, F64, FLOATS
from torch import Tensor
from ugly import lay, randn

from examples import examples
from pflcore import ops
from pflcore.ops import reference

OPS = torch.ops.pflcore
EACH = [
    (law, dtype)
    for law, dtypes in laws.LAWS.items()
    for dtype in (dtypes if law is not laws.rank1 else (F32,))
]


def put(t, draw, write=False):
    places = ["contiguous", "wide rows", "off by one"]
    return lay(t.cuda(), draw(st.sampled_from(places)))


def has_tensor_float64():
    generations = ((8, 0), (9, 0), (10, 0))
    return (
        torch.cuda.is_available() and torch.cuda.get_device_capability() in generations
    )


GPU = laws.Machine(
    ops,
    put,
    (0, 1, 31, 33, 1023, 1024, 4097, 100_003),
    "cuda",
    (0, 1, 2, 3, 7, 17, 30),
    has_tensor_float64(),
)


def calls(p=40_001, device="cuda"):
    """Calls of each op.

    The kernels of the rank-1 layer are listed too. The op uses them where torch's
    products are rounded.
    """
    named = laws.calls(ops, OPS.rank1_linear_backward.default, p, device=device)
    for name in ("rank1_listed", "rank1_listed_backward"):
        _, inputs = named[name.replace("listed", "linear")]
        named[name] = (getattr(OPS, name).default, inputs)
    return named


# Rows of each operand of distances that tensor cores compute, where the card has them.
MATRICES = {"triangle": (67,), "windows": (140,), "two operands": (40, 70)}


@pytest.fixture(params=[*calls(1, "cpu"), *MATRICES])
def case(request):
    """An op and its inputs.

    The op is a function of the inputs that gives a list of outputs.
    """
    if request.param in MATRICES:
        call = ops.pairwise_sqdist
        inputs = [randn(m, m, 20_011).float().cuda() for m in MATRICES[request.param]]
    else:
        call, inputs = calls()[request.param]
    return lambda given: outputs(call(*given)), inputs


def outputs(result):
    return [t.clone() for t in (result if isinstance(result, tuple) else (result,))]


def copies(inputs):
    return [t.clone() if isinstance(t, Tensor) else t for t in inputs]


# --- the same numbers -------------------------------------------------------


@pytest.mark.parametrize("law, dtype", EACH)
@examples(25)
@given(st.data())
def test_definition(law, dtype, data):
    law(GPU, dtype, data.draw)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-19, 1.0, 1e19, 1e30])
@pytest.mark.parametrize("m", [9, 20, 64, 65, 100, 130])
def test_sqdist_scales_and_bad_rows(scale, m):
    """Distances have the same bits for any alignment and order of rows.

    The sizes reach each kind of kernel.
    """
    a = randn(0, m, 20_011).float() * scale
    a[3] = a[1]
    got = ops.pairwise_sqdist(a.cuda())
    moved = randn(3, m).argsort().cuda()
    equals(ops.pairwise_sqdist(lay(a.cuda(), "off by one")), got)
    equals(ops.pairwise_sqdist(a.cuda()[moved]), got[moved][:, moved])
    a[2, 7] = torch.nan
    a[5, 9] = torch.inf
    got = ops.pairwise_sqdist(a.cuda()).cpu()
    want = reference.pairwise_sqdist(a, None)
    laws.assert_close(got, want, "sqdist", F32)


@pytest.mark.parametrize("m, n", [(100, None), (130, None), (40, 70)])
def test_sqdist_by_tensor_cores_and_by_windows_agree(m, n):
    """Tensor cores and windows give the same distances.

    The rows are clusters of close models with copies and an outlier. The listed pairs
    of the same rows are computed by windows.
    """
    base = randn(0, 2, 60_007)[torch.arange(m + (n or 0)) % 2]
    rows = (base * (1 + 1e-5 * randn(1, *base.shape))).float()
    rows[4] = rows[2]
    rows[7] = 1e3 * rows[7]
    a = rows[:m].cuda()
    b = None if n is None else rows[m:].cuda()
    everybody = torch.arange(n or m, device="cuda").expand(m, -1)
    got = ops.pairwise_sqdist(a, b)
    torch.testing.assert_close(
        got, ops.pairwise_sqdist(a, b, everybody), rtol=2e-6, atol=0
    )
    assert got[2, 4] == 0 if n is None else got.all()


@pytest.mark.parametrize("n", [20, 100])
@pytest.mark.parametrize("dtype", FLOATS)
def test_aggregate_has_the_same_bits_in_every_kernel(n, dtype):
    """A mixture has the same bits in every kernel.

    That holds for dense weights with any number of results, by index, and for any
    alignment.
    """
    updates = randn(0, n, 5002).to(dtype).cuda()
    weight = randn(1, 101, n).cuda()
    want = ops.aggregate(updates, weight)
    every = torch.arange(n, device="cuda").expand(101, n)

    for m in (1, 4, 5, 20, 21, 100):
        equals(ops.aggregate(updates, weight[:m]), want[:m])
    equals(ops.aggregate(lay(updates, "off by one"), weight), want)
    equals(ops.aggregate(updates, weight, every), want)
    equals(ops.aggregate(updates[:, :7], weight[:1], every[:1]), want[:1, :7])


def test_aggregate_entry_without_weight_changes_no_sign():
    """An entry of weight 0 does not change a sum's sign.

    The first product is too small for float32, so its sum is -0.
    """
    updates = torch.full((2, 300), 1e-30, device="cuda")
    weight = torch.tensor([[-1e-30, 0.0]], device="cuda")

    got = ops.aggregate(updates, weight, torch.tensor([[0, 1]], device="cuda"))

    assert (got == 0).all() and got.signbit().all()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("leads", [((6,), (), (6,), ()), ((6,),) * 4])
def test_tf32_rounds_no_factor(monkeypatch, leads, allowed):
    """The setting allow_tf32 does not change the rank-1 layer."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    inputs = laws.factors(32, 784, 120, 200, F32, leads, 0.3)
    laws.close_layer(inputs, [t.cuda() for t in inputs])


@pytest.mark.parametrize("op", ["rank1_linear", "rank1_listed"])
def test_rank1_linear_skips_inactive_factors(op):
    """The values of a factor with lam = 0 change no bit."""
    inputs = [t.cuda() for t in laws.factors(32, 57, 60, 31, F32, ((6,), (), (6,), ()))]
    _, w_a, lam, w_b = inputs
    lam[:, ::3] = 0

    def found():
        y = getattr(OPS, op).default(*inputs)
        backward = getattr(OPS, f"{op}_backward").default
        return [y, *backward(torch.ones_like(y), *inputs, True, True, False, True)]

    want = found()
    w_a[:, ::3] = torch.nan
    w_b[::3] = torch.inf
    laws.identical(found(), want)


# --- properties of a GPU ----------------------------------------------------


def test_repeats_bit_for_bit(case):
    call, inputs = case
    first = call(copies(inputs))
    for _ in range(5):
        laws.identical(call(copies(inputs)), first)


def test_nothing_waits_for_the_device(case):
    call, inputs = case
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_follows_the_current_stream(case):
    """An op runs on the current stream and does not wait.

    Behind a long wait on a side stream, the op is queued and has not run, while the
    default stream is free.
    """
    call, inputs = case
    want = call(copies(inputs))
    arguments = copies(inputs)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    done = torch.cuda.Event()
    free = torch.cuda.Event()
    # A first call, since memory for a new stream may wait for the device.
    with torch.cuda.stream(side):
        call(copies(inputs))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)  # about a quarter of a second
        result = call(arguments)
        done.record()
    free.record()
    free.synchronize()
    assert not done.query(), (
        "the op ran on another stream than the current one, or the call waited"
    )
    side.synchronize()
    laws.identical(result, want)


def test_captured_in_a_graph(case):
    call, inputs = case
    fresh = [
        t * 1.5 if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in inputs
    ]
    want = call(copies(fresh))
    arguments = copies(inputs)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # graphs need a warm-up
        call(copies(arguments))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(arguments)
    for t, new in zip(arguments, fresh, strict=True):
        if isinstance(t, Tensor):
            t.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    laws.identical(result, want)


def test_another_device_than_the_current_one(case):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    call, here = case
    got = call([t.to("cuda:1") if isinstance(t, Tensor) else t for t in here])
    assert all(t.device.index == 1 for t in got)
    laws.identical([t.cpu() for t in got], [t.cpu() for t in call(here)])


def test_mixed_devices_are_refused_with_a_sentence():
    a, half, index = on_two_devices("cuda")
    # The kernel has its own check, behind those of the public op.
    with pytest.raises(RuntimeError, match="expected index on cuda"):
        OPS.aggregate.default(a, half, index, None, 1.0, False)


def test_an_index_out_of_range_is_nan_not_a_crash():
    a = torch.ones(3, 1000, device="cuda")
    weight = torch.full((2, 1), 1.0, device="cuda")
    got = ops.aggregate(a, weight, torch.tensor([[7], [1]], device="cuda"))
    assert got[0].isnan().all() and (got[1] == 1).all()


def test_opcheck_gradients_compile_and_vmap():
    a = randn(0, 4, 9).cuda().requires_grad_()
    weight = randn(1, 3, 4).cuda().requires_grad_()
    factors = laws.factors(3, 5, 6, 4, leads=((2,), (), (2,), ()))
    rank1 = tuple(t.cuda().requires_grad_() for t in factors)
    torch.library.opcheck(OPS.feddwa_weights.default, (a.detach() ** 2, 2))
    for op, call, arguments, rest in (
        (OPS.pairwise_sqdist, ops.pairwise_sqdist, (a,), (None,)),
        (OPS.aggregate, ops.aggregate, (a, weight), (None, None, 1.0, False)),
        (OPS.rank1_linear, ops.rank1_linear, rank1, ()),
    ):
        torch.library.opcheck(op.default, arguments + rest)
        assert torch.autograd.gradcheck(call, arguments)
    mapped = torch.vmap(ops.rank1_linear, in_dims=(0, None, 0, None))(*rank1)
    torch.testing.assert_close(mapped, ops.rank1_linear(*rank1))

    def step(t):
        return ops.aggregate(t, *ops.feddwa_weights(ops.pairwise_sqdist(t), 2))

    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(a.detach()), step(a.detach()))


def test_more_than_two_to_the_31_elements():
    free, _ = torch.cuda.mem_get_info()
    p = (1 << 30) + 9
    if free < 40 * p:
        pytest.skip(f"needs {40 * p >> 30} GiB of GPU memory, {free >> 30} are free")
    a = torch.empty(3, p, dtype=torch.bfloat16, device="cuda")
    for i in range(3):
        a[i].fill_(0.5 * i)
    a[2, -1] = 3.0
    half = torch.tensor(
        [[0, 0.25 * p, p - 1 + 9.0], [0, 0, 0.25 * (p - 1) + 6.25], [0, 0, 0]],
        dtype=F64,
    )
    want = half + half.T
    laws.assert_close(ops.pairwise_sqdist(a).cpu(), want, "sqdist", a.dtype)

    def mix(weight, index=None):
        index = None if index is None else torch.tensor(index, device="cuda")
        return ops.aggregate(a, torch.tensor(weight, device="cuda"), index)

    out = mix([[0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    assert out[:2, [0, p // 2, -1]].tolist() == [[2.5, 2.5, 6.5], [1.0, 1.0, 1.0]]
    assert not out[2].any()
    del out
    out = mix([[0.0, i, 2.0 * i] for i in range(9)])
    assert out[:, -1].tolist() == [6.5 * i for i in range(9)] and out[8, p // 2] == 20.0
    del out
    assert mix([[2.0]] * 3, [[2], [1], [0]])[:, -1].tolist() == [6.0, 1.0, 0.0]
