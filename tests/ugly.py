"""Difficult inputs for the tests of the ops.

They have prime and zero sizes, every memory layout, all dtypes, and scales from 1e-30
to 1e30.
"""

import re
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from tolerance import F16

SIZES = [0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 61, 64, 127, 257, 521, 1031]
BAD = -(1 << 40)  # an index that no list has
LAYOUTS = ["contiguous", "wide rows", "off by one", "every second column", "transposed"]


def lay(t, layout):
    """The same values in another place in memory.

    The gaps hold NaN, so that a read outside of a row shows.
    """
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
    """Powers of ten that are far inside the range of the dtype."""
    return st.sampled_from(
        [1e-3, 1.0, 1e3] if dtype is F16 else [1e-30, 1e-12, 1e-3, 1.0, 1e6, 1e30]
    )


def matrix(draw, m, p, dtype, scale=1.0):
    """A matrix of normal numbers, in one of several kinds.

    It may have rows close to the first row, equal rows, a zero row, or a tiny row. It
    may have constant rows, whose roundings all have the same direction, or a few far
    larger numbers.
    """
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
    """True where the memory around a tensor did not change.

    `lay` placed the tensor, and an op wrote it since.
    """
    home = inner.new_empty(0).set_(inner.untyped_storage()).clone()
    bad = torch.nan if home.is_floating_point() else BAD
    home.as_strided(inner.shape, inner.stride(), inner.storage_offset()).fill_(bad)
    return bool((home.isnan() if home.is_floating_point() else home == BAD).all())


@contextmanager
def threads(n):
    """Sets torch's intra-op threads to n, and restores them afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_for_any_threads(call):
    """Asserts that one, two and three threads give the same bits."""
    results = []
    for n in (1, 2, 3):
        with threads(n):
            results.append(call())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)


def refuses(op, name, kind=ValueError):
    """Asserts that the call inside raises `kind`.

    The message is one sentence that names the op and the argument.
    """
    return pytest.raises(
        kind,
        match=rf"^{re.escape(op)}\([^)\n]*\b{re.escape(name)}\b[^)\n]*\): "
        r"expected [^\n]*, got [^\n]*\.$",
    )


def clustered(groups, each, p, noise=1e-3):
    """Guides and rows [groups * each, P] in shuffled clusters.

    The noise within a cluster is isotropic.
    """
    rows = torch.randn(groups, p)[torch.randperm(groups * each) % groups]
    rows = rows + noise * torch.randn(len(rows), p)
    return rows + noise * torch.randn(len(rows), p), rows
