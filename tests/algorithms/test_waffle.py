"""WAFFLE, SCAFFOLD and Weight Erosion: golden values, and how they are related."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from places import golden
from small import (
    F64,
    after,
    alike,
    at_work,
    lead,
    near,
    play,
    quadratics,
    some,
    t,
    tiny,
)

from pflcore import Evaluation, Robustness, Simulation
from pflcore.algorithms import FedAvg, LocalOnly, Scaffold, Waffle, WeightErosion
from pflcore.testing import check

GOLDEN = golden("waffle_family")
MODES = pytest.mark.parametrize("mode", ["recompute", "literal"])
OPTIONS = pytest.mark.parametrize("option", ["mean_grad", "II", "I"])


def close(got, want, atol=1e-9):
    near(got, want, 0, atol)


# WAFFLE's weights -------------------------------------------------------------


def test_omega_is_the_papers_sigmoid():
    """Its values are finite where exp would overflow."""
    for options, r, rounds, value in GOLDEN["omega"]:
        close(Waffle(**options).globality(r, rounds), (value, value), 5e-11)
    assert Waffle(r0=1.0).globality(50, 100)[0] == Waffle().globality(51, 100)[0]


def test_globalities_and_targets_that_cannot_be():
    for value in (-0.1, math.nan):
        with pytest.raises(ValueError, match="omega"):
            Waffle(omega=lambda r, n, value=value: value).globality(1, 2)
    assert Waffle(omega=lambda r, n: 1.5, psi=lambda r, n: 0.5).globality(1, 2) == (
        1.5,
        0.5,
    )
    with pytest.raises(
        ValueError, match=r"ids: expected the clients .2,. in every round"
    ):
        after(Waffle(target=2), tiny(), [[0, 1]])


def sequence(d, rounds, upto=None, **options):
    """The unsmoothed and the smoothed weights of each round.

    The clients' updates lie at the distances `d` from the target's.
    """
    up = dict.fromkeys(("delta", "control"), t(d)[:, None])
    cohorts = [some(len(d), r, rounds=rounds) for r in range(1, (upto or rounds) + 1)]
    found = lead(
        Waffle(**options), t([0.0]), len(d), [(up, cohort) for cohort in cohorts]
    )
    return [
        (state["history"][:, 0].tolist(), mix.weight[0].tolist())
        for state, mix in found
    ]


@pytest.mark.parametrize(("do", "golden"), GOLDEN["sequences"])
def test_golden_sequence_of_weights(do, golden):
    found = sequence([0, 1, 2, 4], 20, do=do)
    for r, alone, smooth in golden:
        close(found[r - 1][0], alone)
        close(found[r - 1][1], smooth)


def test_ties_and_no_power_left():
    """Ties follow the option, and without power the target has all the weight."""
    close(sequence([0, 3, 3, 3], 10, 1, tie="uniform")[0][0], [0.25] * 4)
    assert sequence([0, 3, 3, 3], 10, 1)[0][0][0] > 0.25
    assert sequence([2, 0, 1], 10, 1, target=1, psi=lambda r, n: 0.0)[0][0] == [0, 1, 0]


def test_absence_is_no_unlikeness_for_waffle():
    """Only attended rounds count, so equal clients get what one round gives them.

    A quarter of 12 clients takes part in a round.
    """
    rounds = []
    for round in range(1, 61):
        ids = [0, *sorted((1 + torch.randperm(11)[:2]).tolist())]
        up = {"delta": torch.randn(3, 9), "control": torch.zeros(3, 9)}
        rounds.append((up, some(12, round, ids, rounds=1000)))
    found = lead(Waffle(omega=lambda r, rounds: 0.9), torch.zeros(9), 12, rounds)
    weights = torch.stack([mix.weight[0] for _, mix in found])
    near(weights.sum(1), torch.ones(60))
    alone = torch.stack([state["history"][0, 0] * 12 / 3 for state, _ in found])
    near(weights[:, 0].mean(), alone.mean(), 0, 0.03)


# control variates -------------------------------------------------------------


@OPTIONS
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_c_is_the_mean_of_the_clients_c_and_the_first_round_fedavgs(option, weighting):
    s = tiny((7, 20, 31, 12))
    alg = Scaffold(option=option, weighting=weighting)
    first, _ = after(alg, s)
    plain, _ = after(FedAvg(weighting=weighting), s)
    assert torch.equal(first.server["x"], plain.server["x"])
    everybody = [0, 1, 2, 3]
    cohorts = [everybody, [1], [0, 3], [1, 2, 3], [2], everybody]
    share = torch.ones(4)
    if weighting == "samples":  # the mean under full participation
        cohorts = [everybody] * 3
        share = s.data.size().float()
    state, _ = after(alg, s, cohorts)
    alike(state.server["c"], share / share.sum() @ state.clients["c"])


def test_alone_or_without_the_others_it_is_local_training():
    eroded = WeightErosion(target=1, p_d=1e9)
    for alg, s, i in ((Scaffold(), tiny((20,)), 0), (eroded, tiny(), 1)):
        alike(
            after(alg, s, 4)[0].server["x"], after(LocalOnly(), s, 4)[0].clients["w"][i]
        )


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize(
    "alg",
    [
        Scaffold(),
        Scaffold(option="II"),
        Waffle(control_agg="literal", omega=lambda r, n: 1),
    ],
)
def test_a_clipped_round_leaves_scaffold_its_optimum(alg):
    """A clipped client keeps as much of its control variate as the server takes.

    So c stays the clients' mean, and x reaches the optimum.
    """
    s = quadratics([[1], [2], [4]], [[9], [-2], [3]], lr=0.05, epochs=3)
    how = {"robustness": Robustness(clip=0.5), "evaluation": Evaluation(every=0)}
    run = Simulation(alg, s.net, s.data, s.training, rounds=200, **how)
    history = run.run()
    assert history.rounds[0]["clipped"] and not history.rounds[150]["clipped"]
    if type(alg) is Scaffold:
        near(run.state.server["c"], run.state.clients["c"].mean(0), 1e-7, 1e-7)
        near(run.state.server["x"], [(9 - 4 + 12) / 7], 1e-7, 1e-7)


# WAFFLE between SCAFFOLD and local training -----------------------------------


@dataclass(frozen=True)
class Forced(Waffle):
    """WAFFLE with equal weights for `even` rounds, then all weight on the target."""

    even: int = 0

    def smoothed_weights(self, history, delta, cohort):
        w = torch.full((cohort.n,), 1 / cohort.n, dtype=F64)
        if cohort.round > self.even:
            w = nn.functional.one_hot(torch.tensor(self.target), cohort.n).double()
        return w, w[:, None].expand(-1, 2)


@MODES
def test_even_weights_are_scaffold_and_all_weight_on_the_target_its_local_training(
    mode,
):
    forced = Forced(even=5, control_agg=mode), Forced(target=1, control_agg=mode)
    algs = *forced, Scaffold(), LocalOnly()
    even, ours, scaffold, alone = (after(a, tiny(), 5)[0] for a in algs)
    for key in ("x", "c"):
        alike(even.server[key], scaffold.server[key])
    alike(ours.server["x"], alone.clients["w"][1])
    alike(ours.server["c"], ours.clients["c"][1])


@pytest.mark.deep("it takes a second")
def test_only_recompute_reaches_the_targets_optimum():
    """With literal c, the gap to the target's own c stays after weights change."""
    b = torch.randn(6, 3)
    s = quadratics(
        (0.5 + torch.rand(6, 3)).tolist(), b.tolist(), engine="vmap", epochs=5
    )
    error = {}
    gap = {}
    for mode in ("recompute", "literal"):
        found = [state for state, _ in play(Forced(even=20, control_agg=mode), s, 200)]
        error[mode] = [
            float((found[r - 1].server["x"] - b[0]).norm()) for r in (40, 100, 200)
        ]
        gap[mode] = [
            float((f.server["c"] - f.clients["c"][0]).norm()) for f in found[19:30]
        ]
    assert error["recompute"][2] < 1e-12 and gap["recompute"][1:] == [0.0] * 10
    assert error["literal"][2] > 0.1 and gap["literal"][0] > 0.01
    for frozen in (error["literal"], gap["literal"]):
        assert frozen == pytest.approx([frozen[0]] * len(frozen), rel=1e-3)


