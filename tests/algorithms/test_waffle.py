"""WAFFLE, SCAFFOLD and Weight Erosion: golden values, and the laws between them."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from methods import LocalOnly, Scaffold, Waffle, WeightErosion
from places import golden
from small import (
    ENGINES,
    F64,
    after,
    alike,
    at_work,
    double,
    make_setting,
    near,
    play,
    quadratics,
    served,
    some,
    t,
    tiny,
)

from pflcore import Evaluation, Net, Robustness, Simulation, Training
from pflcore.algorithms import FedAvg
from pflcore.simulation.round import begin
from pflcore.testing import check

GOLDEN = golden("waffle_family")
MODES = pytest.mark.parametrize("mode", ["recompute", "literal"])
OPTIONS = pytest.mark.parametrize("option", ["mean_grad", "II", "I"])


def close(got, want, atol=1e-9):
    near(got, want, 0, atol)


def squares(a, b, lr=0.1, epochs=1, rounds=10, start=None, **training):
    """Client i's loss is a_i (m - b_i)^2 / 2."""
    net, data = quadratics(t(a)[:, None], t(b)[:, None], start)
    t_ = Training(lr=lr, batch_size=1, epochs=epochs, **training)
    return make_setting(net, data, t_, rounds)


# WAFFLE's weights ----------------------------------------------------------------------------


def test_omega_is_the_papers_sigmoid():
    for r, value in GOLDEN["omega"]:
        close(Waffle().globality(r, 100), (value, value), 5e-11)
    assert Waffle(r0=1.0).globality(50, 100)[0] == Waffle().globality(51, 100)[0]
    few = [Waffle().globality(r, n)[0] for r, n in ((1, 1), (1, 2), (1, 3))]
    close(few, [0.0391657228, 0.5, 0.7439624913], 5e-11)
    assert Waffle(do=0).globality(7, 9) == (0.5, 0.5)
    # stable where exp overflows
    assert Waffle(do=1e6).globality(9, 9)[0] == 0 and Waffle(do=-1e6).globality(9, 9)[0] == 1


def test_globalities_that_cannot_be_and_a_warning():
    for value in (-0.1, math.nan):
        with pytest.raises(ValueError, match="omega"):
            Waffle(omega=lambda r, n, value=value: value).globality(1, 2)
    with pytest.warns(UserWarning, match="omega exceeds 1"):
        assert Waffle(omega=lambda r, n: 1.5, psi=lambda r, n: 0.5).globality(1, 2) == (1.5, 0.5)
    with pytest.raises(ValueError, match="target"):
        begin(Waffle(target=3), tiny().net, 3)
    with pytest.raises(ValueError, match="target"):  # who is not asked
        after(Waffle(target=2), tiny(), [[0, 1]])


@dataclass(frozen=True)
class FixedDistances(Waffle):
    """WAFFLE whose clients' updates lie at given distances from the target's: no training."""

    d: tuple[float, ...] = ()

    def train(self, down, own, clients):
        delta = t(self.d)[clients.ids, None]
        return own, {"delta": delta, "control": delta}, clients.fit(down["x"])


def sequence(d, rounds, upto=None, **options):
    """The unsmoothed and the smoothed weights of each round."""
    s = squares([1.0] * len(d), [0.0] * len(d), rounds=rounds)
    found = play(FixedDistances(d=tuple(d), **options), s, upto)
    return [(s.server["history"][:, 0].tolist(), done.mix.weight[0].tolist()) for s, done in found]


def test_golden_weights_with_another_target_and_a_history():
    history = torch.full((5, 2), 0.2, dtype=F64)
    delta = t([[3], [1.5], [0], [0.5], [6]])
    smooth, history = Waffle(target=2).weights(history, delta, some(5, 40))
    close(torch.stack([history[:, 0], smooth]), GOLDEN["another_target"])


@pytest.mark.parametrize(("do", "golden"), GOLDEN["sequences"])
def test_golden_sequence_of_weights(do, golden):
    found = sequence([0, 1, 2, 4], 20, do=do)
    for r, alone, smooth in golden:
        close(found[r - 1][0], alone)
        close(found[r - 1][1], smooth)


def test_ties_and_no_power_left():
    """The rule's own laws are those of the op."""
    close(sequence([0, 3, 3, 3], 10, 1, tie="uniform")[0][0], [0.25] * 4)
    assert sequence([0, 3, 3, 3], 10, 1)[0][0][0] > 0.25
    assert sequence([2, 0, 1], 10, 1, target=1, psi=lambda r, n: 0.0)[0][0] == [0, 1, 0]


