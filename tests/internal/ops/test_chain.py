"""Tests of chains of layers against autograd in float64.

They cover whole local training, gradients and evaluation. Other tests compare chains
with themselves, for other threads and other clients.
"""

import json
import re
from copy import copy

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from internal.chains import (
    CHAIN_LOSSES,
    INF,
    KINDS,
    MODELS,
    ONE_OUTPUT,
    Problem,
    by_steps,
)
from laws import integers
from places import ROOT, ran
from tolerance import F32, F64, assert_close
from torch import Tensor
from ugly import randn, same_for_any_threads

import pflcore.nn
from pflcore import Net, metrics, ops
from pflcore.ops import _chain as chain
from pflcore.ops._chain_program import ACTIVATIONS, encode_layer
from pflcore.ops._chain_program import KINDS as KINDS_OF_LAYERS
from pflcore.ops._chain_reference import grad_reference
from pflcore.train._chain import compile_chain
from pflcore.train._losses import LOSSES

every_model = pytest.mark.parametrize("model, loss_name", KINDS)
isa = pytest.mark.usefixtures("isa")


def close(got, want, dtype, size):
    assert_close(
        got, want, "chain", dtype, torch.as_tensor(size, dtype=F64).expand_as(want)
    )


# values -----------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@given(
    st.sampled_from(KINDS),
    st.lists(st.sampled_from([1, 2, 5, 16, 33, 41, 47]), min_size=1, max_size=3),
    st.sampled_from([1, 4, 20, 40]),
    st.sampled_from([F32, F64]),
    st.tuples(*[st.booleans()] * 9),
    st.sampled_from([1, 2]),
    st.integers(0, 99),
)
def test_every_combination_of_options_is_autograd(
    kind, sizes, batch, dtype, switch, passes, seed
):
    shifted, masked, pulled, momentum, decay, clipped, summed, drop_last, adam = switch
    if "batch norm" in kind[0]:
        # It magnifies the rounding of few samples, and cannot train on one.
        sizes = [max(16, n) for n in sizes]
        batch = max(20, batch)
    p = Problem(kind[0], sizes, dtype, passes, seed, bool(seed % 2), kind[1])
    if seed % 5 == 0:
        p.seeds = None

    def like(k, *size):
        return randn(seed + k, *size, dtype=dtype).double()

    most = p.most(batch, drop_last)
    o = {
        "shift": 0.1 * like(5, *p.w.shape) if shifted else None,
        "mask": (like(6, p.net.size) > -0.5).double() if masked else None,
        "anchor": like(7, *p.w.shape) if pulled else None,
        "mu": like(8, len(sizes)).abs().clamp(max=1) if pulled else None,
        "momentum": 0.9 * (momentum and not adam),
        "decay": 0.01 * decay,
        # A small eps would magnify the rounding of gradients that are about zero.
        "adamw": torch.tensor([0.8, 0.95, 0.1], dtype=F64) if adam else None,
        "clip": 0.5 if clipped else INF,
        "batch": batch,
        "drop_last": drop_last,
        # Some clients take no step.
        "steps": most.clamp(max=3 if seed % 3 else 2 * (torch.arange(len(sizes)) % 2)),
    }
    sums = torch.zeros_like(p.w)
    want_sums = torch.zeros_like(p.w).double()
    w, loss = p.train(**o, sums=sums if summed else None)
    moved = p.moved
    want, want_loss = p.train(by_steps, F64, **o, sums=want_sums if summed else None)
    close(moved, p.moved, dtype, 1 + p.moved.abs())
    close(w, want, dtype, 1 + want.abs())
    close(loss, want_loss, dtype, 10 + want_loss.abs())
    close(sums, want_sums, dtype, 1 + want_sums.abs().max())
    if masked:
        still = o["mask"] == 0
        assert torch.equal(w[:, still], p.w[:, still])


