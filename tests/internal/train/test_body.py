"""Tests of the layers before the head by the kernels, under losses of one's own."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from parts.path import BODIES, body, played
from small import at_work, images, make_setting
from tolerance import F32, F64

import pflcore
from pflcore import Net, Training
from pflcore.nn._context import forward_context
from pflcore.nn.models import model_for
from pflcore.train import _body as bodies
from pflcore.train._body import find_body
from pflcore.train._chain import compile_chain
from pflcore.train._engines import gradients
from pflcore.train._select_engine import make_context

pytestmark = pytest.mark.skipif(
    not pflcore.backend().kernels, reason="the kernels are not loaded"
)

IMAGE = (1, 6, 6)
MODELS = {  # layers, and the shape of a sample
    "conv": BODIES["conv"],
    "mlp": BODIES["mlp"],
    "leaky": ("Linear 6 7, LeakyReLU, Linear 7 5, GELU, Linear 5 K", (6,)),
    "norms": (
        "Conv2d 1 4 3, GroupNorm 2 4, ReLU, MaxPool2d 2, Flatten, LayerNorm 16, "
        "Linear 16 K",
        IMAGE,
    ),
}


def made(name, dtype=F64):
    """A net with the layers before its head by the kernels."""
    words, shape = MODELS[name]
    net = Net(body(words).to(dtype))
    return net, find_body(net, compile_chain(net, shape), shape)


def contrast(net, row, x, y, extra):
    """A loss of features and scores, of a second model, and of the row itself."""
    z, scores = net.features_and_scores(row, x)
    with net.as_reference():
        other = net.features(extra["other"], x)
    near = F.cosine_similarity(z, other, dim=-1).mean()
    return net.batch_loss(scores, y) - near + 0.1 * row.square().sum()


def two_models(net, row, x, y, extra):
    """A loss of two models whose rows depend on one another."""
    mixed = 0.3 * row + 0.7 * extra["other"]
    return net.loss(row, x, y) + net.loss(mixed * row.detach().cos(), x, y)


def head_alone(net, row, x, y, extra):
    """A loss that no layer before the head has a part in."""
    return net.head(row, extra["features"]).square().mean()


LOSSES = (None, contrast, two_models, head_alone)


@given(
    st.sampled_from([*MODELS]),
    st.sampled_from(LOSSES),
    st.sampled_from([1, 2, 19, 20, 33, 64, 130]),
    st.sampled_from([F32, F64]),
    st.integers(0, 99),
)
def test_losses_and_gradients_are_the_modules(name, loss, n, dtype, seed):
    net, by_kernels = made(name, dtype)
    gen = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=gen, dtype=F64).to(dtype)

    x = drawn(1, n, *MODELS[name][1])
    y = torch.randint(0, 4, (1, n), generator=gen)
    rows = net.w0 + 0.3 * drawn(1, net.size)
    other = net.w0 + 0.3 * drawn(1, net.size)
    extra = {"other": other, "features": drawn(1, n, net.num_features)}
    rest = (net, rows, x, y, net.b0[None], torch.zeros(1, dtype=torch.int64))
    how = {"vmap": False, "train": True, "objective_loss": loss, "extra": extra}
    want = gradients(*rest, **how)
    got = gradients(*rest, **how, body=by_kernels)

    bound = {F64: 1e-11, F32: 1e-4}[dtype]
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_gradients_are_the_modules(name):
    net, by_kernels = made(name)
    x = torch.randn(5, *MODELS[name][1], dtype=F64)
    found = []
    for layers in (None, by_kernels):
        row = net.w0.clone().requires_grad_()
        with forward_context(train=True, single_client=True, body=layers):
            loss = net(row, x).square().mean()
        (slope,) = torch.autograd.grad(loss, row, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), row)[0])

    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def by_func_grad(net, row, x):
    return torch.func.grad(lambda w: net(w, x).square().mean())(row)


def by_func_vmap(net, row, x):
    return torch.vmap(lambda sample: net(row, sample[None])[0])(x)


def by_forward_mode(net, row, x):
    return torch.func.jvp(lambda w: net(w, x), (row,), (row,))[1]


def by_dual_numbers(net, row, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(row, row)
        return torch.autograd.forward_ad.unpack_dual(net(dual, x)).tangent


def of_half_precision(net, row, x):
    return net(row.bfloat16(), x.bfloat16())


def in_the_samples(net, row, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(net(row, x).square().sum(), x)[0]


@pytest.mark.parametrize(
    "use",
    [
        by_func_grad,
        by_func_vmap,
        by_forward_mode,
        by_dual_numbers,
        of_half_precision,
        in_the_samples,
    ],
)
def test_what_the_kernels_cannot_do_the_module_does(use):
    net, by_kernels = made("conv")
    x = torch.randn(5, *IMAGE, dtype=F64)
    found = []
    for layers in (None, by_kernels):
        with forward_context(train=True, single_client=True, body=layers):
            found.append(use(net, net.w0, x))

    assert torch.equal(*found)


def test_a_batch_that_the_module_refuses_is_refused():
    net, by_kernels = made("mlp")
    with forward_context(train=True, single_client=True, body=by_kernels):
        assert net(net.w0, torch.ones(0, 6, dtype=F64)).shape == (0, 4)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(net.w0, torch.ones(2, 3, 2, dtype=F64))
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            net(net.w0, torch.ones(2, 6))


def test_a_row_of_another_length_is_refused():
    net, by_kernels = made("conv")
    longer = torch.cat([net.w0, net.w0[:3]])
    x = torch.ones(2, *IMAGE, dtype=F64)
    for use in (net, net.features, net.features_and_scores):
        with (
            forward_context(train=True, single_client=True, body=by_kernels),
            pytest.raises(ValueError, match=r"^row: expected \d+ parameters"),
        ):
            use(longer, x)


def test_rows_and_samples_may_lie_anywhere_in_memory():
    net, by_kernels = made("conv")
    rows = net.w0[:, None].repeat(1, 3)
    x = torch.randn(*IMAGE, 5, dtype=F64).movedim(-1, 0)
    found = []
    for layers in (None, by_kernels):
        row = rows[:, 1].requires_grad_()
        assert row.stride() == (3,) and not x.is_contiguous()
        with forward_context(train=True, single_client=True, body=layers):
            loss = net(row, x).square().mean()
        (slope,) = torch.autograd.grad(loss, row, create_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), row)
        found.append(torch.cat([slope.detach(), again]))

    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class HeadFirst(nn.Module):
    """A model whose head is not its last layer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.head(x)))


