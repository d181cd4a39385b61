"""FedDWA: golden values, what its weights must obey, and the rounds around them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from doors import spread
from methods import (
    FedDWA,
    FedDWAQP,
    LocalOnly,
)
from parts.feddwa import GOLDEN, dense, models
from parts.fine_points import three
from small import F64, make_setting, near, play, served, t, tiny_model
from small import images as small_images
from small import near as close

from pflcore import Clients, Federation, Net, Training, evaluate, ops, step
from pflcore.algorithms import Cohort
from pflcore.simulation.round import Setup, begin


class Point(nn.Module):
    """A model that is one number: its score is the parameter itself, whatever the input."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x))


def half_squared(scores, y):
    return ((scores - y) ** 2).mean() / 2


def points(targets, lr, batch_size=100, seed=0, engine="loop", **training):
    """f_i(w) = mean (w - y)^2 / 2 over the client's targets."""
    y = torch.cat([t(c) for c in targets])
    ends = torch.arange(len(y)).split([len(c) for c in targets])
    data = Federation(
        torch.zeros(2 * len(y), 1, dtype=torch.float64),
        y.repeat(2),
        {"train": list(ends), "test": [i + len(y) for i in ends]},
    )
    return make_setting(
        Net(Point, half_squared),
        data,
        Training(lr=lr, batch_size=batch_size, **training),
        10,
        engine=engine,
        workers=1,
        seed=seed,
    )


def cohort(ids, n, round=1):
    return Cohort(torch.tensor(ids), torch.ones(len(ids), dtype=torch.long), n, round, 10)


def mixed(alg, w, g, ids=None, start=None):
    """The server's models "x" after models `w` and guidance `g` came in, and its weights "p" [N,
    N]."""
    ids = list(range(len(w))) if ids is None else ids
    n, up = max(ids) + 1, {"w": w, "g": g}
    state = {
        "x": torch.zeros(n, w.shape[1], dtype=w.dtype) if start is None else start,
        "seen": torch.zeros(n, dtype=torch.bool),
    }
    _, mix = alg.update(state, up, cohort(ids, n))
    return {
        "x": served(alg, state, up, cohort(ids, n))["x"],
        "p": matrix(mix, torch.tensor(ids), n),
    }


def matrix(mix, ids, n):
    """The weights of a round of the clients `ids` as a matrix [N, N]."""
    return torch.zeros(n, n, dtype=torch.float64).index_copy_(
        0, ids, spread(mix.weight, ids[mix.index], n)
    )


def weights_of(done, n):
    """The same of what `step` said."""
    return matrix(done.mix, done.cohort.ids, n)


# golden values --------------------------------------------------------------


def test_golden_weights_and_mixes():
    a1 = GOLDEN["A1_feddwa_basic"]
    w, g = t(a1["W"]), t(a1["G"])
    close(ops.pairwise_sqdist(g, w), a1["D2"])
    for k, p, out in (
        (9, "P_full", "W_next_full"),
        (2, "P_top2", "W_next_top2"),
        (1, "P_top1", None),
    ):
        state = mixed(FedDWA(k=k), w, g)
        close(state["p"], a1[p])
        if out:
            close(state["x"], a1[out])
    assert not torch.allclose(
        mixed(FedDWA(k=9), w, g)["p"], t(a1["P_WRONG_power_minus1"]), atol=0.01
    )


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_golden_rounds(engine):
    a4 = GOLDEN["A4_feddwa_scalar_rounds"]
    for guidance in ("epoch", "full_grad", "steps"):  # with one batch they are one thing
        setting = points([[c] for c in a4["c"]], a4["eta"], engine=engine)
        alg = FedDWA(k=a4["K"], guidance=guidance)
        state = begin(alg, setting.net, 4)
        for want in a4["rounds"]:
            state, done = step(Setup(alg, setting), state, torch.arange(4))
            close(weights_of(done, 4), want["P_top2"], 1e-8)
            close(state.server["x"][:, 0], want["w_next"])


