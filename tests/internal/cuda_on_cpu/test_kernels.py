"""Tests of the CUDA kernels against the references, on the CPU.

tests/internal/cuda_on_cpu runs the kernels block by block.
"""

import importlib.util

import hypothesis.strategies as st
import laws
import pytest
import torch
from hypothesis import given
from internal import cuda_on_cpu as kernels
from internal.cuda_on_cpu import (
    A100,
    DTYPES,
    H200,
    RTX4090,
    T4,
    Card,
    aggregate_plan,
    call,
    compiler,
    guarded,
    library,
    plan,
)
from laws import distances, identical, integers, listed
from places import ROOT
from tolerance import BF16, F16, F32, F64, assert_close
from torch import Tensor
from ugly import intact, randn

from examples import examples
from pflcore.ops import reference

pytestmark = [
    pytest.mark.deep("a compiler"),
    pytest.mark.skipif(
        compiler() is None, reason="no C++ compiler to run the CUDA kernels with"
    ),
]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def put(t, draw, write=False):
    # The first row is `shift` elements off a 16-byte boundary. With None, the last
    # element stands directly before the forbidden page.
    shift = draw(st.sampled_from((None, 0, 1, 3)))
    gap = draw(st.sampled_from((0, 1, 8)))
    return guarded(t, shift, gap)


# test_feddwa_weights_of_few_and_of_many has more clients.
CUDA = laws.Machine(
    kernels, put, (0, 1, 2, 17, 31, 33, 257, 1023, 3000), clients=(1, 2, 3, 17, 67, 257)
)
TENSOR_CORES = laws.Machine(
    kernels,
    put,
    (0, 1, 2, 33, 63, 257, 300),
    "cpu",
    (2, 17, 21, 24, 26, 33, 50, 66, 90),
    True,
)
NO_TENSOR_CORES = 86  # a compute capability with slow float64
EACH = [
    (law, dtype)
    for law, dtypes in laws.LAWS.items()
    for dtype in (dtypes if law is not laws.rank1 else (F32, F64))
]


def order(seed):
    """Sets the order in which threads and blocks run.

    0 is forwards, 1 backwards, and any other number a shuffled order. Above 2, copies
    to shared memory arrive at once, and not when they are waited for.
    """
    library().set_order(seed)


def shared(most=99 * 1024):
    """Sets the shared memory that the GPU gives a kernel on request."""
    library().set_shared(most)


def card(generation, worth=0):
    """Sets the GPU's compute capability.

    `worth` is the number of pairs times columns from which a Gram matrix is faster.
    """
    library().set_card(generation, worth)
    shared(99 * 1024 if generation == NO_TENSOR_CORES else 163 * 1024)


def copies(beside=True):
    """Sets if the GPU copies to shared memory beside the arithmetic."""
    library().set_copies(beside)


@pytest.fixture(autouse=True)
def forwards():
    order(0)
    card(NO_TENSOR_CORES)
    yield
    order(0)
    card(NO_TENSOR_CORES)
    copies()


def normal(*size, seed=0, dtype=F32):
    return randn(seed, *size, dtype=dtype)


@pytest.mark.parametrize("law, dtype", EACH)
@examples(12)
@given(st.data())
def test_definition(law, dtype, data):
    law(CUDA, dtype, data.draw)


@pytest.mark.long("minutes for a kernel's every path")
@pytest.mark.parametrize("generation", [80, 90])
@examples(40)
@given(st.data())
def test_distances_by_tensor_cores(generation, data):
    card(generation)
    laws.sqdist(TENSOR_CORES, F32, data.draw)


def test_harness_catches_what_a_gpu_would_not_forgive():
    out = torch.zeros(64, dtype=F64)
    results = []
    for seed in (0, 1):
        order(seed)
        call("broken", 0, out)
        results.append(out.nan_to_num(-1.0))
    assert not torch.equal(*results), (
        "a missing barrier must show when the order of the threads changes"
    )
    for fault, why in (
        (2, "shared memory that was never written must read as NaN"),
        (3, "a copy that was not waited for must not have arrived"),
    ):
        # A copy that arrives too early brings this value.
        out.fill_(1.0)
        call("broken", fault, out)
        assert out.isnan().all(), why


