"""The bins of numbers to predict."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pflcore.data._picture import bin_targets

targets = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-(2.0**99), 2.0**99, width=32)), min_size=1
)


@given(targets)
def test_every_target_is_counted_in_its_bin(pairs):
    owners = torch.tensor([owner for owner, _ in pairs])
    values = torch.tensor([value for _, value in pairs], dtype=torch.float64)

    counts, edges = bin_targets(values, owners, 4)

    assert counts.sum(1).tolist() == owners.bincount(minlength=4).tolist()
    assert len(edges) == counts.shape[1] + 1
    slack = 1e-6 * (1 + float(values.abs().max()))
    for owner, value in pairs:
        bins = counts[owner].nonzero()[:, 0].tolist()
        inside = [edges[k] - slack <= value <= edges[k + 1] + slack for k in bins]
        assert any(inside)
