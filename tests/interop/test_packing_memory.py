"""Rows in a given memory, models that are views of rows, and what a round needs."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from entry_points import sentence
from hypothesis import given
from parts.memory import in_a_process, resident
from small import layers
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


def matrix(n, p, gap=0, dtype=torch.float64):
    """Memory [n, p] with `gap` columns between its rows."""
    return torch.full((n, p + gap), torch.nan, dtype=dtype)[:, :p]


@given(shapes=SHAPES, gap=st.integers(0, 2), as_array=st.booleans())
def test_rows_in_a_given_memory_are_those_in_a_new_one(shapes, gap, as_array):
    uploads = states(shapes)
    if as_array:
        uploads = [[t.numpy() for t in model.values()] for model in uploads]
    want, form = pack(uploads)
    out = matrix(*want.shape, gap)

    got, other_form = pack(uploads, out=out)

    assert got is out
    assert torch.equal(got, want)
    assert other_form.columns == form.columns


@pytest.mark.parametrize("make", [torch.from_numpy, lambda array: array])
def test_a_matrix_is_written_into_a_given_memory(make):
    uploads = make(np.arange(6.0).reshape(2, 3))
    out = matrix(2, 3)
    assert pack(uploads, out=out).rows is out
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


@given(shapes=SHAPES, gap=st.integers(0, 2))
def test_views_are_equal_to_copies_and_follow_the_rows(shapes, gap):
    uploads = states(shapes)
    rows, form = pack(uploads, out=matrix(*pack(uploads).rows.shape, gap))
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


@given(shapes=SHAPES)
def test_views_are_packed_again_without_a_copy(shapes):
    rows, form = pack(states(shapes))
    models = unpack(rows, form, copy=False)
    models[1][str(len(shapes))].fill_(7.0)
    want = rows.clone()
    version = rows._version

    got, _ = pack(models, out=rows)

    assert got is rows
    assert torch.equal(rows, want)
    assert rows._version == version  # counts the writes into the memory


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
    rows, form = pack(uploads, batch_norm="average", out=pack(uploads).rows)
    for model in unpack(rows, form, copy=False):
        assert model[1].running_mean.tolist() == [2.0] * 3


def test_memory_of_another_row_is_refused():
    rows, form = pack(states([(3,)]))
    first, second, third = unpack(rows, form, copy=False)
    want = rows.clone()
    with sentence(
        "out: expected memory of its own.*, got memory of client 0: '0'; use"
    ):
        pack([second, first, third], out=rows)
    with sentence(
        "out: expected memory of its own.*, got memory of client 1: '0'; use"
    ):
        pack([first, first, third], out=rows)
    with sentence(
        "out: expected memory of its own.*, got a part of uploads' memory; use"
    ):
        pack(rows[:2], out=rows[1:])
    assert torch.equal(rows, want)


BAD = {
    "shape": (matrix(3, 4), r"a tensor .*\[3, 4\]"),
    "dtype": (matrix(3, 5, dtype=torch.float32), "a tensor .*float32"),
    "columns": (matrix(5, 3).T, r"strides \[1, 3\]"),
    "rows": (torch.zeros(5, dtype=torch.float64).expand(3, 5), r"strides \[0, 1\]"),
    "gradient": (matrix(3, 5).requires_grad_(), "a tensor that requires grad"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("as_matrix", [False, True])
def test_memory_that_cannot_hold_the_rows_is_refused(name, as_matrix):
    out, got = BAD[name]
    uploads = states([(3,)])
    if as_matrix:
        uploads = pack(uploads).rows
    with sentence(f"out: expected .*, got {got}"):
        pack(uploads, out=out)


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
