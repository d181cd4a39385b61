"""The state of a server after one more client has joined."""

import pytest
import torch
from small import tiny

from pflcore.algorithms import Cohort, FedAvg, FedDyn, Scaffold
from pflcore.simulation._models import with_new_client
from pflcore.simulation.round import RunConfig, initial_state, step


@pytest.mark.parametrize("alg, name", [(Scaffold(), "c"), (FedDyn(), "h")])
def test_a_newcomer_counts_in_means_over_all_clients(alg, name):
    """The newcomer's own is 0, so the mean of three becomes one of four."""
    net = tiny().net
    state = initial_state(alg, net, 3)
    state.server[name] += 4

    grown, _ = with_new_client(alg, state, net, 3, torch.arange(3))

    assert grown.server[name].eq(3).all()
    assert torch.equal(grown.server["x"], state.server["x"])


class Newness(FedAvg):
    """FedAvg that reports who is new, and looks in each of a round's hooks."""

    def _look(self, cohort):
        looks = self.__dict__.setdefault("looks", [])
        looks.append((cohort.is_new.tolist(), cohort.has_participated.tolist()))

    def send(self, state, cohort):
        self._look(cohort)
        return super().send(state, cohort)

    def update(self, state, up, cohort):
        self._look(cohort)
        return super().update(state, up, cohort)

    def report(self, state, mix, cohort):
        return {"new": cohort.is_new}


def test_a_client_is_new_in_its_first_round_alone():
    alg = Newness()
    setting = tiny()
    config = RunConfig.of(alg, setting)
    state = initial_state(alg, setting.net, setting.data.n)
    first = torch.tensor([0, 2])
    for ids, new, before in (
        (first, [True, True], [False, False, False]),
        (torch.arange(3), [False, True, False], [True, False, True]),
        (first, [False, False], [True, True, True]),
    ):
        state, outcome = step(config, state, ids)
        assert alg.looks[-2:] == [(new, before)] * 2
        # The round is over, and the cohort still knows who was new in it.
        assert alg.report(state.server, None, outcome.cohort)["new"].tolist() == new


def test_a_client_that_is_left_out_takes_its_newness_along():
    cohort = Cohort(torch.arange(4), torch.ones(4), n=4)
    new = torch.tensor([True, False, False, True])
    kept = torch.tensor([False, True, True, True])
    assert torch.equal(cohort._replace(new=new).take(kept).is_new, new[kept])
    assert torch.equal(cohort.take(kept).is_new, torch.ones(3, dtype=torch.bool))
