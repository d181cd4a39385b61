"""Submodules that stay in evaluation mode while the rest of a model trains."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from entry_points import sentence
from parts.user import simulation
from small import ENGINES, equals, images, near, wide

from pflcore import Net, Training

DATA = wide(images((9, 20)))
TRAINING = Training(lr=0.2, batch_size=32, epochs=3)  # a batch of all samples
ROUNDS = 3


class Backbone(nn.Module):
    """A body with batch norm and dropout, as pretrained ones have, under a new head.

    With `keeps` its `train` keeps the body in evaluation mode, and returns nothing.
    """

    def __init__(self, keeps=False):
        super().__init__()
        self.keeps = keeps
        self.body = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.body[0].running_mean += torch.linspace(-1, 1, 6)
        self.body[0].running_var *= torch.linspace(0.1, 3, 6)
        self.head = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    def train(self, mode=True):
        super().train(mode)
        if self.keeps:
            self.body.eval()

    def forward(self, x):
        return self.head(self.body(x))


def frozen(how):
    """A backbone whose body stays in evaluation mode in one of two ways."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Backbone(keeps=how == "train()").double()
    if how == "eval()":
        model.body.eval()
    return model


def modes(module):
    return {name: m.training for name, m in module.named_modules()}


def statistics(module, name):
    """The tensors of a batch norm, without its count of batches."""
    tensors = module.get_submodule(name).state_dict()
    return {k: v for k, v in tensors.items() if k != "num_batches_tracked"}


def trained_by_hand(model, client):
    """The model after a plain loop of torch on one client's samples."""
    model = copy.deepcopy(model)
    x, y = DATA.client(client, "train")
    optimizer = torch.optim.SGD(model.parameters(), lr=TRAINING.lr)
    for _ in range(ROUNDS * TRAINING.epochs):
        model.train()
        model.body.eval()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def played(algorithm="local", model=None, **options):
    """The history of a run of all rounds."""
    options = {"training": TRAINING, "rounds": ROUNDS, **options}
    return simulation(algorithm, DATA, model=model, **options).run()


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("how", ["eval()", "train()"])
@ENGINES
def test_training_is_a_loop_that_keeps_the_mode(how, engine):
    model = frozen(how)
    given = modes(model)
    history = played(model=model, engine=engine)
    assert history.header["eval_modules"] == ["body", "body.0", "body.1"]
    for client in range(2):
        want = trained_by_hand(model, client)
        got = history.model(client).module()
        for name in ("body.0", "head.1"):
            for key, tensor in statistics(want, name).items():
                near(statistics(got, name)[key], tensor)
        near(Net(model).row(got), Net(model).row(want))
    assert modes(model) == given


@pytest.mark.parametrize("algorithm", ["fedavg", "feddwa", "hypcluster"])
def test_no_digit_of_frozen_statistics_moves(algorithm):
    model = frozen("eval()")
    history = played(algorithm, model)
    newcomer = history.adapt(DATA.client(1, "train"), rounds=1)
    for personal in (history.model(0), newcomer):
        body = personal.module().body[0]
        equals(body.running_mean, model.body[0].running_mean)
        equals(body.running_var, model.body[0].running_var)


def test_a_model_in_evaluation_mode_trains_as_after_train():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    want = played("fedavg", model.train())
    got = played("fedavg", model.eval())
    assert not model.training and "eval_modules" not in got.header
    for name, tensor in want.model(0).tensors().items():
        equals(got.model(0).tensors()[name], tensor)


def test_a_chain_drops_nothing_out_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.9), nn.Tanh(), nn.Linear(5, 4))
    model = model.double()
    model[1].eval()
    chain = played("fedavg", model, engine="chain")
    loop = played("fedavg", model, engine="loop")
    assert chain.header["eval_modules"] == ["1"]
    near(chain.rounds[-1]["train_loss"], loop.rounds[-1]["train_loss"])
    near(chain.model(0).tensors()["0.weight"], loop.model(0).tensors()["0.weight"])
    model[1].train()
    dropped = played("fedavg", model, engine="chain")
    assert abs(dropped.rounds[-1]["train_loss"] - loop.rounds[-1]["train_loss"]) > 0.01


def test_a_checkpoint_tells_modes_apart(tmp_path):
    options = {"training": TRAINING, "rounds": ROUNDS}
    whole = simulation("fedavg", DATA, model=frozen("eval()"), **options)
    history = whole.run(lambda round, _: round == 2 and whole.save(tmp_path))
    again = simulation("fedavg", DATA, model=frozen("eval()"), **options)
    resumed = again.restore(tmp_path).run()
    equals(resumed.model(0).tensors(), history.model(0).tensors())
    other = simulation("fedavg", DATA, model=frozen(None), **options)
    with sentence("checkpoint: .* another run: eval_modules is "):
        other.restore(tmp_path)


class Freezing(nn.Module):
    """A model whose `train` freezes a layer, parameters and all."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval().requires_grad_(False)
        return self

    def forward(self, x):
        return self.head(self.norm(x))


def test_a_train_that_freezes_parameters_does_so_before_the_run():
    assert Net(Freezing()).names == ["head.weight", "head.bias"]
    assert played("fedavg", Freezing().double()).rounds


# modes that the trial finds -------------------------------------------------------


class Peeking(nn.Module):
    """A model that looks at its features in evaluation mode in each pass."""

    def __init__(self, restores):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)
        self.restores = restores

    def forward(self, x):
        z = self.norm(x)
        was = self.norm.training
        self.norm.eval()
        self.norm(x)
        if self.restores:
            self.norm.train(was)
        return self.head(z)


class Merging(nn.Module):
    """A linear layer with a rank-1 adapter, which `eval()` merges if `merges`."""

    def __init__(self, merges):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.layer.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, 1))
        self.b = nn.Parameter(torch.randn(1, 6))
        self.merges = merges
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merges and mode == self.merged:
            sign = -1 if mode else 1
            self.layer.weight.data += sign * (self.a @ self.b).detach()
            self.merged = not mode
        return self

    def forward(self, x):
        scores = self.layer(x)
        return scores if self.merged else scores + x @ self.b.T @ self.a.T


@pytest.mark.parametrize(
    "bad, good, value",
    [
        (Peeking(restores=False), Peeking(restores=True), "loss in training mode"),
        (Merging(merges=True), Merging(merges=False), "loss in evaluation mode"),
    ],
)
def test_a_mode_that_a_pass_leaves_is_found(bad, good, value):
    with sentence(f"model: as a function .*: its {value} .*, a cache or a mode"):
        simulation("fedavg", DATA, model=bad.double())
    # The advice works.
    assert simulation("fedavg", DATA, model=good.double(), rounds=1).run().rounds