@pytest.mark.deep("together they take seconds", quick=4)
@isa
@pytest.mark.parametrize("dtype", [F32, F64])
@every_model
def test_gradients_and_evaluation_are_the_modules(model, loss_name, dtype):
    p = Problem(model, [5, 1, 150], dtype, relabel=True, loss_name=loss_name)
    wide = Problem(model, [5, 1, 150], F64, relabel=True, loss_name=loss_name)
    module = wide.net.module.eval()
    grads, losses, _ = p.grad()
    for i, n in enumerate(p.sizes):
        wide.net.load(module, p.w[i].double(), buffers(p, i))
        at = p.order[i, 0, :n]
        y = p.y[at] if p.names is None else p.names[i][p.y[at]]
        loss = CHAIN_LOSSES[loss_name](module(p.x[at].double()), y)
        want = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, [*module.parameters()])]
        )
        close(grads[i], want, dtype, 1 + want.abs().max())
        close(losses[i], loss.detach().double(), dtype, 5)
        if dtype == F64:
            torch.testing.assert_close(grads[i], want, rtol=1e-9, atol=1e-11)
    if p.seeds is not None:
        (g, loss, _), (want, want_loss, _) = (
            p.grad(op, d, p.seeds[:, 0])
            for op, d in ((chain.chain_grad, None), (grad_reference, F64))
        )
        close(g, want, dtype, 1 + want.abs().max())
        close(loss, want_loss, dtype, 5)
    if ops.backend().kernels:
        evaluated(p, wide, module, dtype)


def buffers(p, i):
    """The buffers [b] of client `i` in float64."""
    if p.statistics is None:
        return p.net.b0.double()
    return p.statistics[i, : len(p.net.b0)].double()


@isa
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("model", [m for m in MODELS if "batch norm" in m])
def test_batch_norm_in_training_mode_is_the_modules(model, dtype):
    p = Problem(model, [20, 47, 150], dtype)
    wide = Problem(model, [20, 47, 150], F64).net
    module = wide.module
    grads, losses, moved = p.grad(train=True)
    for i, n in enumerate(p.sizes):
        wide.load(module, p.w[i].double(), buffers(p, i))
        wide.set_mode(module, True)
        for layer in module.modules():
            if isinstance(layer, pflcore.nn.Dropout):
                layer.eval()  # no seeds, so the chain drops nothing
        at = p.order[i, 0, :n]
        loss = LOSSES["cross_entropy"](module(p.x[at].double()), p.y[at])
        want = torch.autograd.grad(loss, [*module.parameters()])
        want = torch.cat([g.flatten() for g in want])
        named = dict(module.named_buffers())
        want_moved = torch.cat([named[k].flatten() for k in wide.buffer_names])
        close(grads[i], want, dtype, 1 + want.abs().max())
        close(losses[i], loss.detach(), dtype, 5)
        close(moved[i, : len(want_moved)], want_moved, dtype, 1 + want_moved.abs())
    assert torch.equal(moved[:, len(want_moved) :], p.statistics[:, len(want_moved) :])


def evaluated(p, wide, module, dtype):
    for rows in (p.w, p.w[1:2].expand(3, -1)):
        found = []
        for i, places in enumerate(p.places.split(p.sizes.tolist())):
            own = 0 if rows.stride(0) == 0 else i
            wide.net.load(module, rows[i].double(), buffers(p, own))
            y = p.y[places] if p.names is None else p.names[i][p.y[places]]
            z = module(p.x[places].double()).detach()
            each = [
                CHAIN_LOSSES[p.chain.loss_name](s, t)
                for s, t in zip(z[:, None], y[:, None], strict=True)
            ]
            if p.chain.loss_name == "linear":
                hits = torch.zeros(len(y), dtype=torch.bool)  # there is no right score
            else:
                hits = z.argmax(1) == y if z.shape[1] > 1 else (z[:, 0] > 0) == (y > 0)
            found.append((torch.stack(each), hits, z))
        want, want_right, all_scores = map(torch.cat, zip(*found, strict=True))
        for classes in (0, p.chain.classes):
            loss, right, scores = p.evaluate(rows, classes=classes)
            want_scores = all_scores if classes else all_scores[:0, :0]
            close(loss, want, dtype, 5 + want.abs())
            assert torch.equal(right, want_right)
            close(scores, want_scores, dtype, 1 + want_scores.abs())


