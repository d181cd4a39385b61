"""Noise that hides a client, and how well it does.

Symbols: z noise multiplier, q sampling rate, C largest length of an update.
"""

from dataclasses import dataclass
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from entry_points import held_out
from hypothesis import given
from small import images
from torch import nn

from examples import examples
from pflcore import Simulation, Training
from pflcore.algorithms import ALGORITHMS, Cohort, FedAdam, FedAvg, Scaffold
from pflcore.lab.results import read
from pflcore.lab.results.table import table
from pflcore.privacy import epsilon, noise_multiplier
from pflcore.robust import Mean, Private
from pflcore.simulation import record as records
from pflcore.simulation import round as by_hand

# z, q, rounds, delta, and the epsilon that the accountant of Opacus 1.6.0 prints.
OPACUS = [
    (1.1, 0.01, 1000, 1e-5, 1.7117700912203435),
    (0.7, 0.1, 100, 1e-5, 16.419708820201084),
    (4.0, 1.0, 50, 1e-6, 10.089443168745937),
    (1.0, 0.3, 200, 1e-5, 37.19752415107527),
    (10.0, 0.02, 5000, 1e-6, 0.6254003538036087),
]


@pytest.mark.parametrize("z, q, rounds, delta, want", OPACUS)
def test_epsilon_is_that_of_another_accountant(z, q, rounds, delta, want):
    # Opacus minimizes over orders up to 63, so that its bound may be the larger one.
    got = epsilon(z, q, rounds, delta)
    assert got <= want * (1 + 1e-9)
    assert got == pytest.approx(want, rel=1e-6)


def test_without_sampling_it_is_the_gaussian_mechanism():
    """With q = 1 the RDP of an order a is a / (2 z^2) (Mironov 2017, table II)."""
    orders = np.arange(1.1, 11, 0.1)
    rdp = 7 * orders / (2 * 1.5**2)
    bounds = rdp - np.log(1e-5 * orders) / (orders - 1) + np.log1p(-1 / orders)
    assert epsilon(1.5, 1.0, 7, 1e-5) == pytest.approx(bounds.min(), rel=1e-9)


@examples(10)
@given(
    st.floats(0.3, 20), st.floats(0.001, 1), st.integers(1, 500), st.floats(1e-8, 0.1)
)
def test_epsilon_falls_with_noise_and_grows_with_rounds(z, q, rounds, delta):
    least = epsilon(z, q, rounds, delta)
    assert least >= 0
    assert epsilon(z * 1.1, q, rounds, delta) <= least * (1 + 1e-9)
    assert epsilon(z, q, rounds + 1, delta) >= least * (1 - 1e-9)
    assert epsilon(z, min(1.0, q * 1.1), rounds, delta) >= least * (1 - 1e-9)


@pytest.mark.deep("it takes a second")
@pytest.mark.parametrize("wanted", [0.5, 30.0])
def test_the_noise_for_an_epsilon_reaches_it_and_no_less_does(wanted):
    z = noise_multiplier(wanted, 0.1, 100, 1e-5)
    assert epsilon(z, 0.1, 100, 1e-5) <= wanted < epsilon(z * 0.998, 0.1, 100, 1e-5)


@pytest.mark.deep("it takes a second")
def test_a_loose_epsilon_needs_the_least_noise():
    assert noise_multiplier(1e9, 0.02, 1, 1e-5) == 0.01
    assert epsilon(1e-4, 0.02, 1, 1e-5) > 1e6


@pytest.mark.deep("it takes a second")
def test_what_is_no_probability_is_refused():
    with pytest.raises(ValueError, match=r"delta: expected .* got 1\.5"):
        epsilon(1.0, 0.1, 10, 1.5)
    with pytest.raises(ValueError, match="sampling_rate"):
        epsilon(1.0, 0.0, 10, 1e-5)
    with pytest.raises(ValueError, match="epsilon"):
        noise_multiplier(1e-9, 1.0, 10**6, 1e-9)


# the server's sum --------------------------------------------------------------


def cohort(s, n, round=1, seed=0):
    return Cohort(torch.arange(s), torch.arange(1, s + 1), n, round, seed=seed)


def private(z, clip_norm=1.0, expected_clients=None):
    return FedAvg(mean=Private(clip_norm, z, expected_clients))


