"""Fine points of the methods that only unequal clients, a second round or a second minibatch can
show."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from doors import spread, strengths
from methods import (
    ClusteredFL,
    FactorizedWaffle,
    FedAMP,
    FedDWA,
    FedFomo,
    HeurFedAMP,
    KnnPer,
    PerFedAvg,
    Scaffold,
    Waffle,
)
from parts.fine_points import t, three
from small import images, make_setting, play, quadratics, served, tiny_model

from pflcore import Clients, Evaluation, Federation, Net, Robustness, Simulation, Training, step
from pflcore.algorithms import Cohort, FedAvg, Pool
from pflcore.simulation.round import Setup, begin


def cohort(n, round=1, ids=None):
    who = torch.arange(n) if ids is None else torch.tensor(ids)
    return Cohort(who, torch.ones_like(who), n, round, 100)


def test_weight_decay_is_part_of_scaffolds_full_gradient():
    """The loss is a (m - b)^2 / 2 and decay adds .5 m: at m = .5 the gradients are 1 (.5 - 1) + .25
    and 2 (.5 + 2) + .25."""
    net, data = quadratics(t([[1.0], [2]]), t([[1.0], [-2]]), start=[0.5])
    s = make_setting(net, data, Training(lr=0.1, batch_size=1, weight_decay=0.5))
    state, _ = play(Scaffold(option="I"), s)[0]
    torch.testing.assert_close(state.clients["c"][:, 0], t([-0.25, 5.25]))


def test_feddwas_look_ahead_takes_a_shuffle_of_its_own():
    s, local = three()
    w = s.net.w0.expand(3, -1)
    ahead = FedDWA().look_ahead(w, local)
    assert not any(torch.equal(a, b) for a, b in zip(ahead, local.fit(w).w, strict=True))
    # an epoch from the same place, all the same
    torch.testing.assert_close(ahead, local.fit(w).w, atol=0.2, rtol=0)


def test_who_has_never_come_mixes_nobody_and_gives_nothing():
    sqdist, norm2 = t([[0, 1, 2], [1, 0, 2], [2, 2, 0]]), t([1.0, 2, 3])
    for alg in (FedAMP(sigma=4.0), HeurFedAMP()):
        xi = alg.mixing(sqdist, norm2, torch.tensor([True, True, False]))
        assert (
            xi[2].tolist() == [0, 0, 1]
            and xi[:2, 2].tolist() == [0, 0]
            and bool((xi[:2, :2] > 0).all())
        )


def test_fedfomo_explores_by_the_whole_share_in_the_first_round():
    g = {
        "w": torch.zeros(5, 3),
        "seen": torch.ones(5, dtype=torch.bool),
        "p": torch.arange(25, dtype=torch.float64).view(5, 5),
    }
    alg = FedFomo(m=1, epsilon=1.0, decay=1.0)
    picks = {
        r: {int(alg.send(g, cohort(5, r, [0])._replace(seed=i))["w"].index) for i in range(60)}
        for r in (1, 2, 9)
    }
    assert picks == {1: {1, 2, 3, 4}, 2: {4}, 9: {4}}


def test_fedfomos_affinities_add_up_over_the_rounds():
    net, _ = quadratics(t([[1.0], [2]]), t([[1.0], [2]]))
    alg = FedFomo()
    state = begin(alg, net, 2)
    first, second = t([[0.0, 2], [-1, 0]]), t([[0.0, 5]])
    g = served(
        alg, state.server, {"w": torch.zeros(2, 1, dtype=torch.float64), "a": first}, cohort(2)
    )
    g = served(
        alg, g, {"w": torch.zeros(1, 1, dtype=torch.float64), "a": second}, cohort(2, 2, [0])
    )
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


def test_clustered_fl_weighs_unequal_clients_alike():
    s, _ = three()
    (state, _), (uniform, _), (sized, _) = (
        play(a, s, 1)[0] for a in (ClusteredFL(), FedAvg(weighting="uniform"), FedAvg())
    )
    torch.testing.assert_close(state.server["x"][0], uniform.server["x"])
    assert not torch.allclose(uniform.server["x"], sized.server["x"])


def test_weights_of_a_cohort_smaller_than_k_keep_the_first_clients():
    """Places that nothing fills have weight 0 and client 0's number."""
    p, near = t([[0.75, 0.25, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 2, 0, 0], [2, 0, 0, 0]])
    assert spread(p, near, 3).tolist() == [[0.75, 0, 0.25], [0, 0, 1]]


