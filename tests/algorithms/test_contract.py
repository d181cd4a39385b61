"""What every algorithm of the registry owes its users: the checks of `pflcore.testing`, and what
only we promise."""

from functools import cache
from typing import Any

import pytest
import torch
from small import swept

from pflcore import Training, evaluate
from pflcore.algorithms import ALGORITHMS
from pflcore.testing import Case, check

# where the defaults do not fit a federation of four small clients
OPTIONS: dict[str, dict[str, Any]] = {
    "knnper": {"k": 3},
    "fedala": {"sample": 1.0},  # else it draws, and nothing is asked of its clients' numbers
}
WEIGHTS = {"waffle", "weight_erosion"}  # with mixing weights in the record
# down, up
MODELS_SENT = {
    "fedavg": (1, 1),
    "fedprox": (1, 1),
    "scaffold": (2, 2),
    "waffle": (2, 2),
    "apfl": (1, 1),
    "local": (0, 0),
}

every = pytest.mark.parametrize("name", swept())


def algorithm(name):
    return ALGORITHMS[name](**OPTIONS.get(name, {}))


@cache
def case_of(name):
    return Case(algorithm(name))


@every
def test_the_contract(name):
    check(algorithm(name))


@every
def test_a_client_that_breaks_is_dropped_and_counted(name):
    case = case_of(name)
    setup = case.breaking([1])
    play = case.play(setup, [range(4)] * 2)
    for done in play.done:
        assert done.dropped == [1] and not done.void and done.ids == [0, 1, 2, 3]
        assert done.train_loss is None or torch.tensor(done.train_loss).isfinite()
    assert evaluate(setup, play.last)["loss"][[0, 2, 3]].isfinite().all()


@every
def test_where_everybody_breaks_the_round_is_void(name):
    case = case_of(name)
    play = case.play(case.breaking(range(4)), [range(4)] * 2)
    assert all(done.void and done.dropped == [0, 1, 2, 3] for done in play.done)


@pytest.mark.parametrize("name", sorted(MODELS_SENT))
def test_as_many_models_are_sent_as_the_docstring_says(name):
    case = case_of(name)
    (done,) = case.play(case.setup(), [(0, 1, 3)]).done
    one = 3 * case.net.size * 8
    assert (done.bytes_down, done.bytes_up) == tuple(one * m for m in MODELS_SENT[name])


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_mixing_weights_follow_the_clients(name):
    case, order = case_of(name), [2, 0, 3, 1]

    def weights(numbers, rounds, **options):
        setup = case.renumbered(numbers, numbers[0] if len(numbers) == 1 else 1, **options)
        played = case.play(setup, [range(len(numbers))] * rounds)
        done = played.done[-1]
        return setup.algorithm.report(played.last.server, done.mix, done.cohort)["weights"]

    training = Training(lr=0.1, batch_size=100, epochs=2)
    one, two = (weights(numbers, 4, training=training) for numbers in (list(range(4)), order))
    torch.testing.assert_close(one[order], two, rtol=1e-7, atol=1e-9)
    assert weights([2], 3).tolist() == [1]


@every
def test_clients_share_no_memory(name):
    case = case_of(name)
    state = case.play(case.setup(), ()).last
    for k, v in state.clients.items():
        assert all(torch.equal(v[0], v[i]) for i in range(4)), k
        v[0].fill_(5 if v.dtype != torch.bool else True)
        assert v.shape[1:].numel() == 0 or not torch.equal(v[0], v[1]) or v.dtype == torch.bool, k
        assert k not in state.server or not torch.equal(state.server[k], v)
