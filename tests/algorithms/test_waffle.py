"""The laws of WAFFLE and SCAFFOLD, and their golden values; SCAFFOLD's own options are in
test_scaffold.py."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from doors import waffle_partition
from hypothesis import given
from hypothesis import strategies as st
from methods import (
    APFL,
    FedProx,
    LocalOnly,
    Scaffold,
    Waffle,
)
from small import F64, images, make_setting, play, quadratics, served, tiny_model

from pflcore import Clients, Net, Training, ops, step
from pflcore.algorithms import Cohort, FedAvg
from pflcore.simulation.round import Setup, begin


def weights(d, omega, psi=None, target=0, tie="closed"):
    return ops.waffle_weights(torch.tensor(d, dtype=F64), target, omega, psi, tie).tolist()


def printed(d, omega, psi, target, eq3=False):
    """Algorithm 1, lines 3 to 9, as printed; with `eq3` the denominator of equation (3)."""
    others = [v for i, v in enumerate(d) if i != target]
    high, low = max(others), min(others)
    d = list(d)
    d[target] = low * (1 - (high - low) / high * (1 - omega))
    below = d[target] if eq3 else min(d)
    raw = [max(psi - (v - d[target]) / (high - below), 0.0) for v in d]
    return [v / sum(raw) for v in raw]


def close(a, b, atol=1e-9):
    torch.testing.assert_close(
        torch.as_tensor(a, dtype=F64), torch.as_tensor(b, dtype=F64), rtol=0, atol=atol
    )


# golden values --------------------------------------------------------------


def test_omega_is_the_papers_sigmoid():
    golden = {
        1: 0.9583535249,
        2: 0.9557228829,
        10: 0.9282424577,
        25: 0.8320183851,
        50: 0.5,
        51: 0.4840054591,
        75: 0.1679816149,
    }
    golden |= {
        80: 0.1278615663,
        90: 0.0717575423,
        94: 0.0564656650,
        95: 0.0531511364,
        100: 0.0391657228,
    }
    for r, value in golden.items():
        assert Waffle().globality(r, 100) == pytest.approx((value, value), abs=5e-11)
    assert Waffle(r0=1.0).globality(50, 100)[0] == Waffle().globality(51, 100)[0]
    assert [round(Waffle().globality(r, n)[0], 10) for r, n in ((1, 1), (1, 2), (1, 3))] == [
        0.0391657228,
        0.5,
        0.7439624913,
    ]
    assert Waffle(do=0).globality(7, 9) == (0.5, 0.5)
    # stable where exp overflows
    assert Waffle(do=1e6).globality(9, 9)[0] == 0 and Waffle(do=-1e6).globality(9, 9)[0] == 1


@dataclass(frozen=True)
class FixedDistances(Waffle):
    """WAFFLE whose clients' updates lie at given distances from the target's: no training."""

    d: tuple[float, ...] = ()

    def train(self, down, own, clients):
        delta = torch.zeros(len(clients.ids), clients.net.size, dtype=F64)
        delta[:, 0] = torch.tensor([self.d[i] for i in clients.ids.tolist()], dtype=F64)
        return own, {"delta": delta, "control": delta}, clients.fit(down["x"])


def sequence(d, rounds, upto=None, **options):
    """The unsmoothed and the smoothed weights of each round."""
    net, data = quadratics(torch.ones(len(d), 1), torch.zeros(len(d), 1))
    alg = FixedDistances(d=tuple(d), **options)
    found = play(alg, make_setting(net, data, Training(), rounds=rounds), upto)
    return [(s.server["history"][:, 0].tolist(), done.mix.weight[0].tolist()) for s, done in found]


def test_golden_weights_with_another_target_and_a_history():
    net, _ = quadratics(torch.ones(5, 1), torch.zeros(5, 1))
    alg = FixedDistances(target=2, d=(3, 1.5, 0, 0.5, 6))
    cohort = Cohort(torch.arange(5), torch.ones(5), 5, 40, 100)
    up = {"delta": torch.tensor([[3.0], [1.5], [0], [0.5], [6]], dtype=F64)}
    smooth, history = alg.weights(begin(alg, net, 5).server["history"], up["delta"], cohort)
    close(history[:, 0], [0.0965035928, 0.2348252394, 0.3416314973, 0.3270396705, 0])
    close(smooth, [0.1655011976, 0.2116084131, 0.2472104991, 0.2423465568, 0.1333333333])


def test_golden_sequence_of_weights():
    found = sequence([0, 1, 2, 4], 20)
    golden = {
        1: (
            [0.3809709123, 0.3756945950, 0.2433344927, 0],
            [0.2936569708, 0.2918981983, 0.2477781642, 0.1666666667],
        ),
        2: (
            [0.3832510461, 0.3759747969, 0.2407741570, 0],
            [0.3380739861, 0.3338897973, 0.2447028832, 0.0833333333],
        ),
        3: (
            [0.3864189652, 0.3763761379, 0.2372048969, 0],
            [0.3835469745, 0.3760151766, 0.2404378489, 0],
        ),
        10: (
            [0.5094339623, 0.3962264151, 0.0943396226, 0],
            [0.4704350563, 0.3895682224, 0.1399967213, 0],
        ),
        14: ([0.8013139365, 0.1986860635, 0, 0], [0.7067650577, 0.2932349423, 0, 0]),
        15: ([1, 0, 0, 0], [0.8307932465, 0.1692067535, 0, 0]),
        16: ([1, 0, 0, 0], [0.9337713122, 0.0662286878, 0, 0]),
        17: ([1, 0, 0, 0], [1, 0, 0, 0]),
        20: ([1, 0, 0, 0], [1, 0, 0, 0]),
    }
    for r, (alone, smooth) in golden.items():
        close(found[r - 1][0], alone)
        close(found[r - 1][1], smooth)


def test_golden_sequence_where_the_last_rounds_are_local_by_rule():
    found = sequence([0, 1, 2, 4], 20, do=0.5)
    close(found[17][0], [0.5968019529, 0.4031980471, 0, 0])
    close(found[17][1], [0.5893495288, 0.4067876387, 0.0038628325, 0])
    close(found[18][1], [0.7294351638, 0.2705648362, 0, 0])
    close(found[19][1], [0.8656006510, 0.1343993490, 0, 0])
    assert found[18][0] == found[19][0] == [1, 0, 0, 0]


# curvatures and optima of golden 10.6 and 10.7
QUADRATIC = (torch.tensor([[1.0], [2], [0.5]]), torch.tensor([[1.0], [-2], [0.5]]))


@pytest.mark.parametrize("option", ["mean_grad", "II"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_golden_waffle_from_end_to_end(option, engine):
    net, data = quadratics(*QUADRATIC)
    for mode, golden_x, golden_c in (
        (
            "recompute",
            [-0.0670122590, -0.1229759256, -0.0799527209],
            [0.3350612948, -0.1885619720, -0.0655578804],
        ),
        (
            "literal",
            [-0.0670122590, -0.1229759256, -0.1689909863],
            [0.3350612948, 0.2798183331, 0.2300753034],
        ),
    ):
        alg = Waffle(control_agg=mode, option=option)
        found, outcomes = zip(
            *play(
                alg,
                make_setting(net, data, Training(lr=0.1, batch_size=1, epochs=2), 10, engine),
                3,
            ),
            strict=True,
        )
        close([float(s.server["x"]) for s in found], golden_x)
        close([float(s.server["c"]) for s in found], golden_c)
        close(found[0].clients["c"][:, 0], [-0.95, 3.6, -0.24375])
        close(found[1].clients["c"][:, 0], [-1.0779147108, 3.8058718044, -0.2908887586])
        close(outcomes[0].mix.weight[0], [0.3898837123, 0.2222222222, 0.3878940655])
        close(outcomes[1].mix.weight[0], [0.4483573008, 0.1111111111, 0.4405315881])
        last = (
            [0.5109393719, 0.1596401511, 0.3294204770]
            if mode == "recompute"
            else [0.5171837661, 0.1533957569, 0.3294204770]
        )
        close(outcomes[2].mix.weight[0], last)


# law 1 and 2: what a control variate is


def control_state(alg, net, n, seed=3):
    """Control variates that are not zero: c [P] and c_i [N, P]."""
    gen = torch.Generator().manual_seed(seed)
    return 0.1 * torch.randn(net.size, generator=gen), 0.1 * torch.randn(n, net.size, generator=gen)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_law_1_the_new_control_variate_is_the_mean_minibatch_gradient(engine):
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8, epochs=2), engine=engine)
    c, ci = control_state(Scaffold(), net, 3)
    down = {"x": net.w0.expand(3, -1), "c": c.expand(3, -1)}
    found = {}
    for option in ("II", "mean_grad"):
        own, up = Scaffold(option=option).train(
            down, {"c": ci}, Clients(s, torch.arange(3), 1, net.b0.expand(3, -1))
        )[:2]
        found[option] = own["c"]
        torch.testing.assert_close(up["control"], own["c"] - ci)

    def update(rows, grad, k):
        g = grad(rows["w"])
        return {
            "w": rows["w"] - 0.1 * (g - rows["ci"] + rows["c"]),
            "sum": rows["sum"] + g,
            "steps": rows["steps"] + 1,
        }

    rows = {
        "w": down["x"],
        "c": down["c"],
        "ci": ci,
        "sum": torch.zeros_like(ci),
        "steps": torch.zeros(3, 1),
    }
    end = Clients(s, torch.arange(3), 1, net.b0.expand(3, -1)).each_batch(rows, update).rows
    torch.testing.assert_close(found["mean_grad"], end["sum"] / end["steps"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["II"], found["mean_grad"], rtol=1e-5, atol=1e-5)
    assert end["steps"][:, 0].tolist() == [2, 6, 8]


def test_law_2_an_update_is_the_change_of_the_control_variate():
    net, data = Net(tiny_model()), images((20, 17, 20))
    lr, K = 0.1, 6  # 2 epochs of 3 batches
    s = make_setting(net, data, Training(lr=lr, batch_size=8, epochs=2))
    c, ci = control_state(Scaffold(), net, 3)
    down = {"x": net.w0.expand(3, -1), "c": c.expand(3, -1)}
    _, up = Scaffold().train(down, {"c": ci}, Clients(s, torch.arange(3), 1, net.b0.expand(3, -1)))[
        :2
    ]
    torch.testing.assert_close(up["delta"], -K * lr * (c + up["control"]), rtol=1e-4, atol=1e-6)
    d = ops.pairwise_sqdist(up["delta"]).sqrt()
    torch.testing.assert_close(
        d, K * lr * ops.pairwise_sqdist(up["control"]).sqrt(), rtol=1e-4, atol=1e-7
    )


# law 3: SCAFFOLD's invariant ------------------------------------------------


@pytest.mark.parametrize("option", ["mean_grad", "II", "I"])
def test_law_3_c_is_the_mean_of_the_clients_c(option):
    net, data = Net(tiny_model()), images((7, 20, 31, 12))
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), rounds=6)
    cohorts = [[0, 1, 2, 3], [1], [0, 3], [1, 2, 3], [2], [0, 1, 2, 3]]
    for state, _ in play(Scaffold(option=option), s, ids=lambda r: cohorts[r - 1]):
        torch.testing.assert_close(
            state.server["c"], state.clients["c"].mean(0), rtol=1e-5, atol=1e-6
        )


def test_law_3_the_first_round_is_uniform_fedavg():
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8))
    assert torch.equal(
        play(Scaffold(), s)[0][0].server["x"],
        play(FedAvg(weighting="uniform"), s)[0][0].server["x"],
    )


# law 4: WAFFLE between SCAFFOLD and local training


@dataclass(frozen=True)
class Forced(Waffle):
    """WAFFLE with all weights 1/N for the first `even` rounds, and all weight on the target from
    then on."""

    even: int = 0

    def weights(self, history, delta, cohort):
        w = torch.full((cohort.n,), 1 / cohort.n, dtype=F64)
        if cohort.round > self.even:
            w = torch.nn.functional.one_hot(torch.tensor(self.target), cohort.n).double()
        return w, w[:, None].expand(-1, 2)


@pytest.mark.parametrize("mode", ["recompute", "literal"])
def test_law_4_even_weights_are_scaffold(mode):
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), rounds=5)
    ours, theirs = play(Forced(even=5, control_agg=mode), s), play(Scaffold(), s)
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.server["x"], b.server["x"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.server["c"], b.server["c"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["recompute", "literal"])
def test_law_4_all_weight_on_the_target_is_its_local_training(mode):
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), rounds=5)
    ours, alone = play(Forced(target=1, control_agg=mode), s), play(LocalOnly(), s)
    for (a, _), (b, _) in zip(ours, alone, strict=True):
        torch.testing.assert_close(a.server["x"], b.clients["w"][1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.server["c"], a.clients["c"][1], rtol=1e-5, atol=1e-6)


def test_law_4_a_change_of_weights_leaves_its_mark_on_literal_c_only():
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), rounds=8)

    def gaps(mode):
        return [
            float((st.server["c"] - st.clients["c"][0]).norm())
            for st, _ in play(Forced(even=4, control_agg=mode), s)
        ]

    recompute, literal = gaps("recompute"), gaps("literal")
    # c is the target's c from the first local round on: local SGD one round later
    assert recompute[4:] == [0.0] * 4
    assert literal[3] > 0.01
    assert literal[4:] == pytest.approx([literal[3]] * 4, rel=1e-4)


# law 5 and 6: the weights ---------------------------------------------------


@st.composite
def distances(draw):
    """Distances of 3 to 12 clients with relative gaps of at least 1e-3; the target, 0, anywhere."""
    n = draw(st.integers(2, 11))
    steps = draw(st.lists(st.floats(1e-3, 1), min_size=n, max_size=n))
    scale = draw(st.sampled_from([1e-12, 1.0, 1e9]))
    others = [scale * sum(steps[: i + 1]) for i in range(n)]
    order = draw(st.permutations(range(n)))
    at = draw(st.integers(0, n))
    d = [others[i] for i in order]
    return [*d[:at], 0.0, *d[at:]]


@given(distances(), st.floats(1.001, 3), st.floats(0.01, 3))
def test_law_5_above_one_line_6_holds(d, omega, psi):
    target = d.index(0)
    close(weights(d, omega, psi, target), printed(d, omega, psi, target), atol=1e-11)


@given(st.lists(distances(), min_size=1, max_size=1), st.integers(1, 30))
def test_law_6_smoothed_weights_sum_to_one(one, rounds):
    d = one[0]
    for _, smooth in sequence(d, rounds, min(rounds, 4), target=d.index(0)):
        assert math.fsum(smooth) == pytest.approx(1, abs=1e-12)


# law 7: no NaN --------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("tie", ["closed", "uniform"])
@pytest.mark.parametrize("d", [[0], [0, 5], [0, 0], [0, 3, 3, 3], [0, 0, 0], [0, 0, 3], [5, 5, 0]])
def test_law_7_no_nan(d, tie, rounds):
    for alone, smooth in sequence(d, rounds, target=d.index(0), tie=tie):
        assert math.fsum(alone) == pytest.approx(1) and math.fsum(smooth) == pytest.approx(1)
        assert all(v >= 0 for v in alone + smooth)


def test_law_7_no_globality_left_is_the_target_alone():
    assert sequence([0, 1, 2], 10, 1, omega=lambda r, n: 0.0)[0][0] == [1, 0, 0]
    assert sequence([2, 0, 1], 10, 1, target=1, psi=lambda r, n: 0.0)[0][0] == [0, 1, 0]


@dataclass(frozen=True)
class Broken(Waffle):
    """WAFFLE in which one client's training is NaN in round 2."""

    who: int = 2

    def train(self, down, own, clients):
        new, up, fit = super().train(down, own, clients)
        if clients.round == 2:
            up["delta"][clients.ids == self.who] = math.nan
        return new, up, fit


