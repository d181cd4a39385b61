"""Simulations on a GPU against the CPU, and waits inside a round."""

import warnings

import pytest
import torch
from entry_points import held_out
from parts.devices import FORMS, assert_resumed, models, played, rounds
from parts.user import simulation
from small import images
from torch import nn

from pflcore import Training
from pflcore.algorithms import ALGORITHMS
from pflcore.nn import Dropout

CAPTURE_AFTER_STEPS = "pflcore.train._graphs.CAPTURE_AFTER_STEPS"
# One algorithm of each family, for the other models.
DIFFERENT = ("fedavg", "scaffold", "feddwa", "apfl", "fedrod")
EACH = [(n, "MLP") for n in ALGORITHMS] + [
    (n, k) for n in DIFFERENT for k in FORMS if k != "MLP"
]


def data(kind):
    return (
        held_out(images((6, 9, 7), (1, 4, 4)))
        if kind == "convolutions"
        else held_out(images())
    )


@pytest.mark.parametrize("name, kind", EACH)
def test_same_losses_as_on_the_cpu(name, kind):
    model, engine, form = FORMS[kind]
    training = Training(lr=0.1, batch_size=5, epochs=2)
    got, want = (
        played(name, model, data(kind), training, on, 3, engine)
        for on in ("cuda", "cpu")
    )
    assert got.config.engine.kind == form, got.config.engine.reason
    losses = (run.history.series("loss")[1] for run in (got, want))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


def waits(name, kind, epochs):
    """Number of the host's waits for the device in round 3."""
    model, engine, form = FORMS[kind]
    play = rounds(
        name, model, data(kind), "cuda", Training(0.05, 3, epochs), engine, form
    )
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


# FactorizedWaffle draws its factors on the host in every step. FedALA learns its
# weights until the losses stop changing.
@pytest.mark.parametrize(
    "name, kind", [(n, k) for n, k in EACH if n not in ("factorized_waffle", "fedala")]
)
def test_local_steps_do_not_wait(name, kind):
    """More local steps do not make the host wait more often.

    A round may read a few numbers, for example whether an upload is finite.
    """
    assert waits(name, kind, 1) == waits(name, kind, 4)


@pytest.mark.parametrize("kind", FORMS)
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(kind, tmp_path):
    """A resumed run has the bits of an uninterrupted run.

    Torch's defaults are kept: the run itself asks cuDNN for deterministic algorithms.
    """
    assert not torch.backends.cudnn.deterministic
    assert_resumed(kind, data(kind), "cuda", tmp_path)


def test_flags_are_put_back_between_rounds():
    model, engine, form = FORMS["convolutions"]
    torch.backends.cudnn.benchmark = True
    try:
        for _, _ in zip(
            range(2),
            rounds(
                "fedavg", model, data("convolutions"), "cuda", Training(), engine, form
            ),
            strict=False,
        ):
            assert (
                torch.backends.cudnn.benchmark
                and not torch.backends.cudnn.deterministic
            )
    finally:
        torch.backends.cudnn.benchmark = False


# CUDA graphs ------------------------------------------------------------------


def dropped():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Dropout(0.5), nn.Linear(5, 4))


def trained(name, model, kind, engine, graphs):
    settings = {
        "training": Training(0.05, 5, 2),
        "engine": engine,
        "device": "cuda",
        "rounds": 3,
    }
    run = simulation(name, data(kind), model=model, graphs=graphs, **settings)
    assert run.run().stopped is None
    return run


def assert_same_bits(name, model, kind, engine):
    """Asserts that a run with graphs has the bits of one without.

    With graphs, all steps but the first of each shape are replayed.
    """
    got = trained(name, model, kind, engine, True)
    want = trained(name, model, kind, engine, False)

    assert got.header()["path"]["graphs"] == "captured"
    if name in DIFFERENT:  # other algorithms may not repeat a step
        assert got.config.graphs.replays > 0
    for a, b in zip(models(got), models(want), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name, kind", EACH)
def test_graphs_change_no_bit(monkeypatch, name, kind):
    monkeypatch.setattr(CAPTURE_AFTER_STEPS, 1)
    model, engine, _ = FORMS[kind]
    assert_same_bits(name, model, kind, engine)


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_graphs_draw_dropout_anew_in_every_step(monkeypatch, engine):
    monkeypatch.setattr(CAPTURE_AFTER_STEPS, 1)
    assert_same_bits("fedavg", dropped, "MLP", engine)


def test_a_model_that_copies_from_the_host_is_trained_without_graphs():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            return self.layer(x * torch.tensor([2.0], device=x.device))

    run = trained("fedavg", Scaled, "MLP", "vmap", True)

    assert "a step makes the host wait" in run.header()["path"]["graphs"]
