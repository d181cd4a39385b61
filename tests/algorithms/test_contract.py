"""What every algorithm of the registry owes its users: the checks of `pflcore.testing`, and what only we promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pflcore import Training, evaluate
from pflcore.algorithms import ALGORITHMS, FedAvg
from pflcore.testing import CHECKS, Case

OPTIONS: dict[str, dict[str, Any]] = {  # where the defaults do not fit a federation of four small clients
    "knnper": {"k": 3},
    "fedala": {"sample": 1.0},  # else it draws, and nothing is asked of its clients' numbers
}
WEIGHTS = {"waffle", "weight_erosion"}  # with mixing weights in the record
MODELS_SENT = {"fedavg": (1, 1), "fedprox": (1, 1), "scaffold": (2, 2), "waffle": (2, 2), "apfl": (1, 1), "local": (0, 0)}  # down, up

every = pytest.mark.parametrize("name", sorted(ALGORITHMS))


def algorithm(name: str, **more: Any) -> FedAvg:
    return ALGORITHMS[name](**OPTIONS.get(name, {}), **more)


@every
@pytest.mark.parametrize("check", CHECKS)
def test_the_contract(name: str, check: str) -> None:
    CHECKS[check](Case(algorithm(name)))


@every
def test_a_client_that_breaks_is_dropped_and_counted(name: str) -> None:
    case = Case(algorithm(name))
    s = case.setting(case.breaking([1]))
    state, rounds = case.play(s, 2)
    for done in rounds:
        assert done.dropped == [1] and not done.void and done.ids == [0, 1, 2, 3]
        assert done.train_loss is None or torch.tensor(done.train_loss).isfinite()
    assert evaluate(case.given, state, s)["loss"][[0, 2, 3]].isfinite().all()


@every
def test_where_everybody_breaks_the_round_is_void(name: str) -> None:
    case = Case(algorithm(name))
    _, rounds = case.play(case.setting(case.breaking(range(4))), 3)
    assert all(done.void and done.dropped == [0, 1, 2, 3] for done in rounds)


@pytest.mark.parametrize("name", sorted(MODELS_SENT))
def test_as_many_models_are_sent_as_the_docstring_says(name: str) -> None:
    case = Case(algorithm(name))
    s = case.setting()
    _, (done,) = case.play(s, 1, [0, 1, 3])
    one = 3 * s.net.size * 8
    assert (done.bytes_down, done.bytes_up) == tuple(one * m for m in MODELS_SENT[name])


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_mixing_weights_follow_the_clients(name: str) -> None:
    case, order = Case(algorithm(name)), [2, 0, 3, 1]
    one, two = case.moved_to(1), case.moved_to(order.index(1))
    training = Training(lr=0.1, batch_size=100, epochs=2)
    a, _ = case.play(case.setting(training=training), 4, alg=one)
    b, _ = case.play(case.setting(case.data.subset(order), training=training), 4, alg=two)
    torch.testing.assert_close(one.report(a.g)["weights"][order], two.report(b.g)["weights"], rtol=1e-7, atol=1e-9)
    alone = case.moved_to(0)
    state, _ = case.play(case.setting(case.data.subset([2])), alg=alone)
    assert alone.report(state.g)["weights"].tolist() == [1]


@every
def test_clients_share_no_memory(name: str) -> None:
    case = Case(algorithm(name))
    state, _ = case.play(case.setting(), 0)
    for k, v in state.own.items():
        assert all(torch.equal(v[0], v[i]) for i in range(4)), k
        v[0].fill_(5 if v.dtype != torch.bool else True)
        assert v.shape[1:].numel() == 0 or not torch.equal(v[0], v[1]) or v.dtype == torch.bool, k
        assert k not in state.g or not torch.equal(state.g[k], v)
