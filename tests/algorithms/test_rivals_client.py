"""FedDWA's rivals that work on the clients: golden values, and for each the law that its known bug
breaks."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from doors import held_out
from methods import (
    L2C,
    FedAvgM,
    FedFomo,
    FedProx,
    FedRoD,
    FineTune,
    KnnPer,
    PerFedAvg,
    PFedMe,
)
from parts.rivals import GOLDEN, close, cohort, fomo
from small import (
    F64,
    images,
    joined,
    lines,
    make_setting,
    near,
    play,
    quadratics,
    served,
    some,
    t,
    tiny_model,
)

from pflcore import Clients, Evaluation, Federation, Net, Simulation, Training, step
from pflcore.algorithms import Cohort, FedAvg, Pool
from pflcore.simulation.round import Setup, begin


def one(loss, start, lr, engine, epochs=1):
    """A client whose model is one number w, started at `start`, and whose loss is `loss(w)`."""

    class Number(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(t([start]))

        def forward(self, x):
            return self.w.expand(len(x))

    data = Federation(
        torch.zeros(2, 1, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
        {"train": [torch.arange(1)], "test": [torch.arange(1, 2)]},
    )
    s = make_setting(
        Net(Number(), lambda scores, y: loss(scores).mean()),
        data,
        Training(lr=lr, epochs=epochs),
        engine=engine,
    )
    return s, Clients(s, torch.arange(1), 1, s.net.b0.expand(1, -1))


ENGINES = pytest.mark.parametrize("engine", ["loop", "vmap"])


# Per-FedAvg -----------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("variant", ["fo", "hf", "exact"])
def test_golden_per_fedavg(variant, engine):
    name = {"fo": "FO", "hf": "HF", "exact": "exact"}[variant]
    h1, h2 = GOLDEN["H1_perfedavg_quadratic"], GOLDEN["H2_perfedavg_quartic"]
    for h, loss, delta in (
        (h1, lambda w: h1["a"] * (w - h1["c"]) ** 2 / 2, 1e-3),
        (h2, lambda w: w**4 / 4 - w, h2["delta"]),
    ):
        s, local = one(loss, h["w"], h["beta"], engine)
        alg = PerFedAvg(variant=variant, alpha=h["alpha"], delta=delta, scaled=False)
        _, up = alg.train({"x": s.net.w0[None]}, {}, local)[:2]
        close(up["delta"], [[h[name] - h["w"]]])
        close(alg.model({"x": s.net.w0[None]}, {}, local)["w"], [[h["inner"]]])


def test_scaled_differences_are_right_in_float32():
    """With the paper's delta the two points differ by less than float32 holds, where the gradient
    is small."""
    data = images((12, 9), shape=(6,))

    def flat(scores, y):  # the gradient is small and the step sizes large
        return 1e-5 * nn.functional.cross_entropy(scores, y)

    training = Training(lr=1e4, batch_size=4)
    s = make_setting(Net(tiny_model(), flat), data, training)
    double = Federation(data.x.double(), data.y, data.index, 4, data.relabel)
    wide = make_setting(Net(lambda: tiny_model()().double(), flat), double, training)

    def played(alg, s):
        return step(Setup(alg, s), begin(alg, s.net, 2), torch.arange(2))[0].server["x"].double()

    want = played(PerFedAvg(variant="exact", alpha=5e4), wide)
    close(played(PerFedAvg(variant="hf", alpha=5e4), wide), want, 1e-3, 1e-4)
    error = {
        scaled: (played(PerFedAvg(variant="hf", alpha=5e4, scaled=scaled), s) - want).norm()
        for scaled in (True, False)
    }
    assert error[True] < 0.05 * error[False]


@ENGINES
def test_exact_products_with_batch_norm(engine):
    """Gradient of gradient through batch norm, in both engines: as finite differences in float64
    have it."""

    def build():
        return nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4)
        ).double()

    data = images((11, 8), shape=(1, 4, 4))
    data = Federation(data.x.double(), data.y, data.index, 4, data.relabel)
    s = make_setting(Net(build), data, Training(lr=0.1, batch_size=5), engine=engine)
    found = []
    for alg in (
        PerFedAvg(variant="exact", alpha=0.3),
        PerFedAvg(variant="hf", alpha=0.3, delta=1e-6),
    ):
        state, _ = step(Setup(alg, s), begin(alg, s.net, 2), torch.arange(2))
        found.append(state.server["x"])
    close(found[0], found[1], 1e-6, 1e-7)


def test_per_fedavg_adapts_on_training_data():
    """A widely used code takes its adaptation step on test batches, labels and all."""
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=4))
    other = Federation(s.data.x.clone(), s.data.y.clone(), s.data.index, 4, s.data.relabel)
    for rows in other.index["test"]:
        other.x[rows] += 3.0
        other.y[rows] = 1
    for alg in (PerFedAvg(), FineTune(finetune_epochs=1)):
        views = []
        for data in (s.data, other):
            local = Clients(s._replace(data=data), torch.arange(3), 1, s.net.b0.expand(3, -1))
            views.append(alg.model({"x": s.net.w0.expand(3, -1)}, {}, local)["w"])
        assert torch.equal(*views)
        assert not torch.equal(views[0], s.net.w0.expand(3, -1))
    assert torch.equal(
        PerFedAvg(steps=0).model({"x": s.net.w0[None]}, {}, None)["w"], s.net.w0[None]
    )


def test_per_fedavg_without_an_inner_step_is_fedavg():
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=100, epochs=2))
    for variant in ("fo", "hf", "exact"):
        a = play(PerFedAvg(variant=variant, alpha=0.0), s, 2)[-1][0].server["x"]
        torch.testing.assert_close(a, play(FedAvg(), s, 2)[-1][0].server["x"], rtol=1e-5, atol=1e-6)


def test_fine_tuning_after_fedprox():
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=4))
    tuned, prox = (
        play(FineTune(mu=1.0, finetune_epochs=1), s, 2)[-1][0],
        play(FedProx(mu=1.0), s, 2)[-1][0],
    )
    assert torch.equal(tuned.server["x"], prox.server["x"])
    assert not torch.equal(prox.server["x"], play(FedAvg(), s, 2)[-1][0].server["x"])
    with pytest.raises(ValueError, match=r"^mu: "):
        FineTune(mu=-1.0)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("K2_fedavgm_nesterov_pytorch_form", "nesterov"), ("K3_fedavgm_heavyball", "heavy_ball")],
)
def test_golden_fedavgm(name, optimizer):
    k = GOLDEN[name]
    alg = FedAvgM(optimizer=optimizer, beta1=k["beta"], server_lr=k["lr"])
    g = {"x": t([k["w0"]])} | alg.slots(t([k["w0"]]))
    for pseudo, (v, w) in zip(k["pseudo_grads"], k["v_w"], strict=True):
        g = served(alg, g, {"delta": t([[-pseudo]])}, cohort([0], 1))
        close(-g["m"], [v])  # the golden values' momentum is that of w - w', ours that of w' - w
        close(g["x"], [w])


# pFedMe ---------------------------------------------------------------------


@ENGINES
def test_golden_pfedme(engine):
    i1 = GOLDEN["I1_pfedme"]
    for inner, theta in enumerate(i1["theta_traj"], 1):
        s, local = one(lambda w: (w - 2) ** 2 / 2, i1["w0"], i1["eta"], engine)
        alg = PFedMe(lam=i1["lam"], inner=inner, personal_lr=i1["personal_lr"])
        new, up = alg.train({"x": s.net.w0[None]}, {"theta": t([[i1["theta0"]]])}, local)[:2]
        close(new["theta"], [[theta]])
    close(up["delta"], [[i1["w_after"]]])
    for beta, want in ((1.0, i1["server_beta1"][0]), (0.5, i1["server_beta05_prev0_mean"])):
        alg = PFedMe(lam=i1["lam"], inner=5, personal_lr=i1["personal_lr"], server_lr=beta)
        state, _ = step(Setup(alg, s), begin(alg, s.net, 1), torch.arange(1))
        close(state.server["x"], [want])
    far, local = one(lambda w: (w - 2) ** 2 / 2, 0.0, 0.0, engine)
    new, _ = PFedMe(lam=1.0, inner=400, personal_lr=0.1).train(
        {"x": far.net.w0[None]}, {"theta": t([[0.0]])}, local
    )[:2]
    close(new["theta"], [[i1["theta_exact_prox"]]])


def test_pfedme_evaluates_theta_and_keeps_it_warm():
    """An alias in the authors' code makes its "personalized" accuracy that of w."""
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=4), rounds=4)
    alg = PFedMe(lam=2.0, inner=3, personal_lr=0.05)
    state = begin(alg, s.net, 3)
    state, _ = step(Setup(alg, s), state, torch.arange(3))
    theta = state.clients["theta"].clone()
    view = alg.model(
        {"x": state.server["x"].expand(3, -1)},
        state.clients,
        Clients(s, torch.arange(3), 1, state.batch_norm),
    )["w"]
    assert torch.equal(view, theta) and not torch.equal(theta, state.server["x"].expand(3, -1))
    state, _ = step(Setup(alg, s), state, torch.tensor([0, 2]))
    assert torch.equal(state.clients["theta"][1], theta[1]) and not torch.equal(
        state.clients["theta"][0], theta[0]
    )
    # the second round went on from the first one's theta
    again = begin(alg, s.net, 3)
    again, _ = step(Setup(alg, s), again, torch.arange(3))
    again.clients["theta"] += 0.5
    again, _ = step(Setup(alg, s), again, torch.tensor([0, 2]))
    assert not torch.equal(again.clients["theta"][0], state.clients["theta"][0])


