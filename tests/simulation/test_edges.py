"""The edges of the algorithms: batch norm's statistics, clients who come late or never, draws, step
sizes of 0."""

import warnings

import pytest
import torch
import torch.nn as nn
from doors import held_out, spread, views
from methods import (
    MRMTL,
    SFL,
    ClusteredFL,
    Ditto,
    Ensemble,
    FedDWA,
    FedFomo,
    HypCluster,
    LocalOnly,
    Mocha,
    PerFedAvg,
    PFedMe,
    QFedAvg,
    Scaffold,
    Waffle,
    WeightErosion,
)
from parts.edges import F64, normal
from small import images, make_setting, play, quadratics, served, tiny_model
from torch import Tensor

from pflcore import Clients, Evaluation, Federation, Net, Simulation, Training, evaluate, step
from pflcore.algorithms import ALGORITHMS, Cohort, FedAvg
from pflcore.simulation.round import Setup, begin


def close(a, b, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=F64), torch.as_tensor(b, dtype=F64), rtol=rtol, atol=atol
    )


# batch norm's statistics


class Watched:
    """An algorithm's own statistics, client by client, before anything is mixed."""

    def __init__(self, alg, s, ids):
        seen: dict[str, Tensor] = {}
        train = type(alg).train

        class Spy(type(alg)):
            def train(self, down, own, clients):
                found = train(self, down, own, clients)
                seen["b"] = found[2].buffers.clone()
                return found

        spy = Spy(**{k: v for k, v in vars(alg).items()})
        self.state, self.done = step(Setup(spy, s), begin(spy, s.net, s.data.n), torch.tensor(ids))
        self.trained = seen["b"]


@pytest.mark.parametrize(
    "alg",
    [
        FedAvg(),
        FedAvg(weighting="uniform"),
        Waffle(target=2),
        WeightErosion(target=2, p_d=0.3),
        QFedAvg(q=2.0),
    ],
)
def test_statistics_are_mixed_as_the_model_is(alg):
    """Every client, present or not, has the mean with the model's own weights; the bytes are
    counted."""
    s, ids = normal(), [0, 2, 3]
    found = Watched(alg, s, ids)
    weight = {
        "FedAvg": torch.ones(3, dtype=F64)
        if vars(alg).get("weighting") == "uniform"
        else torch.tensor([8, 32, 12], dtype=F64),
        "Waffle": found.done.mix.weight[0] if found.done.mix else None,
        "WeightErosion": found.state.server.get("alpha", torch.zeros(4))[ids],
        "QFedAvg": None,
    }[type(alg).__name__]
    if weight is None:
        local = Clients(s, torch.tensor(ids), 1, s.net.b0.expand(3, -1))
        weight = (
            torch.tensor([8, 32, 12], dtype=F64) * local.loss(s.net.w0.expand(3, -1)).double() ** 2
        )
    close(found.state.batch_norm, (weight / weight.sum() @ found.trained).expand(4, -1))
    assert found.done.bytes_up >= 3 * 8 * (s.net.size + s.net.b0.numel())


def test_statistics_of_feddwa_and_sfl_follow_their_mixing_matrix():
    s = normal()
    for alg in (FedDWA(k=2), SFL(k=1)):  # FedDWA's are K numbers a client
        state, spied = begin(alg, s.net, 4), Watched(alg, s, [0, 1, 3])
        state, done = step(Setup(alg, s, batch_norm="average"), state, torch.tensor([0, 1, 3]))
        mix = (
            done.mix.weight
            if done.mix.index is None
            else spread(done.mix.weight, done.mix.index, 3)
        )
        mix = mix if len(mix) == 3 else mix[[0, 1, 3]]
        close(state.batch_norm[[0, 1, 3]], mix / mix.sum(1, keepdim=True) @ spied.trained)
        if isinstance(alg, FedDWA):
            assert torch.equal(state.batch_norm[2], s.net.b0)  # absent: it keeps its own


def test_who_never_trained_is_evaluated_with_the_average():
    s = normal()
    state, _ = step(Setup(LocalOnly(), s), begin(LocalOnly(), s.net, 4), torch.tensor([0, 2]))
    assert torch.equal(state.batch_norm[1], s.net.b0) and state.seen.tolist() == [
        True,
        False,
        True,
        False,
    ]
    seen = evaluate(Setup(LocalOnly(), s), state)
    state.batch_norm[1] = state.batch_norm[[0, 2]].mean(0)
    state.seen[1], state.clients["w"][1] = True, s.net.w0
    close(seen["loss"], evaluate(Setup(LocalOnly(), s), state)["loss"])


