"""One rank of test_distributed.py: `rank.py STORE RANK`.

A rank ends with 0 where all its checks hold. The last rank ends with 9, as if it were
killed, to test the others.

Symbols: N clients of all ranks; P parameters of a model.
"""

import os
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

import pflcore
from pflcore.interop.distributed import aggregate, pairwise_sqdist, to_columns, to_rows

STORE, RANK = sys.argv[1], int(sys.argv[2])
COUNTS = (3, 0, 4)  # clients of each rank
WIDTHS = (1, 1900, 102)  # columns of each rank
WORLD = len(COUNTS)
N = sum(COUNTS)
P = sum(WIDTHS)


def matrix(dtype=torch.float32, seed=0):
    """Models [N, P] that differ little, the same on every rank."""
    gen = torch.Generator().manual_seed(seed)
    start = torch.randn(1, P, generator=gen, dtype=torch.float64)
    difference = torch.randn(N, P, generator=gen, dtype=torch.float64)
    return (start + 1e-3 * difference).to(dtype)


def local_columns(x):
    """The columns of this rank of a matrix [N, P]."""
    return x.split(WIDTHS, 1)[RANK]


WEIGHT = torch.rand(2, N, generator=torch.Generator().manual_seed(1))  # of two mixes
INDEX = torch.tensor([[0, 3], [6, 6]])  # the two models of each sparse mix


def same(got, want, rtol=0.0):
    """Checks that `got` is near `want` and bit for bit equal everywhere."""
    assert_close(got, want, rtol=rtol, atol=0, equal_nan=True)
    of_all_ranks = [torch.empty_like(got) for _ in COUNTS]
    dist.all_gather(of_all_ranks, got.contiguous())
    assert all(
        torch.equal(other.nan_to_num(-1.0), got.nan_to_num(-1.0))
        for other in of_all_ranks
    )


def rows_become_columns_and_come_back(dtype):
    x = matrix(dtype)
    rows = x.split(COUNTS)[RANK]
    groups = x.split(800, 1)[RANK]  # whole groups of 160 columns
    columns = to_columns(rows)
    assert torch.equal(columns, groups)
    assert torch.equal(to_rows(columns, count=COUNTS[RANK]), rows)
    assert torch.equal(to_columns(rows, width=WIDTHS[RANK]), local_columns(x))
    assert torch.equal(to_rows(local_columns(x)), x.split(3)[RANK])


def distances_are_those_of_one_process(dtype):
    """Distances over the ranks equal those of one process, up to rounding.

    Only the rounding of float64 differs where each float32 sum has the same columns.
    Where a shard cuts a group of columns, the error is that of the op, 1e-6.
    """
    x = matrix(dtype)
    y = matrix(dtype, 1)[:5]
    cut_rtol = 1e-14 if dtype == torch.float64 else 2e-6
    whole_groups = x.split(800, 1)[RANK]
    for columns, rtol in ((whole_groups, 1e-14), (local_columns(x), cut_rtol)):
        got = pairwise_sqdist(columns)
        same(got, pflcore.pairwise_sqdist(x), rtol)
        assert torch.equal(got, got.T) and (got.diagonal() == 0).all()
    got = pairwise_sqdist(local_columns(x), local_columns(y))
    same(got, pflcore.pairwise_sqdist(x, y), 2e-6)


def mixes_are_bit_for_bit_those_of_one_process(dtype):
    x = matrix(dtype)
    columns = local_columns(x)
    want = pflcore.aggregate(x, WEIGHT, base=x[0])
    assert torch.equal(aggregate(columns, WEIGHT, base=columns[0]), local_columns(want))
    sparse = WEIGHT[:, :2], INDEX
    want = pflcore.aggregate(x, *sparse, lr=0.5)
    assert torch.equal(aggregate(columns, *sparse, lr=0.5), local_columns(want))


