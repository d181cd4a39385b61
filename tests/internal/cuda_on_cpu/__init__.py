"""Runs the CUDA kernels on the CPU.

The package builds driver.cpp with the C++ compiler and calls it with tensors. Each
buffer has NaN before it, so that a wrong read shows in the result, and a wrong write is
found. Behind the buffer is a page that no access may touch.
"""

import ctypes
import math
import os
import shutil
import subprocess
import tempfile
import weakref
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tolerance import F64
from torch import Tensor
from ugly import BAD, intact

from pflcore.ops import TopK

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "csrc" / "cuda"
DTYPES = {torch.float32: 0, F64: 1, torch.float16: 2, torch.bfloat16: 3}
FLAGS = "-std=c++20 -O1 -g0 -Wall -Wextra -Werror -Wno-unknown-pragmas -shared -fPIC"


def compiler():
    return shutil.which(
        os.environ.get("CXX", "").split(" ")[0] or "g++"
    ) or shutil.which("g++")


@cache
def library():
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/cuda_on_cpu.so"
        source = [f"-I{HERE}", f"-I{KERNELS}", HERE / "driver.cpp", "-o", target]
        subprocess.run([compiler(), *FLAGS.split(), *source], check=True)
        lib = ctypes.CDLL(target)
    lib.fenced.restype = c_void_p
    lib.last_error.restype = ctypes.c_char_p
    lib.launched.restype = lib.architecture_names.restype = ctypes.c_char_p
    return lib


def launched_kernels():
    """The mangled names of all kernels that have run in this process."""
    return library().launched().decode().splitlines()


def call(name, *values):
    """Calls a function of the driver with values for C.

    None is a null pointer. Raises RuntimeError where the driver reports an error.
    """

    def c(value):
        if value is None or isinstance(value, Tensor):
            return c_void_p(None if value is None else value.data_ptr())
        if isinstance(value, list):
            return (c_int64 * len(value))(*map(bits, value))
        return c_int64(value)

    if getattr(library(), name)(*map(c, values)):
        raise RuntimeError(library().last_error().decode())


def bits(value):
    """The 8 bytes of a field of a problem, as an integer.

    The fields are those of csrc/inputs.h. A field is a number or an address.
    """
    if isinstance(value, Tensor):
        return value.data_ptr()
    return (
        c_int64.from_buffer(c_double(value)).value
        if isinstance(value, float)
        else value or 0
    )


def fenced(count, dtype):
    """Memory for at least `count` elements, with a forbidden page behind it.

    The memory is freed when the last tensor in it is gone.
    """
    size = c_int64()
    address = library().fenced(c_int64(count * dtype.itemsize), ctypes.byref(size))
    assert address, "no memory for a fence"
    memory = (ctypes.c_ubyte * size.value).from_address(address)
    weakref.finalize(memory, library().unfence, c_void_p(address), size)
    return torch.frombuffer(memory, dtype=dtype)