def test_absence_is_no_unlikeness_for_waffle():
    """Equal clients, a quarter of 12 a round: attended rounds alone count, so the target's weight
    is what one round gives it."""
    alg = Waffle(omega=lambda r, rounds: 0.9)
    state = begin(alg, Net(nn.Linear(8, 1)), 12).server
    found = []
    for round in range(1, 61):
        ids = [0, *sorted((1 + torch.randperm(11)[:2]).tolist())]
        cohort = some(12, round, ids)._replace(rounds=1000)
        up = {"delta": torch.randn(3, 9), "control": torch.zeros(3, 9)}
        weights = alg.update(state, up, cohort)[1].weight[0]
        state = served(alg, state, up, cohort)
        near(weights.sum(), 1)
        found.append([float(weights[0]), float(state["history"][0, 0]) * 12 / 3])
    smoothed, alone = t(found).mean(0)
    near(smoothed, alone, 0, 0.03)


# golden rounds -------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("option", ["mean_grad", "II"])
def test_golden_waffle_from_end_to_end(option, mode):
    s = squares([1.0, 2, 0.5], [1.0, -2, 0.5], epochs=2)
    found = play(Waffle(control_agg=mode, option=option), s, 3)
    rows = [torch.cat([s.server["x"], s.server["c"], done.mix.weight[0]]) for s, done in found]
    close(torch.stack(rows), GOLDEN["waffle_rounds"][mode])
    own = [s.clients["c"][:, 0] for s, _ in found[:2]]
    close(torch.stack(own), GOLDEN["waffle_controls"])


@pytest.mark.parametrize("option", ["mean_grad", "II"])
def test_golden_rounds_of_scaffold(option):
    s = squares([1.0, 2], [1.0, -2], epochs=2)
    found = [state for state, _ in play(Scaffold(option=option), s, 3)]
    rows = [torch.cat([s.server["x"], s.server["c"], s.clients["c"][:, 0]]) for s in found]
    close(torch.stack(rows), GOLDEN["scaffold_rounds"], 1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_option_one_is_the_gradient_at_the_servers_model(decay):
    """Weight decay is a part of it: at m = .5 decay adds .25."""
    s = squares([1.0, 2], [1.0, -2], epochs=2, start=[0.5], weight_decay=decay)
    (one, _), (two, _) = play(Scaffold(option="I"), s, 2)
    for x, state in ((0.5, one), (float(one.server["x"]), two)):
        near(state.clients["c"][:, 0], [x - 1 + decay * x, 2 * (x + 2) + decay * x])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, 1.0), (2, 2.9), (40, 311.3302794647), (188, 1790.0000002248)],
)
def test_with_momentum_option_two_divides_by_the_effective_steps(steps, expected):
    """A constant gradient of -1 moves a client by lr * K_eff, so option II recovers it."""
    s = squares([1e-12], [1e12], epochs=steps, momentum=0.9)
    state, _ = after(Scaffold(option="II"), s)
    assert float(state.server["x"]) == pytest.approx(0.1 * expected, rel=1e-7)
    assert float(state.clients["c"]) == pytest.approx(-1, rel=1e-7)


# what a control variate is -------------------------------------------------------------------


@pytest.mark.parametrize(
    "training",
    [{"epochs": 2}, {"weight_decay": 0.1}, {"schedule": lambda r, n: 0.25}],
    ids=lambda v: next(iter(v)),
)
@ENGINES
def test_the_new_control_variate_is_the_mean_minibatch_gradient(engine, training):
    """And an update is the change of the control variate, -K lr (c + c_i' - c_i)."""
    s = double(tiny(engine=engine, **training))
    c, ci = 0.1 * torch.randn(2, 3, s.net.size, dtype=F64)
    c = c[:1].expand(3, -1)
    x = s.net.w0.expand(3, -1)
    decay = s.training.weight_decay

    def update(rows, grad, k):
        g = grad(rows["w"]) + decay * rows["w"]
        w = rows["w"] - lr * (g - rows["ci"] + rows["c"])
        return {"w": w, "sum": rows["sum"] + g, "steps": rows["steps"] + 1}

    lr = at_work(s).lr
    zero = torch.zeros_like(ci)
    rows = {"w": x, "c": c, "ci": ci, "sum": zero, "steps": zero[:, :1]}
    end = at_work(s).each_batch(rows, update).rows
    for option in ("II", "mean_grad"):
        own, up, _ = Scaffold(option=option).train({"x": x, "c": c}, {"c": ci}, at_work(s))
        near(own["c"], end["sum"] / end["steps"], 1e-9, 1e-11)
        near(up["control"], own["c"] - ci)
        near(up["delta"], -end["steps"] * lr * (c + up["control"]), 1e-9, 1e-11)