def test_pfedme_without_a_pull_never_moves_the_shared_model():
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=4))
    state = play(PFedMe(lam=0.0), s, 2)[-1][0]
    assert torch.equal(state.server["x"], s.net.w0) and not torch.equal(
        state.clients["theta"][0], s.net.w0
    )


# FedRoD ---------------------------------------------------------------------


def logits_net():
    """A linear model without bias whose generic logits are its input."""
    module = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.eye(3))
    return Net(module)


def test_golden_fedrod_losses():
    j1, j2 = GOLDEN["J1_fedrod_bsm"], GOLDEN["J2_fedrod_personal"]
    net, x = logits_net(), t([j1["logits"]])
    row, n = torch.cat([net.w0, torch.zeros(9, dtype=torch.float64)]), {"n": t(j1["counts"])}

    def loss(y, gamma=1.0, row=row):
        return FedRoD(gamma=gamma).loss(net, row, x, torch.tensor([y]), n)

    close(loss(0), j1["loss_y0"] + j1["plain_ce_y0"])
    close(loss(2), j1["loss_y2"] + j1["plain_ce_y2"])
    close(loss(2, 0.5), j1["loss_y2_gamma05"] + j1["plain_ce_y2"])
    close(loss(2, 0.0), 2 * j1["plain_ce_y2"])
    assert loss(1) == torch.inf
    head = torch.zeros(3, 3, dtype=torch.float64)
    head[:, 0] = t(j2["p_logits"])  # the input's first entry is 1
    close(loss(0, row=torch.cat([net.w0, head.reshape(-1)])), j1["loss_y0"] + j2["ce_personal_y0"])
    view = {"w": net.w0, "h": head.reshape(-1)}
    scores = FedRoD().predict(view, net, x)[0]
    close(scores, t(j2["g_logits"]) + t(j2["p_logits"]))
    assert int(scores.argmax()) == j2["pred_personal"]


