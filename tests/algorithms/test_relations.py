"""FedAMP, HeurFedAMP, SFL and MOCHA: golden values, and for each the law that its known bug
breaks."""

import pytest
import torch
from methods import SFL, FedAMP, HeurFedAMP, Mocha
from parts.rivals import GOLDEN, close, everybody, mixing
from small import F64, after, at_work, near, points, regression, some, t, tiny

from pflcore import ops
from pflcore.algorithms import FedAvg, Stop
from pflcore.simulation.round import begin

# FedAMP --------------------------------------------------------------------------------------


def test_golden_fedamp():
    c1 = GOLDEN["C1_fedamp"]
    w = t(c1["W"])
    close(ops.pairwise_sqdist(w), c1["D2"])
    for alpha, sigma, name in ((1.0, 1.0, "a1_s1"), (0.5, 2.0, "a05_s2")):
        xi = mixing(FedAMP(alpha=alpha, sigma=sigma), w)
        close(xi, c1[f"xi_{name}"])
        close(ops.aggregate(w, xi), c1[f"U_{name}"])


def test_golden_fedamp_with_too_large_a_step():
    c2 = GOLDEN["C2_fedamp_unstable_alpha"]
    with pytest.warns(UserWarning, match=r"alpha <= sigma / 3"):
        safe = mixing(FedAMP(), t(c2["W"]))
    others = t(c2["xi"]).fill_diagonal_(0)
    close(safe, others / others.sum(1, keepdim=True))


def test_golden_fedamp_proximal_term_moves_the_model():
    """Written with detached parameters, as in a widely used library, the term has no gradient and
    FedAMP is local training. The pull is lam / alpha."""
    c3 = GOLDEN["C3_fedamp_prox_step"]
    alg = FedAMP(lam=2 * c3["lam"], alpha=2 * c3["alpha"])
    down = {"u": t([[c3["u"]]])}
    own = {"w": t([[1.0]])}
    new, up, _ = alg.train(down, own, at_work(points([c3["c"]], 0.01)))
    close(up["w"], [[c3["one_sgd_step_from_w"]]])
    assert torch.equal(new["w"], up["w"]) and torch.equal(alg.model(down, new, None)["w"], up["w"])
    s = points([c3["c"]], 0.5)
    for round in range(1, 80):
        own, *_ = alg.train(down, own, at_work(s, round=round))
    close(own["w"], [[c3["w_star"]]])


def test_fedamp_mixes_latest_uploads_and_nobody_who_never_came():
    s = points([1.0, 2.0, 3.0, 4.0], 0.3)
    alg = FedAMP(sigma=2.0, alpha=0.2)
    state = begin(alg, s.net, 4)
    for ids in ([0, 1, 2], [1, 2], [0, 2]):
        u = alg.send(state.server, some(4, ids=ids))["u"]
        close(u, state.server["weights"][ids] @ state.server["w"])
        state, done = after(alg, s, [ids], state)
        close(state.server["sqdist"], ops.pairwise_sqdist(state.server["w"]))
        close(state.server["norm2"], state.server["w"][:, 0] ** 2)
        assert torch.equal(state.server["w"][ids], state.clients["w"][ids])
    report = alg.report(state.server, done.mix, done.cohort)
    w = state.server["w"][:, 0]
    assert state.server["last"].tolist() == [3, 2, 3, 0]
    # a stale model gives too
    close(report["weights"][0, 1], 0.1 * torch.exp(-((w[0] - w[1]) ** 2) / 2))


def test_who_has_never_come_mixes_nobody_and_gives_nothing():
    sqdist = t([[0, 1, 2], [1, 0, 2], [2, 2, 0]])
    norm2 = t([1.0, 2, 3])
    for alg in (FedAMP(sigma=4.0), HeurFedAMP()):
        xi = alg.mixing(sqdist, norm2, torch.tensor([True, True, False]))
        assert xi[2].tolist() == [0, 0, 1] and xi[:2, 2].tolist() == [0, 0]
        assert bool((xi[:2, :2] > 0).all())


