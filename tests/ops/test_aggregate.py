"""aggregate: base + lr * (weight @ updates), dense and sparse, into any dtype, against float64;
what is not read and not overwritten."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from tolerance import F16, F32, F64, FLOATS, ROUND, assert_close
from ugly import LAYOUTS, SIZES, dtypes, lay, matrices, randn, refuses, same_for_any_threads, scales

from pflcore import ops
from pflcore.ops import aggregate, feddwa_weights

NAN = torch.nan


def scattered(weight, index, n):
    """The dense [M, N] weights in float64; an index named twice adds up."""
    if index is None:
        return weight.double()
    return torch.zeros(len(weight), n, dtype=F64).scatter_add_(1, index, weight.double())


def formula(updates, weight, index, base, lr):
    """In float64: the result, and the sum of the sizes of its addends."""
    u, w = updates.double(), scattered(weight, index, len(updates))
    start = torch.zeros((), dtype=F64) if base is None else base.double()
    size = start.abs() + abs(lr) * (scattered(weight.abs(), index, len(updates)) @ u.abs())
    return start + lr * (w @ u), size


def close(got, updates, weight, index=None, base=None, lr=1.0):
    want, size = formula(updates, weight, index, base, lr)
    assert got.dtype == (updates if base is None else base).dtype
    exact = got.dtype == F64 and updates.dtype == F64
    # accumulated in float32, or rounded to it in the end
    rounding = F32 if got.dtype in (F32, F64) and not exact else got.dtype
    assert_close(got, want, "aggregate", rounding, size)


# --- right ------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@given(st.data())
def test_definition(dtype, data):
    n, m, p = (
        data.draw(st.sampled_from([1, 2, 7, 20])),
        data.draw(st.sampled_from([0, 1, 3, 8, 13])),
        data.draw(st.sampled_from(SIZES)),
    )
    scale = data.draw(scales(dtype))
    updates = data.draw(matrices(st.just(n), st.just(p), dtype, scale))
    seed = data.draw(st.integers(0, 99))
    sparse = data.draw(st.booleans())
    k = data.draw(st.sampled_from([1, 2, 5, 9])) if sparse else n
    weight = lay(
        randn(seed, m, k, dtype=data.draw(st.sampled_from([F32, F64]))),
        data.draw(st.sampled_from(LAYOUTS)),
    )
    index = (
        torch.randint(0, n, (m, k), generator=torch.Generator().manual_seed(seed))
        if sparse
        else None
    )
    base = {
        0: None,
        1: randn(seed + 1, p, scale=scale),
        2: lay(randn(seed + 1, m, p, scale=scale), data.draw(st.sampled_from(LAYOUTS))),
    }[data.draw(st.sampled_from([0, 1, 2]))]
    if base is not None:
        base = base.to(
            data.draw(
                st.sampled_from(
                    [dtype, F64]
                    if scale in (1e-30, 1e30)
                    else FLOATS
                    if abs(scale) <= 1e3
                    else [dtype, F32]
                )
            )
        )
    lr = data.draw(st.sampled_from([1.0, 0.5, -0.1, 0.0, 1e-3]))
    precise = data.draw(st.booleans())
    close(
        aggregate(updates, weight, index, base, lr, precise=precise),
        updates,
        weight,
        index,
        base,
        lr,
    )
    into = data.draw(st.sampled_from(["contiguous", "wide rows", "off by one"]))
    out = lay(torch.full((m, p), NAN, dtype=(updates if base is None else base).dtype), into)
    assert aggregate(updates, weight, index, base, lr, out, precise) is out
    close(out, updates, weight, index, base, lr)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
def test_precise_survives_cancellation(dtype):
    """1 + 1e8 - 1e8: nothing of the 1 is left in float32."""
    large = 2.0**14 if dtype == F16 else 1e8
    one = 2.0**-13 if dtype == F16 else 1.0
    updates = torch.tensor([[one], [large], [-large]]).expand(-1, 67).to(dtype)
    weight = torch.ones(2, 3)
    assert torch.equal(
        aggregate(updates, weight, precise=True), torch.full((2, 67), one, dtype=dtype)
    )
    index = torch.tensor([[0, 1, 2], [2, 0, 1]])
    assert torch.equal(
        aggregate(updates, weight, index, precise=True), torch.full((2, 67), one, dtype=dtype)
    )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
def test_many_clients(dtype):
    """The mean of 1,000 rows: the error of a float32 sum must not grow with their number as it
    could."""
    updates = randn(1, 1000, 521, dtype=dtype) + 1
    weight = torch.full((3, 1000), 1e-3, dtype=F64)
    want = weight @ updates.double()
    got = aggregate(updates, weight).double()
    assert (
        float((got - want).abs().max())
        <= (3e-6 if dtype == F32 else 4e-15 if dtype == F64 else 2 * ROUND[dtype] + 3e-6) * 2
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("n", [129, 1000, 20_000])
@pytest.mark.parametrize("form", ["dense", "few results", "sparse", "sparse of many rows"])
def test_the_error_does_not_grow_with_the_clients(n, form):
    """Constant rows, whose roundings all point one way."""
    value, m = 0.7, 7 if form == "dense" else 2
    updates = torch.full((1, 67), value).expand(n, -1)
    weight = torch.full((m, n), 1 / n, dtype=F64)
    index = torch.arange(n).expand(m, n) if form.startswith("sparse") else None
    if form == "sparse":  # a few rows named many times over
        updates, index = updates[:50], index % 50
    base = torch.ones(67)
    got = aggregate(updates, weight, index, base).double() - 1
    assert float((got - float(updates[0, 0])).abs().max()) <= 2e-6


def test_weights_as_the_ops_give_them():
    d = randn(1, 5, 5).square()
    updates = randn(2, 5, 31, dtype=F32)
    top = feddwa_weights(d, 2)
    close(aggregate(updates, *top), updates, top.weight, top.index)


# --- laws -------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@given(dtypes, st.sampled_from([1, 2, 7]), st.sampled_from(SIZES), st.integers(0, 99))
def test_a_single_weight_of_one_copies_the_row(dtype, n, p, seed):
    updates = randn(seed, n, p, dtype=dtype)
    index = torch.randint(0, n, (5, 1), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(aggregate(updates, torch.ones(5, 1), index), updates[index[:, 0]])
    assert torch.equal(aggregate(updates, torch.eye(n)), updates)


@pytest.mark.usefixtures("isa")
@given(dtypes, st.sampled_from([2, 7, 20]), st.sampled_from(SIZES), st.integers(0, 99))
def test_whole_numbers_are_exact(dtype, n, p, seed):
    updates = randn(seed, n, p, scale=2).round().clamp(-3, 3).to(dtype)
    # |result| <= 3 * 3 * 20 + 9, which bfloat16 holds
    weight = randn(seed + 1, 4, n).round().clamp(-3, 3)
    base = randn(seed + 2, p, scale=3).round().clamp(-9, 9).to(dtype)
    want = base.double() + weight @ updates.double()
    assert torch.equal(aggregate(updates, weight, base=base).double(), want)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    index = order.expand(4, -1)
    assert torch.equal(aggregate(updates, weight[:, order], index, base).double(), want)
    twice = torch.cat([index, index], 1)  # a row named twice counts twice
    assert torch.equal(
        aggregate(
            updates, torch.cat([weight[:, order], -weight[:, order]], 1), twice, base
        ).double(),
        base.double().expand(4, -1),
    )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [NAN, torch.inf])
def test_rows_of_weight_zero_are_not_read_in_the_sparse_form(dtype, bad):
    updates = randn(1, 4, 131, dtype=dtype)
    clean = updates.clone()
    updates[2] = bad
    weight = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0], [0.25, 0.75, 0.0]])
    index = torch.tensor([[0, 2, 1], [2, 2, 2], [3, 0, 2]])
    for base in (None, randn(2, 131, dtype=dtype)):
        got = aggregate(updates, weight, index, base)
        assert torch.equal(got, aggregate(clean, weight, index, base))
        assert torch.equal(got[1], torch.zeros(131, dtype=dtype) if base is None else base)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_that_counts_shows_that_it_is_not_finite(dtype):
    updates = randn(1, 4, 131, dtype=dtype)
    updates[2, 5] = NAN
    got = aggregate(updates, torch.ones(2, 4))
    assert got.isnan().nonzero().tolist() == [[0, 5], [1, 5]]
    got = aggregate(updates, torch.ones(2, 1), torch.tensor([[2], [1]]))
    assert got.isnan().nonzero().tolist() == [[0, 5]]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("precise", [False, True])
def test_threads_change_no_bit(dtype, precise):
    updates, base = randn(1, 11, 70_001, dtype=dtype), randn(2, 70_001, dtype=dtype)
    weight = randn(3, 7, 11)
    index = torch.randint(0, 11, (7, 4), generator=torch.Generator().manual_seed(4))
    same_for_any_threads(lambda: aggregate(updates, weight, base=base, precise=precise))
    same_for_any_threads(lambda: aggregate(updates, weight[:, :4], index, base, precise=precise))
    same_for_any_threads(lambda: aggregate(updates[:, 1:], weight[:1]))


def test_nothing():
    assert torch.equal(aggregate(torch.zeros(3, 0), torch.ones(2, 3)), torch.zeros(2, 0))
    assert aggregate(torch.zeros(3, 5), torch.ones(0, 3)).shape == (0, 5)
    base = randn(1, 5, dtype=F32)
    for weight, index in (
        (torch.ones(2, 0), None),
        (torch.ones(2, 0), torch.zeros(2, 0, dtype=torch.int64)),
    ):
        assert torch.equal(aggregate(torch.zeros(0, 5), weight, index), torch.zeros(2, 5))
        assert torch.equal(aggregate(torch.zeros(0, 5), weight, index, base), base.expand(2, -1))


# --- out --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_nothing_beside_the_rows_of_out_is_written(dtype):
    home = torch.full((5, 71), 7.0, dtype=dtype)
    updates = randn(1, 3, 61, dtype=dtype)
    aggregate(updates, torch.ones(3, 3), out=home[1:4, 5:66])
    home[1:4, 5:66] = 7.0
    assert bool((home == 7.0).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sparse", [False, True])
def test_out_may_be_the_base_itself(dtype, sparse):
    updates, base = randn(1, 3, 131, dtype=dtype), randn(2, 2, 131, dtype=dtype)
    weight, index = randn(3, 2, 3), torch.tensor([[0, 1, 2], [2, 0, 0]]) if sparse else None
    want = aggregate(updates, weight, index, base, 0.5)
    assert aggregate(updates, weight, index, base, 0.5, out=base) is base
    assert torch.equal(base, want)


def test_out_is_no_other_input():
    home = randn(1, 6, 6, dtype=F32)
    weight = torch.ones(2, 2)
    for updates, out in (
        (home[:2], home[:2]),
        (home[:2], home[1:3]),
        (home[1:3, :3], home[:2, 2:5]),
    ):
        with refuses("aggregate", "out"):
            aggregate(updates, weight, out=out)
    with refuses("aggregate", "out"):
        aggregate(torch.ones(2, 2), home[:2, :2], out=home[:2, :2])
    for base in (home[0], home[1:3], home[::2][:2]):
        with refuses("aggregate", "out"):
            aggregate(torch.ones(2, 6), weight, base=base, out=home[:2])
    # other rows of the same memory are fine
    aggregate(home[2:4], weight, base=home[4], out=home[:2])
    grad = torch.ones(2, 6, requires_grad=True)
    with refuses("aggregate", "out"):
        aggregate(grad, weight, out=torch.zeros(2, 6))
    with torch.no_grad():
        aggregate(grad, weight, out=torch.zeros(2, 6))


def test_two_views_of_one_array_share_memory():
    """However many times numpy's memory was wrapped: each wrapping is a storage of its own."""
    home = np.ones((4, 7))
    head, tail = torch.from_numpy(home[:3]), torch.from_numpy(home[2:])
    with refuses("aggregate", "out"):
        aggregate(head, torch.ones(2, 3), out=tail)
    with refuses("aggregate", "out"):
        aggregate(torch.ones(3, 7, dtype=F64), torch.ones(2, 3), base=head[1:], out=tail)
    # the base itself
    aggregate(
        torch.ones(3, 7, dtype=F64), torch.ones(2, 3), base=tail, out=torch.from_numpy(home[2:])
    )
    assert torch.equal(tail, torch.full((2, 7), 4.0, dtype=F64))