@ENGINES
def test_fedrod_personal_loss_moves_the_head_alone(engine):
    """Detached: with gamma = 0 the shared part is FedAvg's, whatever the heads do."""
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=4), engine=engine)
    states = [
        play(alg, s, 3)[-1][0]
        for alg in (FedRoD(gamma=0.0), FedRoD(gamma=0.0, head="copy"), FedAvg())
    ]
    for state in states[:2]:
        torch.testing.assert_close(state.server["x"], states[2].server["x"], rtol=1e-5, atol=1e-6)
    assert (
        not torch.equal(states[0].clients["h"], states[1].clients["h"])
        and states[0].clients["h"].abs().sum() > 0.1
    )


def test_fedrod_takes_a_model_that_knows_more_classes():
    s = make_setting(Net(tiny_model(classes=6)), images(), Training(lr=0.1, batch_size=4))
    state = play(FedRoD(), s, 2)[-1][0]
    assert state.server["x"].isfinite().all() and state.clients["h"].isfinite().all()


def test_fedrod_head_sees_detached_features():
    net = Net(tiny_model())
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 6, generator=gen), torch.randint(0, 4, (5,), generator=gen)
    head = torch.randn(net.head_slice.stop - net.head_slice.start, generator=gen)
    row = torch.cat([net.w0, head]).requires_grad_()
    (g,) = torch.autograd.grad(FedRoD(gamma=0.0).loss(net, row, x, y, {"n": torch.ones(4)}), row)
    generic = net.w0.clone().requires_grad_()
    torch.testing.assert_close(
        g[: net.size], torch.autograd.grad(net.loss(generic, x, y), generic)[0]
    )
    own = head.clone().requires_grad_()
    z = net.features(net.w0, x)
    ce = nn.functional.cross_entropy(net.head(net.w0, z) + net.head(own, z), y)
    torch.testing.assert_close(g[net.size :], torch.autograd.grad(ce, own)[0])


