"""AdamW's moments over the rounds: fresh, or kept by each client; who refuses it, and what a record says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from methods import APFL, Ditto, FactorizedWaffle, FedDWA, LocalOnly, Mocha, PerFedAvg, PFedMe, QFedAvg, Scaffold, Waffle
from simulation_help import swept
from small import Setting, images, make_setting, play
from torch import Tensor

from pflcore import Federation, Local, Net, Simulation, Training, step
from pflcore.algorithms import ALGORITHMS, FedAvg
from pflcore.simulation.round import begin

ADAMW: dict[str, Any] = {"lr": 0.01, "batch_size": 10, "local_optimizer": "adamw", "weight_decay": 0.1}
KEPT = Training(**ADAMW, keep_moments=True)


def federation(sizes: Sequence[int] = (7, 20, 31)) -> Federation:
    data = images(sizes)
    return Federation(data.x.double(), data.y, data.index, data.classes, data.relabel)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def made(training: Training, engine: str = "threads", rounds: int = 3) -> Setting:
    return make_setting(Net(build), federation(), training, rounds, engine)


def batches(s: Setting, client: int, round: int) -> list[tuple[Tensor, Tensor]]:
    """What the client trains on in a round, in order."""
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(net: Net, w: Tensor, x: Tensor, y: Tensor, extra: dict[str, Tensor]) -> Tensor:
        seen.append((x.clone(), y.clone()))
        return net.loss(w, x, y)

    pool = make_setting(s.net, s.data, s.training, s.rounds)
    Local(pool, torch.tensor([client]), round, torch.empty(1, 0)).fit(s.net.w0[None], loss=loss)
    return seen


@pytest.mark.parametrize("engine", ["threads", "vmap", "chain"])
@pytest.mark.parametrize("keep", [False, True])
def test_moments_over_rounds_are_those_of_one_optimizer_or_of_one_a_round(engine: str, keep: bool) -> None:
    """A client that trains alone, absent from one round in between: kept moments wait for it."""
    s = made(Training(**ADAMW, keep_moments=keep), engine)
    cohorts = [[0, 1, 2], [0, 2], [0, 1, 2]]
    state = play(LocalOnly(), s, 3, lambda r: cohorts[r - 1])[-1][0]
    for i in range(3):
        module = s.net.load(build(), s.net.w0)
        adamw, count = torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1), 0
        for r, ids in enumerate(cohorts, 1):
            if i not in ids:
                continue
            if not keep:
                adamw = torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1)
            for x, y in batches(s, i, r):
                adamw.zero_grad()
                F.cross_entropy(module(x), y).backward()
                adamw.step()
                count += 1
        torch.testing.assert_close(state.own["w"][i], s.net.row(module), rtol=1e-9, atol=1e-12)
        if keep:
            (moments,) = state.moments.values()
            mean = torch.cat([adamw.state[p]["exp_avg"].reshape(-1) for p in module.parameters()])
            assert moments[i, -1] == count
            torch.testing.assert_close(moments[i, : s.net.size], mean, rtol=1e-9, atol=1e-12)
    assert bool(state.moments) is keep


def test_kept_moments_belong_to_accepted_rounds_and_to_those_who_were_there() -> None:
    class Breaks(FedAvg):
        def client(self, down: Any, own: Any, local: Local) -> Any:
            own, up = super().client(down, own, local)
            broken = torch.isin(local.ids, torch.tensor([1]))[:, None] & (local.round in (2, 3))
            everybody = local.round == 3
            return own, {"delta": torch.where(broken | everybody, torch.inf, up["delta"])}

    s = made(KEPT)
    states = [state.moments for state, _ in play(Breaks(), s, 4, lambda r: [0, 1] if r < 4 else [0])]
    key = f"fit {s.net.size}"
    first, dropped, void, last = (m[key] for m in states)
    assert first[0].any() and first[1].any() and not first[2].any()  # absent
    assert torch.equal(dropped[1], first[1]) and dropped[0, -1] == 2 * first[0, -1]  # not finite: not there
    assert torch.equal(void, dropped)
    assert last[0, -1] == 3 * first[0, -1] and torch.equal(last[1:], void[1:])


def test_a_probe_and_an_evaluation_keep_nothing() -> None:
    s = made(KEPT)
    (state, _), *_ = play(Ditto(), s, 1)
    assert list(state.moments) == [f"fit {s.net.size}"]  # of the personal pass; the global one is a probe
    local = Local(s, torch.arange(3), 1, torch.empty(3, 0))
    assert torch.equal(local.fit(s.net.w0.expand(3, -1)).w, local.fit(s.net.w0.expand(3, -1)).w)


def test_a_warm_start_goes_on_with_the_moments() -> None:
    def run(rounds: int, **more: Any) -> Simulation:
        simulation = Simulation("local", Net(build), federation(), KEPT, rounds=rounds, eval_every=0, **more)
        simulation.run()
        return simulation

    whole, half = run(4), run(2)
    rest = run(4, warm_start=half.state)
    assert torch.equal(whole.state.own["w"], rest.state.own["w"])
    assert not torch.equal(half.state.moments[f"fit {whole.setting.net.size}"], rest.state.moments[f"fit {whole.setting.net.size}"])


@pytest.mark.parametrize(
    "alg",
    [
        Scaffold(option="II"), Waffle(option="II"), Waffle(normalize_by_steps=True), FedDWA(guidance="full_grad"), Mocha(),
        Mocha(regulariser="server"), APFL(), PFedMe(), PerFedAvg(), QFedAvg(q=1.0), FactorizedWaffle(),
    ],
)  # fmt: skip
def test_a_method_that_rests_on_sgd_refuses_adamw(alg: FedAvg) -> None:
    with pytest.raises(ValueError, match=rf"^local_optimizer: {type(alg).__name__} .*; take local_optimizer='sgd'\.$"):
        Simulation(alg, build, federation(), Training(**ADAMW))
    s = made(Training(**ADAMW))
    net = alg.prepare(s.net)
    with pytest.raises(ValueError, match=r"^local_optimizer: "):
        step(alg, begin(alg, net, 3), s._replace(net=net), torch.arange(3))


@pytest.mark.parametrize("alg", [Scaffold(option="I"), FedDWA(guidance="full_grad"), APFL(), PFedMe(), PerFedAvg(), FactorizedWaffle()])
def test_a_method_of_whole_gradients_refuses_clipping(alg: FedAvg) -> None:
    with pytest.raises(ValueError, match=rf"^clip_grad: {type(alg).__name__} .*leave clip_grad out"):
        Simulation(alg, build, federation(), Training(clip_grad=1.0))


def test_option_ii_with_clipping_is_the_mean_of_the_clipped_gradients() -> None:
    s = made(Training(lr=0.1, batch_size=10, clip_grad=0.3, weight_decay=0.1))
    one, two = (play(Scaffold(option=o), s, 2)[-1][0] for o in ("mean_grad", "II"))
    torch.testing.assert_close(one.own["c"], two.own["c"], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(one.own["c"], play(Scaffold(), made(Training(lr=0.1, batch_size=10, weight_decay=0.1)), 2)[-1][0].own["c"])


@pytest.mark.parametrize("name", swept(sorted(set(ALGORITHMS) - {"mocha", "apfl", "pfedme", "per_fedavg", "qfedavg", "factorized_waffle"})))
def test_the_others_train_by_adamw(name: str) -> None:
    simulation = Simulation(name, Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))), images(), KEPT, rounds=2)
    assert simulation.run().rounds[-1]["eval"]["loss"] and simulation.state.moments


def test_the_record_says_who_takes_the_steps() -> None:
    net, data = Net(build), federation()
    for training, said in ((Training(), False), (Training(**ADAMW), True)):
        path = Simulation("fedavg", net, data, training).header()["path"]
        assert path["form"] == "chain" and ("AdamW" in path["why"]) is said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"local_optimizer": "adam"}, "local_optimizer: expected 'sgd' or 'adamw', got 'adam'"),
        ({"betas": (0.9, 1.0)}, "betas and eps: expected"),
        ({"eps": -1.0}, "betas and eps: expected"),
        ({"local_optimizer": "adamw", "momentum": 0.9}, "momentum: AdamW has betas in its place"),
        ({"keep_moments": True}, "keep_moments: SGD has none"),
        ({"clip_grad": 0.0}, "clip_grad: expected a finite number above 0"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        Training(**given)


def test_kept_moments_stay_with_their_clients_when_another_breaks() -> None:
    """The first of three is dropped: the others' moments are those of a round without it."""

    class Breaks(FedAvg):
        def client(self, down: Any, own: Any, local: Local) -> Any:
            own, up = super().client(down, own, local)
            return own, {"delta": torch.where((local.ids == 0)[:, None], torch.nan, up["delta"])}

    s = made(KEPT)
    (broken, done), (without, _) = play(Breaks(), s, 1)[0], play(FedAvg(), s, 1, lambda r: [1, 2])[0]
    assert done.dropped == [0]
    for key, moments in without.moments.items():
        assert torch.equal(broken.moments[key], moments) and bool(moments[1:].any()) and not bool(moments[0].any())
