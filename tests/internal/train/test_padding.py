"""Tests of batches that vmap pads on a GPU, in training and in evaluation.

So a step has few shapes, and a block is evaluated at once. Padding is no sample: it
changes last digits alone, and only in models that compute the scores of each sample by
itself.
"""

from dataclasses import replace
from unittest.mock import patch

import pretend_graph
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_gpu import Pretend, pretended_gpu
from small import images, layers
from torch import nn

from pflcore import Clients, Federation, Net, Training
from pflcore.nn import Dropout
from pflcore.train import _evaluate
from pflcore.train._engines import Engine, Objective, pad_minibatches
from pflcore.train._graphs import MAX_GRAPHS, GradientGraphs
from pflcore.train._schedule import assign_blocks
from pflcore.train._select_engine import make_context

BATCH = 5
PADS = Engine("vmap", pads=True)
PLAIN = Engine("vmap")


class Largest(nn.Module):
    """A layer that divides by the largest number of the batch."""

    def forward(self, x):
        return x / x.abs().amax()


class Centred(nn.Module):
    """A layer that subtracts the batch's mean."""

    def forward(self, x):
        return x - x.mean(0)


class Steps(nn.Module):
    """Scores of two steps of a sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(29, 6)

    def forward(self, x):
        return self.layer(x).view(-1, 3, 2)


def dropped():
    return nn.Sequential(nn.Linear(29, 7), nn.Tanh(), Dropout(0.5), nn.Linear(7, 3))


MODELS = {
    "dropout": dropped,
    "largest": lambda: nn.Sequential(Largest(), dropped()),
    "centred": lambda: nn.Sequential(Centred(), dropped()),
    "batch norm": lambda: layers("Linear 29 7, BatchNorm1d 7, Linear 7 3"),
    "steps": Steps,
}


def net_of(model, **options):
    return Net(lambda: MODELS[model]().double(), **options)


def data_of(sizes, last=23):
    """Clients of these sizes, which may be 0, and one of the size `last`.

    Each has two test samples.
    """
    sizes = [*sizes, last]
    parts = sizes + [2] * len(sizes)
    gen = torch.Generator().manual_seed(4)
    x = torch.randn(sum(parts), 29, generator=gen, dtype=torch.float64)
    y = torch.randint(0, 3, (sum(parts),), generator=gen)
    index = torch.arange(len(x)).split(parts)
    splits = {"train": list(index[: len(sizes)]), "test": list(index[len(sizes) :])}
    return Federation(x, y, splits, 3)


@pytest.fixture(scope="module")
def context():
    """A context on the CPU, whose engine and data tests replace."""
    return make_context(net_of("largest"), data_of(()), Training(0.1, BATCH, 2), "vmap")


def fitted(context, **changes):
    """The training of all clients, with other models of each."""
    context = replace(context, **changes)
    count = context.data.n
    rows = context.net.w0 * torch.arange(1, 1 + count).to(context.net.w0)[:, None]
    buffers = context.net.b0.repeat(count, 1)
    return Clients(context, torch.arange(count), 1, buffers).fit(rows, mean_grad=True)


def assert_close(got, want):
    for name in ("w", "grad", "loss", "steps"):
        a, b = real(getattr(got, name)), real(getattr(want, name))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


def real(t):
    return t.real_ if isinstance(t, Pretend) else t


SIZES = st.lists(st.integers(0, 23), min_size=1, max_size=7)
WHOLE_SIZES = st.lists(st.sampled_from([0, 5, 10, 20]), min_size=1, max_size=7)


@given(SIZES, st.booleans(), st.booleans())
def test_padding_changes_last_digits_alone(context, sizes, drop_last, reshuffle):
    how = {"drop_last": drop_last, "reshuffle": reshuffle}
    training = Training(0.1, BATCH, 2, momentum=0.9, clip_grad=1.0, **how)
    options = {"data": data_of(sizes), "training": training}
    got = fitted(context, engine=PADS, **options)
    want = fitted(context, engine=PLAIN, **options)

    assert_close(got, want)


@given(WHOLE_SIZES)
def test_steps_without_padding_have_equal_bits(context, sizes):
    data = data_of(sizes, last=BATCH)
    got = fitted(context, engine=PADS, data=data)
    want = fitted(context, engine=PLAIN, data=data)

    assert torch.equal(got.w, want.w)
    assert torch.equal(got.loss.nan_to_num(), want.loss.nan_to_num())


@pytest.mark.deep("a pretended GPU is slow")
@settings(max_examples=8)
@given(SIZES)
def test_replayed_padding_has_the_bits_of_eager_padding(context, sizes):
    want = fitted(context, engine=PADS, data=data_of(sizes))
    with pretended_gpu() as gpu:
        graphs = GradientGraphs(gpu, capture_after_steps=0)
        parts = {"net": context.net.to(gpu), "data": data_of(sizes).to(gpu)}
        for _ in range(2):
            got = fitted(context, engine=PADS, graphs=graphs, **parts)

    assert graphs.replays > 0
    assert torch.equal(real(got.w), want.w)


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("sizes", [range(1, 41), (20, 20, 20, 100)])
def test_clients_of_many_sizes_share_shapes(context, sizes):
    steps = -(-max(sizes) // BATCH) * 2
    with pretended_gpu() as gpu:
        graphs = GradientGraphs(gpu, capture_after_steps=0)
        parts = {"net": context.net.to(gpu), "data": data_of(sizes).to(gpu)}
        fitted(context, engine=PADS, graphs=graphs, **parts)
        before = graphs.replays
        fitted(context, engine=PADS, graphs=graphs, **parts)

    assert graphs.replays - before == steps
    assert len(pretend_graph.captured) <= min(steps // 2, MAX_GRAPHS)


def test_padding_takes_no_part_in_augmentation():
    """The draws of the samples stay, and a function sees no padding."""

    def noisy(x, generator):
        seen.append(len(x))
        return x + torch.randn(x.shape, generator=generator, dtype=x.dtype)

    seen = []
    training = Training(0.1, BATCH, 2, augment=noisy)
    context = make_context(net_of("dropout"), data_of((3, 9)), training, "vmap")
    seen.clear()
    got = fitted(context, engine=PADS)
    with_padding = sorted(seen)
    seen.clear()
    want = fitted(context, engine=PLAIN)

    assert with_padding == sorted(seen)
    assert_close(got, want)


def test_padding_repeats_a_sample_without_a_label():
    x, y = torch.arange(8.0).view(2, 4, 1), torch.arange(8).view(2, 4)
    x, y = pad_minibatches(x, y, torch.tensor([4, 2]))

    assert x[..., 0].tolist() == [[0, 1, 2, 3], [4, 5, 4, 4]]
    assert y.tolist() == [[0, 1, 2, 3], [4, 5, -100, -100]]


# evaluation -------------------------------------------------------------------

EVALUATES = Engine("vmap", evaluates=True)


def evaluated(context, is_common, **changes):
    """Loss and accuracy of all clients, with one model or with other models of each."""
    context = replace(context, **changes)
    count = context.data.n
    factors = torch.ones(count) if is_common else torch.arange(1, 1 + count)
    rows = context.net.w0 * factors.to(context.net.w0)[:, None]
    if is_common:
        rows = context.net.w0.expand(count, -1)
    buffers = context.net.b0.repeat(count, 1)
    clients = Clients(context, torch.arange(count), 1, buffers)
    return clients.evaluate({"w": rows}, "train")


def assert_equal_values(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(real(a), real(b), rtol=1e-9, atol=0, equal_nan=True)


@given(SIZES, st.booleans(), st.integers(1, 9))
def test_blocks_are_evaluated_as_their_clients(context, sizes, is_common, block):
    with patch.object(_evaluate, "EVAL_BATCH", 8):
        options = {"data": data_of(sizes), "clients_per_block": block}
        got = evaluated(context, is_common, engine=EVALUATES, **options)
        want = evaluated(context, is_common, engine=PLAIN, **options)

    assert_equal_values(got, want)


def test_blocks_evaluated_apart_have_the_bits_of_the_whole(context):
    context = replace(context, engine=EVALUATES, clients_per_block=3)
    data = data_of((9, 3, 0, 23, 14, 1, 6, 8))
    context = replace(context, data=data)
    rows = context.net.w0 * torch.arange(1, 1 + data.n).double()[:, None]
    block = assign_blocks(context, torch.arange(data.n))
    buffers = context.net.b0.repeat(data.n, 1)
    whole = Clients(context, torch.arange(data.n), 1, buffers, block)
    want = whole.evaluate({"w": rows}, "train")
    for number in block.unique():
        part = block == number
        got = whole.take(part).evaluate({"w": rows[part]}, "train")
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.nan_to_num(), b[part].nan_to_num())


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("model", ["dropout", "batch norm"])
def test_a_gpu_evaluates_a_block_at_once(model):
    with pretended_gpu() as gpu:
        net, data = net_of(model).to(gpu), data_of((4, 0, 9)).to(gpu)
        context = make_context(net, data, Training(), "vmap")
        got = evaluated(context, is_common=False)
        want = evaluated(context, is_common=False, engine=PLAIN)

    assert context.engine.evaluates
    assert_equal_values(got, want)


@pytest.mark.deep("it takes a second")
def test_a_model_whose_scores_depend_on_the_batch_is_evaluated_alone():
    with pretended_gpu() as gpu:
        assert not engine_on(gpu, net_of("centred")).evaluates


# the models that are padded ---------------------------------------------------


def engine_on(device, net, data=None):
    data = data_of((9,)) if data is None else data
    return make_context(net.to(device), data.to(device), Training(), "vmap").engine


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "model, pads",
    [("dropout", True), ("largest", True), ("centred", False), ("batch norm", False)],
)
def test_the_trial_decides_which_models_are_padded(model, pads):
    with pretended_gpu() as gpu:
        assert engine_on(gpu, net_of(model)).pads == pads


@pytest.mark.deep("it takes a second")
def test_the_trial_of_a_large_model_decides_too(monkeypatch):
    monkeypatch.setattr("pflcore.train._probe.FULL_PROBE_MAX_WEIGHTS", 0)
    with pretended_gpu() as gpu:
        assert not engine_on(gpu, net_of("centred")).pads


@pytest.mark.deep("it takes a second")
def test_a_loss_that_counts_padding_is_not_padded():
    losses = ["hinge", nn.CrossEntropyLoss(label_smoothing=0.1), nn.MultiMarginLoss()]
    data = data_of((9,))
    two = Federation(data.x, data.y % 2, {"train": data.lists("train")}, 2)
    with pretended_gpu() as gpu:
        one_score = Net(lambda: nn.Linear(29, 1).double(), losses[0])
        found = [engine_on(gpu, one_score, two).pads]
        found += [engine_on(gpu, net_of("dropout", loss=f)).pads for f in losses[1:]]

    assert found == [False, True, False]


@pytest.mark.deep("it takes a second")
def test_a_mean_over_samples_of_several_steps_is_not_padded():
    data = data_of((9,))
    labels = torch.stack([data.y, data.y], 1)
    steps = Federation(data.x, labels, {"train": list(data.lists("train"))}, 3)
    with pretended_gpu() as gpu:
        assert not engine_on(gpu, net_of("steps"), steps).pads


def test_a_cpu_pads_nothing(context):
    assert not context.engine.pads


def test_another_loss_is_not_padded():
    other = Objective(loss=lambda net, row, x, y, extra: net.loss(row, x, y))

    assert not other.engine_for(PADS).pads


def test_padded_images_have_the_gradients_of_images():
    data = images((3, 8, 6), (1, 4, 4))
    words = "Conv2d 1 4 3 1 1, GroupNorm 2 4, ReLU, MaxPool2d 2, Flatten, Linear 16 4"
    net = Net(lambda: layers(words))
    context = make_context(net, data, Training(0.1, BATCH, 2), "vmap")
    got = fitted(context, engine=PADS)
    want = fitted(context, engine=PLAIN)

    torch.testing.assert_close(got.w, want.w, rtol=1e-5, atol=1e-6)
