"""Weight Erosion: golden values, and law 8 of the WAFFLE family."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import (
    LocalOnly,
    WeightErosion,
)
from small import F64, images, make_setting, play, quadratics, served, tiny_model

from pflcore import Clients, Net, Training
from pflcore.algorithms import Cohort, FedAvg
from pflcore.simulation.round import begin


@dataclass(frozen=True)
class FixedUpdates(WeightErosion):
    """Weight Erosion on given updates: no training."""

    updates: tuple[tuple[float, ...], ...] = ()

    def train(self, down, own, clients):
        own, up, fit = super().train(down, own, clients)
        return own, {**up, "delta": torch.tensor(self.updates, dtype=F64)[clients.ids]}, fit


def eroded(updates, sizes, rounds, **options):
    """alpha and the mean update of each round."""
    net = (
        Net(torch.nn.Linear(2, len(updates[0]) // 2, bias=False, dtype=F64))
        if len(updates[0]) > 1
        else quadratics(torch.ones(1, 1), torch.ones(1, 1))[0]
    )
    data = images(sizes, shape=(2,), classes=1)
    data = type(data)(data.x.double(), data.y, data.index, 1)
    found, last = [], net.w0
    for state, _ in play(
        FixedUpdates(updates=updates, **options),
        make_setting(net, data, Training(batch_size=32), rounds),
    ):
        found.append((state.server["alpha"].tolist(), state.server["x"] - last))
        last = state.server["x"]
    return found


UPDATES = ((3.0, 4.0), (3.0, 4.5), (0.0, 0.0), (-3.0, -4.0))


@pytest.mark.parametrize(
    ("p_s", "golden"),
    [
        (
            2.0,
            {
                1: ([1, 0.99, 0.9, 0.8], [0.9674796748, 1.4241192412]),
                2: ([1, 0.98, 0.8, 0.6], [1.2248520710, 1.7781065089]),
                3: ([1, 0.97, 0.5, 0.4], [1.6411149826, 2.3571428571]),
                4: ([1, 0.96, 0.2, 0.2], [2.2372881356, 3.1864406780]),
                5: ([1, 0.93, 0, 0], [3, 4.2409326425]),
            },
        ),
        (
            0.0,
            {
                3: ([1, 0.97, 0.7, 0.4], [1.5342019544, 2.2035830619]),
                5: ([1, 0.95, 0.5, 0], [2.3877551020, 3.3775510204]),
            },
        ),
    ],
)
def test_golden_rounds(p_s, golden):
    found = eroded(UPDATES, (100, 100, 64, 100), 5, p_d=0.1, p_s=p_s)
    for r, (alpha, mean) in golden.items():
        assert found[r - 1][0] == pytest.approx(alpha, abs=1e-12)
        assert found[r - 1][1].tolist() == pytest.approx(mean, abs=1e-9)


def test_passes_are_counted_in_the_chosen_unit():
    sizes = (100, 33, 1000)
    net, data = Net(tiny_model(2, 1)), images(sizes, shape=(2,), classes=1)
    s = make_setting(net, data, Training(batch_size=32, epochs=3))
    down = {"x": net.w0.expand(3, -1)}
    for unit, expected in (
        ("samples", [1, 4, 0]),
        ("batches", [40, 80, 5]),
        ("epochs", [15, 15, 15]),
    ):
        local = Clients(s, torch.arange(3), 6, net.b0.expand(3, -1))
        assert (
            WeightErosion(size_unit=unit).train(down, {}, local)[:2][1]["passes"].tolist()
            == expected
        )


def test_law_8_weights_fall_and_the_targets_stays():
    net, data = Net(tiny_model()), images((9, 20, 31, 12))
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), 6)
    for p_d in (None, 0.05):
        before = torch.ones(4, dtype=F64)
        for state, done in play(WeightErosion(target=2, p_d=p_d, p_s=0.5), s):
            alpha = state.server["alpha"]
            assert (alpha <= before).all() and (alpha >= 0).all() and alpha[2] == 1
            assert WeightErosion().report(state.server, done.mix, done.cohort)[
                "weights"
            ].sum() == pytest.approx(1)
            before = alpha
        assert before.min() < 0.9


def test_law_8_between_fedavg_and_local_training():
    net, data = Net(tiny_model()), images()
    s = make_setting(net, data, Training(lr=0.1, batch_size=8), 4)
    for (a, _), (b, _) in zip(
        play(WeightErosion(p_d=0.0), s), play(FedAvg(weighting="uniform"), s), strict=True
    ):
        torch.testing.assert_close(a.server["x"], b.server["x"])
    for (a, _), (b, _) in zip(
        play(WeightErosion(target=1, p_d=1e9), s), play(LocalOnly(), s), strict=True
    ):
        torch.testing.assert_close(a.server["x"], b.clients["w"][1], rtol=1e-5, atol=1e-6)


@given(
    st.lists(st.tuples(*[st.floats(-10, 10)] * 2), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e-3, 0.3, 1e12]),
    st.floats(0, 3),
)
def test_any_updates_give_weights(updates, p_d, p_s):
    alg, n = WeightErosion(p_d=p_d, p_s=p_s), len(updates)
    g = begin(alg, Net(torch.nn.Linear(2, 1, bias=False, dtype=F64)), n).server
    delta = torch.tensor(updates, dtype=F64)
    cohort = Cohort(torch.arange(n), torch.ones(n), n, 1, 10)
    g = served(alg, g, {"delta": delta, "passes": torch.arange(n)}, cohort)
    alpha = g["alpha"]
    assert ((alpha >= 0) & (alpha <= 1)).all() and alpha[0] == 1 and g["x"].isfinite().all()
    assert torch.equal(alpha == 1, ((delta == delta[0]).all(1)) | (p_d == 0) | (alpha == 1))


def test_a_target_that_stands_still():
    """|delta_target| = 0: who stands still too keeps its weight, everybody else loses it all,
    unless nothing erodes."""
    still = ((0.0, 0.0), (0.0, 0.0), (1.0, 0.0))
    for p_d, expected in ((0.1, [1, 1, 0]), (0.0, [1, 1, 1]), (None, [1, 1, 1])):
        assert eroded(still, (10, 10, 10), 1, p_d=p_d)[0][0] == expected


def test_calibrated_the_median_client_erodes_at_80_percent():
    """Constant relative distances 1, 2, 3: the median's weight runs out after 0.8 R rounds, the
    nearest's lasts."""
    updates = ((1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (4.0, 0.0))
    found = [alpha for alpha, _ in eroded(updates, (10, 10, 10, 10), 40)]
    gone = [next((r for r, a in enumerate(found, 1) if a[i] < 1e-9), None) for i in range(4)]
    assert gone == [None, None, 32, 22]
    assert found[-1][1] == pytest.approx(1 - 40 * 0.5 / 32)


@dataclass(frozen=True)
class Broken(WeightErosion):
    """Client 1 sends NaN in round 2."""

    def train(self, down, own, clients):
        new, up, fit = super().train(down, own, clients)
        if clients.round == 2:
            up["delta"][clients.ids == 1] = math.nan
        return new, up, fit


def test_those_present_share_the_whole_weight():
    alg, one = WeightErosion(p_d=0.0), quadratics(torch.ones(3, 1), torch.zeros(3, 1))[0]
    cohort = Cohort(torch.tensor([0, 2]), torch.ones(2), 3, 1, 10)
    up = {
        "delta": torch.tensor([[1.0], [3.0]], dtype=F64),
        "passes": torch.zeros(2, dtype=torch.long),
    }
    assert served(alg, begin(alg, one, 3).server, up, cohort)["x"].tolist() == [2.0]


def test_an_absent_client_keeps_its_weight():
    net, data = Net(tiny_model()), images()
    (one, _), (two, done), (three, _) = play(
        Broken(p_d=0.05), make_setting(net, data, Training(lr=0.1, batch_size=8), 3)
    )
    assert (
        done.dropped == [1]
        and two.server["alpha"][1] == one.server["alpha"][1]
        and two.server["alpha"][2] < one.server["alpha"][2]
    )
    assert three.server["alpha"][1] < two.server["alpha"][1]
    without = play(
        Broken(p_d=0.05),
        make_setting(net, data, Training(lr=0.1, batch_size=8), 3),
        2,
        lambda r: [0, 1, 2] if r == 1 else [0, 2],
    )
    # those who are there share the whole weight
    assert torch.equal(two.server["x"], without[1][0].server["x"])


@pytest.mark.parametrize("growth", [0.0, 1.0, 4.0])
def test_calibrated_erosion_ends_at_80_percent_however_distances_grow(growth):
    alg, net = WeightErosion(), quadratics(torch.ones(4, 1), torch.zeros(4, 1))[0]
    g, gone = begin(alg, net, 4).server, None
    for round in range(1, 51):
        far = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=F64)[:, None] * (1 + growth * round / 50)
        cohort = Cohort(torch.arange(4), torch.ones(4), 4, round, 50)
        g = served(alg, g, {"delta": 1 + far, "passes": torch.zeros(4, dtype=torch.long)}, cohort)
        gone = round if gone is None and g["alpha"][2] < 1e-9 else gone
    assert gone == 40 and g["alpha"][1] > 0
