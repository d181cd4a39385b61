"""One rank of test_distributed.py: `rank.py FOLDER RANK WORLD` leaves what it got in
FOLDER/RANK.pt; at the end the last rank dies."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import pflcore
from pflcore.interop import distributed

COUNTS, WIDTHS = (3, 0, 4), (1, 1900, 102)  # of the ranks' clients and columns
N, P = sum(COUNTS), sum(WIDTHS)


def matrix(dtype=torch.float32, seed=0):
    """[N, P], the same on every rank: clients that differ by little."""
    gen = torch.Generator().manual_seed(seed)
    return (
        torch.randn(P, generator=gen, dtype=torch.float64)
        + 1e-3 * torch.randn(N, P, generator=gen, dtype=torch.float64)
    ).to(dtype)


def answer(call, *args, **kwargs):
    """What is said, and that it is said soon."""
    begin = time.monotonic()
    try:
        call(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}" if time.monotonic() - begin < 30 else "too late"
    return "nothing"


def laws(rank, out):
    """What comes out for right arguments."""
    weight = torch.rand(2, N, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[0, 3], [6, 6]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, y = matrix(dtype), matrix(dtype, 1)[:5]
        mine, own = x.split(COUNTS)[rank], x.split(WIDTHS, 1)[rank]
        columns = distributed.to_columns(mine)
        out["columns", dtype], out["back", dtype] = (
            columns,
            distributed.to_rows(columns, count=COUNTS[rank]),
        )
        out["chosen", dtype] = distributed.to_columns(mine, width=WIDTHS[rank])
        out["equal rows", dtype] = distributed.to_rows(own)
        out["distances", dtype], out["of odd shards", dtype] = (
            distributed.pairwise_sqdist(columns),
            distributed.pairwise_sqdist(own),
        )
        out["of two", dtype] = distributed.pairwise_sqdist(own, y.split(WIDTHS, 1)[rank])
        out["mix", dtype] = distributed.aggregate(own, weight, base=own[0])
        out["sparse mix", dtype] = distributed.aggregate(own, weight[:, :2], index, lr=0.5)
    x = matrix()
    x[2, 1950], x[4] = float("nan"), x[5]
    out["with NaN"] = distributed.pairwise_sqdist(x.split(WIDTHS, 1)[rank])
    out["no clients"] = distributed.pairwise_sqdist(x[:0].split(WIDTHS, 1)[rank])
    learnt = x.split(WIDTHS, 1)[rank].clone().requires_grad_()
    out["no gradient"] = (
        distributed.pairwise_sqdist(learnt).requires_grad
        or distributed.aggregate(learnt, weight).requires_grad
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim in (0, 1):
        sharded = distribute_tensor(matrix(), mesh, [Shard(dim)])
        out["DTensor", dim] = distributed.pairwise_sqdist(sharded)
        mixed = distributed.aggregate(sharded, weight)
        assert isinstance(mixed, DTensor) and mixed.placements == (Shard(1),)
        out["DTensor mix", dim] = mixed.full_tensor()


def mistakes(rank, out):
    """What is said of wrong arguments, on one rank or between ranks."""
    x, last = matrix(), rank == 2
    own = x.split(WIDTHS, 1)[rank]
    sqdist = distributed.pairwise_sqdist
    out["number"] = answer(sqdist, own[: N - last])
    out["dtype"] = answer(sqdist, own.double() if last else own)
    out["text"] = answer(sqdist, "text" if last else own)
    out["b"] = answer(sqdist, own, own[:, :-1] if last else own)
    out["one b"] = answer(sqdist, own, own if last else None)
    out["calls"] = answer(distributed.to_rows if last else sqdist, own)
    out["P"] = answer(distributed.to_columns, x[:, : P - last])
    out["width"] = answer(distributed.to_columns, x, width=3)
    out["one width"] = answer(distributed.to_columns, x, width=3 if last else None)
    out["bad width"] = answer(distributed.to_columns, x, width=-1 if last else 1)
    out["meta"] = answer(sqdist, own.to("meta"))
    replicated = DTensor.from_local(x, init_device_mesh("cpu", (3,)), run_check=False)
    out["replicated"] = answer(sqdist, replicated)
    two = dist.new_group([0, 1])
    out["group"] = answer(sqdist, own, group=two)
    out["no group"] = answer(sqdist, own, group="text")
    out["still"] = sqdist(own)


if __name__ == "__main__":
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    out: dict = {"backend": str(pflcore.backend())}
    laws(rank, out)
    mistakes(rank, out)
    if rank == world - 1:
        torch.save(out, folder / f"{rank}.pt")
        os._exit(9)  # as if it were killed
    out["death"] = answer(distributed.pairwise_sqdist, matrix().split(WIDTHS, 1)[rank])
    torch.save(out, folder / f"{rank}.pt")
    os._exit(0)  # a group that has lost a member cannot be taken down in order
