"""The ops under gradcheck and torch.compile, and what the package says about what runs them."""

import os
import subprocess
import sys

import pytest
import torch

import pflcore
from pflcore import ops


def leaves(*shapes):
    gen = torch.Generator().manual_seed(3)
    return [
        torch.randn(*shape, generator=gen, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


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
    assert (
        not ops.waffle_weights(d, 0, 0.5).requires_grad
        and not ops.feddwa_weights(d, 2).weight.requires_grad
    )


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
        want, got = (
            server_step(guide, model, torch.empty_like(model)),
            compiled(guide, model, torch.empty_like(model)),
        )
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g, w)


def test_compile_with_gradient():
    gen = torch.Generator().manual_seed(2)
    inputs = [
        torch.randn(*s, generator=gen).requires_grad_() for s in ((4, 5, 6), (7, 3), (4, 3), (3, 6))
    ]
    compiled = torch.compile(
        lambda *t: ops.rank1_linear(*t).square().mean(), fullgraph=True, backend="aot_eager"
    )
    want = torch.autograd.grad(ops.rank1_linear(*inputs).square().mean(), inputs)
    for g, w in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
        torch.testing.assert_close(g, w)


def test_compile_with_the_default_backend():
    guide = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    compiled = torch.compile(
        lambda t: ops.aggregate(t, *ops.feddwa_weights(ops.pairwise_sqdist(t), 2)), fullgraph=True
    )
    assert torch.equal(
        compiled(guide), ops.aggregate(guide, *ops.feddwa_weights(ops.pairwise_sqdist(guide), 2))
    )


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
    assert (
        backend.kernels == (backend.isa is not None)
        and backend.threads == torch.get_num_threads()
        and backend.torch == torch.__version__
    )
    assert (
        str(backend).startswith("kernels (" if backend.kernels else "references, ")
        and "\n" not in str(backend)
        and backend.why
    )


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.deep("a subprocess")
def test_switched_off():
    out = run(
        "import pflcore, torch; print(pflcore.backend().kernels, "
        "pflcore.pairwise_sqdist(torch.eye(2)).tolist())",
        PFLCORE_KERNELS="0",
    )
    assert (
        out.stdout.split("\n")[0] == "False [[0.0, 2.0], [2.0, 0.0]]"
        and "Warning" not in out.stderr
    )


@pytest.mark.skipif(not pflcore.backend().kernels, reason="the kernels are not loaded")
@pytest.mark.deep("a subprocess")
def test_instruction_set_by_environment():
    assert (
        run("import pflcore; print(pflcore.backend().isa)", PFLCORE_ISA="plain").stdout.strip()
        == "plain"
    )
