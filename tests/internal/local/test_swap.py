"""The kernels that stand for a model's layers: 2x2 pooling bit for bit like torch's, a convolution of few channels up to rounding."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tolerance import F32, F64, assert_close
from ugly import randn, same_for_any_threads

from pflcore import Net
from pflcore.local.swap import SmallConv2d, swap_layers
from pflcore.nn.mode import forward_mode
from pflcore.ops import _library as library
from pflcore.ops.conv import conv2d, conv2d_backward
from pflcore.ops.pool import pool2x2, pool2x2_backward

SHAPES = [(1, 1, 2, 2), (3, 2, 28, 28), (2, 5, 7, 9), (1, 3, 33, 2), (4, 1, 2, 67), (0, 3, 8, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("average", [False, True])
def test_equal_to_torch_bit_for_bit(shape, dtype, average):
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, shape, generator=gen).to(dtype)  # many ties: the gradient goes to the first of equals
    x = x + (torch.rand(shape, generator=gen) < 0.5) * torch.randn(shape, generator=gen, dtype=dtype)
    z = x.clone().requires_grad_()
    want = F.avg_pool2d(z, 2) if average else F.max_pool2d(z, 2)
    assert torch.equal(pool2x2(x, average), want)
    grad = torch.randn(want.shape, generator=gen, dtype=dtype)
    (g,) = torch.autograd.grad(want, z, grad)
    assert torch.equal(pool2x2_backward(grad, x, average), g)


def test_a_nan_spreads_to_its_window_alone():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    x[0, 0, 1, 0] = torch.nan
    y = pool2x2(x, False)
    assert y.isnan().tolist() == [[[[True, False], [False, False]]]]


@pytest.mark.parametrize(
    "layer", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True)]
)
def test_a_models_layers_are_replaced_without_a_trace(layer):
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, padding_mode="reflect"), layer))
    x = torch.randn(5, 1, 13, 12, generator=torch.Generator().manual_seed(1))
    outs = []
    for alone in (False, True):
        w = net.w0.clone().requires_grad_()
        with forward_mode(True, alone=alone):
            y = net(w, x)
        outs.append((y, *torch.autograd.grad(y.square().sum(), w)))
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)
    assert isinstance(net.module[1], type(layer))  # the caller's own model keeps its layers


# --- convolution ------------------------------------------------------------------------------------------------------------------


def images(b, c, o, high, wide, kh, kw, dtype, seed=0):
    return (randn(seed, b, c, high, wide, dtype=dtype), randn(seed + 1, o, c, kh, kw, dtype=dtype), randn(seed + 2, o, dtype=dtype))


@pytest.mark.usefixtures("isa")
@given(
    st.sampled_from([0, 1, 3, 4, 5, 9]), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 5, 6, 16]), st.integers(1, 19),
    st.integers(1, 19), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.sampled_from([F32, F64]),
    st.sampled_from([(True, True, True), (False, True, True), (True, False, False), (False, False, True), (False, False, False)]),
    st.integers(0, 9),
)  # fmt: skip
def test_convolution_and_its_gradients(b, c, o, high, wide, kh, kw, pad_h, pad_w, dtype, need, seed):
    kh, kw = min(kh, high + 2 * pad_h), min(kw, wide + 2 * pad_w)
    x, w, bias = images(b, c, o, high, wide, kh, kw, dtype, seed)

    def exact(x, w, bias):
        return F.conv2d(x.double(), w.double(), bias, padding=(pad_h, pad_w))

    want, size = exact(x, w, bias.double()), exact(x.abs(), w.abs(), bias.double().abs())
    for given_bias, less in ((bias, 0.0), (None, bias.double()[:, None, None])):
        assert_close(conv2d(x, w, given_bias, pad_h, pad_w), want - less, "conv", dtype, size)
    grad = randn(seed + 3, *want.shape, dtype=dtype)

    def exact_grads(grad, x, w):
        z, v, beta = x.double().requires_grad_(), w.double().requires_grad_(), bias.double().requires_grad_()
        return torch.autograd.grad(F.conv2d(z, v, beta, padding=(pad_h, pad_w)), (z, v, beta), grad.double())

    got = conv2d_backward(grad, x, w, pad_h, pad_w, *need)
    for g, full, bound, wanted in zip(got, exact_grads(grad, x, w), exact_grads(grad.abs(), x.abs(), w.abs()), need, strict=True):
        if wanted:
            assert_close(g, full, "conv", dtype, bound)
        else:
            assert g.numel() == 0


@pytest.mark.usefixtures("isa")
def test_convolutions_of_other_layouts():
    """The same numbers, bit for bit by the kernel."""
    close = {"rtol": 0, "atol": 0} if library.kernels is not None else {}
    x, w, bias = images(3, 2, 5, 9, 7, 3, 3, F32)
    far, back = x.to(memory_format=torch.channels_last), w.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(conv2d(far, back, bias, 1, 0), conv2d(x, w, bias, 1, 0), **close)
    grad = randn(4, 3, 5, 9, 5, dtype=F32)
    for a, b in zip(
        conv2d_backward(grad.to(memory_format=torch.channels_last), far, back, 1, 0, True, True, True),
        conv2d_backward(grad, x, w, 1, 0, True, True, True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.usefixtures("isa")
def test_threads_change_no_bit_of_a_convolution():
    if library.kernels is None:
        pytest.skip("the kernels are not loaded")
    x, w, bias = images(40, 6, 16, 14, 14, 5, 5, F32)
    grad = randn(4, 40, 16, 10, 10, dtype=F32)
    same_for_any_threads(lambda: conv2d(x, w, bias, 0, 0))
    for k in range(3):
        same_for_any_threads(lambda k=k: conv2d_backward(grad, x, w, 0, 0, True, True, True)[k])


def test_a_nan_image_spoils_only_itself():
    x, w, bias = images(9, 2, 5, 6, 6, 3, 3, F32)
    want = conv2d(x, w, bias, 1, 1)
    x[4, 1, 5, 5] = torch.nan
    got = conv2d(x, w, bias, 1, 1)
    assert torch.equal(got[:4], want[:4]) and torch.equal(got[5:], want[5:]) and got[4, :, :4, :4].equal(want[4, :, :4, :4])
    assert got[4, :, 4:, 4:].isnan().all()


@pytest.mark.parametrize(
    ("layer", "swapped"),
    [
        (nn.Conv2d(3, 6, 3, padding=1), True),
        (nn.Conv2d(3, 6, (3, 2), padding=(0, 1), bias=False), True),
        (nn.Conv2d(3, 6, 3, padding="same"), False),
        (nn.Conv2d(3, 6, 3, stride=2), False),
        (nn.Conv2d(3, 6, 3, dilation=2), False),
        (nn.Conv2d(3, 6, 3, groups=3), False),
        (nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"), False),
        (nn.Conv2d(3, 99, 3), False),
    ],
)
def test_a_models_convolutions_are_replaced_where_they_fit(layer, swapped):
    layer = layer.double()
    net = Net(nn.Sequential(layer, nn.Tanh()))
    x = randn(1, 5, 3, 13, 12)
    outs = []
    for alone in (False, True):
        w = net.w0.clone().requires_grad_()
        with forward_mode(True, alone=alone):
            y = net(w, x)
        outs.append((y, *torch.autograd.grad(y.square().sum(), w)))
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    module = nn.Sequential(layer)
    swap_layers(module)
    assert (type(module[0]) is SmallConv2d) == swapped


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity()])
def test_second_derivatives(layer):
    """Exact Per-FedAvg differentiates a gradient: through the kernels' layers as through torch's."""
    build = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), layer, nn.Conv2d(3, 2, 2, padding=1), nn.Flatten()).double()
    net, x = Net(build), randn(1, 5, 1, 8, 8)
    y = torch.arange(5)
    outs = []
    for alone in (False, True):
        w = net.w0.clone().requires_grad_()
        with forward_mode(True, alone=alone):
            (g,) = torch.autograd.grad(net.loss(w, x, y), w, create_graph=True)
        outs.append(torch.autograd.grad(g.square().sum(), w)[0])
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w, g: conv2d(x, w[:, :1], None, 0, 0), "conv2d: expected x"),
        (lambda x, w, g: conv2d(x, w.double(), None, 0, 0), "one dtype"),
        (lambda x, w, g: conv2d(x[:, :, :2], w, None, 0, 0), "fits the padded images"),
        (lambda x, w, g: conv2d(x, w, torch.zeros(4), 0, 0), "bias"),
        (lambda x, w, g: conv2d_backward(g[:, :, 1:], x, w, 0, 0, True, True, True), "grad of the result's shape"),
    ],
)
def test_memory_is_guarded(call, words):
    if library.kernels is None:
        pytest.skip("the kernels are not loaded")
    x, w, _ = images(2, 3, 5, 6, 6, 3, 3, F32)
    with pytest.raises(RuntimeError, match=words):
        call(x, w, torch.zeros(2, 5, 4, 4))