@isa
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_hinge_is_flat_on_its_very_edge(dtype):
    """The gradient at margin 0 is 0, as that of relu.

    All scores are 1. Half of the labels are 1 and have margin 0, the others have margin
    2.
    """
    p = Problem("mlp, one output", [20], dtype, loss_name="hinge")
    p.w[:, -1] = 1
    p.w[:, -7:-1] = 0
    at = p.order[0, 0]
    p.y[at] = torch.arange(20) % 2
    g, loss, _ = p.grad()
    assert loss.item() == pytest.approx(1) and g[0, -1].item() == pytest.approx(0.5)


# laws -------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "model",
    ["linear", "mlp", "lenet", "dropout", "batch norm", "residual, batch norm"],
)
def test_threads_and_company_change_no_bit(model):
    p = Problem(model, [150, 47, 21, 1, 33], relabel=True)

    def whole():
        w, loss = p.train(batch=20)
        sums = torch.zeros_like(w)
        moved = p.moved
        other, _ = p.train(batch=20, momentum=0.5, sums=sums)
        parts = (w, other, sums, moved, loss[:, None])
        return torch.cat([v.double() for v in parts], 1)

    same_for_any_threads(whole)
    together = whole()
    for i in range(5):
        w, loss = p.alone(i).train(batch=20)
        assert torch.equal(w[0].double(), together[i, : w.shape[1]])
        assert torch.equal(loss[0].double(), together[i, -1])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "model",
    ["linear", "mlp", "lenet", "norms", "batch norm", "residual, group norm"],
)
def test_an_evaluations_company_changes_no_bit(model):
    p = Problem(model, [150, 47, 21, 1, 33])
    row = p.w[:1].expand(5, -1)
    shared = p.evaluate(row)
    apart = p.evaluate(row.contiguous())
    p.places, p.begin = p.places[100:103], torch.tensor([0, 3])
    for a, b, c in zip(shared, apart, p.evaluate(p.w[:1]), strict=True):
        assert torch.equal(a, b) and torch.equal(a[100:103], c)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model", [m for m in MODELS if m not in ONE_OUTPUT])
def test_scores_do_not_depend_on_how_many_samples_are_computed_at_once(model):
    p = Problem(model, [150, 47, 21, 3, 33])
    row = p.w[:1].expand(5, -1)
    shared = p.evaluate(row)
    torch.set_num_threads(1)
    for i, n in enumerate(p.sizes.tolist()):
        one = p.alone(i)
        one.w, one.statistics = (
            p.w[:1],
            None if p.statistics is None else p.statistics[:1],
        )
        one.grad()  # its memory is then laid out for n samples
        first = int(p.begin[i])
        one.places, one.begin = p.places[first : first + n], torch.tensor([0, n])
        for a, b in zip(shared, one.evaluate(one.w), strict=True):
            assert torch.equal(a[first : first + n], b)


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.skipif(not ops.backend().kernels, reason="the kernels are not loaded")
@isa
@pytest.mark.parametrize(
    "o",
    [
        {},
        {"clip": 1.0, "momentum": 0.9, "decay": 0.01},
        {"clip": 1.0, "adamw": torch.tensor([0.9, 0.99, 1e-8], dtype=F64)},
    ],
)
@pytest.mark.parametrize(
    "model, loss_name",
    [k for k in KINDS if k[0] != "dropout" and k[1] in ("cross_entropy", "squared")],
)
def test_nan_stays_with_its_client(model, loss_name, o):
    p = Problem(model, [40, 30, 40, 7], loss_name=loss_name)
    others = torch.cat([p.order[i, 0, : p.sizes[i]] for i in (0, 2, 3)])
    samples = p.order[1, 0, :30]
    clean = p.x.clone()
    p.x[samples[~torch.isin(samples, others)][0], 0] = torch.nan
    # One thread computes the clients one after another in the same memory.
    torch.set_num_threads(1)
    w, _ = p.train(batch=7, **o)
    assert w[1].isnan().any() and w[[0, 2, 3]].isfinite().all()
    p.x = clean
    # This training uses the memory of the last one, with its NaN.
    later, _ = p.train(batch=7, **o)
    assert later.isfinite().all() and torch.equal(later[[0, 2, 3]], w[[0, 2, 3]])


