"""Batch norm's running statistics under each policy.

They are averaged as the models are mixed, local, or a cluster's own.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from entry_points import spread
from parts.edges import normal
from parts.user import simulation
from small import after, at_work, images, layers, near, some

import pflcore
from pflcore import Simulation, Training, step
from pflcore.algorithms import (
    SFL,
    Ensemble,
    FedAvg,
    FedDWA,
    HypCluster,
    QFedAvg,
    Waffle,
    WeightErosion,
)
from pflcore.simulation import load_model
from pflcore.simulation.round import RunConfig, initial_state


def trained(s, ids):
    """The statistics after a first round of these clients."""
    return at_work(s, ids).fit(s.net.w0.expand(len(ids), -1)).buffers


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
    """All clients, also absent ones, get the mean with the model's weights.

    The statistics' bytes are counted.
    """
    s = normal()
    ids = [0, 2, 3]
    state, done = after(alg, s, [ids])
    weight = s.data.size()[ids].double()
    if isinstance(alg, QFedAvg):
        weight = weight * at_work(s, ids).loss(s.net.w0.expand(3, -1)) ** 2
    elif isinstance(alg, WeightErosion):
        weight = state.server["alpha"][ids]
    elif isinstance(alg, Waffle):
        weight = done.mix.weight[0]
    elif alg.weighting == "uniform":
        weight = torch.ones_like(weight)
    near(
        state.buffers,
        (weight / weight.sum() @ trained(s, ids)).expand(4, -1),
    )
    assert done.bytes_up >= 3 * 8 * (s.net.size + s.net.b0.numel())


@pytest.mark.parametrize("alg", [FedDWA(k=2), SFL(k=1, lam1=0.0, lam2=0.0)])
def test_statistics_follow_a_mixing_matrix(alg):
    s = normal()
    ids = [0, 1, 3]
    setup = RunConfig.of(alg, s, batch_norm="average")
    state, done = step(setup, initial_state(alg, s.net, 4), torch.tensor(ids))
    if isinstance(alg, FedDWA):  # K numbers a client
        mix = spread(done.mix.weight, done.mix.index, 3)
        assert torch.equal(state.buffers[2], s.net.b0)  # absent: it keeps its own
    else:
        mix = done.mix.weight[ids]
    near(state.buffers[ids], mix / mix.sum(1, keepdim=True) @ trained(s, ids))


class Chosen(FedAvg):
    """FedAvg that mixes client 0's statistics for client 0, and none for the others."""

    dtype = torch.float64

    def update(self, state, up, cohort):
        changes, mix = super().update(state, up, cohort)
        weight = torch.zeros(len(cohort.ids), len(cohort.ids), dtype=self.dtype)
        weight[0, 0] = 0.25
        return changes, mix._replace(weight=weight, receivers=cohort.ids)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_who_takes_nothing_keeps_the_statistics_from_before_the_round(dtype):
    s = normal()
    alg = Chosen()
    object.__setattr__(alg, "dtype", dtype)
    setup = RunConfig.of(alg, s, batch_norm="average")
    state, _ = step(setup, initial_state(alg, s.net, 4), torch.tensor([0, 1, 2]))
    assert torch.equal(state.buffers[1:], s.net.b0.expand(3, -1))
    near(state.buffers[0], trained(s, [0, 1, 2])[0])


def test_a_round_of_nobodys_statistics_is_void():
    s = normal()
    begun = initial_state(FedAvg(), s.net, 4)
    begun.server["x"].fill_(torch.nan)
    state, done = step(
        RunConfig.of(FedAvg(), s, batch_norm="average"), begun, torch.arange(4)
    )
    assert done.void and done.dropped == [0, 1, 2, 3]
    assert torch.equal(state.buffers, s.net.b0.expand(4, -1))
    # Uploads that are not accepted have travelled, too.
    assert done.bytes_up >= 4 * 8 * s.net.b0.numel()


