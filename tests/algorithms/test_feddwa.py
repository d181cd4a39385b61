"""FedDWA: golden values, what its weights must obey, and the rounds around them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from doors import spread
from methods import FedDWA, FedDWAQP
from parts.edges import normal
from parts.rivals import GOLDEN
from small import (
    ENGINES,
    F64,
    after,
    at_work,
    double,
    near,
    points,
    served,
    some,
    t,
    tiny,
)
from small import near as close

from pflcore import Training, evaluate, ops
from pflcore.simulation.round import Setup, begin


def matrix(mix, ids, n):
    """The weights of a round of the clients `ids` as a matrix [N, N]."""
    whole = torch.zeros(n, n, dtype=F64)
    return whole.index_copy_(0, ids, spread(mix.weight, ids[mix.index], n))


def mixed(alg, w, g):
    """The server's models and its weights [N, N] after models `w` and guidance `g` came in."""
    n = len(w)
    up = {"w": w, "g": g}
    state = {"x": torch.zeros_like(w), "seen": torch.zeros(n, dtype=torch.bool)}
    mix = alg.update(state, up, some(n))[1]
    return served(alg, state, up, some(n))["x"], matrix(mix, torch.arange(n), n)


def weights(alg, w, g):
    return mixed(alg, w, g)[1]


def weights_of(done, n):
    return matrix(done.mix, done.cohort.ids, n)


# golden values -------------------------------------------------------------------------------


def test_golden_weights_and_mixes():
    a1 = GOLDEN["A1_feddwa_basic"]
    w, g = t(a1["W"]), t(a1["G"])
    close(ops.pairwise_sqdist(g, w), a1["D2"])
    for k, name in ((9, "full"), (2, "top2"), (1, "top1")):
        x, p = mixed(FedDWA(k=k), w, g)
        close(p, a1[f"P_{name}"])
        if k > 1:
            close(x, a1[f"W_next_{name}"])


@ENGINES
@pytest.mark.parametrize("guidance", ["epoch", "full_grad", "steps"])  # with one batch one thing
def test_golden_rounds(guidance, engine):
    a4 = GOLDEN["A4_feddwa_scalar_rounds"]
    s = points(a4["c"], a4["eta"], engine=engine)
    alg = FedDWA(k=a4["K"], guidance=guidance)
    state = None
    for want in a4["rounds"]:
        state, done = after(alg, s, 1, state)
        close(weights_of(done, 4), want["P_top2"], 1e-8)
        close(state.server["x"][:, 0], want["w_next"])


def test_golden_partial_participation():
    a5 = GOLDEN["A5_feddwa_partial"]
    s = points(a5["c"], a5["eta"])
    alg = FedDWA(k=a5["K"])
    state = begin(alg, s.net, 4)
    for ids, want in zip(a5["sampled"], a5["rounds"], strict=True):
        state, done = after(alg, s, [sorted(ids)], state)
        there = torch.tensor(want["S"])
        p = weights_of(done, 4)
        close(p[there][:, there], want["P_top2"], 1e-8)
        close(p.sum(), len(ids))
        close(state.server["x"][:, 0], want["w_all_after"])


@pytest.mark.parametrize(("guidance", "name"), [("epoch", "epoch"), ("full_grad", "fullgrad")])
def test_golden_guidance_epoch_against_full_gradient(guidance, name):
    """One epoch ahead and one gradient step ahead can choose opposite neighbours."""
    a9 = GOLDEN["A9_guidance_epoch_vs_fullgrad"]

    class Ordered:  # local training in the order that the golden values have
        lr = a9["eta"]
        setting = SimpleNamespace(training=Training())

        def fit(self, start, *, epochs=1, **_):
            w = start.clone()
            for i, batches in enumerate(a9["batches"]):
                for b in batches * epochs:
                    w[i] -= self.lr * (w[i] - t(b).mean())
            return SimpleNamespace(w=w)

        def after(self, fit):
            return self

        def grad(self, w):
            return w - t([[sum(map(sum, b)) / sum(map(len, b))] for b in a9["batches"]])

    down = {"x": torch.zeros(2, 1, dtype=F64)}
    _, up, _ = FedDWA(guidance=guidance).train(down, {}, Ordered())
    close(up["w"][:, 0], a9["w_hat"])
    close(up["g"][:, 0], a9[f"g_{name}"])
    close(weights(FedDWA(), up["w"], up["g"]), a9[f"P_{name}"])


