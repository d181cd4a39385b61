"""Local training under autocast with bfloat16."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from entry_points import sentence
from parts.user import simulation
from small import at_work, equals, images, layers, make_setting, near, wide

from pflcore import Federation, Net, Training
from pflcore.nn._context import forward_state
from pflcore.train._batches import Batches, BatchPlan

DATA = images((9, 20), shape=(3, 8, 8))
WORDS = "Conv2d 3 4 3, BatchNorm2d 4, ReLU, MaxPool2d 2, Flatten, Linear 36 4"
# The step size is a power of two, so that a fused and a separate product round alike.
TRAINING = Training(lr=0.25, batch_size=8, epochs=2, precision="bf16")


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return layers(WORDS)


def numbers(data):
    """The same samples with large numbers as targets, one for each sample."""
    y = 1000 + torch.rand(len(data.x), 4, generator=torch.Generator().manual_seed(0))
    return Federation(data.x, y, data.index)


def trained_by_hand(net, data, loss_fn, client):
    """The row and the mean loss of a plain loop of torch under autocast."""
    plan = BatchPlan()
    batches = Batches(
        data, TRAINING, (0, 1), torch.tensor([client]), plan, ragged=False
    )
    module = model().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=TRAINING.lr)
    losses = []
    for step in batches.steps:
        (places,) = batches.places(step)
        x, y = data.x[places], data.y[places]
        if data.relabel is not None:
            y = data.relabel[client][y]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net.row(module), sum(losses) / len(losses)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_a_step_is_that_of_a_loop_under_autocast(loss):
    data = DATA if loss == "cross_entropy" else numbers(DATA)
    loss_fn = {"cross_entropy": F.cross_entropy, "squared": F.mse_loss}[loss]
    net = Net(model(), loss)
    fits = {}
    for engine in ("loop", "vmap"):
        clients = at_work(make_setting(net, data, TRAINING, engine=engine))
        fits[engine] = clients.fit(net.w0.expand(2, -1))
        assert fits[engine].w.dtype == torch.float32
    for client in range(2):
        row, mean_loss = trained_by_hand(net, data, loss_fn, client)
        equals(fits["loop"].w[client], row)
        near(fits["loop"].loss[client], mean_loss)
    # A product of many clients at once rounds otherwise.
    near(fits["vmap"].loss, fits["loop"].loss, 2e-2, 0)
    exact = at_work(make_setting(net, data, replace(TRAINING, precision=None)))
    for fit in fits.values():
        assert not torch.equal(exact.fit(net.w0.expand(2, -1)).loss, fit.loss)


class Watched(nn.Module):
    """Cross entropy that collects the dtypes of scores, by mode."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def forward(self, scores, y):
        self.dtypes.add((forward_state.train, scores.dtype))
        return F.cross_entropy(scores, y)


def test_training_alone_is_rounded():
    loss = Watched()
    net = Net(model(), loss)
    run = simulation("ditto", DATA, model=net, training=TRAINING, engine="loop")
    loss = run.config.net.loss_fn
    loss.dtypes.clear()
    history = run.run()
    assert loss.dtypes == {(True, torch.bfloat16), (False, torch.float32)}
    assert {t.dtype for t in run.state.clients.values()} == {torch.float32}
    x, y = DATA.client(1, "test")
    personal = history.model(1)
    equals(personal(x), personal.module()(x))
    recorded = history.rounds[-1]["eval"]["loss"][1]
    near(recorded, F.cross_entropy(personal(x), y).item(), 1e-6)


def test_a_record_says_the_engine_and_the_precision(tmp_path):
    mlp = layers("Linear 6 5, Tanh, Linear 5 4")
    run = simulation(data=images(), model=mlp, training=TRAINING)
    assert run.config.engine.chain is None
    header = run.run().header
    assert header["training"]["precision"] == "bf16"
    assert header["path"]["why"].endswith(
        "precision is 'bf16', and the chain's kernels compute in float32"
    )
    run.save(tmp_path)
    other = simulation(data=images(), model=mlp, training=Training(0.25, 8, 2))
    with sentence("checkpoint: .* another run: precision is 'bf16' there and None"):
        other.restore(tmp_path)


@pytest.mark.parametrize(
    "data, options, message",
    [
        (
            DATA,
            {"engine": "chain"},
            "engine: 'chain' cannot train .*precision is 'bf16'",
        ),
        (wide(DATA), {}, "precision: expected a model in float32 for 'bf16', got "),
    ],
)
def test_what_cannot_be_rounded_is_refused(data, options, message):
    net = model().to(data.x.dtype)
    with sentence(message):
        simulation(data=data, model=net, training=TRAINING, **options)