def test_heurfedamp_of_zeros_and_of_one_client():
    xi = mixing(HeurFedAMP(xi_self=0.5), t([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    close(xi, [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
    for alg in (HeurFedAMP(), FedAMP()):
        close(mixing(alg, t([[1.0, 2.0]])), [[1.0]])


# SFL -----------------------------------------------------------------------------------------


def test_golden_sfl():
    f1 = GOLDEN["F1_sfl"]
    x = t(f1["X"])
    one, three, half = (
        mixing(SFL(t(f1["A"]), layers=layers, s=s), x)
        for layers, s in ((1, 1.0), (3, 1.0), (3, 0.5))
    )
    close(one, f1["A_norm"])
    close(one @ x, f1["one_layer"])
    close(three @ x, f1["three_layers"])
    close(three.mean(0) @ x, [f1["readout_global"]])
    close(half @ x, f1["alpha_mix_05"])


def test_sfl_neighbours_are_the_nearest():
    d = ops.pairwise_sqdist(t([[0.0], [1.0], [5.0], [5.5], [100.0]]))
    first, second = [1, 1, 0, 0, 0], [0, 0, 1, 1, 0]
    want = [first, first, second, second, [0, 0, 0, 1, 1]]
    assert SFL(k=1).graph(d, everybody(5)).tolist() == want
    assert SFL(k=9).graph(d, everybody(5)).sum() == 25
    assert not SFL(k=2).graph(d, t([1, 1, 0, 1, 1]).bool())[:, 2].any()


def test_sfl_on_the_complete_graph_is_fedavg():
    s = points([1.0, 2.0, 6.0])
    sfl = SFL(k=2, lam1=0.0, lam2=0.0)
    ours = after(sfl, s, 4)[0]
    avg = after(FedAvg(weighting="uniform"), s, 4)[0]
    for down in sfl.send(ours.server, some(3)).values():
        close(down, avg.server["x"].expand(3, -1))


@pytest.mark.parametrize(("lam1", "lam2", "epochs"), [(0.3, 0.3, 1), (0.3, 0.5, 2), (0.0, 0.0, 1)])
def test_sfl_regularisers_have_a_gradient(lam1, lam2, epochs):
    """The released code computes them on detached copies, so that SFL trains as if there were
    none."""
    down = {"x": t([[1.0], [1.0]]), "u": t([[0.0], [3.0]])}
    up = SFL(lam1=lam1, lam2=lam2).train(down, {}, at_work(points([2.0, 2.0], epochs=epochs)))[1]
    w = down["x"]
    for _ in range(epochs):
        w = w - 0.1 * ((w - 2) + lam1 * (w - down["u"]) + lam2 * (w - down["x"]))
    close(up["w"], w)


def test_sfl_with_a_given_graph():
    graph = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    s = points([1.0, 3.0, 8.0])
    for given in (graph, graph - torch.eye(3) * graph):  # a client counts itself, said or not
        alg = SFL(given, lam1=0.0, lam2=0.0)
        u = alg.send(after(alg, s)[0].server, some(3))["u"]
        close(u, [[0.2], [0.2], [0.8]])  # the row of zeros keeps its own
    for wrong in (graph[:2], -graph):
        with pytest.raises(ValueError, match=r"^adjacency: expected 3 x 3 numbers >= 0"):
            begin(SFL(wrong), s.net, 3)


def test_sfl_newcomers_hold_the_readout():
    s = points([1.0, 3.0, 8.0, 9.0])
    alg = SFL(k=1)
    down = alg.send(after(alg, s, [[0, 1, 2]])[0].server, some(4))
    close(down["u"][3], down["x"][3])
    close(down["x"][0], down["u"][:3].mean(0))


# MOCHA ---------------------------------------------------------------------------------------

TASKS = [
    ([[1, 2], [-1, 0.5], [0.3, -0.7]], [1, 0, 0.5]),
    ([[0.5, -1], [2, 1], [0, 1]], [0.2, 1, -0.4]),
]


@pytest.mark.parametrize("matrix", ["omega", "sigma"])
def test_mocha_reaches_the_closed_form_for_a_fixed_relation(matrix):
    """Two quadratic tasks, one full-batch step a round: the fixed point solves H_t w_t + lam sum_j
    Omega_tj w_j = b_t."""
    s = regression(TASKS, w0=(0.0, 0.0), lr=0.3)
    alg = Mocha(lam=0.2, outer=10_000, relation=matrix)
    omega = t([[2.1, -0.6], [-0.6, 1.8]])
    state = begin(alg, s.net, 2)
    state.server["omega"] = omega
    state, _ = after(alg, s, 250, state)
    x, y = (t(part) for part in zip(*TASKS, strict=True))
    hessian = torch.block_diag(*(x.mT @ x / 3)) + 0.2 * torch.kron(omega, torch.eye(2, dtype=F64))
    best = torch.linalg.solve(hessian, (x.mT @ y[..., None] / 3).view(4))
    near(state.server["w"], best.view(2, 2), 1e-7, 1e-8)
    assert torch.equal(state.clients["w"], state.server["w"])


def test_an_unstable_mocha_stops_with_a_sentence():
    with pytest.raises(Stop, match=r"lr 0\.1, lam 6 and delta 0\.01 .* must be below 2.*\.$"):
        after(Mocha(lam=6.0), tiny(), 20)
    # the first relation is checked, too
    with pytest.raises(Stop, match=r"^MOCHA is unstable from round 1 on"):
        after(Mocha(lam=2.0, outer=50), points([1.0] * 6, 0.5))
