"""SCAFFOLD: golden values, and what its options promise. Its invariant is law 3 of
test_waffle_laws.py."""

import pytest
import torch
from methods import (
    LocalOnly,
    Scaffold,
    Waffle,
)
from small import images, make_setting, play, quadratics, t, tiny_model

from pflcore import Clients, Evaluation, Net, Robustness, Simulation, Training
from pflcore.algorithms import FedAvg

F64 = torch.float64
GOLDEN = [  # x, c, c_i after rounds 1, 2, 3
    (-0.265, 1.325, [-0.95, 3.6]),
    (-0.4685, 1.0175, [-1.3155, 3.3505]),
    (-0.6163275, 0.7391375, [-1.511725, 2.99]),
]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("option", ["mean_grad", "II"])
def test_golden_rounds(option, engine):
    net, data = quadratics(torch.tensor([[1.0], [2]]), torch.tensor([[1.0], [-2]]))
    s = make_setting(net, data, Training(lr=0.1, batch_size=1, epochs=2), 3, engine)
    for (state, _), (x, c, ci) in zip(play(Scaffold(option=option), s), GOLDEN, strict=True):
        found = [
            float(state.server["x"]),
            float(state.server["c"]),
            *state.clients["c"][:, 0].tolist(),
        ]
        assert found == pytest.approx([x, c, *ci], abs=1e-12)


def test_option_one_is_the_gradient_at_the_servers_model():
    net, data = quadratics(torch.tensor([[1.0], [2]]), torch.tensor([[1.0], [-2]]), start=[0.5])
    s = make_setting(net, data, Training(lr=0.1, batch_size=1, epochs=2), 2)
    one, two = (state for state, _ in play(Scaffold(option="I"), s))
    assert one.clients["c"][:, 0].tolist() == pytest.approx([-0.5, 5.0])
    x = float(one.server["x"])
    assert two.clients["c"][:, 0].tolist() == pytest.approx([x - 1, 2 * (x + 2)])


def controls(option, training):
    """The new control variates from some old ones, float64."""
    net, data = Net(lambda: tiny_model()().double()), images()
    data = type(data)(data.x.double(), data.y, data.index, data.classes)
    gen = torch.Generator().manual_seed(0)
    c, ci = (
        torch.randn(1, net.size, generator=gen, dtype=F64),
        torch.randn(3, net.size, generator=gen, dtype=F64),
    )
    down = {"x": net.w0.expand(3, -1), "c": 0.1 * c.expand(3, -1)}
    local = Clients(make_setting(net, data, training), torch.arange(3), 1, net.b0.expand(3, -1))
    return Scaffold(option=option).train(down, {"c": 0.1 * ci}, local)[:2][0]["c"]


@pytest.mark.parametrize(
    "training",
    [Training(lr=0.1, batch_size=8, epochs=2), Training(lr=0.1, batch_size=8, weight_decay=0.1)],
)
def test_option_two_is_the_mean_gradient_for_plain_sgd(training):
    torch.testing.assert_close(
        controls("II", training), controls("mean_grad", training), rtol=1e-9, atol=1e-11
    )


def test_option_two_follows_the_step_sizes_that_were_taken():
    t = Training(lr=0.1, batch_size=8, schedule=lambda r, n: 0.25)
    torch.testing.assert_close(controls("II", t), controls("mean_grad", t), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, 1.0), (2, 2.9), (40, 311.3302794647), (188, 1790.0000002248)]
)
def test_with_momentum_option_two_divides_by_the_effective_steps(steps, expected):
    """A constant gradient moves a client by lr * K_eff, so option II recovers it."""
    # gradient -1 wherever it is
    net, data = quadratics(torch.full((1, 1), 1e-12), torch.full((1, 1), 1e12))
    s = make_setting(net, data, Training(lr=0.1, batch_size=1, epochs=steps, momentum=0.9))
    alg = Scaffold(option="II")
    state, _ = play(alg, s)[0]
    assert float(state.server["x"]) == pytest.approx(0.1 * expected, rel=1e-7)
    assert float(state.clients["c"]) == pytest.approx(-1, rel=1e-7)


def test_alone_it_is_local_training():
    net, data = Net(tiny_model()), images((20,))
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), 4)
    for (a, _), (b, _) in zip(play(Scaffold(), s), play(LocalOnly(), s), strict=True):
        torch.testing.assert_close(a.server["x"], b.clients["w"][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["mean_grad", "II", "I"])
def test_it_reaches_the_joint_optimum_where_fedavg_does_not(option):
    a, b = torch.tensor([[1.0], [5.0], [2.0]]), torch.tensor([[1.0], [-2.0], [4.0]])
    best = float((a * b).sum() / a.sum())
    net, data = quadratics(a, b)
    s = make_setting(net, data, Training(lr=0.04, batch_size=1, epochs=5), 60, "vmap")
    assert float(play(Scaffold(option=option), s)[-1][0].server["x"]) == pytest.approx(
        best, abs=1e-6
    )
    assert abs(float(play(FedAvg(), s)[-1][0].server["x"]) - best) > 0.05


def test_weights_by_samples_go_to_x_and_c_alike():
    net, data = Net(tiny_model()), images((7, 20, 31))
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), 3)
    share = torch.tensor([7.0, 20, 31]) / 58
    for state, _ in play(Scaffold(weighting="samples"), s):
        torch.testing.assert_close(
            state.server["c"], share @ state.clients["c"], rtol=1e-4, atol=1e-6
        )
    first = play(FedAvg(), s, 1)[0][0]
    torch.testing.assert_close(
        play(Scaffold(weighting="samples"), s, 1)[0][0].server["x"], first.server["x"]
    )


def test_weight_decay_is_part_of_scaffolds_full_gradient():
    """The loss is a (m - b)^2 / 2 and decay adds .5 m: at m = .5 the gradients are 1 (.5 - 1) + .25
    and 2 (.5 + 2) + .25."""
    net, data = quadratics(t([[1.0], [2]]), t([[1.0], [-2]]), start=[0.5])
    s = make_setting(net, data, Training(lr=0.1, batch_size=1, weight_decay=0.5))
    state, _ = play(Scaffold(option="I"), s)[0]
    torch.testing.assert_close(state.clients["c"][:, 0], t([-0.25, 5.25]))


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
