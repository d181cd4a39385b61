"""Tests of rounds and evaluations in parts.

For each algorithm, the bits of a part are those of the whole.
"""

from functools import lru_cache

import pytest
import torch
from parts.company import EVERYBODY, differing, simulation
from small import swept

from pflcore import Clients
from pflcore.algorithms import ALGORITHMS, SharedRows
from pflcore.simulation import _evaluate as evaluation
from pflcore.simulation._ranks import Ranks
from pflcore.simulation._state import client_rows
from pflcore.simulation.round import sample_cohort, step
from pflcore.train import _schedule
from pflcore.train._schedule import assign_blocks, split_by_block

CASES = [("chain", "mlp", "Tanh"), ("loop", "mlp", "SiLU"), ("vmap", "conv", "SiLU")]
MORE_CASES = [
    ("loop", "batch norm", "SiLU"),
    ("vmap", "batch norm", "Sigmoid"),
    ("vmap", "mlp", "ELU"),
]
QUICK = ("factorized_waffle", "fedfomo", "knnper")


def methods_and_cases():
    """Each method with each case.

    The quick suite has a few methods. The deep one has all cases of these, and one case
    of half of the other methods. The long one has the rest.
    """
    deep = pytest.mark.deep("all engines")
    of_others = pytest.mark.deep("all algorithms", one_in=2)
    long = pytest.mark.long("all algorithms on all engines")
    for number, name in enumerate(sorted(ALGORITHMS)):
        if name in QUICK:
            marks = dict.fromkeys(CASES, ()) | dict.fromkeys(MORE_CASES, deep)
        else:
            marks = dict.fromkeys([*CASES, *MORE_CASES], long)
            marks[CASES[number % len(CASES)]] = of_others
        for case, mark in marks.items():
            yield pytest.param(name, case, marks=mark, id="-".join((name, *case)))


@lru_cache(maxsize=1)  # the tests do not change the run
def played(name, case):
    """A run after two rounds."""
    run = simulation(*case, name)
    play = run.iterate()
    for _ in range(2):
        next(play)
    return run


def of_round(setup, state, ids, at, block):
    """The tensors of a round for the clients at places `at`.

    They are computed as a part of the cohort `ids`.
    """
    cohort = setup.cohort(ids, state.round + 1, state.participated)
    down = {
        k: rows_at(v, at) for k, v in setup.algorithm.send(state.server, cohort).items()
    }
    own = client_rows(setup, state, ids[at], down)
    part = Clients(setup, ids[at], cohort.round, state.buffers[ids[at]], block[at])
    kept, up, fit = setup.algorithm.train(down, own, part)
    each = {f"own.{k}": v for k, v in kept.items()} | {
        f"up.{k}": v for k, v in up.items()
    }
    return each | {"batch norm": fit.buffers, "loss": fit.loss}


def rows_at(value, at):
    """The rows of a download for some clients.

    A row that all clients share stays one row.
    """
    if isinstance(value, SharedRows):
        return value._replace(index=value.index[at])
    if value.stride(0) == 0:
        return value[:1].expand(len(at), *value.shape[1:])
    return value[at]


def cut_anywhere(engine):
    """Places of parts, for engines that compute each client by itself."""
    assert engine != "vmap"
    return [
        torch.tensor([0]),
        torch.tensor([1, 2, 5, 9]),
        torch.tensor([3, 4, 6, 7, 8, 10]),
    ]


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name, case", [*methods_and_cases()])
def test_a_round_in_parts_has_the_bits_of_the_whole(name, case):
    run = played(name, case)
    ids = sample_cohort(run.config, 3)
    block = assign_blocks(run.config, ids)
    whole = of_round(run.config, run._state, ids, EVERYBODY, block)
    # An algorithm that no chain trains is trained by vmap.
    inside = run.config.engine.autograd == "vmap"
    for at in (
        split_by_block(EVERYBODY, block)
        if inside
        else cut_anywhere(run.config.engine.autograd)
    ):
        part = of_round(run.config, run._state, ids, at.sort().values, block)
        assert differing(part, whole, at.sort().values) == []


@pytest.mark.deep("together they take seconds", quick=8)
@pytest.mark.parametrize("case", [("loop", "mlp", "SiLU"), ("auto", "conv", "ReLU")])
@pytest.mark.parametrize(
    "name", swept(quick=("l2c", "fedfomo", "factorized_waffle", "qfedavg"))
)
def test_another_cohort_changes_no_bit_of_a_clients_work(name, case):
    """A client's bits depend on its cohort only under vmap.

    Some clients took part in the last round, the others in the round before.
    """
    run = simulation(*case, name)
    state = run.state
    for ids in (EVERYBODY, EVERYBODY[:4]):
        state, _ = step(run.config, state, ids)
    whole = of_round(run.config, state, EVERYBODY, EVERYBODY, EVERYBODY)
    for ids in map(torch.tensor, ([1], [0, 2, 7], [3, 5])):
        part = of_round(run.config, state, ids, torch.arange(len(ids)), ids)
        assert differing(part, whole, ids) == []


@pytest.mark.deep("together they take seconds", quick=3)
@pytest.mark.parametrize("name, case", [*methods_and_cases()])
def test_an_evaluation_in_parts_has_the_bits_of_the_whole(name, case, monkeypatch):
    # A small limit gives several blocks where one model is evaluated for all clients.
    monkeypatch.setattr(_schedule, "SHARED_BATCH_SAMPLES", 20)
    run = played(name, case)
    block = assign_blocks(run.config, EVERYBODY, run.config.data.size("test"))

    def values(ids):
        return evaluation._evaluate_part(
            run.config, run._state, "test", ids, None, block[ids]
        )

    whole = values(EVERYBODY)
    for at in split_by_block(EVERYBODY, block):
        ids = at.sort().values
        assert differing(values(ids), whole, ids) == []


@pytest.mark.deep("together they take seconds", quick=6)
@pytest.mark.parametrize("name, case", [*methods_and_cases()])
def test_workers_change_no_bit_of_a_run(name, case):
    one, two = (simulation(*case, name, workers=n).run() for n in (1, 2))
    for a, b in zip(one.rounds, two.rounds, strict=True):
        assert a["eval"] == b["eval"] and a["train_loss"] == b["train_loss"]
    for key, value in one.state.server.items():
        assert torch.equal(value, two.state.server[key]), key


@pytest.mark.parametrize(
    ("by_largest", "of_the_second"),
    [(False, range(3, 9)), (True, [*range(3), 6, 7, 8])],
)
def test_ranks_share_blocks_by_their_work(by_largest, of_the_second):
    num_samples = torch.tensor([4, 4, 4, 6, 1, 1, 3, 3, 3])
    blocks = torch.arange(9) // 3
    shares = Ranks(0, 2).share(num_samples, blocks, by_largest=by_largest)
    assert shares[1].tolist() == [*of_the_second]
    assert torch.cat(shares).sort().values.tolist() == [*range(9)]