@pytest.mark.parametrize("mode", ["recompute", "literal"])
def test_law_7_a_broken_client_is_out_of_the_round(mode):
    net, data = Net(tiny_model()), images((7, 20, 31, 12))
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), rounds=10)
    (one, _), (two, done), (_, last) = play(Broken(control_agg=mode), s, 3)
    assert done.dropped == [2] and not done.void
    assert torch.equal(two.clients["c"][2], one.clients["c"][2])
    weight = done.mix.weight[0]
    assert done.cohort.ids.tolist() == [0, 1, 3] and math.fsum(weight.tolist()) == pytest.approx(1)
    if mode == "recompute":
        there = torch.tensor([0, 1, 3])
        torch.testing.assert_close(
            two.server["c"], weight.float() @ two.clients["c"][there], rtol=1e-5, atol=1e-6
        )
        alone = play(
            Broken(control_agg="recompute", who=9),
            s,
            2,
            ids=lambda r: [0, 1, 2, 3] if r == 1 else there.tolist(),
        )[1][0]
        # the same as not to have been there
        assert all(torch.equal(two.server[k], alone.server[k]) for k in two.server)
    assert last.mix.weight[0][2] > 0  # no ban


def test_law_7_without_the_target_the_round_is_void():
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), rounds=10)
    (one, _), (two, done) = play(Broken(who=0), s, 2)
    assert done.void and done.dropped == [0] and two.void == 1
    assert all(torch.equal(two.server[k], one.server[k]) for k in one.server) and torch.equal(
        two.clients["c"], one.clients["c"]
    )


