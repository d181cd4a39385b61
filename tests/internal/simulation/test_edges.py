"""The neighbour search of kNN-Per."""

import pytest
import torch

from pflcore.algorithms.knnper import neighbours

F64 = torch.float64


@pytest.mark.parametrize("k", [1, 3, 5])
def test_ties_among_neighbours_do_not_depend_on_the_padding(k: int) -> None:
    gen = torch.Generator().manual_seed(3)
    store = torch.randint(0, 2, (40, 3), generator=gen).double()
    queries = torch.randint(0, 2, (6, 3), generator=gen).double()
    weight, near = neighbours(queries, store, 40, k)
    d = ((queries[:, None] - store) ** 2).sum(2)
    assert near.tolist() == d.sort(dim=1, stable=True).indices[:, :k].tolist()
    for padded in (64, 200, 999):
        wide = torch.cat([store, torch.zeros(padded - 40, 3, dtype=F64)])
        again = neighbours(queries, wide, 40, k)
        assert torch.equal(again[1], near) and torch.equal(again[0], weight)
