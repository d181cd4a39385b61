"""Tests of the steps of a round, of which only `commit` writes to the state."""

import copy
from dataclasses import dataclass

import pytest
import torch
from entry_points import held_out, sentence
from hypothesis import given
from hypothesis import strategies as st
from parts.states import same
from small import images, make_setting, normed_model, swept, tiny_model

from pflcore import Net, Training, step
from pflcore.algorithms import ALGORITHMS, BadUpload, FedAvg, VoidRound
from pflcore.simulation import Robustness
from pflcore.simulation._attacks import Adversary
from pflcore.simulation._uploads import accept, median_of
from pflcore.simulation.round import (
    RunConfig,
    commit,
    initial_state,
    serve,
    train_cohort,
)

N = 4


@pytest.mark.parametrize("name", swept())
def test_only_commit_writes_to_the_state(name):
    alg = ALGORITHMS[name](**({"k": 3} if name == "knnper" else {}))
    net = alg.prepare(Net(normed_model()))
    data = held_out(images((9, 20, 31, 20)))
    context = make_setting(net, data, Training(0.1, 10), 6, workers=1)
    adversary = Adversary("scale", [2], 3.0)
    robustness = Robustness(clip=0.01, adversary=adversary)
    config = RunConfig.of(alg, context, robustness=robustness)
    ids = torch.arange(N)
    state, _ = step(config, initial_state(alg, net, N), ids)
    before = copy.deepcopy(state)

    result = train_cohort(config, state, ids)
    result = adversary.attack_uploads(result, alg.traits, state.server)
    variances = net.variances
    result, outcome = accept(result, alg, state.server, variances=variances, clip=0.01)
    changes = serve(alg, state, result, outcome, config.averages)

    assert changes and same(state, before)
    assert not same(commit(state, changes, outcome), before)


@dataclass(frozen=True)
class Idle(FedAvg):
    """Acts in rounds without clients, and lets every other round be void."""

    lost: bool = False

    def update(self, state, up, cohort):
        raise VoidRound("nobody is wanted")

    def update_without_clients(self, state, cohort):
        return {"x": torch.full_like(state["x"], torch.inf if self.lost else 2.0)}


def idle_config(lost):
    alg = Idle(lost=lost)
    context = make_setting(Net(tiny_model()), images((9, 20)), Training(0.1, 10), 6)
    return RunConfig.of(alg, context), initial_state(alg, context.net, 2)


def test_a_round_without_clients_is_void_where_its_state_is_not_finite():
    config, state = idle_config(lost=True)
    x = state.server["x"].clone()
    state, outcome = step(config, state, torch.arange(0))

    assert outcome.void and outcome.non_finite_state == ["x"]
    assert torch.equal(state.server["x"], x) and (state.round, state.void_rounds) == (
        1,
        1,
    )


def test_a_round_without_clients_leaves_the_number_of_void_rounds():
    config, state = idle_config(lost=False)
    state, _ = step(config, state, torch.arange(2))
    state, outcome = step(config, state, torch.arange(0))

    assert not outcome.void and (state.round, state.void_rounds) == (2, 1)
    assert (state.server["x"] == 2).all()


def test_refusing_the_upload_of_nobody_is_an_error():
    @dataclass(frozen=True)
    class Refusing(FedAvg):
        def update(self, state, up, cohort):
            raise BadUpload({7: "it is another one."})

    alg = Refusing()
    context = make_setting(Net(tiny_model()), images((9, 20)), Training(0.1, 10), 6)
    config = RunConfig.of(alg, context)
    with sentence("update: BadUpload: expected numbers of clients of the round.*7"):
        step(config, initial_state(alg, context.net, 2), torch.arange(2))


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=9))
def test_the_median_of_lengths_has_the_bits_of_a_quantile(lengths):
    values = torch.tensor(lengths, dtype=torch.float64)
    assert torch.equal(median_of(values), values.quantile(0.5))
