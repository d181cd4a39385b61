"""Chains: whole local training, gradients and evaluation of a chain of layers, against autograd in
float64 and against themselves."""

import subprocess
import sys

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from tolerance import F32, F64, assert_close
from torch import Tensor
from ugly import same_for_any_threads

from pflcore import Net
from pflcore.nn import Dropout
from pflcore.ops import _library as library
from pflcore.ops import chain, reference
from pflcore.train.chain import Chain, compiled
from pflcore.train.losses import CRITERIA

C, M, A, R, T, S, G, L, F = (
    nn.Conv2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.Linear,
    nn.Flatten,
)
MODELS: dict[str, tuple[tuple[int, ...], list[nn.Module]]] = {
    "linear": ((33,), [L(33, 10)]),
    "linear, whole vectors": ((32,), [L(32, 3, bias=False)]),
    "linear, many outputs": ((7,), [L(7, 40)]),
    "mlp": ((3, 5, 1), [F(), L(15, 37), R(), L(37, 9), S(), L(9, 4)]),
    "mlp, one output": ((5,), [L(5, 6), G(), L(6, 1)]),
    "mlp without bias": ((5,), [L(5, 6, bias=False), R(), L(6, 3, bias=False)]),
    "lenet": (
        (1, 12, 12),
        [C(1, 6, 5, padding=2), R(), M(2), C(6, 16, 3), R(), M(2), F(), L(64, 20), R(), L(20, 10)],
    ),
    "classic lenet": (
        (1, 12, 12),
        [C(1, 6, 5, padding=2), T(), A(2), C(6, 7, 3), T(), A(2), F(), L(28, 20), T(), L(20, 10)],
    ),
    "strides": (
        (3, 18, 17),
        [
            C(3, 7, 3, padding=1, stride=2),
            T(),
            A(2),
            C(7, 9, 3, padding=1),
            S(),
            M(2),
            F(),
            L(36, 10),
        ],
    ),
    "odd sizes": (
        (2, 29, 31),
        [
            C(2, 5, 4, stride=2, padding=1),
            R(),
            C(5, 8, 3, stride=2),
            R(),
            C(8, 3, 2),
            M(2),
            T(),
            F(),
            L(18, 10),
        ],
    ),
    "oblong": (
        (2, 13, 15),
        [
            C(2, 5, (3, 5), padding=(2, 1)),
            G(),
            M((3, 2), (2, 3)),
            nn.GroupNorm(1, 5),
            C(5, 4, (2, 1), bias=False),
            A(2),
            F(),
            L(24, 10),
        ],
    ),
    "norms": (
        (4, 6, 5),
        [
            nn.LayerNorm([4, 6, 5]),
            C(4, 6, 3),
            nn.GroupNorm(3, 6),
            R(),
            A(2, 1),
            F(),
            nn.LayerNorm(36),
            L(36, 10),
        ],
    ),
    "mean of ReLU": (
        (1, 10, 11),
        [
            C(1, 4, 3, padding=1),
            R(),
            A(2),
            F(),
            nn.LayerNorm(100, elementwise_affine=False),
            L(100, 10),
        ],
    ),
    "pools first": ((2, 8, 8), [M(2), T(), C(2, 3, 3), F(), L(12, 10)]),
    "dropout": (
        (1, 8, 8),
        [Dropout(0.2), C(1, 4, 3), R(), M(2), Dropout(0.5), F(), L(36, 12), R(), L(12, 10)],
    ),
    "all dropped": ((1, 8, 8), [Dropout(0.2), F(), L(64, 12), Dropout(1.0), R(), L(12, 10)]),
    "to one value": ((2, 7, 5), [C(2, 8, 3), R(), nn.AdaptiveAvgPool2d(1), F(), L(8, 10)]),
}


