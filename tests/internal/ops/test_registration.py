"""What torch knows about every registered op: opcheck, fake and meta tensors; and the one warning
where the references run."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_leaves
from ugly import randn

from pflcore import ops
from pflcore.ops import _library as library
from pflcore.ops import chain


def samples():
    """A call of each op, by name."""
    gen = torch.Generator().manual_seed(0)

    def r(*shape, grad=False, dtype=torch.float32):
        return torch.randn(*shape, generator=gen).to(dtype).requires_grad_(grad)

    index = torch.tensor([[0, 2], [1, 1]])
    yield "pairwise_sqdist", (r(4, 9), None)
    yield "pairwise_sqdist", (r(4, 9, grad=True), r(3, 9, grad=True))
    yield "pairwise_sqdist", (r(9, 4, dtype=torch.float16).T, r(0, 9, dtype=torch.float16))
    near = torch.tensor([[0, 2, -1], [1, 1, 0], [-1, -1, -1], [2, 0, 3]])
    yield "pairwise_sqdist", (r(4, 9), None, near)
    yield "pairwise_sqdist", (r(4, 9, grad=True), r(5, 9, grad=True), near)
    yield (
        "pairwise_sqdist",
        (r(4, 9, dtype=torch.float64), r(5, 9, dtype=torch.float64), near.T.contiguous().T[:, :2]),
    )
    yield "waffle_weights", (r(2, 5).abs(), torch.tensor([0, 3]), 0.5, 0.4, False)
    yield "waffle_weights", (r(5, 2, dtype=torch.float64).abs().T, torch.tensor(1), 1.5, 0.4, True)
    yield "feddwa_weights", (r(3, 5).abs(), 2)
    yield "feddwa_weights", (r(5, 3).abs().T, 9)
    yield "aggregate", (r(3, 9, grad=True), r(2, 3, grad=True), None, r(9, grad=True), 0.5, False)
    yield "aggregate", (r(3, 9), r(2, 2, dtype=torch.float64), index, None, 1.0, True)
    yield (
        "aggregate",
        (r(3, 9, grad=True), r(2, 2, grad=True), index, r(2, 9, grad=True), 0.5, False),
    )
    yield "aggregate_out", (r(3, 9), r(2, 2), index, r(2, 9), 1.0, False, r(2, 9))
    for lead in ((), (4,)):
        forward = (
            r(*lead, 5, 6, grad=True),
            r(7, 3, grad=True),
            r(*lead, 3, grad=True),
            r(3, 6, grad=True),
        )
        yield "rank1_linear", forward
        yield (
            "rank1_linear_backward",
            (r(*lead, 5, 7), *(t.detach() for t in forward), True, False, True, True),
        )
    yield (
        "rank1_linear",
        (
            r(6, 0, dtype=torch.float16).T,
            *(r(*s, dtype=torch.float16) for s in ((7, 3), (3,), (3, 6))),
        ),
    )
    order, labels = torch.arange(6).view(2, 1, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    program = torch.tensor([chain.layer("linear", 3, 0, 12)], dtype=torch.float64)
    head, sizes = (program, "cross_entropy", 4, 1, 1, r(6, 4), labels, None), torch.tensor([3, 2])
    steps = (torch.tensor([2, 1]), 2, False, None, 0.1)
    plain = (None, None, 0.0, None, None, 0.0, 0.0, float("inf"), None)
    yield "chain_sgd_", (r(2, 15), *head, order, sizes, *steps, *plain)
    yield (
        "chain_sgd_",
        (
            r(2, 15),
            *head,
            order,
            sizes,
            *steps,
            r(2, 15),
            r(15),
            0.0,
            r(2),
            r(2, 15),
            0.9,
            0.1,
            0.5,
            r(2, 15),
        ),
    )
    yield "chain_grad", (r(2, 15), *head, order[:, 0], sizes, None)
    yield "chain_eval", (r(2, 15), *head, order.flatten()[:5], torch.tensor([0, 3, 5]), 3)
    yield "chain_eval", (r(2, 15), *head, order.flatten()[:5], torch.tensor([0, 3, 5]), 0)
    yield "sgd_step_", (r(2, 9), r(2, 9), 0.1, None, None, 0.0, None, None, 0.0, None, 0.0)
    yield "sgd_step_", (r(2, 9), r(2, 9), 0.1, None, r(9), 0.0, r(2), r(2, 9), 0.9, r(2, 9), 0.01)


@pytest.mark.parametrize(
    ("name", "arguments"), [pytest.param(n, a, id=f"{n} {k}") for k, (n, a) in enumerate(samples())]
)
def test_opcheck(name, arguments):
    tests = [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    ]
    if name in ("chain_sgd_", "chain_grad") and library.kernels is None:
        # the others run the reference below autograd, by which it differentiates
        tests = ["test_autograd_registration"]
    opcheck(getattr(torch.ops.pflcore, name).default, arguments, test_utils=tests)


@pytest.mark.parametrize(
    ("name", "arguments"), [pytest.param(n, a, id=f"{n} {k}") for k, (n, a) in enumerate(samples())]
)
def test_fake_and_meta(name, arguments):
    """Shapes, dtypes and strides are known without values."""
    op = getattr(torch.ops.pflcore, name).default
    arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    real = op(*arguments)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    meta = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    for want, *others in zip(
        *((t,) if isinstance(t, torch.Tensor) else t or () for t in (real, fake, meta)), strict=True
    ):
        for other in others:
            assert (other.shape, other.dtype, other.stride()) == (
                want.shape,
                want.dtype,
                want.stride(),
            )


def test_every_op_has_a_sample():
    """A new op of the library needs one, or a test of its own."""
    named = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("pflcore::")
    }
    assert named == {name for name, _ in samples()}


@pytest.mark.parametrize(
    ("name", "arguments"), [pytest.param(n, a, id=f"{n} {k}") for k, (n, a) in enumerate(samples())]
)
def test_a_device_without_float64_goes_by_the_cpu(name, arguments):
    """What such a device runs gives the op's results, as float32 where they are float64, and
    writes where the op writes; here the CPU takes that device's part."""
    op = getattr(torch.ops.pflcore, name).default
    of = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    ours, theirs = ([a.clone() if isinstance(a, torch.Tensor) else a for a in of] for _ in range(2))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        want, got = op(*theirs), library.by_cpu(op)(*ours)
    for a, b in zip(tree_leaves((want, theirs)), tree_leaves((got, ours)), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a.to(b.dtype), rtol=0, atol=0, equal_nan=True)
    assert all(t.dtype != torch.float64 for t in tree_leaves(got) if isinstance(t, torch.Tensor))


def test_references_warn_once(monkeypatch):
    monkeypatch.setattr(library, "on_references", True)
    with pytest.warns(UserWarning, match="pip install --force-reinstall"):
        ops.feddwa_weights(torch.ones(2, 2), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.pairwise_sqdist(torch.ones(2, 2))


def test_a_chains_steps_are_seen_by_autograd():
    """A product that has saved the weights, or the sum of gradients, notices that they change."""
    w, grads = randn(1, 2, 15), randn(3, 2, 15)
    program = torch.tensor([chain.layer("linear", 3, 0, 12)], dtype=torch.float64)
    order, labels = torch.arange(6).view(2, 1, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    batches = (order, torch.tensor([3, 2]), torch.tensor([2, 1]), 2, False, None)
    how = (0.1, None, None, 0.0, None, None, 0.0, 0.0, float("inf"), grads)
    for t in (w, grads):
        product = (torch.ones_like(t, requires_grad=True) * t).sum()
        chain.chain_sgd_(
            w, program, "cross_entropy", 4, 1, 1, randn(5, 6, 4), labels, None, *batches, *how
        )
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
