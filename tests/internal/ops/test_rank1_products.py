"""Tests of the rank-1 layer by torch's products, as on GPUs.

The products run here on the CPU and on a pretended GPU.
"""

from types import SimpleNamespace

import hypothesis.strategies as st
import laws
import pytest
import torch
from hypothesis import given
from laws import factors, identical
from pretend_gpu import Pretend, pretended_gpu, waits
from tolerance import F32, F64, FLOATS
from ugly import randn

from pflcore.ops import _rank1


class Products(torch.autograd.Function):
    """The layer and its gradients by products, as an op with autograd."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return _rank1.rank1_by_products(*inputs)

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad
        grads = _rank1.rank1_by_products_backward(grad, *ctx.saved_tensors, *needs)
        return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


CARD = laws.Machine(SimpleNamespace(rank1_linear=Products.apply), laws.CPU.put)
# The clients' axes of x, w_a, lam, w_b. The clients share the factors, or each client
# has factors of its own.
SHARED = ((3,), (), (3,), ())
OWN = ((3,),) * 4
LEADS = [
    SHARED,
    OWN,
    ((),) * 4,
    ((), (), (3,), ()),
    ((3,), (), (), ()),
    ((3,), (3,), (), (3,)),
]
every_lead = pytest.mark.parametrize("leads", LEADS)


@pytest.mark.parametrize("dtype", FLOATS)
@given(st.data())
def test_definition(dtype, data):
    laws.rank1(CARD, dtype, data.draw)


def everything(inputs, lam_too=False):
    """The output of the layer, and its gradients."""
    y = _rank1.rank1_by_products(*inputs)
    grad = randn(9, *y.shape, dtype=y.dtype)
    return [
        y,
        *_rank1.rank1_by_products_backward(grad, *inputs, True, True, lam_too, True),
    ]


@every_lead
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inactive_factors_may_hold_anything(leads, dtype, value):
    """The values of inactive factors change no bit."""
    inputs = factors(4, 9, 40, 7, dtype, leads)
    _, w_a, lam, w_b = inputs
    lam[..., ::3] = 0
    want = everything(inputs)

    w_a[..., ::3] = value
    w_b[..., ::3, :] = value

    identical(everything(inputs), want)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "side, at, found", [(1, (1, 2), 0), (3, (2, 1), 1)], ids=["y", "gx"]
)
def test_factor_off_for_one_client_counts_for_others(side, at, found, value):
    """A bad value acts only on clients whose factor is on.

    w_a[1, 2] acts on output 1, and w_b[2, 1] on the gradient of input 1. Client 0 has
    factor 2 off.
    """
    inputs = factors(4, 9, 6, 7, F64, SHARED)
    inputs[2][0, 2] = 0
    want = everything(inputs)[found]

    inputs[side][at] = value
    got = everything(inputs)[found]

    assert not got[1:, :, 1].isfinite().any()
    got[1:, :, 1] = want[1:, :, 1]
    identical(got, want)


def test_nothing_waits():
    for leads in LEADS:
        inputs = factors(4, 9, 6, 7, F32, leads, 0.5)
        want = [_rank1.rank1_on_gpu(*inputs), *_backward(inputs)]
        with pretended_gpu() as gpu:
            there = [Pretend(t, gpu) for t in inputs]
            got = [_rank1.rank1_on_gpu(*there), *_backward(there)]
            assert waits == []
            assert all(isinstance(t, Pretend) for t in got)
            identical([t.real_ for t in got], want)


def _backward(inputs):
    x, w_a, *_ = inputs
    clients = (
        [3]
        if any(t.dim() > own for t, own in zip(inputs, (2, 2, 1, 2), strict=True))
        else []
    )
    grad = torch.ones(*clients, x.shape[-2], w_a.shape[-2], device=x.device)
    return _rank1.rank1_on_gpu_backward(grad, *inputs, True, True, True, True)


@pytest.mark.parametrize(
    "name, value", [("fp32_precision", "tf32"), ("allow_tf32", True)]
)
def test_rounded_products_are_not_taken(monkeypatch, name, value):
    """A user's setting that rounds products makes the op take its kernels.

    So the op stays as precise as it is. Products in float64 are never rounded.
    """
    taken = []
    monkeypatch.setattr(_rank1, "_listed_op", lambda *inputs: taken.append("kernels"))
    monkeypatch.setattr(
        _rank1, "rank1_by_products", lambda *inputs: taken.append("products")
    )
    single = factors(2, 3, 4, 5, F32)
    double = factors(2, 3, 4, 5, F64)

    _rank1.rank1_on_gpu(*single)
    with monkeypatch.context() as changed:
        changed.setattr(torch.backends.cuda.matmul, name, value)
        _rank1.rank1_on_gpu(*single)
        _rank1.rank1_on_gpu(*double)

    assert taken == ["products", "kernels", "products"]


def test_autocast_rounds_nothing_inside():
    """Autocast casts the inputs before the op; its products stay in float32."""
    inputs = factors(5, 7, 6, 4, F32)
    want = _rank1.rank1_on_gpu(*inputs)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = _rank1.rank1_on_gpu(*inputs)

    identical(got, want)


def test_a_card_takes_this_path():
    for name in ("rank1_linear", "rank1_linear_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(
            f"pflcore::{name}", "CUDA"
        )
