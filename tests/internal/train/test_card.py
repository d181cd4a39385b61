"""Tests of the probe and of torch's flags on a pretended GPU.

The probe runs before round 1. A GPU's float32 convolutions round to TF32. A run sets
flags of torch and puts them back.
"""

import threading

import pytest
import torch
from pretend_gpu import pretended_gpu
from torch import nn

from pflcore import Federation, Net, Training
from pflcore.train import _engines as engines
from pflcore.train import _gpu_flags as card
from pflcore.train._engines import Engine
from pflcore.train._probe import make_probe, make_probes
from pflcore.train._select_engine import make_context

CARD = torch.device("cuda")


class Block(nn.Module):
    """Two convolutions, with a convolution of the input added to their result."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(2, outputs) for _ in range(2))
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        inner = self.norms[0](self.first(x)).relu()
        return (self.around(x) + self.norms[1](self.second(inner))).relu()


class Fixed(nn.Module):
    """A layer that computes in float32 only."""

    def forward(self, x):
        return x.float()


# Inputs, outputs and stride of each block. So many blocks magnify the rounding.
DEEP = ((4, 4, 1), (4, 8, 2), (8, 8, 1), (8, 16, 2))
FLAT = ((4, 4, 2),)


def residual(blocks, *more):
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(blocks[-1][1], 10)]
    begin = [*more, nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*begin, *(Block(*sizes) for sizes in blocks), *end)


def photos(count=40):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 24, 24, generator=gen)
    y = torch.randint(0, 10, (count,), generator=gen)
    return Federation(x, y, {"train": list(torch.arange(count).split(count // 2))}, 10)


def on(gpu, blocks, *more):
    return Net(lambda: residual(blocks, *more)).to(gpu), photos().to(gpu)


@pytest.fixture
def four_clients(monkeypatch):
    """Probes of four clients: of so many the residual net shows its rounding."""
    monkeypatch.setattr("pflcore.train._probe.PROBE_SIZES", (5, 5, 2, 2))


def rounded(net, data):
    """The mismatch between vmap and the module in the model's dtype.

    The products are rounded, as is a GPU's default.
    """
    return make_probe(net, data).difference(Engine("vmap"))


@pytest.mark.deep("a residual net on a pretended GPU")
@pytest.mark.usefixtures("four_clients")
def test_a_residual_net_is_trained_by_vmap_though_convolutions_round():
    with pretended_gpu() as gpu:
        net, data = on(gpu, DEEP)
        differs = rounded(net, data)
        engine = make_context(net, data, Training()).engine
    assert differs is not None and differs.is_numeric, "nothing was rounded"
    assert engine.kind == "vmap", engine.reason


def test_float64_judges_a_large_model_on_a_card(monkeypatch):
    monkeypatch.setattr("pflcore.train._probe.FULL_PROBE_MAX_WEIGHTS", 1000)
    with pretended_gpu() as gpu:
        net, data = on(gpu, FLAT)
        found = make_probes(net, data)
    assert [t.w.dtype for t in found] == [torch.float64, torch.float32]
    assert [t.is_decisive for t in found] == [True, False]


@pytest.mark.deep("a pretended GPU is slow")
@pytest.mark.usefixtures("four_clients")
def test_a_model_of_fixed_dtype_is_judged_without_tf32():
    before = flags()
    with pretended_gpu() as gpu:
        net, data = on(gpu, DEEP, Fixed())
        differs = rounded(net, data)
        engine = make_context(net, data, Training()).engine
    assert differs is not None and differs.is_numeric, "nothing was rounded"
    assert engine.kind == "vmap", engine.reason
    assert flags() == before


class Fails(nn.Module):
    """A layer that fails under vmap in float32."""

    def forward(self, x):
        if (
            x.dtype == torch.float32
            and torch._C._functorch.maybe_current_level() is not None
        ):
            raise RuntimeError("no batching rule")
        return x * 1


@pytest.mark.deep("it takes seconds")
def test_an_engine_that_fails_in_the_models_dtype_is_not_taken():
    with pretended_gpu() as gpu:
        net, data = on(gpu, FLAT, Fails())
        engine = make_context(net, data, Training()).engine
    assert engine.kind == "loop" and "no batching rule" in engine.reason


@pytest.mark.deep("a pretended GPU is slow")
def test_a_wrong_gradient_is_refused_on_a_card_too(monkeypatch):
    """The gradient is wrong by a part that float32 would not show."""
    old = engines.gradients

    def wrong(*inputs, vmap, **options):
        losses, grads, buffers = old(*inputs, vmap=vmap, **options)
        return losses, grads * (1 + 1e-6 * vmap), buffers

    monkeypatch.setattr(engines, "gradients", wrong)
    with pretended_gpu() as gpu:
        net, data = on(gpu, FLAT)
        engine = make_context(net, data, Training()).engine
    assert engine.kind == "loop" and "off by" in engine.reason


# flags ------------------------------------------------------------------------


OWNERS = [
    flag[:2] for flag in (*card.REPEATABLE_FLAGS.flags, *card.NO_TF32_FLAGS.flags)
]


def flags():
    return [getattr(owner, name) for owner, name in OWNERS]


@pytest.fixture(params=[False, True])
def other(request):
    """Flags of torch: the defaults, or values that a user may set."""
    before = flags()
    torch.backends.cudnn.benchmark = request.param
    if request.param:
        torch.set_float32_matmul_precision("high")
    yield flags()
    # By its own name first: torch refuses to read the old name of a flag whose new name
    # says otherwise.
    torch.set_float32_matmul_precision("highest")
    for (owner, name), value in zip(OWNERS, before, strict=True):
        setattr(owner, name, value)


def test_flags_are_put_back_after_an_exception(other):
    with (
        pytest.raises(KeyError),
        card.REPEATABLE_FLAGS.set_for(CARD),
        card.NO_TF32_FLAGS.set_for(CARD),
    ):
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        assert not card.allows_tf32()
        raise KeyError
    assert flags() == other and card.allows_tf32()


def test_flags_stay_as_they_are_on_a_cpu(other):
    with card.REPEATABLE_FLAGS.set_for(torch.device("cpu")):
        assert flags() == other


def test_flags_of_two_threads_are_put_back_by_the_last(other):
    inside = threading.Event()
    leave = threading.Event()

    def work():
        with card.REPEATABLE_FLAGS.set_for(CARD):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    with card.REPEATABLE_FLAGS.set_for(CARD):
        thread.start()
        inside.wait(60)
    assert torch.backends.cudnn.deterministic, "the other thread still computes"
    leave.set()
    thread.join()
    assert flags() == other


def test_a_precision_that_was_set_by_its_new_name_is_read_and_put_back():
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is None:
        pytest.skip("torch has no such name before 2.9, which needs no GPU")
    before = conv.fp32_precision
    conv.fp32_precision = "ieee"
    try:
        assert card.allows_tf32(), "recurrent layers still may"
        with card.NO_TF32_FLAGS.set_for(CARD):
            assert not card.allows_tf32()
        assert conv.fp32_precision == "ieee"
    finally:
        conv.fp32_precision = before
