"""FedALA against a plain torch program of its Algorithm 1 that shares no code with it, and its laws."""

from __future__ import annotations

import copy
import statistics
from typing import Any, ClassVar

import pytest
import torch
import torch.nn as nn
from algorithms_help import federation, views
from methods import FedALA
from small import copied, images, make_setting, play, tiny_model

from pflcore import Federation, Net, Simulation, Training, step
from pflcore.algorithms import FedAvg

COHORTS = ([0, 1, 2], [0, 1], [1, 2], [0, 1, 2])
TRAINING = Training(lr=0.3, batch_size=64, epochs=2)  # whole batches, so that no shuffle plays a part


class Watched(FedALA):
    """Keeps the batches on which weights are learned."""

    batches: ClassVar[list[torch.Tensor]] = []

    def loss(self, net: Any, W: torch.Tensor, x: torch.Tensor, y: torch.Tensor, extra: Any) -> torch.Tensor:
        self.batches.append(x)
        return super().loss(net, W, x, y, extra)


class Person:
    """One client of the program: its model, its weights, and whether it has learned them once."""

    def __init__(self, start: nn.Module, layers: int) -> None:
        self.own, self.fresh = copy.deepcopy(start), True
        self.weights = [torch.ones_like(p) for p in self.own.parameters()][-layers:]
        self.epochs: list[int] = []

    def mix(self, server: nn.Module, x: torch.Tensor, y: torch.Tensor, eta: float, window: int, threshold: float) -> nn.Module:
        mine, theirs = (list(m.parameters()) for m in (self.own, server))
        model, low = copy.deepcopy(server), len(mine) - len(self.weights)
        if all(torch.equal(a, b) for a, b in zip(mine[low:], theirs[low:], strict=True)):
            return model

        def put() -> None:
            for p, a, b, w in zip(list(model.parameters())[low:], mine[low:], theirs[low:], self.weights, strict=True):
                p.data = a.data + (b.data - a.data) * w

        losses: list[float] = []
        while True:
            put()
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
            for i, (p, a, b) in enumerate(zip(list(model.parameters())[low:], mine[low:], theirs[low:], strict=True)):
                self.weights[i] = torch.clip(self.weights[i] - eta * p.grad * (b.data - a.data), 0, 1)
            if not self.fresh or (len(losses) > window and statistics.pstdev(losses[-window:]) < threshold):
                break
        put()
        self.fresh, self.epochs = False, [*self.epochs, len(losses)]
        return model


def program(start: nn.Module, data: Federation, layers: int, **how: Any) -> tuple[nn.Module, list[Person], list[nn.Module]]:
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
        server.load_state_dict({k: sum(len(data.client(i)[1]) / total * s[k] for i, s in states.items()) for k in server.state_dict()})
    served = [copy.deepcopy(p).mix(server, *data.client(i), **how) for i, p in enumerate(people)]
    return server, people, served


@pytest.mark.parametrize("engine", ["threads", "vmap"])
@pytest.mark.parametrize("layers", [0, 2])
def test_golden_fedala(layers: int, engine: str) -> None:
    """Four rounds with absent clients: the server, theta, W, and what is evaluated; the first time takes more than `window` epochs."""
    how = {"eta": 4.0, "window": 3, "threshold": 0.004}
    net, data = Net(lambda: tiny_model()().double(), seed=3), federation()
    alg, s = FedALA(layers=layers, sample=1.0, **how), make_setting(net, data, TRAINING, 4, engine)
    state = play(alg, s, ids=lambda r: COHORTS[r - 1])[-1][0]
    server, people, served = program(net.module, data, layers, **how)
    assert all(p.epochs[0] > 4 and set(p.epochs[1:]) <= {1} for p in people), [p.epochs for p in people]
    view, _ = views(alg, state, s)
    torch.testing.assert_close(state.g["x"], net.row(server), rtol=1e-9, atol=1e-11)
    for i, p in enumerate(people):
        W = torch.cat([w.flatten() for w in p.weights])
        assert W.lt(1).sum() > 0 and W.min() >= 0 and W.max() <= 1
        torch.testing.assert_close(state.own["W"][i], W, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(state.own["theta"][i], net.row(p.own), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(view["w"][i], net.row(served[i]), rtol=1e-9, atol=1e-11)


def test_without_a_step_of_w_it_is_fedavg_and_lower_layers_are_the_servers() -> None:
    s = make_setting(Net(lambda: tiny_model()().double()), federation(), Training(lr=0.1, batch_size=8), 3)
    (fedala, done), (fedavg, _) = (play(a, s)[-1] for a in (FedALA(eta=0.0), FedAvg()))
    torch.testing.assert_close(fedala.g["x"], fedavg.g["x"], rtol=1e-9, atol=1e-11)
    assert done.bytes_up == done.bytes_down == 3 * 8 * s.net.size
    state = play(FedALA(layers=2), s)[-1][0]
    w, low = views(FedALA(layers=2), state, s)[0]["w"], s.net.size - 24
    assert state.own["W"].shape == (3, 24) and torch.equal(w[:, :low], state.g["x"][:low].expand(3, -1))
    assert not torch.equal(w[:, low:], state.g["x"][low:].expand(3, -1))


def test_who_never_took_part_is_served_the_global_model() -> None:
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=8), 2)
    state = play(FedALA(), s, ids=lambda _: [0, 2])[-1][0]
    assert torch.equal(views(FedALA(), state, s)[0]["w"][1], state.g["x"])
    assert state.own["begun"][:, 0].tolist() == [1, 0, 1]


def test_w_is_learned_on_a_part_of_the_samples_drawn_anew_each_round() -> None:
    s = make_setting(Net(tiny_model()), images((1, 20, 31)), TRAINING, 3)
    states = [copied(state) for state, _ in play(FedALA(), s, 2)]

    def drawn(after: int, ids: list[int]) -> list[set[tuple[float, ...]]]:
        Watched.batches.clear()
        step(Watched(), copied(states[after - 1]), s, torch.tensor(ids))
        own = [{tuple(row) for row in s.data.client(i)[0].tolist()} for i in range(3)]
        seen = {tuple(row) for x in Watched.batches for row in x.tolist()}
        assert seen <= set().union(*own)
        return [seen & o for o in own]

    second, third, fewer = drawn(1, [0, 1, 2]), drawn(2, [0, 1, 2]), drawn(1, [2, 1])
    assert [len(d) for d in second] == [1, 16, 24] and second[1] != third[1]
    assert fewer == [set(), *second[1:]]  # whoever else is there


def test_the_first_time_ends() -> None:
    """Where losses never settle, after `most` epochs; where they are not finite, at once."""
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=8), 2)
    Watched.batches.clear()
    play(Watched(threshold=0.0, most=12, sample=1.0), s)
    assert len(Watched.batches) == 12 * sum(-(-n // 8) for n in (7, 20, 31))


@pytest.mark.parametrize(("size", "batch", "drop_last"), [(7, 4, False), (2, 4, False), (12, 8, False), (12, 8, True)])
def test_no_batch_of_one_for_batch_norm(size: int, batch: int, drop_last: bool) -> None:
    """4/5 of 7 samples are 5, which in fours leave one alone: then 4 are taken."""
    model = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))  # noqa: E731
    training = Training(lr=0.1, batch_size=batch, drop_last=drop_last)
    Watched.batches.clear()
    run = Simulation(Watched(), model, images((size, 8)), training, rounds=3, engine="threads")
    assert run.run().stopped is None
    assert Watched.batches and min(map(len, Watched.batches)) > 1
