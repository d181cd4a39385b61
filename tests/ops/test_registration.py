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
from pflcore.ops import _library as library
from pflcore.ops import chain

KERNELS = library.kernels is not None


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
    yield "pairwise_sqdist", (r(4, 9, dtype=torch.float64), r(5, 9, dtype=torch.float64), near.T.contiguous().T[:, :2])
    yield "waffle_weights", (r(2, 5).abs(), torch.tensor([0, 3]), 0.5, 0.4, False)
    yield "waffle_weights", (r(5, 2, dtype=torch.float64).abs().T, torch.tensor(1), 1.5, 0.4, True)
    yield "feddwa_weights", (r(3, 5).abs(), 2)
    yield "feddwa_weights", (r(5, 3).abs().T, 9)
    yield "aggregate", (r(3, 9, grad=True), r(2, 3, grad=True), None, r(9, grad=True), 0.5, False)
    yield "aggregate", (r(3, 9), r(2, 2, dtype=torch.float64), index, None, 1.0, True)
    yield "aggregate", (r(3, 9, grad=True), r(2, 2, grad=True), index, r(2, 9, grad=True), 0.5, False)
    yield "aggregate_out", (r(3, 9), r(2, 2), index, r(2, 9), 1.0, False, r(2, 9))
    for lead in ((), (4,)):
        forward = (r(*lead, 5, 6, grad=True), r(7, 3, grad=True), r(*lead, 3, grad=True), r(3, 6, grad=True))
        yield "rank1_linear", forward
        yield "rank1_linear_backward", (r(*lead, 5, 7), *(t.detach() for t in forward), True, False, True, True)
    yield "rank1_linear", (r(6, 0, dtype=torch.float16).T, *(r(*s, dtype=torch.float16) for s in ((7, 3), (3,), (3, 6))))
    image, kernel = r(3, 2, 6, 7), r(4, 2, 3, 2)
    for average in (False, True):
        yield "pool2x2", (image, average)
        yield "pool2x2_backward", (r(3, 2, 3, 3), image, average)
    yield "conv2d", (image, kernel, r(4), 1, 0)
    yield "conv2d", (image.to(memory_format=torch.channels_last), kernel, None, 0, 2)
    yield "conv2d_backward", (r(3, 4, 6, 6), image, kernel, 1, 0, True, True, True)
    yield "conv2d_backward", (r(3, 4, 6, 6), image, kernel, 1, 0, False, True, False)
    order, labels = torch.arange(6).view(2, 1, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    program = torch.tensor([chain.layer("linear", 3, 0, 12)], dtype=torch.float64)
    head, sizes = (program, "cross_entropy", 4, 1, 1, r(6, 4), labels, None), torch.tensor([3, 2])
    steps = (torch.tensor([2, 1]), 2, False, None, 0.1)
    plain = (None, None, 0.0, None, None, 0.0, 0.0, float("inf"), None)
    yield "chain_sgd_", (r(2, 15), *head, order, sizes, *steps, *plain)
    yield "chain_sgd_", (r(2, 15), *head, order, sizes, *steps, r(2, 15), r(15), 0.0, r(2), r(2, 15), 0.9, 0.1, 0.5, r(2, 15))
    yield "chain_grad", (r(2, 15), *head, order[:, 0], sizes, None)
    yield "chain_eval", (r(2, 15), *head, order.flatten()[:5], torch.tensor([0, 3, 5]), 3)
    yield "chain_eval", (r(2, 15), *head, order.flatten()[:5], torch.tensor([0, 3, 5]), 0)
    yield "sgd_step_", (r(2, 9), r(2, 9), 0.1, None, None, 0.0, None, None, 0.0, None, 0.0)
    yield "sgd_step_", (r(2, 9), r(2, 9), 0.1, None, r(9), 0.0, r(2), r(2, 9), 0.9, r(2, 9), 0.01)


@pytest.mark.parametrize(("name", "arguments"), [pytest.param(n, a, id=f"{n} {k}") for k, (n, a) in enumerate(samples())])
def test_opcheck(name, arguments):
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name in ("chain_sgd_", "chain_grad") and not pflcore.backend().kernels:
        tests = ["test_autograd_registration"]  # the others run the reference below autograd, by which it differentiates
    opcheck(getattr(torch.ops.pflcore, name).default, arguments, test_utils=tests)


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


def test_every_op_has_a_sample():
    """A new op of the library needs one, or a test of its own."""
    named = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("pflcore::")}
    assert named == {name for name, _ in samples()}