# --- gradient ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_gradient(dtype, sparse, rows):
    updates, weight = randn(1, 4, 13, dtype=dtype), randn(2, 3, 4, dtype=F64)
    base = randn(3, *((3, 13) if rows == 2 else (13,)), dtype=dtype)
    index = torch.tensor([[0, 1, 1, 3], [3, 2, 1, 0], [2, 2, 2, 2]]) if sparse else None
    grad = randn(4, 3, 13)
    inputs = [t.clone().requires_grad_() for t in (updates, weight, base)]
    got = torch.autograd.grad(
        aggregate(inputs[0], inputs[1], index, inputs[2], 0.3), inputs, grad.to(dtype)
    )
    wide = [t.detach().double().requires_grad_() for t in inputs]
    picked = (
        torch.eye(4, dtype=F64).expand(3, 4, 4) if index is None else torch.eye(4, dtype=F64)[index]
    )
    y = wide[2] + 0.3 * torch.einsum("mk,mkn,np->mp", wide[1], picked, wide[0])
    for g, w, t in zip(got, torch.autograd.grad(y, wide, grad), inputs, strict=True):
        assert g.dtype == t.dtype
        torch.testing.assert_close(
            g.double(),
            w,
            rtol=1e-5 if dtype == F32 else 1e-12,
            atol=1e-5 if dtype == F32 else 1e-12,
        )


