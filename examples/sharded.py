"""Runs a personalized server step on several processes or machines.

On one machine with two processes:
    torchrun --nproc-per-node=2 examples/sharded.py
On two machines, add:
    --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500

No rank holds the models of all clients. Each rank has received the whole models of some
clients. The ranks exchange them, so that each rank has some columns of all models.
Distances then take one small all-reduce, and mixing takes no communication. The mixed
models return to the ranks as whole models. At the end the result is compared with the
same step in one process.

Symbols: N clients, n clients of this rank, P parameters, p columns of this rank, K
neighbours.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

import pflcore
from pflcore.interop import distributed

N = 24  # clients
P = 200_000  # parameters of a model
K = 5  # neighbours that each client mixes with


def models() -> torch.Tensor:  # [N, P]
    """The uploaded models of four groups with a common start."""
    gen = torch.Generator().manual_seed(0)
    start = torch.randn(1, P, generator=gen)
    groups = torch.randn(4, P, generator=gen)
    clients = torch.randn(N, P, generator=gen)
    group_of_client = torch.arange(N) % 4
    return start + 0.02 * groups[group_of_client] + 0.005 * clients


def mixing(sqdist: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FedDWA's weights of the K nearest clients, and their index."""
    # A client is infinitely far from itself, so that it does not choose itself.
    distances = sqdist.clone().fill_diagonal_(torch.inf)
    return pflcore.feddwa_weights(distances, K)


cuda = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
)
if cuda:
    torch.cuda.set_device(device)
communication = "nccl" if cuda else "gloo"
dist.init_process_group(communication, timeout=timedelta(minutes=2))
rank = dist.get_rank()
ranks = dist.get_world_size()

# Only the comparison at the end needs the models of all clients on one rank.
everything = models().to(device)  # [N, P]
# The models [n, P] that this rank has received.
received = everything.tensor_split(ranks)[rank]

columns = distributed.to_columns(received)  # [N, p]
sqdist = distributed.pairwise_sqdist(columns)  # [N, N], on every rank
mixed = distributed.aggregate(columns, *mixing(sqdist))  # [N, p]
personal = distributed.to_rows(mixed, count=len(received))  # [n, P]

# The same step in one process. The diagonal of the distances is 0, so the relative
# error is taken of 1e-9 at least.
one_process = pflcore.pairwise_sqdist(everything)
relative_error = (sqdist - one_process).abs() / one_process.clamp(min=1e-9)
distance_error = relative_error.max().item()
want = pflcore.aggregate(everything, *mixing(one_process))
want = want.tensor_split(ranks)[rank]
model_error = torch.tensor(float((personal - want).abs().max()), device=device)
dist.all_reduce(model_error, dist.ReduceOp.MAX)
if rank == 0:
    megabytes = len(received) * (P - columns.shape[1]) * 4 / 1e6
    print(f"{ranks} ranks, {N} clients, {P} parameters, {pflcore.backend()}")
    print(
        f"rank 0 sent {megabytes:.1f} MB of rows, {4 * N * (N - 1)} bytes of "
        f"distances, {megabytes:.1f} MB of rows back"
    )
    print(
        f"distances differ from those of one process by {distance_error:.1e}, models "
        f"by {model_error.item():.1e}, of values up to {everything.abs().max():.0f}"
    )
dist.destroy_process_group()