@pytest.mark.parametrize("alg", [HypCluster(k=3), Ensemble(k=3), HypCluster(k=3, warm=1)])
def test_each_cluster_has_statistics_of_its_own(alg):
    """They are the mean of those who trained that model, and every model is judged with its own."""
    s = normal()
    state = begin(alg, s.net, 4)
    for _ in range(3):
        state, _ = step(Setup(alg, s), state, torch.arange(4))
    b = state.server["b"]
    assert b.shape == (3, s.net.b0.numel()) and len(b.unique(dim=0)) >= 2
    want = []
    for j in range(3):
        local = Clients(s, torch.arange(4), 3, b[j].expand(4, -1).clone())
        want.append(local.loss(state.server["x"][j].expand(4, -1)))
    best = torch.stack(want, 1).argmin(1)
    local = Clients(s, torch.arange(4), 3, s.net.b0.expand(4, -1).clone())
    view = alg.model(alg.send(state.server, Cohort(torch.arange(4), b, 4, 3, 10)), {}, local)
    assert torch.equal(view["w"], state.server["x"][best]) and torch.equal(
        view["batch_norm"], b[best]
    )


def test_one_cluster_with_batch_norm_is_fedavg():
    s = normal()
    a, b = (play(alg, s, 2)[-1][0] for alg in (HypCluster(k=1), FedAvg()))
    close(a.server["x"][0], b.server["x"])
    close(a.server["b"][0], b.batch_norm[0])
    close(evaluate(Setup(HypCluster(k=1), s), a)["loss"], evaluate(Setup(FedAvg(), s), b)["loss"])


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_gradient_with_batch_norm_is_that_of_training(engine):
    s = normal((8, 8, 8), engine=engine)  # one batch each
    local = Clients(s, torch.arange(3), 1, s.net.b0.expand(3, -1).clone())
    x = s.net.w0.expand(3, -1)
    want = local.fit(x, mean_grad=True).grad
    close(local.grad(x), want, 1e-8, 1e-10)
    assert torch.equal(local.buffers, s.net.b0.expand(3, -1))
    odd = normal((9, 17))  # a last sample alone joins the batch before it: batch norm needs two
    assert (
        Clients(odd, torch.arange(2), 1, odd.net.b0.expand(2, -1).clone())
        .grad(x[:2])
        .isfinite()
        .all()
    )


# clients who come late or never


def lines(n=6, lr=0.3, **training):
    b = torch.linspace(1, 2, n, dtype=F64)[:, None]
    net, data = quadratics(torch.ones_like(b), b, [0.0])
    return make_setting(net, data, Training(lr=lr, **training), rounds=100)


@pytest.mark.parametrize(
    "alg", [Ditto(lam=0.5), MRMTL(lam=0.5), PFedMe(personal_lr=0.1), Mocha(lam=1e-3)]
)
def test_who_never_joined_is_served_what_the_server_has_and_starts_there(alg):
    s = lines()
    ids = [0, 1, 2, 3]
    state = play(alg, s, 12, lambda r: ids)[-1][0]
    shared = state.server["x"] if "x" in state.server else state.server["w"][ids].mean(0)
    assert shared.abs().min() > 0.5
    close(views(alg, state, s, torch.arange(6))[0]["w"][4:], shared.expand(2, -1))
    after = step(Setup(alg, s), state, torch.tensor([4]))[0]
    key = next(k for k in ("v", "theta", "w") if k in after.clients)
    assert 0 < (after.clients[key][4] - shared).abs() < (after.clients[key][4] - s.net.w0).abs()


def test_a_method_with_client_state_warns_where_the_evaluated_never_train():
    some = {"clients": torch.tensor([0, 1]), "evaluation": Evaluation(clients=torch.tensor([1, 2]))}
    with pytest.warns(
        UserWarning, match=r"^ditto keeps a state for each client, and 1 of those who are evaluated"
    ):
        Simulation("ditto", tiny_model(), images(), **some)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Simulation("fedavg", tiny_model(), images(), **some)
        Simulation("ditto", tiny_model(), images())


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
    close(
        again,
        step(Setup(restart, s), play(restart, s, 1)[-1][0], torch.arange(6))[0].clients["theta"],
    )
    assert not torch.allclose(again, step(Setup(keep, s), one, torch.arange(6))[0].clients["theta"])
    with pytest.raises(ValueError, match=r"^theta: expected 'keep' or 'restart'"):
        PFedMe(theta="reset")


