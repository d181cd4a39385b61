"""The models that a run leaves: of its clients, of a newcomer, as modules and as files."""

import copy
import pickle

import pytest
import torch
from doors import sentence
from methods import APFL, Ditto
from parts.user import TRAINING, simulation
from small import SIX, images, swept, tiny_model
from torch import nn

from pflcore import Simulation, Training


@pytest.mark.parametrize("algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster")))
def test_a_clients_model_is_what_was_evaluated(algorithm):
    data = images()
    run = Simulation(algorithm, tiny_model()(), data, TRAINING, rounds=2)
    history = run.run()
    for i in range(data.n):
        x, y = data.client(i, "test")
        right = (history.predict(i, x.numpy()) == y).double().mean().item()
        assert right == pytest.approx(history.rounds[-1]["eval"]["accuracy"][i])
    model = history.model(1)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(x), model(x))


def test_a_model_of_its_own_class():
    run = simulation(Ditto, rounds=2)
    history = run.run()
    module = history.model(1).module()
    x, _ = run.data.client(1, "test")
    assert isinstance(module, nn.Sequential) and not module.training
    assert torch.equal(module(x), history.model(1)(x))
    pickle.dumps(module)
    with sentence("module: APFL predicts with more than one model"):
        simulation(APFL, rounds=1).run().model(0).module()
    for client in (3, -1, "0", True):
        with sentence("client: expected a number from 0 to 2, got"):
            history.model(client)
    with sentence(r"x: expected samples \[B, ...\]"):
        history.predict(0, 1.0)


@pytest.mark.parametrize("algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster")))
def test_a_newcomer_leaves_the_run_as_it_was(algorithm):
    everybody = images((7, 20, 31, 24))
    run = simulation(algorithm, everybody.subset([0, 1, 2]), rounds=2)
    history = run.run()
    before = copy.deepcopy(history.state)
    x, y = everybody.client(3, "train")
    model = history.adapt((x, y), rounds=2)
    assert model.predict(x).shape == y.shape and model(x).isfinite().all()
    after = history.state
    for old, new in ((before.server, after.server), (before.clients, after.clients)):
        assert all(torch.equal(v, new[k]) for k, v in old.items())
    assert torch.equal(history.adapt((x, y), rounds=2)(x), model(x))


def test_a_newcomer_is_personalized_by_the_algorithms_rule():
    everybody = images((40, 40, 40, 40))  # clients 1 and 3 turn their labels
    few, (x, y) = everybody.subset([0, 2, 1]), everybody.client(3, "train")
    test = everybody.client(3, "test")

    def right(algorithm, rounds=5):
        training = Training(lr=0.3, batch_size=8)
        history = Simulation(algorithm, tiny_model(), few, training, rounds=8).run()
        return (history.adapt((x, y), rounds).predict(test[0]) == test[1]).double().mean().item()

    shared = right("fedavg")
    assert right("fedavg", 0) == shared < 0.6  # it has no rule: the newcomer gets the shared model
    for algorithm in ("ditto", "local", "finetune", "feddwa", "fedrod"):
        assert right(algorithm) > shared + 0.15, algorithm


def test_a_newcomer_that_does_not_fit_is_one_sentence():
    history = simulation(rounds=1).run()
    with sentence(r"samples: expected inputs of shape \(6,\)"):
        history.adapt((torch.randn(9, 5), torch.zeros(9, dtype=torch.long)))
    with sentence("samples: expected those of one client, got Federation"):
        history.adapt(images())
    with sentence("rounds: expected a whole number, at least 0, got -1"):
        history.adapt(images().client(0), rounds=-1)
    with sentence("model: expected a history with models"):
        type(history)({}).model(0)