def test_golden_qp_of_a1():
    a1 = GOLDEN["A1_feddwa_basic"]
    a7 = GOLDEN["A7_qp_on_A1"]
    w, g = t(a1["W"]), t(a1["G"])
    x, p = mixed(FedDWAQP(k=3), w, g)
    near(p, a7["p_simplex"], 1e-8, 1e-9)
    near(((x - g) ** 2).sum(1), a7["residual_sq_QP"], 1e-8)


def test_qp_bridge_runs_from_eq15_to_eq12():
    w, g = torch.randn(2, 12, 30, dtype=F64)
    start = weights(FedDWAQP(k=4, theta=0.0, ridge=0.0), w, g)
    near(start, weights(FedDWA(k=4), w, g), 1e-8, 1e-10)
    near(weights(FedDWAQP(k=4, theta=0.0), w, g), start, 1e-6, 1e-8)
    ends = (mixed(FedDWAQP(k=4, theta=theta), w, g)[0] for theta in (0.0, 0.5, 1.0))
    eq15, between, eq12 = (((x - g) ** 2).sum() for x in ends)
    assert eq15 > between > eq12
    with pytest.raises(ValueError, match=r"^power: expected 1, got 2.0"):
        FedDWAQP(power=2.0)


# what the weights must obey ------------------------------------------------------------------


@pytest.mark.parametrize("long", [1, 1000], ids=["groups", "blocks"])
@pytest.mark.parametrize("k", [1, 5, 99])
def test_a_search_by_groups_changes_no_bit(k, long, monkeypatch):
    """Clusters, copies of models, a guidance that is another's model; and a cohort of many takes it
    by itself."""
    w = torch.randn(5, 67).repeat(8, 1) + 1e-3 * torch.randn(40, 67)
    w[30:35] = w[5:10]
    guide = w + 1e-3 * torch.randn(40, 67)
    guide[:20] = w[torch.randint(0, 40, (20,))]
    guide[20:34] = w[20:34]
    want = FedDWA(k=k, search="exact").weights(guide, w)
    assert all(map(torch.equal, FedDWA(k=k, search="groups").weights(guide, w), want))
    monkeypatch.setattr("pflcore.algorithms.relations.MANY", 40)
    monkeypatch.setattr("pflcore.algorithms.relations.LONG", long)
    monkeypatch.setattr(ops, "pairwise_sqdist", None)  # not all pairs
    assert all(map(torch.equal, FedDWA(k=k).weights(guide, w), want))


def test_power_and_stride_keep_the_neighbours_or_the_rule():
    """Weights of one round by hand: power 0 is even among the same neighbours, power 2 squares; a
    stride makes small steps count."""
    w = t([[0.0], [1.0], [2.5], [9.0]])
    options = ({}, {"power": 0.0}, {"power": 2.0}, {"stride": 1.0})
    paper, even, square, far = (weights(FedDWA(k=3, **o), w, w + 1e-3) for o in options)
    close(even, t([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 1]]) / 3)
    assert ((paper > 0) == (even > 0)).all() and paper.diagonal().min() > 0.9999
    close(square, paper**2 / (paper**2).sum(1, keepdim=True))
    assert far[0, 1] == 1.0  # client 0 strides from 0 to 1, onto client 1
    close(far[1], t([1 / 4, 1, 4, 0]) / 5.25)  # from 1 to 2
    close(mixed(FedDWA(k=3, power=0.0), w, w + 1e-3)[0][0], [3.5 / 3])


def test_no_power_makes_weights_that_are_no_numbers():
    w = torch.eye(6, dtype=F64)
    x, p = mixed(FedDWA(k=6, power=5000.0), w, 0.5 + 0.01 * w)
    near(p.sum(1), torch.ones(6))
    near(x, w, 1e-7, 1e-7)  # everybody's nearest is its own, and has all the weight


# rounds --------------------------------------------------------------------------------------

SIZES = (8, 11, 14, 17, 20, 23)