@given(st.data())
def test_the_sum_has_clipped_rows_and_a_fixed_divisor(data):
    s = data.draw(st.integers(1, 6))
    clip_norm = data.draw(st.floats(0.1, 10))
    divisor = data.draw(st.floats(1, 20))
    delta = torch.randn(s, 9, generator=torch.Generator().manual_seed(s)).double()
    state = {"x": torch.ones(9, dtype=torch.float64)}
    alg = private(0.0, clip_norm, expected_clients=divisor)

    changes, _ = alg.update(state, {"delta": delta}, cohort(s, 9))

    short = [row * min(1.0, clip_norm / float(row.norm())) for row in delta]
    want = state["x"] + torch.stack(short).sum(0) / divisor
    torch.testing.assert_close(changes["x"], want, rtol=1e-12, atol=1e-12)


def test_one_client_more_moves_the_sum_by_at_most_the_clip():
    delta = torch.randn(5, 40) * torch.tensor([0.01, 1, 100, 1e20, 3])[:, None]
    state = {"x": torch.zeros(40)}
    alg = private(1.0, 2.0, expected_clients=4.0)
    full = alg.update(state, {"delta": delta}, cohort(5, 8))[0]["x"]
    less = alg.update(state, {"delta": delta[:4]}, cohort(4, 8))[0]["x"]
    assert float((full - less).norm()) * 4 <= 2.0 * (1 + 1e-5)


def test_the_noise_is_normal_and_another_in_every_round_and_seed():
    size = 40_000
    state = {"x": torch.zeros(size)}
    alg = private(1.5, 2.0, expected_clients=3.0)
    silent = {"delta": torch.zeros(2, size)}
    draws = [
        alg.update(state, silent, cohort(2, 9, round, seed))[0]["x"]
        for round, seed in [(1, 0), (2, 0), (1, 1), (1, 0)]
    ]
    assert torch.equal(draws[0], draws[3])
    for draw in draws:
        assert float(draw.std()) == pytest.approx(1.5 * 2.0 / 3.0, rel=0.02)
        assert abs(float(draw.mean())) < 0.02
    both = torch.corrcoef(torch.stack(draws[:3]))
    assert float((both - torch.eye(3)).abs().max()) < 0.03


def takes_dp(name):
    try:
        return ALGORITHMS[name](mean=Private(1.0, 1.0))
    except (TypeError, ValueError):
        return None


def test_which_algorithms_take_it():
    names = {name for name in ALGORITHMS if takes_dp(name)}
    assert {"fedavg", "fedprox", "fedadam", "fedper"} <= names
    assert not names & {"scaffold", "waffle", "qfedavg", "clustered_fl", "local"}


def test_refusals():
    with pytest.raises(ValueError, match="mean: expected one without a length"):
        Scaffold(mean=Private(1.0, 1.0))
    assert FedAdam(mean=Private(1.0, 1.0)).traits.batch_norm


@pytest.mark.parametrize("name", sorted(filter(takes_dp, ALGORITHMS)))
def test_no_other_upload_reaches_the_server(name):
    alg = takes_dp(name)
    state = alg.init(torch.zeros(7), 3)
    changes, _ = alg.update(state, {"delta": torch.ones(2, 7)}, cohort(2, 3))
    assert all(torch.isfinite(new.float()).all() for new in changes.values())


# cohorts ------------------------------------------------------------------------


def play(algorithm, participation, rounds=12, **options):
    data = held_out(images((20,) * 6))
    training = Training(0.1, 10)
    return Simulation(
        algorithm,
        nn.Linear(6, 4),
        data,
        training,
        rounds=rounds,
        participation=participation,
        **options,
    )


def draw(run, round):
    rule = (run.participation, run.eligible_clients, run.sampling)
    return by_hand.sample_cohort(run.config, round, *rule).tolist()


@pytest.mark.deep("it takes a second")
def test_clients_join_independently_with_their_chance():
    run = play("fedavg", 0.3, 1, sampling="poisson")
    cohorts = [draw(run, round) for round in range(1, 2001)]
    joined = torch.zeros(2000, 6)
    for row, ids in zip(joined, cohorts, strict=True):
        row[ids] = 1
    deviation = (0.3 * 0.7 / 2000) ** 0.5
    assert float((joined.mean(0) - 0.3).abs().max()) < 4 * deviation
    together = torch.corrcoef(joined.T) - torch.eye(6)
    assert float(together.abs().max()) < 4 / 2000**0.5
    assert {len(ids) for ids in cohorts} >= {0, 1, 2, 3, 4}
    again = play("fedavg", 0.3, 1, sampling="poisson")
    assert draw(again, 7) == cohorts[6]


