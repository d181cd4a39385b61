"""Server optimizers, clusters, multi-task methods, kNN-Per and fine-tuning: worked examples first,
then laws."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from methods import (
    MRMTL,
    Ditto,
    Ensemble,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedOpt,
    FedYogi,
    FineTune,
    HypCluster,
    KnnPer,
    Mocha,
    QFedAvg,
)
from parts.motley_algorithms import D64, QUERY, Line, Z, close
from small import lines, make_setting, served, with_test

from pflcore import Clients, Federation, Net, Simulation, Training, evaluate, step
from pflcore.algorithms import ALGORITHMS, Cohort, FedAvg, Stop
from pflcore.simulation.round import Setup, begin


def half_squared(scores, y):
    return 0.5 * ((scores.reshape(y.shape) - y) ** 2).mean()


def federation(clients):
    return Federation.from_clients(
        with_test(
            [
                (torch.tensor(x, dtype=D64).reshape(len(y), -1), torch.tensor(y, dtype=D64))
                for x, y in clients
            ],
            [
                (torch.tensor(x, dtype=D64).reshape(len(y), -1), torch.tensor(y, dtype=D64))
                for x, y in clients
            ],
        ),
        dtype=None,
    )


class Slope(nn.Module):
    """w x + b."""

    def __init__(self):
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.randn(1, dtype=D64)) for _ in range(2))

    def forward(self, x):
        return self.w * x + self.b


def setting_of(
    clients,
    w0=(0.0,),
    rounds=1,
    lr=0.1,
    batch_size=100,
    criterion=half_squared,
    model=None,
    **options,
):
    fed = clients if isinstance(clients, Federation) else federation(clients)
    net = Net(model or (lambda: Line(w0)), criterion)
    return make_setting(
        net,
        fed,
        Training(lr=lr, batch_size=batch_size, **options),
        rounds,
        engine="vmap",
        workers=1,
    )


def play(alg, setting, rounds=1, state=None):
    state = state or begin(alg, setting.net, setting.data.n)
    for _ in range(rounds):
        state, _ = step(Setup(alg, setting), state, torch.arange(setting.data.n))
    return state


def classes_setting(seed=0, n=4, engine="vmap", rounds=5, val=True, **options):
    """A small classification federation: MLP, 3 classes, clients of different sizes, splits train,
    val, test."""
    gen = torch.Generator().manual_seed(seed)
    parts = []
    for i in range(n):
        size = {"train": 9 + 4 * i, "val": 6, "test": 8} if val else {"train": 9 + 4 * i, "test": 8}
        flip = torch.randperm(3, generator=gen)
        parts.append({})
        for s, m in size.items():
            x = torch.randn(m, 5, generator=gen)
            parts[-1][s] = (x, flip[x[:, :3].argmax(1)])
    net = Net(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    training = Training(**{"lr": 0.2, "batch_size": 4, **options})
    return make_setting(
        net,
        Federation.from_clients(parts, classes=3),
        training,
        rounds,
        engine=engine,
        workers=1,
        seed=3,
    )


# server optimizers ----------------------------------------------------------
def trajectory(alg, deltas, x0):
    x = torch.tensor(x0, dtype=D64)
    g = {"x": x, **alg.slots(x)}
    out = []
    for d in deltas:
        g = alg.improve(g, torch.tensor(d, dtype=D64))
        out.append(g["x"].tolist())
    return out


SCALARS = [
    (FedAvgM(), [1, 2.4, 3.41]),
    (FedAvgM(optimizer="nesterov"), [1.9, 3.66, 4.319]),
    (FedAvgM(optimizer="ema"), [0.1, 0.24, 0.341]),
    (FedAdam(v0=0.0), [0.0990099010, 0.2236146289, 0.3117606714]),
    (FedAdam(), [0.0990050489, 0.2236048965, 0.3117476533]),
    (FedAdam(v0=0.0, bias_correction="keras"), [0.0990099010, 0.1915239009, 0.2475795084]),
    (FedAdam(v0=0.0, bias_correction="torch"), [0.0999000999, 0.1931267984, 0.2495902564]),
    (FedAdagrad(v0=0.0), [0.0999000999, 0.1445814952, 0.1227787372]),
    (FedYogi(), [0.0990049999, 0.2231098153, 0.3105036776]),
]


@pytest.mark.parametrize(("alg", "expected"), SCALARS, ids=lambda v: getattr(v, "optimizer", ""))
def test_three_updates_of_one_weight(alg, expected):
    found = trajectory(alg, [[1.0], [0.5], [-0.25]], [0.0])
    close([x[0] for x in found], expected)


TWO = [
    (FedAvgM(optimizer="ema", server_lr=10.0), [[1, -1.6], [1.15, -1.34]]),
    (FedAvgM(optimizer="heavy_ball", server_lr=1.0), [[1, -1.6], [1.15, -1.34]]),
    (FedAdam(v0=0.0), [[1, -1.9024390244], [1.0937500000, -1.8405881156]]),
    (FedAdam(v0=0.0, bias_correction="keras"), [[1, -1.9024390244], [1.0696056052, -1.8565172117]]),
    (FedAdam(v0=0.0, bias_correction="torch"), [[1, -1.9002493766], [1.0735542387, -1.8533696715]]),
]


@pytest.mark.parametrize(("alg", "expected"), TWO, ids=lambda v: getattr(v, "optimizer", ""))
def test_two_rounds_of_two_clients(alg, expected):
    net = Net(lambda: Line((1.0, -2.0)))
    g = alg.init(**alg.initial(net), n=2)
    rounds = [([[0.3, 0.1], [-0.1, 0.5]], [10, 30]), ([[0.2, -0.4], [0.1, 0.2]], [20, 20])]
    for r, (delta, size) in enumerate(rounds):
        g = served(
            alg,
            g,
            {"delta": torch.tensor(delta, dtype=D64)},
            Cohort(torch.arange(2), torch.tensor(size), 2, r + 1, 2),
        )
        close(g["x"], expected[r])


@given(st.floats(0, 0.99), st.floats(0.01, 3), st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_ema_is_heavy_ball_with_a_smaller_step(beta, lr, deltas):
    a = trajectory(FedOpt(optimizer="ema", beta1=beta, server_lr=lr), [[d] for d in deltas], [0.5])
    b = trajectory(
        FedOpt(optimizer="heavy_ball", beta1=beta, server_lr=lr * (1 - beta)),
        [[d] for d in deltas],
        [0.5],
    )
    close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", ["heavy_ball", "nesterov", "ema"])
def test_no_momentum_is_fedavg(name):
    s = classes_setting()
    plain = play(FedAvg(server_lr=0.7), s, 3).server["x"]
    torch.testing.assert_close(
        play(FedOpt(optimizer=name, beta1=0.0, server_lr=0.7), s, 3).server["x"], plain
    )


def test_nothing_moves_an_adaptive_optimizer_without_updates():
    for alg in (FedAdam(), FedYogi(), FedAdagrad(), FedAdam(v0=0.0, bias_correction="keras")):
        assert trajectory(alg, [[0.0], [0.0]], [0.5]) == [[0.5], [0.5]]


Q = [
    (0.0, [0.9, 0.75]),
    (0.001, [0.9001716543, 0.7500829172]),
    (1.0, [0.9814814815, 0.8148148148]),
    (2.0, [0.9965870307, 0.8634812287]),
    (5.0, [0.9999730785, 0.9310808992]),
]


@pytest.mark.parametrize(("q", "expected"), Q)
def test_q_fedavg_by_hand(q, expected):
    alg, w = QFedAvg(q=q, weighting="uniform"), torch.tensor([1.0, 1.0], dtype=D64)

    class Fake:  # two clients that ended at given models, with given losses
        lr = 0.1

        def loss(self, rows):
            return torch.tensor([0.5, 2.0], dtype=D64)

        def fit(self, rows):
            return type("Fit", (), {"w": torch.tensor([[0.8, 1.0], [1.0, 0.5]], dtype=D64)})

    _, up = alg.train({"x": w.expand(2, -1)}, {}, Fake())[:2]
    cohort = Cohort(torch.arange(2), torch.tensor([1, 1]), 2, 1, 1)
    close(served(alg, {"x": w}, up, cohort)["x"], expected, atol=1e-9)


def test_q_zero_is_fedavg_and_a_perfect_client_does_not_stop_the_server():
    s = classes_setting()
    torch.testing.assert_close(
        play(QFedAvg(q=0.0), s, 2).server["x"], play(FedAvg(), s, 2).server["x"]
    )
    perfect = setting_of([([1.0, 2.0], [0.0, 0.0]), ([1.0, 2.0], [2.0, 4.0])], w0=(0.0,))
    assert abs(play(QFedAvg(q=0.5, weighting="uniform"), perfect, 1).server["x"].item()) > 1e-3


# clusters -------------------------------------------------------------------
IFCA = [([1.0, 2.0], [1.0, 2.1]), ([1.0, -1.0, 2.0], [-1.0, 0.9, -2.2]), ([0.5, 1.5], [0.4, 1.6])]


def test_ifca_of_three_clients_by_hand():
    s, alg = setting_of(IFCA), HypCluster(k=2)
    state = begin(alg, s.net, 3)
    state.server["x"] = torch.tensor([[0.6], [-0.4]], dtype=D64)
    state, done = step(Setup(alg, s), state, torch.arange(3))
    assert state.server["pick"].tolist() == [0, 1, 0]
    close(state.server["x"], [[0.6825], [-0.53]])
    assert alg.report(state.server, done.mix, done.cohort)["cluster"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("optimizer", ["sgd", "ema", "adam"])
def test_a_cluster_that_nobody_picks_keeps_model_and_optimizer(optimizer):
    s, alg = (
        setting_of(IFCA),
        HypCluster(
            k=2,
            optimizer=optimizer,
            **({"bias_correction": "keras"} if optimizer == "adam" else {}),
        ),
    )
    state = begin(alg, s.net, 3)
    state.server["x"] = torch.tensor([[0.6], [-0.4]], dtype=D64)
    state = play(alg, s, 1, state)  # both clusters move, so momentum is not zero
    before = {k: v.clone() for k, v in state.server.items()}
    state, done = step(Setup(alg, s), state, torch.tensor([0, 2]))
    for k in set(before) - {"ids", "pick", "b"}:
        assert torch.equal(state.server[k][1], before[k][1]) and not torch.equal(
            state.server[k][0], before[k][0]
        ), k
    assert {k: v.tolist() for k, v in alg.report(state.server, done.mix, done.cohort).items()} == {
        "rows": [0, 2],
        "cluster": [0, 0],
    }


@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "adam"])
def test_one_cluster_is_fedavg(optimizer):
    s = classes_setting()
    one = play(HypCluster(k=1, optimizer=optimizer), s, 3)
    assert torch.equal(one.server["x"][0], play(FedOpt(optimizer=optimizer), s, 3).server["x"])
    assert torch.equal(play(Ensemble(k=1, optimizer=optimizer), s, 3).server["x"], one.server["x"])


def test_warm_start_trains_every_model_and_forgets_their_momentum():
    s = classes_setting(rounds=4)
    alg = HypCluster(k=2, warm=2, optimizer="ema", server_lr=3.0)
    both = Ensemble(k=2, optimizer="ema", server_lr=3.0)
    warm, ensemble = play(alg, s, 1), play(both, s, 1)
    assert (
        torch.equal(warm.server["x"], ensemble.server["x"])
        and torch.equal(warm.server["m"], ensemble.server["m"])
        and warm.server["m"].any()
    )
    warm, ensemble = play(alg, s, 1, warm), play(both, s, 1, ensemble)
    assert (
        torch.equal(warm.server["x"], ensemble.server["x"])
        and not warm.server["m"].any()
        and ensemble.server["m"].any()
    )
    assert len(warm.server["x"].unique(dim=0)) == 2


def test_shared_layers_are_everybodys_mean_and_the_others_their_clusters():
    """y = w x + b with one w for all: a round by hand, in numpy."""
    s = setting_of(IFCA, lr=0.1, model=Slope)
    alg = HypCluster(k=2, shared="w")
    state = begin(alg, s.net, 3)
    assert torch.equal(state.server["x"][0, 0], state.server["x"][1, 0])
    start = np.array([[0.3, 0.6], [0.3, -0.9]])
    state.server["x"] = torch.from_numpy(start.copy())
    moved, pick = [], []
    for x, y in ((np.array(x), np.array(y)) for x, y in IFCA):
        losses = [((w * x + b - y) ** 2).mean() for w, b in start]
        pick.append(int(np.argmin(losses)))
        gap = start[pick[-1], 0] * x + start[pick[-1], 1] - y
        moved.append(-0.1 * np.array([(gap * x).mean(), gap.mean()]))
    share = np.array([len(x) for x, _ in IFCA]) / sum(len(x) for x, _ in IFCA)
    want = np.add(start, [share @ np.array(moved)[:, 0], 0])
    for j in set(pick):
        mine = share * (np.array(pick) == j)
        want[j, 1] += mine @ np.array(moved)[:, 1] / mine.sum()
    state, done = step(Setup(alg, s), state, torch.arange(3))
    assert state.server["pick"].tolist() == pick and len(set(pick)) == 2
    close(state.server["x"], want.tolist())
    assert done.bytes_down == 3 * 8 * (2 + 1)  # two b and one w


def test_shared_layers_need_one_age():
    for options in ({"warm": 2}, {"optimizer": "adam", "bias_correction": "torch"}):
        with pytest.raises(ValueError, match=r"^shared: .*; take warm=0 and"):
            HypCluster(shared="w", **options)
    with pytest.raises(ValueError, match=r"^k: this model starts equal 2 times"):
        HypCluster(shared="*").initial(classes_setting().net)  # nothing is left to differ in


def test_bytes_of_clusters():
    s = classes_setting()
    model = s.net.size * 4 * s.data.n
    _, out = step(Setup(HypCluster(k=3), s), begin(HypCluster(k=3), s.net, 4), torch.arange(4))
    assert (out.bytes_down, out.bytes_up) == (3 * model, model + 4)
    _, out = step(
        Setup(HypCluster(k=3, warm=1), s), begin(HypCluster(k=3), s.net, 4), torch.arange(4)
    )
    assert (out.bytes_down, out.bytes_up) == (3 * model, 3 * model + 4)


def test_clusters_are_found_and_kept_apart():
    clients = [
        ([1.0, 2.0, -1.0], [1.0, 2.0, -1.0]) if i % 2 else ([1.0, 2.0, -1.0], [-1.0, -2.0, 1.0])
        for i in range(6)
    ]
    s = setting_of(clients, rounds=60)
    alg = HypCluster(k=2, seed=1)
    state = play(alg, s, 60)
    assert sorted(state.server["x"].reshape(-1).tolist()) == pytest.approx([-1, 1], abs=1e-3)
    assert evaluate(Setup(alg, s), state)["loss"].max() < 1e-5


# personal models ------------------------------------------------------------
def test_one_round_of_ditto_by_hand():
    fed = federation([([[1, 2], [-1, 0.5], [0.3, -0.7]], [1, 0, 0.5])])
    s = setting_of(fed, w0=(0.2, -0.1))
    alg = Ditto(lam=0.5)
    state = begin(alg, s.net, 1)
    state.clients["v"], state.seen[0] = torch.tensor([[0.5, 0.4]], dtype=D64), True
    local = Clients(s, torch.arange(1), 1, torch.empty(1, 0))
    close(local.grad(state.clients["v"]), [[0.137, 0.297]])
    state = play(alg, s, 1, state)
    close(state.clients["v"], [[0.4713, 0.3453]])
    close(state.server["x"], [0.2287, -0.0378])


def test_ditto_without_pull_is_local_training_and_its_global_model_is_fedavg():
    s = classes_setting(engine="loop")
    state = play(Ditto(lam=0.0), s, 3)
    rows = s.net.w0.expand(4, -1)
    for r in range(1, 4):
        rows = Clients(s, torch.arange(4), r, torch.empty(4, 0)).fit(rows).w
    assert torch.equal(state.clients["v"], rows)
    # one batch a client: no shuffle, so the two passes see the same
    whole = classes_setting(batch_size=100)
    torch.testing.assert_close(
        play(Ditto(lam=0.3), whole, 2).server["x"], play(FedAvg(), whole, 2).server["x"]
    )


def test_a_strong_pull_keeps_ditto_at_the_global_model():
    s = classes_setting(batch_size=100, lr=0.05)
    state = begin(Ditto(), s.net, 4)
    state.clients["v"] += 0.1
    far = (state.clients["v"] - state.server["x"]).norm()
    state = play(Ditto(lam=19.0), s, 1, state)
    assert (state.clients["v"] - s.net.w0).norm() < 0.2 * far


def test_the_shared_model_of_mrmtl_is_the_mean():
    s = classes_setting()
    state = play(MRMTL(lam=0.3), s, 4)
    share = s.data.size().double() / s.data.size().sum()
    torch.testing.assert_close(state.server["x"], (share @ state.clients["v"].double()).float())
    torch.testing.assert_close(
        play(MRMTL(lam=0.0), s, 3).clients["v"], play(Ditto(lam=0.0), s, 3).clients["v"]
    )


MOCHA_TASKS = [
    ([[1, 2], [-1, 0.5], [0.3, -0.7]], [1, 0, 0.5]),
    ([[0.5, -1], [2, 1], [0, 1]], [0.2, 1, -0.4]),
]


@pytest.mark.parametrize("matrix", ["omega", "sigma"])
def test_mocha_reaches_the_closed_form_for_a_fixed_relation(matrix):
    """Two quadratic tasks, one full-batch step a round: the fixed point solves H_t w_t + lam sum_j
    Omega_tj w_j = b_t."""
    s = setting_of(MOCHA_TASKS, w0=(0.0, 0.0), lr=0.3, rounds=250)
    alg = Mocha(lam=0.2, outer=10_000, relation=matrix)
    omega = torch.tensor([[2.1, -0.6], [-0.6, 1.8]], dtype=D64)
    state = begin(alg, s.net, 2)
    state.server["omega"] = omega
    state = play(alg, s, 250, state)
    x = [torch.tensor(a, dtype=D64) for a, _ in MOCHA_TASKS]
    y = [torch.tensor(b, dtype=D64) for _, b in MOCHA_TASKS]
    big = torch.block_diag(*[a.T @ a / 3 for a in x]) + 0.2 * torch.kron(
        omega, torch.eye(2, dtype=D64)
    )
    best = torch.linalg.solve(
        big, torch.cat([a.T @ b / 3 for a, b in zip(x, y, strict=True)])
    ).view(2, 2)
    close(state.server["w"], best, atol=1e-8)


def test_mocha_without_regulariser_is_local_training():
    s = classes_setting()
    local = play(Ditto(lam=0.0), s, 4).clients["v"]
    for alg in (Mocha(lam=0.0), Mocha(lam=0.0, relation="sigma")):
        state = play(alg, s, 4)
        torch.testing.assert_close(state.server["w"], local)
    assert torch.equal(
        play(Mocha(lam=0.0), s, 4).clients["w"], play(Mocha(lam=0.0), s, 4).server["w"]
    )


def test_an_unstable_mocha_stops_with_a_sentence():
    s = classes_setting(rounds=20)
    with pytest.raises(Stop, match=r"lr 0\.2, lam 3 and delta 0\.01 .* must be below 2.*\.$"):
        play(Mocha(lam=3.0), s, 20)


class Fixed(nn.Module):
    """Scores that do not depend on x, so that only the vote does."""

    def __init__(self, scores):
        super().__init__()
        self.head = nn.Linear(2, len(scores), dtype=D64)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.copy_(torch.tensor(scores, dtype=D64))

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize(
    ("lam", "expected"),
    [(0.4, [0.4751798570, 0.3448201430, 0.18]), (0.9, [0.4441546782, 0.5258453218, 0.03])],
)
def test_the_mixture_with_the_shared_model(lam, expected):
    net = Net(lambda: Fixed([math.log(p) for p in (0.5, 0.2, 0.3)]))
    view = {"w": net.w0, "z": Z, "y": torch.tensor([0, 1, 1, 2, 0]), "n": torch.tensor(5)}
    close(KnnPer(k=3, lam=lam).predict(view, net, QUERY)[0], expected)


def test_neighbours_of_targets_and_of_signs():
    net = Net(lambda: Fixed([0.6]), half_squared)
    view = {
        "w": net.w0,
        "z": Z,
        "y": torch.tensor([0.2, 0.5, 0.4, 0.9, 0.7], dtype=D64),
        "n": torch.tensor(5),
    }
    close(KnnPer(k=3, lam=1.0).predict(view, net, QUERY), [[0.3562050358]])
    close(KnnPer(k=3, lam=0.5).predict(view, net, QUERY), [[0.4781025179]])
    net = Net(lambda: Fixed([-0.35]), "hinge")
    for labels in ([-1, 1, 1, -1, 1], [0, 1, 1, 0, 1]):
        close(
            KnnPer(k=3, lam=0.9).predict(
                {**view, "w": net.w0, "y": torch.tensor(labels)}, net, QUERY
            ),
            [[0.0766906436]],
        )


def test_knn_alone_without_weight_is_fedavg_and_clients_may_be_small():
    s = classes_setting(n=3)
    state = play(KnnPer(lam=0.0), s, 2)
    a, b = evaluate(Setup(KnnPer(lam=0.0), s), state), evaluate(Setup(FedAvg(), s), state)
    torch.testing.assert_close(a["loss"], b["loss"], rtol=1e-5, atol=1e-6)
    assert torch.equal(a["accuracy"], b["accuracy"])
    small = s._replace(data=s.data.keep(0.2))  # 2 to 4 samples a client, k = 10
    found = evaluate(Setup(KnnPer(lam=1.0, k=10), small), state)
    assert found["loss"].isfinite().all()


@pytest.mark.parametrize("margin", [None, 0.0, 0.2])
def test_knnper_is_accepted_where_it_beats_the_shared_model(margin):
    """Small clients, and those whose validation samples do not speak for it, stay with x: what
    each gets is what kNN-Per gives, or FedAvg."""
    s = classes_setting(n=4)
    state = play(FedAvg(), s, 1)
    plain, alg = KnnPer(k=3, lam=0.8), KnnPer(k=3, lam=0.8, min_size=14, margin=margin)
    on = {
        split: [evaluate(Setup(a, s), state, split)["accuracy"] for a in (FedAvg(), plain, alg)]
        for split in ("val", "test")
    }
    gain = on["val"][1] - on["val"][0]
    taken = s.data.size("train") >= 14
    taken &= True if margin is None else gain > margin
    assert not taken.all() and (margin == 0.2 or taken.any())
    for old, new, got in on.values():
        assert torch.equal(got, torch.where(taken, new, old))


# fine-tuning ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("choose", "val", "zero", "expected"),
    [
        (
            "client",
            [[0.80, 0.70], [0.85, 0.72], [0.83, 0.75], [0.82, 0.65], [0.88, 0.60], [0.90, 0.55]],
            [0.1, 0.1],
            [6, 3],
        ),
        (
            "global",
            [[0.80, 0.70], [0.85, 0.72], [0.83, 0.75], [0.82, 0.65], [0.88, 0.60], [0.90, 0.55]],
            [0.1, 0.1],
            [3, 3],
        ),
        # ties: the earlier
        (
            "client",
            [[0.5, 0.5], [0.7, 0.5], [0.6, 0.5], [0.7, 0.5], [-math.inf, 0.5], [0.7, 0.5]],
            [0.6, 0.5],
            [2, 0],
        ),
    ],
)
def test_selection_by_hand(choose, val, zero, expected, monkeypatch):
    """Candidate c = 1 .. 6 (two step sizes, three lengths) is the row of c's; 0 is the untuned
    model."""
    rows = [torch.full((2, 1), float(c), dtype=D64) for c in range(7)]
    table, none = torch.tensor([zero, *val], dtype=D64), torch.empty(2, 0)
    monkeypatch.setattr(
        "pflcore.algorithms.adaptation.lengths",
        lambda *_: (
            (c > 3, (c - 1) % 3 + 1, SimpleNamespace(w=rows[c], buffers=none)) for c in range(1, 7)
        ),
    )
    monkeypatch.setattr(
        "pflcore.algorithms.adaptation.value",
        lambda local, w: table[w[:, 0].long(), torch.arange(2)],
    )
    net = Net(lambda: Line((0.0,)))
    clients = SimpleNamespace(buffers=none, net=net, after=lambda fit: clients)
    assert (
        FineTune(choose=choose, finetune_epochs=3).tuned(rows[0], clients)[0][:, 0].tolist()
        == expected
    )


def test_no_epochs_of_fine_tuning_is_fedavg():
    s = classes_setting()
    state = play(FineTune(), s, 3)
    none = evaluate(Setup(FineTune(finetune_epochs=0), s), state)
    for k, v in evaluate(Setup(FedAvg(), s), state).items():
        assert torch.equal(none[k], v), k
    assert not torch.equal(
        evaluate(Setup(FineTune(finetune_epochs=8), s), state)["loss"], none["loss"]
    )


def test_the_last_layer_alone_is_trained():
    s = classes_setting()
    state = play(FineTune(), s, 1)
    local = Clients(s, torch.arange(4), 1, torch.empty(4, 0))
    w = FineTune(layers="last").model({"x": state.server["x"].expand(4, -1)}, {}, local)["w"]
    moved = (w != state.server["x"]).any(0)
    head = torch.zeros_like(moved)
    head[s.net.head_slice] = True
    assert torch.equal(moved, head)


def grid(choose, **options):
    return FineTune(choose=choose, lr_grid=(0.05, 0.5), finetune_epochs=4, **options)


def by_hand(s, state, split="val"):
    """Each candidate's accuracy [C, N] and rows, no fine-tuning first, then every length of each
    step size."""
    every = [
        FineTune(finetune_epochs=0),
        *(FineTune(finetune_lr=lr, finetune_epochs=e) for lr in (0.05, 0.5) for e in range(1, 5)),
    ]
    down = {"x": state.server["x"].expand(s.data.n, -1)}
    who = torch.arange(s.data.n)
    rows = torch.stack(
        [a.model(down, {}, Clients(s, who, 3, torch.empty(s.data.n, 0)))["w"] for a in every]
    )
    return torch.stack([evaluate(Setup(a, s), state, split)["accuracy"] for a in every]), rows, down


def test_each_client_gets_its_best_candidate_on_validation():
    """The earliest of the best: accuracies on six samples tie often."""
    s = classes_setting(seed=5)
    state = play(FedAvg(), s, 3)
    values, rows, down = by_hand(s, state)
    best = values.max(0).values
    assert ((values == best).sum(0) > 1).any() and len(values.argmax(0).unique()) > 1
    got = grid("client").model(down, {}, Clients(s, torch.arange(4), 3, torch.empty(4, 0)))["w"]
    first = [(values[:, i] == best[i]).nonzero()[0, 0] for i in range(4)]
    torch.testing.assert_close(got, torch.stack([rows[c, i] for i, c in enumerate(first)]))
    together = values.mean(1)
    got = grid("global").model(down, {}, Clients(s, torch.arange(4), 3, torch.empty(4, 0)))["w"]
    torch.testing.assert_close(got, rows[(together == together.max()).nonzero()[0, 0]])


def test_a_client_without_validation_samples_takes_what_is_best_for_the_others():
    s = classes_setting(seed=5)
    state = play(FedAvg(), s, 3)
    lists = list(s.data.index["val"])
    lists[1] = lists[1][:0]
    lacking = s._replace(data=replace(s.data, index={**s.data.index, "val": lists}))
    values, rows, down = by_hand(s, state)
    values = values[:, [0, 2, 3]].mean(1)
    local = Clients(lacking, torch.arange(4), 3, torch.empty(4, 0))
    for choose in ("client", "global"):
        torch.testing.assert_close(
            grid(choose).model(down, {}, local)["w"][1],
            rows[(values == values.max()).nonzero()[0, 0], 1],
        )
    # it cannot show that it is better
    assert torch.equal(FineTune(margin=-2.0).model(down, {}, local)["w"][1], down["x"][1])
    nobody = lacking._replace(
        data=replace(s.data, index={**s.data.index, "val": [r[:0] for r in lists]})
    )
    with pytest.raises(ValueError, match=r"^choose: .*these clients lack.*\.$"):
        grid("client").model(down, {}, Clients(nobody, torch.arange(4), 3, torch.empty(4, 0)))


@pytest.mark.parametrize("choose", ["client", "global"])
def test_the_choice_never_sees_test_labels(choose):
    s = classes_setting(seed=7)
    state = play(FedAvg(), s, 3)
    y = s.data.y.clone()
    for rows in s.data.index["test"]:
        y[rows] = (y[rows] + 1) % 3
    poisoned = s._replace(data=replace(s.data, y=y))
    local = [Clients(t, torch.arange(4), 3, torch.empty(4, 0)) for t in (s, poisoned)]
    down = {"x": state.server["x"].expand(4, -1)}
    a, b = (grid(choose).model(down, {}, v)["w"] for v in local)
    assert torch.equal(a, b) and not torch.equal(a, down["x"])


def test_acceptance():
    s = classes_setting(seed=5)
    state = play(FedAvg(), s, 3)
    down = {"x": state.server["x"].expand(4, -1)}

    def kept(alg):
        w = alg.model(down, {}, Clients(s, torch.arange(4), 3, torch.empty(4, 0)))["w"]
        return (w == down["x"]).all(1).tolist()

    assert kept(FineTune(min_size=17)) == [True, True, False, False]  # 9, 13, 17 and 21 samples
    assert kept(FineTune(margin=2.0)) == [True] * 4
    assert kept(FineTune(margin=-2.0)) == [False] * 4


def test_tuning_without_a_validation_split_is_refused():
    s = classes_setting(val=False)
    with pytest.raises(ValueError, match=r"^choose: .*'val'.*\.$"):
        evaluate(Setup(grid("client"), s), play(FedAvg(), s, 1))


# all of them ----------------------------------------------------------------
def test_hinge_with_weight_decay_by_hand():
    x = torch.tensor([[1, 0.5], [-0.2, 1.5], [2, 1]], dtype=D64)
    fed = Federation.from_clients(
        with_test([(x, torch.tensor([1, 1, 0]))], [(x, torch.tensor([1, 1, 0]))]), dtype=None
    )

    def model():
        m = nn.Linear(2, 1, dtype=D64)
        with torch.no_grad():
            m.weight.copy_(torch.tensor([[0.4, -0.3]]))
            m.bias.fill_(0.1)
        return m

    net = Net(model, "hinge")
    s = make_setting(
        net, fed, Training(lr=1.0, batch_size=3, weight_decay=1e-4), 1, engine="vmap", workers=1
    )
    loss = evaluate(Setup(FedAvg(), s), begin(FedAvg(), net, 1))
    close(loss["loss"] + 0.5e-4 * net.w0.square().sum(), [1.2266796667])
    close(loss["accuracy"], [1 / 3])
    close(net.w0 - play(FedAvg(), s, 1).server["x"], [0.4000400000, -0.3333633333, -0.3333233333])


OURS = [
    n
    for n, a in ALGORITHMS.items()
    if a.__module__.rpartition(".")[2] in {"server_opt", "multitask", "cluster", "finetune", "knn"}
]


def test_dropping_the_last_batch_keeps_a_client_with_less_than_one():
    """Motley's batches: min(n, B) samples each, what is left over is dropped."""
    s = setting_of(
        [([1.0, 2.0], [1.0, 2.0]), ([1.0] * 5, [1.0] * 5), ([2.0] * 8, [1.0] * 8)],
        batch_size=4,
        drop_last=True,
    )
    fit = Clients(s, torch.arange(3), 1, torch.empty(3, 0)).fit(torch.zeros(3, 1, dtype=D64))
    assert fit.steps.tolist() == [1, 1, 2]
    close(fit.w[:2, 0], [0.25, 0.1])


