"""Runs every kernel at the smallest shapes that reach it.

It is meant for tools that watch each memory access of a program. `python
tests/gpu/small_runs.py` runs it on the card. It does not check the results; the tests
do that.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from laws import factors, integers
from tolerance import F32, F64, FLOATS
from torch import Tensor
from ugly import lay, randn

WORTH = 1 << 25  # pairs times columns from which tensor cores are used
Place = Callable[[Tensor, bool], Tensor]  # puts a matrix on the device, aligned or not


def distances(ops: Any, place: Place, dtype: torch.dtype, aligned: bool) -> None:
    """Runs the kernels of distances.

    The shapes need one lane and several, one window and two, and several pieces of the
    columns. There are two operands, listed pairs, and pairs that are computed again in
    float64.
    """
    for n, p in ((3, 40), (6, 67), (20, 136), (70, 21), (4, 5000)):
        rows = randn(n, n, p, dtype=dtype)
        rows[-1] = rows[0]  # a distance of 0 is computed again
        index = place(integers(0, 0, n, n, 3), True)
        a = place(rows, aligned)
        ops.pairwise_sqdist(a)
        ops.pairwise_sqdist(a, place(randn(1, 5, p, dtype=dtype), aligned))
        ops.pairwise_sqdist(a, None, index)


def distances_by_tensor_cores(ops: Any, place: Place, worth: int) -> None:
    """Runs a triangle of each size, and windows.

    The rows are so long that pairs times columns reach `worth`.
    """
    for n in (26, 40, 60, 75, 100, 120, 140):
        p = max(70, 2 * worth // (n * (n - 1)) + 1)
        ops.pairwise_sqdist(place(randn(n, n, p, dtype=F32), True))
    two = [randn(seed, 40, max(70, worth // 1600 + 1), dtype=F32) for seed in range(2)]
    ops.pairwise_sqdist(*(place(rows, True) for rows in two))


def aggregates(ops: Any, place: Place, dtype: torch.dtype, aligned: bool) -> None:
    """Runs mixtures with few results and many, dense and by index.

    They have a base, another dtype of the result, and precise=True.
    """
    # More than 20 rows are copied in pieces whose width depends on p.
    for n, p in ((6, 136), (20, 67), (21, 300), (21, 302), (21, 304)):
        rows = place(randn(n, n, p, dtype=dtype), aligned)
        for m in (1, 3, 7, 9, 20):
            weight = place(randn(1, m, n), True)
            sparse = place(randn(2, m, 5), True)
            index = place(integers(3, 0, n, m, 5), True)
            base = place(randn(4, m, p, dtype=dtype), aligned)
            wide = place(randn(5, m, p), aligned)
            for precise in (False, True):
                ops.aggregate(rows, weight, precise=precise)
                ops.aggregate(rows, weight, None, base, 0.5, precise=precise)
                ops.aggregate(rows, weight, None, wide, precise=precise)
                ops.aggregate(rows, sparse, index, precise=precise)
                ops.aggregate(rows, sparse, index, wide, precise=precise)


def aggregates_by_index(
    ops: Any, place: Place, dtype: torch.dtype, aligned: bool
) -> None:
    """Runs mixtures by index of usual numbers of rows, and of another number."""
    # Results of 67 columns are not aligned.
    rows = place(randn(0, 20, 136 if aligned else 67, dtype=dtype), aligned)
    for k in (1, 2, 3, 5, 10):
        weight = place(randn(1, 7, k), True)
        ops.aggregate(rows, weight, place(integers(2, 0, 20, 7, k), True))


def aggregates_of_many(
    ops: Any, place: Place, dtype: torch.dtype, aligned: bool
) -> None:
    """Mixes more rows by index than a tile in shared memory holds."""
    rows = place(randn(0, 3600, 40, dtype=dtype), aligned)
    weight = place(randn(1, 720, 5), True)
    ops.aggregate(rows, weight, place(integers(2, 0, 3600, 720, 5), True))


def steps(ops: Any, place: Place, dtype: torch.dtype, aligned: bool) -> None:
    """Runs a plain step, and one with every correction."""
    for s, q in ((1, 40), (3, 67)):
        w, grad, shift, anchor, buffer = (
            place(randn(k, s, q, dtype=dtype), aligned) for k in range(5)
        )
        mask = place(randn(5, s, q).gt(0).to(dtype), aligned)
        ops.sgd_step_(w, grad, 0.1)
        ops.sgd_step_(w, grad, 0.1, shift, mask, 0.3, anchor, 0.9, buffer, 1e-3)


def means_of_columns(ops: Any, place: Place, dtype: torch.dtype, aligned: bool) -> None:
    """Runs columns of one group and of two, and some beyond shared memory."""
    for n, p in ((1, 40), (20, 133), (70, 67), (400, 67)):
        rows = place(randn(n, n, p, dtype=dtype), aligned)
        ops.trimmed_mean(rows, (n - 1) // 3)
        ops.mean_around_median(rows, 1 + n // 2)


def layers(ops: Any, place: Place, dtype: torch.dtype) -> None:
    """Runs factorized layers, with lam's gradient and without it.

    Clients share the factors, or have their own.
    """
    for leads in ((((3,), (), (3,), ())), ((3,),) * 4, ((),) * 4):
        inputs = factors(17, 21, 19, 35, dtype, leads, 0.5)
        placed = [
            place(t.reshape(-1, t.shape[-1]), True).reshape(t.shape) for t in inputs
        ]
        y = ops.rank1_linear(*placed)
        grad = torch.ones_like(y)
        for lam_too in (True, False):
            ops.rank1_linear_backward(grad, *placed, True, True, lam_too, True)


def weights(ops: Any, place: Place, dtype: torch.dtype) -> None:
    """Runs rows that fit a block's registers, and rows that do not."""
    for m, n, k in ((3, 7, 5), (40, 67, 33), (2, 1100, 50), (1, 5000, 300)):
        d = place(randn(m, m, n, dtype=dtype).abs(), True)
        target = place(integers(0, 0, n, 1, m), True)[0]
        ops.feddwa_weights(d, k)
        ops.waffle_weights(d, target, 0.7)


