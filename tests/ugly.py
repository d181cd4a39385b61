"""Ugly inputs for the tests of the ops: prime and zero sizes, every memory layout, all dtypes,
scales from 1e-30 to 1e30."""

import re
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from tolerance import BF16, F16, FLOATS

SIZES = [0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 61, 64, 127, 257, 521, 1031]
LAYOUTS = ["contiguous", "wide rows", "off by one", "every second column", "transposed"]


def lay(t, layout):
    """The same values in another place in memory, with NaN in the gaps, so that reading beside a
    row is seen."""
    rows, cols = t.shape
    if layout == "wide rows":
        home = t.new_full((rows, cols + 5), torch.nan)
        out = home[:, 3 : 3 + cols]
    elif layout == "off by one":
        home = t.new_full((rows * cols + 1,), torch.nan)
        out = home[1:].view(rows, cols)
    elif layout == "every second column":
        home = t.new_full((rows, 2 * cols), torch.nan)
        out = home[:, ::2]
    elif layout == "transposed":
        out = t.new_full((cols, rows), torch.nan).T
    else:
        return t.contiguous()
    return out.copy_(t)


def randn(seed, *shape, dtype=torch.float64, scale=1.0):
    """Normal numbers times scale, the same for every dtype up to rounding."""
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=gen, dtype=torch.float64) * scale).to(dtype)


def scales(dtype):
    """Powers of ten that the dtype can hold with room to spare."""
    return st.sampled_from(
        [1e-3, 1.0, 1e3] if dtype is F16 else [1e-30, 1e-12, 1e-3, 1.0, 1e6, 1e30]
    )


@st.composite
def matrices(draw, rows, cols, dtype, scale=1.0):
    """A matrix of normal numbers, sometimes with equal rows, a row of zeros or a constant row, in
    any layout."""
    m, p = draw(rows), draw(cols)
    t = randn(draw(st.integers(0, 1 << 20)), m, p, dtype=dtype, scale=scale)
    kind = draw(st.sampled_from(["plain", "plain", "equal rows", "zero row", "constant row"]))
    if m and kind != "plain":
        t[-1] = t[0] if kind == "equal rows" else 0.0 if kind == "zero row" else scale
    return lay(t, draw(st.sampled_from(LAYOUTS)))


dtypes = st.sampled_from(FLOATS)
wide_dtypes = st.sampled_from([d for d in FLOATS if d not in (F16, BF16)])


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
        assert torch.equal(found[0].nan_to_num(), other.nan_to_num()) and torch.equal(
            found[0].isnan(), other.isnan()
        )


def refuses(op, name, kind=ValueError):
    """The call inside raises `kind` with one sentence that names the op and the argument."""
    return pytest.raises(kind, match=rf"^{re.escape(op)}: [^\n]*\b{re.escape(name)}\b[^\n]*\.$")