@pytest.mark.parametrize(
    "alg", [HypCluster(k=3), Ensemble(k=3), HypCluster(k=3, warmup_rounds=1)]
)
def test_each_cluster_has_statistics_of_its_own(alg):
    """A model's statistics are its clients' mean, and its losses use them."""
    s = normal()
    state, _ = after(alg, s, 3)
    x = state.server["x"]
    b = state.server["b"]
    assert b.shape == (3, s.net.b0.numel()) and len(b.unique(dim=0)) >= 2
    losses = []
    for j in range(3):
        local = at_work(s)
        local.buffers.copy_(b[j].expand(4, -1))
        losses.append(local.loss(x[j].expand(4, -1)))
    best = torch.stack(losses, 1).argmin(1)
    view = alg.model(alg.send(state.server, some(4)), {}, at_work(s))
    assert torch.equal(view["w"], x[best]) and torch.equal(view["batch_norm"], b[best])


@pytest.mark.parametrize(
    ("name", "policy"),
    [(n, p) for n in ("fedavg", "feddwa") for p in ("average", "local")]
    + [("fedrep", "local")],
)
def test_a_runs_models_have_the_statistics_that_it_was_evaluated_with(name, policy):
    """Clients that never took part have them, too."""
    s = normal((8,) * 6, lr=0.2, batch_size=4)
    options = {"rounds": 2, "participation": 0.34, "batch_norm": policy}
    run = Simulation(name, s.net, s.data, s.training, **options)
    history = run.run()
    assert not run.state.participated.all()
    for i in range(6):
        x, y = s.data.client(i, "test")
        loss = float(nn.functional.cross_entropy(history.model(i)(x), y))
        assert loss == pytest.approx(history.rounds[-1]["eval"]["loss"][i], rel=1e-5)


ALONE = ("local", "fedproto", "fedamp", "feddwa", "fedfomo", "l2c", "pfedgraph")


@pytest.mark.deep("together they take seconds", quick=4)
@pytest.mark.parametrize("name", ALONE)
def test_initial_models_keep_the_initial_statistics(name, tmp_path):
    """Nothing of others' training is in the model of a client that never took part.

    So it is evaluated and exported with the statistics that it starts with.
    """
    s = normal((8,) * 6, lr=0.2, batch_size=4)
    options = {"rounds": 2, "participation": 0.34, "batch_norm": "local"}
    run = Simulation(name, s.net, s.data, s.training, **options)
    history = run.run()
    history.export(tmp_path)

    client = int((~run.state.participated).nonzero()[0])

    for model in (history.model(client), load_model(tmp_path, client, s.net.module)):
        assert torch.equal(model.buffer_row, s.net.b0)


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_newcomer_of_local_knows_no_others(rounds):
    s = normal((8,) * 4, lr=0.2, batch_size=4)
    newcomer = s.data.client(0)

    statistics = []
    for others in ([1, 2], [2, 3]):
        run = Simulation("local", s.net, s.data.subset(others), s.training, rounds=2)
        statistics.append(run.run().adapt(newcomer, rounds=rounds).buffer_row)

    assert torch.equal(*statistics)


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.skipif(not pflcore.backend().kernels, reason="the kernels are not loaded")
@pytest.mark.parametrize(
    "algorithm, policy",
    [("fedavg", "average"), ("fedavg", "local"), ("hypcluster", "auto")],
)
def test_a_chain_moves_the_statistics_that_the_module_moves(algorithm, policy):
    """Models and statistics are those of the module under each policy.

    A batch norm that stays in evaluation mode keeps its own. The last of a client's 17
    samples joins the batch before it.
    """
    model = layers("BatchNorm1d 6, Linear 6 5, BatchNorm1d 5, ReLU, Linear 5 4")
    model[0].running_mean.fill_(0.5)
    model[0].eval()
    data = images((17, 24, 9), (6,))
    runs = {}
    for engine in ("chain", "loop"):
        run = simulation(
            algorithm,
            replace(data, x=data.x.double()),
            model=model.double(),
            training=Training(lr=0.1, batch_size=8, epochs=2),
            batch_norm=policy,
            engine=engine,
        )
        history = run.run()
        assert run.header()["engine"] == engine
        runs[engine] = [history.model(i).tensors() for i in range(3)]
    for got, want in zip(*runs.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        assert torch.equal(got["0.running_mean"], model[0].running_mean)
        assert not torch.equal(got["2.running_mean"], model[2].running_mean)
