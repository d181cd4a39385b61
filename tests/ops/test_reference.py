"""`pflcore.ops.reference` holds each op with its own signature, in plain PyTorch."""

import inspect

import hypothesis.strategies as st
import laws
import pytest
import torch
from hypothesis import given
from parts.modes import Mode
from tolerance import F32, F64
from torch.utils._pytree import tree_leaves
from ugly import randn, refuses

from pflcore import ops
from pflcore.ops import reference

OPS = sorted({*ops.__all__} - {"backend"})
BACKWARD = torch.ops.pflcore.rank1_linear_backward  # no public op
CALLS = laws.calls(reference, BACKWARD, 1)
PUBLIC = [name for name, (call, _) in CALLS.items() if call in vars(reference).values()]
DEEP = pytest.mark.deep("another dtype", one_in=2)
EACH = [
    pytest.param(law, dtype, marks=() if dtype is F32 else DEEP)
    for law, dtypes in laws.LAWS.items()
    for dtype in dtypes
]


class RefuseOps(Mode):
    """A context in which a call of one of pflcore's ops fails."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.namespace != "pflcore", func
        return func(*args, **(kwargs or {}))


def test_every_op_has_a_reference():
    assert sorted(reference.__all__) == OPS


@pytest.mark.parametrize("name", OPS)
def test_a_reference_has_the_signature_of_its_op(name):
    op = getattr(ops, name)
    function = getattr(reference, name)
    assert function is not op
    assert inspect.signature(function) == inspect.signature(op)
    assert function.__doc__ == op.__doc__


@pytest.mark.parametrize("law, dtype", EACH)
@given(st.data())
def test_a_reference_takes_the_arguments_of_its_op(law, dtype, data):
    """The laws of the ops hold for the references, and no kernel runs."""
    with RefuseOps():
        law(laws.CPU._replace(ops=reference), dtype, data.draw)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", PUBLIC)
def test_a_reference_returns_what_its_op_returns(name, dtype):
    call, inputs = laws.calls(reference, BACKWARD, 301, dtype)[name]
    want = getattr(ops, call.__name__)(*inputs)
    with RefuseOps():
        got = call(*inputs)
    assert type(got) is type(want)
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        size = float(y.abs().max())
        rounding = 1e-5 if dtype is F32 else 1e-13
        torch.testing.assert_close(x, y, rtol=0, atol=rounding * size)


def test_nearest_by_reference():
    rows = randn(0, 30, 7)
    guide = rows[:5] + 0.1
    want = ops.nearest(guide, rows, 3)
    for method in ("exact", "groups"):
        with RefuseOps():
            got = reference.nearest(guide, rows, k=3, method=method)
        assert type(got) is type(want)
        assert torch.equal(got.index, want.index)
        torch.testing.assert_close(got.sqdist, want.sqdist, rtol=1e-12, atol=0)


def test_a_reference_writes_into_its_arguments():
    updates = randn(0, 4, 9)
    out = torch.empty(2, 9, dtype=F64)
    w = randn(2, 4, 9)
    other = w.clone()
    buffers = [torch.ones_like(w), torch.ones_like(w)]

    with RefuseOps():
        got = reference.aggregate(updates, randn(1, 2, 4), out=out)
        step = reference.sgd_step_(
            w, updates, 0.1, momentum=0.9, buffer=buffers[0], mu=0.5, anchor=updates
        )
    ops.sgd_step_(
        other, updates, 0.1, momentum=0.9, buffer=buffers[1], mu=0.5, anchor=updates
    )

    assert got is out
    torch.testing.assert_close(out, ops.aggregate(updates, randn(1, 2, 4)))
    assert step is None
    torch.testing.assert_close(w, other)
    torch.testing.assert_close(*buffers)


GRADIENTS = {
    "pairwise_sqdist": [(3, 5), (4, 5)],
    "aggregate": [(4, 7), (3, 4)],
    "rank1_linear": [(5, 4), (3, 6), (6,), (6, 4)],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradients_of_a_reference_are_those_of_its_op(name):
    inputs = [randn(k, *s).requires_grad_() for k, s in enumerate(GRADIENTS[name])]
    y = getattr(ops, name)(*inputs)
    along = randn(9, *y.shape)
    want = torch.autograd.grad(y, inputs, along)
    with RefuseOps():
        y = getattr(reference, name)(*inputs)
        got = torch.autograd.grad(y, inputs, along)
    torch.testing.assert_close(got, want)


def test_a_reference_refuses_what_its_op_refuses():
    with refuses("pairwise_sqdist", "a", TypeError):
        reference.pairwise_sqdist([[1.0]])
    with refuses("aggregate", "out"):
        rows = torch.ones(2, 3)
        reference.aggregate(rows, torch.eye(2), out=rows)


def test_kernels_run_again_behind_a_reference():
    """A reference leaves no mode behind, also where its op raises."""
    rows = randn(0, 3, 4)
    reference.pairwise_sqdist(rows)
    with refuses("pairwise_sqdist", "a", TypeError):
        reference.pairwise_sqdist(None)
    with pytest.raises(AssertionError, match="pairwise_sqdist"), RefuseOps():
        ops.pairwise_sqdist(rows)
