"""Whole simulations on a GPU against the same on the CPU, and the waits inside a round."""

import warnings

import pytest
import torch
from doors import held_out
from parts.devices import played, rounds
from small import images, tiny_model

from pflcore import Training
from pflcore.algorithms import ALGORITHMS


def data():
    return held_out(images())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_same_losses_as_on_the_cpu(name):
    training = Training(lr=0.1, batch_size=5, epochs=2)
    both = (played(name, tiny_model(), data(), training, on, 3) for on in ("cuda", "cpu"))
    losses = (run.history.series("loss")[1] for run in both)
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


def waits(name, epochs):
    """How often the host waits for the device in the third round."""
    play = rounds(name, tiny_model(), data(), "cuda", epochs)
    next(play), next(play)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            next(play)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


# FactorizedWaffle draws its factors anew in every step, on the host; FedALA learns its weights
# until the losses stand still
@pytest.mark.parametrize(
    "name", [n for n in ALGORITHMS if n not in ("factorized_waffle", "fedala")]
)
def test_local_steps_do_not_wait(name):
    """A round may look at a few numbers (who sent something that is not finite), but not more often
    when there are more local steps."""
    assert waits(name, 1) == waits(name, 4)