def test_the_contract_with_c_as_printed():
    check(Waffle(control_agg="literal"))


# Weight Erosion ---------------------------------------------------------------


def eroded(updates, **options):
    """The weights after each round of `updates` [rounds, N, P], and the last model."""
    n = len(updates[0])
    rounds = len(updates)
    passes = torch.zeros(len(updates[0]))
    ups = [{"delta": delta, "passes": passes} for delta in updates]
    cohorts = [some(n, r, rounds=rounds) for r in range(1, rounds + 1)]
    x0 = torch.zeros_like(updates[0, 0])
    found = lead(WeightErosion(**options), x0, n, zip(ups, cohorts, strict=True))
    return torch.stack([state["alpha"] for state, _ in found]), found[-1][0]["x"]


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
    (alpha,), x = eroded(t([updates]), p_d=p_d, p_s=p_s)
    assert ((alpha >= 0) & (alpha <= 1)).all() and alpha[0] == 1 and x.isfinite().all()


@pytest.mark.parametrize("growth", [0.0, 1.0, 4.0])
def test_calibrated_erosion_ends_at_80_percent_however_distances_grow(growth):
    """The median client's weight ends after 0.8 R rounds.

    The farthest client's ends before, and the nearest's does not end.
    """
    rounds = torch.arange(1, 51)[:, None, None]
    updates = 1 + t([[0], [1], [2], [3]]) * (1 + growth * rounds / 50)
    gone = eroded(updates)[0] < 1e-9
    assert gone.sum(0).tolist()[:3] == [0, 0, 11] and gone[30, 3]
