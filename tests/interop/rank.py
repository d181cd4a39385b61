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

from pflcore.interop import distributed

COUNTS, WIDTHS = (3, 0, 4), (1, 1900, 102)  # of the ranks' clients and columns
N, P = sum(COUNTS), sum(WIDTHS)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def matrix(dtype=torch.float32, seed=0):
    """[N, P], the same on every rank: clients that differ by little."""
    gen = torch.Generator().manual_seed(seed)
    start, own = (torch.randn(n, P, generator=gen, dtype=torch.float64) for n in (1, N))
    return (start + 1e-3 * own).to(dtype)


def answer(call, *args):
    """What is said, and that it is said soon."""
    begin = time.monotonic()
    try:
        call(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}" if time.monotonic() - begin < 30 else "too late"
    return "nothing"


def weights():
    """Those of two mixes [2, N], and whose two models each mixes where it is sparse."""
    weight = torch.rand(2, N, generator=torch.Generator().manual_seed(1))
    return weight, torch.tensor([[0, 3], [6, 6]])


def laws(rank, out):
    """What comes out for right arguments."""
    weight, index = weights()
    for dtype in DTYPES:
        x, y = matrix(dtype), matrix(dtype, 1)[:5]
        mine, own = x.split(COUNTS)[rank], x.split(WIDTHS, 1)[rank]
        columns = distributed.to_columns(mine)
        found = {
            "columns": columns,
            "back": distributed.to_rows(columns, count=COUNTS[rank]),
            "chosen": distributed.to_columns(mine, width=WIDTHS[rank]),
            "equal rows": distributed.to_rows(own),
            "distances": distributed.pairwise_sqdist(columns),
            "of odd shards": distributed.pairwise_sqdist(own),
            "of two": distributed.pairwise_sqdist(own, y.split(WIDTHS, 1)[rank]),
            "mix": distributed.aggregate(own, weight, base=own[0]),
            "sparse mix": distributed.aggregate(own, weight[:, :2], index, lr=0.5),
        }
        out |= {(key, dtype): value for key, value in found.items()}
    x = matrix()
    x[2, 1950], x[4] = float("nan"), x[5]
    out["with NaN"] = distributed.pairwise_sqdist(x.split(WIDTHS, 1)[rank])
    out["no clients"] = distributed.pairwise_sqdist(x[:0].split(WIDTHS, 1)[rank])
    learnt = x.split(WIDTHS, 1)[rank].clone().requires_grad_()
    made = distributed.pairwise_sqdist(learnt), distributed.aggregate(learnt, weight)
    out["no gradient"] = made[0].requires_grad or made[1].requires_grad
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
    replicated = DTensor.from_local(x, init_device_mesh("cpu", (3,)), run_check=False)
    calls = {
        "number": (sqdist, own[: N - last]),
        "dtype": (sqdist, own.double() if last else own),
        "text": (sqdist, "text" if last else own),
        "b": (sqdist, own, own[:, :-1] if last else own),
        "one b": (sqdist, own, own if last else None),
        "calls": (distributed.to_rows if last else sqdist, own),
        "P": (distributed.to_columns, x[:, : P - last]),
        "width": (distributed.to_columns, x, None, 3),
        "one width": (distributed.to_columns, x, None, 3 if last else None),
        "bad width": (distributed.to_columns, x, None, -1 if last else 1),
        "meta": (sqdist, own.to("meta")),
        "replicated": (sqdist, replicated),
        "group": (sqdist, own, None, dist.new_group([0, 1])),
        "no group": (sqdist, own, None, "text"),
    }
    out |= {key: answer(*call) for key, call in calls.items()}
    out["still"] = sqdist(own)


if __name__ == "__main__":
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    ours = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=world, **ours)
    out = {}
    laws(rank, out)
    mistakes(rank, out)
    if rank == world - 1:
        torch.save(out, folder / f"{rank}.pt")
        os._exit(9)  # as if it were killed
    out["death"] = answer(distributed.pairwise_sqdist, matrix().split(WIDTHS, 1)[rank])
    torch.save(out, folder / f"{rank}.pt")
    os._exit(0)  # a group that has lost a member cannot be taken down in order
