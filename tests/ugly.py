"""Ugly inputs for the tests of the ops: prime and zero sizes, every memory layout, all
dtypes, scales from 1e-30 to 1e30."""

import re
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from tolerance import F16

SIZES = [0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 61, 64, 127, 257, 521, 1031]
BAD = -(1 << 40)  # an index that is in no list
LAYOUTS = ["contiguous", "wide rows", "off by one", "every second column", "transposed"]


def lay(t, layout):
    """The same values in another place in memory, with NaN in the gaps, so that reading
    beside a row is seen."""
    if layout == "contiguous":
        return t.clone(memory_format=torch.contiguous_format)
    rows, cols = t.shape
    strides, first = {
        "wide rows": ((cols + 5, 1), 3),
        "off by one": ((cols, 1), 1),
        "every second column": ((2 * cols, 2), 0),
        "transposed": ((1, rows), 0),
    }[layout]
    home = t.new_full((2 * rows * (cols + 5),), torch.nan)
    return home.as_strided(t.shape, strides, first).copy_(t)


def randn(seed, *shape, dtype=torch.float64, scale=1.0):
    """Normal numbers times scale, the same for every dtype up to rounding."""
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=gen, dtype=torch.float64) * scale).to(dtype)


def scales(dtype):
    """Powers of ten that the dtype can hold with room to spare."""
    return st.sampled_from(
        [1e-3, 1.0, 1e3] if dtype is F16 else [1e-30, 1e-12, 1e-3, 1.0, 1e6, 1e30]
    )


def matrix(draw, m, p, dtype, scale=1.0):
    """Normal numbers, sometimes close to the first row, with equal rows, a row that is
    zero or tiny, constant rows (whose roundings all point one way), or a few far larger
    numbers."""
    t = randn(draw(st.integers(0, 1 << 20)), m, p, scale=scale)
    change = {
        "plain": lambda: t,
        "close": lambda: t[:1] + 1e-3 * t,
        "equal rows": lambda: torch.cat([t[1:], t[:1], t[:1]])[-m:],
        "zero row": lambda: torch.cat([t[1:], 0 * t[:1]]),
        "tiny row": lambda: torch.cat([t[1:], 1e-25 * t[:1]]),
        "constant rows": lambda: t[:, :1].expand(-1, p),
        "spikes": lambda: t * torch.where(torch.arange(p) % 8 > 0, 2.0**-12, 1.0),
    }
    return change[draw(st.sampled_from(list(change)))]().to(dtype)


def intact(inner):
    """Is everything in the memory of a tensor that `lay` placed, and that was written
    since, as it was?"""
    home = inner.new_empty(0).set_(inner.untyped_storage()).clone()
    bad = torch.nan if home.is_floating_point() else BAD
    home.as_strided(inner.shape, inner.stride(), inner.storage_offset()).fill_(bad)
    return bool((home.isnan() if home.is_floating_point() else home == BAD).all())


@contextmanager
def threads(n):
    """torch with n intra-op threads, and the old number again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_for_any_threads(call):
    """One, two and three threads give the same bits."""
    found = []
    for n in (1, 2, 3):
        with threads(n):
            found.append(call())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0, equal_nan=True)


def refuses(op, name, kind=ValueError):
    """The call inside raises `kind` with one sentence that names the op and the
    argument."""
    return pytest.raises(
        kind,
        match=rf"^{re.escape(op)}\([^)\n]*\b{re.escape(name)}\b[^)\n]*\): "
        r"expected [^\n]*, got [^\n]*\.$",
    )


def clustered(groups, each, p, noise=1e-3):
    """Guides and rows [groups * each, P], shuffled, of clusters with isotropic noise
    within."""
    rows = torch.randn(groups, p)[torch.randperm(groups * each) % groups]
    rows = rows + noise * torch.randn(len(rows), p)
    return rows + noise * torch.randn(len(rows), p), rows
