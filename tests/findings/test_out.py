"""What `aggregate` writes is never what it still has to read."""

from typing import Any

import numpy as np
import pytest
import torch

from pflcore import ops

Array = np.ndarray[Any, np.dtype[np.float32]]
INDEX = torch.stack([(torch.arange(6) + i) % 6 for i in (1, 2)], 1)
WEIGHT = torch.full((6, 2), 0.5)


class Wrapped:
    """Rows of an array, as somebody's own class gives them."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __getitem__(self, rows):
        return self.array[rows]


@pytest.fixture
def models(tmp_path):
    rows = np.lib.format.open_memmap(
        tmp_path / "models.npy", mode="w+", dtype=np.float32, shape=(12, 5)
    )
    rows[:] = np.random.default_rng(0).normal(size=(12, 5))
    return rows


def again(rows):
    rows.flush()
    opened: Array = np.load(rows.filename, mmap_mode="r+")
    return opened[:6]


SAME = {
    "itself": lambda m: m[:6],
    "a tensor": lambda m: torch.from_numpy(m)[:6],
    "rows backwards": lambda m: m[:6][::-1],
    "one row of it": lambda m: m[5:11],
    "a class around it": lambda m: Wrapped(m[:6]),
    "a second map of the file": again,
}
NAMELESS = {"a tensor", "a class around it"}  # they do not know their file: the docstring says so


@pytest.mark.unless(
    lambda updates, out: again in map(SAME.get, (updates, out)) and {updates, out} & NAMELESS
)
@pytest.mark.parametrize("updates", SAME)
@pytest.mark.parametrize("out", [n for n in SAME if n != "rows backwards"])
def test_a_result_in_the_memory_of_the_updates_is_refused(models, updates, out):
    rows, target = SAME[updates](models), SAME[out](models)
    with pytest.raises(
        ValueError, match=r"^aggregate: out must be memory of its own, got memory of updates"
    ):
        ops.stream.aggregate(rows, WEIGHT, INDEX, out=target)


def test_a_base_that_is_a_part_of_the_result_is_refused(models):
    updates, out = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), models[:6]
    with pytest.raises(
        ValueError, match=r"^aggregate: out must be memory of its own, got memory of base"
    ):
        ops.stream.aggregate(updates, WEIGHT, INDEX, base=torch.from_numpy(models)[0], out=out)
    base = torch.from_numpy(out)
    want = ops.aggregate(updates, WEIGHT, INDEX, base.clone())
    assert torch.equal(
        torch.from_numpy(ops.stream.aggregate(updates, WEIGHT, INDEX, base=base, out=out)), want
    )


def test_other_rows_of_one_file_are_memory_of_their_own(models):
    want = ops.aggregate(torch.from_numpy(models)[:6].clone(), WEIGHT, INDEX)
    assert torch.equal(
        torch.from_numpy(ops.stream.aggregate(models[:6], WEIGHT, INDEX, out=models[6:])), want
    )


def test_a_result_that_is_the_negative_of_other_numbers_is_refused():
    conjugate = torch.zeros(6, 5, dtype=torch.complex64).conj().imag
    for out in (torch._neg_view(torch.zeros(6, 5)), conjugate):
        with pytest.raises(
            ValueError, match=r"^aggregate: out must be memory that holds its numbers as they are"
        ):
            ops.aggregate(torch.randn(6, 5), torch.eye(6), out=out)