def test_fedrod_newcomer_predicts_as_the_generic_model_and_absent_heads_rest():
    s = make_setting(Net(tiny_model()), images(), Training(lr=0.1, batch_size=4))
    alg = FedRoD()
    state, done = step(Setup(alg, s), begin(alg, s.net, 3), torch.tensor([0, 1]))
    assert not state.clients["h"][2].any()
    assert done.bytes_up == 2 * 4 * s.net.size
    view = alg.model({"x": state.server["x"].expand(3, -1)}, state.clients, None)
    x = s.data.client(2, "test")[0]
    torch.testing.assert_close(
        alg.predict({k: v[2] for k, v in view.items()}, s.net, x), s.net(state.server["x"], x)
    )


def test_fedfomo_drops_candidates_without_distance_or_with_a_broken_loss():
    new, up = fomo(
        FedFomo(), [0.0], [[0.0], [1.0], [2.0], [4.0]], 1.0, [1.0, torch.nan, -torch.inf, 0.8]
    )
    close(up["a"][0], [0, 0, 0, 0])
    close(new["w"], [[4.0]])


def validated(n=4, engine="vmap"):
    data = held_out(images([20 + 5 * i for i in range(n)]))
    return make_setting(Net(tiny_model()), data, Training(lr=0.1, batch_size=8), engine=engine)


def test_fedfomo_counts_the_models_it_downloads():
    s = validated(4)
    alg, p = FedFomo(m=2), 4 * s.net.size
    state = begin(alg, s.net, 4)
    state, first = step(Setup(alg, s), state, torch.arange(4))
    assert first.bytes_down == 0
    state, done = step(Setup(alg, s), state, torch.arange(4))
    assert done.bytes_down == 4 * 2 * p and done.bytes_up == 4 * (p + 4 * 8)
    state, done = step(Setup(alg, s), state, torch.tensor([1, 3]))
    assert done.bytes_down == 2 * 2 * p
    w = alg.report(state.server, done.mix, done.cohort)["weights"]
    assert w.shape == (4, 4) and not w[[0, 2]].any()


# L2C ------------------------------------------------------------------------


def test_golden_l2c():
    e1 = GOLDEN["E1_l2c"]
    centre = t(e1["val_center"])
    local = SimpleNamespace(
        grad=lambda w, split: w - centre, fit=lambda w: SimpleNamespace(w=w.clone())
    )
    alg, zero = L2C(), torch.zeros(1, 3, dtype=torch.float64)
    own = {"w": t([e1["theta_old"]]), "a": t([e1["alpha"]]), "m": zero, "v": zero, "t": zero[:, :1]}
    down = {"delta": Pool(-t(e1["Delta"]), torch.arange(3)[None]), "who": torch.arange(3)[None]}
    x, w, _ = alg.mixed(down, own)
    close(w[0], e1["w"])
    close(x[0], e1["theta_new"])
    close(x - centre, [e1["val_grad"]])
    new, _ = alg.train(down, own, local)[:2]
    close(new["w"][0], e1["theta_new"])
    close(new["m"][0] / 0.1 - 0.01 * t(e1["alpha"]), e1["dL_dalpha"])
    close(new["a"][0], e1["alpha_after_Adam_step"])
    close(new["a"].softmax(1)[0], e1["w_after"])

    def loss(a):
        y = own["w"][0] - a.softmax(0) @ t(e1["Delta"])
        return ((y - centre) ** 2).sum() / 2

    a = t(e1["alpha"]).requires_grad_()
    close(torch.autograd.grad(loss(a), a)[0], e1["dL_dalpha"])