@pytest.mark.parametrize("criterion", ["cross_entropy", "squared", "half_squared", "hinge"])
def test_losses_of_many_clients_at_once_are_those_of_each_alone(criterion):
    gen = torch.Generator().manual_seed(1)
    sizes, labels = [1, 300, 7, 41], criterion == "cross_entropy"
    parts = []
    for n in sizes:
        x = torch.randn(n, 5, generator=gen)
        parts.append((x, torch.randint(0, 3 if labels else 2, (n,), generator=gen)))
    fed = Federation.from_clients(parts, classes=3 if labels else 2)
    if labels:
        fed = replace(fed, relabel=torch.stack([torch.randperm(3, generator=gen) for _ in sizes]))
    net = Net(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3 if labels else 1)),
        criterion,
    )
    rows, ids = torch.randn(3, net.size, generator=gen), torch.tensor([3, 0, 1])
    found = [
        Clients(
            make_setting(net, fed, Training(), 1, engine=e, workers=1), ids, 1, torch.empty(3, 0)
        ).loss(rows)
        for e in ("vmap", "loop")
    ]
    torch.testing.assert_close(*found)
    if criterion == "half_squared":
        local = Clients(
            make_setting(Net(net.build, "squared"), fed, Training(), 1, engine="vmap", workers=1),
            ids,
            1,
            torch.empty(3, 0),
        )
        torch.testing.assert_close(found[0], local.loss(rows) / 2)
        start = rows[:1].expand(3, -1)
        a, b = (
            Clients(
                make_setting(net, fed, Training(lr=0.1), 1, engine=e, workers=1),
                ids,
                1,
                torch.empty(3, 0),
            )
            .fit(start)
            .w
            for e in ("vmap", "loop")
        )
        torch.testing.assert_close(a, b)


