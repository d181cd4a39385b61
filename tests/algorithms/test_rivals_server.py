"""FedDWA's rivals that mix on the server: golden values, and for each the law that its known bug
breaks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from methods import (
    SFL,
    ClusteredFL,
    FedAMP,
    HeurFedAMP,
    LocalOnly,
)
from parts.fine_points import three
from parts.rivals import GOLDEN, close, cohort, mixing, tree
from small import F64, images, make_setting, near, play, quadratics, served, t, tiny_model

from pflcore import Clients, Simulation, Training, ops, step
from pflcore.algorithms import Cohort, FedAvg
from pflcore.simulation.round import Setup, begin


def points(targets, lr, engine="loop", start=0.0):
    """Client i's loss is (w - target_i)^2 / 2, one sample each."""
    b = t(targets)[:, None]
    net, data = quadratics(torch.ones_like(b), b, [start])
    return make_setting(net, data, Training(lr=lr), rounds=10, engine=engine)


# FedAMP ---------------------------------------------------------------------


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
    w = t(c2["W"])
    with pytest.warns(UserWarning, match=r"alpha <= sigma / 3"):
        safe = mixing(FedAMP(), w)
    assert bool((safe >= 0).all()) and not safe.diagonal().abs().gt(1e-12).any()
    close(safe.sum(1), torch.ones(4))
    close(safe[0, 1:], t(c2["xi"])[0, 1:] / t(c2["xi"])[0, 1:].sum())


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_golden_fedamp_proximal_term_moves_the_model(engine):
    """Written with detached parameters, as in a widely used library, the term has no gradient and
    FedAMP is local training."""

    c3 = GOLDEN["C3_fedamp_prox_step"]
    s = points([c3["c"]], 0.01, engine)
    alg = FedAMP(lam=c3["lam"], alpha=c3["alpha"])
    down, own = {"u": t([[c3["u"]]])}, {"w": t([[1.0]])}
    new, up = alg.train(down, own, Clients(s, torch.arange(1), 1, s.net.b0.expand(1, -1)))[:2]
    close(up["w"], [[c3["one_sgd_step_from_w"]]])
    assert torch.equal(new["w"], up["w"])
    close(alg.model(down, new, None)["w"], up["w"])
    s = points([c3["c"]], 0.5, engine)
    for round in range(1, 80):
        own, _ = alg.train(down, own, Clients(s, torch.arange(1), round, s.net.b0.expand(1, -1)))[
            :2
        ]
    close(own["w"], [[c3["w_star"]]])


def test_fedamp_without_its_pull_is_local_training():
    s = points([1.0, 2.0, 5.0], 0.1)
    amp, local = begin(FedAMP(lam=0.0), s.net, 3), begin(LocalOnly(), s.net, 3)
    pulled = begin(FedAMP(lam=2.0, sigma=3.0), s.net, 3)
    for _ in range(5):
        amp, _ = step(Setup(FedAMP(lam=0.0), s), amp, torch.arange(3))
        local, _ = step(Setup(LocalOnly(), s), local, torch.arange(3))
        pulled, _ = step(Setup(FedAMP(lam=2.0, sigma=3.0), s), pulled, torch.arange(3))
    assert torch.equal(amp.clients["w"], local.clients["w"])
    assert pulled.clients["w"].std() < 0.95 * local.clients["w"].std()


def test_fedamp_mixes_latest_uploads_and_nobody_who_never_came():
    s = points([1.0, 2.0, 3.0, 4.0], 0.3)
    alg = FedAMP(sigma=2.0, alpha=0.2)
    state = begin(alg, s.net, 4)
    for ids in ([0, 1, 2], [1, 2], [0, 2]):
        before, u = state.clients["w"].clone(), alg.send(state.server, cohort(ids, 4))["u"]
        close(u, state.server["xi"][ids] @ state.server["w"])
        state, done = step(Setup(alg, s), state, torch.tensor(ids))
        absent = [i for i in range(4) if i not in ids]
        assert torch.equal(state.clients["w"][absent], before[absent])
        close(state.server["sqdist"], ops.pairwise_sqdist(state.server["w"]))
        assert torch.equal(state.server["w"][ids], state.clients["w"][ids])
    report = alg.report(state.server, done.mix, done.cohort)
    assert state.server["last"].tolist() == [3, 2, 3, 0]
    assert report["weights"][3].tolist() == [0, 0, 0, 1] and not report["weights"][:3, 3].any()
    close(
        report["weights"][0, 1],
        0.1 * torch.exp(-((state.server["w"][0] - state.server["w"][1]) ** 2).sum() / 2),
    )  # a stale model gives too