def guarded(t, shift=None, gap=0):
    """A copy of t [R, C] between NaN and a forbidden page.

    There is NaN before the first row, and `gap` elements of NaN between rows. The
    forbidden page is behind the last row.

    With `shift`, the first row starts `shift` elements off a 16-byte boundary. This may
    leave less than 16 bytes of NaN before that page.
    """
    bad = torch.nan if t.is_floating_point() else BAD
    rows, cols = t.shape
    span = max(rows * (cols + gap) - gap, 0) if cols else 0
    memory = fenced(span + 80, t.dtype).fill_(bad)
    start = memory.numel() - span
    if shift is not None:
        # Pages begin on 16-byte boundaries.
        start -= (start - shift) % (16 // t.itemsize)
    return memory.as_strided((rows, cols), (cols + gap, 1), start if span else 0).copy_(
        t
    )


def fresh(*shape, dtype=F64):
    """Guarded memory for a result."""
    return guarded(
        torch.full(shape, -1 if dtype == torch.int64 else torch.nan, dtype=dtype)
    )


def done(*results):
    """Copies of the results; nothing was written outside of them."""
    assert all(map(intact, results))
    copies = tuple(t.clone() for t in results)
    return copies if len(copies) > 1 else copies[0]


def rows(t):
    """The matrix and the distance between its rows, in elements.

    The distance is 0 where there is one row for all, or no matrix.
    """
    return t, 0 if t is None or t.dim() < 2 else t.stride(0)


# --- the ops ----------------------------------------------------------------


class Plan(NamedTuple):
    """The launch of a distance kernel.

    Attributes:
        lanes: threads that share the columns of a tile
        threads: threads of a block
        stages: stages of copies to shared memory
        splits: parts of the columns
        chunk: columns of a stage
        path: index in PATHS
        first_splits: parts of the columns in the first turn of "few" and "gram"
        first_columns: columns of a block in that turn
    """

    lanes: int
    threads: int
    stages: int
    splits: int
    chunk: int
    path: int
    first_splits: int
    first_columns: int


PATHS = ("windows", "few", "gram")


def plan(m, n, p, symmetric, dtype, listed=-1):
    here = torch.zeros(1)
    out = torch.zeros(len(Plan._fields), dtype=torch.int64)
    fields = [
        DTYPES[dtype],
        here,
        p,
        m,
        symmetric,
        here,
        p,
        n,
        p,
        None,
        None,
        None,
        listed,
    ]
    call("sqdist_plan", fields, out)
    return Plan(*out.tolist())


def pairwise_sqdist(a, b=None, index=None, most=0):
    """Squared distances by the kernel.

    `most` limits the rows of a in a grid; 0 takes the limit of a GPU.
    """
    n = len(a if b is None else b)
    listed = -1 if index is None else index.shape[1]
    index = None if index is None else guarded(index)
    out = fresh(len(a), n if index is None else listed)
    given = (*rows(a), len(a), b is None, *rows(b), n, a.shape[1])
    call("sqdist", [DTYPES[a.dtype], *given, out, None, index, listed], most)
    return done(out)


def waffle_weights(dist, target, omega, psi=None, tie="closed"):
    out, dist = fresh(*dist.shape), guarded(dist.double())
    step, psi = int(target.numel() > 1), omega if psi is None else psi
    call("waffle", [dist, *dist.shape, target, step, omega, psi, tie == "uniform", out])
    return done(out)


def feddwa_weights(sqdist, k):
    if sqdist.dtype != torch.float32:
        sqdist = guarded(sqdist.double())
    m, n = sqdist.shape
    kept = min(k, sqdist.shape[1])
    weight = fresh(m, kept)
    index = fresh(m, kept, dtype=torch.int64)
    call("feddwa", [*rows(sqdist), m, n, kept, weight, index], sqdist.dtype == F64)
    return TopK(*done(weight, index))


def aggregate(updates, weight, index=None, base=None, lr=1.0, out=None, precise=False):
    dtype = (updates if base is None else base).dtype
    n, p = updates.shape
    m, k = weight.shape
    to = fresh(m, p, dtype=dtype) if out is None else out
    weight, index = (t if t is None else guarded(t) for t in (weight.double(), index))
    wide = precise or F64 in (updates.dtype, dtype)
    given = (
        DTYPES[updates.dtype] | DTYPES[dtype] << 32,
        wide,
        n,
        p,
        m,
        k,
        *rows(updates),
        weight,
    )
    call("aggregate", [*given, index is not None, index, *rows(base), lr, *rows(to)])
    return done(to) if out is None else out


def trimmed_mean(given, removed):
    return column_means("trimmed_mean", given, removed)


def mean_around_median(given, kept):
    return column_means("mean_around_median", given, kept)


def column_means(name, given, count):
    out = fresh(1, given.shape[1], dtype=given.dtype)
    call(name, [DTYPES[given.dtype], *given.shape, count, *rows(given), out, None])
    return done(out)[0]


class Card(NamedTuple):
    """The facts about a GPU that a plan needs.

    Attributes:
        multiprocessors: number of multiprocessors
        block_shared: bytes of shared memory that a block may request
        shared: bytes of shared memory of a multiprocessor
        copies: True if it copies to shared memory beside the arithmetic
    """

    multiprocessors: int
    block_shared: int
    shared: int
    copies: bool


H200 = Card(132, 227 * 1024, 228 * 1024, copies=True)
A100 = Card(108, 163 * 1024, 164 * 1024, copies=True)
RTX4090 = Card(128, 99 * 1024, 100 * 1024, copies=True)
T4 = Card(40, 64 * 1024, 64 * 1024, copies=False)


class AggregatePlan(NamedTuple):
    """The launch of a mixing kernel.

    Attributes:
        way: one of WAYS
        threads: threads of a block
        results: results of a block
        blocks_m: blocks that compute all results of the same columns
        tile_cols: columns of a tile
        chunk: "ringed", "streamed": rows whose weights are in shared memory at a time
        buffer_rows: "tiled": rows of a buffer
        shared: bytes of shared memory
        tiles: number of tiles
        grid: number of blocks
    """

    way: str
    threads: int
    results: int
    blocks_m: int
    tile_cols: int
    chunk: int
    buffer_rows: int
    shared: int
    tiles: int
    grid: int


WAYS = ("held", "ringed", "streamed", "tiled", "direct")


def aggregate_plan(n, m, p, card=H200, k=None, dtype=torch.float32, precise=False):
    """The plan for m results of n rows, or k listed rows."""
    here = torch.zeros(1)
    out = torch.zeros(10, dtype=torch.int64)
    kind = DTYPES[dtype] | DTYPES[dtype] << 32
    width = n if k is None else k
    problem = [kind, precise, n, p, m, width, here, p, here, k is not None, here]
    call("aggregate_plan", [*problem, None, 0, 1.0, here, p], list(card), out)
    way, *others = out.tolist()
    return AggregatePlan(WAYS[way], *others)


# Dimensions of x, w_a, lam and w_b without the clients' axis.
OWN = (2, 2, 1, 2)


def layer(inputs):
    """The fields for the rank-1 kernels, the width, and the result's shape.

    The inputs are copied without gaps into guarded memory. The second value is True for
    float64.
    """
    has = [t.dim() > own for t, own in zip(inputs, OWN, strict=True)]
    clients = [len(t) for t, axis in zip(inputs, has, strict=True) if axis][:1]
    (b, i), (o, f) = (t.shape[-2:] for t in inputs[:2])
    fields = [*(clients or [1]), b, i, f, o]
    for t, axis, row in zip(inputs, has, ([i], [f], [], [i]), strict=True):
        apart = t.shape[1:].numel() if axis else 0
        fields += [guarded(t.reshape(1, t.numel())), apart, *row, not axis]
    return [*fields, None], inputs[0].dtype == F64, (*clients, b, o)


class Rank1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        fields, wide, shape = layer(inputs)
        y = fresh(1, math.prod(shape), dtype=inputs[0].dtype)
        call("rank1", fields, wide, y, *[None] * 5)
        return done(y).view(shape)

    @staticmethod
    def backward(ctx, grad):
        return rank1_linear_backward(grad, *ctx.saved_tensors, *ctx.needs_input_grad)


rank1_linear = Rank1.apply


def rank1_linear_backward(grad, *inputs_and_needs):
    inputs = inputs_and_needs[:4]
    needs = inputs_and_needs[4:]
    fields, wide, _ = layer(inputs)
    grads = [fresh(1, t.numel(), dtype=t.dtype) if need else None
             for t, need in zip(inputs, needs, strict=True)]  # fmt: skip
    grad = guarded(grad.reshape(1, grad.numel()))
    call("rank1", fields, wide, None, grad, *grads)
    found = ((None if g is None else done(g)) for g in grads)
    return tuple(
        g if g is None else g.view(t.shape) for g, t in zip(found, inputs, strict=True)
    )


def sgd_problem(
    w, grad, lr, shift=None, mask=None, mu=0.0, anchor=None, momentum=0.0, buffer=None,
    weight_decay=0.0,
):  # fmt: skip
    each = isinstance(mu, Tensor)
    held = buffer if momentum else None
    numbers = (0.0, mu.double()) if each else (mu, None)
    given = (
        *rows(w),
        *rows(grad),
        lr,
        *rows(shift),
        *rows(mask),
        *numbers,
        *rows(anchor),
    )
    return [*w.shape, *given, momentum, *rows(held), weight_decay]


def sgd_step_(w, *others):
    call("sgd", sgd_problem(w, *others), w.dtype == F64)