@pytest.mark.parametrize(
    "fault, sentence",
    [
        pytest.param(1, "not every thread reaches", id="a barrier"),
        pytest.param(4, "misaligned", id="alignment"),
        pytest.param(5, "past the end of shared memory", id="shared memory's end"),
        pytest.param(6, "outside of its buffers", id="the input's end"),
        pytest.param(
            7,
            "store to global memory went elsewhere",
            id="global store, dynamic shared",
        ),
        pytest.param(
            8, "store to global memory went elsewhere", id="global store, static shared"
        ),
        pytest.param(
            9, "store to global memory went elsewhere", id="global store, own stack"
        ),
        pytest.param(
            10, "store to shared memory went elsewhere", id="shared store, global"
        ),
        pytest.param(11, "to memory that is not shared", id="copy to global"),
        pytest.param(
            12, "from memory that is not global", id="copy from dynamic shared"
        ),
        pytest.param(
            13, "from memory that is not global", id="copy from static shared"
        ),
        pytest.param(14, "from memory that is not global", id="copy from own stack"),
    ],
)
def test_harness_refuses_faulty_kernel(fault, sentence):
    out = torch.zeros(1, 64, dtype=F64)

    with pytest.raises(RuntimeError, match=sentence):
        call("broken", fault, guarded(out))


@pytest.mark.parametrize(
    "limits, sentence",
    [
        ((), "bytes of shared memory"),
        ((64,), "bytes of shared memory"),
        ((99, 64), "was lowered"),
    ],
)
def test_harness_refuses_a_launch_without_its_memory(limits, sentence):
    """Of a kernel that takes 96 KiB, after requests of so many KiB."""
    with pytest.raises(RuntimeError, match=sentence):
        call("launch_large", [*limits, 0])


def test_a_smaller_call_leaves_shared_memory():
    """The launch of another host thread may still count on it."""
    card(90)
    for m in (104, 81):  # of one kernel, and both above what every card gives
        rows = normal(m, 40)
        assert_close(kernels.pairwise_sqdist(rows), laws.exact(rows), "sqdist", F32)


def test_harness_lets_right_stores_and_copies_pass():
    call("broken", 15, torch.zeros(64, dtype=F64))


