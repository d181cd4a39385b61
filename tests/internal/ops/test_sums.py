"""Tests of sums that repeat their bits on a GPU.

Other tests cover backward passes for indices past the end, which only a GPU accepts.
"""

from types import SimpleNamespace

import pytest
import torch
from laws import integers
from pretend_gpu import pretended_gpu
from ugly import randn

from pflcore.ops import _aggregate, _sqdist
from pflcore.ops._sums import index_add, running_sums, scatter_add

SHARED = (100_003, 17)  # the number of values, and of places that they share


def as_lists(count, places):
    """Indices and values; equal indices are neighbours.

    The lists of the clients' samples are like this.
    """
    return integers(0, 0, places, count).sort().values, randn(1, count).double()


def by_card(call, *given):
    """The result on the CPU of the code that a GPU runs."""
    with pretended_gpu() as gpu:
        return call(*(t.to(gpu) for t in given)).cpu()


def test_both_ways_of_index_add_have_the_same_bits():
    index, values = as_lists(*SHARED)
    zeros = torch.zeros(SHARED[1], dtype=torch.float64)

    got = by_card(index_add, zeros, index, values)
    want = index_add(zeros, index, values)

    assert torch.equal(got, want)
    assert torch.equal(want, zeros.clone().index_add_(0, index, values))


def test_both_ways_of_scatter_add_have_the_same_bits():
    index = integers(0, 0, 9, 30, 5000)
    values = randn(1, 30, 5000).double()
    zeros = torch.zeros(30, 9, dtype=torch.float64)

    got = by_card(scatter_add, zeros, index, values)
    want = scatter_add(zeros, index, values)

    assert torch.equal(got, want)
    assert torch.equal(want, zeros.scatter_add(1, index, values))


@pytest.mark.parametrize("columns", [1, 2, 3, 8, 200])
def test_running_sums_of_a_card_are_those_of_a_cpu(columns):
    values = randn(0, 4, columns).double()
    values[1, columns // 2] = -torch.inf

    got = by_card(running_sums, values)
    want = running_sums(values)

    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    assert torch.equal(want, values.cumsum(1))


CARDS_SUMS = ("index_add", "scatter_add", "cumsum")


@pytest.mark.parametrize("call", [index_add, scatter_add, running_sums])
def test_no_sum_that_differs_from_run_to_run_is_called_on_a_card(call, monkeypatch):
    called = []
    for name in [*CARDS_SUMS, *(f"{n}_" for n in CARDS_SUMS)]:
        monkeypatch.setattr(
            torch.Tensor, name, lambda *given, name=name: called.append(name)
        )
    shape = (4,) if call is index_add else (4, 4)
    index = torch.zeros(shape, dtype=torch.int64)
    values = torch.ones(shape)
    by_card(call, *((values,) if call is running_sums else (values, index, values)))
    assert not called


# indices past the end ---------------------------------------------------------

ROWS = torch.arange(15.0, dtype=torch.float64).view(3, 5)


def distances_gradient(index, symmetric=True):
    other = None if symmetric else ROWS + 1
    context = SimpleNamespace(
        saved_tensors=(ROWS, other, index), needs_input_grad=(True, True)
    )
    return _sqdist._backward(context, torch.ones(index.shape, dtype=torch.float64))


@pytest.mark.parametrize("symmetric", [True, False])
def test_distances_to_a_row_that_is_not_there_have_gradient_nan(symmetric):
    index = torch.tensor([[1], [2], [7]])
    good = torch.tensor([[1], [2], [-1]])  # -1 is padding

    (got, got_b, _), (want, want_b, _) = (
        distances_gradient(i, symmetric) for i in (index, good)
    )

    assert got[2].isnan().all()
    assert torch.equal(got[:2], want[:2])
    assert symmetric or torch.equal(got_b, want_b)


def aggregate_gradients(index, updates=ROWS):
    weight = torch.ones(index.shape, dtype=torch.float64)
    needed = (True, True, False, False)
    context = SimpleNamespace(
        saved_tensors=(updates, weight, index),
        lr=1.0,
        n=len(updates),
        weight_dtype=weight.dtype,
        updates_dtype=updates.dtype,
        needs_input_grad=needed,
    )
    return _aggregate._backward(
        context, torch.ones(len(index), 5, dtype=torch.float64)
    )[:2]


@pytest.mark.parametrize("past", [7, 3, -1])
def test_a_mix_with_a_row_that_is_not_there_has_gradient_nan(past):
    updates, weight = aggregate_gradients(torch.tensor([[1, 0], [past, 2]]))

    assert torch.equal(weight.isnan(), torch.tensor([[False, False], [True, False]]))
    assert torch.equal(updates, torch.ones(3, 5, dtype=torch.float64))


def test_a_mix_of_no_rows_has_gradient_nan():
    updates, weight = aggregate_gradients(torch.tensor([[0]]), ROWS[:0])

    assert weight.isnan().all() and updates.shape == (0, 5)
