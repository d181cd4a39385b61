"""Tests of Dirichlet draws and of the index lists of a federation."""

import time

import numpy as np
import pytest
import torch
from entry_points import sentence
from places import golden
from small import equals

from pflcore.data import Federation
from pflcore.data._dirichlet import _draw_proportions, sample_counts
from pflcore.data._ragged import Ragged


@pytest.mark.deep("it takes a second")
def test_practical2_draws_like_the_released_code():
    """The draws have the same means as those of the released code.

    The golden values were measured on that code for 60,000 balanced samples. They are
    the clients that hold a class, and the share of draws that give each client 20
    samples.
    """
    assert sample_counts(np.array([[0.105, 0.2, 0.695]]), np.array([10])).tolist() == [
        [1, 2, 7]
    ]
    totals = np.full(10, 6000)
    for n, alpha, held, accepted in golden("partitions")["draws"]:
        rng = np.random.RandomState(0)
        draws = [
            sample_counts(_draw_proportions(totals, n, alpha, True, rng), totals)
            for _ in range(150)
        ]
        assert all((d.sum(1) == totals).all() for d in draws)
        assert abs(np.mean([(d > 0).sum(0).mean() for d in draws]) - held) < 0.15
        assert abs(np.mean([d.sum(0).min() >= 20 for d in draws]) - accepted) < 0.1


def test_example_of_dirichlet_is_true():
    p = np.array([[0.8, 0.2], [0.4, 0.6]])

    got = sample_counts(p, np.array([5, 5]))

    assert got.T.tolist() == [[4, 2], [1, 3]]


def test_lists_of_some_clients_and_of_slices():
    lists = [torch.arange(3), torch.arange(0), torch.tensor([7, 5])]
    ragged = Ragged.from_lists(lists)
    equals([*ragged], lists)
    for i in (0, 1, -1):
        equals(ragged[i], lists[i])
    equals([*ragged.take(torch.tensor([2, 0, 1]))], [lists[2], *lists[:2]])
    equals([*ragged[1:]], lists[1:])
    with pytest.raises(IndexError):
        ragged[3]


def test_one_large_client_costs_nothing_for_the_others():
    size = torch.ones(100_000, dtype=torch.int64)
    # Lists that are padded to the longest would take 240 GB.
    size[0] = 300_000
    n = int(size.sum())
    began = time.process_time()
    x = torch.zeros(n, 1)
    y = torch.zeros(n, dtype=torch.int64)
    data = Federation(x, y, {"train": Ragged(torch.arange(n), size)}, 1)
    assert data.size()[0] == 300_000 and data.counts().sum() == n
    assert data.split(test=0.5, seed=100, of=None).n == 100_000
    assert time.process_time() - began < 5
    with sentence(r".*leave out the 99999 without, got \[1, 2, 3, 4, 5\]"):
        Federation(x, y, {"train": Ragged(torch.arange(300_000), size * (size > 1))})
