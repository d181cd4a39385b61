"""Fine points of the methods that only unequal clients, a second round or a second minibatch can show."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from small import images, play, quadratics, setting, tiny_model
from torch import Tensor

from pflcore.algorithms import FedAvg
from pflcore.algorithms.base import Cohort, Pool, Setting, Tensors, cohort_from
from pflcore.algorithms.clustered_fl import ClusteredFL
from pflcore.algorithms.fedamp import FedAMP, HeurFedAMP
from pflcore.algorithms.feddwa import FedDWA, spread
from pflcore.algorithms.fedfomo import FedFomo
from pflcore.algorithms.hypcluster import fit_all
from pflcore.algorithms.mocha import Mocha
from pflcore.algorithms.per_fedavg import PerFedAvg
from pflcore.algorithms.scaffold import Scaffold
from pflcore.algorithms.waffle import Waffle
from pflcore.local import Local, Training
from pflcore.local.net import Net
from pflcore.simulation.round import begin, step
from pflcore.simulation.uploads import shortened


def t(values: list[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cohort(n: int, round: int = 1, ids: list[int] | None = None) -> Cohort:
    who = torch.arange(n) if ids is None else torch.tensor(ids)
    return Cohort(who, torch.full((len(who),), 1 / len(who), dtype=torch.float64), torch.ones_like(who), n, round, 100)


def three(training: Training | None = None) -> tuple[Setting, Local]:
    """Three clients of 7, 20 and 31 samples, and what a hook of the first round is given."""
    data = images()
    s = setting(Net(tiny_model()), data, training or Training(lr=0.1, batch_size=4), 10)
    return s, Local(s, torch.arange(3), 1, s.net.b0.expand(3, -1))


def test_weight_decay_is_part_of_scaffolds_full_gradient() -> None:
    """The loss is a (m - b)^2 / 2 and decay adds .5 m: at m = .5 the gradients are 1 (.5 - 1) + .25 and 2 (.5 + 2) + .25."""
    net, data = quadratics(t([[1.0], [2]]), t([[1.0], [-2]]), start=[0.5])
    s = setting(net, data, Training(lr=0.1, batch_size=1, weight_decay=0.5))
    state, _ = play(Scaffold(option="I"), s)[0]
    torch.testing.assert_close(state.own["c"][:, 0], t([-0.25, 5.25]))


def test_waffles_distances_of_gradients_do_not_depend_on_how_c_follows() -> None:
    """What is measured is the clients' gradients, also where their changes are what is uploaded."""
    s, local = three()
    down = {"x": s.net.w0.expand(3, -1), "c": torch.zeros(3, s.net.size)}
    own = {"c": torch.randn(3, s.net.size, generator=torch.Generator().manual_seed(0))}
    found = []
    for how in ("recompute", "literal"):
        alg = Waffle(distance_on="raw_grad", control_agg=how)  # type: ignore[arg-type]
        found.append(alg.mixing(begin(alg, s.net, 3).g, alg.client(down, own, local)[1], cohort(3))[0])
    torch.testing.assert_close(found[0], found[1])
    assert len(found[0].unique()) == 3


def test_feddwas_look_ahead_takes_a_shuffle_of_its_own() -> None:
    s, local = three()
    w = s.net.w0.expand(3, -1)
    ahead = FedDWA().look_ahead(w, local)
    assert not any(torch.equal(a, b) for a, b in zip(ahead, local.fit(w).w, strict=True))
    torch.testing.assert_close(ahead, local.fit(w).w, atol=0.2, rtol=0)  # an epoch from the same place, all the same


def test_who_has_never_come_mixes_nobody_and_gives_nothing() -> None:
    sqdist, norm2 = t([[0, 1, 2], [1, 0, 2], [2, 2, 0]]), t([1.0, 2, 3])
    for alg in (FedAMP(sigma=4.0), HeurFedAMP()):
        xi = alg.mixing(sqdist, norm2, torch.tensor([True, True, False]))
        assert xi[2].tolist() == [0, 0, 1] and xi[:2, 2].tolist() == [0, 0] and bool((xi[:2, :2] > 0).all())


