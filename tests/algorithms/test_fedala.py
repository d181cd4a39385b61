"""FedALA against a plain torch program of its Algorithm 1 that shares no code with it, and its
laws."""

import copy
import statistics

import pytest
import torch
import torch.nn as nn
from doors import views
from methods import FedALA
from small import images, make_setting, play, tiny_model

from pflcore import Federation, Net, Training
from pflcore.algorithms import FedAvg

COHORTS = ([0, 1, 2], [0, 1], [1, 2], [0, 1, 2])
# whole batches, so that no shuffle plays a part
TRAINING = Training(lr=0.3, batch_size=64, epochs=2)


def federation():
    d = images((7, 20, 31))
    return Federation(d.x.double(), d.y, d.index, 4, d.relabel)


class Person:
    """One client of the program: its model, its weights, and whether it has learned them once."""

    def __init__(self, start, layers):
        self.own, self.fresh = copy.deepcopy(start), True
        self.weights = [torch.ones_like(p) for p in self.own.parameters()][-layers:]
        self.epochs: list[int] = []

    def mix(self, server, x, y, eta, window, threshold):
        mine, theirs = (list(m.parameters()) for m in (self.own, server))
        model, low = copy.deepcopy(server), len(mine) - len(self.weights)
        if all(torch.equal(a, b) for a, b in zip(mine[low:], theirs[low:], strict=True)):
            return model

        def put():
            for p, a, b, w in zip(
                list(model.parameters())[low:], mine[low:], theirs[low:], self.weights, strict=True
            ):
                p.data = a.data + (b.data - a.data) * w

        losses: list[float] = []
        while True:
            put()
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
            for i, (p, a, b) in enumerate(
                zip(list(model.parameters())[low:], mine[low:], theirs[low:], strict=True)
            ):
                self.weights[i] = torch.clip(
                    self.weights[i] - eta * p.grad * (b.data - a.data), 0, 1
                )
            if not self.fresh or (
                len(losses) > window and statistics.pstdev(losses[-window:]) < threshold
            ):
                break
        put()
        self.fresh, self.epochs = False, [*self.epochs, len(losses)]
        return model


def program(start, data, layers, **how):
    server, people = copy.deepcopy(start), [Person(start, layers) for _ in range(3)]
    for cohort in COHORTS:
        for i in cohort:
            x, y = data.client(i)
            people[i].own = people[i].mix(server, x, y, **how)
            optimizer = torch.optim.SGD(people[i].own.parameters(), 0.3)
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(people[i].own(x), y).backward()
                optimizer.step()
        total = sum(len(data.client(i)[1]) for i in cohort)
        states = {i: people[i].own.state_dict() for i in cohort}
        server.load_state_dict(
            {
                k: sum(len(data.client(i)[1]) / total * s[k] for i, s in states.items())
                for k in server.state_dict()
            }
        )
    served = [copy.deepcopy(p).mix(server, *data.client(i), **how) for i, p in enumerate(people)]
    return server, people, served


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("layers", [0, 2])
def test_golden_fedala(layers, engine):
    """Four rounds with absent clients: the server, theta, W, and what is evaluated; the first time
    takes more than `window` epochs."""
    how = {"eta": 4.0, "window": 3, "threshold": 0.004}
    net, data = Net(lambda: tiny_model()().double(), seed=3), federation()
    alg, s = FedALA(layers=layers, sample=1.0, **how), make_setting(net, data, TRAINING, 4, engine)
    state = play(alg, s, ids=lambda r: COHORTS[r - 1])[-1][0]
    server, people, served = program(net.module, data, layers, **how)
    assert all(p.epochs[0] > 4 and set(p.epochs[1:]) <= {1} for p in people), [
        p.epochs for p in people
    ]
    view, _ = views(alg, state, s, torch.arange(3))
    torch.testing.assert_close(state.server["x"], net.row(server), rtol=1e-9, atol=1e-11)
    for i, p in enumerate(people):
        W = torch.cat([w.flatten() for w in p.weights])
        assert W.lt(1).sum() > 0 and W.min() >= 0 and W.max() <= 1
        torch.testing.assert_close(state.clients["W"][i], W, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(state.clients["theta"][i], net.row(p.own), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(view["w"][i], net.row(served[i]), rtol=1e-9, atol=1e-11)


def test_without_a_step_of_w_it_is_fedavg_and_lower_layers_are_the_servers():
    s = make_setting(
        Net(lambda: tiny_model()().double()), federation(), Training(lr=0.1, batch_size=8), 3
    )
    (fedala, done), (fedavg, _) = (play(a, s)[-1] for a in (FedALA(eta=0.0), FedAvg()))
    torch.testing.assert_close(fedala.server["x"], fedavg.server["x"], rtol=1e-9, atol=1e-11)
    assert done.bytes_up == done.bytes_down == 3 * 8 * s.net.size
    state = play(FedALA(layers=2), s)[-1][0]
    w, low = views(FedALA(layers=2), state, s, torch.arange(3))[0]["w"], s.net.size - 24
    assert state.clients["W"].shape == (3, 24) and torch.equal(
        w[:, :low], state.server["x"][:low].expand(3, -1)
    )
    assert not torch.equal(w[:, low:], state.server["x"][low:].expand(3, -1))


def test_who_never_took_part_is_served_the_global_model():
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=8), 2)
    state = play(FedALA(), s, ids=lambda _: [0, 2])[-1][0]
    assert torch.equal(views(FedALA(), state, s, torch.tensor([1]))[0]["w"][0], state.server["x"])
    assert state.clients["begun"][:, 0].tolist() == [1, 0, 1]


def test_the_first_time_ends():
    """Where losses never settle, after `most` epochs; where they are not finite, at once."""
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=8), 2)
    calls: list[int] = []

    class Counted(FedALA):
        def loss(self, *args):
            calls.append(1)
            return super().loss(*args)

    play(Counted(threshold=0.0, most=12, sample=1.0), s)
    assert len(calls) == 12 * sum(-(-n // 8) for n in (7, 20, 31))
