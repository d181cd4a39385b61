"""Federations from one table of samples, and index lists as one flat tensor."""

import time

import pytest
import torch

from pflcore.data import Federation
from pflcore.data.ragged import Ragged


def test_clients_without_samples_are_counted_and_an_index_outside_is_said():
    x, y = torch.zeros(3, 2), torch.zeros(3)
    size = torch.tensor([1, *[0] * 7, 2])
    with pytest.raises(ValueError, match=r"leave out the 7 without, got \[1, 2, 3, 4, 5\]"):
        Federation(x, y, {"train": Ragged(torch.arange(3), size)})
    with pytest.raises(ValueError, match=r"index\['train'\]\[1\]: expected samples in 0"):
        Federation(x, y, {"train": [torch.tensor([0, 1]), torch.tensor([2, 3])]})


def test_lists_of_some_clients_and_of_slices():
    lists = [torch.arange(3), torch.arange(0), torch.tensor([7, 5])]
    ragged = Ragged.of(lists)
    assert (
        [r.tolist() for r in ragged]
        == [r.tolist() for r in lists]
        == [ragged[i].tolist() for i in range(3)]
    )
    assert [r.tolist() for r in ragged.take(torch.tensor([2, 0, 1]))] == [[7, 5], [0, 1, 2], []]
    assert [r.tolist() for r in ragged[1:]] == [[], [7, 5]] and ragged.owner().tolist() == [
        0,
        0,
        0,
        2,
        2,
    ]
    with pytest.raises(IndexError):
        ragged[3]


def test_one_large_client_costs_nothing_for_the_others():
    size = torch.ones(100_000, dtype=torch.int64)
    size[0] = 300_000  # padded, these lists would take 240 GB
    n = int(size.sum())
    began = time.process_time()
    data = Federation(
        torch.zeros(n, 1),
        torch.zeros(n, dtype=torch.int64),
        {"train": Ragged(torch.arange(n), size)},
        1,
    )
    assert (
        data.size()[0] == 300_000
        and data.counts().sum() == n
        and data.split(test=0.5, seed=100, of=None).n == 100_000
    )
    assert time.process_time() - began < 5