def test_fedfomo_explores_by_the_whole_share_in_the_first_round() -> None:
    g = {"w": torch.zeros(5, 3), "seen": torch.ones(5, dtype=torch.bool), "p": torch.arange(25, dtype=torch.float64).view(5, 5)}
    alg, gen = FedFomo(m=1, epsilon=1.0, decay=1.0), torch.Generator().manual_seed(0)
    picks = {r: {int(alg.send(g, cohort(5, r, [0]), gen)["w"].index) for _ in range(60)} for r in (1, 2, 9)}
    assert picks == {1: {1, 2, 3, 4}, 2: {4}, 9: {4}}


def test_fedfomos_affinities_add_up_over_the_rounds() -> None:
    net, _ = quadratics(t([[1.0], [2]]), t([[1.0], [2]]))
    alg = FedFomo()
    state = begin(alg, net, 2)
    first, second = t([[0.0, 2], [-1, 0]]), t([[0.0, 5]])
    g = alg.server(state.g, {"w": torch.zeros(2, 1, dtype=torch.float64), "a": first}, cohort(2))
    g = alg.server(g, {"w": torch.zeros(1, 1, dtype=torch.float64), "a": second}, cohort(2, 2, [0]))
    assert g["p"].tolist() == [[0, 7], [-1, 0]] and g["found"].tolist() == [[0, 5], [0, 0]]


def test_the_minibatches_of_per_fedavg_are_independent() -> None:
    """Two samples with optima of their own, one a minibatch: two orders for D and two for D' make four ways to go, D' = D only two."""
    net, data = quadratics(t([[1.0]]), t([[0.0]]), start=[3.0], rows=2, noise=1.0)
    s = setting(net, data, Training(lr=0.3, batch_size=1))
    ways = set()
    for round in range(1, 60):
        up = PerFedAvg().client({"x": net.w0[None]}, {}, Local(s, torch.arange(1), round, net.b0[None]))[1]
        ways.add(round_off(up["delta"]))
    assert len(ways) == 4


def round_off(x: Tensor) -> float:
    return round(float(x), 9)


def test_clustered_fl_weighs_unequal_clients_alike() -> None:
    s, _ = three()
    (state, _), (uniform, _), (sized, _) = (play(a, s, 1)[0] for a in (ClusteredFL(), FedAvg(weighting="uniform"), FedAvg()))
    torch.testing.assert_close(state.g["x"][0], uniform.g["x"])
    assert not torch.allclose(uniform.g["x"], sized.g["x"])


def test_models_of_an_ensemble_shuffle_apart() -> None:
    """Two that start equal go different ways."""
    s, local = three()
    delta = fit_all(s.net.w0.expand(2, -1), s.net.b0.expand(2, -1), local)["delta"]
    assert not any(torch.equal(a, b) for a, b in delta)


def test_mochas_server_takes_as_long_a_step_as_its_clients() -> None:
    """Losses that are 0 leave the models where they are; W <- (I + lr steps lam Omega)^-1 W is 1 / 1.92 [[1.4, .2], [.2, 1.4]] W."""
    net, data = quadratics(t([[0.0], [0]]), t([[0.0], [0]]), rows=4)
    s = setting(net, data, Training(lr=0.1, batch_size=2, epochs=2))
    alg = Mocha(lam=0.5, outer=99, regulariser="server")
    state = begin(alg, net, 2)
    g = state.g | {"omega": t([[2.0, -1], [-1, 2]])}
    local = Local(s, torch.arange(2), 1, net.b0.expand(2, -1))
    _, up = alg.client({"w": t([[3.0], [1]])}, {"w": t([[3.0], [1]])}, local)
    torch.testing.assert_close(alg.server(g, up, cohort(2))["w"], t([[4.4 / 1.92], [2.0 / 1.92]]))


