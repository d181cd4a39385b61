"""Writes problems for all CPU kernels into a file for kernels.cpp.

PYTHONPATH=.:tests python tests/internal/sanitize/problems.py FILE

A problem has the same fields as those that the CUDA kernels receive.
"""

import sys
from contextlib import ExitStack
from itertools import product
from struct import pack
from unittest.mock import patch

import hypothesis.strategies as st
import laws
import torch
from hypothesis import HealthCheck, given, settings
from internal import cuda_on_cpu as kernels
from internal.chains import INF, KINDS, Problem
from tolerance import F32, F64, FLOATS
from torch import Tensor
from ugly import randn

import pflcore

# The names have the order that kernels.cpp gives them.
NAMES = ("sqdist", "waffle", "feddwa", "aggregate", "rank1", "sgd", "trimmed_mean")
NAMES += ("mean_around_median", "chain", "chain grad", "chain eval")
# In the order of the kernels' enumeration.
LOSSES = (
    "cross_entropy",
    "squared",
    "half_squared",
    "hinge",
    "binary_cross_entropy",
    "linear",
)


def packed(word, results):
    """A number, or the bytes of a tensor with the gaps between.

    Of a result, only the number of bytes is written.
    """
    if not isinstance(word, Tensor):
        return pack("qq", 0, kernels.bits(word))
    span = (
        sum(
            (n - 1) * stride
            for n, stride in zip(word.shape, word.stride(), strict=True)
        )
        + 1
    )
    content = (
        word.detach().as_strided((span if word.numel() else 0,), (1,)).view(torch.uint8)
    )
    kind = {F32: 4, F64: 8}.get(word.dtype, 1)
    sign = -1 if any(word is t for t in results) else 1
    return pack("qq", sign * kind, content.numel()) + content.numpy().tobytes()


class Both:
    """The ops; each call is also written down as a problem."""

    def __getattr__(self, name):
        def call(*given, **how):
            getattr(kernels, name)(*given, **how)
            y = getattr(pflcore.ops, name)(*given, **how)
            if name == "rank1_linear":
                fixed = [t.detach() for t in given]
                needs = [t.requires_grad for t in given]
                kernels.rank1_linear_backward(torch.ones_like(y), *fixed, *needs)
            return y

        return call


def put(t, draw, write=False):
    return kernels.guarded(t, None, draw(laws.of(0, 1, 8)))


ON = laws.Machine(Both(), put, (1, 2, 17, 63, 64, 65, 131, 1031, 5009))
FEW = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def drawn(law, dtype):
    @FEW
    @given(st.data())
    def play(data):
        law(ON, dtype, data.draw)

    play()


def ops():
    """Calls with draws of the laws, and calls for all paths."""
    # kernels.cpp makes its faults in the first problem.
    kernels.aggregate(randn(0, 3, 64, dtype=F32), torch.eye(3))
    every = [(law, dtype) for law, dtypes in laws.LAWS.items() for dtype in dtypes]
    for law, dtype in every:
        if law is not laws.rank1 or dtype in (F32, F64):
            drawn(law, dtype)
    for p, dtype in product((17, 1031), FLOATS):
        for name, (call, of) in laws.calls(
            kernels, kernels.rank1_linear_backward, p, dtype
        ).items():
            if not name.startswith("rank1") or dtype in (F32, F64):
                call(*of)
    few = randn(0, 3, 65, dtype=F32)
    index = laws.integers(2, 0, 3, 260, 3)
    # A few rows are mixed for many results.
    kernels.aggregate(few, randn(1, 260, 3), index)
    # Beyond 49,152 columns, the whole row is computed again in float64.
    for first in (0, 49_721):
        tiny = randn(1, 5, 50_021, dtype=F32) * 1e-22
        tiny[:, :first] = 0
        kernels.pairwise_sqdist(tiny)
        kernels.pairwise_sqdist(tiny[:3], tiny[3:])


def chains():
    """Problems of each model, with whole data and batches, and with options."""
    fresh = kernels.fresh
    for turn, (model, loss_name) in enumerate(KINDS):
        # A batch norm cannot train on one sample.
        sizes = [41, 13, 2] if "batch norm" in model else [45, 13, 1]
        p = Problem(model, sizes, passes=2, relabel=turn % 2, loss_name=loss_name)
        program, _, *shape, x, y, names = p.head()
        s, q = p.w.shape
        classes = p.chain.classes
        labels = (None, y) if y.is_floating_point() else (y, None)
        data = [
            x,
            x[0].numel(),
            len(x),
            *labels,
            names,
            0 if names is None else names.shape[1],
            y[0].numel(),
        ]
        b = 0 if p.statistics is None else p.statistics.shape[1]
        head = [program, len(program), *shape, q, b, LOSSES.index(loss_name), *data]
        for batch, options in ((5, False), (40, True)):
            shift, anchor, sums = (randn(k, s, q, dtype=F32) for k in range(3))
            rich = (
                shift,
                shift[0],
                shift[:, 0].double().abs(),
                anchor,
                0.9,
                shift,
                0.1,
            )
            step = kernels.sgd_problem(p.w, None, 0.1, *(rich if options else ()))
            # The chain makes the momentum buffer itself.
            step[-3:-1] = None, 0
            drop = bool(options and turn % 2)
            cuts = [p.sizes, p.most(batch, drop), batch, drop, p.seeds, int(p.merges)]
            plan = [p.order, 2, sizes[0], *cuts]
            adamw = [int(options and not turn % 3), 0.9, 0.99, 1e-8]
            end = [sums if options else None, p.statistics, fresh(1, s)]
            clip = 1.0 if options else INF
            kernels.call("chain", [*head, *step, *plan, clip, *adamw, *end])
        one_pass = [p.order[:, 0].contiguous(), sizes[0], p.sizes, None]
        for train in (0, 1):
            results = [fresh(s, q, dtype=F32), p.statistics, fresh(1, s)]
            kernels.call("chain grad", [*head, p.w, s, q, *one_pass, train, *results])
        n = len(p.places)
        for row in (q, 0):
            right = torch.full((n,), 255, dtype=torch.uint8)
            results = [fresh(1, n), right, fresh(n, classes, dtype=F32), classes]
            rows = [p.w, s, row, p.statistics, b if row else 0, int(row == 0)]
            kernels.call("chain eval", [*head, *rows, p.places, p.begin, *results])


def write(path):
    with open(path, "wb") as file, ExitStack() as stack:
        results = []
        fresh = kernels.fresh

        def call(name, *values):
            words = [w for v in values for w in (v if isinstance(v, list) else [v])]
            file.write(pack("qq", NAMES.index(name), len(words)))
            file.writelines(packed(word, results) for word in words)
            results.clear()

        def result(*shape, **how):
            results.append(fresh(*shape, **how))
            return results[-1]

        def plain(count, dtype):
            return torch.empty(count, dtype=dtype)

        for name, own in {"call": call, "fresh": result, "fenced": plain}.items():
            stack.enter_context(patch.object(kernels, name, own))
        ops()
        chains()


if __name__ == "__main__":
    write(sys.argv[1])
