"""Properties of HypCluster (which is IFCA), ensembles and clustered FL."""

import pytest
import torch
import torch.nn as nn
from parts.edges import normal
from small import Line, Scale, after, images, near, points, tiny, tiny_model

from pflcore import Net, Simulation, Training
from pflcore.algorithms import ClusteredFL, Ensemble, FedOpt, HypCluster
from pflcore.simulation.round import initial_state


def test_warm_start_trains_every_model_and_forgets_their_momentum():
    s = tiny()
    options = {"k": 2, "optimizer": "ema", "server_lr": 3.0}
    for rounds in (1, 2):
        warm, done = after(HypCluster(warmup_rounds=2, **options), s, rounds)
        both, _ = after(Ensemble(**options), s, rounds)
        assert torch.equal(warm.server["x"], both.server["x"])
        assert both.server["m"].any()
        assert torch.equal(warm.server["m"], both.server["m"] * (rounds == 1))
        assert done.bytes_up == 3 * (2 * 4 * s.net.size + 1)
    assert len(warm.server["x"].unique(dim=0)) == 2


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "adam"])
def test_one_cluster_is_fedavg(optimizer):
    """Its model and its batch norm statistics are FedAvg's."""
    plain, _ = after(FedOpt(optimizer=optimizer), normal(), 3)
    for cls in (HypCluster, Ensemble):
        one, _ = after(cls(k=1, optimizer=optimizer), normal(), 3)
        near(one.server["x"][0], plain.server["x"])
        near(one.server["b"][0], plain.buffers[0])


def test_shared_layers_need_one_age():
    for options in (
        {"warmup_rounds": 2},
        {"optimizer": "adam", "bias_correction": "keras"},
    ):
        with pytest.raises(ValueError, match=r"^shared: .*; take warmup_rounds=0 and"):
            HypCluster(shared="w", **options)
    with pytest.raises(ValueError, match=r"^k: this model starts equal 2 times"):
        # All layers are shared, so the models cannot differ.
        HypCluster(shared="*").server_init_args(tiny().net)


def test_centres_never_start_equal_and_seeds_follow_the_run():
    for net in map(Net, (lambda: Line((0.0,) * 28), lambda: nn.Linear(4, 3))):
        for k in (2, 5):
            rows = HypCluster(k=k).initial_models(net)
            assert len(rows.unique(dim=0)) == k and rows.any(1).all()
    with pytest.raises(ValueError, match=r"^k: .* equal .*\.$"):
        HypCluster(k=2).initial_models(Net(Scale([0.0] * 3)))
    one = Simulation(HypCluster(k=2), tiny_model(), images(), seed=0)
    two = Simulation(HypCluster(k=2), tiny_model(), images(), seed=1)
    assert not torch.equal(one.state.server["x"], two.state.server["x"])


def test_models_of_an_ensemble_shuffle_apart():
    """Two models that start equal are trained on different shuffles."""
    s = tiny(batch_size=4)
    state = initial_state(Ensemble(k=2), s.net, 3)
    state.server["x"][:] = s.net.w0
    one, two = after(Ensemble(k=2), s, 1, state)[0].server["x"]
    assert not torch.equal(one, two)


# clustered FL -----------------------------------------------------------------


@pytest.mark.deep("it takes a second")
def test_clustered_fl_finds_nested_groups_with_absent_clients():
    """Four groups take two levels of splits, and stay when clients are absent."""
    target = [0.0, 100.0, 10.0, 110.0] * 3
    cohorts = []
    for r in range(1, 16):
        absent = r % 12 if r > 8 else None
        cohorts.append([i for i in range(12) if i != absent])
    alg = ClusteredFL(relative=True, first=2, eps1=0.3)
    state, done = after(alg, points(target, 0.5, 50.0), cohorts)
    cluster = alg.report(state.server, done.mix, done.cohort)["cluster"]
    # Three nodes of the tree have split.
    assert len(set(cluster.tolist())) == 4 and len(state.server["x"]) == 7
    assert all(len(set(cluster[group::4].tolist())) == 1 for group in range(4))
    near(state.server["x"][cluster][:, 0], target, 1e-3, 0.1)


def test_a_newcomer_finds_its_cluster():
    """A newcomer is served the model of its kind, not the one before the split.

    There are two kinds of clients, whose labels differ by one.
    """
    data = images((30,) * 6)
    alg = ClusteredFL(eps1=0.9, relative=True, first=1)
    run = Simulation(alg, tiny_model(), data, Training(lr=0.3, batch_size=10), rounds=6)
    history = run.run()
    cluster = run.state.server["cluster"]
    assert len(set(cluster.tolist())) > 1
    for kind in (0, 1):
        fresh = history.adapt(data.client(kind, "test"), rounds=4).get_buffer("view_w")
        home = [torch.equal(fresh, row) for row in run.state.server["x"]].index(True)
        assert (
            run.state.server["child"][home] == -1 and home in cluster[kind::2].tolist()
        )