# law 9: limits of the others ------------------------------------------------


def test_law_9_fedprox():
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8, epochs=2), rounds=3)
    for (a, _), (b, _) in zip(play(FedProx(mu=0.0), s), play(FedAvg(), s), strict=True):
        torch.testing.assert_close(a.server["x"], b.server["x"], rtol=1e-6, atol=1e-7)
    net, data = quadratics(torch.tensor([[2.0]]), torch.tensor([[3.0]]), start=[1.0])
    golden = [
        play(FedProx(mu=0.5), make_setting(net, data, Training(lr=0.1, batch_size=1, epochs=e)))[0][
            0
        ].server["x"]
        for e in (1, 2, 3)
    ]
    close(torch.cat(golden), [1.4, 1.7, 1.925])


def test_law_9_fedavg_weighs_by_samples():
    cohort = Cohort(torch.arange(3), torch.tensor([10, 30, 60]), 3, 1, 1)
    up = {"delta": torch.tensor([[1.0], [2.0], [4.0]], dtype=F64)}
    close(served(FedAvg(), {"x": torch.zeros(1, dtype=F64)}, up, cohort)["x"], [3.1])


@pytest.mark.parametrize("mix", ["weights", "logits"])
def test_law_9_apfl(mix):
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8, epochs=2), rounds=3)
    fedavg, local = play(FedAvg(weighting="uniform"), s), play(LocalOnly(), s)
    for alpha in (0.0, 1.0):
        found = play(APFL(alpha=alpha, adaptive=False, mix=mix), s)
        for r in range(3):
            torch.testing.assert_close(
                found[r][0].server["x"], fedavg[r][0].server["x"], rtol=1e-5, atol=1e-6
            )
            expected = local[r][0].clients["w"] if alpha else net.w0.expand(3, -1)
            torch.testing.assert_close(found[r][0].clients["v"], expected, rtol=1e-5, atol=1e-6)