@OPTIONS
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_c_is_the_mean_of_the_clients_c_and_the_first_round_fedavgs(option, weighting):
    s = tiny((7, 20, 31, 12))
    alg = Scaffold(option=option, weighting=weighting)
    first, plain = (after(a, s)[0].server["x"] for a in (alg, FedAvg(weighting=weighting)))
    assert torch.equal(first, plain)
    everybody = [0, 1, 2, 3]
    cohorts, share = [everybody, [1], [0, 3], [1, 2, 3], [2], everybody], torch.ones(4)
    if weighting == "samples":  # the mean under full participation
        cohorts, share = [everybody] * 3, s.data.size().float()
    state, _ = after(alg, s, cohorts)
    alike(state.server["c"], share / share.sum() @ state.clients["c"])


def test_alone_or_without_the_others_it_is_local_training():
    eroded = WeightErosion(target=1, p_d=1e9)
    for alg, s, i in ((Scaffold(), tiny((20,)), 0), (eroded, tiny(), 1)):
        alike(after(alg, s, 4)[0].server["x"], after(LocalOnly(), s, 4)[0].clients["w"][i])


@pytest.mark.parametrize(
    "alg",
    [
        Scaffold(),
        Scaffold(option="II"),
        Waffle(control_agg="literal", omega=lambda r, n: 1),
    ],
)
def test_a_clipped_round_leaves_scaffold_its_optimum(alg):
    """What the server did not take of a control variate the client does not keep, so c is their
    mean, and x goes where it would."""
    net, data = quadratics(t([[1], [2], [4]]), t([[9], [-2], [3]]))
    training = Training(lr=0.05, batch_size=1, epochs=3)
    how = {"robustness": Robustness(clip=0.5), "evaluation": Evaluation(every=0)}
    run = Simulation(alg, net, data, training, rounds=200, **how)
    history = run.run()
    assert history.rounds[0]["clipped"] and not history.rounds[150]["clipped"]
    if type(alg) is Scaffold:
        near(run.state.server["c"], run.state.clients["c"].mean(0), 1e-7, 1e-7)
        near(run.state.server["x"], [(9 - 4 + 12) / 7], 1e-7, 1e-7)


# WAFFLE between SCAFFOLD and local training --------------------------------------------------


@dataclass(frozen=True)
class Forced(Waffle):
    """WAFFLE with all weights 1/N for the first `even` rounds, and all weight on the target from
    then on."""

    even: int = 0

    def weights(self, history, delta, cohort):
        w = torch.full((cohort.n,), 1 / cohort.n, dtype=F64)
        if cohort.round > self.even:
            w = nn.functional.one_hot(torch.tensor(self.target), cohort.n).double()
        return w, w[:, None].expand(-1, 2)


@MODES
def test_even_weights_are_scaffold_and_all_weight_on_the_target_its_local_training(mode):
    forced = Forced(even=5, control_agg=mode), Forced(target=1, control_agg=mode)
    algs = *forced, Scaffold(), LocalOnly()
    even, ours, scaffold, alone = (after(a, tiny(), 5)[0] for a in algs)
    for key in ("x", "c"):
        alike(even.server[key], scaffold.server[key])
    alike(ours.server["x"], alone.clients["w"][1])
    alike(ours.server["c"], ours.clients["c"][1])


