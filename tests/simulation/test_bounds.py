"""Rounds follow their rules exactly at the bounds of the rules.

The rules: which clients are clipped, the median of an even number of norms, how many
clients take part, and how many void rounds in a row end a run.
"""

import pytest
import torch
from parts.user import simulation
from small import F64, images, points

from pflcore import Evaluation, FedAvg, Robustness, step
from pflcore.algorithms import VoidRound
from pflcore.simulation.round import RunConfig, initial_state


class Lengths(FedAvg):
    """Client i uploads an update of length 2^i."""

    def train(self, down, client_state, clients):
        fit = clients.fit(down["x"])
        return client_state, {"delta": 2.0 ** clients.ids[:, None].to(fit.w)}, fit


def played(n, clip=None):
    s = points([0.0] * n)
    setup = RunConfig.of(Lengths(), s, robustness=Robustness(clip=clip))
    state, done = step(setup, initial_state(Lengths(), s.net, n), torch.arange(n))
    return state.server["x"], done


@pytest.mark.parametrize(
    "clip, clipped", [(8.0, []), (7.99, [3]), (4.0, [3]), (0.5, [0, 1, 2, 3])]
)
def test_an_update_of_exactly_the_clip_is_not_clipped(clip, clipped):
    x, done = played(4, clip)

    assert done.clipped == clipped
    want = sum(min(2.0**i, clip) for i in range(4)) / 4
    torch.testing.assert_close(x, torch.tensor([want], dtype=F64))


@pytest.mark.parametrize("n, middle", [(3, 2.0), (4, 3.0), (5, 4.0)])
def test_the_median_of_an_even_number_is_between_two(n, middle):
    assert played(n)[1].relative_update_norm == [2.0**i / middle for i in range(n)]


def test_nobody_is_far_from_the_median_of_two():
    assert played(2)[1].relative_update_norm is None


@pytest.mark.parametrize(
    "n, participation, count",
    [
        (5, 0.5, 3),
        (3, 0.5, 2),
        (10, 0.25, 3),
        (10, 0.24, 2),
        (5, 0.1, 1),
        (4, 0.1, 1),
        (4, 1.0, 4),
    ],
)
def test_half_a_client_takes_part(n, participation, count):
    """A cohort has floor(participation * n + 0.5) clients, at least one."""
    run = simulation(
        data=images((6,) * n), rounds=1, participation=participation, every=0
    )

    assert len(run.run().rounds[0]["cohort"]) == count


@pytest.mark.parametrize(
    "every, seen", [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (6, [5])]
)
def test_the_last_round_is_always_evaluated(every, seen):
    run = simulation(rounds=5, evaluation=Evaluation(every=every))

    assert [r["round"] for r in run.run().rounds if r["eval"]] == seen


class Fails(FedAvg):
    """Makes the rounds `bad` void."""

    bad = ()

    def update(self, state, up, cohort):
        if cohort.round in self.bad:
            raise VoidRound("It is a bad round.")
        return super().update(state, up, cohort)


@pytest.mark.parametrize(
    "bad, rounds",
    [
        ((2, 3), 9),
        ((2, 3, 5, 6), 9),  # two and two, with one between
        ((2, 3, 4), 4),
        ((2, 4, 5, 6, 7), 6),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_three_void_rounds_in_a_row_end_a_run(bad, rounds):
    algorithm = type("Failing", (Fails,), {"bad": bad})

    history = simulation(algorithm, rounds=9, every=0).run()

    assert len(history.rounds) == rounds
    assert [r["round"] for r in history.rounds if r["void"]] == [
        r for r in bad if r <= rounds
    ]
    assert (history.stopped is None) is (rounds == 9)
