"""What torch knows about every registered op: opcheck, fake and meta tensors; and the one warning
where the references run."""

import warnings

import pytest
import torch
from internal.chains import Problem
from torch.library import opcheck
from ugly import randn

from pflcore import ops
from pflcore.ops import _library as library
from pflcore.ops import chain


def samples():
    """A call of each op, by name."""
    F16, F64 = torch.float16, torch.float64

    def r(*shape, grad=False, dtype=torch.float32):
        return randn(sum(shape), *shape, dtype=dtype).requires_grad_(grad)

    def g(*shape):
        return r(*shape, grad=True)

    index = torch.tensor([[0, 2], [1, 1]])
    near = torch.tensor([[0, 2, -1], [1, 1, 0], [-1, -1, -1], [2, 0, 3]])
    turned = near.T.contiguous().T[:, :2]
    yield "pairwise_sqdist", (r(4, 9), None)
    yield "pairwise_sqdist", (g(4, 9), g(3, 9))
    yield "pairwise_sqdist", (r(9, 4, dtype=F16).T, r(0, 9, dtype=F16))
    yield "pairwise_sqdist", (g(4, 9), None, near)
    yield "pairwise_sqdist", (r(4, 9, dtype=F64), r(5, 9, dtype=F64), turned)
    yield "waffle_weights", (r(2, 5).abs(), torch.tensor([0, 3]), 0.5, 0.4, False)
    yield "waffle_weights", (r(5, 2, dtype=F64).abs().T, torch.tensor(1), 1.5, 0.4, True)
    yield "feddwa_weights", (r(3, 5).abs(), 2)
    yield "feddwa_weights", (r(5, 3).abs().T, 9)
    yield "aggregate", (g(3, 9), g(2, 3), None, g(9), 0.5, False)
    yield "aggregate", (r(3, 9), r(2, 2, dtype=F64), index, None, 1.0, True)
    yield "aggregate", (g(3, 9), g(2, 2), index, g(2, 9), 0.5, False)
    yield "aggregate_out", (r(3, 9), r(2, 2), index, r(2, 9), 1.0, False, r(2, 9))
    for lead in ((), (4,)):
        layer = (g(*lead, 5, 6), g(7, 3), g(*lead, 3), g(3, 6))
        need = True, False, True, True
        yield "rank1_linear", layer
        yield "rank1_linear_backward", (r(*lead, 5, 7), *(t.detach() for t in layer), *need)
    halves = [r(*s, dtype=F16) for s in ((6, 0), (7, 3), (3,), (3, 6))]
    yield "rank1_linear", (halves[0].T, *halves[1:])
    p = Problem("linear", [3, 2])
    rows = (r(2, p.net.size) for _ in range(3))
    rich = dict(zip(("shift", "anchor", "sums"), rows, strict=True))
    rich.update(mask=r(p.net.size), mu=r(2), momentum=0.9, decay=0.1, clip=0.5)

    def given(*arguments):
        return arguments

    for how in ({}, rich):
        yield "chain_sgd_", p.train(given, batch=2, **how)[1]
    yield "chain_grad", p.grad(given)
    for classes in (3, 0):
        yield "chain_eval", p.evaluate(p.w, given, classes)
    yield "sgd_step_", (r(2, 9), r(2, 9), 0.1, None, None, 0.0, None, None, 0.0, None, 0.0)
    buffer = (r(2), r(2, 9), 0.9, r(2, 9), 0.01)
    yield "sgd_step_", (r(2, 9), r(2, 9), 0.1, None, r(9), 0.0, *buffer)


every_op = pytest.mark.parametrize("name, arguments", list(samples()))


def called(name):
    return getattr(torch.ops.pflcore, name).default


@every_op
def test_opcheck(name, arguments):
    """Schema, autograd, and shapes, dtypes and strides without values."""
    few = {}
    if name in ("chain_sgd_", "chain_eval") and library.kernels is None:
        pytest.skip("the kernels are not loaded")
    if name == "chain_grad" and library.kernels is None:
        # the others run the reference below autograd, by which it differentiates
        few = {"test_utils": "test_autograd_registration"}
    opcheck(called(name), arguments, **few)


def test_every_op_has_a_sample():
    """A new op of the library needs one, or a test of its own."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if "pflcore::" in name}
    assert names == {f"pflcore::{name}" for name, _ in samples()}


def test_references_warn_once(monkeypatch):
    monkeypatch.setattr(library, "on_references", True)
    with pytest.warns(UserWarning, match="pip install --force-reinstall"):
        ops.feddwa_weights(torch.ones(2, 2), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.pairwise_sqdist(torch.ones(2, 2))


@pytest.mark.skipif(library.kernels is None, reason="the kernels are not loaded")
def test_a_chains_steps_are_seen_by_autograd():
    """A product that has saved the weights, or the sum of gradients, notices that they change."""
    *_, (_, (w, *others)) = (s for s in samples() if s[0] == "chain_sgd_")
    for t in (w, others[-1]):
        product = (torch.ones_like(t, requires_grad=True) * t).sum()
        chain.chain_sgd_(w, *others)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