def test_fedamps_pull_is_lam_over_alpha():
    """One step of .1 at (w - 1)^2 / 2 from w = 3 with u = 5: 3 - .1 (2 + (.6 / 2) (3 - 5)) =
    2.86."""
    net, data = quadratics(t([[1.0]]), t([[1.0]]), start=[3.0])
    local = Clients(
        make_setting(net, data, Training(lr=0.1, batch_size=1)), torch.arange(1), 1, net.b0[None]
    )
    own, _ = FedAMP(lam=0.6, alpha=2.0).train({"u": t([[5.0]])}, {"w": t([[3.0]])}, local)[:2]
    torch.testing.assert_close(own["w"], t([[2.86]]))


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


def test_void_rounds_are_counted_in_a_row():
    """A round that was played ends the count."""

    class Breaks(FedAvg):
        def train(self, down, own, clients):
            own, up, fit = super().train(down, own, clients)
            return (
                own,
                {k: v * torch.nan if clients.round in (1, 2, 4) else v for k, v in up.items()},
                fit,
            )

    s, _ = three()
    assert [state.void for state, _ in play(Breaks(), s, 4)] == [1, 2, 0, 1]


def test_statistics_that_fail_after_the_server_leave_the_round_undone(monkeypatch):
    """FedDWA writes its models in place; what is mixed with them may still run out of memory."""

    def fails(*_):
        raise MemoryError("as if")

    monkeypatch.setattr("pflcore.simulation.round.averaged", fails)
    data = images()
    net = Net(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)))
    s = make_setting(net, data, Training(lr=0.1, batch_size=4))
    state = begin(FedDWA(), net, 3)
    before = {k: v.clone() for k, v in state.server.items()}
    with pytest.raises(MemoryError):
        step(Setup(FedDWA(), s, batch_norm="average"), state, torch.arange(3))
    assert all(torch.equal(state.server[k], v) for k, v in before.items()) and not bool(
        state.seen.any()
    )


@pytest.mark.parametrize(
    "algorithm",
    [Scaffold(), Scaffold(option="II"), Waffle(control_agg="literal", omega=lambda r, of: 1.0)],
)
def test_a_clipped_round_leaves_scaffold_its_optimum(algorithm):
    """What the server did not take of a control variate the client does not keep, so c is their
    mean, and x goes where it would."""
    net, data = quadratics(t([[1.0], [2], [4]]), t([[9.0], [-2], [3]]))
    run = Simulation(
        algorithm,
        net,
        data,
        Training(lr=0.05, batch_size=1, epochs=3),
        rounds=200,
        robustness=Robustness(clip=0.5),
        evaluation=Evaluation(every=0),
    )
    history = run.run()
    assert history.rounds[0]["clipped"] and not history.rounds[150]["clipped"]
    if type(algorithm) is Scaffold:
        torch.testing.assert_close(run.state.server["c"], run.state.clients["c"].mean(0))
        torch.testing.assert_close(run.state.server["x"], t([(9.0 - 4 + 12) / 7]))


def test_a_void_round_reports_nothing():
    data = images()
    x = data.x.clone()
    x[data.index["train"][0]] = 3e38  # its scores overflow
    run = Simulation(
        Waffle(target=0),
        lambda: nn.Linear(6, 4),
        replace(data, x=x),
        Training(lr=0.1, batch_size=8),
        rounds=3,
    )
    with pytest.warns(RuntimeWarning, match="diverged"):
        assert [(r["void"], list(r["report"])) for r in run.run().rounds] == [
            (False, ["weights"]),
            (True, []),
            (True, []),
        ]