@every_dtype
def test_columns_of_one_group_or_two_have_the_bits_of_their_definition(dtype):
    """A group of 64 rows is sorted at once; of fewer rows, a part of its network.

    There are ties, infinities, zeros of both signs and NaN.
    """
    for n in range(1, 68):
        rows = normal(n, 70, seed=n, dtype=dtype)
        rows[:, ::3] = rows[:, ::3].round()
        rows[n // 2, 1::4] = torch.inf
        rows[n // 3, 2::4] = -torch.inf
        rows[n - 1, 5] = torch.nan
        placed = guarded(rows, 1, 3)
        for count in {1, n // 3 + 1, n}:
            identical(
                kernels.mean_around_median(placed, count),
                laws.mean_around_median(rows, count),
            )
        for removed in {0, n // 4, (n - 1) // 2}:
            identical(
                kernels.trimmed_mean(placed, removed), laws.trimmed_mean(rows, removed)
            )


@pytest.mark.long("minutes for a kernel's every path")
@pytest.mark.parametrize("dtype", [F32, F64])
def test_columns_that_do_not_fit_shared_memory(dtype):
    rows = normal(400, 1100, dtype=dtype)
    identical(kernels.trimmed_mean(rows, 70), laws.trimmed_mean(rows, 70))
    identical(kernels.mean_around_median(rows, 70), laws.mean_around_median(rows, 70))


def test_the_order_of_the_threads_changes_no_bit():
    """A missing barrier would change bits.

    The threads run backwards or shuffled, and each warp runs ahead as far as the
    barriers allow. Rows at another place, or in another order, change no bit either.
    """

    def everything(place=Tensor.clone):
        ways = laws.calls(kernels, kernels.rank1_linear_backward, 1023).values()
        return [
            f(*(place(t) if isinstance(t, Tensor) else t for t in given))
            for f, given in ways
        ]

    first = everything()
    for seed in (1, 2, 7):
        order(seed)
        identical(everything(), first)
    order(0)
    a = normal(70, 1500)
    moved = randn(3, 70).argsort()
    want = kernels.pairwise_sqdist(a)
    assert torch.equal(kernels.pairwise_sqdist(guarded(a, 1, 3)), want)
    assert torch.equal(kernels.pairwise_sqdist(a[moved]), want[moved][:, moved])


# --- pairwise_sqdist --------------------------------------------------------


@pytest.mark.long("minutes for a kernel's every path")
@every_dtype
@pytest.mark.parametrize("most", [0, 128])
@pytest.mark.parametrize(
    "m, n, p",
    [
        *(
            (m, n, 263)
            for m, n in [(64, 0), (65, 0), (130, 0), (1, 100), (100, 1), (67, 129)]
        ),
        *((m, n, 263) for m, n in [(16, 16), (9, 40), (130, 67)]),
        *[(70, 0, 1500), (300, 1, 9), (257, 3, 100), (129, 70, 5)],
    ],
)
def test_sqdist_windows(m, n, p, dtype, most):
    """There are more rows than a window, or a grid, can hold.

    Listed pairs have the bits of all pairs. The memory beyond the rows is NaN.
    """
    a = guarded(normal(m, p, dtype=dtype), 1, 3)
    b = normal(n, p, seed=1, dtype=dtype) if n else None
    rows = n or m
    want = kernels.pairwise_sqdist(a, b, most=most)
    assert_close(want, reference.pairwise_sqdist(a, b), "sqdist", dtype)
    index = integers(2, -1, rows + 1, m, 5)
    want = listed(want, index.clamp(max=rows - 1))
    want[index == rows] = torch.nan
    identical(kernels.pairwise_sqdist(a, b, index, most=most), want)


def cases(rows, p):
    """Matrices by name, with difficult rows.

    The rows are far apart or near, equal, one far from the others, not finite, or of
    extreme scales.
    """
    x = normal(rows, p)
    base = normal(2, p, seed=1)
    clusters = base[torch.arange(rows) % 2]
    copies = x.clone()
    outlier = x.clone()
    broken = x.clone()
    copies[2::3] = copies[: len(copies[2::3])]
    outlier[-1] *= 1e6
    broken[1, p // 2] = torch.inf
    broken[2, 0] = torch.nan
    broken[-1, -1] = -torch.inf
    broken[3] = broken[1]
    return {
        "random": x,
        "clusters 1e-3": clusters * (1 + 1e-3 * x),
        "clusters 1e-6": clusters * (1 + 1e-6 * x),
        "clusters 1e-7": clusters * (1 + 1e-7 * x),
        "copies": copies,
        "equal": x[:1].repeat(rows, 1),
        "outlier": outlier,
        "broken": broken,
        "tiny": x * 1e-15,
        "denormal": x * 1e-42,
        "huge": x * 1e15,
        "largest": x.sign() * 3e38,
    }


# Sizes near the sizes of tiles. With one operand, the paths are few rows, triangles
# and windows. With two operands, it is windows.
SIZES = [
    *(
        (16, 0, 700),
        (17, 0, 3),
        (20, 0, 385),
        (21, 0, 67),
        (32, 0, 129),
        (33, 0, 1),
        (48, 0, 65),
    ),
    *(
        (49, 0, 300),
        (65, 0, 130),
        (81, 0, 64),
        (104, 0, 131),
        (105, 0, 66),
        (128, 0, 63),
    ),
    *((129, 0, 130), (24, 24, 130), (24, 90, 67), (65, 33, 129), (130, 25, 70)),
]


@pytest.mark.long("minutes for a kernel's every path")
@pytest.mark.parametrize(
    "m, n, p, generation",
    # The blocks of the two generations with tensor cores differ in size.
    [(*size, generation) for size in SIZES for generation in (NO_TENSOR_CORES, 90)]
    + [
        (*size, 80)
        for size in [(33, 0, 1), (104, 0, 131), (129, 0, 130), (65, 33, 129)]
    ],
)
def test_sqdist_of_every_path(m, n, p, generation):
    """Each path follows the definition for near, equal and broken rows.

    The result is symmetric, with 0 on the diagonal. Listed pairs are close to the
    matrix; without a Gram matrix they have its bits.
    """
    card(generation)
    path = kernels.PATHS[plan(m, n or m, p, not n, F32).path]
    expected = "few" if not n and m <= 20 else "gram"
    assert path == (
        expected if generation != NO_TENSOR_CORES or expected == "few" else "windows"
    )
    for name, rows in cases(m + n, p).items():
        a = guarded(rows[:m], 1, 3)
        b = guarded(rows[m:], None, 1) if n else None
        got = kernels.pairwise_sqdist(a, b)
        want = reference.pairwise_sqdist(a, b)
        assert_close(got, want, "sqdist", F32)
        if not n:
            identical(got, got.T)
            assert not got.diagonal().any(), name
        index = integers(2, -1, n or m, m, 3)
        found = kernels.pairwise_sqdist(a, b, index)
        assert_close(found, listed(got, index), "sqdist", F32)
        if path != "gram":
            identical(found, listed(got, index))


def done_again(rows):
    """The share of pairs that the certificate leaves to windows.

    These pairs have the bits of listed pairs.
    """
    n = len(rows)
    by_windows = kernels.pairwise_sqdist(rows, None, torch.arange(n).repeat(n, 1))
    return float((kernels.pairwise_sqdist(rows) == by_windows).double().mean()) - 1 / n


def test_sqdist_certificate_spares_all_but_close_pairs():
    card(90)
    rows = cases(33, 1000)

    for name in ("random", "outlier", "tiny", "huge"):
        assert done_again(rows[name]) < 0.03, name
    within = done_again(rows["clusters 1e-6"])

    # Half of the pairs are in one cluster.
    assert 0.4 < within < 0.55


@pytest.mark.long("minutes for a kernel's every path")
@pytest.mark.parametrize("generation", [NO_TENSOR_CORES, 90])
@pytest.mark.parametrize("m, n", [(20, 0), (33, 0), (100, 0), (130, 0), (40, 70)])
def test_sqdist_bits_depend_on_neither_order_nor_place(m, n, generation):
    """The order and alignment of the rows change no bit.

    The order of the threads changes no bit either.
    """
    card(generation)
    rows = cases(m + n, 333)["clusters 1e-3"]
    a = rows[:m]
    b = rows[m:] if n else None
    want = kernels.pairwise_sqdist(a, b)

    for seed in (1, 2, 7):
        order(seed)
        identical(kernels.pairwise_sqdist(a, b), want)
    order(0)
    for shift, gap in ((0, 3), (2, 1), (1, 3), (0, 1)):
        moved = guarded(a, shift, gap), guarded(b, gap % 3, shift) if n else None
        identical(kernels.pairwise_sqdist(*moved), want)
    pa = randn(3, m).argsort()
    pb = randn(4, n or m).argsort()
    identical(
        kernels.pairwise_sqdist(a[pa], b[pb] if n else None),
        want[pa][:, pb if n else pa],
    )


@pytest.mark.parametrize("generation", [NO_TENSOR_CORES, 80, 90])
@pytest.mark.parametrize("m", [17, 40])
def test_sqdist_of_equal_rows_is_zero(m, generation):
    """Equal rows have distance 0, beside two hard cases.

    The square of one difference is 0 in float32. Some rows are infinite in the same
    columns.
    """
    card(generation)
    rows = normal(m, 333)
    rows[1:4] = rows[0]
    rows[:3, -1] = 0.0
    rows[2, -1] = 1e-30  # its square is 0 in float32
    rows[5:9] = torch.inf

    got = kernels.pairwise_sqdist(rows)

    assert got[0, 1] == 0
    assert (
        float(got[0, 2])
        == float(got[2, 1])
        == pytest.approx(float(rows[2, -1]) ** 2, rel=1e-6)
    )
    # The difference of two infinities is NaN.
    assert got[5, 6].isnan()
    assert got[5, 0].isinf()


@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 1 << 40),
    st.booleans(),
    st.sampled_from(list(DTYPES)),
    st.sampled_from([0, 75, 80, 86, 89, 90, 100, 103, 120]),
    st.sampled_from([0, 1 << 25]),
)
def test_sqdist_plan(m, n, p, symmetric, dtype, generation, worth):
    """A launch is possible, and fast, at all sizes.

    It has whole warps and a number of blocks that the grid holds, and it covers each
    column once. It takes few rows or tensor cores where these are available.
    """
    n = m if symmetric else n
    card(generation, worth)
    got = plan(m, n, p, symmetric, dtype)
    windows = -(-m // 64) * -(-n // 64)
    assert got.threads % 32 == 0 and 32 <= got.threads <= 256
    assert (
        got.lanes in (1, 2, 4, 8, 16, 32)
        and got.stages in (2, 4)
        and 1 <= got.splits <= 2048
    )
    # With very many columns, even few rows fill the GPU with blocks.
    if p >= 1 << 24:
        assert got.splits * windows >= 1024
    # A block has several stages, so that filling its pipeline does not take most time.
    elif got.splits * windows > 2 * 528:
        assert p >= 8 * got.chunk * got.splits

    few = symmetric and 16 <= m <= 20
    many = m > 20 if symmetric else min(m, n) >= 24
    pairs = m * n // 2 if symmetric else m * n
    gram = many and generation in (80, 90, 100) and pairs * p >= worth
    assert kernels.PATHS[got.path] == (
        "windows"
        if dtype is not F32
        else "few"
        if few
        else "gram"
        if gram
        else "windows"
    )
    if kernels.PATHS[got.path] != "windows":
        assert 1 <= got.first_splits <= 528 and got.first_columns % 64 == 0
        assert 0 < p - (got.first_splits - 1) * got.first_columns <= got.first_columns
        # Listed pairs take the path of few rows, or windows.
        path = kernels.PATHS[plan(m, n, p, symmetric, dtype, listed=2).path]
        assert path == ("few" if few else "windows")


# --- weights ----------------------------------------------------------------


def test_waffle_weights_one_target_and_a_wrong_one():
    dist = distances(3, 5, 2)
    one, same, wrong = (
        kernels.waffle_weights(dist, torch.tensor(t), 0.5)
        for t in ([2], [2, 2, 2], [2, 5, -1])
    )
    assert torch.equal(one, same)
    assert torch.equal(wrong[0], one[0]) and wrong[1:].isnan().all()


@pytest.mark.parametrize("seed", [0, 1, 2, 7])
@pytest.mark.parametrize("n, k", [(257, 5), (300, 37), (300, 38), (1100, 3)])
def test_feddwa_weights_of_few_and_of_many(n, k, seed):
    """The sizes are on both sides of the limit between two kernels.

    Ties, NaN and -0 give the result of the reference, for each order of the threads.
    """
    sqdist = distances(2, n, n + k)
    sqdist[1, 7] = -0.0
    sqdist[1, 3] = 0.0
    order(seed)

    got = kernels.feddwa_weights(sqdist, k)
    weight, index = reference.feddwa_weights(sqdist, k)

    assert torch.equal(got.index, index)
    torch.testing.assert_close(got.weight, weight, rtol=1e-12, atol=1e-300)


# --- aggregate --------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("most", [48 * 1024, 64 * 1024, 227 * 1024])
@pytest.mark.parametrize("m", [1, 6, 10, 70, 128, 130, 259])
def test_aggregate_more_rows_than_shared_memory_holds(m, most, dtype):
    """The GPU gives a kernel three sizes of shared memory.

    48 KiB are on all GPUs, and 64 KiB on those of compute capability 7.5. 227 KiB are
    more than the kernel wants.
    """
    shared(most)
    n = 1500 if m < 100 else 300
    updates = normal(n, 45, dtype=dtype)
    weight = randn(1, m, n)
    rtol = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(
        kernels.aggregate(updates, weight).double(),
        weight @ updates.double(),
        rtol=rtol,
        atol=rtol * n**0.5 * 3,
    )


# The sums are float32 or float64; how many rows there are decides the way to them.
@pytest.mark.parametrize(
    ("m", "dtype"),
    [(9, dtype) for dtype in DTYPES]
    + [(100, F32), (100, BF16), (130, F64)]
    + [
        pytest.param(m, dtype, marks=pytest.mark.long("minutes for a kernel's paths"))
        for m, dtype in [(100, F64), (100, F16), (130, F32), (130, F16), (130, BF16)]
    ],
)
def test_aggregate_of_many_rows_whatever_their_alignment(m, dtype):
    """The alignment changes no bit, and neither do other rows.

    Updates are copied 16, 8, 4 or 2 bytes at a time. The result is written in packs or
    one by one.
    """
    updates = normal(37, 1290, dtype=dtype)
    weight = randn(1, m, 37)
    want = kernels.aggregate(updates, weight)
    for shift, gap in ((0, 6), (2, 4), (4, 0), (1, 1), (0, 14), (2, 6), (None, 0)):
        out = guarded(torch.zeros(m, 1290, dtype=dtype), shift, gap)
        kernels.aggregate(guarded(updates, shift, gap), weight, out=out)
        assert torch.equal(out, want) and intact(out), (shift, gap)
    for row in (0, m - 1):
        assert torch.equal(
            kernels.aggregate(updates, weight[row : row + 1])[0], want[row]
        )


def few_results():
    """Each shape with each dtype: one each in the deep suite, the rest in the long."""
    long = pytest.mark.long("minutes for a kernel's paths")
    shapes = [(21, 4, 0), (37, 1, 1), (50, 3, 2), (22, 2, 7)]
    for i, shape in enumerate(shapes):
        for j, dtype in enumerate(DTYPES):
            yield pytest.param(*shape, dtype, marks=() if i == j else long)


@pytest.mark.parametrize("n, m, seed, dtype", [*few_results()])
def test_aggregate_of_few_results_has_the_bits_of_many(n, m, seed, dtype):
    """A ring of rows that is the thread's own gives the sums of other kernels.

    Updates are copied 16, 8, 4 or 2 bytes at a time. Blocks take several tiles, and the
    last one is not whole. The order of the threads changes no bit.
    """
    weight = randn(1, 9, n)
    for p in (1, 1026, 5 * 1024 + 8):
        updates = normal(n, p, dtype=dtype)
        base = normal(9, p, seed=2, dtype=dtype)
        order(0)
        want = kernels.aggregate(updates, weight, None, base)[:m]
        order(seed)
        for shift, gap in ((0, 0), (2, 6), (1, 1), (None, 0)):
            out = guarded(base[:m], gap, shift or 0)
            placed = guarded(updates, shift, gap)
            kernels.aggregate(placed, weight[:m], None, out, out=out)
            assert torch.equal(out, want) and intact(out), (p, shift, gap)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_aggregate_weights_in_parts_change_no_bit(dtype):
    """Shared memory may hold the weights of some rows at a time, or of all."""
    updates = normal(1100, 520, dtype=dtype)
    weight = randn(1, 2, 1100)
    shared(163 * 1024)
    want = kernels.aggregate(updates, weight)

    shared(48 * 1024)
    for seed in (0, 7):
        order(seed)
        assert torch.equal(kernels.aggregate(updates, weight), want)


@given(
    n=st.integers(0, 3000),
    m=st.integers(1, 3000),
    p=st.integers(1, 1 << 34),
    k=st.one_of(st.none(), st.integers(0, 300)),
    dtype=st.sampled_from(list(DTYPES)),
    precise=st.booleans(),
    card=st.sampled_from([H200, A100, RTX4090, T4]),
)
def test_aggregate_plan_fits_the_card(n, m, p, k, dtype, precise, card):
    """The launch of a plan is possible, and covers the work once.

    It has whole warps, and no more shared memory than a block gets. Each result and
    column is computed once.
    """
    plan = aggregate_plan(n, m, p, card, k, dtype, precise)

    dense = ("held", "ringed", "streamed")
    assert plan.way in (dense if k is None else ("tiled", "direct"))
    assert plan.threads % 32 == 0 and 32 <= plan.threads <= 512
    assert 0 <= plan.shared <= card.block_shared
    assert plan.way != "held" or plan.shared <= 48 * 1024
    assert plan.way != "tiled" or card.copies
    assert plan.tile_cols & (plan.tile_cols - 1) == 0
    assert (plan.tiles - 1) * plan.tile_cols < p <= plan.tiles * plan.tile_cols
    assert plan.blocks_m <= plan.grid < 1 << 31 and plan.grid % plan.blocks_m == 0
    if k is None:
        assert (plan.blocks_m - 1) * plan.results < m <= plan.blocks_m * plan.results
    if plan.way == "streamed":
        assert plan.chunk >= min(n, 10) and plan.shared >= 20 * 1024
    if plan.way == "ringed":
        assert m <= 4 and plan.chunk >= min(n, 512) and plan.shared >= 32 * 1024


@pytest.mark.parametrize(
    "card, n, m, k, way, tile_cols",
    [
        pytest.param(H200, 20, 20, None, "held", 256, id="few rows"),
        pytest.param(H200, 20, 21, None, "streamed", 128, id="more results"),
        pytest.param(H200, 21, 20, None, "streamed", 128, id="more rows"),
        pytest.param(H200, 21, 4, None, "ringed", 512, id="few results"),
        pytest.param(H200, 21, 5, None, "streamed", 128, id="no longer few"),
        pytest.param(H200, 100, 100, None, "streamed", 128, id="many of many"),
        pytest.param(T4, 100, 1, None, "held", 256, id="in turns"),
        pytest.param(T4, 5000, 4, None, "ringed", 512, id="weights beyond 48 KiB"),
        pytest.param(
            H200, 20, 20, 5, "tiled", 128, id="several blocks hold a tile each"
        ),
        pytest.param(H200, 100, 100, 5, "tiled", 256, id="one block holds a tile"),
        pytest.param(A100, 100, 100, 5, "tiled", 64, id="A100"),
        pytest.param(RTX4090, 100, 100, 5, "tiled", 32, id="RTX 4090"),
        pytest.param(H200, 1000, 2, 3, "tiled", 128, id="few rows are used"),
        pytest.param(H200, 1000, 1000, 5, "direct", 128, id="no tile fits"),
        pytest.param(T4, 20, 20, 5, "direct", 128, id="copies do not run beside"),
    ],
)
def test_aggregate_plan(card, n, m, k, way, tile_cols):
    plan = aggregate_plan(n, m, 10**6, card, k)

    assert (plan.way, plan.tile_cols) == (way, tile_cols)


@pytest.mark.parametrize("n", [1, 19, 20, 21, 41, 130])
@pytest.mark.parametrize(
    "p, dtype", [(1, F32), (257, F32), (257, F64), (257, F16), (131, BF16)]
)
def test_aggregate_has_the_same_bits_in_every_kernel(n, p, dtype):
    """A result's bits do not depend on the number of results.

    They are the same for a dense mix, for a mix by index, and on a GPU without copies
    beside the arithmetic.
    """
    updates = guarded(normal(n, p, dtype=dtype), 1, 3)
    weight = randn(1, 101, n)
    every = torch.arange(n).expand(101, n)
    want = kernels.aggregate(updates, weight)

    for beside in (True, False):
        copies(beside)
        for m in (1, 4, 5, 20, 21, 100):
            assert torch.equal(kernels.aggregate(updates, weight[:m]), want[:m]), (
                beside,
                m,
            )
        for m in (1, 9):
            got = kernels.aggregate(updates, weight[:m], every[:m])
            assert torch.equal(got, want[:m]), (beside, m)


@pytest.mark.parametrize("dtype", [F32, F64, F16])
@pytest.mark.parametrize(
    "n, most, way, tile_cols",
    [
        (100, 227, "tiled", 256),
        (20, 99, "tiled", 128),
        (100, 113, "tiled", 64),
        (100, 99, "tiled", 32),
        (100, 24, "direct", 128),
    ],
)
def test_aggregate_tiles_of_every_width(n, most, way, tile_cols, dtype):
    """A tile has as many columns as shared memory holds.

    Rows that no result uses are NaN. Tiles follow each other in a buffer. The order of
    the threads changes no bit.
    """
    index = integers(1, 0, n // 4, 40, 5) * 4 + 1
    weight = randn(2, 40, 5)
    plan = aggregate_plan(
        n, 40, 1, Card(2, most << 10, (most + 1) << 10, copies=True), 5
    )
    assert (plan.way, plan.tile_cols) == (way, tile_cols)

    for p in (1, 31, tile_cols - 1, tile_cols + 2, 1501):
        updates = normal(n, p, dtype=dtype)
        updates[::4] = torch.nan
        copies(False)
        want = kernels.aggregate(updates, weight, index)
        assert want.isfinite().all()
        copies()
        for seed, layout in ((0, (0, 0)), (1, (0, 6)), (2, (1, 1)), (7, (None, 0))):
            order(seed)
            shared(most * 1024)
            got = kernels.aggregate(guarded(updates, *layout), weight, index)
            assert torch.equal(got, want), (p, seed, layout)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 10])
def test_aggregate_by_index_has_the_bits_of_a_loop(k):
    """A number of entries that is a constant of the kernel changes no bit.

    Without copies beside the arithmetic a loop adds the rows.
    """
    updates = normal(20, 700)
    weight = randn(1, 9, k)
    weight[2, 0] = 0.0
    index = integers(2, 0, 20, 9, k)
    copies(False)
    want = kernels.aggregate(updates, weight, index)

    copies()
    for seed, layout in ((0, (0, 4)), (1, (2, 2)), (2, (1, 1)), (7, (None, 0))):
        order(seed)
        out = guarded(torch.zeros(9, 700), *layout)
        kernels.aggregate(guarded(updates, *layout), weight, index, out=out)
        assert torch.equal(out, want) and intact(out), (seed, layout)


def test_aggregate_unread_rows():
    """A row is read unless its rounded lr * weight is 0.

    The product is rounded to the dtype of the sum, so that a NaN in the row does not
    depend on a later rounding. An index out of range gives NaN.
    """
    updates = normal(7, 33)
    wrong = torch.tensor([[1, 9], [7, 1], [-1, 1], [1, -1]])
    weight = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 2.0], [0.25, 0.75]], dtype=F64)
    got = kernels.aggregate(updates, weight, wrong)
    assert got.isnan().all(1).tolist() == [False, True, False, True]
    assert got[::2].isfinite().all()
    tiny = torch.tensor([[1e-50, 1.0], [1.0, 1e-30]], dtype=F64)
    updates[1], index = torch.nan, torch.tensor([[1, 2], [3, 1]])
    got = kernels.aggregate(updates, tiny, index, lr=1e-20, precise=True)
    # The tiny weights are not 0 in float64.
    assert got.isnan().all(1).tolist() == [True, True]
    assert torch.equal(
        kernels.aggregate(updates, tiny, index, lr=1e-20), 1e-20 * updates[[2, 3]]
    )


