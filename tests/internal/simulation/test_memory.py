"""Memory that runs out, on a GPU or beside it: one sentence, the record whole, the state that of
the last round."""

import pytest
import torch
from parts.memory import fails

from pflcore import ops
from pflcore.train import _memory as memory


def test_other_errors_are_not_it():
    text = "out of memory of a text"
    for error in (RuntimeError("expected 3 rows"), ValueError(text), KeyboardInterrupt()):
        assert not memory.ran_out(error)


def test_what_the_card_has_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    said = memory.sentence("in round 7", 5 << 30, "20.00 MiB", "cuda:1")
    assert said == (
        "Out of memory in round 7, when 20.00 MiB more were asked for: the run needs about 5.0 GiB "
        "beside data and activations, and cuda:1 has 80.0 GiB; let fewer clients take part in a "
        "round (participation), or make the batches (batch_size) or the model smaller."
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", fails(None, 1, RuntimeError("no driver")))
    assert "activations; let" in memory.sentence("in round 7", 5 << 30, "", "cuda:1")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.pairwise_sqdist(torch.zeros(1, 1).expand(1 << 24, 1)),
        lambda: ops.aggregate(torch.zeros(1, 1), torch.zeros(1, 1).expand(1 << 46, 1)),
        lambda: ops.aggregate(torch.zeros(16, 1).expand(16, 1 << 50), torch.ones(1, 16)),
    ],
)
def test_an_op_that_runs_out_of_memory_says_so(call):
    with pytest.raises(RuntimeError) as e:
        call()
    assert memory.ran_out(e.value) and "API call failed" not in str(e.value)