@ENGINES
def test_look_ahead_leaves_no_trace(engine):
    """Whatever the guidance is, training, statistics and later shuffles are those of a run that
    never looked ahead."""
    s = normal(SIZES, engine, momentum=0.5, batch_size=6)
    found = []
    for guidance in ("previous", "epoch", "steps", "full_grad"):
        local = at_work(s, round=3)
        down = {"x": s.net.w0.expand(6, -1)}
        _, up, done = FedDWA(guidance=guidance, ahead=2).train(down, {}, local)
        later = local.after(done).fit(up["w"], stream="later")
        found.append([up["w"], done.buffers, later.w])
        assert "g" not in up or not torch.equal(up["g"], up["w"])
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def test_a_look_ahead_goes_its_own_way_and_further_with_more_steps():
    """An epoch from the same place as a round of training, all the same."""
    local = at_work(tiny(batch_size=4))
    w = local.setting.net.w0.expand(3, -1)
    one, two = (FedDWA(ahead=ahead).look_ahead(w, local) for ahead in (1, 2))
    for ahead, epochs in ((one, 1), (two, 2)):
        trained = local.fit(w, epochs=epochs).w
        assert not any(map(torch.equal, ahead, trained))
        near(ahead, trained, 0, 0.2)
    assert (two - one).abs().amax(1).min() > 0.01


def test_the_full_gradient_guidance_decays_as_training_does():
    """With one batch a client the guidance is one more epoch of training, momentum from zero and
    weight decay included."""
    s = double(tiny((6, 7), batch_size=32, momentum=0.5, weight_decay=0.3))
    w = s.net.w0.expand(2, -1)
    ahead = FedDWA(guidance="full_grad", ahead=3).look_ahead(w, at_work(s))
    near(ahead, at_work(s).fit(w, epochs=3).w)


def test_previous_guidance_starts_alone():
    s = tiny(SIZES)
    alg = FedDWA(guidance="previous", k=3)
    state, done = after(alg, s, [range(4)])
    # nobody has a previous model yet
    assert torch.equal(weights_of(done, 6)[:4, :4], torch.eye(4, dtype=F64))
    last = state.server["last"].clone()
    state, done = after(alg, s, [[1, 2, 5]], state)
    new = state.server["last"]
    want = ops.feddwa_weights(ops.pairwise_sqdist(last[[1, 2]], new[[1, 2, 5]]), 3)
    p = weights_of(done, 6)
    near(p[[1, 2]][:, [1, 2, 5]], spread(want.weight, want.index, 3))
    assert p[5, 5] == 1 and torch.equal(new[0], last[0])


def test_a_last_model_kept_by_the_client_is_the_servers_copy_and_is_uploaded():
    """App. C.6: case i gives what case ii gives, for one more model of traffic, as a guidance that
    is trained ahead."""
    s = tiny(SIZES)
    cohorts = ([0, 1, 2, 3], [1, 2, 5], [0, 1, 2, 3, 4, 5])
    guides = "kept", "epoch", "previous", "current"
    found = [after(FedDWA(guidance=guidance, k=3), s, cohorts) for guidance in guides]
    assert torch.equal(found[0][0].server["x"], found[2][0].server["x"])
    one = 6 * 4 * s.net.size
    assert [done.bytes_up for _, done in found] == [2 * one, 2 * one, one, one]
    assert [done.bytes_down for _, done in found] == [one] * 4


def test_fewer_than_k_share_all_weight_and_a_newcomer_starts_from_the_initial_model():
    """Places that nothing fills have weight 0 and client 0's number, which is in the cohort,
    too."""
    s, alg = tiny(SIZES), FedDWA(k=5)
    state, done = after(alg, s, [[0, 2, 3]])
    near(weights_of(done, 6)[[0, 2, 3]].sum(1), torch.ones(3))
    x = alg.send(state.server, some(6, ids=[3, 5]))["x"]
    assert torch.equal(x[0], state.server["x"][3]) and torch.equal(x[1], s.net.w0)


def test_the_guidance_can_be_served():
    s = points([[1.0, 2.0], [5.0]])
    alg = FedDWA(k=1)
    state, _ = after(alg, s)
    target = t([[1.5], [5.0]])
    ahead = target + (state.server["x"] - target) * 0.9**2  # one step of training, one ahead
    got = evaluate(Setup(replace(alg, serve="guidance"), s), state, "test")["loss"]
    close(got, [((ahead[0] - t([1.0, 2.0])) ** 2).mean() / 2, (ahead[1, 0] - 5.0) ** 2 / 2])
    for guidance in ("previous", "current"):
        with pytest.raises(ValueError, match=r"^serve: expected its default"):
            FedDWA(serve="guidance", guidance=guidance)