def test_clustered_fl_finds_two_kinds_though_most_are_absent_when_it_splits():
    kind = torch.arange(40) % 2
    gen = torch.Generator().manual_seed(1)
    b = (20.0 * kind + 0.3 * torch.randn(40, generator=gen)).double()[:, None]
    net, data = quadratics(torch.ones_like(b), b, [10.0])
    s = make_setting(net, data, Training(lr=0.3), rounds=60)
    alg = ClusteredFL(eps1=1.0, eps2=1.0, first=3)
    order = [torch.randperm(40, generator=gen)[:8].tolist() for _ in range(60)]
    state, done = play(alg, s, 60, lambda r: order[r - 1])[-1]
    cluster = alg.report(state.server, done.mix, done.cohort)["cluster"]
    assert (
        len(set(cluster.tolist())) == 2
        and len({(int(k), int(c)) for k, c in zip(kind, cluster, strict=True)}) == 2
    )
    close(state.server["x"][cluster][:, 0], 20.0 * kind, 0, 1.0)


def test_the_inner_nodes_of_the_tree_keep_the_model_they_split_at():
    alg, x = ClusteredFL(relative=True, first=0), torch.zeros(1, 2, dtype=F64)
    g = {
        "x": x,
        "way": x.clone(),
        "child": torch.tensor([-1]),
        "cluster": torch.zeros(6, dtype=torch.long),
    }
    delta = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0]], dtype=F64)

    def cohort(ids):
        return Cohort(torch.tensor(ids), torch.ones(len(ids)), 6, 5, 9)

    g = served(alg, g, {"delta": delta}, cohort([0, 1, 2, 3]))
    assert g["cluster"].tolist() == [1, 1, 2, 2, 0, 0] and g["child"].tolist() == [1, -1, -1]
    assert alg.send(g, cohort([4, 0]))["x"].tolist() == [[0, 0], [1, 0]]
    g = served(alg, g, {"delta": torch.tensor([[-0.2, 0.1], [0.5, 0]], dtype=F64)}, cohort([4, 0]))
    assert g["cluster"].tolist() == [1, 1, 2, 2, 2, 0]
    close(g["x"], [[0, 0], [1.5, 0], [-1, 0]])  # client 4's update was from another model


def test_absence_is_no_unlikeness_for_waffle():
    """Equal clients, a quarter of 12 a round: attended rounds alone count, so the target's weight
    is what one round gives it."""
    n, gen = 12, torch.Generator().manual_seed(0)
    alg, net = Waffle(target=0, omega=lambda r, rounds: 0.9), Net(nn.Linear(8, 1))
    g = begin(alg, net, n).server
    smoothed, alone = [], []
    for round in range(1, 61):
        ids = torch.cat(
            [torch.tensor([0]), 1 + torch.randperm(n - 1, generator=gen)[:2].sort().values]
        )
        up = {"delta": torch.randn(3, net.size, generator=gen), "control": torch.zeros(3, net.size)}
        cohort = Cohort(ids, torch.ones(3), n, round, 1000)
        weights = alg.update(g, up, cohort)[1].weight[0]
        g = served(alg, g, up, cohort)
        assert float(weights.sum()) == pytest.approx(1)
        smoothed.append(float(weights[0]))
        alone.append(float(g["history"][0, 0]) * n / 3)
    assert sum(smoothed) / 60 == pytest.approx(sum(alone) / 60, abs=0.03)


# draws ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedfomo", "l2c", "feddwa", "scaffold", "hypcluster"])
def test_the_order_of_a_cohorts_ids_changes_nothing(name):
    data = held_out(images((20, 25, 30, 35, 22)))
    s = make_setting(Net(tiny_model()), data, Training(lr=0.1, batch_size=8), rounds=9)
    alg = ALGORITHMS[name](**({"m": 2} if name == "fedfomo" else {}))
    found = []
    for orders in (
        [[0, 1, 2, 3, 4], [0, 2, 4], [1, 2, 3]],
        [[3, 1, 0, 4, 2], [4, 0, 2], [2, 3, 1]],
    ):
        state = begin(alg, s.net, 5)
        for ids in orders:
            state, done = step(Setup(alg, s), state, torch.tensor(ids))
            assert done.ids == sorted(ids)
        found.append(state.server | state.clients)
    for k in found[0]:
        assert torch.equal(found[0][k], found[1][k]), k
    with pytest.raises(ValueError, match=r"^ids: expected each client once"):
        step(Setup(alg, s), begin(alg, s.net, 5), torch.tensor([1, 1]))


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


