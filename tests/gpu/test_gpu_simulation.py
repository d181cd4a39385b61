"""Whole simulations on a GPU against the same on the CPU, and the waits inside a round."""

import warnings

import pytest
import torch
from doors import held_out
from parts.devices import FORMS, played, rounds
from small import images

from pflcore import Training
from pflcore.algorithms import ALGORITHMS

# of each family one, for the other models
DIFFERENT = ("fedavg", "scaffold", "feddwa", "apfl", "fedrod")
EACH = [(n, "MLP") for n in ALGORITHMS] + [(n, k) for n in DIFFERENT for k in FORMS if k != "MLP"]


def data(kind):
    return held_out(images((6, 9, 7), (1, 4, 4))) if kind == "convolutions" else held_out(images())


@pytest.mark.parametrize("name, kind", EACH)
def test_same_losses_as_on_the_cpu(name, kind):
    model, engine, form = FORMS[kind]
    training = Training(lr=0.1, batch_size=5, epochs=2)
    got, want = (played(name, model, data(kind), training, on, 3, engine) for on in ("cuda", "cpu"))
    assert got.setting.engine.form == form, got.setting.engine.why
    losses = (run.history.series("loss")[1] for run in (got, want))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


def waits(name, kind, epochs):
    """How often the host waits for the device in the third round."""
    model, engine, form = FORMS[kind]
    play = rounds(name, model, data(kind), "cuda", Training(0.05, 3, epochs), engine, form)
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
    "name, kind", [(n, k) for n, k in EACH if n not in ("factorized_waffle", "fedala")]
)
def test_local_steps_do_not_wait(name, kind):
    """A round may look at a few numbers (who sent something that is not finite), but not more often
    when there are more local steps."""
    assert waits(name, kind, 1) == waits(name, kind, 4)