def test_a_round_without_clients_changes_nothing_but_noise(tmp_path):
    """With noise the server's model moves all the same; the record is a whole one."""
    with records.RecordWriter(tmp_path / "silent.jsonl") as record:
        silent = record.run({}, play("fedavg", 0.15, sampling="poisson").run)
    empty = [record["round"] for record in silent.rounds if not record["cohort"]]
    assert empty, "the seed draws no empty cohort"
    assert not any(record["void"] for record in silent.rounds)
    assert read(tmp_path / "silent.jsonl")[0].rounds == silent.rounds

    algorithm = private(0.5, expected_clients=6 * 0.15)
    run = play(algorithm, 0.15, sampling="poisson")
    models = [run.state.server["x"]]
    run.run(lambda *_: models.append(run.state.server["x"].clone()))
    for before, after in pairwise(models):
        assert not torch.equal(before, after)
    assert not any(record["void"] for record in run.history.rounds)


class Broken(FedAvg):
    def train(self, down, client_state, clients):
        client_state, up, fit = super().train(down, client_state, clients)
        return client_state, {"delta": up["delta"] * torch.nan}, fit


@pytest.mark.parametrize("ids", [[0], [0, 1]])
def test_a_round_whose_clients_are_left_out_is_one_without_clients(ids):
    """Else a model that stands still would tell that nobody else was there."""
    models = []
    for cohort in ([], ids):
        torch.manual_seed(0)
        algorithm = Broken(mean=Private(1.0, 0.5, 3.0))
        run = play(algorithm, 0.5, sampling="poisson")
        clients = torch.tensor(cohort, dtype=torch.int64)
        state, outcome = by_hand.step(run.config, run.state, clients)
        assert outcome.dropped == cohort and not outcome.void
        models.append(state.server["x"])

    assert torch.equal(*models) and not torch.equal(models[0], run.config.net.w0)


def test_noise_needs_cohorts_that_its_privacy_assumes():
    algorithm = private(0.5, expected_clients=3.0)
    with pytest.raises(ValueError, match="sampling: expected 'poisson' with a priv"):
        play(algorithm, 0.5)
    with pytest.raises(ValueError, match="sampling"):
        play(algorithm, 0.5, sampling="size")
    with pytest.raises(ValueError, match=r"expected_clients: expected 1\.8"):
        play(algorithm, 0.3, sampling="poisson")
    play(algorithm, 0.5, sampling="poisson")
    with pytest.warns(UserWarning, match=r"0\.6 clients take part"):
        play("fedavg", 0.1, sampling="poisson")
    play(private(0.5), 1.0)


@dataclass(frozen=True)
class Half(Mean):
    """A mean of one's own."""

    def weigh(self, up):
        return up.rows, up.shares / 2


def test_a_run_says_what_its_noise_hides(tmp_path):
    noisy = private(1.2, 0.5, expected_clients=3)
    run = play(noisy, 0.5, rounds=4, sampling="poisson")
    history = run.run()
    want = epsilon(1.2, 0.5, 4, 1 / 6)
    assert history.privacy() == (want, 1 / 6)
    assert history.privacy(1e-5) == (epsilon(1.2, 0.5, 4, 1e-5), 1e-5)
    with records.RecordWriter(tmp_path / "record.jsonl") as record:
        for line in history.lines():
            record.write(line)
    assert f"fedavg: epsilon = {want:.3g} at delta = 0.167." in table(read(tmp_path))
    assert "at delta = 1e-05." in table([history], privacy_delta=1e-5)
    own = play(FedAvg(mean=Half()), 0.5, rounds=1).run()
    assert own.privacy() is None
    plain = play("fedavg", 0.5, rounds=1).run()
    assert plain.privacy() is None and "epsilon" not in table([plain])


@pytest.mark.deep("it takes a second")
def test_the_largest_noise_is_found():
    wanted = epsilon(800, 1.0, 10_000, 1e-5)
    assert 800 <= noise_multiplier(wanted, 1.0, 10_000, 1e-5) < 801
