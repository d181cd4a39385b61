"""Properties of the ops on drawn inputs, for everything that runs them.

tests/ops runs the CPU's kernels and the references. tests/gpu runs the CUDA kernels on
a card, and tests/internal/cuda_on_cpu runs them on the CPU.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from places import golden
from tolerance import F16, F32, F64, FLOATS, assert_close
from torch import Tensor
from ugly import LAYOUTS, SIZES, intact, lay, matrix, randn, scales

from pflcore import ops
from pflcore.ops import reference

dtypes = st.sampled_from(FLOATS)
identical = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


class Machine(NamedTuple):
    """A set of ops, and the places of their inputs.

    `put(t, draw)` gives a matrix's values in memory of its own, with NaN around them,
    at a place that hypothesis draws. With `write=True` the place may be written.
    """

    ops: Any
    put: Callable[..., Tensor]
    sizes: Sequence[int] = SIZES  # numbers of columns
    device: str = "cpu"
    rows: Sequence[int] = (0, 1, 2, 3, 7, 17)  # numbers of rows, for distances
    tensor_cores: bool = False  # True for a card with fast float64 in tensor cores
    # Numbers of columns of the distances, for weights.
    clients: Sequence[int] = (1, 2, 3, 17, 67, 300, 1100)

    def place(self, t: Tensor | None, draw: Any, **how: bool) -> Tensor | None:
        """The result of `put` for a tensor with any axes, or None."""
        if t is None:
            return None
        rows = t.flatten(0, -2) if t.dim() > 1 else t[None]
        return self.put(rows, draw, **how).reshape(t.shape)


CPU = Machine(
    ops,
    lambda t, draw, write=False: lay(
        t, draw(st.sampled_from(LAYOUTS[: 3 if write else 5]))
    ),
)


def integers(seed, low, high, *shape):
    return torch.randint(
        low, high, shape, generator=torch.Generator().manual_seed(seed)
    )


def of(*values):
    return st.sampled_from(values)


# --- pairwise_sqdist --------------------------------------------------------


def exact(a, b=None):
    """The definition of squared distances in float64."""
    b = a if b is None else b
    return (a.double()[:, None] - b.double()).square().sum(-1)


def listed(all_pairs, index):
    """The entries of all pairs that the index lists.

    Padding (-1) is infinitely far.
    """
    return torch.nn.functional.pad(all_pairs, (1, 0), value=torch.inf).gather(
        1, index + 1
    )


def sqdist(on, dtype, draw):
    """Distances are those of the definition, symmetric, and 0 on the diagonal.

    Listed pairs have the bits of all pairs. They are only close to them where tensor
    cores may have made the matrix.
    """
    m = draw(of(*on.rows))
    n = draw(of(5, 11, *on.rows))
    p = draw(of(*on.sizes))
    rows = matrix(draw, m + n, p, dtype, draw(scales(dtype)))
    rows[:1, :1] *= draw(of(1.0, 1.0, torch.nan, torch.inf))
    a = on.put(rows[:m], draw)
    b = on.put(rows[m:], draw)
    call = on.ops.pairwise_sqdist
    both = call(a, b).cpu()
    square = call(a).cpu()
    assert_close(both, exact(rows[:m], rows[m:]), "sqdist", dtype)
    assert_close(square, exact(rows[:m]).fill_diagonal_(0), "sqdist", dtype)
    assert square.dtype == F64
    identical(square, square.T)
    assert not square.diagonal().any()
    for other, pairs in ((b, both), (None, square)):
        index = integers(
            draw(st.integers(0, 99)), -1, pairs.shape[1], draw(of(0, 1, 3, 9)), m
        ).T
        got = call(a, other, index.to(on.device)).cpu()
        want = listed(pairs, index)
        if on.tensor_cores and dtype is F32 and len(a) > 20:
            assert_close(got, want, "sqdist", dtype)
        else:
            identical(got, want)


# --- weights ----------------------------------------------------------------


def distances(rows, n, seed):
    """Distances with difficult values.

    They have ties, zeros, huge and tiny numbers, absent clients, and values below 0 by
    rounding.
    """
    kind = integers(seed, 0, 9, rows, n)
    size = 10.0 ** integers(seed + 1, -3, 4, rows, 1)
    d = randn(seed, rows, n).abs() * size
    for turn, value in enumerate(
        (0.0, 2.5, torch.inf, torch.nan, -1e-9)[: 2 + seed % 2 * 3]
    ):
        d[kind == turn] = value
    return torch.full_like(d, 2.5) if seed % 7 == 0 else d


def weights(on, dtype, draw):
    """Both ops of weights agree with their references, for any place."""
    rows = draw(of(0, 1, 3, 17, 33))  # with blocks of 16
    n = draw(of(*on.clients))
    seed = draw(st.integers(0, 99))
    k = draw(of(1, 2, 5, 16, 31, 32, 33, 34, 255, 2000))
    d = distances(rows, n, seed).to(dtype)
    target = integers(seed, 0, n, rows)
    placed = on.put(d, draw)
    weight, index = on.ops.feddwa_weights(placed, k)
    want, near = reference.feddwa_weights(d, k)
    assert torch.equal(index.cpu(), near)
    torch.testing.assert_close(weight.cpu(), want, rtol=1e-12, atol=1e-300)
    omega = draw(of(0.0, 0.2, 0.7, 1.0, 1.3))
    psi = draw(of(0.0, 0.3, 0.9))
    for tie in ("closed", "uniform"):
        got = on.ops.waffle_weights(placed, target.to(on.device), omega, psi, tie).cpu()
        want = reference.waffle_weights(d, target, omega, psi, tie)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


# --- aggregate --------------------------------------------------------------


def scattered(weight, index, n):
    """The dense [M, N] weights in float64.

    The weights of an index that is named twice are added.
    """
    if index is None:
        return weight.double()
    return torch.zeros(len(weight), n, dtype=F64).scatter_add_(
        1, index, weight.double()
    )


def close_mix(got, updates, weight, index=None, base=None, lr=1.0):
    """Asserts that `got` is base + lr * (weight @ updates).

    The error is measured by the sizes of the addends.
    """
    u = updates.double()
    w = scattered(weight, index, len(updates))
    start = torch.zeros((), dtype=F64) if base is None else base.double()
    size = start.abs() + abs(lr) * (
        scattered(weight.abs(), index, len(updates)) @ u.abs()
    )
    assert got.dtype == (updates if base is None else base).dtype
    exactly = got.dtype == F64 and updates.dtype == F64
    # The sum is accumulated in float32, or rounded to it in the end.
    rounding = F32 if got.dtype in (F32, F64) and not exactly else got.dtype
    assert_close(got.cpu(), start + lr * (w @ u), "aggregate", rounding, size)


def aggregate(on, dtype, draw):
    """Mixtures are those of the formula.

    They are dense or by index, and onto any base. Written into `out`, which may be the
    base itself, they have the same bits, and the memory around `out` stays. An update
    without weight is not read by index.
    """
    n = draw(of(0, 1, 2, 7, 20))
    m = draw(of(0, 1, 2, 8, 9, 13, 33, 100))
    p = draw(of(*on.sizes))
    seed = draw(st.integers(0, 99))
    scale = draw(scales(dtype))
    updates = matrix(draw, n, p, dtype, scale)
    sparse = draw(st.booleans())
    k = draw(of(0, 1, 2, 5, 9, 40)) if sparse and n else n
    weight = randn(seed, m, k, dtype=draw(of(F32, F64))) * (
        randn(seed + 2, m, k) > -0.8
    )
    index = integers(seed, 0, max(n, 1), m, k) if sparse else None
    shape = draw(of(None, (p,), (m, p)))
    kinds = FLOATS if 1e-12 <= scale <= 1e3 else (dtype, F64)
    base = (
        None
        if shape is None
        else randn(seed + 1, *shape, scale=scale).to(draw(of(*kinds)))
    )
    lr = draw(of(1.0, 0.5, -0.1, 0.0, 1e-3))
    precise = draw(st.booleans())
    seen = updates.clone()
    if sparse:
        seen[~torch.isin(torch.arange(n), index[weight * lr != 0])] = torch.nan
    placed = [on.place(seen, draw), on.place(weight, draw)]
    placed += [None if index is None else index.to(on.device)]
    got = on.ops.aggregate(*placed, on.place(base, draw), lr, precise=precise)
    close_mix(got, updates, weight, index, base, lr)
    fits = shape == (m, p) and draw(st.booleans())
    out = on.put(
        base if fits else torch.full_like(got.cpu(), torch.nan), draw, write=True
    )
    onto = out if fits else on.place(base, draw)
    assert on.ops.aggregate(*placed, onto, lr, out, precise) is out and intact(out)
    identical(out, got)
    plain = reference.aggregate(updates, weight, index, base, lr, precise=precise)
    close_mix(plain, updates, weight, index, base, lr)


# --- trimmed_mean -----------------------------------------------------------


def trimmed_mean(rows, removed):
    """The trimmed mean by its definition: the bits of every path.

    Sums are float32 unless the rows are float64.
    """
    wide = rows if rows.dtype is F64 else rows.float()
    ordered = wide.sort(0).values[removed : len(rows) - removed]
    chunks = [sum(chunk, torch.zeros(rows.shape[1])) for chunk in ordered.split(16)]
    mean = sum(chunks, torch.zeros(rows.shape[1])) / torch.tensor(float(len(ordered)))
    return mean.masked_fill(rows.isnan().any(0), torch.nan).to(rows.dtype)


def wider_scales(dtype):
    """The scales of `scales`, and one below the least normal number."""
    denormal = {F32: 1e-42, F64: 4e-320, F16: 1e-6}.get(dtype, 1e-39)
    return st.one_of(scales(dtype), st.just(denormal))


def with_specials(draw, rows):
    """A copy of the rows, some of whose numbers may be special ones."""
    rows = rows.clone(memory_format=torch.contiguous_format)
    if draw(st.booleans()):
        seed = draw(st.integers(0, 99))
        special = (0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan)
        for kind, value in enumerate(special):
            rows[integers(seed, 0, 9 if kind < 5 else 99, *rows.shape) == kind] = value
    return rows


def robust(on, dtype, draw):
    """Trimmed means, the median among them, have the bits of their definition.

    A column with a NaN is NaN. Ties, zeros of both signs and infinities count as
    numbers.
    """
    n = draw(of(1, 2, 3, 7, 8, 9, 16, 20, 21, 33, 50, 113, 140))
    p = draw(of(*(size for size in on.sizes if size * n < 20_000)))
    rows = with_specials(draw, matrix(draw, n, p, dtype, draw(wider_scales(dtype))))
    removed = draw(st.integers(0, (n - 1) // 2))
    placed = on.put(rows, draw)
    want = trimmed_mean(rows, removed)
    identical(on.ops.trimmed_mean(placed, removed).cpu(), want)
    middle = trimmed_mean(rows, (n - 1) // 2)
    identical(on.ops.trimmed_mean(placed, (n - 1) // 2).cpu(), middle)
    plain = reference.trimmed_mean(rows, removed)
    identical(plain, want)


# --- mean_around_median -----------------------------------------------------


def mean_around_median(rows, kept):
    """The mean around the median by its definition: the bits of every path.

    The numbers of a column are chosen in the order of their distance from the median,
    and summed from the least on: those of each 16 places first. Sums are float32 unless
    the rows are float64. The distance is what a number is below the lower one of the
    two in the middle, or above the higher one: less than the distance from the median
    by the same for all numbers, and without its rounding.
    """
    wide = rows if rows.dtype is F64 else rows.float()
    ordered = wide.sort(0).values
    low, high = ordered[(len(rows) - 1) // 2], ordered[len(rows) // 2]
    median = low * 0.5 + high * 0.5
    low, high = (torch.where(median.isinf(), median, t) for t in (low, high))
    distance = torch.where(ordered <= low, low - ordered, ordered - high)
    # An infinite median has the distance 0 from its equals.
    is_infinite = median.isinf() & (ordered == median)
    distance = torch.where(is_infinite, 0.0, distance)
    # Where distances are equal, as rounded ones are, a number that is not above the
    # median comes first, and of two on one side the one that is nearer in the column.
    below = (ordered <= low).sum(0)
    at = torch.arange(len(rows))[:, None]
    nearer = torch.where(at < below, below - 1 - at, at)
    best = distance.gather(0, nearer).sort(dim=0, stable=True).indices[:kept]
    place = nearer.gather(0, best)
    is_taken = torch.zeros_like(ordered, dtype=torch.bool).scatter(0, place, value=True)
    taken = torch.where(is_taken, ordered, 0.0)
    zero = torch.zeros(rows.shape[1])
    total = sum((sum(chunk, zero) for chunk in taken.split(16)), zero)
    mean = (total / torch.tensor(float(kept))).where(~median.isnan(), torch.nan)
    return mean.masked_fill(rows.isnan().any(0), torch.nan).to(rows.dtype)


def around_median(on, dtype, draw):
    """Means around the median have the bits of their definition.

    All numbers give the mean, and one that is nearest is the median's neighbour.
    """
    n = draw(of(1, 2, 3, 7, 8, 9, 16, 20, 21, 33, 50, 113, 140))
    p = draw(of(*(size for size in on.sizes if size * n < 20_000)))
    rows = with_specials(draw, matrix(draw, n, p, dtype, draw(wider_scales(dtype))))
    kept = draw(st.integers(1, n))
    placed = on.put(rows, draw)
    want = mean_around_median(rows, kept)
    identical(on.ops.mean_around_median(placed, kept).cpu(), want)
    identical(reference.mean_around_median(rows, kept), want)
    every = on.ops.mean_around_median(placed, n).cpu()
    is_number = rows.isfinite().all(0)
    identical(every[is_number], trimmed_mean(rows, 0)[is_number])


# --- rank1_linear -----------------------------------------------------------


def dense(x, w_a, lam, w_b):
    """The product of x and the dense weight.

    That weight is sum_f lam_f w_a[:, f] w_b[f, :]. Clients' axes are broadcast.
    """
    return x @ (w_a * lam[..., None, :] @ w_b).mT


def factors(b, i, f, o, dtype=F64, leads=((),) * 4, active=1.0, seed=0):
    """Arguments x, w_a, lam, w_b, with a share `active` of active factors."""
    shapes = ((b, i), (o, f), (f,), (f, i))
    out = [
        randn(seed + k, *lead, *shape)
        for k, (lead, shape) in enumerate(zip(leads, shapes, strict=True))
    ]
    gen = torch.Generator().manual_seed(seed)
    out[2] *= torch.rand(out[2].shape, generator=gen, dtype=F64) < active
    return [t.to(dtype) for t in out]


def close_layer(args, there=None, need=(True,) * 4, call=ops.rank1_linear):
    """Asserts value and gradients of the factorized layer.

    They are compared with autograd through the dense weight in float64. Errors are
    measured by the same computation on absolute values.
    """
    leaves = [
        t.detach().requires_grad_(w) for t, w in zip(there or args, need, strict=True)
    ]
    y = call(*leaves)
    wide, sizes = ([f(t.double()) for t in args] for f in (torch.clone, torch.abs))
    assert y.dtype == args[0].dtype
    assert_close(y.cpu(), dense(*wide), "rank1", size=dense(*sizes))
    if not any(need):
        return
    grad = randn(9, *y.shape, dtype=y.dtype)
    got = torch.autograd.grad(
        y, [t for t in leaves if t.requires_grad], grad.to(y.device)
    )
    want, size = (
        torch.autograd.functional.vjp(dense, tuple(values), g)[1]
        for values, g in ((wide, grad.double()), (sizes, grad.double().abs()))
    )
    wanted = [k for k in range(4) if need[k]]
    for g, k in zip(got, wanted, strict=True):
        assert g.dtype == args[k].dtype and g.shape == args[k].shape
        assert_close(g.cpu(), want[k], "rank1", size=size[k])


def rank1(on, dtype, draw):
    """The layer and the wanted gradients are those of the dense weight.

    Clients' axes may stand wherever they are allowed, and factors may be inactive.
    """
    sizes = [draw(of(1, 2, 3, 7, 8, 13, 17, 33, 67, 0)) for _ in range(4)]
    has, need = (draw(st.tuples(*[st.booleans()] * 4)) for _ in range(2))
    clients = draw(of(3, 3, 0))
    leads = [(clients,) if axis else () for axis in has]
    args = factors(
        *sizes, dtype, leads, draw(of(0.0, 0.3, 1.0)), draw(st.integers(0, 99))
    )
    placed = [on.place(t, draw) for t in args]
    close_layer(args, placed, need, on.ops.rank1_linear)


# --- sgd_step_ --------------------------------------------------------------


def stepped(w, grad, lr, shift, mask, mu, anchor, momentum, buffer, weight_decay):
    """The formula of a step: the new w and the new buffer."""
    d = grad if shift is None else grad + shift
    if anchor is not None:
        d = d + (mu[:, None] if isinstance(mu, Tensor) else mu) * (w - anchor)
    d = d + weight_decay * w
    if momentum:
        d = buffer = momentum * buffer + d
    return w - lr * (1 if mask is None else mask) * d, buffer


def sgd(on, dtype, draw):
    """A step is that of the formula.

    Each tensor is in its own place. Masked entries do not move, and the memory between
    the rows stays. A row alone takes the same step, bit for bit.
    """
    s = draw(of(0, 1, 2, 5, 17))
    q = draw(of(*on.sizes))
    seed = draw(st.integers(0, 99))
    kind = draw(of(None, "number", "rows"))
    t = [randn(seed + k, s, q, dtype=dtype) for k in range(5)]
    for k, wanted in ((2, draw(st.booleans())), (3, kind), (4, draw(st.booleans()))):
        t[k] = t[k] if wanted else None
    shape = draw(of(None, (q,), (s, q)))
    mask = None if shape is None else randn(seed + 5, *shape).gt(0).to(dtype)
    rates = torch.rand(s, generator=torch.Generator().manual_seed(seed), dtype=F64)
    mu = {None: 0.0, "number": 0.3, "rows": rates}[kind]
    momentum = 0.0 if t[4] is None else 0.9
    decay = draw(of(0.0, 0.01))
    placed = [on.place(x, draw, write=k in (0, 4)) for k, x in enumerate(t)]
    placed_mask = on.place(mask, draw)
    w = placed[0]
    buffer = placed[4]
    there_mu = mu.to(on.device) if kind == "rows" else mu

    def step(w, grad, shift, anchor, buffer, mask, mu):
        arguments = (w, grad, 0.1, shift, mask, mu, anchor, momentum, buffer, decay)
        assert on.ops.sgd_step_(*arguments) is None

    step(*placed, placed_mask, there_mu)
    wide = [None if x is None else x.double() for x in (*t, mask)]
    want = stepped(
        *wide[:2], 0.1, wide[2], wide[5], mu, wide[3], momentum, wide[4], decay
    )
    for got, value in zip((w, buffer), want, strict=True):
        if got is not None:
            # Ten terms of size 2.
            assert_close(got.cpu(), value, "sgd", dtype, 20 * torch.ones_like(value))
            assert intact(got)
    one = [on.place(None if x is None else x[:1], draw, write=True) for x in t]
    step(
        *one,
        placed_mask[:1] if shape == (s, q) else placed_mask,
        there_mu[:1] if kind == "rows" else there_mu,
    )
    identical((one[0], one[4]), (w[:1], None if buffer is None else buffer[:1]))
    if mask is not None:
        frozen = mask.expand(s, q) == 0
        assert torch.equal(w.cpu()[frozen], t[0][frozen])


LAWS = {
    sqdist: FLOATS,
    weights: FLOATS,
    aggregate: FLOATS,
    robust: FLOATS,
    around_median: FLOATS,
    rank1: FLOATS,
    sgd: (F32, F64),
}


def inputs(p, dtype, device):
    """Inputs by the names that tests/golden/calls.json uses."""

    def r(seed, *shape):
        return randn(seed, *shape, dtype=dtype).to(device)

    rows = r(0, 20, p)
    weight = randn(3, 20, 20).to(device)
    wide = dtype in (F32, F64)
    args = factors(17, 57, 61, 31, dtype, ((6,), (), (6,), ()), 0.7)
    x, w_a, lam, w_b = (t.to(device) for t in args)
    w = rows.to(dtype if wide else F32)
    return {
        "rows": rows,
        "few": rows[:2],
        "many": r(6, 67, 1031),
        "moved": rows[:7] + 1,
        "tiny": rows * (1e-3 if dtype is F16 else 1e-25),
        "columns": rows[:, 1:],
        "base": r(1, p),
        "d": randn(2, 97, 61).abs().to(device),
        "long": randn(8, 9, 700).abs().to(device),
        "target": integers(4, 0, 61, 97).to(device),
        "near": integers(5, 0, 20, 20, 5).to(device),
        "weight": weight,
        "five": weight[:5],
        "one": weight[:1],
        "sparse": weight[:, :5].contiguous(),
        "x": x,
        "w_a": w_a,
        "lam": lam,
        "w_b": w_b,
        "x of one": x[0],
        "lam of one": lam[0],
        "grad": r(7, 6, 17, 31),
        "w": w,
        "w plus one": w + 1,
    }


def calls(run, backward, p, dtype=F32, device="cpu"):
    """Functions and their inputs, by name.

    They are the ops in the ways that their kernels take.
    """

    def step(w, *others):
        run.sgd_step_(w, *others)
        return w

    def two(*given):
        return backward(*given)[:2]

    functions = {"step": step, "backward": backward, "two gradients": two}
    of = inputs(p, dtype, device)
    named = {}
    for name, (op, *arguments) in golden("calls").items():
        function = functions.get(op) or getattr(run, op)
        named[name] = (function, [of.get(a, a) for a in arguments])
    return named