def leaves(*shapes):
    gen = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=gen, dtype=torch.float64).requires_grad_() for shape in shapes]


def check_gradients(call, inputs):
    assert torch.autograd.gradcheck(call, inputs) and torch.autograd.gradgradcheck(call, inputs)


def test_gradcheck_pairwise_sqdist():
    check_gradients(ops.pairwise_sqdist, leaves((3, 5)))
    check_gradients(ops.pairwise_sqdist, leaves((3, 5), (4, 5)))
    near = torch.tensor([[0, 1], [2, 2], [1, 0]])
    check_gradients(lambda a: ops.pairwise_sqdist(a, index=near), leaves((3, 5)))
    check_gradients(lambda a, b: ops.pairwise_sqdist(a, b, near), leaves((3, 5), (4, 5)))


@pytest.mark.parametrize("index", [None, torch.tensor([[0, 1], [2, 2], [3, 0]])])
@pytest.mark.parametrize("base", [(7,), (3, 7)])
def test_gradcheck_aggregate(index, base):
    inputs = leaves((4, 7), (3, 4 if index is None else 2), base)
    check_gradients(lambda u, w, b: ops.aggregate(u, w, index, b, 0.7), inputs)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_gradcheck_rank1_linear(lead):
    x, w_a, lam, w_b = leaves((*lead, 5, 4), (3, 6), (*lead, 6), (6, 4))
    with torch.no_grad():
        lam[..., 2] = 0  # a factor that is off, which its lambda's gradient may turn on
    check_gradients(ops.rank1_linear, [x, w_a, lam, w_b])


def test_weights_are_constants():
    (d,) = leaves((3, 3))
    assert not ops.waffle_weights(d, 0, 0.5).requires_grad and not ops.feddwa_weights(d, 2).weight.requires_grad


def server_step(guide, model, out):
    top = ops.feddwa_weights(ops.pairwise_sqdist(guide, model), 3)
    ops.aggregate(model, top.weight, top.index, base=model, lr=0.5, out=out)
    weight = ops.waffle_weights(ops.pairwise_sqdist(guide).sqrt(), 1, 0.7)
    return ops.aggregate(model, weight), out, ops.pairwise_sqdist(guide, model, top.index)


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
    inputs = [torch.randn(*s, generator=gen).requires_grad_() for s in ((4, 5, 6), (7, 3), (4, 3), (3, 6))]
    compiled = torch.compile(lambda *t: ops.rank1_linear(*t).square().mean(), fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(ops.rank1_linear(*inputs).square().mean(), inputs)
    for g, w in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
        torch.testing.assert_close(g, w)


def test_compile_with_the_default_backend():
    guide = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    compiled = torch.compile(lambda t: ops.aggregate(t, *ops.feddwa_weights(ops.pairwise_sqdist(t), 2)), fullgraph=True)
    assert torch.equal(compiled(guide), ops.aggregate(guide, *ops.feddwa_weights(ops.pairwise_sqdist(guide), 2)))


def test_compile_of_a_step_in_place():
    def step(w, grad, buffer):
        ops.sgd_step_(w, grad, 0.1, momentum=0.9, buffer=buffer, mu=0.5, anchor=torch.zeros_like(w))

    gen = torch.Generator().manual_seed(4)
    w, grad, buffer = (torch.randn(3, 40, generator=gen) for _ in range(3))
    w2, buffer2 = w.clone(), buffer.clone()
    step(w, grad, buffer)
    torch.compile(step, fullgraph=True, backend="aot_eager")(w2, grad, buffer2)
    assert torch.equal(w, w2) and torch.equal(buffer, buffer2)


def test_backend_says_what_runs():
    backend = pflcore.backend()
    assert backend.kernels == KERNELS and backend.threads == torch.get_num_threads() and backend.torch == torch.__version__
    assert backend.isa == library.isa()
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
