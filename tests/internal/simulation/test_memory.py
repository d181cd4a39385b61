"""Tests of runs that find too little memory.

The memory is that of a GPU or of the host. The run ends with an error of one sentence.
The record is whole, and the state is that of the last round.
"""

import pytest
import torch
from parts.memory import fails
from parts.user import simulation
from pretend_gpu import pretended_gpu
from small import images, layers, tiny_model
from torch import nn

from pflcore import Net, Training, ops
from pflcore.train import _memory as memory
from pflcore.train._clients import Clients


def test_other_errors_are_not_it():
    text = "out of memory of a text"
    for error in (
        RuntimeError("expected 3 rows"),
        ValueError(text),
        KeyboardInterrupt(),
    ):
        assert not memory.is_out_of_memory(error)


def test_what_the_card_has_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    said = memory.out_of_memory_text("in round 7", 5 << 30, "20.00 MiB", "cuda:1")
    assert said == (
        "Out of memory in round 7, when 20.00 MiB more were asked for: the run needs "
        "about 5.0 GiB beside its data, and cuda:1 has 80.0 GiB; let fewer clients "
        "take part in a round (participation), or make the batches (batch_size) or the "
        "model smaller."
    )
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", fails(None, 1, RuntimeError("no driver"))
    )
    assert "beside its data; let" in memory.out_of_memory_text(
        "in round 7", 5 << 30, "", "cuda:1"
    )


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


# what a training step keeps ---------------------------------------------------


def batch_of(count, features=6):
    gen = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (count,), generator=gen)
    return torch.randn(count, features, generator=gen), y


def kept_by(model, count, place=None):
    net = Net(model)
    given = batch_of(count)
    if place is not None:
        net, given = net.to(place), [t.to(place) for t in given]
    return memory.activation_bytes(net, *given)


# For a sample these are the hidden layer's 5 numbers and the 4 scores. For a batch it
# is the sum of weights.
@pytest.mark.parametrize("count", [1, 2, 50])
def test_a_step_keeps_what_lies_between_its_layers(count):
    assert kept_by(tiny_model(), count) == 4 * (9 * count + 1)


def test_frozen_weights_are_not_what_a_step_keeps():
    def model():
        made = layers("Linear 6 300, Linear 300 5, Tanh, Linear 5 4")
        made[1].weight.requires_grad_(False)
        return made

    # The input of the model is not needed.
    assert kept_by(model, 2) == 4 * (9 * 2 + 1)


def test_what_is_saved_twice_is_kept_once():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            hidden = self.layer(x)
            return hidden * hidden + hidden.view(-1, 2, 2).square().flatten(1)

    assert kept_by(Squares, 3) == 4 * (8 * 3 + 1)


def test_a_card_keeps_what_a_cpu_keeps():
    with pretended_gpu() as gpu:
        got = kept_by(tiny_model(), 7, gpu)
    assert got == kept_by(tiny_model(), 7)


CONVOLUTIONS = "Conv2d 1 3 3 1 1, BatchNorm2d 3, ReLU, Flatten, Linear 300 4"


def needed(engine, **options):
    data = images((60,) * 8, (1, 10, 10))
    training = Training(batch_size=options.pop("batch", 50))
    hardware = {"engine": engine, "workers": 2, **options}
    return simulation(
        data=data, model=layers(CONVOLUTIONS), training=training, **hardware
    )


@pytest.mark.parametrize(
    "engine, options, clients",
    [("vmap", {}, 8), ("vmap", {"clients_per_block": 3}, 6), ("loop", {}, 2)],
    ids=["vmap", "blocks", "loop"],
)
def test_the_estimate_counts_the_batches_of_those_who_train_at_once(
    engine, options, clients
):
    run = needed(engine, **options)
    less = needed(engine, batch=10, **options)
    each = run.context.sample_activation_bytes
    assert each > 300 * 4
    assert run.peak_bytes() - less.peak_bytes() == clients * 40 * each


def test_a_batch_is_at_most_the_largest_client():
    assert (
        needed("vmap", batch=500).peak_bytes() == needed("vmap", batch=60).peak_bytes()
    )


def test_a_run_whose_batches_do_not_fit_is_refused(monkeypatch):
    peak = needed("vmap").peak_bytes()
    monkeypatch.setattr(memory, "capacity", lambda device: peak - 1)
    with pytest.raises(
        memory.RunTooLarge, match=r"beside its data, and cpu .* \(batch_size\)"
    ):
        needed("vmap", storage="memory")
    needed("vmap", batch=10, storage="memory")
    needed("vmap", clients_per_block=3, storage="memory")


@pytest.mark.parametrize("engine, block", [("vmap", 64), ("loop", None)])
def test_what_is_computed_at_once_can_be_less(monkeypatch, engine, block):
    """The error names the size of the blocks as a remedy.

    This holds before a run and during it, where clients are computed in blocks.
    """
    words = (
        f"compute fewer clients at once (clients_per_block, here {block}), let fewer"
    )
    run = needed(engine)
    monkeypatch.setattr(Clients, "fit", fails(Clients.fit, 1, MemoryError()))
    with pytest.warns(RuntimeWarning):
        stopped = run.run().stopped
    assert (words in stopped) == (block is not None)
    monkeypatch.setattr(memory, "capacity", lambda device: 1)
    with pytest.raises(memory.RunTooLarge) as refused:
        needed(engine, storage="memory")
    assert (words in str(refused.value)) == (block is not None)


def test_captured_steps_count_twice():
    """A graph has memory of its own.

    Steps that are not captured need their memory, too.
    """
    with pretended_gpu() as gpu:
        runs = [needed("vmap", device=str(gpu), graphs=g) for g in (True, False)]
    captured, eager = (run.peak_bytes() for run in runs)
    kept = 8 * 50 * runs[0].context.sample_activation_bytes
    assert captured - eager == kept + 2 * 8 * runs[0].context.net.w0.nbytes
