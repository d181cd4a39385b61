"""Tests of the ops as torch sees them.

They cover torch's opcheck, fake and meta tensors, devices without float64, and the one
warning of the references.
"""

import warnings

import laws
import pytest
import torch
from internal.chains import Problem
from parts.modes import Mode
from torch import Tensor
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map_only
from ugly import randn

from pflcore import ops
from pflcore.ops import _chain as chain
from pflcore.ops import _library as library

DIFFERENTIABLE = {"pairwise_sqdist", "aggregate", "rank1_linear", "trimmed_mean"}
DIFFERENTIABLE |= {"mean_around_median"}


class Kept(Mode):
    """Keeps the name and the arguments of each call of an op."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "pflcore":
            name = op.name().split("::")[1]
            own = tree_map_only(Tensor, lambda t: t.detach().clone(), args)
            self.calls.append((name, own))
        return op(*args, **(kwargs or {}))


def test_calls_pass_autograd_only_where_it_adds_nothing():
    plain = torch.ones(2, 3)
    wanted = torch.ones(2, 3, requires_grad=True)

    def reaches_autograd(*_):
        key = torch._C.DispatchKey.AutogradFunctionality
        return not torch._C._dispatch_tls_is_dispatch_key_excluded(key)

    def needs_autograd(t):
        return library.call_op(reaches_autograd, plain, None, 1.0, t)

    assert not needs_autograd(plain) and needs_autograd(wanted)
    assert needs_autograd(plain.as_subclass(type("Own", (Tensor,), {})))
    with torch.no_grad():
        assert not needs_autograd(wanted)
    with torch.device("cpu"):  # a mode that replaces functions
        assert needs_autograd(plain)
    seen = []
    torch.func.vmap(lambda row: seen.append(needs_autograd(row)) or row)(plain)
    assert seen == [True]


def test_modes_see_calls_that_pass_autograd():
    with Kept() as kept:
        ops.pairwise_sqdist(torch.ones(2, 3))
        ops.aggregate(torch.ones(2, 3), torch.ones(1, 2))
        ops.trimmed_mean(torch.ones(2, 3), 0)
    names = [name for name, _ in kept.calls]
    assert names == ["pairwise_sqdist", "aggregate", "trimmed_mean"]


def ugly():
    """Calls ops with layouts, lists and dtypes missing in the laws."""
    rows = randn(1, 9, 4)
    near = torch.tensor([[0, 2, -1], [1, 1, 0], [-1, -1, -1], [2, 0, 3]])
    ops.pairwise_sqdist(rows.half().T, torch.zeros(0, 9).half())
    ops.pairwise_sqdist(rows.T, None, near)
    ops.pairwise_sqdist(rows.T, rows.T, near.T.contiguous().T[:, :2])
    ops.waffle_weights(rows.abs().T, torch.tensor(1), 1.5, 0.4, "uniform")
    ops.feddwa_weights(rows.abs().T, 99)
    ops.aggregate(rows, rows[:2, :2], near[:2, :2].abs(), lr=0.5, out=rows[:2].clone())
    ops.trimmed_mean(rows.half().T, 1)
    ops.mean_around_median(rows.half().T, 3)
    ops.rank1_linear(rows[:0].T, rows[:3, :2], rows[0, :2], rows[:2, :0])
    layer = laws.factors(3, 4, 5, 2, leads=((2,), (), (2,), ()))
    y = torch.ops.pflcore.rank1_listed(*layer)
    torch.ops.pflcore.rank1_listed_backward(y, *layer, True, True, True, True)
    rich = {"shift": rows, "mask": rows[0], "mu": rows[:, 0].abs(), "anchor": rows}
    ops.sgd_step_(rows.clone(), rows, 0.1, **rich, momentum=0.9, buffer=rows.clone())


def chains():
    p = Problem("batch norm of numbers", [3, 2])
    p.train(batch=2)
    p.grad(train=True)
    p.evaluate(p.w)
    p = Problem("linear", [3, 2])
    rows = dict(
        zip(("shift", "anchor", "sums"), randn(2, 3, *p.w.shape).float(), strict=True)
    )
    rich = {
        "mask": rows["shift"][0],
        "mu": randn(3, 2).float(),
        "momentum": 0.9,
        "decay": 0.1,
    }
    adamw = torch.tensor([0.9, 0.99, 1e-8], dtype=torch.float64)
    for how in ({}, {"adamw": adamw}, {**rows, **rich, "clip": 0.5}):
        p.train(batch=2, **how)
    p.grad()
    for classes in (3, 0):
        p.evaluate(p.w, classes=classes)


def samples():
    """A call of each op: its name and its arguments.

    Arguments of differentiable ops require gradients.
    """
    with Kept() as kept:
        for call, given in laws.calls(
            ops, torch.ops.pflcore.rank1_linear_backward, 9
        ).values():
            call(*given)
        ugly()
        # Without the kernels, no op trains a chain.
        if ops.backend().kernels:
            chains()
    for name, args in kept.calls:
        for t in args if name in DIFFERENTIABLE else ():
            if isinstance(t, Tensor) and t.dtype == torch.float32:
                t.requires_grad_()
        yield name, args


every_op = pytest.mark.parametrize("name, arguments", list(samples()))


@pytest.mark.skipif(not ops.backend().kernels, reason="the kernels are not loaded")
def test_each_op_has_its_kernel():
    """An op whose kernel is not registered would run its reference in silence."""
    prefix = "pflcore::"
    found = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)]
    on_cpu = torch._C._dispatch_has_kernel_for_dispatch_key
    # The CPU has a kernel of the whole layer, and needs no list of active factors.
    missing = {n.removeprefix(prefix) for n in found if not on_cpu(n, "CPU")}
    assert missing == {"rank1_listed", "rank1_listed_backward"}


def called(name):
    return getattr(torch.ops.pflcore, name).default


@every_op
@pytest.mark.deep("torch's own checks are slow")
def test_opcheck(name, arguments):
    """The check of each op by torch.

    It covers the schema, autograd, and shapes, dtypes and strides without values.
    """
    few = {}
    if name in ("chain_train_", "chain_eval") and library.kernels is None:
        pytest.skip("the kernels are not loaded")
    if name == "chain_grad" and library.kernels is None:
        # The other checks run the reference below autograd, but it needs autograd.
        few = {"test_utils": "test_autograd_registration"}
    opcheck(called(name), arguments, **few)


@every_op
def test_a_device_without_float64_goes_by_the_cpu(name, arguments):
    """The result is the op's, with float32 in place of float64.

    The op also writes to the same tensors. The CPU plays such a device here.
    """
    ours, theirs = (
        tree_map_only(Tensor, lambda t: t.detach().clone(), arguments) for _ in "ab"
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        want = called(name)(*theirs)
        got = library.run_on_cpu(called(name))(*ours)
    for a, b in zip(tree_leaves((want, theirs)), tree_leaves((got, ours)), strict=True):
        if isinstance(a, Tensor):
            laws.identical(b, a.to(b.dtype))
    assert all(
        t.dtype != torch.float64 for t in tree_leaves(got) if isinstance(t, Tensor)
    )


@pytest.mark.skipif(not ops.backend().kernels, reason="the kernels are not loaded")
def test_every_op_has_a_sample():
    """A new op of the library needs a sample here."""
    names = {
        name for name in torch._C._dispatch_get_all_op_names() if "pflcore::" in name
    }
    assert names == {f"pflcore::{name}" for name, _ in samples()}


def test_backend_names_its_cards():
    facts = {"kernels": True, "isa": "avx2", "threads": 2, "torch": "2.14", "fix": None}
    with_cards = library.Backend(
        **facts, why="built", cuda=True, architectures="sm_75, sm_90"
    )
    without = library.Backend(**facts, why="built", cuda=False)

    assert str(with_cards).startswith(
        "kernels (avx2, 2 threads, with CUDA for sm_75, sm_90), "
    )
    assert str(without).startswith("kernels (avx2, 2 threads, no CUDA), ")


@pytest.mark.skipif(library.kernels is None, reason="the kernels are not loaded")
def test_lack_of_memory_is_called_so():
    rows = torch.zeros(1 << 24, 0)  # no machine can hold a number for each pair
    with pytest.raises(
        RuntimeError, match=f"out of memory: there is no room for {1 << 48} more"
    ):
        ops.pairwise_sqdist(rows)


def test_references_warn_once(monkeypatch):
    monkeypatch.setattr(library, "warning_is_due", True)
    with pytest.warns(UserWarning, match="pip install --force-reinstall"):
        ops.feddwa_weights(torch.ones(2, 2), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.pairwise_sqdist(torch.ones(2, 2))


@pytest.mark.skipif(library.kernels is None, reason="the kernels are not loaded")
def test_a_chains_steps_are_seen_by_autograd():
    """Autograd notices that the op changes a tensor in place.

    The tensors are the weights and the sums of gradients. A product has saved them for
    its backward pass.
    """
    *_, (_, (w, *others)) = (s for s in samples() if s[0] == "chain_train_")
    for t in (w, others[-1]):
        product = (torch.ones_like(t, requires_grad=True) * t).sum()
        chain.chain_train_(w, *others)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
