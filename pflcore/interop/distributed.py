"""The server's matrices over several processes or machines, by `torch.distributed`.

It runs under `torchrun`, with Gloo on CPUs and NCCL on GPUs. Each rank of a process
group holds all N clients in some of the P columns. A squared distance is a sum over
columns, and a mix acts on each column by itself: distances cost one all-reduce,
mixtures cost nothing. Any columns will do: those of a rank's FSDP shards need no
exchange.

`group` None is the default group; a DTensor lies over its own 1-D mesh. All ranks must
call. A wrong argument of one rank is a ValueError or TypeError on all of them. A rank
that ends is torch's RuntimeError on the others, at once or after the group's timeout
(`init_process_group(timeout=)`). Nothing here has gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pflcore import ops
from pflcore.check import Words, require
from pflcore.ops._check import check_matrix, check_same_kind, is_int

__all__ = ["aggregate", "pairwise_sqdist", "to_columns", "to_rows"]

# Columns that the CPU kernels sum in float32 at a time. Shards of whole groups have the
# sums of the matrix in one piece.
COLUMN_GROUP = 160


@torch.no_grad()
def pairwise_sqdist(
    a: Tensor,  # [M, p], this rank's columns
    b: Tensor | None = None,  # [N, p]; None: b = a
    group: dist.ProcessGroup | None = None,
) -> Tensor:  # [M, N] float64, the same on every rank
    """`pflcore.pairwise_sqdist` of rows whose columns lie on several ranks.

    It takes one all-reduce of the distances: without `b`, of those above the diagonal,
    4 N (N - 1) bytes. Before it, the ranks exchange some hundred bytes to see that
    their arguments fit together.

    The result has the same bits on every rank. Without `b` it is symmetric with an
    exact zero diagonal. It equals that of the op in one process to rounding in float64
    where rows are float64 or, on CPUs, shards of `to_columns`; for other shards each
    distance is within its relative error of 1e-6. A DTensor is [M, P], `Shard(1)`.
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
    # Each distance is summed once for both of its places: an all-reduce does not add
    # the ranks in the same order everywhere.
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
    """`pflcore.aggregate` of this rank's columns, without traffic.

    On CPUs it has the bits of the op in one process. Updates in a DTensor [N, P] give a
    DTensor [M, P], `Shard(1)`; `weight` and `base` are plain tensors. Errors are those
    of `pflcore.aggregate`.
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

    Both are in the order of the ranks. It takes one all-to-all, in which every number
    travels once. Ranks may hold different numbers of clients, also none. `width` is
    this rank's number of columns, given on all ranks or on none: then the widths are as
    equal as whole groups of 160 columns allow.
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
    """Whole rows of some clients, from some columns of all N: the way back.

    Both are in the order of the ranks, and the bits are those that `to_columns` sent.
    `count` is this rank's number of clients, given on all ranks or on none: then the
    counts are as equal as they can be.
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
    """The share of each rank in `total`: as the ranks chose, else equal shares.

    Equal shares are multiples of `unit`; the last ones may be less, or none.
    """
    sizes = [size for size in choices if size is not None]
    fits = not sizes or sum(sizes) == total
    got = Words(" + ".join(map(str, sizes)))
    require(fits, f"{op}({name})", f"{total} in all over the ranks", got)
    if sizes:
        return sizes
    ranks = len(choices)
    share = -(-total // (ranks * unit)) * unit  # rounded up to whole units
    return [max(0, min(share, total - rank * share)) for rank in range(ranks)]


def _local(op: str, name: str, t: Any, group: Any = None) -> tuple[Any, Any]:
    """This rank's columns of a DTensor, and its group; anything else as it is."""
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
    """Each rank's length of the other axis, and the size that its user chose.

    `common_axis` is that in which the ranks' matrices are equally long: rows (0) or
    columns (1). `choice` is the name of the user's argument with its value. All ranks
    must have right arguments that fit together. Else all of them raise, so that none
    waits for another.
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
    """The text that all ranks must have in common.

    Raises ValueError or TypeError for a wrong argument of this rank.
    """
    first_name, first = next(iter(matrices.items()))
    for name, matrix in matrices.items():
        check_matrix(op, name, matrix, "[rows, columns]")
        check_same_kind(op, first_name, first, name, matrix)
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
    """Sends `send_sizes[k]` numbers to rank k, and returns those that it receives.

    `receive_sizes[k]` of them come from rank k. They travel as bytes: any dtype will
    do.
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
