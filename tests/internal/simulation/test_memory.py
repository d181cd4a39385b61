"""Tests of the errors that say that memory ran out."""

import pytest
import torch

from pflcore import ops
from pflcore.train import _memory as memory


def test_other_errors_are_not_it():
    text = "out of memory of a text"
    for error in (
        RuntimeError("expected 3 rows"),
        ValueError(text),
        KeyboardInterrupt(),
    ):
        assert not memory.is_out_of_memory(error)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.pairwise_sqdist(torch.zeros(1, 1).expand(1 << 24, 1)),
        lambda: ops.aggregate(torch.zeros(1, 1), torch.zeros(1, 1).expand(1 << 46, 1)),
        lambda: ops.aggregate(
            torch.zeros(16, 1).expand(16, 1 << 50), torch.ones(1, 16)
        ),
    ],
)
def test_an_op_that_runs_out_of_memory_says_so(call):
    with pytest.raises(RuntimeError) as e:
        call()
    assert memory.is_out_of_memory(e.value) and "API call failed" not in str(e.value)
