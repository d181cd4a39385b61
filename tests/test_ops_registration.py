"""What torch knows about the ops: opcheck, torch.compile, fake tensors, and what the package says about what runs them."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import pflcore
from pflcore import ops
from pflcore.ops import library

KERNELS = library._C is not None


def samples():
    """A call of each op, by name."""
    gen = torch.Generator().manual_seed(0)

    def r(*shape, grad=False, dtype=torch.float32):
        return torch.randn(*shape, generator=gen).to(dtype).requires_grad_(grad)

    index = torch.tensor([[0, 2], [1, 1]])
    yield "pairwise_sqdist", (r(4, 9), None)
    yield "pairwise_sqdist", (r(4, 9, grad=True), r(3, 9, grad=True))
    yield "waffle_weights", (r(2, 5).abs(), torch.tensor([0, 3]), 0.5, 0.4, False)
    yield "feddwa_weights", (r(3, 5).abs(), 2)
    yield "aggregate", (r(3, 9, grad=True), r(2, 3, grad=True), None, r(9, grad=True), 0.5, False)
    yield "aggregate", (r(3, 9), r(2, 2, dtype=torch.float64), index, None, 1.0, True)
    yield "aggregate_out", (r(3, 9), r(2, 2), index, r(2, 9), 1.0, False, r(2, 9))
    for lead in ((), (4,)):
        forward = (r(*lead, 5, 6, grad=True), r(7, 3, grad=True), r(*lead, 3, grad=True), r(3, 6, grad=True))
        yield "rank1_linear", forward
        yield "rank1_linear_backward", (r(*lead, 5, 7), *(t.detach() for t in forward), True, False, True, True)
    yield "sgd_step_", (r(2, 9), r(2, 9), 0.1, None, r(9), 0.0, r(2), r(2, 9), 0.9, r(2, 9), 0.01)


@pytest.mark.parametrize(("name", "arguments"), [pytest.param(n, a, id=f"{n} {k}") for k, (n, a) in enumerate(samples())])
def test_opcheck(name, arguments):
    opcheck(getattr(torch.ops.pflcore, name).default, arguments)


@pytest.mark.parametrize(("name", "arguments"), [pytest.param(n, a, id=f"{n} {k}") for k, (n, a) in enumerate(samples())])
def test_fake_and_meta(name, arguments):
    """Shapes, dtypes and strides are known without values."""
    op = getattr(torch.ops.pflcore, name).default
    arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    real = op(*arguments)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    meta = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    for want, *others in zip(*((t,) if isinstance(t, torch.Tensor) else t or () for t in (real, fake, meta)), strict=True):
        for other in others:
            assert (other.shape, other.dtype, other.stride()) == (want.shape, want.dtype, want.stride())


def server_step(guide, model, out):
    top = ops.feddwa_weights(ops.pairwise_sqdist(guide, model), 3)
    ops.aggregate(model, top.weight, top.index, base=model, lr=0.5, out=out)
    weight = ops.waffle_weights(ops.pairwise_sqdist(guide).sqrt(), 1, 0.7)
    return ops.aggregate(model, weight), out


def local_step(x, w_a, lam, w_b):
    loss = ops.rank1_linear(x, w_a, lam, w_b).square().mean()
    return torch.autograd.grad(loss, (w_a, lam, w_b))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    gen = torch.Generator().manual_seed(1)
    compiled = torch.compile(server_step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (6, 9):
        guide, model = torch.randn(n, 40, generator=gen), torch.randn(n, 40, generator=gen)
        want, got = server_step(guide, model, torch.empty_like(model)), compiled(guide, model, torch.empty_like(model))
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g, w)


def test_compile_with_gradient():
    gen = torch.Generator().manual_seed(2)
    leaves = [torch.randn(*s, generator=gen).requires_grad_() for s in ((4, 5, 6), (7, 3), (4, 3), (3, 6))]
    compiled = torch.compile(lambda *t: ops.rank1_linear(*t).square().mean(), fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(ops.rank1_linear(*leaves).square().mean(), leaves)
    for g, w in zip(torch.autograd.grad(compiled(*leaves), leaves), want, strict=True):
        torch.testing.assert_close(g, w)


def test_backend_says_what_runs():
    backend = pflcore.backend()
    assert backend.kernels == KERNELS and backend.threads == torch.get_num_threads() and backend.torch == torch.__version__
    assert backend.isa == (library._C.isa() if KERNELS else None)
    assert str(backend).startswith("kernels (" if KERNELS else "references, ") and "\n" not in str(backend) and backend.why


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True)


def test_switched_off():
    out = run(
        "import pflcore, torch; print(pflcore.backend().kernels, pflcore.pairwise_sqdist(torch.eye(2)).tolist())", PFLCORE_KERNELS="0"
    )
    assert out.stdout.split("\n")[0] == "False [[0.0, 2.0], [2.0, 0.0]]" and "Warning" not in out.stderr


@pytest.mark.skipif(not KERNELS, reason="the references have one path only")
def test_instruction_set_by_environment():
    assert run("import pflcore; print(pflcore.backend().isa)", PFLCORE_ISA="plain").stdout.strip() == "plain"


def test_references_warn_once(monkeypatch):
    monkeypatch.setattr(library, "on_references", True)
    with pytest.warns(UserWarning, match="pip install --no-build-isolation"):
        ops.feddwa_weights(torch.ones(2, 2), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.pairwise_sqdist(torch.ones(2, 2))