class Problem:
    """Clients of these sizes in one pool, each with its own order, and a model that is a chain."""

    def __init__(
        self,
        model,
        sizes,
        dtype=F32,
        passes=1,
        seed=0,
        relabel=False,
        criterion="cross_entropy",
    ):
        gen = torch.Generator().manual_seed(seed)
        self.shape, layers = MODELS[model]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = Net(nn.Sequential(*layers).to(dtype), criterion=criterion)
        self.w = self.net.w0 + 0.05 * torch.randn(
            len(sizes), self.net.size, generator=gen, dtype=F64
        ).to(dtype)
        self.chain: Chain = compiled(self.net, self.shape)
        self.sizes, self.passes, self.dtype = sizes, passes, dtype
        pool, longest = sum(sizes) + 3, max([*sizes, 1])
        self.x = torch.randn(pool, *self.shape, generator=gen, dtype=F64).to(dtype)
        labels = criterion not in ("squared", "half_squared")
        classes = self.chain.classes if criterion == "cross_entropy" else 2
        self.y = (
            torch.randint(classes, (pool,), generator=gen)
            if labels
            else torch.randn(pool, generator=gen, dtype=F64).to(dtype)
        )
        self.names = (
            torch.stack([torch.randperm(classes, generator=gen) for _ in sizes])
            if relabel and labels
            else None
        )
        self.order = torch.zeros(len(sizes), passes, longest, dtype=torch.int64)
        for i, n in enumerate(sizes):
            for p in range(passes):
                self.order[i, p, :n] = torch.randperm(pool, generator=gen)[:n]
        self.seeds = (
            torch.randint(-(2**62), 2**62, (len(sizes), passes), generator=gen)
            if self.chain.dropout
            else None
        )

    def head(self, dtype=None):
        y = self.y if dtype is None or not self.y.is_floating_point() else self.y.to(dtype)
        return (*self.chain.head, self.x if dtype is None else self.x.to(dtype), y, self.names)

    def most(self, batch, drop_last=False):
        return torch.tensor([self.passes * len(cuts(n, batch, drop_last)) for n in self.sizes])

    def train(
        self, op = chain.chain_sgd_, dtype = None, batch = 16, drop_last = False,
        steps = None, lr = 0.1, clip = float("inf"), sums = None, **o,
    ):  # fmt: skip
        """Rows and losses after training."""
        w = self.w.clone() if dtype is None else self.w.to(dtype)
        steps = self.most(batch, drop_last) if steps is None else steps
        given = [
            None if o.get(k) is None else o[k].to(w.dtype) for k in ("shift", "mask", "anchor")
        ]
        how = (
            lr,
            given[0],
            given[1],
            0.0,
            o.get("mu"),
            given[2],
            o.get("momentum", 0.0),
            o.get("decay", 0.0),
            clip,
            sums,
        )
        loss = op(
            w,
            *self.head(dtype),
            self.order,
            torch.tensor(self.sizes),
            steps,
            batch,
            drop_last,
            self.seeds,
            *how,
        )
        return w, loss


def criterion_for(model):
    return "squared" if model == "mlp, one output" else "cross_entropy"


def cuts(n, batch, drop_last):
    whole = [(a, min(a + batch, n)) for a in range(0, n, batch)]
    return [c for c in whole if c[1] - c[0] == min(batch, n)] if drop_last else whole


def close(got, want, dtype, size):
    assert_close(got, want, "chain", dtype, torch.as_tensor(size, dtype=F64).expand_as(want))


# the reference is autograd through the module


@pytest.mark.parametrize("model", MODELS)
def test_the_reference_is_the_module(model):
    p = Problem(model, [5, 12], F64, criterion=criterion_for(model))
    module = p.net.module.eval()
    sizes = torch.tensor(p.sizes)
    grads, losses = reference.chain_grad(p.w, *p.head(), p.order[:, 0], sizes, None)
    for i, n in enumerate(p.sizes):
        p.net.load(module, p.w[i])
        at = p.order[i, 0, :n]
        loss = p.net.criterion(module(p.x[at]), p.y[at])
        want = torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))]
        )
        torch.testing.assert_close(grads[i], want, rtol=1e-9, atol=1e-11)
        assert float(losses[i]) == pytest.approx(loss.item())


# values -----------------------------------------------------------------

SWITCH = st.sampled_from([False, True])