def test_l2c_with_everybody_equal_is_fedavg_at_first():
    s = validated()
    l2c, avg = L2C(), FedAvg(weighting="uniform")
    a, b = begin(l2c, s.net, 4), begin(avg, s.net, 4)
    a, _ = step(Setup(l2c, s), a, torch.arange(4))
    b, _ = step(Setup(avg, s), b, torch.arange(4))
    down = l2c.send(a.server, cohort([0, 1, 2, 3], 4))
    torch.testing.assert_close(
        l2c.model(down, a.clients, None)["w"], b.server["x"].expand(4, -1), rtol=1e-5, atol=1e-6
    )


def test_l2c_mixes_the_updates_of_a_clients_own_last_round():
    """However long it is absent: neither its own update nor its neighbours' are lost, and its model
    rests meanwhile."""
    s = validated(4)
    alg = L2C()
    state = joined(alg, s)
    mixed, deltas = {i: s.net.w0 for i in range(4)}, {}
    for round, ids in enumerate(([0, 1, 2, 3], [0, 1], [0, 2], [0, 2], [1, 3]), 1):
        everybody = cohort([0, 1, 2, 3], 4, round)
        before = alg.model(alg.send(state.server, everybody), state.clients, None)["w"]
        for i in range(4):
            torch.testing.assert_close(before[i], mixed[i], rtol=1e-5, atol=1e-6)
        state, _ = step(Setup(alg, s), state, torch.tensor(ids))
        # a round starts from the mixed model
        assert torch.equal(state.clients["w"][ids], before[ids])
        logits = state.clients["a"]
        newest = state.server["delta"][-len(ids) :]
        for i in ids:
            deltas[i] = (ids, newest, state.clients["w"][i].clone())
            share = logits[i, ids].softmax(0).float()
            mixed[i] = deltas[i][2] + share @ newest
    # nothing is kept that nobody needs
    assert set(state.server["round"].tolist()) == {4, 5} and len(state.server["delta"]) == 4
    assert state.clients["t"][:, 0].tolist() == [3, 2, 2, 1]


def test_l2c_logits_of_absent_neighbours_rest():
    s = validated(4)
    alg = L2C()
    state = begin(alg, s.net, 4)
    for ids in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2]):
        before, state = state.clients["a"].clone(), step(Setup(alg, s), state, torch.tensor(ids))[0]
    assert before[0].abs().min() > 0
    assert torch.equal(state.clients["a"][:, 3], before[:, 3]) and not torch.equal(
        state.clients["a"][0, :3], before[0, :3]
    )


@pytest.mark.parametrize("alg", [FedFomo(m=2), L2C()])
def test_a_simulation_holds_validation_data_out_by_itself(alg):
    data = images((20, 25, 30))
    run = Simulation(alg, tiny_model(), data, Training(lr=0.1, batch_size=8), rounds=2)
    assert run.data.size("train").tolist() == [16, 20, 24] and run.data.size("val").tolist() == [
        4,
        5,
        6,
    ]
    assert run.data.size("test").tolist() == [20, 25, 30]
    assert run.header()["facts"] == {"held out for validation": 0.2}
    assert (
        "val" not in data.index
        and Simulation(alg, tiny_model(), run.data, run.training).data is run.data
    )
    again = Simulation(alg, tiny_model(), data).data.index["val"]
    assert all(torch.equal(a, b) for a, b in zip(again, run.data.index["val"], strict=True))
    assert len(run.run().rounds) == 2


@pytest.mark.parametrize("alg", [FedFomo(m=2), L2C()])
def test_without_validation_data_nobody_is_drawn_anywhere(alg):
    """A client with an empty validation split keeps its trained model (FedFomo) or its logits
    (L2C)."""
    s = validated(3)
    val = [rows[:0] if i == 1 else rows for i, rows in enumerate(s.data.index["val"])]
    s = s._replace(data=replace(s.data, index={**s.data.index, "val": val}))
    state = begin(alg, s.net, 3)
    for _ in range(2):
        kept = {k: v.clone() for k, v in state.clients.items()}
        state, done = step(Setup(alg, s), state, torch.arange(3))
        assert not done.dropped
    if isinstance(alg, FedFomo):
        assert torch.equal(state.clients["old"][1], kept["w"][1]) and not state.server["p"][1].any()
    else:
        assert not state.clients["a"][1].any() and state.clients["a"][0].abs().max() > 0
    with pytest.raises(ValueError, match=r"^split: .*'val'"):
        play(alg, make_setting(s.net, images(), s.training), 2)


