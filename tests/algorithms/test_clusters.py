"""HypCluster, which is IFCA, ensembles and clustered FL: rounds by hand, and their laws."""

import pytest
import torch
import torch.nn as nn
from methods import ClusteredFL, Ensemble, FedOpt, HypCluster
from parts.edges import normal
from parts.rivals import GOLDEN, tree
from small import (
    F64,
    Line,
    Scale,
    after,
    images,
    near,
    points,
    regression,
    served,
    some,
    t,
    tiny,
    tiny_model,
)

from pflcore import Net, Simulation, Training
from pflcore.simulation.round import begin

IFCA = [
    ([1.0, 2.0], [1.0, 2.1]),
    ([1.0, -1.0, 2.0], [-1.0, 0.9, -2.2]),
    ([0.5, 1.5], [0.4, 1.6]),
]


def started(alg, s, x):
    """The state in which the models are those of `x`."""
    state = begin(alg, s.net, s.data.n)
    state.server["x"] = t(x)
    return state


def test_ifca_of_three_clients_by_hand():
    s = regression(IFCA)
    alg = HypCluster(k=2)
    state, done = after(alg, s, 1, started(alg, s, [[0.6], [-0.4]]))
    near(state.server["x"], [[0.6825], [-0.53]])
    assert alg.report(state.server, done.mix, done.cohort)["cluster"].tolist() == [0, 1, 0]
    # k models; one, and a pick
    assert (done.bytes_down, done.bytes_up) == (3 * 2 * 8, 3 * (8 + 1))


@pytest.mark.parametrize(
    "options", [{}, {"optimizer": "ema"}, {"optimizer": "adam", "bias_correction": "keras"}]
)
def test_a_cluster_that_nobody_picks_keeps_model_and_optimizer(options):
    s = regression(IFCA)
    alg = HypCluster(k=2, **options)
    # both clusters move first, so momentum is not zero
    state, _ = after(alg, s, 1, started(alg, s, [[0.6], [-0.4]]))
    before = {k: v.clone() for k, v in state.server.items()}
    state, done = after(alg, s, [[0, 2]], state)
    for k in before.keys() - {"pick", "b"}:
        same = [torch.equal(a, b) for a, b in zip(state.server[k], before[k], strict=True)]
        assert same == [False, True], k
    report = alg.report(state.server, done.mix, done.cohort)
    assert {k: v.tolist() for k, v in report.items()} == {"rows": [0, 2], "cluster": [0, 0]}


def test_warm_start_trains_every_model_and_forgets_their_momentum():
    s = tiny()
    options = {"k": 2, "optimizer": "ema", "server_lr": 3.0}
    for rounds in (1, 2):
        (warm, done), (both, _) = (
            after(a, s, rounds) for a in (HypCluster(warm=2, **options), Ensemble(**options))
        )
        assert torch.equal(warm.server["x"], both.server["x"]) and both.server["m"].any()
        assert torch.equal(warm.server["m"], both.server["m"] * (rounds == 1))
        assert done.bytes_up == 3 * (2 * 4 * s.net.size + 1)
    assert len(warm.server["x"].unique(dim=0)) == 2


@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "adam"])
def test_one_cluster_is_fedavg(optimizer):
    """Its statistics of batch norm too."""
    plain, _ = after(FedOpt(optimizer=optimizer), normal(), 3)
    for cls in (HypCluster, Ensemble):
        one, _ = after(cls(k=1, optimizer=optimizer), normal(), 3)
        near(one.server["x"][0], plain.server["x"])
        near(one.server["b"][0], plain.batch_norm[0])


def test_shared_layers_are_everybodys_mean_and_the_others_their_clusters():
    """y = w x + b with one w for all: a round by hand."""
    s = regression(IFCA, model=lambda: nn.Linear(1, 1, dtype=F64))
    alg = HypCluster(k=2, shared="weight")
    x0 = begin(alg, s.net, 3).server["x"]
    assert torch.equal(x0[0, 0], x0[1, 0])
    start = t([[0.3, 0.6], [0.3, -0.9]])
    moved = torch.zeros(3, 2, dtype=F64)
    pick = torch.zeros(3, dtype=torch.long)
    for i, (x, y) in enumerate((t(x), t(y)) for x, y in IFCA):
        gap = start[:, :1] * x + start[:, 1:] - y
        pick[i] = (gap**2).mean(1).argmin()
        moved[i] = -0.1 * torch.stack([(gap[pick[i]] * x).mean(), gap[pick[i]].mean()])
    share = t([2, 3, 2]) / 7
    want = start.clone()
    want[:, 0] += share @ moved[:, 0]
    for j in (0, 1):
        mine = share * (pick == j)
        want[j, 1] += mine @ moved[:, 1] / mine.sum()
    state, done = after(alg, s, 1, started(alg, s, start.tolist()))
    assert torch.equal(state.server["pick"], pick) and len(pick.unique()) == 2
    near(state.server["x"], want)
    assert done.bytes_down == 3 * 8 * (2 + 1)  # two b and one w