@pytest.mark.usefixtures("isa")
@given(
    st.sampled_from(sorted(set(MODELS) - {"mlp, one output"})),
    st.lists(st.sampled_from([1, 2, 5, 16, 33, 47]), min_size=1, max_size=3),
    st.sampled_from([1, 4, 20, 40]),
    st.sampled_from([F32, F64]),
    st.tuples(*[SWITCH] * 8),
    st.sampled_from([1, 2]),
    st.integers(0, 99),
)
def test_every_combination_of_options_is_autograd(model, sizes, batch, dtype, switch, passes, seed):
    shifted, masked, pulled, momentum, decay, clipped, summed, drop_last = switch
    p = Problem(model, sizes, dtype, passes, seed, relabel=bool(seed % 2))
    gen = torch.Generator().manual_seed(seed)

    def like(*size):
        return torch.randn(*size, generator=gen, dtype=F64).to(dtype).double()

    o = {
        "shift": 0.1 * like(*p.w.shape) if shifted else None,
        "mask": (like(p.net.size) > -0.5).double() if masked else None,
        "anchor": like(*p.w.shape) if pulled else None,
        "mu": torch.rand(len(sizes), generator=gen, dtype=F64) if pulled else None,
        "momentum": 0.9 * momentum,
        "decay": 0.01 * decay,
        "clip": 0.5 if clipped else float("inf"),
        "batch": batch,
        "drop_last": drop_last,
        "steps": p.most(batch, drop_last).clamp(max=3)
        if seed % 3
        else p.most(batch, drop_last).clamp(max=2) * (torch.arange(len(sizes)) % 2),
    }
    sums, want_sums = torch.zeros_like(p.w), torch.zeros_like(p.w).double()
    w, loss = p.train(**o, sums=sums if summed else None)
    want, want_loss = p.train(reference.chain_sgd_, F64, **o, sums=want_sums if summed else None)
    close(w, want, dtype, 1 + want.abs())
    close(loss, want_loss, dtype, 10 + want_loss.abs())
    close(sums, want_sums, dtype, 1 + want_sums.abs().max())
    if masked:
        assert torch.equal(w[:, o["mask"] == 0], p.w[:, o["mask"] == 0]), (
            "what is masked does not move"
        )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_evaluation(model, dtype):
    p = Problem(model, [5, 1, 150], dtype, relabel=True, criterion=criterion_for(model))
    sizes, begin = torch.tensor(p.sizes), torch.tensor([0, *p.sizes]).cumsum(0)
    for seeds in (None, p.seeds[:, 0] if p.seeds is not None else None):
        g, loss = chain.chain_grad(p.w, *p.head(), p.order[:, 0], sizes, seeds)
        want, want_loss = reference.chain_grad(
            p.w.double(), *p.head(F64), p.order[:, 0], sizes, seeds
        )
        close(g, want, dtype, 1 + want.abs().max())
        close(loss, want_loss, dtype, 5)
    places = torch.cat([p.order[i, 0, :n] for i, n in enumerate(p.sizes)])
    for rows in (p.w, p.w[1:2].expand(3, -1)):
        for classes in (0, p.chain.classes):
            loss, right, scores = chain.chain_eval(rows, *p.head(), places, begin, classes)
            want_loss, want_right, want_scores = reference.chain_eval(
                rows.double(), *p.head(F64), places, begin, classes
            )
            close(loss, want_loss, dtype, 5 + want_loss.abs())
            assert torch.equal(right, want_right)
            close(scores, want_scores, dtype, 1 + want_scores.abs())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("criterion", sorted(set(CRITERIA) - {"cross_entropy"}))
