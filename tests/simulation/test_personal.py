"""The models that a run leaves: of its clients, of a newcomer, as modules and as files."""

import copy
import pickle

import pytest
import torch
from methods import APFL, Ditto
from parts.user import TRAINING, simulation
from small import SIX, images, swept, tiny_model
from torch import nn

from pflcore import Federation, Simulation, Training


def targets():
    gen = torch.Generator().manual_seed(0)
    x = [torch.randn(20, 6, generator=gen) for _ in range(3)]
    return Federation.from_clients(
        [(v, v @ torch.arange(6.0) / 6 + 0.1 * i) for i, v in enumerate(x)]
    ).split(test=0.4)


@pytest.mark.parametrize("algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster")))
def test_a_clients_model_is_what_was_evaluated(algorithm):
    run = simulation(algorithm, rounds=2)
    history, data = run.run(), run.data
    for i in range(data.n):
        x, y = data.client(i, "test")
        assert (history.predict(i, x.numpy()) == y).double().mean().item() == pytest.approx(
            history.rounds[-1]["eval"]["accuracy"][i]
        )
    model = history.model(1)
    assert isinstance(model, nn.Module)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


def test_a_model_of_its_own_class():
    run = simulation(Ditto, rounds=2)
    history = run.run()
    module = history.model(1).module()
    x, _ = run.data.client(1, "test")
    assert (
        isinstance(module, nn.Sequential)
        and torch.equal(module(x), history.model(1)(x))
        and not module.training
    )
    pickle.dumps(module)
    with pytest.raises(ValueError, match="module: APFL predicts with more than one model"):
        simulation(APFL, rounds=1).run().model(0).module()
    for client in (3, -1, "0", True):
        with pytest.raises(ValueError, match="client: expected a number from 0 to 2, got"):
            history.model(client)
    with pytest.raises(ValueError, match=r"x: expected samples \[B, ...\]"):
        history.predict(0, 1.0)


def test_values_are_predicted_as_values():
    data = targets()
    history = Simulation("fedavg", nn.Linear(6, 1), data, TRAINING, rounds=2).run()
    x, y = data.client(0, "test")
    assert history.predict(0, x).shape == y.shape
    labels = Federation.from_clients([(v, (v[:, 0] > 0).long()) for v in (x, -x)]).split(test=0.5)
    history = Simulation("fedavg", nn.Linear(6, 1), labels, TRAINING, rounds=9, loss="hinge").run()
    x, y = labels.client(0, "test")
    assert (history.predict(0, x) == y).double().mean() == history.rounds[-1]["eval"]["accuracy"][0]


@pytest.mark.parametrize("algorithm", swept(quick=(*SIX, "fedrod", "knnper", "hypcluster")))
def test_a_newcomer_leaves_the_run_as_it_was(algorithm):
    everybody = images((7, 20, 31, 24))
    run = simulation(algorithm, everybody.subset([0, 1, 2]), rounds=2)
    history = run.run()
    before = copy.deepcopy(history.state)
    x, y = everybody.client(3, "train")
    model = history.adapt((x, y), rounds=2)
    assert model.predict(x).shape == y.shape and model(x).isfinite().all()
    for part in ("server", "clients"):
        for k, v in getattr(before, part).items():
            assert torch.equal(v, getattr(history.state, part)[k]), (part, k)
    assert torch.equal(history.adapt((x, y), rounds=2)(x), model(x))


def test_a_newcomer_is_personalized_by_the_algorithms_rule():
    everybody = images((40, 40, 40, 40))  # clients 1 and 3 turn their labels
    few, (x, y) = everybody.subset([0, 2, 1]), everybody.client(3, "train")
    test = everybody.client(3, "test")

    def right(algorithm, rounds=5):
        history = Simulation(
            algorithm, tiny_model(), few, Training(lr=0.3, batch_size=8), rounds=8
        ).run()
        return (history.adapt((x, y), rounds).predict(test[0]) == test[1]).double().mean().item()

    shared = right("fedavg")
    assert right("fedavg", 0) == shared < 0.6  # it has no rule: the newcomer gets the shared model
    for algorithm in ("ditto", "local", "finetune", "feddwa", "fedrod"):
        assert right(algorithm) > shared + 0.15, algorithm


def test_a_newcomer_that_does_not_fit_is_one_sentence():
    history = simulation(rounds=1).run()
    with pytest.raises(ValueError, match=r"samples: expected inputs of shape \(6,\)"):
        history.adapt((torch.randn(9, 5), torch.zeros(9, dtype=torch.long)))
    with pytest.raises(ValueError, match="samples: expected those of one client, got Federation"):
        history.adapt(images())
    with pytest.raises(ValueError, match="rounds: expected a whole number, at least 0, got -1"):
        history.adapt(images().client(0), rounds=-1)
    with pytest.raises(ValueError, match="model: expected a history with models"):
        type(history)({}).model(0)


def test_every_methods_model_is_kept_by_pickle():
    x = torch.randn(60, 3)
    data = Federation.from_clients([(x, (x[:, 0] > 0).long())] * 2).split(test=0.25)
    net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    model = Simulation("factorized_waffle", net, data, TRAINING, rounds=1).run().model(0)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