def test_shared_layers_need_one_age():
    for options in ({"warm": 2}, {"optimizer": "adam", "bias_correction": "keras"}):
        with pytest.raises(ValueError, match=r"^shared: .*; take warm=0 and"):
            HypCluster(shared="w", **options)
    with pytest.raises(ValueError, match=r"^k: this model starts equal 2 times"):
        HypCluster(shared="*").initial(tiny().net)  # nothing is left to differ in


class Zero(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight), nn.init.zeros_(self.bias)


def test_centres_never_start_equal_and_seeds_follow_the_run():
    made = lambda: Line((0.0,) * 28), lambda: Zero(5, 3), lambda: nn.Linear(4, 3)
    for net in map(Net, made):
        for k in (2, 5):
            rows = HypCluster(k=k).starts(net)
            assert len(rows.unique(dim=0)) == k and rows.any(1).all()
    with pytest.raises(ValueError, match=r"^k: .* equal .*\.$"):
        HypCluster(k=2).starts(Net(Scale([0.0] * 3)))
    one, two = (
        Simulation(HypCluster(k=2), tiny_model(), images(), seed=seed).state.server["x"]
        for seed in (0, 1)
    )
    assert not torch.equal(one, two)


def test_models_of_an_ensemble_shuffle_apart():
    """Two that start equal go different ways."""
    s = tiny(batch_size=4)
    state = begin(Ensemble(k=2), s.net, 3)
    state.server["x"][:] = s.net.w0
    one, two = after(Ensemble(k=2), s, 1, state)[0].server["x"]
    assert not torch.equal(one, two)


# clustered FL --------------------------------------------------------------------------------


def test_golden_nested_split_keeps_the_clients_numbers():
    """Positions inside the cluster are not client ids: the released code, and others after it, take
    them for such."""
    g3 = GOLDEN["G3_cfl_nested_index_bug"]
    parent = g3["parent"]
    half = t(g3["sub_labels"])
    cluster = torch.zeros(10, dtype=torch.long)
    delta = t([[1.0, 0.0]]).repeat(10, 1)
    cluster[parent] = 1
    delta[parent, 0] = 1 - 2 * half
    state = tree(torch.zeros(2, 2, dtype=F64), cluster)
    state = served(ClusteredFL(relative=True, first=0), state, {"delta": delta}, some(10))
    found = [(state["cluster"] == c).nonzero()[:, 0].tolist() for c in range(4)]
    assert found[2:] == g3["correct"] and not found[1]
    assert found[0] == [i for i in range(10) if i not in parent]
    # this round's means are already those of the halves
    near(state["x"], [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], 1e-8, 1e-10)


def test_clustered_fl_finds_nested_groups_with_absent_clients():
    """Four groups on a line: two levels of splits, then rounds with a client missing."""
    target = [0.0, 100.0, 10.0, 110.0] * 3
    cohorts = [[i for i in range(12) if r <= 8 or i != r % 12] for r in range(1, 16)]
    alg = ClusteredFL(relative=True, first=2, eps1=0.3)
    state, done = after(alg, points(target, 0.5, 50.0), cohorts)
    cluster = alg.report(state.server, done.mix, done.cohort)["cluster"]
    # three of the tree's nodes have split
    assert len(set(cluster.tolist())) == 4 and len(state.server["x"]) == 7
    assert all(len(set(cluster[group::4].tolist())) == 1 for group in range(4))
    near(state.server["x"][cluster][:, 0], target, 1e-3, 0.1)


def test_the_inner_nodes_of_the_tree_keep_the_model_they_split_at():
    alg = ClusteredFL(relative=True, first=0)
    g = tree(torch.zeros(1, 2, dtype=F64), torch.zeros(6, dtype=torch.long))
    first = some(6, 5, [0, 1, 2, 3])
    later = some(6, 5, [4, 0])
    g = served(alg, g, {"delta": t([[1, 0], [1, 0], [-1, 0], [-1, 0]])}, first)
    assert g["cluster"].tolist() == [1, 1, 2, 2, 0, 0] and g["child"].tolist() == [1, -1, -1]
    assert alg.send(g, later)["x"].tolist() == [[0, 0], [1, 0]]
    g = served(alg, g, {"delta": t([[-0.2, 0.1], [0.5, 0]])}, later)
    assert g["cluster"].tolist() == [1, 1, 2, 2, 2, 0]
    near(g["x"], [[0, 0], [1.5, 0], [-1, 0]])  # client 4's update was from another model


def test_a_newcomer_finds_its_cluster():
    """Two kinds of clients, whose labels differ by one: who comes later is served the model of its
    kind, not the one before they parted."""
    data = images((30,) * 6)
    alg = ClusteredFL(eps1=0.9, relative=True, first=1)
    run = Simulation(alg, tiny_model(), data, Training(lr=0.3, batch_size=10), rounds=6)
    history = run.run()
    cluster = run.state.server["cluster"]
    assert len(set(cluster.tolist())) > 1
    for kind in (0, 1):
        fresh = history.adapt(data.client(kind, "test"), rounds=4).get_buffer("view_w")
        home = [torch.equal(fresh, row) for row in run.state.server["x"]].index(True)
        assert run.state.server["child"][home] == -1 and home in cluster[kind::2].tolist()
