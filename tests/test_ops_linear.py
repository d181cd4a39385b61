"""linear_sgd_: the whole local training of linear models, against autograd one client, one batch and one sample order at a time."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tolerance import F32, F64, assert_close
from ugly import lay, randn, same_for_any_threads

from pflcore.flat import CRITERIA
from pflcore.ops import _library as library
from pflcore.ops import reference
from pflcore.ops.linear import linear_sgd_

SWITCH = st.sampled_from([False, True])


def problem(sizes, inputs, outputs, criterion, bias=True, passes=1, dtype=F32, seed=0, relabel=False):
    """Clients of these sizes in one pool, each with its own order: the op's first arguments, w to relabel and order."""
    gen = torch.Generator().manual_seed(seed)
    pool, longest = sum(sizes) + 3, max([*sizes, 1])
    w = randn(seed + 1, len(sizes), outputs * (inputs + bias), dtype=dtype, scale=0.5)
    x = randn(seed + 2, pool, inputs, dtype=dtype)
    classes = outputs if criterion == "cross_entropy" else 2
    labels = criterion in ("cross_entropy", "hinge")
    y = torch.randint(classes, (pool,), generator=gen) if labels else randn(seed + 3, pool, dtype=dtype)
    names = torch.stack([torch.randperm(classes, generator=gen) for _ in sizes]) if relabel and labels else None
    order = torch.zeros(len(sizes), passes, longest, dtype=torch.int64)
    for i, n in enumerate(sizes):
        for p in range(passes):
            order[i, p, :n] = torch.randperm(pool, generator=gen)[:n]
    return w, x, y, names, order


def cuts(n, batch, drop_last):
    whole = [(a, min(a + batch, n)) for a in range(0, n, batch)]
    return [c for c in whole if c[1] - c[0] == min(batch, n)] if drop_last else whole


def by_autograd(w, x, y, names, order, sizes, steps, batch, drop_last, criterion, bias, lr, shift, mask, mu, anchor, momentum, decay):
    """In float64: the rows after training, the summed gradients, the summed losses, and how many numbers were added up."""
    w, x = w.double().clone(), x.double()
    sums, losses = torch.zeros_like(w), torch.zeros(len(w), dtype=F64)
    for i, n in enumerate(sizes):
        line = [(p, *c) for p in range(order.shape[1]) for c in cuts(n, batch, drop_last)]
        velocity = torch.zeros_like(w[i])
        for p, a, b in line[: steps[i]]:
            at = order[i, p, a:b]
            labels = y[at] if names is None else names[i][y[at]]
            row = w[i].clone().requires_grad_()
            matrix = len(row) // (x.shape[1] + bias) * x.shape[1]
            scores = F.linear(x[at], row[:matrix].view(-1, x.shape[1]), row[matrix:] if bias else None)
            loss = CRITERIA[criterion](scores, labels if labels.dtype == torch.int64 else labels.double())
            (g,) = torch.autograd.grad(loss, row)
            losses[i] += loss.detach()
            d = g + decay * w[i]
            sums[i] += d
            d = d + (0 if shift is None else shift[i]) + (0 if anchor is None else mu[i] * (w[i] - anchor[i]))
            velocity = momentum * velocity + d
            w[i] -= lr * (1 if mask is None else mask) * (velocity if momentum else d)
    return w, sums, losses


@pytest.mark.usefixtures("isa")
@given(
    st.lists(st.sampled_from([1, 2, 5, 16, 33, 70, 130]), min_size=1, max_size=4), st.sampled_from([1, 3, 16, 28, 33, 64]),
    st.sampled_from(sorted(CRITERIA)), st.sampled_from([1, 2, 5, 10]), st.sampled_from([1, 4, 32, 200]), st.sampled_from([F32, F64]),
    SWITCH, SWITCH, SWITCH, SWITCH, st.sampled_from([0.0, 0.9]), st.sampled_from([1, 2]), st.integers(0, 99),
)  # fmt: skip
def test_like_autograd(sizes, inputs, criterion, outputs, batch, dtype, bias, drop_last, corrected, relabel, momentum, passes, seed):
    outputs = outputs if criterion == "cross_entropy" else 1
    w, x, y, names, order = problem(sizes, inputs, outputs, criterion, bias, passes, dtype, seed, relabel)
    most = torch.tensor([passes * len(cuts(n, batch, drop_last)) for n in sizes])
    steps = most.clamp(max=9) if seed % 2 else most.clamp(max=4)
    shift, anchor, mask, mu, decay = None, None, None, torch.zeros(len(sizes), dtype=F64), 0.0
    if corrected:
        shift, anchor = (randn(seed + k, *w.shape, dtype=dtype, scale=0.1) for k in (5, 6))
        mask = (torch.arange(w.shape[1]) % 3 > 0).to(dtype)
        mu, decay = torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed), dtype=F64), 0.01
    want, want_sums, want_losses = by_autograd(
        w, x, y, names, order, sizes, steps.tolist(), batch, drop_last, criterion, bias, 0.02, shift, mask, mu, anchor, momentum, decay
    )
    start, sums = w.clone(), torch.zeros_like(w)
    x = lay(x, "wide rows")
    mu_rows = mu if corrected else None
    how = (batch, drop_last, criterion, bias, 0.02, shift, mask, 0.0, mu_rows, anchor, momentum, decay)
    losses = linear_sgd_(w, x, y, names, order, torch.tensor(sizes), steps, *how, sums)
    size = 1 + want.abs() + want_sums.abs() + (x.abs().sum(1).max() if len(x) else 0)
    assert_close(w, want, "linear", dtype, size)
    assert_close(sums, want_sums, "linear", dtype, size * steps.max())
    assert_close(losses, want_losses, "linear", dtype, size.amax(1) ** 2 * steps)
    if mask is not None:
        assert torch.equal(w[:, mask == 0], start[:, mask == 0]), "what is masked does not move"