def distances_of_the_ugly():
    """Distances hold for NaN, equal clients, no client and tensors with gradients.

    The NaN is in the columns of one rank.
    """
    x = matrix()
    x[2, 1950] = torch.nan
    x[4] = x[5]
    got = pairwise_sqdist(local_columns(x))
    nan = torch.zeros(N, N, dtype=torch.bool)
    nan[2] = True
    nan[:, 2] = True
    nan[2, 2] = False
    same(got, got)
    assert torch.equal(got.isnan(), nan)
    assert got[4, 5] == 0 == got[5, 4] and got[2, 2] == 0
    assert pairwise_sqdist(local_columns(x[:0])).shape == (0, 0)
    learnt = local_columns(x).clone().requires_grad_()
    for result in (pairwise_sqdist(learnt), aggregate(learnt, WEIGHT)):
        assert not result.requires_grad


def dtensors():
    x = matrix()
    mesh = init_device_mesh("cpu", (WORLD,))
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    same(pairwise_sqdist(sharded), pflcore.pairwise_sqdist(x), 2e-6)
    mixed = aggregate(sharded, WEIGHT)
    assert isinstance(mixed, DTensor) and mixed.placements == (Shard(1),)
    same(mixed.full_tensor(), pflcore.aggregate(x, WEIGHT))


def error_of(call, *args):
    """The type and text of the error that a call raises."""
    begin = time.monotonic()
    try:
        call(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        words = f"{type(error).__name__}: {error}"
    assert time.monotonic() - begin < 30, words
    return words


def a_mistake_is_one_sentence_on_every_rank():
    """A mistake is an error with one sentence on every rank.

    The mistake is on one rank, or the calls of the ranks differ. After the errors, the
    ranks still work together.
    """
    x = matrix()
    last = RANK == WORLD - 1
    columns = local_columns(x)
    sqdist = pairwise_sqdist
    replicated = DTensor.from_local(
        x, init_device_mesh("cpu", (WORLD,)), run_check=False
    )
    for words, call, *args in (
        (
            "pairwise_sqdist: expected the call of rank 0 .*a with 7 rows of .*, got "
            ".*a with 6 rows .*on rank 2",
            sqdist,
            columns[: N - last],
        ),
        (".*torch.float64 on rank 2", sqdist, columns.double() if last else columns),
        (
            r".*pairwise_sqdist\(a\): expected a tensor, got 'text'",
            sqdist,
            "text" if last else columns,
        ),
        (
            r".*pairwise_sqdist\(b\): expected (1|1900|102) columns like a, got",
            sqdist,
            columns,
            columns[:, :-1] if last else columns,
        ),
        (
            ".*b with 7 rows of torch.float32 on rank 2",
            sqdist,
            columns,
            columns if last else None,
        ),
        (
            ".*to_rows, columns with 7 rows of torch.float32 on rank 2",
            to_rows if last else sqdist,
            columns,
        ),
        (
            ".*rows with 2002 columns of torch.float32 on rank 2",
            to_columns,
            x[:, : P - last],
        ),
        (
            r"to_columns\(width\): expected 2003 in all over the ranks, got "
            r"3 \+ 3 \+ 3",
            to_columns,
            x,
            None,
            3,
        ),
        (".*a width on rank 2", to_columns, x, None, 3 if last else None),
        (
            r".*\(a\): expected Shard\(1\) of \[N, P\] on a 1-D mesh, got ",
            sqdist,
            replicated,
        ),
    ):
        error = error_of(call, *args)
        assert error.endswith(".") and ". " not in error and "\n" not in error, error
        assert re.match(f"(TypeError|ValueError): {words}", error), error
    group = dist.new_group([0, 1])
    if last:
        error = error_of(sqdist, columns, None, group)
        assert "(group): expected a process group that this rank belongs to" in error
    else:
        sqdist(columns, None, group)
    same(sqdist(columns), pflcore.pairwise_sqdist(x), 2e-6)


torch.set_num_threads(1)
dist.init_process_group(
    "gloo",
    rank=RANK,
    world_size=WORLD,
    init_method=f"file://{STORE}",
    timeout=timedelta(seconds=60),
)
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    rows_become_columns_and_come_back(dtype)
    distances_are_those_of_one_process(dtype)
    mixes_are_bit_for_bit_those_of_one_process(dtype)
distances_of_the_ugly()
dtensors()
a_mistake_is_one_sentence_on_every_rank()
if RANK == WORLD - 1:
    os._exit(9)  # as if it were killed
error = error_of(pairwise_sqdist, local_columns(matrix()))
assert error.startswith("RuntimeError: "), error
os._exit(0)  # a group that has lost a rank cannot be destroyed in the usual way
