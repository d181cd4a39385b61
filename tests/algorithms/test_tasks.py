"""Every method trains on every task, or refuses it before round 1."""

import pytest
import torch
from parts.user import TRAINING
from small import crossed
from torch import nn
from torch.nn.functional import one_hot

from pflcore import Client, Federation, Simulation
from pflcore.algorithms import ALGORITHMS

CLASSES = 3
# Methods that need scores of classes, and those that need one label of a sample.
OF_CLASSES = ("fedrod", "fedntd", "fedproto", "fedpac", "fedas", "gpfl")
OF_LABELS = ("fedproto", "fedpac", "fedas", "gpfl")


class StepTagger(nn.Module):
    """Scores [B, C, T] of the steps of sequences of tokens [B, T]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.score = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.score(self.embed(x)).transpose(1, 2)


class PixelScorer(nn.Module):
    """Scores [B, C, H, W] of the pixels of images [B, 1, H, W]."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Conv2d(2, CLASSES, 1)

    def forward(self, x):
        return self.head(self.body(x).relu())


def mlp(outputs):
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))


def task(name):
    """A model, two equal clients, and a loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=generator)
    labels = torch.arange(12) % CLASSES
    tokens = torch.randint(0, 5, (12, 6), generator=generator)
    tags = tokens % CLASSES
    pixels = torch.randn(12, 1, 3, 3, generator=generator)
    masks = torch.randint(0, CLASSES, (12, 3, 3), generator=generator)
    several = one_hot(labels, CLASSES)
    model, x, y, loss = {
        "label": (mlp(CLASSES), x, labels, None),
        "steps": (StepTagger(), tokens, tags, None),
        "pixels": (PixelScorer(), pixels, masks, None),
        "several": (mlp(CLASSES), x, several, "binary_cross_entropy"),
        "several floats": (mlp(CLASSES), x, several.float(), "binary_cross_entropy"),
        "one score": (mlp(1), x, labels % 2, "binary_cross_entropy"),
        "hinge": (mlp(1), x, labels % 2, "hinge"),
        "torch's score": (mlp(1), x, labels % 2, nn.BCEWithLogitsLoss()),
        "number": (mlp(1), x, x[:, 0], "squared"),
        "numbers": (mlp(2), x, x[:, :2], "squared"),
        "whole numbers": (mlp(1), x, labels, "squared"),
        "probabilities": (mlp(CLASSES), x, x[:, :3].softmax(1), "cross_entropy"),
    }[name]
    data = Federation.from_clients([{"train": (x, y), "test": (x, y)}] * 2)
    return model, data, loss


OTHER_TASKS = (
    "steps",
    "pixels",
    "several",
    "several floats",
    "one score",
    "hinge",
    "torch's score",
    "number",
    "numbers",
    "whole numbers",
    "probabilities",
)


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("algorithm, name", crossed(ALGORITHMS, OTHER_TASKS))
def test_a_task_is_played_or_refused_before_round_1(algorithm, name):
    model, data, loss = task(name)
    try:
        run = Simulation(algorithm, model, data, TRAINING, rounds=2, loss=loss)
    except ValueError as error:
        assert str(error).startswith(("loss: ", "data: ", "model: "))
        assert "\n" not in str(error)
        return
    history = run.run()
    assert len(history.rounds) == 2
    assert history.model(0).scores(data.x[:3]).shape[0] == 3


@pytest.mark.parametrize("algorithm", OF_LABELS)
@pytest.mark.parametrize("name", ["steps", "pixels", "several", "several floats"])
def test_samples_without_one_label_are_named(algorithm, name):
    model, data, loss = task(name)
    with pytest.raises(ValueError, match=r"^data: .* needs one label for each sample"):
        Simulation(algorithm, model, data, loss=loss)


@pytest.mark.parametrize("algorithm", OF_CLASSES)
@pytest.mark.parametrize("name", ["one score", "hinge", "torch's score"])
def test_a_loss_of_single_scores_is_named(algorithm, name):
    model, data, loss = task(name)
    words = r"^loss: .*expected a loss of several classes' scores, got \w+\.$"
    with pytest.raises(ValueError, match=words):
        Simulation(algorithm, model, data, loss=loss)


@pytest.mark.parametrize("algorithm", ["fedrod", "feddbe", "gpfl"])
def test_a_head_that_is_not_last_is_refused_before_round_1(algorithm):
    _, data, _ = task("label")
    body = [nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)]
    model = nn.Sequential(*body, nn.Sigmoid())
    with pytest.raises(ValueError, match=r"^model: .* so a head must be the last"):
        Simulation(algorithm, model, data)
    with pytest.raises(ValueError, match=r"^model: .* so a head must be the last"):
        Client(algorithm, model, data.subset([0]))


@pytest.mark.parametrize("algorithm", ["fedproto", "fedpac"])
def test_what_follows_the_head_is_trained_through(algorithm):
    """With lam=0 nothing is pulled, and the loss is the run's own."""
    _, data, _ = task("label")
    body = [nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)]
    model = nn.Sequential(*body, nn.Sigmoid())
    weights = []
    for lam in (0.0, 1e-12):
        alg = ALGORITHMS[algorithm](lam=lam)
        run = Simulation(alg, model, data, TRAINING, rounds=1)
        weights.append(run.run().model(0).tensors())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_a_client_apart_takes_a_head_of_any_kind():
    model, data, _ = task("pixels")
    client = Client("fedavg", model, data.subset([0]), TRAINING)
    assert client.data.classes == CLASSES
