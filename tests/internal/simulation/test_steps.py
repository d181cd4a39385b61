"""Tests that of a round's steps only `commit` writes to the state."""

import copy

import pytest
import torch
from entry_points import held_out
from parts.states import same
from small import images, make_setting, normed_model, swept

from pflcore import Net, Training, step
from pflcore.algorithms import ALGORITHMS
from pflcore.simulation import Robustness
from pflcore.simulation._attacks import Adversary
from pflcore.simulation._uploads import accept
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