def test_criteria_of_one_output(criterion):
    p = Problem("mlp, one output", [40, 7], F64, criterion=criterion, relabel=True)
    w, loss = p.train()
    want, want_loss = p.train(reference.chain_sgd_)
    close(w, want, F64, 1 + want.abs())
    close(loss, want_loss, F64, 5 + want_loss.abs())
    row, at = p.w[0].clone().requires_grad_(), p.order[0, 0, :16]
    y = p.y[at] if p.names is None else p.names[0][p.y[at]]
    (g,) = torch.autograd.grad(CRITERIA[criterion](p.net(row, p.x[at]), y), row)
    got = chain.chain_grad(
        p.w[:1],
        *p.head()[:-1],
        None if p.names is None else p.names[:1],
        at[None],
        torch.tensor([16]),
        None,
    )[0][0]
    torch.testing.assert_close(got, g, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_hinge_is_flat_on_its_very_edge(dtype):
    """As relu is. Half the scores of 1 have labels of 1, so margin 0, the others margin 2."""
    p = Problem("mlp, one output", [20], dtype, criterion="hinge")
    p.w[:, -1], p.w[:, -7:-1] = 1, 0
    p.y[p.order[0, 0]] = torch.arange(20) % 2
    g, loss = chain.chain_grad(p.w, *p.head(), p.order[:, 0], torch.tensor([20]), None)
    assert loss.item() == pytest.approx(1) and g[0, -1].item() == pytest.approx(0.5)
    row = p.w[0].clone().requires_grad_()
    (want,) = torch.autograd.grad(
        CRITERIA["hinge"](p.net(row, p.x[p.order[0, 0]]), p.y[p.order[0, 0]]), row
    )
    close(g[0], want, dtype, 1 + want.abs().max())


@pytest.mark.usefixtures("isa")
def test_dropouts_mask_is_the_modules():
    """The bits that pflcore.nn.Dropout draws: with an input of ones the first layer's gradient
    shows them."""
    from pflcore.nn.mode import forward_mode

    net = Net(nn.Sequential(Dropout(0.3), nn.Flatten(), Dropout(0.5), nn.Linear(21, 2)).double())
    x, y, seed = (
        torch.ones(200, 3, 7, dtype=F64),
        torch.zeros(200, dtype=torch.int64),
        torch.tensor([123456789]),
    )
    found = compiled(net, (3, 7, 1))
    g, _ = chain.chain_grad(
        net.w0[None], *found.head, x, y, None, torch.arange(200)[None], torch.tensor([200]), seed
    )
    row = net.w0.clone().requires_grad_()
    with forward_mode(True, None, seed[0]):
        (want,) = torch.autograd.grad(net.loss(row, x, y), row)
    torch.testing.assert_close(g[0], want, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("isa")
def test_every_batch_drops_other_units():
    """The batch's number in its epoch is added to the epoch's seed: one pass is steps of one batch
    each, with these seeds."""
    p = Problem("dropout", [33, 20], F64, passes=2)
    w, loss = p.train(batch=8)
    want, want_loss = p.train(reference.chain_sgd_, batch=8)
    close(w, want, F64, 1 + want.abs())
    close(loss, want_loss, F64, 10 + want_loss.abs())
    rows = p.w
    for epoch in range(2):
        for turn, size in enumerate([8, 8, 4]):
            one = Problem("dropout", [1, size], F64)
            one.x, one.y, one.w, one.seeds = p.x, p.y, rows, p.seeds[:, epoch : epoch + 1] + turn
            one.order = p.order[:, epoch : epoch + 1, 8 * turn : 8 * turn + size]
            rows, _ = one.train(batch=8)
    close(rows[1], w[1], F64, 1 + rows[1].abs())


def test_without_seeds_nothing_is_dropped():
    p = Problem("dropout", [5, 12])
    p.seeds = None
    got, want = p.train(), p.train(reference.chain_sgd_, F64)
    close(got[0], want[0], F32, (want[0] - p.w).abs().max())
    close(got[1], want[1], F32, want[1])


# laws -------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model", ["linear", "mlp", "lenet", "dropout"])
def test_threads_and_company_change_no_bit(model):
    sizes = [150, 47, 21, 1, 33]
    p = Problem(model, sizes, relabel=True)

    def whole():
        w, loss = p.train(batch=20)
        sums = torch.zeros_like(w)
        other, _ = p.train(batch=20, momentum=0.5, sums=sums)
        return torch.cat([w, other, sums, loss[:, None].to(w)], 1)

    same_for_any_threads(whole)
    together = whole()
    for i, n in enumerate(sizes):
        one = Problem(model, [n])
        one.net, one.chain, one.x, one.y, one.w = p.net, p.chain, p.x, p.y, p.w[i : i + 1]
        one.names, one.order = p.names[i : i + 1], p.order[i : i + 1]
        one.seeds = None if p.seeds is None else p.seeds[i : i + 1]
        w, loss = one.train(batch=20)
        assert torch.equal(w[0], together[i, : w.shape[1]]) and float(loss[0]) == pytest.approx(
            float(together[i, -1]), rel=1e-6
        )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model", ["linear", "mlp", "lenet", "norms"])
def test_an_evaluations_company_changes_no_bit(model):
    p = Problem(model, [150, 47, 21, 1, 33])
    begin = torch.tensor([0, *p.sizes]).cumsum(0)
    places = torch.cat([p.order[i, 0, :n] for i, n in enumerate(p.sizes)])
    row = p.w[:1].expand(5, -1)
    shared = chain.chain_eval(row, *p.head(), places, begin, p.chain.classes)
    apart = chain.chain_eval(row.contiguous(), *p.head(), places, begin, p.chain.classes)
    one = chain.chain_eval(
        p.w[:1], *p.head(), places[100:103], torch.tensor([0, 3]), p.chain.classes
    )
    assert all(torch.equal(a, b) for a, b in zip(shared, apart, strict=True))
    assert all(torch.equal(a[100:103], b) for a, b in zip(shared, one, strict=True))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    "o",
    [{}, {"clip": 1.0}, {"clip": 1.0, "momentum": 0.9, "decay": 0.01}],
    ids=["plain", "clipped", "momentum"],
)
@pytest.mark.parametrize(
    "model",
    [
        "linear",
        "linear, whole vectors",
        "mlp",
        "mlp without bias",
        "mlp, one output",
        "lenet",
        "classic lenet",
        "oblong",
        "norms",
    ],
)
def test_nan_stays_with_its_client(model, o):
    p = Problem(model, [40, 30, 40, 7], criterion=criterion_for(model))
    others = torch.cat([p.order[i, 0, :n] for i, n in enumerate(p.sizes) if i != 1])
    mine = p.order[1, 0, :30]
    p.x[mine[~torch.isin(mine, others)][0], 0] = torch.nan
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)  # one after another in the same memory
        w, _ = p.train(batch=7, **o)
    assert w[1].isnan().any() and w[[0, 2, 3]].isfinite().all()
    clean = Problem(model, [40, 30, 40, 7], criterion=criterion_for(model))
    later = clean.train(batch=7, **o)[0]  # in the memory that it leaves
    assert later.isfinite().all() and torch.equal(later[[0, 2, 3]], w[[0, 2, 3]])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("pool", [M(2), A(2), M(2, 1)])