@pytest.mark.parametrize(
    "model, shape",
    [
        (body(BODIES["linear"][0]), (6,)),
        (body(BODIES["dropout"][0]), (6,)),
        (body(BODIES["batch norm"][0]), (6,)),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 4)), IMAGE),
        (HeadFirst(), (6,)),
    ],
)
def test_what_is_no_body(model, shape):
    net = Net(model)
    assert find_body(net, compile_chain(net, shape), shape) is None


def lenet():
    return model_for("lenet5", (1, 28, 28), 4)


@pytest.mark.deep("it takes a second")
def test_a_loop_has_a_body_where_there_is_a_chain():
    data = images((7, 20), (1, 28, 28))
    has_body = {}
    for engine in ("auto", "chain", "loop"):
        found = make_context(Net(lenet), data, Training(), engine=engine).engine
        has_body[engine] = found.body is not None
    assert has_body == {"auto": True, "chain": True, "loop": False}
    mlp = Net(body(BODIES["mlp"][0]))
    small = make_context(mlp, images((7, 20), (6,)), Training()).engine
    assert small.kind == "chain" and small.autograd == "vmap" and small.body is None


@pytest.mark.deep("it takes a second")
def test_a_wrong_body_is_found_told_and_not_used(monkeypatch):
    right = bodies.chain_grad
    monkeypatch.setattr(bodies, "chain_grad", lambda *a: (1.001 * right(*a)[0], 0, 0))
    data = images((7, 20), (1, 28, 28))
    said = "the chain found for the layers before the head is not the model: its grad"
    with pytest.warns(UserWarning, match=f"^pflcore: {said}"):
        engine = make_context(Net(lenet), data, Training()).engine
    assert engine.chain is not None and engine.body is None


def test_features_of_a_diverged_model_are_the_modules():
    """Which sums are infinite and which are NaN depends on the order of their terms."""
    data = images((7, 20), (1, 28, 28))
    found = []
    for engine in ("chain", "loop"):
        torch.manual_seed(0)
        clients = at_work(make_setting(Net(lenet), data, Training(), engine=engine))
        gen = torch.Generator().manual_seed(1)
        rows = torch.randn(2, clients.net.size, generator=gen) * 1e38
        found.append(clients.features(rows)[0])
        assert (clients.context.engine.body is None) == (engine == "loop")

    assert not found[0].isfinite().all()
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize("algorithm", ["fedproto", "moon", "gpfl", "knn_per", "apfl"])
def test_a_run_by_the_kernels_is_the_run_of_the_module(algorithm, monkeypatch):
    data = images((7, 20, 31), (1, 28, 28))
    calls = []
    right = bodies.chain_eval
    monkeypatch.setattr(bodies, "chain_eval", lambda *a: calls.append(1) or right(*a))
    found = []
    for engine in ("auto", "loop"):
        torch.manual_seed(0)
        run = played(lenet(), data, engine, rounds=2, algorithm=algorithm)
        run.run()
        loss = pflcore.evaluate(run.config, run.state, "train")["loss"]
        found.append([*run.state.server.values(), loss])
        assert bool(calls) == (engine == "auto")
        calls.clear()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