def test_pfedme_can_restart_at_w():
    s = lines()
    keep, restart = (
        PFedMe(lam=1.0, personal_lr=0.05),
        PFedMe(lam=1.0, personal_lr=0.05, theta="restart"),
    )
    one, other = play(keep, s, 1)[-1][0], play(restart, s, 1)[-1][0]
    assert torch.equal(one.clients["theta"], other.clients["theta"])  # the first round is the same
    other.clients["theta"] += 7.0
    again = step(Setup(restart, s), other, torch.arange(6))[0].clients["theta"]
    near(
        again,
        step(Setup(restart, s), play(restart, s, 1)[-1][0], torch.arange(6))[0].clients["theta"],
    )
    assert not torch.allclose(again, step(Setup(keep, s), one, torch.arange(6))[0].clients["theta"])
    with pytest.raises(ValueError, match=r"^theta: expected 'keep' or 'restart'"):
        PFedMe(theta="reset")


def test_what_fedfomo_draws_for_a_client_does_not_depend_on_the_others():
    alg = FedFomo(m=2, epsilon=0.5)
    g = {
        "w": torch.zeros(9, 3),
        "seen": torch.ones(9, dtype=torch.bool),
        "p": torch.zeros(9, 9, dtype=F64),
    }
    sent = []
    for ids in ([0, 3, 7], [3], list(range(9))):
        cohort = Cohort(torch.tensor(ids), torch.ones(len(ids)), 9, 1, 9)
        sent.append(alg.send(g, cohort)["w"].index[ids.index(3)].tolist())
    assert sent[0] == sent[1] == sent[2]


