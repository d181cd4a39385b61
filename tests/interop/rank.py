"""One rank of test_distributed.py, by `rank.py STORE RANK`: it ends with 0 where all
laws hold, and the last one dies."""

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
COUNTS, WIDTHS = (3, 0, 4), (1, 1900, 102)  # of the ranks' clients and columns
WORLD, N, P = len(COUNTS), sum(COUNTS), sum(WIDTHS)


def matrix(dtype=torch.float32, seed=0):
    """[N, P], the same on every rank: clients that differ by little."""
    gen = torch.Generator().manual_seed(seed)
    start, own = (torch.randn(n, P, generator=gen, dtype=torch.float64) for n in (1, N))
    return (start + 1e-3 * own).to(dtype)


def mine(x):
    """This rank's columns."""
    return x.split(WIDTHS, 1)[RANK]


WEIGHT = torch.rand(2, N, generator=torch.Generator().manual_seed(1))  # of two mixes
INDEX = torch.tensor([[0, 3], [6, 6]])  # whose two models each mixes where it is sparse


def same(got, want, rtol=0.0):
    """What is wanted, and what all ranks have alike, to the last bit."""
    assert_close(got, want, rtol=rtol, atol=0, equal_nan=True)
    everywhere = [torch.empty_like(got) for _ in COUNTS]
    dist.all_gather(everywhere, got.contiguous())
    assert all(
        torch.equal(other.nan_to_num(-1.0), got.nan_to_num(-1.0))
        for other in everywhere
    )


def rows_become_columns_and_come_back(dtype):
    x = matrix(dtype)
    rows, groups = x.split(COUNTS)[RANK], x.split(800, 1)[RANK]  # whole groups of 160
    columns = to_columns(rows)
    assert torch.equal(columns, groups)
    assert torch.equal(to_rows(columns, count=COUNTS[RANK]), rows)
    assert torch.equal(to_columns(rows, width=WIDTHS[RANK]), mine(x))
    assert torch.equal(to_rows(mine(x)), x.split(3)[RANK])


def distances_are_those_of_one_process(dtype):
    """Rounding of float64 where a float32 sum meets the same columns; 1e-6, the op's
    own, where shards cut through them."""
    x, y = matrix(dtype), matrix(dtype, 1)[:5]
    off = 1e-14 if dtype == torch.float64 else 2e-6
    for columns, rtol in ((x.split(800, 1)[RANK], 1e-14), (mine(x), off)):
        got = pairwise_sqdist(columns)
        same(got, pflcore.pairwise_sqdist(x), rtol)
        assert torch.equal(got, got.T) and (got.diagonal() == 0).all()
    same(pairwise_sqdist(mine(x), mine(y)), pflcore.pairwise_sqdist(x, y), 2e-6)


def mixes_are_bit_for_bit_those_of_one_process(dtype):
    x = matrix(dtype)
    want = pflcore.aggregate(x, WEIGHT, base=x[0])
    assert torch.equal(aggregate(mine(x), WEIGHT, base=mine(x)[0]), mine(want))
    sparse = WEIGHT[:, :2], INDEX
    want = pflcore.aggregate(x, *sparse, lr=0.5)
    assert torch.equal(aggregate(mine(x), *sparse, lr=0.5), mine(want))


def distances_of_the_ugly():
    """NaN in one rank's columns, equal clients, none at all, a tensor that requires
    grad."""
    x = matrix()
    x[2, 1950], x[4] = torch.nan, x[5]
    got, nan = pairwise_sqdist(mine(x)), torch.zeros(N, N, dtype=torch.bool)
    nan[2], nan[:, 2], nan[2, 2] = True, True, False
    same(got, got)
    assert (
        torch.equal(got.isnan(), nan) and got[4, 5] == 0 == got[5, 4] and got[2, 2] == 0
    )
    assert pairwise_sqdist(mine(x[:0])).shape == (0, 0)
    learnt = mine(x).clone().requires_grad_()
    for made in (pairwise_sqdist(learnt), aggregate(learnt, WEIGHT)):
        assert not made.requires_grad


def dtensors():
    x, mesh = matrix(), init_device_mesh("cpu", (WORLD,))
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    same(pairwise_sqdist(sharded), pflcore.pairwise_sqdist(x), 2e-6)
    mixed = aggregate(sharded, WEIGHT)
    assert isinstance(mixed, DTensor) and mixed.placements == (Shard(1),)
    same(mixed.full_tensor(), pflcore.aggregate(x, WEIGHT))


def said(call, *args):
    """What is said, in one line and soon."""
    begin = time.monotonic()
    try:
        call(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        words = f"{type(error).__name__}: {error}"
    assert time.monotonic() - begin < 30, words
    return words


def a_mistake_is_one_sentence_on_every_rank():
    """A mistake on one rank, or between them; afterwards nothing is out of step."""
    x, last = matrix(), RANK == WORLD - 1
    own, sqdist = mine(x), pairwise_sqdist
    replicated = DTensor.from_local(
        x, init_device_mesh("cpu", (WORLD,)), run_check=False
    )
    for words, call, *args in (
        (
            "pairwise_sqdist: expected the call of rank 0 .*a with 7 rows of .*, got "
            ".*a with 6 rows .*on rank 2",
            sqdist,
            own[: N - last],
        ),
        (".*torch.float64 on rank 2", sqdist, own.double() if last else own),
        (
            r".*pairwise_sqdist\(a\): expected a tensor, got 'text'",
            sqdist,
            "text" if last else own,
        ),
        (
            r".*pairwise_sqdist\(b\): expected (1|1900|102) columns like a, got",
            sqdist,
            own,
            own[:, :-1] if last else own,
        ),
        (
            ".*b with 7 rows of torch.float32 on rank 2",
            sqdist,
            own,
            own if last else None,
        ),
        (
            ".*to_rows, columns with 7 rows of torch.float32 on rank 2",
            to_rows if last else sqdist,
            own,
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
        found = said(call, *args)
        assert found.endswith(".") and ". " not in found and "\n" not in found, found
        assert re.match(f"(TypeError|ValueError): {words}", found), found
    some = dist.new_group([0, 1])
    if last:
        found = said(sqdist, own, None, some)
        assert "(group): expected a process group that this rank belongs to" in found
    else:
        sqdist(own, None, some)
    same(sqdist(own), pflcore.pairwise_sqdist(x), 2e-6)


torch.set_num_threads(1)
ours = {"init_method": f"file://{STORE}", "timeout": timedelta(seconds=60)}
dist.init_process_group("gloo", rank=RANK, world_size=WORLD, **ours)
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    rows_become_columns_and_come_back(dtype)
    distances_are_those_of_one_process(dtype)
    mixes_are_bit_for_bit_those_of_one_process(dtype)
distances_of_the_ugly()
dtensors()
a_mistake_is_one_sentence_on_every_rank()
if RANK == WORLD - 1:
    os._exit(9)  # as if it were killed
found = said(pairwise_sqdist, mine(matrix()))
assert found.startswith("RuntimeError: "), found
os._exit(0)  # a group that has lost a member cannot be taken down in order
