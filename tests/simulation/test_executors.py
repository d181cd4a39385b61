"""Whoever computes the clients of a cohort, the run has the same bits."""

import logging

import pytest
import torch
from parts.ranks import digest_records, digest_tensors, make_simulation, tensors_of

from pflcore import Hardware, Simulation
from pflcore.simulation.executor import InProcess, OneByOne

ALGORITHMS = ["fedavg", "ditto", "feddwa", "apfl", "l2c", "waffle"]


class Backwards:
    """Computes the blocks of a cohort one by one, the last one first."""

    def __init__(self):
        self.computed = []

    def run(self, cohort_work):
        """The rows of all clients, in the order of the cohort."""
        rows = {}
        for block in cohort_work.block_numbers.unique().flip(0):
            positions = (cohort_work.block_numbers == block).nonzero()[:, 0]
            for name, tensor in cohort_work.compute(positions).items():
                empty = tensor.new_empty(len(cohort_work.ids), *tensor.shape[1:])
                rows.setdefault(name, empty)[positions] = tensor
            self.computed += cohort_work.ids[positions].tolist()
        return rows


def play(algorithm, executor, engine):
    """The history of a run of three rounds by an executor."""
    case = {"algorithm": algorithm, "model": "batch_norm", "participation": 0.7}
    plain = make_simulation(case)
    simulation = Simulation(
        plain.algorithm,
        plain.model,
        plain.data,
        plain.training,
        rounds=3,
        participation=0.7,
        seed=1,
        hardware=Hardware(
            engine=engine, workers=1, clients_per_block=2, executor=executor
        ),
    )
    return simulation.run()


def assert_equal_runs(got, want):
    assert digest_records(got.rounds) == digest_records(want.rounds)
    assert digest_tensors(tensors_of(got.state)) == digest_tensors(
        tensors_of(want.state)
    )


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_order_of_blocks_changes_no_bit(algorithm, engine):
    executor = Backwards()

    got = play(algorithm, executor, engine)

    assert_equal_runs(got, play(algorithm, InProcess(), engine))
    assert len(executor.computed) == 3 * (5 + 7)  # trained and evaluated clients


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_by_one_has_the_bits_of_the_loop(algorithm):
    got = play(algorithm, OneByOne(), "auto")

    assert_equal_runs(got, play(algorithm, None, "loop"))


def test_one_by_one_logs_each_client(caplog):
    with caplog.at_level(logging.DEBUG, logger="pflcore"):
        history = play("fedavg", OneByOne(), "auto")

    for client in history.rounds[2]["cohort"]:
        start = f"the training of round 3, client {client}: "
        assert any(start in line for line in caplog.messages)


def test_an_error_of_a_client_is_raised():
    def fail(cohort_work):
        raise ValueError("the site is closed")

    executor = Backwards()
    executor.run = fail

    with pytest.raises(ValueError, match="the site is closed"):
        play("fedavg", executor, "loop")
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("executor", [3, "one_by_one", OneByOne], ids=repr)
def test_what_is_no_executor_is_refused(executor):
    with pytest.raises(ValueError, match=r"^executor: expected an object with a meth"):
        play("fedavg", executor, "loop")


def test_an_executor_that_loses_clients_is_refused():
    class Lossy:
        def run(self, cohort_work):
            return cohort_work.compute(torch.arange(2))

    with pytest.raises(
        ValueError,
        match=r"^executor: expected one that returns rows of all 5 clients in the "
        r"training of round 1, got buffers with 2 rows\.$",
    ):
        play("fedavg", Lossy(), "loop")