def assert_same_kinds(got, want, dtype):
    """Asserts that NaN and infinities are at the same places, and others are close."""
    bound = {F64: 1e-7, F32: 5e-2}[dtype]
    got = got.double()
    want = want.double()
    torch.testing.assert_close(got, want, rtol=bound, atol=bound, equal_nan=True)


def with_bad_samples(model, bad, seed, dtype):
    """A problem with one to three numbers among its samples that are not finite."""
    loss_name = "squared" if model in ONE_OUTPUT else "cross_entropy"
    p = Problem(model, [20, 24], dtype, seed=seed, loss_name=loss_name)
    numbers = p.x.view(-1)
    numbers[integers(seed, 0, len(numbers), 1 + seed % 3)] = bad
    return p


bad_samples = given(
    st.sampled_from([*MODELS]),
    st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    st.integers(0, 99),
    st.sampled_from([F32, F64]),
)


@pytest.mark.usefixtures("kernels")
@bad_samples
def test_bad_samples_have_the_gradients_of_the_reference(model, bad, seed, dtype):
    p = with_bad_samples(model, bad, seed, dtype)
    seeds = None if p.seeds is None else p.seeds[:, 0]
    for train in {False, p.statistics is not None}:
        got = p.grad(seeds=seeds, train=train)
        want = p.grad(grad_reference, seeds=seeds, train=train)
        for g, w in zip(got, want, strict=True):
            assert_same_kinds(g, w, dtype)


@pytest.mark.usefixtures("kernels")
@bad_samples
def test_bad_samples_have_the_scores_of_the_module(model, bad, seed, dtype):
    p = with_bad_samples(model, bad, seed, dtype)
    _, right, scores = p.evaluate(p.w)
    module = p.net.module.eval()
    for i, places in enumerate(p.places.split(p.sizes.tolist())):
        p.net.load(module, p.w[i], buffers(p, i).to(dtype))
        some = slice(p.begin[i], p.begin[i + 1])
        assert_same_kinds(scores[some], module(p.x[places]).detach(), dtype)
        assert not right[some][scores[some].isnan().any(1)].any()


@isa
@pytest.mark.parametrize("dtype", [F32, F64])
def test_what_a_convolution_does_not_read_does_not_count(dtype):
    p = Problem("unread column", [5], dtype)  # 3 outputs a row fill no vectors
    p.x[..., 7] = 0
    want = p.grad()[0]
    p.x[..., 7] = torch.inf
    torch.testing.assert_close(p.grad()[0], want)


OVERFLOWS = {  # by name: the shape of a sample, and the layers
    "few outputs": ((2,), [nn.Linear(2, 3)]),
    "linear": ((2,), [nn.Linear(2, 40)]),
    "hidden, ReLU": ((2,), [nn.Linear(2, 40), nn.ReLU(), nn.Linear(40, 3)]),
    "hidden, tanh": ((2,), [nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 3)]),
    "conv": ((2, 2, 2), [nn.Conv2d(2, 9, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)]),
    "pooled": (
        (2, 4, 4),
        [
            nn.Conv2d(2, 9, 2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 3),
        ],
    ),
    "mean of tanh": (
        (2, 3, 3),
        [nn.Conv2d(2, 9, 2), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(9, 3)],
    ),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", OVERFLOWS)
