"""Every algorithm runs on a pretended GPU.

tests/pretend_gpu.py stands for `device="cuda"` without a GPU: it refuses to mix devices
and counts the waits of the host.
"""

from collections import Counter

import pytest
import torch
from entry_points import held_out, sentence
from parts.devices import (
    FORMS,
    assert_resumed,
    convolved,
    on_two_devices,
    played,
    rounds,
)
from parts.user import simulation
from pretend_gpu import contexts, pretended_gpu, unrepeated, waits
from small import images, swept, tiny_model, without_twins
from torch import nn

from pflcore import Clients, Hardware, Net, Training
from pflcore.algorithms import ALGORITHMS
from pflcore.interop import Client, Server

# One algorithm of each family, for the slower model.
FEW = ("fedavg", "scaffold", "apfl")
DIFFERENT = ("fedavg", "scaffold", "feddwa", "hypcluster", "apfl", "fedrod", "knnper")


def data(convolutions):
    return held_out(images((6, 9, 7), (1, 4, 4) if convolutions else (6,)))


def play(name, kind, device):
    model = convolved if kind == "convolutions" else tiny_model()
    training = Training(0.05, batch_size=5)
    engine = "vmap" if kind == "vmap" else "auto"
    return played(
        name, model, data(kind == "convolutions"), training, device, 2, engine
    )


OTHERS = [f"{n}, convolutions" for n in DIFFERENT] + [f"{n}, vmap" for n in FEW]
QUICK = ("fedavg", "scaffold", "fedavg, convolutions")


SLOW = pytest.mark.deep("a pretended GPU is slow")


def quick_and_deep(cases):
    """The cases as parameters, the first quick and the others deep."""
    return [cases[0], *(pytest.param(case, marks=SLOW) for case in cases[1:])]


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name", swept([*ALGORITHMS, *OTHERS], QUICK))
def test_everything_is_on_the_device(name):
    name, _, kind = name.partition(", ")
    want = play(name, kind, "cpu")
    with pretended_gpu() as gpu:
        got = play(name, kind, gpu)
        size = got.config.net.size
        server = {f"g.{k}": v for k, v in got.state.server.items()}
        tensors = server | got.state.clients
        rows = {
            k: v.device.type
            for k, v in tensors.items()
            if v.dim() and v.shape[-1] == size
        }
        assert set(rows.values()) <= {"cuda"}, (
            f"rows of parameters that left the device: {rows}"
        )
        assert not unrepeated
    assert got.config.engine.kind == ("vmap" if kind else "chain"), (
        got.config.engine.reason
    )
    for key in ("loss", "accuracy"):
        values = (x.history.series(key)[1] for x in (got, want))
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("name", quick_and_deep(FEW))
def test_the_second_card_is_the_only_one_that_works(name):
    """A run on the second card does not touch the first.

    Code that asks for "cuda" without a number, or that pins memory, would use the first
    card.
    """
    with pretended_gpu(1, cards=2) as gpu:
        run = play(name, "", gpu)
        assert contexts == {1}
    assert run.config.engine.kind == "chain"


def waits_of_a_round(name, kind, epochs, gpu, optimizer="sgd"):
    model, engine, form = FORMS[kind]
    training = Training(0.05, 3, epochs, local_optimizer=optimizer)
    play = rounds(name, model, data(model is convolved), gpu, training, engine, form)
    next(play)
    waits.clear()
    next(play)
    return Counter(waits)


@pytest.mark.deep("it takes seconds")
@pytest.mark.parametrize("model", quick_and_deep([*FORMS]))
def test_a_round_of_fedavg_hardly_waits_for_the_device(model):
    assert_few_waits("fedavg", model)


@pytest.mark.parametrize(
    "name, model",
    # FactorizedWaffle draws its factors in every step, on the host. FedALA learns its
    # weights until the losses no longer change.
    [
        pytest.param(n, "MLP", marks=pytest.mark.long("all ways of client and server"))
        for n in without_twins("train", "send", "update")
        if n not in ("factorized_waffle", "fedala", *FEW)
    ]
    + [pytest.param(n, m, marks=SLOW) for n in FEW for m in FORMS],
)
def test_a_round_hardly_waits_for_the_device(name, model):
    assert_few_waits(name, model)


@SLOW
def test_adamw_hardly_waits_for_the_device():
    assert_few_waits("fedavg", "MLP", "adamw")