# --- bad input --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name", "kind"),
    [
        (dict(updates=[[1.0]]), "updates", TypeError),
        (dict(updates=torch.zeros(3)), "updates", ValueError),
        (dict(updates=torch.zeros(3, 5, dtype=torch.int64)), "updates", TypeError),
        (dict(weight=torch.ones(3)), "weight", ValueError),
        (dict(weight=torch.ones(2, 4)), "weight", ValueError),
        (dict(weight=torch.ones(2, 3, dtype=torch.int64)), "weight", TypeError),
        (dict(weight=torch.ones(2, 3, device="meta")), "weight", ValueError),
        (dict(index=torch.zeros(2, 2, dtype=torch.int64)), "index", ValueError),
        (dict(index=torch.zeros(2, 3)), "index", TypeError),
        (dict(index=torch.full((2, 3), 3)), "index", ValueError),
        (dict(index=torch.full((2, 3), -1)), "index", ValueError),
        (dict(base=torch.zeros(4)), "base", ValueError),
        (dict(base=torch.zeros(1, 5)), "base", ValueError),
        (dict(base=torch.zeros(5, dtype=torch.int32)), "base", TypeError),
        (dict(out=torch.zeros(2, 4)), "out", ValueError),
        (dict(out=torch.zeros(2, 5, dtype=F64)), "out", ValueError),
        (dict(out=torch.zeros(2, 5), base=torch.zeros(5, dtype=F64)), "out", ValueError),
        (dict(out=torch.zeros(5, 2).T), "out", ValueError),
        (dict(out=torch.zeros(1, 5).expand(2, -1)), "out", ValueError),
    ],
)
def test_bad_input(arguments, name, kind):
    with refuses("aggregate", name, kind):
        aggregate(**{"updates": torch.zeros(3, 5), "weight": torch.ones(2, 3), **arguments})