@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
def test_a_sum_that_overflows_is_nan(name, signs):
    """Not an infinity of the first term's sign, which ReLU would take for a 0."""
    shape, made = OVERFLOWS[name]
    net = Net(nn.Sequential(*made))
    with torch.no_grad():
        first = net.module[0].weight
        first[:, 0] = 1e30 * signs[0]
        first[:, 1] = 1e30 * signs[1]
    row = torch.cat([p.detach().flatten() for p in net.module.parameters()])
    samples = torch.full((7, *shape), 1e30)
    samples[3] = 0.0  # its sums are finite
    y = torch.zeros(7, dtype=torch.int64)
    found = compile_chain(net, shape)
    order = torch.arange(7)
    ends = (order, torch.tensor([0, 7]), found.classes)
    _, right, scores = chain.chain_eval(
        row[None], *found.fixed_args, samples, y, None, *ends
    )

    is_bad = order != 3
    assert scores[is_bad].isnan().any(1).all() and scores[3].isfinite().all()
    assert not right[is_bad].any()


@isa
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(2, 1)])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.Tanh()])
def test_nan_and_ties_go_where_torch_sends_them(pool, act):
    last = nn.Linear(48 if pool.stride == 2 else 147, 4)
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 1), act, pool, nn.Flatten(), last).double())
    # The inputs have many equal numbers, so that maxima have ties.
    x = integers(0, -1, 2, 9, 1, 8, 8).double()
    y = torch.arange(9) % 4
    head = compile_chain(net, (1, 8, 8)).fixed_args
    whole = (torch.arange(9)[None], torch.tensor([9]))
    for bad in (0.0, torch.nan):
        x[4, 0, 3, 5] += bad
        row = net.w0.clone().requires_grad_()
        loss = net.loss(row, x, y)
        (want,) = torch.autograd.grad(loss, row)
        g, value, _ = chain.chain_grad(net.w0[None], *head, x, y, None, *whole, None)
        torch.testing.assert_close(g[0], want, rtol=1e-10, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(value[0], loss.detach(), equal_nan=True)


@pytest.mark.skipif(not ops.backend().kernels, reason="the kernels are not loaded")
@isa
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    "loss_name, outputs", [("cross_entropy", 3), ("hinge", 1), ("squared", 1)]
)
def test_hits_are_those_of_the_scores_infinite_and_nan(loss_name, outputs, dtype):
    odd = torch.tensor([-torch.inf, -1.0, 0.0, 2.0, torch.inf, torch.nan], dtype=dtype)
    scores = torch.cartesian_prod(*[odd] * outputs).view(-1, outputs)
    y = torch.arange(len(scores)) * 7 % max(2, outputs)
    # A linear layer of one input, which is 1. Its weights are the scores, and each
    # client has one sample.
    program = torch.tensor([encode_layer("linear", outputs, 0, -1)], dtype=F64)
    n = torch.arange(len(scores))
    numbers = y if loss_name == "cross_entropy" else y.to(dtype)
    head = (
        program,
        loss_name,
        1,
        1,
        1,
        torch.ones(len(n), 1, dtype=dtype),
        numbers,
        None,
    )
    _, right, _ = chain.chain_eval(scores, *head, n, torch.arange(len(n) + 1), 0)
    assert torch.equal(right, metrics.is_correct(scores, y))


@pytest.mark.skipif(not ops.backend().kernels, reason="the kernels are not loaded")
@isa
def test_no_samples_and_large_scores():
    p = Problem("lenet", [10, 4])
    p.sizes = torch.tensor([0, 4])
    p.begin = torch.tensor([0, 0, 3])
    p.places = p.order[1, 0, :3]
    loss, right, _ = p.evaluate(p.w, classes=0)
    assert len(loss) == len(right) == 3
    grad, loss, _ = p.grad()
    assert not grad[0].any() and loss[0] == 0 and grad[1].any()
    p = Problem("mlp", [40])
    p.w *= 1e4
    assert all(t.isfinite().all() for t in p.train())


