"""Models that are views of rows, and the memory that a round needs."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from parts.memory import in_a_process, resident
from small import layers
from torch import nn
from ugly import randn

from pflcore import aggregate, feddwa_weights, pack, pairwise_sqdist, unpack

SHAPES = st.lists(
    st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4
)


def states(shapes, dtype=torch.float64):
    """State dicts of three clients."""
    models = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        model = {}
        for k, shape in enumerate([*shapes, (2,)]):
            model[str(k)] = torch.randn(shape, generator=generator).to(dtype)
        models.append(model)
    return models


@given(shapes=SHAPES, gap=st.integers(0, 2))
def test_views_are_equal_to_copies_and_follow_the_rows(shapes, gap):
    packed, form = pack(states(shapes))
    rows = nn.functional.pad(packed, (0, gap))[:, : packed.shape[1]]
    copies = unpack(rows, form)

    views = unpack(rows, form, copy=False)

    for copied, viewed in zip(copies, views, strict=True):
        for name, tensor in copied.items():
            assert torch.equal(viewed[name], tensor)
    rows.zero_()
    assert not any(t.any() for model in views for t in model.values())
    assert copies[0][str(len(shapes))].all()


def test_arrays_are_views_too():
    uploads = [[np.ones((2, 3)), np.arange(3.0)] for _ in range(2)]
    rows, form = pack(uploads)
    views = unpack(rows, form, copy=False)
    views[1][0][:] = 7
    assert rows.tolist() == [[1] * 6 + [0, 1, 2], [7] * 6 + [0, 1, 2]]


def test_what_cannot_be_a_view_is_a_copy():
    uploads = states([(3, 2)], torch.float32)
    rows, form = pack(uploads)
    for other in (rows.double(), rows.T.contiguous().T):
        views = unpack(other, form, copy=False)
        assert views[1]["0"].dtype == torch.float32
        assert torch.equal(views[1]["0"], uploads[1]["0"])


def net(seed):
    torch.manual_seed(seed)
    model = layers("Linear 4 3, BatchNorm1d 3, Linear 3 2")
    model[0].bias.requires_grad_(False)
    model[1].running_mean.fill_(seed)
    return model


def test_a_module_of_views_trains_in_its_row():
    uploads = [net(1), net(2)]
    rows, form = pack(uploads)
    before = rows.clone()

    models = unpack(rows, form, copy=False)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    models[1](torch.randn(5, 4)).sum().backward()
    optimizer.step()

    trained = torch.nn.utils.parameters_to_vector(models[1].parameters())
    assert torch.equal(rows[0], before[0])
    assert torch.equal(rows[1], trained)
    assert not torch.equal(rows[1], before[1])
    assert not models[1][0].bias.requires_grad
    assert models[1][1].running_mean is not uploads[1][1].running_mean
    assert torch.equal(pack(uploads).rows, before)


def test_shared_parameters_stay_shared():
    def tied():
        model = layers("Linear 3 3, Linear 3 3")
        model[1].weight = model[0].weight
        return model

    rows, form = pack([tied(), tied()])
    (model, _) = unpack(rows, form, copy=False)
    assert model[1].weight is model[0].weight


def test_statistics_that_are_averaged_come_with_views():
    uploads = [net(1), net(3)]
    rows, form = pack(uploads, batch_norm="average")
    for model in unpack(rows, form, copy=False):
        assert model[1].running_mean.tolist() == [2.0] * 3


def mix_in_place(rows, near):
    """Mixes rows in their own memory, some columns at a time."""
    for columns in rows.chunk(100, dim=1):
        columns.copy_(aggregate(columns, *near))


def test_mixing_in_place_has_the_bits_of_mixing():
    rows = randn(0, 12, 300_001).float()
    near = feddwa_weights(pairwise_sqdist(rows), 5)
    want = aggregate(rows, *near)
    mix_in_place(rows, near)
    assert torch.equal(rows, want)


N, P = 10, 4_000_000


def memory_of_a_round(way):
    """The peak of a server's round over its models' size, with the uploads in it."""
    torch.set_num_threads(1)
    small = [{"w": torch.randn(9)} for _ in range(3)]
    unpack(*pack(small))
    aggregate(pack(small).rows, *feddwa_weights(pairwise_sqdist(torch.rand(3, 9)), 2))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident()
    uploads = [{"a": torch.randn(P // 2), "b": torch.randn(P // 2)} for _ in range(N)]
    rows, form = pack(uploads)
    near = feddwa_weights(pairwise_sqdist(rows), 5)
    if way == "in place":
        mix_in_place(rows, near)
        models = unpack(rows, form, copy=False)
    else:
        mixed = aggregate(rows, *near)
        models = unpack(mixed, form, copy=way == "copies")
    assert len(models) == N
    return (resident("VmHWM") - before) / (4 * N * P)


@pytest.mark.deep("another process")
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="/proc does not tell a process's peak",
)
@pytest.mark.parametrize("way, copies", [("copies", 4), ("views", 3), ("in place", 2)])
def test_memory_of_a_round(way, copies):
    """docs/interop.md states these multiples of the models' size."""
    assert in_a_process(memory_of_a_round, way) == pytest.approx(copies, abs=0.2)
