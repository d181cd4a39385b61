"""Augmentation: random changes of the samples of every minibatch."""

from collections import Counter
from itertools import product

import pytest
import torch
from entry_points import sentence
from small import (
    ENGINES,
    F64,
    Scale,
    alike,
    at_work,
    equals,
    images,
    layers,
    make_setting,
    tiny_model,
    wide,
)
from torch import nn

from pflcore import Federation, Hardware, Net, Simulation, Training
from pflcore.nn import Normalize

IMAGE = (2, 6, 6)
DATA = images(sizes=(7, 12, 17), shape=IMAGE)
NAMES = ("flip", "crop:2", "cutout:3")


def convolved():
    return layers("Conv2d 2 3 3, ReLU, MaxPool2d 2, Flatten, Linear 12 4")


def doubled():
    return convolved().double()


def noise(batch, generator):
    return batch + torch.randn(batch.shape, generator=generator, dtype=batch.dtype)


def noise_of_torch(batch, generator):
    """Draws as torchvision's transforms do, from the generator that threads share."""
    return batch.add_(torch.randn_like(batch))


def play(augment, data=DATA, *, rounds=2, method="fedavg", resume=None, **hardware):
    """A run, or one that goes on from a checkpoint."""
    run = Simulation(
        method,
        doubled if data.x.dtype == F64 else convolved,
        data,
        Training(0.05, batch_size=4, epochs=2, augment=augment),
        rounds=rounds,
        hardware=Hardware(**{"engine": "loop", "workers": 1, **hardware}),
    )
    if resume is not None:
        run.restore(resume)
    return run


def model_after(*args, **options):
    run = play(*args, **options)
    run.run()
    return run.state.server["x"]


AUGMENTS = pytest.mark.parametrize(
    "augment", [NAMES, noise, noise_of_torch], ids=["named", "function", "torch"]
)


# draws --------------------------------------------------------------------------


@pytest.mark.deep("together they take seconds", quick=4)
@ENGINES
@pytest.mark.parametrize(
    "augment", [("crop:7", "cutout:5"), noise], ids=["named", "function"]
)
def test_draws_differ_by_sample_step_client_round_and_seed(engine, augment):
    """The gradient of scores = x * m is the sum of a minibatch's samples."""
    net = Net(Scale([[[0.0] * 16] * 16]), loss=lambda scores, _: scores.sum())
    ones = torch.ones(4, 1, 16, 16, dtype=F64)
    data = Federation.from_clients([(ones, torch.zeros(4))] * 2, dtype=None)
    training = Training(batch_size=1, epochs=2, augment=augment)
    samples = []

    def update(rows, grad, taken):
        first, again = grad(rows["w"]).clone(), grad(rows["w"])
        equals(first, again)  # a step has one batch, however often it is asked for
        samples.extend(first)
        return rows

    for seed, round in product((0, 1), (1, 2)):
        setting = make_setting(net, data, training, engine=engine, seed=seed)
        at_work(setting, round=round).each_batch({"w": net.w0.repeat(2, 1)}, update)

    found = Counter(tuple(sample.tolist()) for sample in samples)
    assert found.total() == 2 * 2 * 2 * 2 * 4
    assert len(found) > 0.8 * found.total()  # some squares are the same by chance


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("engine", ["vmap", "chain"])
@AUGMENTS
def test_engines_train_on_the_same_batches(augment, engine):
    data = wide(DATA)
    want = model_after(augment, data)

    alike(model_after(augment, data, engine=engine), want)
    assert (want - model_after(None, data)).abs().max() > 1e-3


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize(
    "augment, engine",
    [(NAMES, "loop"), (NAMES, "vmap"), (NAMES, "chain"), (noise_of_torch, "loop")],
)
def test_workers_change_no_bit(augment, engine):
    one, two = (model_after(augment, engine=engine, workers=n) for n in (1, 2))

    assert torch.equal(one, two)


@pytest.mark.deep("it takes a second")
def test_a_resumed_run_has_the_bits_of_the_whole(tmp_path):
    want = model_after(NAMES, rounds=4)
    first = play(NAMES, rounds=4)
    rounds = first.iterate()
    for _ in range(2):
        next(rounds)
    first.save(tmp_path)

    got = play(NAMES, rounds=4, resume=tmp_path)
    got.run()

    assert torch.equal(got.state.server["x"], want)
    with sentence("checkpoint: .* augment is "):
        play(("flip",), rounds=4, resume=tmp_path)