# guards -----------------------------------------------------------------


def column(at, value):
    """A function that sets column `at` of a program to `value`."""
    return lambda program: program.index_fill(1, torch.tensor(at), value)


# The argument, its wrong value, and words of the error. Below, a function makes the
# wrong value.
NUMBERS = """\
[7, 77, "out of range"]
[7, -1, "out of range"]
[9, 10000, "out of range"]
[9, -1, "out of range"]
[10, 50, "out of range"]
[11, 9, "more steps"]
[2, "cosine", "expected loss"]
[2, "hinge", "one output"]
[3, 2, "w's dtype"]
"""


@pytest.mark.skipif(not ops.backend().kernels, reason="the kernels are not loaded")
@pytest.mark.parametrize(
    "which, change, words",
    [
        *(json.loads(line) for line in NUMBERS.splitlines()),
        (0, lambda w: w[:, :-1], "do not fit"),
        (7, lambda y: y[:-1], "one label for each sample"),
        (7, lambda y: y[:, None].float(), "one label for each sample"),
        (6, lambda x: x.double(), "w's dtype"),
        (1, column(7, 1e9), "do not fit"),
        (1, column(2, 50), "do not fit"),
        (1, column(0, 99), "do not fit"),
        (1, column(1, torch.nan), "do not fit"),
        (1, lambda program: program[:, :-1], "program"),
    ],
)
def test_memory_is_guarded(which, change, words):
    """The kernel refuses arguments that would lead it outside its arrays."""
    p = Problem("lenet", [40, 20], relabel=True)
    _, arguments = p.train(lambda *a, **_: [*a], batch=32, steps=torch.tensor([2, 1]))
    chain.chain_train_(*[a.clone() if isinstance(a, Tensor) else a for a in arguments])
    old = arguments[which]
    filled = old.fill_ if isinstance(old, Tensor) else lambda value: value
    arguments[which] = change(old) if callable(change) else filled(change)
    # Some versions of torch raise ValueError for the C++ exception of that kind.
    with pytest.raises((RuntimeError, ValueError), match=words):
        chain.chain_train_(*arguments)


@pytest.mark.usefixtures("kernels")
def test_a_refusal_is_the_same_on_several_threads(capfd):
    p = Problem("lenet", [200] * 4, relabel=True)
    _, arguments = p.train(lambda *a, **_: [*a], batch=32)
    arguments[2] = "hinge"
    said = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with pytest.raises((RuntimeError, ValueError), match="one output") as caught:
            chain.chain_train_(*arguments)
        said.append((caught.type, str(caught.value).splitlines()[0]))
    assert said[0] == said[1] and not capfd.readouterr().err


@pytest.mark.skipif(not ops.backend().kernels, reason="the kernels are not loaded")
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda y: y[:, :-1], "do not fit"),
        (lambda y: torch.cat([y, y], 1), "do not fit"),
        (lambda y: y[:, 0], "a number for each of its scores"),
        (lambda y: y[:-1], "a number for each of its scores"),
        (lambda y: y.long(), "numbers, not labels"),
        (lambda y: y.double(), "w's dtype"),
    ],
)
def test_targets_of_the_linear_loss_are_one_for_each_score(change, words):
    p = Problem("lenet", [40, 20], loss_name="linear")
    p.grad()
    p.evaluate(p.w)
    p.y = change(p.y)
    p.head = lambda dtype=None: (*p.chain.fixed_args, p.x, p.y, None)
    for op in (p.grad, lambda: p.evaluate(p.w)):
        with pytest.raises((RuntimeError, ValueError), match=words):
            op()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["branch", "add"])
