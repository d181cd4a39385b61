"""Batch norm's running statistics: averaged as the models are mixed, local, or a cluster's own."""

import pytest
import torch
import torch.nn as nn
from doors import spread
from methods import (
    SFL,
    Ensemble,
    FedDWA,
    HypCluster,
    LocalOnly,
    QFedAvg,
    Waffle,
    WeightErosion,
)
from parts.edges import normal
from small import F64, images, make_setting, near, play
from torch import Tensor

from pflcore import Clients, Net, Simulation, Training, evaluate, step
from pflcore.algorithms import Cohort, FedAvg
from pflcore.simulation.round import Setup, begin


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
    near(found.state.batch_norm, (weight / weight.sum() @ found.trained).expand(4, -1))
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
        near(state.batch_norm[[0, 1, 3]], mix / mix.sum(1, keepdim=True) @ spied.trained)
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
    near(seen["loss"], evaluate(Setup(LocalOnly(), s), state)["loss"])


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
    near(a.server["x"][0], b.server["x"])
    near(a.server["b"][0], b.batch_norm[0])
    near(evaluate(Setup(HypCluster(k=1), s), a)["loss"], evaluate(Setup(FedAvg(), s), b)["loss"])


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_gradient_with_batch_norm_is_that_of_training(engine):
    s = normal((8, 8, 8), engine=engine)  # one batch each
    local = Clients(s, torch.arange(3), 1, s.net.b0.expand(3, -1).clone())
    x = s.net.w0.expand(3, -1)
    want = local.fit(x, mean_grad=True).grad
    near(local.grad(x), want, 1e-8, 1e-10)
    assert torch.equal(local.buffers, s.net.b0.expand(3, -1))
    odd = normal((9, 17))  # a last sample alone joins the batch before it: batch norm needs two
    assert (
        Clients(odd, torch.arange(2), 1, odd.net.b0.expand(2, -1).clone())
        .grad(x[:2])
        .isfinite()
        .all()
    )


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
