"""Tolerances of the ops against the same sum in float64.

One table by op and dtype has a reason in each line.
"""

import torch

F64 = torch.float64
F32 = torch.float32
F16 = torch.float16
BF16 = torch.bfloat16
FLOATS = (F32, F64, F16, BF16)

# Half the gap between neighbouring numbers near 1: what one rounding of a result costs.
ROUND = {F64: 2.0**-53, F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}

# Half the gap between the smallest numbers a dtype has: what a rounding costs where the
# result is subnormal.
TINY = {F64: 5e-324, F32: 7.1e-46, F16: 3.0e-8, BF16: 4.6e-41}

TOLERANCE = {
    # Relative to each distance. Rows are used as they are (already rounded) and a
    # square meets at most 16 roundings of 6e-8 before it is added to a float64 total, a
    # tenth of that in practice. float64 rows have float64 all the way.
    "sqdist": {F32: 1e-6, F16: 1e-6, BF16: 1e-6, F64: 1e-13},
    # Relative to the largest weight: float64 arithmetic on a handful of distances,
    # whatever their dtype.
    "weights": {F64: 1e-12, F32: 1e-12, F16: 1e-12, BF16: 1e-12},
    # Relative to |base| + |lr| * |weight| @ |updates|: about one float32 rounding for
    # each of up to 20 addends, then one of the result.
    "aggregate": {F64: 4e-15, F32: 1.5e-6, F16: 2 * ROUND[F16], BF16: 2 * ROUND[BF16]},
    # Relative to the same product of absolute values: two products of up to a hundred
    # addends. 16-bit inputs are computed in float32 and rounded once. The reference
    # rounds the hidden values too.
    "rank1": {F64: 4e-14, F32: 1e-5, F16: 8 * ROUND[F16], BF16: 8 * ROUND[BF16]},
    # Relative to the sum of the absolute values of all terms: some ten roundings, in
    # any order, fused or not.
    "sgd": {F64: 2e-15, F32: 1e-6},
    # Relative to 1 and the values' own size: up to three steps through some ten layers,
    # each a sum of up to a thousand addends.
    "chain": {F64: 1e-11, F32: 3e-5},
}


def assert_close(got, want, op, dtype=None, size=None):
    """Asserts that `got` is close to the float64 `want`.

    They differ by at most TOLERANCE[op][dtype] * size. Where `want` is not finite, both
    are the same.

    Args:
        dtype: dtype of the inputs, by default that of `got`
        size: magnitude that the error is measured against, by default |want|
    """
    assert got.shape == want.shape, (
        f"shape {list(got.shape)} instead of {list(want.shape)}"
    )
    dtype = got.dtype if dtype is None else dtype
    a = got.detach().double()
    finite = want.isfinite()
    same = (a == want) | (a.isnan() & want.isnan())
    assert bool((same | finite).all()), (
        f"NaN or Inf in other places: {got} instead of {want}"
    )
    allowed = (
        TOLERANCE[op][dtype] * (want if size is None else size).abs() + TINY[got.dtype]
    )
    wrong = finite & ~((a - want).abs() <= allowed)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {at}: "
            f"{a[tuple(at)]:.17g} instead of {want[tuple(at)]:.17g}"
        )
