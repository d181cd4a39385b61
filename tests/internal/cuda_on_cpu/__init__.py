"""The CUDA kernels on the CPU: builds driver.cpp with the C++ compiler and calls it with tensors.

Every buffer handed over has NaN before it, so that a stray read poisons the result and a stray
write is seen, and behind it a page that may not be touched at all.
"""

import ctypes
import os
import shutil
import subprocess
import weakref
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_ubyte, c_uint, c_void_p
from pathlib import Path

import torch

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "csrc" / "cuda"
loaded: list[ctypes.CDLL] = []
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def compiler():
    return shutil.which(os.environ.get("CXX", "").split(" ")[0] or "g++") or shutil.which("g++")


def build(folder):
    target = folder / "cuda_on_cpu.so"
    flags = [
        "-std=c++17",
        "-O1",
        "-g0",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-shared",
        "-fPIC",
    ]
    command = [
        str(compiler()),
        *flags,
        f"-I{HERE}",
        f"-I{KERNELS}",
        str(HERE / "driver.cpp"),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)
    lib = ctypes.CDLL(str(target))
    lib.fenced.argtypes, lib.fenced.restype = [c_int64, POINTER(c_int64)], c_void_p
    lib.unfence.argtypes, lib.unfence.restype = [c_void_p, c_int64], None
    lib.last_error.restype = c_char_p
    lib.launches.restype = c_int64
    lib.set_order.argtypes = [c_uint]
    lib.set_shared.argtypes = [c_int64]
    lib.broken.argtypes = [c_int, c_void_p]
    lib.sqdist_plan.argtypes = [c_int, c_int64, c_int64, c_int64, c_int, POINTER(c_int64)]
    lib.sqdist.argtypes = [
        c_int,
        c_void_p,
        c_int64,
        c_int64,
        c_int,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
    ]
    lib.waffle.argtypes = [
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_double,
        c_double,
        c_int,
        c_void_p,
    ]
    lib.feddwa.argtypes = [c_int, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p]
    lib.aggregate.argtypes = [
        *[c_int] * 3,
        *[c_int64] * 4,
        c_void_p,
        c_int64,
        c_void_p,
        c_int,
        *[c_void_p] * 2,
        c_int64,
        c_double,
        c_void_p,
        c_int64,
    ]
    pairs = [c_void_p, c_int64]
    for name in ("float", "double"):
        getattr(lib, f"rank1_{name}").argtypes = [POINTER(c_int64), *[c_void_p] * 5]
        getattr(lib, f"rank1_backward_{name}").argtypes = [
            POINTER(c_int64),
            POINTER(c_int64),
            *[c_void_p] * 9,
        ]
        getattr(lib, f"sgd_{name}").argtypes = [
            *[c_int64] * 2,
            *pairs,
            *pairs,
            c_double,
            *pairs,
            *pairs,
            c_double,
            c_void_p,
            *pairs,
            c_double,
            *pairs,
            c_double,
        ]
    return lib


class Fence:
    """Pages of memory with a forbidden one behind them; given back when the last tensor in them is
    gone."""

    def __init__(self, size):
        real = c_int64()
        self.address = loaded[-1].fenced(size, byref(real))
        assert self.address, "no memory for a fence"
        self.size = real.value

    def tensor(self, dtype):
        memory = (c_ubyte * self.size).from_address(self.address)
        weakref.finalize(memory, loaded[-1].unfence, self.address, self.size)
        return torch.frombuffer(memory, dtype=dtype)