Array = np.ndarray[Any, np.dtype[np.float32]]


INDEX = torch.stack([(torch.arange(6) + i) % 6 for i in (1, 2)], 1)


WEIGHT = torch.full((6, 2), 0.5)


class Wrapped:
    """Rows of an array, as somebody's own class gives them."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __getitem__(self, rows):
        return self.array[rows]


@pytest.fixture
def models(tmp_path):
    rows = np.lib.format.open_memmap(
        tmp_path / "models.npy", mode="w+", dtype=np.float32, shape=(12, 5)
    )
    rows[:] = np.random.default_rng(0).normal(size=(12, 5))
    return rows


def again(rows):
    rows.flush()
    opened: Array = np.load(rows.filename, mmap_mode="r+")
    return opened[:6]


SAME = {
    "itself": lambda m: m[:6],
    "a tensor": lambda m: torch.from_numpy(m)[:6],
    "rows backwards": lambda m: m[:6][::-1],
    "one row of it": lambda m: m[5:11],
    "a class around it": lambda m: Wrapped(m[:6]),
    "a second map of the file": again,
}


NAMELESS = {"a tensor", "a class around it"}  # they do not know their file: the docstring says so


@pytest.mark.unless(
    lambda updates, out: again in map(SAME.get, (updates, out)) and {updates, out} & NAMELESS
)
@pytest.mark.parametrize("updates", SAME)
@pytest.mark.parametrize("out", [n for n in SAME if n != "rows backwards"])
def test_a_result_in_the_memory_of_the_updates_is_refused(models, updates, out):
    rows, target = SAME[updates](models), SAME[out](models)
    with pytest.raises(
        ValueError, match=r"^aggregate: out must be memory of its own, got memory of updates"
    ):
        ops.stream.aggregate(rows, WEIGHT, INDEX, out=target)


def test_a_base_that_is_a_part_of_the_result_is_refused(models):
    updates, out = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), models[:6]
    with pytest.raises(
        ValueError, match=r"^aggregate: out must be memory of its own, got memory of base"
    ):
        ops.stream.aggregate(updates, WEIGHT, INDEX, base=torch.from_numpy(models)[0], out=out)
    base = torch.from_numpy(out)
    want = ops.aggregate(updates, WEIGHT, INDEX, base.clone())
    assert torch.equal(
        torch.from_numpy(ops.stream.aggregate(updates, WEIGHT, INDEX, base=base, out=out)), want
    )


def test_other_rows_of_one_file_are_memory_of_their_own(models):
    want = ops.aggregate(torch.from_numpy(models)[:6].clone(), WEIGHT, INDEX)
    assert torch.equal(
        torch.from_numpy(ops.stream.aggregate(models[:6], WEIGHT, INDEX, out=models[6:])), want
    )


def test_a_result_that_is_the_negative_of_other_numbers_is_refused():
    conjugate = torch.zeros(6, 5, dtype=torch.complex64).conj().imag
    for out in (torch._neg_view(torch.zeros(6, 5)), conjugate):
        with pytest.raises(
            ValueError, match=r"^aggregate: out must be memory that holds its numbers as they are"
        ):
            ops.aggregate(torch.randn(6, 5), torch.eye(6), out=out)
