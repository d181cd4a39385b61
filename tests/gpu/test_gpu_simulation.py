"""Whole simulations on a GPU against the same on the CPU, and the waits inside a round."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import images, make_setting, tiny_model

from pflcore import Federation, Net, Simulation, Training, step
from pflcore.algorithms import ALGORITHMS
from pflcore.simulation.round import begin


def data() -> Federation:
    whole = images((7, 20, 31))  # every fifth sample is for validation
    parts = [(rows[::5], torch.cat([rows[i::5] for i in range(1, 5)])) for rows in whole.index["train"]]
    index = {"train": [t for _, t in parts], "val": [v for v, _ in parts], "test": whole.index["test"]}
    return replace(whole, index=index)


def names(*but: str) -> list[Any]:
    """All algorithms; those that see every branch are in the quick suite, too."""
    quick = ("fedavg", "scaffold", "ditto", "apfl", "waffle", "factorized_waffle")
    deep = pytest.mark.deep("a sweep over all algorithms")
    return [pytest.param(n, marks=() if n in quick else deep) for n in ALGORITHMS if n not in but]


def play(name: str, device: str, training: Training) -> tuple[torch.Tensor, float]:
    run = Simulation(name, tiny_model(), data(), training, rounds=3, engine="vmap", device=device)
    history = run.run()
    assert history.stopped is None
    return history.series("loss")[1], max(history.series("accuracy")[1].flatten().tolist())


@pytest.mark.parametrize("name", names())
def test_same_losses_as_on_the_cpu(name: str) -> None:
    training = Training(lr=0.1, batch_size=5, epochs=2)
    torch.testing.assert_close(play(name, "cuda", training)[0], play(name, "cpu", training)[0], rtol=1e-3, atol=1e-3)


def waits(name: str, epochs: int) -> int:
    """How often the host waits for the device in the third round."""
    federation = data().to("cuda")
    algorithm = ALGORITHMS[name]()
    net = algorithm.prepare(Net(tiny_model())).to("cuda")
    setting = make_setting(net, federation, Training(lr=0.1, batch_size=5, epochs=epochs), 3, engine="vmap", workers=None)
    state = begin(algorithm, net, federation.n)
    for _ in range(2):
        state, _ = step(algorithm, state, setting, torch.arange(federation.n))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(algorithm, state, setting, torch.arange(federation.n))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


# FactorizedWaffle draws its factors anew in every step, on the host; FedALA learns its weights until the losses stand still
@pytest.mark.parametrize("name", names("factorized_waffle", "fedala"))
def test_local_steps_do_not_wait(name: str) -> None:
    """A round may look at a few numbers (who sent something that is not finite), but not more often when there are more local steps."""
    assert waits(name, 1) == waits(name, 4)