def test_shares_are_of_the_cohort_and_sum_to_one() -> None:
    size = torch.tensor([1, 2, 5])
    assert cohort_from(FedAvg(), torch.tensor([0, 3, 7]), size, 10, 1, 5).share.tolist() == [0.125, 0.25, 0.625]
    assert cohort_from(FedAvg(weighting="uniform"), torch.tensor([0, 7]), size[:2], 10, 1, 5).share.tolist() == [0.5, 0.5]


def test_weights_of_a_cohort_smaller_than_k_keep_the_first_clients() -> None:
    """Places that nothing fills have weight 0 and client 0's number."""
    p, near = t([[0.75, 0.25, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 2, 0, 0], [2, 0, 0, 0]])
    assert spread(p, near, 3).tolist() == [[0.75, 0, 0.25], [0, 0, 1]]


def test_fedamps_pull_is_lam_over_alpha() -> None:
    """One step of .1 at (w - 1)^2 / 2 from w = 3 with u = 5: 3 - .1 (2 + (.6 / 2) (3 - 5)) = 2.86."""
    net, data = quadratics(t([[1.0]]), t([[1.0]]), start=[3.0])
    local = Local(setting(net, data, Training(lr=0.1, batch_size=1)), torch.arange(1), 1, net.b0[None])
    own, _ = FedAMP(lam=0.6, alpha=2.0).client({"u": t([[5.0]])}, {"w": t([[3.0]])}, local)
    torch.testing.assert_close(own["w"], t([[2.86]]))


def test_fedfomo_does_not_take_a_model_that_was_not_sent() -> None:
    """Row 0 would be the best for everybody, but -1 is nobody's number."""
    net, data = quadratics(t([[1.0], [1]]), t([[0.0], [0]]), rows=4)
    data = replace(data, index={"train": data.index["train"], "val": data.index["test"]})
    local = Local(setting(net, data, Training(lr=0.0)), torch.arange(2), 2, net.b0.expand(2, -1))
    rows, index = t([[0.0], [2]]), torch.tensor([[1], [-1]])
    own, up = FedFomo().client({"w": Pool(rows, index)}, {"w": t([[4.0], [4]]), "old": t([[4.0], [4]])}, local)
    assert own["w"][:, 0].tolist() == [2, 4] and up["a"][1].tolist() == [0, 0]


def test_void_rounds_are_counted_in_a_row() -> None:
    """A round that was played ends the count."""

    class Breaks(FedAvg):
        def client(self, down: Any, own: Tensors, local: Local) -> tuple[Tensors, Tensors]:
            own, up = super().client(down, own, local)
            return own, {k: v * torch.nan if local.round in (1, 2, 4) else v for k, v in up.items()}

    s, _ = three()
    assert [state.void for state, _ in play(Breaks(), s, 4)] == [1, 2, 0, 1]


def test_statistics_that_fail_after_the_server_leave_the_round_undone() -> None:
    """FedDWA writes its models in place; what is mixed with them may still run out of memory."""

    class Fails(FedDWA):
        def statistics(self, g: Tensors, up: Tensors, cohort: Cohort) -> Tensor:
            raise MemoryError("as if")

    data = images()
    net = Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)))
    s = setting(net, data, Training(lr=0.1, batch_size=4))
    state = begin(Fails(), net, 3)
    before = {k: v.clone() for k, v in state.g.items()}
    with pytest.raises(MemoryError):
        step(Fails(), state, s, torch.arange(3), buffers="average")
    assert all(torch.equal(state.g[k], v) for k, v in before.items()) and not bool(state.joined.any())


def test_a_clipped_update_takes_its_control_variate_along() -> None:
    """An update of length 5 is cut to 1, one of .5 stays; so do their control variates, by the same factor."""
    up = {"delta": t([[3.0, 4], [0.3, 0.4]]), "control": t([[2.0, 2], [1, 1]])}
    cut = shortened(up, {}, torch.arange(2), 2, t([5.0, 0.5]), 1.0)
    torch.testing.assert_close(cut["delta"], t([[0.6, 0.8], [0.3, 0.4]]))
    torch.testing.assert_close(cut["control"], t([[0.4, 0.4], [1, 1]]))