def test_golden_partial_participation():
    a5 = GOLDEN["A5_feddwa_partial"]
    setting = points([[c] for c in a5["c"]], a5["eta"])
    alg = FedDWA(k=a5["K"])
    state = begin(alg, setting.net, 4)
    for ids, want in zip(a5["sampled"], a5["rounds"], strict=True):
        before, absent = state.server["x"].clone(), sorted({0, 1, 2, 3} - set(ids))
        state, done = step(Setup(alg, setting), state, torch.tensor(sorted(ids)))
        s, p = torch.tensor(want["S"]), weights_of(done, 4)
        close(p[s][:, s], want["P_top2"], 1e-8)
        close(state.server["x"][:, 0], want["w_all_after"])
        assert torch.equal(state.server["x"][absent], before[absent])
        assert not p[absent].any() and not p[:, absent].any()


def test_golden_guidance_epoch_against_full_gradient():
    """One epoch ahead and one gradient step ahead can choose opposite neighbours."""
    a9 = GOLDEN["A9_guidance_epoch_vs_fullgrad"]

    class Fixed:  # local training in the order that the golden values have
        lr = a9["eta"]
        setting = SimpleNamespace(training=Training())

        def fit(self, start, *, epochs=1, **_):
            w = start.clone()
            for _ in range(epochs):
                for i, batches in enumerate(a9["batches"]):
                    for b in batches:
                        w[i] -= self.lr * (w[i] - t(b).mean())
            return SimpleNamespace(w=w)

        def after(self, fit):
            return self

        def grad(self, w):
            return torch.stack(
                [
                    w[i] - t([y for part in b for y in part]).mean()
                    for i, b in enumerate(a9["batches"])
                ]
            )

    for guidance, name in (("epoch", "epoch"), ("full_grad", "fullgrad")):
        _, up = FedDWA(guidance=guidance).train(
            {"x": torch.zeros(2, 1, dtype=torch.float64)}, {}, Fixed()
        )[:2]
        close(up["w"][:, 0], a9["w_hat"])
        close(up["g"][:, 0], a9[f"g_{name}"])
        close(mixed(FedDWA(), up["w"], up["g"])["p"], a9[f"P_{name}"])


def test_golden_qp_of_a1():
    a1, a7 = GOLDEN["A1_feddwa_basic"], GOLDEN["A7_qp_on_A1"]
    w, g = t(a1["W"]), t(a1["G"])
    state = mixed(FedDWAQP(k=3), w, g)
    torch.testing.assert_close(state["p"], t(a7["p_simplex"]), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        ((state["x"] - g) ** 2).sum(1), t(a7["residual_sq_QP"]), rtol=1e-8, atol=1e-12
    )
    for k, want in ((3, "residual_sq_eq15"), (2, "residual_sq_top2")):
        close(((mixed(FedDWA(k=k), w, g)["x"] - g) ** 2).sum(1), a7[want])