@pytest.mark.parametrize("name", ["fedfomo", "l2c"])
def test_a_client_of_one_sample_does_not_end_the_run(name):
    run = Simulation(
        name, tiny_model(), images((1, 20, 25)), Training(lr=0.1, batch_size=8), rounds=3
    )
    assert run.data.size("train").tolist() == [1, 16, 20] and run.data.size("val").tolist() == [
        0,
        4,
        5,
    ]
    assert any("too few samples" in note for note in run.data.notes)
    assert len(run.run().rounds) == 3


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_shuffles_of_several_batches_a_step_do_not_depend_on_who_is_there(engine):
    s = make_setting(
        Net(tiny_model()), images((5, 12, 31)), Training(lr=0.1, batch_size=4), engine=engine
    )

    def update(rows, grad, k):
        return {"w": rows["w"] - 0.1 * (grad(rows["w"]) + 2 * grad(rows["w"], 1))}

    def moved(ids):
        local = Clients(s, torch.tensor(ids), 1, torch.empty(len(ids), 0))
        return local.each_batch(
            {"w": s.net.w0.expand(len(ids), -1)}, update, steps=7, batches=2
        ).rows["w"]

    torch.testing.assert_close(
        moved([0, 1, 2]), torch.cat([moved([i]) for i in range(3)]), rtol=1e-5, atol=1e-6
    )


# step sizes, options that play no part


@pytest.mark.parametrize("alg", [Scaffold(option="II"), QFedAvg(q=1.0)])
def test_a_step_size_of_zero_drops_nobody(alg):
    s = make_setting(
        Net(tiny_model()),
        images(),
        Training(lr=0.1, batch_size=8, schedule=lambda r, rounds: float(r != 2)),
        rounds=3,
    )
    state = begin(alg, s.net, 3)
    for _ in range(3):
        state, done = step(Setup(alg, s), state, torch.arange(3))
        assert not done.dropped and not done.void
    if isinstance(alg, Scaffold):
        still = make_setting(s.net, s.data, Training(lr=0.0, batch_size=8))
        two, one = (
            step(Setup(a, still), begin(a, s.net, 3), torch.arange(3))[0].clients["c"]
            for a in (alg, Scaffold())
        )
        assert torch.equal(two, one) and one.any()


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


def test_the_full_gradient_guidance_decays_as_training_does():
    """With one batch a client the guidance is one more epoch of training, momentum from zero and
    weight decay included."""
    s = make_setting(
        Net(lambda: tiny_model()().double()),
        _double(images((6, 7))),
        Training(lr=0.1, batch_size=32, momentum=0.5, weight_decay=0.3),
    )
    local = Clients(s, torch.arange(2), 1, torch.empty(2, 0))
    w = s.net.w0.expand(2, -1)
    close(FedDWA(guidance="full_grad", ahead=3).look_ahead(w, local), local.fit(w, epochs=3).w)


def test_the_current_model_as_guidance_is_local_training():
    s = make_setting(
        Net(tiny_model()), images((9, 12, 15)), Training(lr=0.1, batch_size=4), rounds=3
    )
    alone, local = play(FedDWA(guidance="current"), s)[-1], play(LocalOnly(), s)[-1]
    mix = alone[1].mix
    assert torch.equal(alone[0].server["x"], local[0].clients["w"])
    assert torch.equal(spread(mix.weight, mix.index, 3), torch.eye(3, dtype=F64))
    assert alone[1].bytes_up == 3 * s.net.size * 4


def test_losses_of_double_models_are_double():
    data = _double(images((7, 11, 13)))
    s = make_setting(Net(lambda: nn.Linear(6, 4).double()), data, Training(), engine="vmap")
    local = Clients(s, torch.arange(3), 1, torch.empty(3, 0))
    want = [
        nn.functional.cross_entropy(
            s.net(s.net.w0, data.x[data.index["train"][i]]), data.labels(i, "train")
        )
        for i in range(3)
    ]
    close(local.loss(s.net.w0.expand(3, -1)), torch.stack(want).detach(), 1e-13, 1e-15)


def test_mochas_first_relation_is_checked_too():
    from pflcore.algorithms import Stop

    with pytest.raises(Stop, match=r"^MOCHA is unstable from round 1 on"):
        play(Mocha(lam=2.0, outer=50), lines(lr=0.5), 1)


@pytest.mark.parametrize("growth", [0.0, 1.0, 4.0])
def test_calibrated_erosion_ends_at_80_percent_however_distances_grow(growth):
    alg, net = WeightErosion(), quadratics(torch.ones(4, 1), torch.zeros(4, 1))[0]
    g, gone = begin(alg, net, 4).server, None
    for round in range(1, 51):
        far = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=F64)[:, None] * (1 + growth * round / 50)
        cohort = Cohort(torch.arange(4), torch.ones(4), 4, round, 50)
        g = served(alg, g, {"delta": 1 + far, "passes": torch.zeros(4, dtype=torch.long)}, cohort)
        gone = round if gone is None and g["alpha"][2] < 1e-9 else gone
    assert gone == 40 and g["alpha"][1] > 0


def _double(data):
    return Federation(data.x.double(), data.y, data.index, 4, data.relabel)