@pytest.mark.parametrize("name", ["fedavg", "feddwa", "fedrep"])
@pytest.mark.parametrize("policy", ["average", "local"])
# its statistics are each client's own
@pytest.mark.unless(lambda name, policy: (name, policy) == ("fedrep", "average"))
def test_a_runs_models_have_the_statistics_that_it_was_evaluated_with(name, policy):
    """Also those of clients who never took part."""
    data = images((8, 8, 8, 8, 8, 8))
    model = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))  # noqa: E731
    run = Simulation(
        name,
        model,
        data,
        Training(lr=0.2, batch_size=4),
        rounds=2,
        participation=0.34,
        batch_norm=policy,
    )
    history = run.run()
    assert not run.state.seen.all()
    for i in range(6):
        x, y = data.client(i, "test")
        loss = nn.functional.cross_entropy(history.model(i)(x), y)
        assert float(loss) == pytest.approx(history.rounds[-1]["eval"]["loss"][i], rel=1e-5)


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
    return Federation.from_arrays(
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
    data = Federation.from_arrays([{"train": pair, "test": pair}])
    history = Simulation(
        KnnPer(k=1, lam=1.0), lambda: nn.Linear(6, 2), data, Training(lr=0.1), rounds=1
    ).run()
    torch.testing.assert_close(history.model(0)(pair[0]), pair[1])


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


@pytest.mark.parametrize("engine", ["chain", "loop", "vmap"])
def test_several_minibatches_a_step_do_not_depend_on_the_company(engine):
    data = images()
    s = make_setting(Net(tiny_model()), data, Training(lr=0.1, batch_size=4), 2, engine)

    def played(ids):
        local = Clients(s, torch.tensor(ids), 1, s.net.b0.expand(len(ids), -1))
        start = {"w": s.net.w0.expand(len(ids), -1)}
        return local.each_batch(
            start,
            lambda r, grad, k: {"w": r["w"] - 0.1 * grad(r["w"]) - 0.2 * grad(r["w"], 1)},
            batches=2,
            steps=5,
        ).rows["w"]

    together = played([0, 1, 2])
    for i in range(3):
        torch.testing.assert_close(together[i], played([i])[0], rtol=1e-5, atol=1e-6)


def test_a_newcomer_finds_its_cluster():
    """Two kinds of clients, whose labels differ by one: who comes later is served the model of its
    kind, not the one before they parted."""
    data = images((30,) * 6)
    run = Simulation(
        ClusteredFL(eps1=0.9, relative=True, first=1),
        tiny_model(),
        data,
        Training(lr=0.3, batch_size=10),
        rounds=6,
    )
    history = run.run()
    cluster = run.state.server["cluster"]
    assert len(set(cluster.tolist())) > 1
    for kind in (0, 1):
        x, y = data.client(kind, "test")
        fresh = history.adapt((x, y), rounds=4).get_buffer("view_w")
        same = [torch.equal(fresh, row) for row in run.state.server["x"]]
        home = same.index(True)
        assert run.state.server["child"][home] == -1 and home in cluster[kind::2].tolist()


def test_knnper_refuses_probabilities_as_labels():
    gen = torch.Generator().manual_seed(0)
    pair = torch.randn(9, 6, generator=gen), torch.rand(9, 4, generator=gen).softmax(1)
    data = Federation.from_arrays([{"train": pair, "test": pair}])
    run = Simulation(
        KnnPer(k=1), lambda: nn.Linear(6, 4), data, Training(lr=0.1), rounds=1, loss="cross_entropy"
    )
    with pytest.raises(ValueError, match=r"^data: kNN-Per's neighbours vote with a label"):
        run.run()


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
    fed = Federation.from_arrays(
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


@pytest.mark.parametrize(
    ("loss", "width"), [("squared", 2), ("binary_cross_entropy", 2), ("cross_entropy", 3)]
)
def test_sampled_models_are_averaged_as_their_loss_has_it(loss, width):
    alg = FactorizedWaffle(eval_mode="mc", ranks=(4,))
    net = alg.prepare(
        Net(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, width)), loss)
    )
    b, x = torch.rand(3, 4), torch.randn(7, 5)
    at = strengths(net)
    each = torch.stack([net(net.w0.index_copy(0, at, net.w0[at] * row), x) for row in b])
    want = {
        "squared": each.mean(0),
        "binary_cross_entropy": each.sigmoid().mean(0).logit(),
        "cross_entropy": each.softmax(2).mean(0).log(),
    }[loss]
    got = alg.predict({"w": net.w0, "b": b}, net, x)
    torch.testing.assert_close(got.log_softmax(1) if loss == "cross_entropy" else got, want)