def run_all(ops: Any, place: Place, worth: int = WORTH) -> None:
    """Runs every op in every dtype, on aligned and unaligned rows."""
    distances_by_tensor_cores(ops, place, worth)
    for dtype in FLOATS:
        for aligned in (True, False):
            distances(ops, place, dtype, aligned)
            aggregates(ops, place, dtype, aligned)
            aggregates_by_index(ops, place, dtype, aligned)
            aggregates_of_many(ops, place, dtype, aligned)
            means_of_columns(ops, place, dtype, aligned)
            if dtype in (F32, F64):
                steps(ops, place, dtype, aligned)
        if dtype in (F32, F64):
            layers(ops, place, dtype)
            weights(ops, place, dtype)


class OnCard:
    """The public ops, except for the rank-1 layer.

    Its kernels are called directly, because the public op uses them only where torch's
    products would be rounded.
    """

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.rank1_linear = torch.ops.pflcore.rank1_listed.default
        self.rank1_linear_backward = torch.ops.pflcore.rank1_listed_backward.default

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)


def main() -> None:
    from pflcore import ops

    if not (torch.cuda.is_available() and ops.backend().cuda):
        sys.exit(
            f"small_runs: no card, or no CUDA kernels: {ops.backend()}; nothing was "
            "run."
        )

    def place(t: Tensor, aligned: bool) -> Tensor:
        return lay(t.cuda(), "contiguous" if aligned else "off by one")

    run_all(OnCard(ops), place)
    torch.cuda.synchronize()
    print("small_runs: all kernels ran")


if __name__ == "__main__":
    main()
