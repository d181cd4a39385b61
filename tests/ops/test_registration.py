"""The ops under torch.compile, and the report of the backend."""

import os

import pytest
import torch
from laws import factors
from places import ran
from ugly import randn

import pflcore
from pflcore import ops


def server_step(guide, model, out):
    top = ops.feddwa_weights(ops.pairwise_sqdist(guide, model), 3)
    ops.aggregate(model, top.weight, top.index, base=model, lr=0.5, out=out)
    weight = ops.waffle_weights(ops.pairwise_sqdist(guide).sqrt(), 1, 0.7)
    return (
        ops.aggregate(model, weight),
        out,
        ops.pairwise_sqdist(guide, model, top.index),
    )


def local_step(w, grad, mu):
    """A step in place, with a proximal weight for each client."""
    buffer = torch.ones_like(w)
    ops.sgd_step_(
        w, grad, 0.1, momentum=0.9, buffer=buffer, mu=mu, anchor=torch.zeros_like(w)
    )
    return w, buffer


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.deep("torch.compile")
def test_compile(dynamic):
    options = {"fullgraph": True, "dynamic": dynamic, "backend": "aot_eager"}
    server, local = (
        torch.compile(step, **options) for step in (server_step, local_step)
    )
    for n in (6, 9):
        guide = randn(1, n, 40).float()
        model = randn(2, n, 40).float()
        for step, compiled, last in (
            (server_step, server, torch.empty_like(model)),
            (local_step, local, torch.full((n,), 0.5)),
        ):
            got, want = (
                f(guide.clone(), model, last.clone()) for f in (compiled, step)
            )
            torch.testing.assert_close(got, want)


@pytest.mark.deep("it takes seconds")
def test_compile_with_gradient():
    inputs = [
        t.float().requires_grad_()
        for t in factors(5, 6, 3, 7, leads=((4,), (), (4,), ()))
    ]
    compiled = torch.compile(
        lambda *t: ops.rank1_linear(*t).square().mean(),
        fullgraph=True,
        backend="aot_eager",
    )
    want = torch.autograd.grad(ops.rank1_linear(*inputs).square().mean(), inputs)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), want)


@pytest.mark.deep("it takes a second")
def test_compile_with_the_default_backend():
    def step(t):
        return ops.aggregate(t, *ops.feddwa_weights(ops.pairwise_sqdist(t), 2))

    guide = randn(3, 5, 40).float()
    assert torch.equal(torch.compile(step, fullgraph=True)(guide), step(guide))


def test_backend_says_what_runs():
    backend = pflcore.backend()
    reported = (backend.kernels, backend.threads, backend.torch)
    assert reported == (
        backend.isa is not None,
        torch.get_num_threads(),
        torch.__version__,
    )
    assert str(backend).startswith("kernels (" if backend.kernels else "references, ")
    assert "\n" not in str(backend) and backend.why


@pytest.mark.deep("a subprocess")
@pytest.mark.parametrize(
    "variable, what, said",
    [
        (
            {"PFLCORE_KERNELS": "0"},
            "pflcore.backend().kernels, pflcore.pairwise_sqdist(torch.eye(2)).tolist()",
            "False [[0.0, 2.0], [2.0, 0.0]]",
        ),
        ({"PFLCORE_ISA": "plain"}, "pflcore.backend().isa", "plain"),
    ],
)
def test_switched_by_environment(variable, what, said):
    if "PFLCORE_ISA" in variable and not pflcore.backend().kernels:
        pytest.skip("the kernels are not loaded")
    done = ran("-c", f"import torch, pflcore\nprint({what})", env=os.environ | variable)
    assert (done.stdout, done.stderr) == (f"{said}\n", "")
