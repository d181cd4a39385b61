"""A personalized server step over several processes or machines, none of which holds
all clients' models.

torchrun --nproc-per-node=2 examples/sharded.py        on two machines: --nnodes=2
--rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500

Each rank has received some clients' whole models. They become columns of all clients,
over which distances cost one small all-reduce and mixing nothing at all; the mixed
models go back as rows. It is then held against the same step in one process.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

import pflcore
from pflcore.interop import distributed

N, P, K = 24, 200_000, 5  # clients, parameters, neighbours that each mixes with


def models() -> torch.Tensor:  # [N, P]
    """What clients have sent: four groups, and one start that all have in common."""
    gen = torch.Generator().manual_seed(0)
    start, groups, own = (torch.randn(n, P, generator=gen) for n in (1, 4, N))
    return start + 0.02 * groups[torch.arange(N) % 4] + 0.005 * own


def mixing(sqdist: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FedDWA's weights: the nearest K, each by 1 / distance^2."""
    return pflcore.feddwa_weights(sqdist.clone().fill_diagonal_(torch.inf), K)


cuda = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
)
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=2))
rank, ranks = dist.get_rank(), dist.get_world_size()

everything = models().to(device)  # the example's check alone needs it
# [n, P], the clients that this rank has received
mine = everything.tensor_split(ranks)[rank]

columns = distributed.to_columns(mine)  # [N, p]
sqdist = distributed.pairwise_sqdist(columns)  # [N, N], on every rank
mixed = distributed.aggregate(columns, *mixing(sqdist))  # [N, p]
personal = distributed.to_rows(mixed, count=len(mine))  # [n, P]

alone = pflcore.pairwise_sqdist(everything)
off = ((sqdist - alone).abs() / alone.clamp(min=1e-9)).max().item()
want = pflcore.aggregate(everything, *mixing(alone)).tensor_split(ranks)[rank]
equal = torch.tensor(float((personal - want).abs().max()), device=device)
dist.all_reduce(equal, dist.ReduceOp.MAX)
if rank == 0:
    megabytes = len(mine) * (P - columns.shape[1]) * 4 / 1e6
    print(f"{ranks} ranks, {N} clients, {P} parameters, {pflcore.backend()}")
    print(
        f"rank 0 sent {megabytes:.1f} MB of rows, {4 * N * (N - 1)} bytes of "
        f"distances, {megabytes:.1f} MB of rows back"
    )
    print(
        f"distances off those of one process by {off:.1e}, models by "
        f"{equal.item():.1e}, of values up to {everything.abs().max():.0f}"
    )
dist.destroy_process_group()