def guarded(t, shift=None, gap=0):
    """A copy of t [R, C] with NaN before it and between its rows, `gap` elements, and a fence that
    no access can pass behind it.

    With `shift` the first row starts so many elements off a 16-byte boundary, which may leave less
    than 16 bytes of NaN before the fence.
    """
    bad = float("nan") if t.is_floating_point() else -(1 << 40)
    (rows, cols), size = t.shape, t.element_size()
    span = max(rows * (cols + gap) - gap, 0) if cols else 0
    memory = Fence((span + 80) * size).tensor(t.dtype).fill_(bad)
    start = memory.numel() - span
    if shift is not None:
        start -= (start - shift) % (16 // size)  # pages begin on 16-byte boundaries
    inner = torch.as_strided(memory, (rows, cols), (cols + gap, 1), start if span else 0)
    return inner.copy_(t)


def intact(inner):
    """Is everything around a guarded tensor still untouched?"""
    memory = torch.as_strided(
        inner, (inner.untyped_storage().nbytes() // inner.element_size(),), (1,), 0
    ).clone()
    torch.as_strided(memory, inner.shape, inner.stride(), inner.storage_offset()).fill_(
        float("nan") if memory.is_floating_point() else -(1 << 40)
    )
    return (
        bool(memory.isnan().all())
        if memory.is_floating_point()
        else bool((memory == -(1 << 40)).all())
    )


def pointer(t):
    return None if t is None else t.data_ptr()


def stride(t):
    return 0 if t is None or t.dim() < 2 else t.stride(0)


class Kernels:
    """The kernels with the signatures of `pflcore.ops.reference`."""

    def __init__(self, folder):
        self.lib = build(folder)
        loaded.append(self.lib)

    def check(self, failed):
        if failed:
            raise RuntimeError(self.lib.last_error().decode())

    def order(self, seed):
        """The order in which threads and blocks run: 0 forwards, 1 backwards, else shuffled."""
        self.lib.set_order(seed)

    def shared(self, most=99 * 1024):
        """How much shared memory the card gives a kernel that asks for it."""
        self.lib.set_shared(most)

    def plan(self, m, n, p, symmetric, dtype=torch.float32):
        out = (c_int64 * 5)()
        self.lib.sqdist_plan(DTYPES[dtype], m, n, p, symmetric, out)
        return dict(zip(("lanes", "loop", "stages", "chunk", "splits"), out, strict=True))

    def pairwise_sqdist(self, a, b=None, index=None, most=0):
        """`most`: rows of a per grid, if not as many as a grid holds."""
        n = (a if b is None else b).shape[0]
        listed = -1 if index is None else index.shape[1]
        out = guarded(
            torch.full(
                (a.shape[0], n if index is None else listed), float("nan"), dtype=torch.float64
            )
        )
        kind, p = DTYPES[a.dtype], a.shape[1]
        rows = pointer(a), stride(a), a.shape[0], b is None, pointer(b), stride(b), n
        self.check(self.lib.sqdist(kind, *rows, p, pointer(out), most, pointer(index), listed))
        assert intact(out)
        return out.clone()

    def waffle_weights(self, dist, target, omega, psi, uniform_ties):
        rows, n = dist.shape
        out = guarded(torch.full((rows, n), float("nan"), dtype=torch.float64))
        step = int(target.numel() > 1)
        self.check(
            self.lib.waffle(
                pointer(dist),
                rows,
                n,
                pointer(target),
                step,
                omega,
                psi,
                uniform_ties,
                pointer(out),
            )
        )
        assert intact(out)
        return out.clone()

    def feddwa_weights(self, sqdist, k):
        (m, n), kept = sqdist.shape, min(k, sqdist.shape[1])
        weight = guarded(torch.full((m, kept), float("nan"), dtype=torch.float64))
        index = guarded(torch.full((m, kept), -1))
        wide = sqdist.dtype == torch.float64
        self.check(
            self.lib.feddwa(
                wide, pointer(sqdist), stride(sqdist), m, n, kept, pointer(weight), pointer(index)
            )
        )
        assert intact(weight) and intact(index)
        return weight.clone(), index.clone()

    def aggregate(self, updates, weight, index, base, lr, precise, out):
        wide = precise or torch.float64 in (updates.dtype, out.dtype)
        (n, p), (m, k) = updates.shape, weight.shape
        self.check(
            self.lib.aggregate(
                DTYPES[updates.dtype],
                DTYPES[out.dtype],
                wide,
                n,
                p,
                m,
                k,
                pointer(updates),
                stride(updates),
                pointer(weight),
                index is not None,
                pointer(index),
                pointer(base),
                stride(base),
                lr,
                pointer(out),
                stride(out),
            )
        )

    @staticmethod
    def _rank1(x, w_a, lam, w_b):
        n = next(
            (t.shape[0] for t, own in ((x, 2), (w_a, 2), (lam, 1), (w_b, 2)) if t.dim() > own), 1
        )
        batch = [
            t.stride(0) if t.dim() > own else 0 for t, own in ((x, 2), (w_a, 2), (lam, 1), (w_b, 2))
        ]
        sizes = [n, x.shape[-2], x.shape[-1], w_b.shape[-2], w_a.shape[-2], *batch]
        return {torch.float32: "float", torch.float64: "double"}[x.dtype], sizes, n

    def rank1_linear(self, x, w_a, lam, w_b):
        name, sizes, n = self._rank1(x, w_a, lam, w_b)
        y = guarded(torch.full((n * x.shape[-2], w_a.shape[-2]), float("nan"), dtype=x.dtype))
        packed = (c_int64 * 9)(*sizes)
        self.check(getattr(self.lib, f"rank1_{name}")(packed, *map(pointer, (x, w_a, lam, w_b, y))))
        assert intact(y)
        batched = x.dim() == 3 or w_a.dim() == 3 or lam.dim() == 2 or w_b.dim() == 3
        return y.reshape(*([n] if batched else []), x.shape[-2], w_a.shape[-2])

    def rank1_linear_backward(self, grad, x, w_a, lam, w_b, *need):
        name, sizes, _ = self._rank1(x, w_a, lam, w_b)
        flat = [guarded(torch.full((1, t.numel()), float("nan"), dtype=x.dtype)) if want else None
                for t, want in zip((x, w_a, lam, w_b), need, strict=True)]  # fmt: skip
        shared = (c_int64 * 4)(x.dim() == 2, w_a.dim() == 2, lam.dim() == 1, w_b.dim() == 2)
        packed = (c_int64 * 9)(*sizes)
        call = getattr(self.lib, f"rank1_backward_{name}")
        self.check(call(packed, shared, *map(pointer, (grad, x, w_a, lam, w_b, *flat))))
        assert all(g is None or intact(g) for g in flat)
        return tuple(
            None if g is None else g.reshape(t.shape)
            for g, t in zip(flat, (x, w_a, lam, w_b), strict=True)
        )

    def sgd_step_(
        self, w, grad, lr, shift, mask, mu, mu_rows,
        anchor, momentum, buffer, weight_decay,
    ):  # fmt: skip
        call = getattr(self.lib, {torch.float32: "sgd_float", torch.float64: "sgd_double"}[w.dtype])
        held = buffer if momentum else None

        def rows(t):
            return pointer(t), stride(t)

        self.check(
            call(
                *w.shape,
                *rows(w),
                *rows(grad),
                lr,
                *rows(shift),
                *rows(mask),
                mu,
                pointer(mu_rows),
                *rows(anchor),
                momentum,
                *rows(held),
                weight_decay,
            )
        )
