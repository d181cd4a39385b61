"""`device="cuda"` without a GPU: every algorithm on a pretended one (tests/pretend_gpu.py) that
refuses to mix devices and counts waits."""

from collections import Counter

import pytest
import torch
from doors import held_out, sentence
from parts.devices import on_two_devices, played, rounds
from parts.user import simulation
from pretend_gpu import pretended_gpu, waits
from small import images, layers, swept, tiny_model
from torch import nn

from pflcore import Training
from pflcore.algorithms import ALGORITHMS

# one of each family, for the slower model
DIFFERENT = ("fedavg", "scaffold", "feddwa", "hypcluster", "apfl", "fedrod", "knnper")


def convolved():
    """No chain of linear layers, so that the general engine runs it."""
    return layers("Conv2d 1 3 3 1 1, BatchNorm2d 3, ReLU, MaxPool2d 2, Flatten, Linear 12 4")


def data(convolutions):
    return held_out(images((6, 9, 7), (1, 4, 4) if convolutions else (6,)))


def play(name, convolutions, device):
    model, training = convolved if convolutions else tiny_model(), Training(0.05, batch_size=5)
    return played(name, model, data(convolutions), training, device, 2)


@pytest.mark.parametrize("name", [*swept(), *(f"{n}, convolutions" for n in DIFFERENT)])
def test_everything_is_on_the_device(name):
    name, _, convolutions = name.partition(", ")
    want = play(name, convolutions, "cpu")
    with pretended_gpu() as gpu:
        got = play(name, convolutions, gpu)
        size, state = got.setting.net.size, got.state
        tensors = {f"g.{k}": v for k, v in state.server.items()} | state.clients
        rows = {k: v.device.type for k, v in tensors.items() if v.dim() and v.shape[-1] == size}
        assert set(rows.values()) <= {"cuda"}, f"rows of parameters that left the device: {rows}"
    for key in ("loss", "accuracy"):
        values = (x.history.series(key)[1] for x in (got, want))
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


def waits_of_a_round(name, model, epochs, gpu):
    play = rounds(name, model, data(model is convolved), gpu, epochs)
    next(play)
    waits.clear()
    next(play)
    return Counter(waits)


MODELS = {"MLP": tiny_model(), "linear": lambda: nn.Linear(6, 4), "convolutions": convolved}


@pytest.mark.deep("all algorithms, under a profiler of waits")
@pytest.mark.parametrize(
    "name, model",
    # FactorizedWaffle draws its factors anew in every step, on the host; FedALA learns its weights
    # until the losses stand still
    [(n, "MLP") for n in ALGORITHMS if n not in ("factorized_waffle", "fedala")]
    + [(n, m) for n in ("fedavg", "scaffold", "apfl") for m in ("linear", "convolutions")],
)
def test_a_round_hardly_waits_for_the_device(name, model):
    """The host looks at a few numbers (who sent something that is not finite, how far each update
    goes, the losses, whether the server's state is finite, small tables of the server's): once
    each, however many the local steps. On its way to the device nothing waits."""
    with pretended_gpu() as gpu:
        one, three = (waits_of_a_round(name, MODELS[model], epochs, gpu) for epochs in (1, 3))
    assert one == three, "local steps wait"
    most = {"fedavg": 4, "scaffold": 4, "feddwa_qp": 8, "mocha": 7, "l2c": 7}.get(name, 6)
    assert sum(one.values()) <= most and "to the GPU" not in one, one


def test_two_devices_in_one_op_are_refused_with_a_sentence():
    with pretended_gpu() as gpu:
        on_two_devices(gpu)


def test_no_gpu_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with sentence("device: expected 'cpu', as torch .* sees no GPU here"):
        simulation(device="cuda")
