"""The server's matrices over several processes or machines, by `torch.distributed`.

It runs under `torchrun`, with Gloo on CPUs and NCCL on GPUs. Each rank of a process
group holds some of the P columns of all N clients. A squared distance is a sum over
columns, so distances take one all-reduce. A mix treats each column by itself, so it
takes no communication. A rank may hold any columns, also those of its FSDP shards.

All ranks of the group must call a function together. `group` None is the default group;
a DTensor has the group of its own 1-D mesh. A wrong argument on one rank raises
ValueError or TypeError on all ranks. Where a rank ends, torch raises RuntimeError on
the others, at once or after the group's timeout (`init_process_group(timeout=)`).
Nothing here has gradients.

Symbols: N and M rows, one a client or a model; n clients of this rank; P columns of all
ranks; p columns of this rank; K neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pflcore import ops
from pflcore.check import Words, require
from pflcore.ops._check import check_like, check_tensor, is_int

__all__ = ["aggregate", "pairwise_sqdist", "to_columns", "to_rows"]

# The number of columns that the CPU kernels sum in float32 before they add in float64.
# Shards of whole groups have the same partial sums as the undivided matrix.
COLUMN_GROUP = 160


@torch.no_grad()
def pairwise_sqdist(
    a: Tensor,  # [M, p], this rank's columns
    b: Tensor | None = None,  # [N, p]; None: b = a
    group: dist.ProcessGroup | None = None,
) -> Tensor:  # [M, N] float64, the same on every rank
    """`pflcore.pairwise_sqdist` of rows whose columns lie on several ranks.

    The ranks first exchange some hundred bytes to compare their arguments. Then there
    is one all-reduce of the distances. Without `b` it has only the distances above the
    diagonal, 4 M (M - 1) bytes.

    The result has the same bits on every rank. Without `b` it is symmetric, with an
    exact zero diagonal. For float64 rows, and on CPUs for shards of `to_columns`, it
    equals the op in one process up to float64 rounding. For other shards each distance
    has a relative error of at most 1e-6.

    Args:
        a: The rows; a DTensor is [M, P], `Shard(1)`.
        b: The other rows; by default those of `a`.
        group: The process group; None is the default group.
    """
    op = "pairwise_sqdist"
    a, group = _local(op, "a", a, group)
    b, _ = _local(op, "b", b)
    matrices = {"a": a} if b is None else {"a": a, "b": b}
    _agree(op, group, 0, **matrices)
    out: Tensor = ops.pairwise_sqdist(a, b)
    if b is not None:
        dist.all_reduce(out, group=group)
        return out
    # Each distance is summed once and written to both of its places. An all-reduce of
    # both could differ, because it does not add the ranks in the same order everywhere.
    above = torch.triu_indices(len(out), len(out), 1, device=out.device).unbind()
    distances = out[above]
    dist.all_reduce(distances, group=group)
    upper = torch.zeros_like(out).index_put_(above, distances)
    return upper + upper.T


@torch.no_grad()
def aggregate(
    updates: Tensor,  # [N, p], this rank's columns
    weight: Tensor,  # [M, N], or [M, K] with index; the same on every rank
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [p] or [M, p], this rank's columns
    lr: float = 1.0,
    precise: bool = False,
) -> Tensor:  # [M, p]
    """`pflcore.aggregate` of this rank's columns, without communication.

    On CPUs the result has the bits of the op in one process. The arguments and errors
    are those of `pflcore.aggregate`. Where `updates` is a DTensor [N, P], the result is
    a DTensor [M, P], `Shard(1)`; `weight` and `base` are plain tensors.
    """
    local, _ = _local("aggregate", "updates", updates)
    out = ops.aggregate(local, weight, index, base, lr, precise=precise)
    if local is updates:
        return out
    from torch.distributed.tensor import DTensor, Shard

    mesh: Any = updates.device_mesh  # type: ignore[attr-defined]
    shape = torch.Size([len(out), updates.shape[1]])
    stride = (shape[1], 1)
    return DTensor.from_local(
        out, mesh, [Shard(1)], run_check=False, shape=shape, stride=stride
    )


@torch.no_grad()
def to_columns(
    rows: Tensor,  # [n, P], this rank's clients
    group: dist.ProcessGroup | None = None,
    width: int | None = None,
) -> Tensor:  # [N, width]
    """Some columns of all N clients, from whole rows of some clients.

    Clients and columns are in the order of the ranks. It takes one all-to-all, in which
    every number travels once.

    Args:
        rows: This rank's rows. Ranks may have different numbers of clients, also 0.
        group: The process group; None is the default group.
        width: This rank's number of columns, given on all ranks or on no rank. Without
            it the ranks' widths are as equal as whole groups of 160 columns allow.
    """
    op = "to_columns"
    ranks = _agree(op, group, 1, ("width", width), rows=rows)
    counts = [count for count, _ in ranks]
    choices = [choice for _, choice in ranks]
    widths = _divide(op, "width", choices, rows.shape[1], COLUMN_GROUP)
    own_width = widths[dist.get_rank(group)]
    sent = torch.cat([part.flatten() for part in rows.split(widths, 1)])
    send_sizes = [len(rows) * width for width in widths]
    receive_sizes = [count * own_width for count in counts]
    received = _exchange(sent, send_sizes, receive_sizes, group)
    return received.view(sum(counts), own_width)


@torch.no_grad()
def to_rows(
    columns: Tensor,  # [N, p], this rank's columns
    group: dist.ProcessGroup | None = None,
    count: int | None = None,
) -> Tensor:  # [count, P]
    """Whole rows of some clients, from some columns of all N clients.

    It is the inverse of `to_columns`, with the same bits. Clients and columns are in
    the order of the ranks.

    Args:
        columns: This rank's columns of all clients.
        group: The process group; None is the default group.
        count: This rank's number of clients, given on all ranks or on no rank. Without
            it the ranks' counts are as equal as they can be.
    """
    op = "to_rows"
    ranks = _agree(op, group, 0, ("count", count), columns=columns)
    widths = [width for width, _ in ranks]
    choices = [choice for _, choice in ranks]
    counts = _divide(op, "count", choices, len(columns), 1)
    own_count = counts[dist.get_rank(group)]
    send_sizes = [count * columns.shape[1] for count in counts]
    receive_sizes = [own_count * width for width in widths]
    sent = columns.contiguous().flatten()
    received = _exchange(sent, send_sizes, receive_sizes, group)
    pieces = zip(received.split(receive_sizes), widths, strict=True)
    return torch.cat([piece.view(own_count, width) for piece, width in pieces], 1)


def _divide(
    op: str, name: str, choices: list[int | None], total: int, unit: int
) -> list[int]:
    """The part of `total` for each rank, as chosen or equal.

    Equal parts are multiples of `unit`; the last parts may be smaller, or 0. Raises
    ValueError where the chosen parts do not add up to `total`.
    """
    sizes = [size for size in choices if size is not None]
    fits = not sizes or sum(sizes) == total
    got = Words(" + ".join(map(str, sizes)))
    require(fits, f"{op}({name})", f"{total} in all over the ranks", got)
    if sizes:
        return sizes
    ranks = len(choices)
    part = -(-total // (ranks * unit)) * unit  # rounded up to whole units
    return [max(0, min(part, total - rank * part)) for rank in range(ranks)]


def _local(op: str, name: str, t: Any, group: Any = None) -> tuple[Any, Any]:
    """The columns of a DTensor on this rank, and its group; other values unchanged."""
    mesh = getattr(t, "device_mesh", None)
    if mesh is None:
        return t, group
    fits = t.dim() == 2 and mesh.ndim == 1 and t.placements[0].is_shard(1)
    got = Words(f"{t.placements} of {list(t.shape)} on {mesh.ndim}-D")
    require(fits, f"{op}({name})", "Shard(1) of [N, P] on a 1-D mesh", got)
    return t.to_local(), mesh.get_group()


def _agree(
    op: str,
    group: Any,
    common_axis: int,
    choice: tuple[str, Any] = ("", None),
    **matrices: Any,
) -> list[tuple[int, Any]]:
    """Each rank's length of the other axis, and its user's choice.

    Raises ValueError or TypeError on all ranks where one rank has wrong arguments, or
    two ranks' arguments do not fit together. So no rank waits for another in vain.

    Args:
        common_axis: The axis in which the ranks' matrices are equally long: rows (0) or
            columns (1).
        choice: The name and the value of the argument with which users choose a size.
        matrices: The matrices of this rank, by the names of their arguments.
    """
    is_member = group is None or isinstance(group, dist.ProcessGroup)
    wanted = "a process group that this rank belongs to"
    require(is_member, f"{op}(group)", wanted, group)
    error: Exception | None = None
    try:
        signature = _call_signature(op, common_axis, choice, matrices)
        first = next(iter(matrices.values()))
        message = (signature, first.shape[1 - common_axis], choice[1])
    except (TypeError, ValueError) as wrong:
        error = wrong
        message = (str(wrong), 0, None)
    has_begun = dist.is_available() and dist.is_initialized()
    if error and not has_begun:
        raise error
    wanted = (
        "one that was begun: start by torchrun and call "
        "torch.distributed.init_process_group"
    )
    require(has_begun, f"{op}(group)", wanted, group)
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    if error:
        raise error
    expected = messages[0][0]
    wanted = f"the call of rank 0 ({expected}) on all ranks"
    for rank, (signature, _, _) in enumerate(messages):
        got = Words(f"{signature.removesuffix('.')} on rank {rank}")
        require(signature == expected, op, wanted, got)
    return [(length, chosen) for _, length, chosen in messages]


def _call_signature(
    op: str, common_axis: int, choice: tuple[str, Any], matrices: dict[str, Any]
) -> str:
    """The description of this rank's call, equal on all ranks.

    Raises ValueError or TypeError for a wrong argument of this rank.
    """
    first_name, first = next(iter(matrices.items()))
    for name, matrix in matrices.items():
        check_tensor(op, name, matrix, "[rows, columns]")
        check_like(op, first_name, first, name, matrix)
        fits = matrix.shape[1] == first.shape[1]
        wanted = f"{first.shape[1]} columns like {first_name}"
        require(fits, f"{op}({name})", wanted, matrix)
    argument, chosen = choice
    fits = chosen is None or (is_int(chosen) and chosen >= 0)
    wanted = "a whole number, at least 0"
    require(fits, f"{op}({argument})", wanted, chosen)
    axis = ("rows", "columns")[common_axis]
    words = [op]
    for name, matrix in matrices.items():
        words.append(
            f"{name} with {matrix.shape[common_axis]} {axis} of {matrix.dtype}"
        )
    if chosen is not None:
        words.append(f"a {argument}")
    return ", ".join(words)


def _exchange(
    sent: Tensor, send_sizes: list[int], receive_sizes: list[int], group: Any
) -> Tensor:
    """Sends `send_sizes[k]` numbers to each rank k, and returns the received numbers.

    `receive_sizes[k]` of them come from rank k, in the order of the ranks. They travel
    as bytes, because not every backend knows every dtype.
    """
    received = sent.new_empty(sum(receive_sizes)).view(torch.uint8)
    item = sent.element_size()
    dist.all_to_all_single(
        received,
        sent.view(torch.uint8),
        [size * item for size in receive_sizes],
        [size * item for size in send_sizes],
        group,
    )
    return received.view(sent.dtype)