def plain(w, problem, sizes, batch=32, criterion="cross_entropy"):
    _, x, y, names, order = problem
    steps = torch.tensor([len(cuts(n, batch, False)) for n in sizes])
    w = w.clone()
    how = (batch, False, criterion, True, 0.05, None, None, 0.0, None, None, 0.0, 0.0)
    loss = linear_sgd_(w, x, y, names, order, torch.tensor(sizes), steps, *how, None)
    return torch.cat([w, loss[:, None].to(w)], 1)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("inputs", [33, 784])
def test_threads_and_company_change_no_bit(inputs):
    if library._C is None:
        pytest.skip("the reference's products are torch's, which differ with the threads and the batch")
    sizes = [200, 131, 64, 7, 1]
    made = problem(sizes, inputs, 10, "cross_entropy", relabel=True)
    w, x, y, names, order = made
    same_for_any_threads(lambda: plain(w, made, sizes))
    whole = plain(w, made, sizes)
    for i, n in enumerate(sizes):
        one = slice(i, i + 1)
        assert torch.equal(plain(w[one], (w[one], x, y, names[one], order[one]), [n]), whole[one])


@pytest.mark.usefixtures("isa")
def test_nan_stays_with_its_client():
    sizes = [40, 40, 40]
    made = problem(sizes, 9, 3, "cross_entropy")
    _, x, _, _, order = made
    mine = order[1, 0, :40]
    others = torch.cat([order[0, 0, :40], order[2, 0, :40]])
    x[mine[~torch.isin(mine, others)][0]] = torch.nan
    after = plain(made[0], made, sizes)
    assert after[1].isnan().any() and after[0].isfinite().all() and after[2].isfinite().all()


@pytest.mark.usefixtures("isa")
def test_large_scores_do_not_overflow():
    sizes = [40]
    w, x, y, names, order = problem(sizes, 9, 3, "cross_entropy")
    after = plain(w * 1e4, (w, x, y, names, order), sizes)
    assert after.isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a[2].fill_(7), "out of range"),
        (lambda a: a[2].fill_(-1), "out of range"),
        (lambda a: a[4].fill_(10_000), "out of range"),
        (lambda a: a[4].fill_(-1), "out of range"),
        (lambda a: a[5].fill_(50), "out of range"),
        (lambda a: a[6].fill_(9), "more steps"),
        (lambda a: a.__setitem__(0, a[0][:, :-1]), "w of length"),
        (lambda a: a.__setitem__(2, a[2][:-1]), "one label for each sample"),
        (lambda a: a.__setitem__(1, a[1].double()), "w's dtype"),
        (lambda a: a.__setitem__(9, "cosine"), "criterion"),
    ],
)
def test_memory_is_guarded(change, words):
    """The kernel refuses what would read or write beside its arrays."""
    if library._C is None:
        pytest.skip("guards of the kernel")
    w, x, y, names, order = problem([40, 20], 9, 3, "cross_entropy")
    arguments = [w, x, y, names, order, torch.tensor([40, 20]), torch.tensor([2, 1]), 32, False, "cross_entropy", True, 0.1]
    arguments += [None, None, 0.0, None, None, 0.0, 0.0, None]
    linear_sgd_(*[a.clone() if isinstance(a, torch.Tensor) else a for a in arguments])
    change(arguments)
    with pytest.raises(RuntimeError, match=words):
        linear_sgd_(*arguments)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("y", "moved"), [(1, 0.1), (0, -0.1)])
def test_a_hinge_that_just_touches_pulls(y, moved):
    """At a margin of exactly 1 the slope is that of the side that still learns, in the kernel and in the reference."""
    for call in (linear_sgd_, reference.linear_sgd_):
        w = torch.tensor([[1.0 if y else -1.0]])
        how = (torch.zeros(1, 1, 1, dtype=torch.int64), torch.tensor([1]), torch.tensor([1]), 1, False, "hinge", False, 0.1)
        loss = call(w, torch.ones(1, 1), torch.tensor([y]), None, *how, None, None, 0.0, None, None, 0.0, 0.0, None)
        assert float(loss) == 0 and float(w) == pytest.approx((1.0 if y else -1.0) + moved)