@pytest.mark.parametrize("alg", [PerFedAvg(), PFedMe()])
def test_momentum_that_plays_no_part_is_said(alg):
    plain, other = (
        make_setting(Net(tiny_model()), images(), Training(lr=0.1, **t))
        for t in ({}, {"momentum": 0.9, "weight_decay": 0.1})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(Setup(alg, plain), begin(alg, plain.net, 3), torch.arange(3))
    with pytest.warns(UserWarning, match=r"momentum=0\.9 and weight_decay=0\.1 play no part\.$"):
        step(Setup(alg, other), begin(alg, other.net, 3), torch.arange(3))


def test_fedfomo_explores_by_the_whole_share_in_the_first_round():
    g = {
        "w": torch.zeros(5, 3),
        "seen": torch.ones(5, dtype=torch.bool),
        "p": torch.arange(25, dtype=torch.float64).view(5, 5),
    }
    alg = FedFomo(m=1, epsilon=1.0, decay=1.0)
    picks = {
        r: {int(alg.send(g, some(5, r, [0])._replace(seed=i))["w"].index) for i in range(60)}
        for r in (1, 2, 9)
    }
    assert picks == {1: {1, 2, 3, 4}, 2: {4}, 9: {4}}


def test_fedfomos_affinities_add_up_over_the_rounds():
    net, _ = quadratics(t([[1.0], [2]]), t([[1.0], [2]]))
    alg = FedFomo()
    state = begin(alg, net, 2)
    first, second = t([[0.0, 2], [-1, 0]]), t([[0.0, 5]])
    g = served(
        alg, state.server, {"w": torch.zeros(2, 1, dtype=torch.float64), "a": first}, some(2)
    )
    g = served(alg, g, {"w": torch.zeros(1, 1, dtype=torch.float64), "a": second}, some(2, 2, [0]))
    assert g["p"].tolist() == [[0, 7], [-1, 0]] and g["found"].tolist() == [[0, 5], [0, 0]]


def test_the_minibatches_of_per_fedavg_are_independent():
    """Two samples with optima of their own, one a minibatch: two orders for D and two for D' make
    four ways to go, D' = D only two."""
    net, data = quadratics(t([[1.0]]), t([[0.0]]), start=[3.0], rows=2, noise=1.0)
    s = make_setting(net, data, Training(lr=0.3, batch_size=1))
    ways = set()
    for round in range(1, 60):
        up = PerFedAvg().train(
            {"x": net.w0[None]}, {}, Clients(s, torch.arange(1), round, net.b0[None])
        )[:2][1]
        ways.add(round_off(up["delta"]))
    assert len(ways) == 4


def round_off(x):
    return round(float(x), 9)


def test_fedfomo_does_not_take_a_model_that_was_not_sent():
    """Row 0 would be the best for everybody, but -1 is nobody's number."""
    net, data = quadratics(t([[1.0], [1]]), t([[0.0], [0]]), rows=4)
    data = replace(data, index={"train": data.index["train"], "val": data.index["test"]})
    local = Clients(
        make_setting(net, data, Training(lr=0.0)), torch.arange(2), 2, net.b0.expand(2, -1)
    )
    rows, index = t([[0.0], [2]]), torch.tensor([[1], [-1]])
    own, up = FedFomo().train(
        {"w": Pool(rows, index)}, {"w": t([[4.0], [4]]), "old": t([[4.0], [4]])}, local
    )[:2]
    assert own["w"][:, 0].tolist() == [2, 4] and up["a"][1].tolist() == [0, 0]


def test_fedrod_and_knnper_go_by_the_runs_loss():
    """FedRoD trains by it; kNN-Per with lam = 0 is FedAvg by any loss."""
    losses = {
        "plain": None,
        "smooth": nn.CrossEntropyLoss(label_smoothing=0.3),
        "weights": nn.CrossEntropyLoss(t([1.0, 5, 5, 1]).float()),
    }
    runs = {
        k: Simulation("fedrod", tiny_model(), images(), Training(lr=0.1), rounds=2, loss=v).run()
        for k, v in losses.items()
    }
    assert not any(
        torch.equal(runs["plain"].state.server["x"], runs[k].state.server["x"])
        for k in ("smooth", "weights")
    )
    for loss in losses.values():
        given = [
            Simulation(a, tiny_model(), images(), Training(lr=0.1), rounds=2, loss=loss)
            .run()
            .rounds[-1]["eval"]["loss"]
            for a in (KnnPer(lam=0.0), FedAvg())
        ]
        assert given[0] == pytest.approx(given[1], rel=1e-5)
    with pytest.raises(ValueError, match=r"^loss: FedRoD balances the scores of classes"):
        Simulation(
            "fedrod",
            lambda: nn.Linear(6, 1),
            binary(),
            Training(lr=0.1),
            rounds=1,
            loss="binary_cross_entropy",
        ).run()


def binary(floats=False, width=1):
    """Clients whose tests are their training samples, with labels 0 and 1 (so many at once)."""
    gen = torch.Generator().manual_seed(0)
    x = [3 * torch.randn(20, 6, generator=gen) for _ in range(3)]
    y = [(v[:, :width] > 0).squeeze(1) for v in x]
    labels = [v.float() if floats else v.long() for v in y]
    return Federation.from_clients(
        [{"train": pair, "test": pair} for pair in zip(x, labels, strict=True)]
    )


def test_per_fedavgs_evaluation_takes_plain_steps_too():
    plain, other = (
        Simulation(
            PerFedAvg(steps=3),
            tiny_model(),
            images(),
            Training(lr=0.3, batch_size=4, **o),
            rounds=2,
        )
        for o in ({}, {"momentum": 0.9, "weight_decay": 0.5})
    )
    first = plain.run()
    with pytest.warns(UserWarning, match="play no part"):
        second = other.run()
    assert torch.equal(first.model(1).get_buffer("view_w"), second.model(1).get_buffer("view_w"))


class Ends(nn.Module):
    """Models whose head is not the last that they do, or not their own."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.e, self.h = kind, nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = (
            nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
            if kind == "statistics"
            else nn.Linear(4, 4 if kind == "tied" else 3)
        )
        if kind == "tied":
            self.head.weight = self.e.weight

    def forward(self, x):
        y = self.head(torch.tanh(self.e(x)))
        return (
            y.relu()
            if self.kind == "after"
            else y + self.h(x)[:, :3]
            if self.kind == "beside"
            else y
        )


@pytest.mark.parametrize("kind", ["tied", "after", "beside", "statistics", "plain"])
def test_fedrods_head_is_the_last_that_the_model_does(kind):
    x = torch.randn(12, 4)
    fed = Federation.from_clients(
        [(x, torch.arange(12) % 3), (x + 1, torch.arange(12) % 3)],
        classes=4 if kind == "tied" else 3,
    )
    run = Simulation(
        "fedrod", Ends(kind), fed, Training(0.1, 4), rounds=1, evaluation=Evaluation(split="train")
    )
    if kind == "plain":
        assert not run.run().stopped
    else:
        with pytest.raises(ValueError, match=r"^model: FedRoD adds a second head's scores"):
            run.run()