def test_mochas_first_relation_is_checked_too():
    from pflcore.algorithms import Stop

    with pytest.raises(Stop, match=r"^MOCHA is unstable from round 1 on"):
        play(Mocha(lam=2.0, outer=50), lines(lr=0.5), 1)


def binary(floats=False, width=1):
    """Clients whose tests are their training samples, with labels 0 and 1 (so many at once)."""
    gen = torch.Generator().manual_seed(0)
    x = [3 * torch.randn(20, 6, generator=gen) for _ in range(3)]
    y = [(v[:, :width] > 0).squeeze(1) for v in x]
    labels = [v.float() if floats else v.long() for v in y]
    return Federation.from_clients(
        [{"train": pair, "test": pair} for pair in zip(x, labels, strict=True)]
    )


@pytest.mark.parametrize(("floats", "width"), [(False, 1), (True, 1), (True, 3)])
def test_knnper_mixes_probabilities_of_binary_labels(floats, width):
    data = binary(floats, width)
    made = {
        lam: Simulation(
            KnnPer(k=1, lam=lam),
            lambda: nn.Linear(6, width),
            data,
            Training(lr=0.1),
            rounds=1,
            loss="binary_cross_entropy",
        ).run()
        for lam in (0.0, 0.4, 1.0)
    }
    shared = Simulation(
        "fedavg",
        lambda: nn.Linear(6, width),
        data,
        Training(lr=0.1),
        rounds=1,
        loss="binary_cross_entropy",
    ).run()
    x, y = data.client(0, "test")
    # each sample's nearest neighbour is itself
    assert max(made[1.0].rounds[0]["eval"]["loss"]) < 1e-9
    torch.testing.assert_close(made[0.0].model(0)(x), shared.model(0)(x))
    p = 0.6 * shared.model(0)(x).sigmoid() + 0.4 * y.view(20, width)
    torch.testing.assert_close(made[0.4].model(0)(x).sigmoid(), p)


def test_knnper_takes_several_targets():
    gen = torch.Generator().manual_seed(0)
    pair = torch.randn(9, 6, generator=gen), torch.randn(9, 2, generator=gen)
    data = Federation.from_clients([{"train": pair, "test": pair}])
    history = Simulation(
        KnnPer(k=1, lam=1.0), lambda: nn.Linear(6, 2), data, Training(lr=0.1), rounds=1
    ).run()
    torch.testing.assert_close(history.model(0)(pair[0]), pair[1])


def test_knnper_refuses_probabilities_as_labels():
    gen = torch.Generator().manual_seed(0)
    pair = torch.randn(9, 6, generator=gen), torch.rand(9, 4, generator=gen).softmax(1)
    data = Federation.from_clients([{"train": pair, "test": pair}])
    run = Simulation(
        KnnPer(k=1), lambda: nn.Linear(6, 4), data, Training(lr=0.1), rounds=1, loss="cross_entropy"
    )
    with pytest.raises(ValueError, match=r"^data: kNN-Per's neighbours vote with a label"):
        run.run()