# where samples stay as they are --------------------------------------------------


@pytest.mark.deep("it takes a second")
def test_evaluation_and_newcomers_take_samples_as_they_are():
    """Fine-tuning trains in the evaluation, and so does a newcomer in `adapt`."""
    sizes = []

    def count(batch, generator):
        sizes.append(len(batch))
        return batch

    run = play(count, method="finetune", rounds=1)
    tried = len(sizes)

    history = run.run()

    batches = sum(2 * -(-n // 4) for n in (7, 12, 17))
    assert len(sizes) - tried == batches
    assert sum(sizes[tried:]) == 2 * (7 + 12 + 17)
    history.adapt(DATA.client(0), rounds=2)
    assert len(sizes) - tried == batches
    assert torch.equal(
        run.state.server["x"], model_after(None, method="finetune", rounds=1)
    )


def test_the_engine_says_who_takes_the_steps():
    header = play(NAMES, engine="auto").header()

    assert header["engine"] == "chain"
    assert header["path"]["why"].endswith(
        "it gives the gradients of augmented batches, and torch takes the steps"
    )


# what users write ----------------------------------------------------------------


def fields_data(x):
    """Two clients with the same eight samples of several fields."""
    client = (x, torch.arange(8) % 2)
    return Federation.from_clients([{"train": client, "test": client}] * 2)


def test_several_fields_reach_a_function_as_the_model_gets_them():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 3)
            self.head = nn.Linear(5, 2)

        def forward(self, x):
            return self.head(torch.cat([self.words(x["word"]), x["size"]], 1))

    x = {"word": torch.arange(8) % 9, "size": torch.randn(8, 2)}
    data = fields_data(x)

    def masked(batch, generator):
        assert batch["word"].dtype == torch.int64
        return batch | {"word": torch.zeros_like(batch["word"])}

    def trained(data, augment):
        training = Training(batch_size=4, augment=augment)
        run = Simulation("fedavg", Joined, data, training, rounds=1)
        run.run()
        return run.state.server["x"]

    x["word"] = torch.zeros(8, dtype=torch.int64)
    zeros = fields_data(x)
    assert torch.equal(trained(data, masked), trained(zeros, None))


def impure(batch, generator):
    impure.calls += 1
    return batch * impure.calls


impure.calls = 0

WRONG = {
    "name": (
        "flop",
        r"augment: expected .flip., .* got .flop. \(did you mean 'flip'\?",
    ),
    "number": ("crop:2.5", "augment: expected a whole number of pixels, from 1 behind"),
    "value": (3, "augment: expected 'flip'"),
    "shape": (
        lambda x, g: x[:, :1],
        "augment: <lambda> returned a tensor .*; let it return a batch of",
    ),
    "border": (
        "crop:6",
        "augment: crop:6 has a border of 6 pixels, and the images have 6 on a side",
    ),
    "counter": (impure, "augment: impure gives another batch when it is called again"),
}


@pytest.mark.parametrize("augment, words", WRONG.values(), ids=WRONG)
def test_a_wrong_transform_is_named_in_one_sentence(augment, words):
    with sentence(words):
        play([augment] if isinstance(augment, str) else augment)


def test_named_transforms_take_images():
    with sentence("augment: flip is for images"):
        Simulation("fedavg", tiny_model(), images(), Training(augment="flip"), rounds=1)


def test_normalization_is_a_layer():
    """It is the same in evaluation, and is neither trained nor averaged."""
    layer = Normalize([0.5, -1.0], [2.0, 0.1])
    mean = torch.tensor([0.5, -1.0]).view(2, 1, 1)
    std = torch.tensor([2.0, 0.1]).view(2, 1, 1)
    net = Net(nn.Sequential(layer, convolved()))

    assert torch.equal(layer(DATA.x), (DATA.x - mean) / std)
    assert net.size == Net(convolved()).size and not net.buffer_names
    with sentence("std: expected a number for each of 2 channels"):
        Normalize([0.5, -1.0], [2.0])
