"""A tensor whose memory is a file's is a tensor: the ops take it and write into it."""

import pytest
import torch
from ugly import randn

from pflcore import aggregate, feddwa_weights, ops, pairwise_sqdist
from pflcore.ops import nearest

N = 12
P = 67


@pytest.fixture
def rows():
    return randn(1, N, P)


@pytest.fixture
def mapped(rows, tmp_path):
    """The same rows [N, P] in a file that is mapped, and not read, into memory."""
    return file_tensor(tmp_path / "rows", rows)


def file_tensor(path, values):
    """A tensor with these values whose memory is the file's."""
    size = values.numel()
    out = torch.from_file(str(path), shared=True, size=size, dtype=values.dtype)
    return out.view(values.shape).copy_(values)


def test_distances_take_a_memory_map(rows, mapped):
    assert torch.equal(pairwise_sqdist(mapped), pairwise_sqdist(rows))


@pytest.mark.parametrize("method", ["exact", "groups"])
def test_nearest_takes_a_memory_map(rows, mapped, method):
    got = nearest(mapped, mapped, 3, method)
    want = nearest(rows, rows, 3, method)

    assert torch.equal(got.index, want.index)
    assert torch.equal(got.sqdist, want.sqdist)


@pytest.mark.parametrize("op", [ops.trimmed_mean, ops.mean_around_median])
def test_robust_means_take_a_memory_map(rows, mapped, op):
    assert torch.equal(op(mapped, 2), op(rows, 2))


def test_mixtures_are_written_into_a_memory_map(rows, mapped, tmp_path):
    near = feddwa_weights(pairwise_sqdist(rows).fill_diagonal_(torch.inf), 3)
    out = file_tensor(tmp_path / "mixed", torch.zeros_like(rows))
    want = aggregate(rows, near.weight, near.index)

    aggregate(mapped, near.weight, near.index, out=out)

    path = str(tmp_path / "mixed")
    read = torch.from_file(path, size=N * P, dtype=rows.dtype)
    assert torch.equal(read.view(N, P), want)