def test_heurfedamp_of_zeros_and_of_one_client():
    xi = mixing(HeurFedAMP(xi_self=0.5), t([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    close(xi, [[0.5, 0.25, 0.25]] * 1 + [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
    close(mixing(HeurFedAMP(), t([[1.0, 2.0]])), [[1.0]])
    close(mixing(FedAMP(), t([[1.0, 2.0]])), [[1.0]])


def test_sfl_on_the_complete_graph_is_fedavg():
    s = points([1.0, 2.0, 6.0], 0.1)
    sfl, avg = SFL(k=2, lam1=0.0, lam2=0.0), FedAvg(weighting="uniform")
    a, b = begin(sfl, s.net, 3), begin(avg, s.net, 3)
    for _ in range(4):
        a, _ = step(Setup(sfl, s), a, torch.arange(3))
        b, _ = step(Setup(avg, s), b, torch.arange(3))
        down = sfl.send(a.server, cohort([0, 1, 2], 3))
        close(down["x"], b.server["x"].expand(3, -1))
        close(down["u"], b.server["x"].expand(3, -1))


def test_sfl_regularisers_have_a_gradient():
    """The released code computes them on detached copies, so that SFL trains as if there were
    none."""

    s = points([2.0, 2.0], 0.1)
    local = Clients(s, torch.arange(2), 1, s.net.b0.expand(2, -1))
    down = {"x": t([[1.0], [1.0]]), "u": t([[0.0], [3.0]])}
    _, up = SFL(lam1=0.3, lam2=0.3).train(down, {}, local)[:2]
    close(up["w"], [[1 - 0.1 * ((1 - 2) + 0.3 * (1 - 0))], [1 - 0.1 * ((1 - 2) + 0.3 * (1 - 3))]])
    two = make_setting(s.net, s.data, Training(lr=0.1, epochs=2))
    _, up = SFL(lam1=0.3, lam2=0.5).train(
        down, {}, Clients(two, torch.arange(2), 1, s.net.b0.expand(2, -1))
    )[:2]
    w = down["x"]
    for _ in range(2):
        w = w - 0.1 * ((w - 2) + 0.3 * (w - down["u"]) + 0.5 * (w - down["x"]))
    close(up["w"], w)
    _, plain = SFL(lam1=0.0, lam2=0.0).train(down, {}, local)[:2]
    close(plain["w"], [[1.1], [1.1]])


def test_sfl_with_a_graph_from_a_file_or_from_labels(tmp_path):
    graph = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    np.save(tmp_path / "graph.npy", graph)
    s = points([1.0, 3.0, 8.0], 0.1)
    alg = SFL(adjacency=str(tmp_path / "graph.npy"), lam1=0.0, lam2=0.0)
    state, _ = step(Setup(alg, s), begin(alg, s.net, 3), torch.arange(3))
    u = alg.send(state.server, cohort([0, 1, 2], 3))["u"]
    close(u, [[0.2], [0.2], [0.8]])  # the row of zeros keeps its own
    np.save(tmp_path / "bare.npy", graph - np.diag(np.diag(graph)))  # a client counts itself
    assert begin(replace(alg, adjacency=str(tmp_path / "bare.npy")), s.net, 3).server[
        "graph"
    ].diagonal().tolist() == [1, 1, 1]
    np.save(tmp_path / "wrong.npy", graph[:2])
    with pytest.raises(ValueError, match=r"^adjacency: expected 3 x 3 numbers"):
        begin(SFL(adjacency=str(tmp_path / "wrong.npy")), s.net, 3)
    with pytest.raises(ValueError, match=r"^adjacency: "):
        SFL(adjacency="oracle")


def test_sfl_newcomers_hold_the_readout():
    s = points([1.0, 3.0, 8.0, 9.0], 0.1)
    alg = SFL(k=1)
    state, _ = step(Setup(alg, s), begin(alg, s.net, 4), torch.tensor([0, 1, 2]))
    down = alg.send(state.server, cohort([0, 1, 2, 3], 4))
    close(down["u"][3], down["x"][3])
    close(down["x"][0], down["u"][:3].mean(0))


def test_golden_nested_split_keeps_the_clients_numbers():
    """Positions inside the cluster are not client ids: the released code, and others after it, take
    them for such."""
    g3 = GOLDEN["G3_cfl_nested_index_bug"]
    parent = g3["parent"]
    cluster = torch.zeros(10, dtype=torch.long)
    cluster[parent] = 1
    delta = torch.zeros(10, 2, dtype=torch.float64)
    delta[:, 0] = 1.0
    for i, label in zip(parent, g3["sub_labels"], strict=True):
        delta[i, 0] = 1.0 if label == 0 else -1.0
    alg = ClusteredFL(relative=True, first=0)
    g = tree(torch.zeros(2, 2, dtype=torch.float64), cluster)
    g = served(alg, g, {"delta": delta}, cohort(list(range(10)), 10, 1))
    found = [(g["cluster"] == c).nonzero()[:, 0].tolist() for c in range(4)]
    assert (
        found[2:] == g3["correct"]
        and found[0] == [i for i in range(10) if i not in parent]
        and not found[1]
    )
    # this round's means are already those of the halves
    close(g["x"], [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])


def test_clustered_fl_finds_nested_groups_with_absent_clients():
    """Four groups on a line: two levels of splits, then rounds with a client missing."""
    target = [0.0, 100.0, 10.0, 110.0] * 3
    s = points(target, 0.5, start=50.0)
    alg = ClusteredFL(relative=True, first=2, eps1=0.3)
    state = begin(alg, s.net, 12)
    for round in range(1, 16):
        ids = [i for i in range(12) if i != round % 12] if round > 8 else list(range(12))
        state, done = step(Setup(alg, s), state, torch.tensor(ids))
    cluster = alg.report(state.server, done.mix, done.cohort)["cluster"]
    # three of the tree's nodes have split
    assert len(set(cluster.tolist())) == 4 and len(state.server["x"]) == 7
    for group in range(4):
        assert len(set(cluster[group::4].tolist())) == 1
    close(state.server["x"][cluster][:, 0], target, 1e-3, 0.1)


def test_clustered_fl_before_the_first_split_is_fedavg():
    s = points([1.0, -1.0, 5.0], 0.1)
    cfl, avg = ClusteredFL(first=3, relative=True), FedAvg(weighting="uniform")
    a, b = begin(cfl, s.net, 3), begin(avg, s.net, 3)
    for _ in range(3):
        a, _ = step(Setup(cfl, s), a, torch.arange(3))
        b, _ = step(Setup(avg, s), b, torch.arange(3))
    assert torch.equal(a.server["x"][0], b.server["x"]) and len(a.server["x"]) == 1


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
    near(state.server["x"][cluster][:, 0], 20.0 * kind, 0, 1.0)


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
    near(g["x"], [[0, 0], [1.5, 0], [-1, 0]])  # client 4's update was from another model


def test_who_has_never_come_mixes_nobody_and_gives_nothing():
    sqdist, norm2 = t([[0, 1, 2], [1, 0, 2], [2, 2, 0]]), t([1.0, 2, 3])
    for alg in (FedAMP(sigma=4.0), HeurFedAMP()):
        xi = alg.mixing(sqdist, norm2, torch.tensor([True, True, False]))
        assert (
            xi[2].tolist() == [0, 0, 1]
            and xi[:2, 2].tolist() == [0, 0]
            and bool((xi[:2, :2] > 0).all())
        )


def test_clustered_fl_weighs_unequal_clients_alike():
    s, _ = three()
    (state, _), (uniform, _), (sized, _) = (
        play(a, s, 1)[0] for a in (ClusteredFL(), FedAvg(weighting="uniform"), FedAvg())
    )
    torch.testing.assert_close(state.server["x"][0], uniform.server["x"])
    assert not torch.allclose(uniform.server["x"], sized.server["x"])


def test_fedamps_pull_is_lam_over_alpha():
    """One step of .1 at (w - 1)^2 / 2 from w = 3 with u = 5: 3 - .1 (2 + (.6 / 2) (3 - 5)) =
    2.86."""
    net, data = quadratics(t([[1.0]]), t([[1.0]]), start=[3.0])
    local = Clients(
        make_setting(net, data, Training(lr=0.1, batch_size=1)), torch.arange(1), 1, net.b0[None]
    )
    own, _ = FedAMP(lam=0.6, alpha=2.0).train({"u": t([[5.0]])}, {"w": t([[3.0]])}, local)[:2]
    torch.testing.assert_close(own["w"], t([[2.86]]))


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
