"""Server optimizers and q-FedAvg: golden values and laws."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import FedAvgM, FedOpt, QFedAvg
from places import golden
from small import after, near, regression, served, some, t

from pflcore.algorithms import ALGORITHMS, FedAvg

GOLDEN = golden("server_optimizers")


def trajectory(alg, rounds, start=(0.0,)):
    """The model after each round of the clients' updates and sizes."""
    state = alg.init(t(start), 2)
    found = []
    for delta, size in rounds:
        cohort = some(len(size))._replace(size=torch.tensor(size))
        state = served(alg, state, {"delta": t(delta)}, cohort)
        found.append(state["x"].tolist())
    return found


def alone(deltas):
    """Rounds of one client."""
    return [([[d]], [1]) for d in deltas]


@pytest.mark.parametrize(("name", "options", "expected"), GOLDEN["one_weight"])
def test_three_updates_of_one_weight(name, options, expected):
    alg = ALGORITHMS[name](**options)
    near(trajectory(alg, alone([1.0, 0.5, -0.25])), t(expected)[:, None], 1e-7, 5e-10)


@pytest.mark.parametrize(("name", "options", "expected"), GOLDEN["two_clients"])
def test_two_rounds_of_two_clients(name, options, expected):
    rounds = [([[0.3, 0.1], [-0.1, 0.5]], [10, 30]), ([[0.2, -0.4], [0.1, 0.2]], [20, 20])]
    found = trajectory(ALGORITHMS[name](**options), rounds, (1.0, -2.0))
    near(found, expected, 1e-7, 5e-10)


MOMENTA = [("K2_fedavgm_nesterov_pytorch_form", "nesterov"), ("K3_fedavgm_heavyball", "heavy_ball")]


@pytest.mark.parametrize(("name", "optimizer"), MOMENTA)
def test_golden_fedavgm(name, optimizer):
    k = golden("feddwa_family")[name]
    alg = FedAvgM(optimizer=optimizer, beta1=k["beta"], server_lr=k["lr"])
    state = alg.init(t([k["w0"]]), 1)
    for pseudo, (v, w) in zip(k["pseudo_grads"], k["v_w"], strict=True):
        state = served(alg, state, {"delta": t([[-pseudo]])}, some(1))
        near(-state["m"], [v], 1e-8, 1e-10)  # theirs is that of w - w', ours that of w' - w
        near(state["x"], [w], 1e-8, 1e-10)


@given(st.floats(0, 0.99), st.floats(0.01, 3), st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_ema_is_heavy_ball_with_a_smaller_step(beta, lr, deltas):
    ema = FedOpt(optimizer="ema", beta1=beta, server_lr=lr)
    ball = FedOpt(optimizer="heavy_ball", beta1=beta, server_lr=lr * (1 - beta))
    near(*(trajectory(alg, alone(deltas)) for alg in (ema, ball)), 1e-10, 1e-12)


def test_fedavg_weighs_by_samples():
    near(trajectory(FedAvg(), [([[1.0], [2], [4]], [10, 30, 60])]), [[3.1]])


@pytest.mark.parametrize(("q", "expected"), GOLDEN["q_fedavg"])
def test_q_fedavg_by_hand(q, expected):
    """Two clients that ended at given models, with given losses."""
    ended = SimpleNamespace(w=t([[0.8, 1.0], [1.0, 0.5]]))
    clients = SimpleNamespace(lr=0.1, loss=lambda rows: t([0.5, 2.0]), fit=lambda rows: ended)
    alg = QFedAvg(q=q, weighting="uniform")
    x = t([1.0, 1.0])
    up = alg.train({"x": x.expand(2, -1)}, {}, clients)[1]
    near(served(alg, {"x": x}, up, some(2))["x"], expected, 1e-7, 1e-9)


def test_a_perfect_client_does_not_stop_q_fedavg():
    perfect = regression([([1.0, 2], [0.0, 0]), ([1.0, 2], [2.0, 4])])
    assert abs(float(after(QFedAvg(q=0.5, weighting="uniform"), perfect)[0].server["x"])) > 1e-3