# law 10: partitions ---------------------------------------------------------


@pytest.mark.parametrize("base", ["A", "B", "C"])
def test_law_10_the_papers_partitions(base):
    labels = torch.arange(10).repeat_interleave(
        torch.tensor([40, 41, 43, 40, 47, 40, 44, 40, 52, 40])
    )
    part = waffle_partition(labels, 10, base=base)
    # disjoint and exhaustive
    assert torch.equal(torch.cat(part.index["train"]).sort().values, torch.arange(len(labels)))
    shifts = "A*" if base == "C" else f"{base}*"
    shifted = waffle_partition(labels, 10, base=shifts, shift_seed=1, test_labels=labels).relabel
    assert shifted is not None and torch.equal(shifted[0], torch.arange(10))
    assert torch.equal(shifted.sort(1).values, torch.arange(10).expand(10, -1))


# law 11: which c reaches the target's optimum


def test_law_11_only_recompute_reaches_the_targets_optimum():
    gen = torch.Generator().manual_seed(0)
    a, b = 0.5 + torch.rand(6, 3, generator=gen), torch.randn(6, 3, generator=gen)
    net, data = quadratics(a, b)
    s = make_setting(net, data, Training(lr=0.1, batch_size=1, epochs=5), rounds=200, engine="vmap")
    error = {}
    for mode in ("recompute", "literal"):
        found = [st for st, _ in play(Forced(even=20, control_agg=mode), s)]
        error[mode] = [
            float((found[r - 1].server["x"] - b[0].double()).norm()) for r in (40, 100, 200)
        ]
    assert error["recompute"][2] < 1e-12
    assert error["literal"][2] > 0.1
    assert error["literal"] == pytest.approx([error["literal"][2]] * 3, rel=1e-3)


# options --------------------------------------------------------------------


def test_globalities_that_cannot_be_and_a_warning():
    for value in (-0.1, math.nan):
        with pytest.raises(ValueError, match="omega"):
            Waffle(omega=lambda r, n, value=value: value).globality(1, 2)
    with pytest.warns(UserWarning, match="omega exceeds 1"):
        assert Waffle(omega=lambda r, n: 1.5, psi=lambda r, n: 0.5).globality(1, 2) == (1.5, 0.5)
    net, data = Net(tiny_model()), images()
    with pytest.raises(ValueError, match="target"):
        begin(Waffle(target=3), net, data.n)


def test_a_target_who_is_not_asked_makes_a_plain_error():
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(batch_size=8))
    state = begin(Waffle(target=2), net, 3)
    with pytest.raises(ValueError, match="target"):
        step(Setup(Waffle(target=2), s), state, torch.tensor([0, 1]))


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