@pytest.mark.parametrize("act", [R(), T()])
def test_nan_and_ties_go_where_torch_sends_them(pool, act):
    net = Net(
        nn.Sequential(
            nn.Conv2d(1, 3, 1),
            act,
            pool,
            nn.Flatten(),
            nn.Linear(48 if pool.stride == 2 else 147, 4),
        ).double()
    )
    # many equal numbers
    x = torch.randint(-1, 2, (9, 1, 8, 8), generator=torch.Generator().manual_seed(0)).double()
    y, sizes = torch.arange(9) % 4, torch.tensor([9])
    for bad in (False, True):
        if bad:
            x[4, 0, 3, 5] = torch.nan
        row = net.w0.clone().requires_grad_()
        loss = net.loss(row, x, y)
        (want,) = torch.autograd.grad(loss, row)
        g, value = chain.chain_grad(
            net.w0[None],
            *compiled(net, (1, 8, 8)).head,
            x,
            y,
            None,
            torch.arange(9)[None],
            sizes,
            None,
        )
        torch.testing.assert_close(g[0], want, rtol=1e-10, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(value[0], loss.detach(), equal_nan=True)


@pytest.mark.usefixtures("isa")
def test_large_scores_do_not_overflow():
    p = Problem("mlp", [40])
    p.w = p.w * 1e4
    w, loss = p.train()
    assert w.isfinite().all() and loss.isfinite().all()


def test_paths_agree():
    found, before = {}, library.isa()
    try:
        for isa in ("plain", "avx2", "avx512"):
            if library.isa(isa) == isa:
                found[isa] = [
                    Problem(m, [33, 7]).train()[0] for m in ("linear", "lenet", "strides", "norms")
                ]
    finally:
        library.isa(before)
    for got in found.values():
        for a, b in zip(got, found["plain"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.usefixtures("isa")
def test_no_steps_and_no_samples_change_nothing():
    p = Problem("lenet", [10, 4])
    w, loss = p.train(steps=torch.zeros(2, dtype=torch.int64))
    assert torch.equal(w, p.w) and (loss == 0).all()
    begin = torch.tensor([0, 0, 3])
    loss, right, _ = chain.chain_eval(p.w, *p.head(), p.order[1, 0, :3], begin, 0)
    assert len(loss) == len(right) == 3
    grad, loss = chain.chain_grad(p.w, *p.head(), p.order[:, 0], torch.tensor([0, 4]), None)
    assert (grad[0] == 0).all() and loss[0] == 0 and (grad[1] != 0).any()


# guards -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a[7].fill_(77), "out of range"),
        (lambda a: a[7].fill_(-1), "out of range"),
        (lambda a: a[9].fill_(10_000), "out of range"),
        (lambda a: a[9].fill_(-1), "out of range"),
        (lambda a: a[10].fill_(50), "out of range"),
        (lambda a: a[11].fill_(9), "more steps"),
        (lambda a: a.__setitem__(0, a[0][:, :-1]), "do not fit"),
        (lambda a: a.__setitem__(7, a[7][:-1]), "one label for each sample"),
        (lambda a: a.__setitem__(6, a[6].double()), "w's dtype"),
        (lambda a: a.__setitem__(2, "cosine"), "criterion"),
        (lambda a: a.__setitem__(2, "hinge"), "one output"),
        (lambda a: a.__setitem__(3, 2), "w's dtype"),
        (lambda a: a[1][0].__setitem__(7, 1e9), "do not fit"),
        (lambda a: a[1][0].__setitem__(2, 50), "do not fit"),
        (lambda a: a[1][0].__setitem__(0, 99), "do not fit"),
        (lambda a: a[1][0].__setitem__(1, float("nan")), "do not fit"),
        (lambda a: a.__setitem__(1, a[1][:, :-1]), "program"),
    ],
)
def test_memory_is_guarded(change, words):
    """The kernel refuses what would read or write beside its arrays."""
    p = Problem("lenet", [40, 20], relabel=True)
    arguments = [
        p.w,
        *p.head(),
        p.order,
        torch.tensor([40, 20]),
        torch.tensor([2, 1]),
        32,
        False,
        None,
        0.1,
    ]
    arguments += [None, None, 0.0, None, None, 0.0, 0.0, float("inf"), None]
    chain.chain_sgd_(*[a.clone() if isinstance(a, Tensor) else a for a in arguments])
    change(arguments)
    with pytest.raises(RuntimeError, match=words):
        chain.chain_sgd_(*arguments)


ENDING = """
import threading
import torch, torch.nn as nn
from pflcore.train.chain import compiled
from pflcore.train.net import Net
from pflcore.ops import chain

def work():
    for width in range(50, 1450, 100):  # each model's memory is larger than what the last left
        net = Net(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 20)))
        x, y, order = torch.randn(40, 8), torch.zeros(40, dtype=torch.int64), torch.arange(40)[None]
        head, lengths = compiled(net, (8,)).head, torch.tensor([40])
        chain.chain_grad(net.w0[None], *head, x, y, None, order, lengths, None)

torch.set_num_threads(1)
for _ in range(5):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@pytest.mark.deep("another process")
def test_a_thread_that_ends_leaves_the_heap_whole():
    """What it kept for its next chain goes back before the place that it goes back to is gone."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
