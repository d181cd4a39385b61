"""A round that runs out of memory never was.

The memory is that of a GPU or of the host.
"""

import copy

import pytest
import torch
from parts.memory import CUDA, Making, fails
from parts.states import same
from parts.user import simulation
from small import normed_model, swept

from pflcore import step
from pflcore.algorithms import FedDWA


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize(
    "algorithm", [*swept(), FedDWA(guidance="previous"), "averaged"], ids=str
)
def test_wherever_the_servers_memory_ends_the_round_never_was(algorithm, monkeypatch):
    """A round in which a request for memory fails changes nothing.

    The test refuses each request of the server and of the commit once.
    """
    averaged = {"algorithm": "feddwa", "model": normed_model, "batch_norm": "average"}
    run = simulation(
        **averaged if algorithm == "averaged" else {"algorithm": algorithm}
    )
    rounds = run.iterate()
    next(rounds)
    next(rounds)
    alg = type(run.algorithm)
    before = copy.deepcopy(run.state)
    update = alg.update
    mode = None

    def refusing(self, state, up, cohort):
        mode.__enter__()
        return update(self, state, up, cohort)

    with monkeypatch.context() as patch:  # a client fails in its training
        patch.setattr(alg, "train", fails(alg.train, 1, ConnectionError("gone")))
        with pytest.raises(ConnectionError):
            next(rounds)
    assert same(before, run.state) and before.round == run.state.round
    monkeypatch.setattr(alg, "update", refusing)
    for at in range(1, 1000):
        mode = Making(fails(type, at, torch.OutOfMemoryError(CUDA)))
        try:
            after, _ = step(run.config, run.state, torch.arange(3))
            break
        except torch.OutOfMemoryError:
            pass
        finally:
            mode.__exit__(None, None, None)
        assert same(before, run.state), at
        assert (before.round, before.void_rounds) == (
            run.state.round,
            run.state.void_rounds,
        ), at
    assert at > 1 or algorithm == "local"
    assert after.round == 3