# --- rank1_linear -----------------------------------------------------------


def test_rank1_linear_skips_inactive_factors():
    """An inactive factor is not read.

    Its lam is 0, and lam needs no gradient. So its values cannot matter.
    """
    x, w_a, lam, w_b = laws.factors(4, 9, 40, 7, F32, ((2,), (), (2,), ()))
    lam[:, ::3] = 0
    need = (True, True, False, True)
    grad = normal(2, 4, 7, seed=4)

    def output_and_gradients():
        grads = kernels.rank1_linear_backward(grad, x, w_a, lam, w_b, *need)
        return [
            kernels.rank1_linear(x, w_a, lam, w_b),
            *(g for g in grads if g is not None),
        ]

    clean = output_and_gradients()
    w_a[:, ::3] = torch.nan
    w_b[::3] = torch.nan
    identical(output_and_gradients(), clean)


# --- facts about a library ----------------------------------------------------


@pytest.mark.parametrize(
    "listed, names",
    [
        ("", ""),
        ("900", "sm_90"),
        ("750,900", "sm_75, sm_90"),
        ("1000,1200", "sm_100, sm_120"),
    ],
)
def test_architectures_are_named(listed, names):
    assert library().architecture_names(listed.encode()).decode() == names


# --- small runs for tools on a card -------------------------------------------


@pytest.mark.long("minutes for a kernel's every path")
def test_small_runs_reach_every_kernel():
    """The small runs launch all kernels in the table of registers.

    So a tool that watches the small runs on a GPU watches each of these kernels.
    """
    small_runs = module_at(ROOT / "tests" / "gpu" / "small_runs.py")
    registers = module_at(ROOT / ".ci" / "registers.py")
    _, table = registers.read_table(registers.TABLE.read_text())

    def place(t, aligned):
        return guarded(t, 0 if aligned else 1, not aligned)

    small_runs.run_all(kernels, place, 0)
    card(90)
    small_runs.distances_by_tensor_cores(kernels, place, 0)

    names = registers.readable_names(kernels.launched_kernels())
    halves = (("cpu::Half", "__half"), ("cpu::BFloat16", "__nv_bfloat16"))
    reached = {replaced(name, halves) for name in names}
    assert sorted({kernel for kernel, _ in table} - reached) == []


def replaced(text, pairs):
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