def test_only_recompute_reaches_the_targets_optimum():
    """A change of weights leaves its mark on literal c: the gap to the target's own c freezes."""
    gen = torch.Generator().manual_seed(0)
    a = 0.5 + torch.rand(6, 3, generator=gen)
    b = torch.randn(6, 3, generator=gen)
    s = make_setting(*quadratics(a, b), Training(lr=0.1, batch_size=1, epochs=5), 200, "vmap")
    error = {}
    gap = {}
    for mode in ("recompute", "literal"):
        found = [state for state, _ in play(Forced(even=20, control_agg=mode), s)]
        error[mode] = [float((found[r - 1].server["x"] - b[0]).norm()) for r in (40, 100, 200)]
        gap[mode] = [float((f.server["c"] - f.clients["c"][0]).norm()) for f in found[19:30]]
    assert error["recompute"][2] < 1e-12 and gap["recompute"][1:] == [0.0] * 10
    assert error["literal"][2] > 0.1 and gap["literal"][0] > 0.01
    for frozen in (error["literal"], gap["literal"]):
        assert frozen == pytest.approx([frozen[0]] * len(frozen), rel=1e-3)


def test_the_contract_with_c_as_printed():
    check(Waffle(control_agg="literal"))


# Weight Erosion ------------------------------------------------------------------------------


def eroded(updates, rounds, sizes=None, **options):
    """The weights and the step of each round of given updates [rounds, clients, P]."""
    n = len(updates[0])
    alg = WeightErosion(**options)
    state = alg.init(torch.zeros_like(updates[0, 0]), n)
    found = []
    for round, delta in enumerate(updates, 1):
        cohort = some(n, round)._replace(rounds=rounds)
        passes = torch.tensor([(round - 1) * 32 // size for size in sizes or [1 << 20] * n])
        new = served(alg, state, {"delta": delta, "passes": passes}, cohort)
        found.append((new["alpha"], new["x"] - state["x"]))
        state = new
    return found


@pytest.mark.parametrize(("p_s", "golden"), GOLDEN["weight_erosion"])
def test_golden_rounds_of_weight_erosion(p_s, golden):
    updates = t([[[3.0, 4.0], [3.0, 4.5], [0.0, 0.0], [-3.0, -4.0]]] * 5)
    found = eroded(updates, 5, (100, 100, 64, 100), p_d=0.1, p_s=p_s)
    for r, alpha, step in golden:
        close(found[r - 1][0], alpha, 1e-12)
        close(found[r - 1][1], step)


def test_passes_are_counted_in_the_chosen_unit():
    s = tiny((100, 33, 1000), batch_size=32, epochs=3)
    down = {"x": s.net.w0.expand(3, -1)}
    units = {"samples": [1, 4, 0], "batches": [40, 80, 5], "epochs": [15, 15, 15]}
    for unit, expected in units.items():
        _, up, _ = WeightErosion(size_unit=unit).train(down, {}, at_work(s, round=6))
        assert up["passes"].tolist() == expected


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e-3, 0.3, 1e12]),
    st.floats(0, 3),
)
def test_any_updates_give_weights(updates, p_d, p_s):
    ((alpha, x),) = eroded(t([updates]), 10, p_d=p_d, p_s=p_s)
    assert ((alpha >= 0) & (alpha <= 1)).all() and alpha[0] == 1 and x.isfinite().all()


def test_a_target_that_stands_still():
    """|delta_target| = 0: who stands still too keeps its weight, everybody else loses it all,
    unless nothing erodes."""
    for p_d, last in ((0.1, 0), (0.0, 1), (None, 1)):
        assert eroded(t([[[0], [0], [1]]]), 1, p_d=p_d)[0][0].tolist() == [1, 1, last]


def test_an_absent_client_keeps_its_weight_and_those_present_share_the_whole():
    alg = WeightErosion(p_d=0.25)
    state = {**alg.init(t([0.0]), 3), "alpha": t([1, 0.4, 0.75])}
    up = {"delta": t([[1], [2]]), "passes": torch.zeros(2)}
    new = served(alg, state, up, some(3, ids=[0, 2]))
    near(new["alpha"], [1, 0.4, 0.5])
    near(new["x"], [(1 + 0.5 * 2) / 1.5])


@pytest.mark.parametrize("growth", [0.0, 1.0, 4.0])
def test_calibrated_erosion_ends_at_80_percent_however_distances_grow(growth):
    """The median's weight runs out after 0.8 R rounds, the farthest's before, the nearest's not."""
    rounds = torch.arange(1, 51)[:, None, None]
    updates = 1 + t([[0], [1], [2], [3]]) * (1 + growth * rounds / 50)
    gone = torch.stack([alpha < 1e-9 for alpha, _ in eroded(updates, 50)])
    assert gone.sum(0).tolist()[:3] == [0, 0, 11] and gone[30, 3]
