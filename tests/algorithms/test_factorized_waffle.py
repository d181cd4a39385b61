"""FactorizedWaffle: what stays with the client, one step by hand, both engines, presets, evaluation, newcomers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from algorithms_help import strengths
from methods import FactorizedWaffle
from small import Setting, copied, make_setting
from torch import Tensor

from pflcore import Federation, Local, Net, Simulation, Training, evaluate, step
from pflcore.algorithms import ALGORITHMS, FedAvg, State
from pflcore.nn import factorize
from pflcore.simulation.round import begin

D = torch.float64


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def federation(sizes: tuple[int, ...] = (9, 20, 31), seed: int = 4) -> Federation:
    """Gaussian classes, every second client with its labels turned."""
    gen = torch.Generator().manual_seed(seed)
    centre = 2 * torch.randn(3, 6, generator=gen, dtype=D)
    clients = []
    for i, n in enumerate(sizes):
        y = torch.randint(0, 3, (2 * n,), generator=gen)
        x = centre[y] + torch.randn(2 * n, 6, generator=gen, dtype=D)
        clients.append({"train": (x[:n], (y[:n] + i % 2) % 3), "test": (x[n:], (y[n:] + i % 2) % 3)})
    return Federation.from_arrays(clients, classes=3, dtype=None)


def setting(data: Federation | None = None, engine: str = "vmap", ranks: Any = (4, 3), **training: Any) -> Setting:
    t = Training(**{"lr": 0.1, "batch_size": 8, "epochs": 2, **training})
    return make_setting(
        Net(lambda: factorize(model(), ranks), seed=1), federation() if data is None else data, t, 6, engine=engine, workers=1
    )


def play(alg: FedAvg, s: Setting, rounds: int = 2, ids: list[int] | None = None) -> State:
    state = begin(alg, s.net, s.data.n)
    for _ in range(rounds):
        state, done = step(alg, state, s, torch.tensor(range(s.data.n) if ids is None else ids))
        assert not done.dropped
    return state


# -- privacy -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["recommended", "paper_literal"])
def test_beliefs_never_leave_the_client(preset: str) -> None:
    seen: dict[str, dict[str, Tensor]] = {}

    class Spy(FactorizedWaffle):
        def client(self, down: Any, own: Any, local: Any) -> Any:
            new, up = super().client(down, own, local)
            seen.update(down=down, up=up, new=new)
            return new, up

    s = setting(lr=1e-300)  # the dictionary stands still, the beliefs do not
    play(Spy(preset=preset, lr_var=0.5), s, 1)
    assert set(seen["up"]) == {"delta"} and set(seen["down"]) == {"x"}
    assert seen["up"]["delta"].shape == seen["down"]["x"].shape == (3, s.net.size)
    fresh = Spy().init(s.net, 3)[1]["q"]
    assert s.net.size == sum(p.numel() for p in factorize(model(), (4, 3)).parameters()) and fresh.shape == (3 * 7,)
    assert (seen["new"]["q"] - fresh).abs().max() > 0.1
    assert seen["up"]["delta"].abs().max() < 1e-290  # nothing of the beliefs' way is in what travels
    assert all(k not in state for state in (seen["up"], seen["down"]) for k in ("q", "m", "v", "t"))


def test_the_server_keeps_nothing_but_the_dictionary() -> None:
    alg, s = FactorizedWaffle(), setting()
    state = play(alg, s)
    assert set(state.g) == {"x"} and set(state.own) == {"q", "m", "v", "t"} and not alg.report(state.g)
    torch.testing.assert_close(begin(alg, s.net, 3).own["q"][0], alg.init(s.net, 3)[1]["q"])


def test_averaging_is_of_factors_and_uniform() -> None:
    s = setting()
    ups: list[Tensor] = []

    class Spy(FactorizedWaffle):
        def client(self, down: Any, own: Any, local: Any) -> Any:
            new, up = super().client(down, own, local)
            ups.append(down["x"] + up["delta"])
            return new, up

    state = play(Spy(), s, 1)
    torch.testing.assert_close(state.g["x"], ups[0].mean(0), rtol=1e-12, atol=1e-14)
    layers = [s.net.load(factorize(model(), (4, 3)), row)[0].weight for row in [*ups[0], state.g["x"]]]  # type: ignore[index]
    assert (torch.stack(layers[:3]).mean(0) - layers[3]).abs().max() > 1e-3  # not the average of their products


# -- rounds ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl_b", ["mc", "series", "concrete_mc"])
def test_engines_agree_and_neighbours_play_no_part(kl_b: str) -> None:
    """Clients of different sizes step together in one engine and alone in the other; a client's way is its own."""
    alg = FactorizedWaffle(kl_b=kl_b, tau_start=2.0, tau_decay=0.8)
    a, b = (play(alg, setting(engine=e, momentum=0.5, weight_decay=1e-3), 2) for e in ("vmap", "threads"))
    for k in a.own:
        torch.testing.assert_close(a.own[k], b.own[k], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(a.g["x"], b.g["x"], rtol=1e-8, atol=1e-10)
    alone = play(alg, setting(momentum=0.5, weight_decay=1e-3), 1, [1])
    together = play(alg, setting(momentum=0.5, weight_decay=1e-3), 1)
    torch.testing.assert_close(alone.own["q"][1], together.own["q"][1], rtol=1e-9, atol=1e-11)


def test_the_temperature_falls() -> None:
    s = setting(batch_size=100, epochs=1)
    fixed = play(FactorizedWaffle(tau=0.5), s, 1)
    falling = play(FactorizedWaffle(tau=0.5, tau_start=3.0, tau_decay=0.99), s, 1)
    fallen = play(FactorizedWaffle(tau=0.5, tau_start=0.5), s, 1)
    assert torch.equal(fixed.g["x"], fallen.g["x"]) and not torch.equal(fixed.g["x"], falling.g["x"])


def test_beliefs_stay_within_bounds_and_weak_kl_moves_them_more() -> None:
    s = setting()
    far = play(FactorizedWaffle(lr_var=50.0), s, 3).own["q"].chunk(3, 1)
    for part, bound in zip(far, (7.0, 9.0, 9.0), strict=True):
        assert part.abs().max() == bound
    fresh = FactorizedWaffle().init(s.net, 1)[1]["q"]

    def moved(alg: FactorizedWaffle) -> float:
        return float((play(alg, s, 3).own["q"] - fresh)[:, :7].abs().mean())

    assert moved(FactorizedWaffle(preset="paper_literal")) < 0.05 < 0.2 < moved(FactorizedWaffle())


# -- evaluation --------------------------------------------------------------------------------------------------------------------


def test_evaluation_modes() -> None:
    s = setting()
    alg = FactorizedWaffle()
    state = play(alg, s, 3)
    at, pi = strengths(s.net), state.own["q"][:, :7].sigmoid()
    ways = {"mean": pi, "thr_soft": pi * (pi >= 0.5), "hard": (pi >= 0.5).double()}
    local = Local(s, torch.arange(3), 3, state.buffers)
    for mode, b in ways.items():
        other = replace(alg, eval_mode=mode)
        view = other.personal({"x": state.g["x"].expand(3, -1)}, state.own, local)
        torch.testing.assert_close(view["b"][:, 0], b)
        x, y = s.data.client(1, "test")
        scores = other.predict({k: v[1] for k, v in view.items()}, s.net, x)
        row = state.g["x"].index_copy(0, at, state.g["x"][at] * b[1])
        torch.testing.assert_close(scores, s.net(row, x))
        want = (s.net(row, x).argmax(1) == y).double().mean()
        torch.testing.assert_close(evaluate(other, state, s)["accuracy"][1], want)
    u = (torch.arange(100_000, dtype=D) + 0.5) / 100_000
    want = torch.sigmoid((state.own["q"][0, 0] + u.logit()) * 1.5).mean()
    view = replace(alg, eval_mode="relaxed_mean").personal({"x": state.g["x"].expand(3, -1)}, state.own, local)
    torch.testing.assert_close(view["b"][0, 0, 0], want, rtol=1e-4, atol=0)
    few, many = (evaluate(replace(alg, eval_mode="mc", samples=n), state, s)["loss"] for n in (1, 400))
    assert few.shape == many.shape == (3,) and not torch.equal(few, many)
    x, _ = s.data.client(0, "test")
    view = replace(alg, eval_mode="mc", samples=5).personal({"x": state.g["x"].expand(3, -1)}, state.own, local)
    mean = torch.stack([s.net(state.g["x"].index_copy(0, at, state.g["x"][at] * b), x).softmax(1) for b in view["b"][0]]).mean(0)
    torch.testing.assert_close(alg.predict({k: v[0] for k, v in view.items()}, s.net, x).softmax(1), mean)


def test_clients_that_never_trained() -> None:
    s = setting()
    alg = FactorizedWaffle()
    state = play(alg, s, 3, [0, 1])
    before = copied(state)
    x = {"x": state.g["x"].expand(3, -1)}

    def b(never: str, **more: Any) -> Tensor:
        return replace(alg, never=never, **more).personal(x, state.own, Local(s, torch.arange(3), 3, state.buffers))["b"][:, 0]

    prior = torch.cat([(n / (n + 1)) ** torch.arange(1, n + 1, dtype=D) for n in (4, 3)])
    assert bool((b("all")[2] == 1).all())
    torch.testing.assert_close(b("prior", eval_mode="mean")[2], prior)
    adapted = b("adapt", eval_mode="mean", adapt_epochs=20)
    assert (adapted[2] - prior).abs().max() > 0.1
    for ways in (b("prior"), b("adapt")):
        assert torch.equal(ways[:2], b("all")[:2])  # those who trained keep their beliefs
    for name in ("all", "adapt"):
        evaluate(replace(alg, never=name), state, s)
    assert all(torch.equal(v, before.own[k]) for k, v in state.own.items()) and torch.equal(state.g["x"], before.g["x"])
    found = {n: evaluate(replace(alg, never=n, adapt_epochs=30), state, s, "train")["loss"][2] for n in ("prior", "adapt")}
    assert found["adapt"] < found["prior"]  # the dictionary frozen, the beliefs fitted


# -- as users meet it --------------------------------------------------------------------------------------------------------------


def test_a_simulation_factorizes_the_model() -> None:
    run = Simulation("factorized_waffle", model, federation(), Training(lr=0.1, batch_size=8), rounds=2, workers=1)
    assert run.setting.net.names[:3] == ["0.w_a", "0.strength", "0.w_b"] and run.setting.net.names[-2:] == ["4.weight", "4.bias"]
    history = run.run()
    assert history.stopped is None and history.rounds[-1]["bytes_up"] == 3 * 8 * run.setting.net.size
    own = Simulation(FactorizedWaffle(ranks=(2, 3)), factorize(model(), 6), federation(), rounds=1, workers=1)
    assert strengths(own.setting.net).numel() == 12  # a model that has factors keeps them
    with pytest.raises(ValueError, match=r"^model: expected one with factorized layers"):
        begin(FactorizedWaffle(), Net(model()), 2)


def test_it_learns_what_one_model_cannot() -> None:
    """Half the clients with their labels turned: one model for all cannot be right, private factors can."""
    data = federation((60,) * 6)
    t = Training(lr=0.1, batch_size=10, epochs=5)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).double()

    def accuracy(alg: str, **options: Any) -> float:
        history = Simulation(ALGORITHMS[alg](**options), wide, data, t, rounds=15, eval_every=15, workers=1).run()
        return float(torch.tensor(history.rounds[-1]["eval"]["accuracy"]).mean())

    plain, literal = accuracy("fedavg"), accuracy("factorized_waffle", preset="paper_literal")
    recommended = accuracy("factorized_waffle")
    assert recommended > plain + 0.15 and recommended > literal + 0.1


def test_clients_step_together_in_whole_epochs_only() -> None:
    s = setting()
    local = Local(s, torch.arange(3), 1, torch.zeros(3, 0, dtype=D))
    for more in ({"steps": 3}, {"batches": 2}):
        with pytest.raises(ValueError, match=r"^together: expected whole epochs"):
            local.each_batch({"x": s.net.w0.expand(3, -1)}, lambda rows, grad, k: rows, together=True, **more)