def assert_few_waits(name, model, optimizer="sgd"):
    """Checks that a round waits rarely, and that local steps never wait.

    The host reads a few numbers, once each: which uploads are not finite, the norms of
    the updates, the losses, if the server's state is finite, and small tables of the
    server. No copy to the device waits.
    """
    with pretended_gpu() as gpu:
        one, three = (waits_of_a_round(name, model, n, gpu, optimizer) for n in (1, 3))
    assert one == three, "local steps wait"
    most = {
        "fedavg": 4,
        "scaffold": 4,
        "feddwa_qp": 8,
        "mocha": 7,
        "l2c": 7,
        "fedpac": 7,
        "fedcac": 7,
        "pfedgraph": 9,
    }.get(name, 6)
    assert sum(one.values()) <= most and "to the GPU" not in one, one


@SLOW
@pytest.mark.parametrize("kind", ["MLP", "convolutions"])
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(kind, tmp_path):
    with pretended_gpu() as gpu:
        assert_resumed(kind, data(kind == "convolutions"), gpu, tmp_path)
        assert not unrepeated


# the flags of cuDNN in a run --------------------------------------------------


def cudnn_flags():
    cudnn = torch.backends.cudnn
    return cudnn.deterministic, cudnn.benchmark


REPEATS = (True, False)  # the flags of a run: the same bits each time
USERS = (False, True)  # the flags that the user has set


@pytest.fixture
def flags(monkeypatch):
    """The cuDNN flags that a model sees, and the model's constructor.

    The flags of the user are set, and the fixture checks that they are set at the end.
    """
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(cudnn_flags())
            return super().forward(x)

    yield seen, lambda: Watched(6, 4)
    assert cudnn_flags() == USERS


@pytest.mark.deep("it takes a second")
def test_a_run_asks_for_what_repeats_and_puts_it_back_after_each_round(flags):
    seen, model = flags
    with pretended_gpu() as gpu:
        run = simulation(data=images(), model=model, device=str(gpu), engine="vmap")
        assert set(seen) == {REPEATS} and cudnn_flags() == USERS
        seen.clear()
        for _ in run.iterate():  # a round includes its evaluation
            assert cudnn_flags() == USERS
    assert set(seen) == {REPEATS}


@pytest.mark.deep("it takes a second")
def test_a_round_that_fails_puts_the_flags_back(flags, monkeypatch):
    _, model = flags
    with pretended_gpu() as gpu:
        run = simulation(data=images(), model=model, device=str(gpu), engine="vmap")
        for method in ("fit", "evaluate"):
            with monkeypatch.context() as patch, pytest.raises(KeyError):
                patch.setattr(Clients, method, lambda *_, **__: {}["a round"])
                list(run.iterate())
            assert cudnn_flags() == USERS


def test_on_a_cpu_the_flags_stay_as_they_are(flags):
    seen, model = flags
    simulation(data=images(), model=model, engine="vmap").run()
    assert set(seen) == {USERS}


@pytest.mark.deep("it takes a second")
def test_a_clients_own_process_asks_for_what_repeats(flags):
    seen, model = flags
    with pretended_gpu() as gpu:
        hardware = Hardware(device=str(gpu), engine="vmap", workers=1)
        server = Server("fedavg", Net(model), 1)
        pair = {"train": (torch.randn(6, 6), torch.arange(6) % 4)}
        client = Client("fedavg", Net(model), pair, hardware=hardware)
        seen.clear()
        client.train(server.download(0))
    assert set(seen) == {REPEATS}


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("value", [True, False])
def test_a_record_says_whether_a_card_may_round_to_tf32(value, monkeypatch):
    monkeypatch.setattr("pflcore.simulation._describe.allows_tf32", lambda: value)
    with pretended_gpu() as gpu:
        header = simulation(device=str(gpu)).header()
    assert header["tf32"] is value
    assert "tf32" not in simulation().header()


@pytest.mark.deep("it takes seconds")
def test_another_tf32_is_said_of_a_checkpoint_and_no_other_run(tmp_path, monkeypatch):
    place = "pflcore.simulation._describe.allows_tf32"
    with pretended_gpu() as gpu:
        monkeypatch.setattr(place, lambda: True)
        simulation(device=str(gpu)).save(tmp_path)
        monkeypatch.setattr(place, lambda: False)
        with pytest.warns(UserWarning, match="tf32 is True there and False here"):
            simulation(device=str(gpu)).restore(tmp_path)


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
        (
            "cuda:2",
            2,
            "'cuda' or 'cuda:0' to 'cuda:1', as torch sees 2 GPUs here, got 'cuda:2'",
        ),
        ("cuda:one", 1, "'cuda' or 'cuda:0', as torch sees 1 GPU here, got 'cuda:one'"),
    ],
)
def test_a_card_that_is_not_there_is_said_in_a_sentence(name, cards, words):
    with pretended_gpu(cards=cards), sentence(f"device: expected {words}"):
        simulation(device=name)


class Noisy(nn.Module):
    """A model that draws from torch's global generator."""

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
