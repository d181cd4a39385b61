"""`device="cuda"` without a GPU: every algorithm on a pretended one (tests/pretend_gpu.py) that
refuses to mix devices and counts waits."""

from collections import Counter

import pytest
import torch
from doors import held_out, sentence
from parts.devices import FORMS, convolved, on_two_devices, played, rounds
from parts.user import simulation
from pretend_gpu import contexts, pretended_gpu, unrepeated, waits
from small import images, swept, tiny_model
from torch import nn

from pflcore import Training
from pflcore.algorithms import ALGORITHMS

# one of each family, for the slower model
DIFFERENT = ("fedavg", "scaffold", "feddwa", "hypcluster", "apfl", "fedrod", "knnper")


def data(convolutions):
    return held_out(images((6, 9, 7), (1, 4, 4) if convolutions else (6,)))


def play(name, kind, device):
    model = convolved if kind == "convolutions" else tiny_model()
    training, engine = Training(0.05, batch_size=5), "vmap" if kind == "vmap" else "auto"
    return played(name, model, data(kind == "convolutions"), training, device, 2, engine)


KINDS = ("convolutions", "vmap")  # beside a chain


@pytest.mark.parametrize("name", [*swept(), *(f"{n}, {k}" for k in KINDS for n in DIFFERENT)])
def test_everything_is_on_the_device(name):
    name, _, kind = name.partition(", ")
    want = play(name, kind, "cpu")
    with pretended_gpu() as gpu:
        got = play(name, kind, gpu)
        size, state = got.setting.net.size, got.state
        tensors = {f"g.{k}": v for k, v in state.server.items()} | state.clients
        rows = {k: v.device.type for k, v in tensors.items() if v.dim() and v.shape[-1] == size}
        assert set(rows.values()) <= {"cuda"}, f"rows of parameters that left the device: {rows}"
        assert not unrepeated
    assert got.setting.engine.form == ("vmap" if kind else "chain"), got.setting.engine.why
    for key in ("loss", "accuracy"):
        values = (x.history.series(key)[1] for x in (got, want))
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_second_card_is_the_only_one_that_works(name):
    """What asks for "cuda" without a number, or pins memory, would begin to work on the first."""
    with pretended_gpu(1, cards=2) as gpu:
        run = play(name, "", gpu)
        assert contexts == {1}
    assert run.setting.engine.form == "chain"


def waits_of_a_round(name, kind, epochs, gpu, optimizer="sgd"):
    model, engine, form = FORMS[kind]
    training = Training(0.05, 3, epochs, local_optimizer=optimizer)
    play = rounds(name, model, data(model is convolved), gpu, training, engine, form)
    next(play)
    waits.clear()
    next(play)
    return Counter(waits)


FEW = ("fedavg", "scaffold", "apfl")


@pytest.mark.parametrize("model", FORMS)
def test_a_round_of_fedavg_hardly_waits_for_the_device(model):
    assert_few_waits("fedavg", model)


@pytest.mark.deep("all algorithms, under a profiler of waits")
@pytest.mark.parametrize(
    "name, model",
    # FactorizedWaffle draws its factors anew in every step, on the host; FedALA learns its weights
    # until the losses stand still
    [(n, "MLP") for n in ALGORITHMS if n not in ("factorized_waffle", "fedala")]
    + [(n, m) for n in FEW for m in FORMS if m != "MLP"],
)
def test_a_round_hardly_waits_for_the_device(name, model):
    assert_few_waits(name, model)


def test_adamw_hardly_waits_for_the_device():
    assert_few_waits("fedavg", "MLP", "adamw")


def assert_few_waits(name, model, optimizer="sgd"):
    """The host looks at a few numbers (who sent something that is not finite, how far each update
    goes, the losses, whether the server's state is finite, small tables of the server's): once
    each, however many the local steps. On its way to the device nothing waits."""
    with pretended_gpu() as gpu:
        one, three = (waits_of_a_round(name, model, n, gpu, optimizer) for n in (1, 3))
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


@pytest.mark.parametrize(
    "name, cards, words",
    [
        ("cuda:7", 1, "'cuda' or 'cuda:0', as torch sees 1 GPU here, got 'cuda:7'"),
        ("cuda:2", 2, "'cuda' or 'cuda:0' to 'cuda:1', as torch sees 2 GPUs here, got 'cuda:2'"),
        ("cuda:one", 1, "'cuda' or 'cuda:0', as torch sees 1 GPU here, got 'cuda:one'"),
    ],
)
def test_a_card_that_is_not_there_is_said_in_a_sentence(name, cards, words):
    with pretended_gpu(cards=cards), sentence(f"device: expected {words}"):
        simulation(device=name)


class Noisy(nn.Module):
    """It draws from torch's global generator."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x + torch.rand_like(x))


def test_a_model_that_draws_is_said_in_a_sentence_on_any_card():
    with (
        pretended_gpu(1, cards=2) as gpu,
        sentence("model: its forward pass draws from torch's global generator"),
    ):
        simulation(model=Noisy, device=str(gpu))
