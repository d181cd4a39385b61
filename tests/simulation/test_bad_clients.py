"""A bad client harms no other client, under every algorithm.

`docs/trust.md` states the contract. The round goes on, or it stops with one sentence.
The states of the server and of the honest clients stay finite. A round changes the
whole state or nothing.
"""

import copy
import re

import pytest
import torch
from entry_points import held_out
from parts.states import same
from small import SIX, images, make_setting, swept, tiny_model

from pflcore import Net, Training, evaluate, step
from pflcore.algorithms import ALGORITHMS, FedAvg, Stop
from pflcore.robust import FLTrust, Median
from pflcore.simulation.round import RunConfig, initial_state

DEFENDED = {
    "fedavg, median": FedAvg(mean=Median()),
    "fedavg, fltrust": FedAvg(mean=FLTrust(0)),
}
N, BAD = 4, 2


def spoilt(alg, value, bad):
    """The algorithm with `value` everywhere in what client `bad` uploads."""

    class Spoilt(type(alg)):
        def train(self, down, client_state, clients):
            client_state, up, fit = super().train(down, client_state, clients)
            for v in up.values():
                if v.is_floating_point():
                    v[clients.ids == bad] = value
            return client_state, up, fit

    return Spoilt(**vars(alg))


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("name", swept([*ALGORITHMS, *DEFENDED], (*SIX, *DEFENDED)))
@pytest.mark.parametrize("value", [1e30, 0.0, torch.inf])
def test_a_bad_upload(name, value):
    """A bad upload leaves the state finite and drops one client.

    After a huge finite upload (1e30) the round may be void, an honest client may have
    an infinite loss, and the algorithm may end the run.
    """
    alg = DEFENDED.get(name) or ALGORITHMS[name](
        **({"k": 3} if name == "knnper" else {})
    )
    data = held_out(images((9, 20, 31, 20)))
    s = make_setting(
        alg.prepare(Net(tiny_model())), data, Training(0.1, 10), 6, workers=1
    )
    for bad in {BAD, *alg.traits.required_clients}:
        state = initial_state(alg, s.net, N)
        config = RunConfig.of(spoilt(alg, value, bad), s)
        for _ in range(3):
            before = copy.deepcopy(state)
            try:
                state, done = step(config, state, torch.arange(N))
            except Stop as stop:  # the algorithm knows that further rounds are useless
                assert re.fullmatch(r"((?!\. ).)+\.", str(stop)), stop
                assert value == 1e30 and same(state, before)
                break
            is_dropped = value == torch.inf and name != "local"  # local uploads nothing
            # Whoever trains has taken a step, and its h is above 0.
            is_dropped |= value == 0 and name in ("fednova", "mocha", "qfedavg")
            assert value == 1e30 or done.dropped == [bad] * is_dropped
            if done.void:
                assert same(state, before) and (
                    value == 1e30 or bad in alg.traits.required_clients
                )
            tensors = [*state.server.values(), *state.clients.values(), state.buffers]
            assert all(v.isfinite().all() for v in tensors if v.is_floating_point())
        loss = evaluate(RunConfig.of(alg, s), state)["loss"][torch.arange(N) != bad]
        assert value == 1e30 or loss.isfinite().all()
        assert name != "fedavg, median" or (loss < 2).all()