def test_qp_bridge_runs_from_eq15_to_eq12():
    gen = torch.Generator().manual_seed(3)
    w, g = torch.randn(12, 30, generator=gen).double(), torch.randn(12, 30, generator=gen).double()
    start = mixed(FedDWAQP(k=4, theta=0.0, ridge=0.0), w, g)
    torch.testing.assert_close(start["p"], mixed(FedDWA(k=4), w, g)["p"], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(
        mixed(FedDWAQP(k=4, theta=0.0), w, g)["p"], start["p"], rtol=1e-6, atol=1e-8
    )
    residual = [
        ((mixed(FedDWAQP(k=4, theta=theta), w, g)["x"] - g) ** 2).sum() for theta in (0.0, 0.5, 1.0)
    ]
    assert residual[0] > residual[1] > residual[2]


def test_weights_follow_the_clients_and_no_frame():
    w, g = models(0, 40)
    p = mixed(FedDWA(k=6), w, g)["p"]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        mixed(FedDWA(k=6), w[order], g[order])["p"], p[order][:, order], rtol=0, atol=0
    )
    turn = torch.linalg.qr(
        torch.randn(50, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ).Q
    for move in (lambda z: z + 3.0, lambda z: z @ turn, lambda z: 1e-4 * z):
        torch.testing.assert_close(
            mixed(FedDWA(k=6), move(w), move(g))["p"], p, rtol=1e-8, atol=1e-12
        )


def test_float32_weights_are_right_for_forty_close_models():
    """Expanding the square, as torch.cdist does above 25 rows, is wrong by more than 100 percent
    here."""
    w, g = models(5, 40, dim=20_000, spread=1e-4, dtype=torch.float32)
    exact = mixed(FedDWA(k=5), w.double(), g.double())
    single = mixed(FedDWA(k=5), w, g)
    torch.testing.assert_close(single["p"], exact["p"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(single["x"].double(), exact["x"], rtol=1e-5, atol=1e-6)
    wrong = torch.cdist(g, w) ** 2
    assert bool((wrong / ops.pairwise_sqdist(g, w) - 1).abs().max() > 0.01)


def test_equal_models_and_guidance_on_a_model():
    w, g = models(2, 6)
    w[3], g[0] = w[1], w[0]
    g[1] = w[1]
    p = mixed(FedDWA(k=5), w, g)["p"]
    close(p[0], [1, 0, 0, 0, 0, 0])
    close(p[1], [0, 0.5, 0, 0.5, 0, 0])
    close(mixed(FedDWA(k=2), w, w)["p"][[0, 2, 4, 5]], torch.eye(6)[[0, 2, 4, 5]].tolist())


def test_self_may_miss_its_own_k():
    first = GOLDEN["A4_feddwa_scalar_rounds"]["rounds"][0]
    p = mixed(FedDWA(k=2), t(first["w_hat"])[:, None], t(first["guidance"])[:, None])["p"]
    assert p[2, 2] == 0 and p[2].nonzero()[:, 0].tolist() == [1, 3]


def test_results_do_not_alias_inputs():
    w, g = models(4, 5)
    kept = w.clone()
    state = mixed(FedDWA(k=3), w, g)
    assert torch.equal(w, kept)
    state["x"].zero_()
    assert torch.equal(w, kept)


# rounds ---------------------------------------------------------------------


def images(engine="vmap", n=6, seed=0, batch_norm=False, **training):
    gen = torch.Generator().manual_seed(seed)
    sizes = [8 + 3 * i for i in range(n)]
    total = sum(sizes)
    x, y = (
        torch.randn(2 * total, 1, 5, 5, generator=gen),
        torch.randint(0, 4, (2 * total,), generator=gen),
    )
    index = list(torch.arange(total).split(sizes))
    data = Federation(x, y, {"train": index, "test": [i + total for i in index]}, 4)

    def build():
        norm = [nn.BatchNorm2d(2)] if batch_norm else []
        return nn.Sequential(nn.Conv2d(1, 2, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(18, 4))

    options = {"lr": 0.1, "batch_size": 5} | training
    return make_setting(Net(build), data, Training(**options), 10, engine=engine, workers=2, seed=7)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_look_ahead_leaves_no_trace(engine):
    """Whatever the guidance is, training, statistics and later shuffles are those of a run that
    never looked ahead."""

    setting = images(engine, batch_norm=True, momentum=0.5)
    ids = torch.arange(6)
    after = []
    for guidance in ("previous", "epoch", "steps", "full_grad"):
        local = Clients(setting, ids, 3, setting.net.b0.expand(6, -1).clone())
        down = {"x": setting.net.w0.expand(6, -1)}
        _, up, done = FedDWA(guidance=guidance, ahead=2).train(down, {}, local)
        again = local.after(done).fit(up["w"], stream="later").w
        after.append((up["w"], done.buffers, again))
        if "g" in up:
            assert not torch.equal(up["g"], up["w"])
    for other in after[1:]:
        for a, b in zip(after[0], other, strict=True):
            assert torch.equal(a, b)


def test_more_steps_ahead_go_further():
    setting = points([[1.0, 2.0], [3.0, 5.0]], 0.1, batch_size=1)
    guides = []
    for ahead in (1, 2, 4):
        local = Clients(setting, torch.arange(2), 1, setting.net.b0.expand(2, -1))
        guides.append(FedDWA(ahead=ahead).look_ahead(torch.zeros(2, 1, dtype=torch.float64), local))
    assert bool((guides[0] < guides[1]).all() and (guides[1] < guides[2]).all())


def test_step_size_zero_keeps_everybody_at_home():
    setting = images(lr=0.0)
    alg = FedDWA()
    state = begin(alg, setting.net, 6)
    state.server["x"] += torch.arange(6)[:, None] / 10
    state.server["seen"][:] = True
    before = state.server["x"].clone()
    state, done = step(Setup(alg, setting), state, torch.arange(6))
    assert torch.equal(weights_of(done, 6), torch.eye(6, dtype=torch.float64)) and torch.equal(
        state.server["x"], before
    )


def test_previous_guidance_uploads_one_model_and_starts_alone():
    setting = images()
    alg, p = FedDWA(guidance="previous", k=3), setting.net.size
    state = begin(alg, setting.net, 6)
    state, done = step(Setup(alg, setting), state, torch.arange(4))
    assert (done.bytes_up, done.bytes_down) == (4 * 4 * p, 4 * 4 * p)
    # nobody has a previous model yet
    assert torch.equal(weights_of(done, 6)[:4, :4], torch.eye(4, dtype=torch.float64))
    last = state.server["last"].clone()
    state, done = step(Setup(alg, setting), state, torch.tensor([1, 2, 5]))
    want = ops.feddwa_weights(ops.pairwise_sqdist(last[[1, 2]], state.server["last"][[1, 2, 5]]), 3)
    p = weights_of(done, 6)
    torch.testing.assert_close(p[[1, 2]][:, [1, 2, 5]], dense(want, 3))
    assert p[5, 5] == 1
    assert torch.equal(state.server["last"][0], last[0])


def test_a_last_model_kept_by_the_client_is_the_servers_copy_and_is_uploaded():
    """App. C.6: case i gives what case ii gives, for one more model of traffic."""
    setting, ends = images(), []
    for guidance in ("kept", "previous"):
        setup = Setup(FedDWA(guidance=guidance, k=3), setting)
        state = begin(setup.algorithm, setting.net, 6)
        for ids in ([0, 1, 2, 3], [1, 2, 5], [0, 1, 2, 3, 4, 5]):
            state, done = step(setup, state, torch.tensor(ids))
        ends.append((state.server["x"], done.bytes_up, done.bytes_down))
    (kept, up, down), (cached, one, same) = ends
    assert torch.equal(kept, cached) and (up, down) == (2 * one, same)


def test_ahead_guidance_uploads_two_models():
    setting = images()
    _, done = step(Setup(FedDWA(), setting), begin(FedDWA(), setting.net, 6), torch.tensor([0, 3]))
    assert (done.bytes_up, done.bytes_down) == (
        2 * 2 * 4 * setting.net.size,
        2 * 4 * setting.net.size,
    )


def test_a_newcomer_starts_from_the_initial_model_or_the_mean():
    setting = images()
    for first in ("init", "mean"):
        alg = FedDWA(first=first)
        state = begin(alg, setting.net, 6)
        state, _ = step(Setup(alg, setting), state, torch.arange(4))
        x = alg.send(state.server, cohort([1, 5], 6))["x"]
        assert torch.equal(x[0], state.server["x"][1])
        want = setting.net.w0 if first == "init" else state.server["x"][:4].mean(0)
        torch.testing.assert_close(x[1], want)


@pytest.mark.parametrize("alg", [FedDWA(), FedDWAQP(theta=0.5)])
def test_engines_agree_and_everybody_is_evaluated(alg):
    found = []
    for engine in ("loop", "vmap"):
        setting = images(engine, batch_norm=True)
        state = begin(alg, setting.net, 6)
        for ids in ([0, 1, 2, 3, 4, 5], [1, 3, 5]):
            state, _ = step(Setup(alg, setting), state, torch.tensor(ids))
        found.append(
            (state.server["x"], state.batch_norm, evaluate(Setup(alg, setting), state)["loss"])
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert found[0][2].shape == (6,)


def test_clients_of_one_task_find_each_other():
    """Two groups with opposite labels: nearly all weight stays within a group, and the k nearest
    are the group."""
    gen = torch.Generator().manual_seed(0)
    n, each = 8, 40
    x = torch.randn(n * each, 6, generator=gen)
    y = (x @ torch.randn(6, generator=gen) > 0).long()
    index = list(torch.arange(n * each).split(each))
    group = torch.arange(n) // 4
    relabel = torch.stack([torch.tensor([[0, 1], [1, 0]])[g] for g in group])
    data = Federation(x, y, {"train": index}, 2, relabel)
    setting = make_setting(
        Net(nn.Linear(6, 2)), data, Training(lr=0.1, batch_size=10), 10, engine="vmap", workers=1
    )
    alg = FedDWA(k=8)
    state = begin(alg, setting.net, n)
    for _ in range(10):
        state, done = step(Setup(alg, setting), state, torch.arange(n))
    p, same = weights_of(done, n), group[:, None] == group
    assert p[same].mean() > 3 * p[~same].mean()
    near = p.topk(4, 1).indices
    assert torch.equal(group[near], group[:, None].expand(-1, 4))


@pytest.mark.parametrize("long", [1, 1000], ids=["groups", "blocks"])
@pytest.mark.parametrize("k", [1, 5, 99])
def test_a_search_by_groups_changes_no_bit(k, long, monkeypatch):
    """Clusters, copies of models, a guidance that is another's model; and a cohort of many takes it
    by itself."""
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(5, 67, generator=gen).repeat(8, 1) + 1e-3 * torch.randn(40, 67, generator=gen)
    w[30:35] = w[5:10]
    guide = w + 1e-3 * torch.randn(40, 67, generator=gen)
    guide[:20] = w[torch.randint(0, 40, (20,), generator=gen)]
    guide[20:34] = w[20:34]
    want = FedDWA(k=k, search="exact").weights(guide, w)
    for a, b in zip(FedDWA(k=k, search="groups").weights(guide, w), want, strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr("pflcore.algorithms.relations.MANY", 40)
    monkeypatch.setattr("pflcore.algorithms.relations.LONG", long)
    monkeypatch.setattr(ops, "pairwise_sqdist", None)  # not all pairs
    for a, b in zip(FedDWA(k=k).weights(guide, w), want, strict=True):
        assert torch.equal(a, b)


def test_power_and_stride_keep_the_neighbours_or_the_rule():
    """Weights of one round by hand: power 0 is even among the same neighbours, power 2 squares; a
    stride makes small steps count."""
    w = torch.tensor([[0.0], [1.0], [2.5], [9.0]], dtype=torch.float64)
    up = {"w": w, "g": w + 1e-3}
    net = Net(Point, half_squared)

    def mixed(**options):
        alg = FedDWA(k=3, **options)
        state = alg.init(**alg.initial(net), n=4) | {"x": w.clone()}
        _, mix = alg.update(state, up, cohort([0, 1, 2, 3], 4))
        return spread(mix.weight, mix.index, 4), served(alg, state, up, cohort([0, 1, 2, 3], 4))[
            "x"
        ]

    paper, even, square, far = (
        mixed(**o)[0] for o in ({}, {"power": 0.0}, {"power": 2.0}, {"stride": 1.0})
    )
    close(
        even,
        [
            [1 / 3, 1 / 3, 1 / 3, 0],
            [1 / 3, 1 / 3, 1 / 3, 0],
            [1 / 3, 1 / 3, 1 / 3, 0],
            [0, 1 / 3, 1 / 3, 1 / 3],
        ],
    )
    assert ((paper > 0) == (even > 0)).all() and paper.diagonal().min() > 0.9999
    close(square, (paper**2 / (paper**2).sum(1, keepdim=True)).tolist())
    assert far[0, 1] == 1.0  # client 0 strides from 0 to 1, onto client 1
    close(far[1], (t([1 / 4, 1, 4, 0]) / 5.25).tolist())  # from 1 to 2
    close(mixed(power=0.0)[1][0], [3.5 / 3])


def test_the_guidance_can_be_served():
    s = points([[1.0, 2.0], [5.0]], 0.1)
    alg = FedDWA(k=1)
    state, _ = step(Setup(alg, s), begin(alg, s.net, 2), torch.arange(2))
    x = state.server["x"]
    target = t([1.5, 5.0])[:, None]
    ahead = target + (x - target) * 0.9**2  # one step of training, one ahead
    got = evaluate(Setup(FedDWA(k=1, serve="guidance"), s), state, "test")["loss"]
    want = [
        (0.5 * ((ahead[0] - t([1.0, 2.0])) ** 2).mean()).item(),
        (0.5 * (ahead[1] - 5.0) ** 2).item(),
    ]
    close(got, want)
    assert (got < evaluate(Setup(alg, s), state, "test")["loss"]).all()


def test_no_power_makes_weights_that_are_no_numbers():
    w = torch.eye(6, dtype=torch.float64)
    cohort = Cohort(torch.arange(6), torch.ones(6, dtype=torch.int64), 6, 1, 1)
    alg = FedDWA(k=6, power=5000.0)
    net = type("Net", (), {"w0": torch.zeros(6, dtype=torch.float64)})()
    state = {k: v.clone() for k, v in alg.init(**alg.initial(net), n=6).items()}
    changes, mix = alg.update(state, {"w": w, "g": 0.5 * torch.ones_like(w) + 0.01 * w}, cohort)
    torch.testing.assert_close(mix.weight.sum(1), torch.ones(6, dtype=torch.float64))
    # everybody's nearest is its own, and has all the weight
    torch.testing.assert_close(changes["x"].rows, w)


@pytest.mark.parametrize("guidance", ["previous", "current"])
def test_no_guidance_is_served_where_none_is_trained(guidance):
    with pytest.raises(ValueError, match=r"^serve: expected its default beside guidance="):
        FedDWA(serve="guidance", guidance=guidance)


def test_the_quadratic_program_refuses_a_power():
    with pytest.raises(ValueError, match=r"^power: expected 1, got 2.0"):
        FedDWAQP(power=2.0)


def test_statistics_of_a_cohort_smaller_than_k_are_whole_means():
    """Places that nothing fills have weight 0 and client 0's number, which is in the cohort,
    too."""
    alg, setting = FedDWA(k=5), images()
    _, done = step(Setup(alg, setting), begin(alg, setting.net, 6), torch.tensor([0, 2, 3]))
    torch.testing.assert_close(
        weights_of(done, 6)[[0, 2, 3]].sum(1), torch.ones(3, dtype=torch.float64)
    )


def test_the_full_gradient_guidance_decays_as_training_does():
    """With one batch a client the guidance is one more epoch of training, momentum from zero and
    weight decay included."""
    s = make_setting(
        Net(lambda: tiny_model()().double()),
        _double(small_images((6, 7))),
        Training(lr=0.1, batch_size=32, momentum=0.5, weight_decay=0.3),
    )
    local = Clients(s, torch.arange(2), 1, torch.empty(2, 0))
    w = s.net.w0.expand(2, -1)
    near(FedDWA(guidance="full_grad", ahead=3).look_ahead(w, local), local.fit(w, epochs=3).w)


def test_the_current_model_as_guidance_is_local_training():
    s = make_setting(
        Net(tiny_model()), small_images((9, 12, 15)), Training(lr=0.1, batch_size=4), rounds=3
    )
    alone, local = play(FedDWA(guidance="current"), s)[-1], play(LocalOnly(), s)[-1]
    mix = alone[1].mix
    assert torch.equal(alone[0].server["x"], local[0].clients["w"])
    assert torch.equal(spread(mix.weight, mix.index, 3), torch.eye(3, dtype=F64))
    assert alone[1].bytes_up == 3 * s.net.size * 4


def _double(data):
    return Federation(data.x.double(), data.y, data.index, 4, data.relabel)


def test_feddwas_look_ahead_takes_a_shuffle_of_its_own():
    s, local = three()
    w = s.net.w0.expand(3, -1)
    ahead = FedDWA().look_ahead(w, local)
    assert not any(torch.equal(a, b) for a, b in zip(ahead, local.fit(w).w, strict=True))
    # an epoch from the same place, all the same
    torch.testing.assert_close(ahead, local.fit(w).w, atol=0.2, rtol=0)


def test_weights_of_a_cohort_smaller_than_k_keep_the_first_clients():
    """Places that nothing fills have weight 0 and client 0's number."""
    p, near = t([[0.75, 0.25, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 2, 0, 0], [2, 0, 0, 0]])
    assert spread(p, near, 3).tolist() == [[0.75, 0, 0.25], [0, 0, 1]]