@pytest.mark.parametrize("line", [-2, 99, 1e12, torch.nan, 0, "own", "next"])
def test_a_wrong_line_in_an_addition_is_refused(kind, line):
    """Lines that are no earlier ones, of another shape, or taken by nothing."""
    p = Problem("residual, group norm", [20])
    number = p.chain.program[:, 0].tolist().index(KINDS_OF_LAYERS.index(kind))
    program = p.chain.program.clone()
    own = {"own": number, "next": number + 1}
    program[number, 1] = own.get(line, line)
    head = (program, *p.head()[1:])

    with pytest.raises((RuntimeError, ValueError), match=r"do not fit|earlier line"):
        chain.chain_grad(p.w, *head, p.order[:, 0], p.sizes, None)


@pytest.mark.skipif(not ops.backend().kernels, reason="the kernels are not loaded")
@isa
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "model", [m for m in MODELS if "addition" in m or "resid" in m]
)
def test_gradients_of_additions_are_differences_of_losses(model, train):
    p = Problem(model, [20], F64, seed=2)
    train = train and p.statistics is not None
    direction = randn(7, *p.w.shape, dtype=F64)
    grad, _, _ = p.grad(train=train)
    losses = []
    for step in (-1e-7, 1e-7):
        moved = copy(p)
        moved.w = p.w + step * direction
        losses.append(moved.grad(train=train)[1])

    got = (grad * direction).sum(1)
    want = (losses[1] - losses[0]) / 2e-7

    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@isa
def test_a_norm_of_many_features_rounds_about_as_torch_does():
    """A plain sum of 2,048 numbers of one sign would have forty times torch's error."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4096, 3))
        net = Net(nn.Sequential(*layers))
    program = compile_chain(net, (4, 32, 32))
    x, y = 100 + randn(1, 6, 4, 32, 32), torch.arange(6) % 3

    def grad(op, dtype=F32):
        samples = (x.to(dtype), y, None, torch.arange(6)[None], torch.tensor([6]), None)
        return op(net.w0[None].to(dtype), *program.fixed_args, *samples)[0].double()

    want = grad(grad_reference, F64)
    error = (grad(chain.chain_grad) - want).abs().max()
    error_of_torch = (grad(grad_reference) - want).abs().max()
    assert error < 5 * error_of_torch


ENDING = """
import threading
import torch, torch.nn as nn
from pflcore.train._chain import compile_chain
from pflcore.train._net import Net
from pflcore.ops import _chain as chain

def work():
    for width in range(50, 1450, 100):  # each model's memory is larger than what the last left
        net = Net(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 20)))
        x, y, order = torch.randn(40, 8), torch.zeros(40, dtype=torch.int64), torch.arange(40)[None]
        head, lengths = compile_chain(net, (8,)).fixed_args, torch.tensor([40])
        chain.chain_grad(net.w0[None], *head, x, y, None, order, lengths, None)

torch.set_num_threads(1)
for _ in range(5):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""  # noqa: E501


@pytest.mark.deep("another process")
def test_a_thread_that_ends_leaves_the_heap_whole():
    """A thread's memory is freed before its allocator is destroyed.

    A thread keeps memory for its next chain until it ends.
    """
    done = ran("-c", ENDING, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def enumerators(header, name):
    """The names in an enumeration of csrc/chain, in their order."""
    text = (ROOT / "csrc" / "chain" / header).read_text()
    words = rf"enum (?:class )?{name} : int64_t {{([^}}]*)}}"
    (inside,) = re.findall(words, text)
    return [word.strip() for word in inside.split(",")]


def test_numbers_mean_the_same_in_both_languages():
    activations = [f"k{f.__name__.capitalize()}" for f in ACTIVATIONS]

    assert enumerators("chain.h", "Kind") == list(KINDS_OF_LAYERS)
    assert enumerators("tile.h", "Act") == ["kNone", *activations]
    assert set(enumerators("chain.h", "Loss")) == set(CHAIN_LOSSES)
