"""The server's matrices over several processes or machines, by `torch.distributed`
under `torchrun`: Gloo on CPUs, NCCL on GPUs.

Each rank of a process group holds all N clients in some of the P columns. A squared
distance is a sum over columns, a mix acts on each column by itself: distances cost one
all-reduce, mixtures nothing, and which columns a rank has is all one: those of its FSDP
shards need no exchange. `group` None is the default group; a DTensor lies over its own
1-D mesh. All ranks must call: one rank's wrong argument is a ValueError or TypeError on
all of them, a rank that ends torch's RuntimeError on the others, at once or after the
group's timeout (`init_process_group(timeout=)`). Nothing here has gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pflcore import ops
from pflcore.ops._check import (
    check_matrix,
    check_same_kind,
    describe,
    is_int,
    require_argument,
)

__all__ = ["aggregate", "pairwise_sqdist", "to_columns", "to_rows"]

# columns that the CPU kernels sum in float32 at a time: shards of whole groups have the
# sums of the matrix in one piece
COLUMN_GROUP = 160


@torch.no_grad()
def pairwise_sqdist(
    a: Tensor,  # [M, p], this rank's columns
    b: Tensor | None = None,  # [N, p]; None: b = a
    group: dist.ProcessGroup | None = None,
) -> Tensor:  # [M, N] float64, the same on every rank
    """`pflcore.pairwise_sqdist` of rows whose columns lie on several ranks, by one
    all-reduce of the distances (without `b`, of those above the diagonal: 4 N (N - 1)
    bytes) and, before it, some hundred bytes by which the ranks see that they fit
    together.

    Bit for bit the same on every rank and, without `b`, symmetric with an exact zero
    diagonal. Beside the op in one process equal to rounding in float64 where rows are
    float64 or, on CPUs, shards of `to_columns`; for other shards each is within its
    relative error of 1e-6. A DTensor is [M, P], `Shard(1)`.
    """
    op = "pairwise_sqdist"
    a, group = _local(op, "a", a, group)
    b, _ = _local(op, "b", b)
    other: dict[str, Any] = {} if b is None else {"b": b}
    _agree(op, group, 0, a=a, **other)
    out: Tensor = ops.pairwise_sqdist(a, b)
    if b is not None:
        dist.all_reduce(out, group=group)
        return out
    # one sum for both of its places: ranks are not everywhere added in the same order
    above = torch.triu_indices(len(out), len(out), 1, device=out.device).unbind()
    once = out[above]
    dist.all_reduce(once, group=group)
    out = torch.zeros_like(out).index_put_(above, once)
    return out + out.T


@torch.no_grad()
def aggregate(
    updates: Tensor,  # [N, p], this rank's columns
    weight: Tensor,  # [M, N], or [M, K] with index; the same on every rank
    index: Tensor | None = None,  # [M, K] int64
    base: Tensor | None = None,  # [p] or [M, p], this rank's columns
    lr: float = 1.0,
    precise: bool = False,
) -> Tensor:  # [M, p]
    """`pflcore.aggregate` of this rank's columns: no traffic, and on CPUs the very bits
    of the op in one process.

    Updates in a DTensor [N, P] give a DTensor [M, P], `Shard(1)`; `weight` and `base`
    are plain tensors. Errors are those of `pflcore.aggregate`.
    """
    local, _ = _local("aggregate", "updates", updates)
    out = ops.aggregate(local, weight, index, base, lr, precise=precise)
    if local is updates:
        return out
    from torch.distributed.tensor import DTensor, Shard

    mesh: Any = updates.device_mesh  # type: ignore[attr-defined]
    size = torch.Size([len(out), updates.shape[1]])
    return DTensor.from_local(
        out, mesh, [Shard(1)], run_check=False, shape=size, stride=(size[1], 1)
    )


@torch.no_grad()
def to_columns(
    rows: Tensor,  # [n, P], this rank's clients
    group: dist.ProcessGroup | None = None,
    width: int | None = None,
) -> Tensor:  # [N, width]
    """From whole rows of some clients to some columns of all N, both rank by rank in
    order: one all-to-all, every number once.

    Ranks may hold different numbers of clients, none too. `width` is this rank's number
    of columns, given on all ranks or on none: as equal as whole groups of 160 columns
    are.
    """
    op = "to_columns"
    ranks = _agree(op, group, 1, ("width", width), rows=rows)
    widths = _divide(op, "width", [w for _, w in ranks], rows.shape[1], COLUMN_GROUP)
    mine = widths[dist.get_rank(group)]
    counts = [n for n, _ in ranks]
    sent = torch.cat([part.flatten() for part in rows.split(widths, 1)])
    give = [len(rows) * w for w in widths]
    take = [n * mine for n in counts]
    return _exchange(sent, give, take, group).view(sum(counts), mine)


@torch.no_grad()
def to_rows(
    columns: Tensor,  # [N, p], this rank's columns
    group: dist.ProcessGroup | None = None,
    count: int | None = None,
) -> Tensor:  # [count, P]
    """The way back: from some columns of all N clients to whole rows of some, both rank
    by rank in order, bit for bit what was sent.

    `count` is this rank's number of clients, given on all ranks or on none: as equal as
    they can be.
    """
    op = "to_rows"
    ranks = _agree(op, group, 0, ("count", count), columns=columns)
    counts = _divide(op, "count", [n for _, n in ranks], len(columns), 1)
    mine = counts[dist.get_rank(group)]
    widths = [w for w, _ in ranks]
    give = [n * columns.shape[1] for n in counts]
    take = [mine * w for w in widths]
    back = _exchange(columns.contiguous().flatten(), give, take, group).split(take)
    return torch.cat(
        [part.view(mine, w) for part, w in zip(back, widths, strict=True)], 1
    )


def _divide(
    op: str, name: str, chosen: list[int | None], total: int, whole: int
) -> list[int]:
    """`total` among the ranks: as they chose, or in equal shares of `whole` pieces, the
    last ones less or none."""
    given = [size for size in chosen if size is not None]
    fits = not given or sum(given) == total
    came = " + ".join(map(str, given))
    require_argument(fits, op, name, f"{total} in all over the ranks", came)
    share = -(-total // (len(chosen) * whole)) * whole
    return given or [max(0, min(share, total - k * share)) for k in range(len(chosen))]


def _local(op: str, name: str, t: Any, group: Any = None) -> tuple[Any, Any]:
    """This rank's columns of a DTensor and the group that it lies over; anything
    else as it is."""
    mesh = getattr(t, "device_mesh", None)
    if mesh is None:
        return t, group
    fits = t.dim() == 2 and mesh.ndim == 1 and t.placements[0].is_shard(1)
    came = f"{t.placements} of {list(t.shape)} on {mesh.ndim}-D"
    require_argument(fits, op, name, "Shard(1) of [N, P] on a 1-D mesh", came)
    return t.to_local(), mesh.get_group()


def _agree(
    op: str, group: Any, dim: int, size: tuple[str, Any] = ("", None), **given: Any
) -> list[tuple[int, Any]]:
    """Each rank's number of what is its own, columns (`dim` 0) or rows (1), and the
    size that its user chose.

    Before that, all ranks must have right arguments that fit together; else all of them
    raise, so that none waits for another.
    """
    member = group is None or isinstance(group, dist.ProcessGroup)
    require_argument(
        member,
        op,
        "group",
        "a process group that this rank belongs to",
        describe(group),
    )
    error: Exception | None = None
    try:
        own = (
            _call_signature(op, dim, size, given),
            next(iter(given.values())).shape[1 - dim],
            size[1],
        )
    except (TypeError, ValueError) as wrong:
        error = wrong
        own = (str(wrong), 0, None)
    begun = dist.is_available() and dist.is_initialized()
    if error and not begun:
        raise error
    start = (
        "one that was begun: start by torchrun and call "
        "torch.distributed.init_process_group"
    )
    require_argument(begun, op, "group", start, describe(group))
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, own, group=group)
    if error:
        raise error
    wanted = f"that of rank 0 ({ranks[0][0]}) on all ranks"
    for rank, (theirs, *_) in enumerate(ranks):
        came = f"{theirs.removesuffix('.')} on rank {rank}"
        require_argument(theirs == ranks[0][0], op, "the call", wanted, came)
    return [(mine, chosen) for _, mine, chosen in ranks]


def _call_signature(
    op: str, dim: int, size: tuple[str, Any], given: dict[str, Any]
) -> str:
    """What must be the same on all ranks. ValueError or TypeError for a wrong
    argument."""
    first, t = next(iter(given.items()))
    what, chosen = size
    for name, other in given.items():
        check_matrix(op, name, other, "[rows, columns]")
        check_same_kind(op, first, t, name, other)
        wanted = f"of {t.shape[1]} columns like {first}"
        require_argument(
            other.shape[1] == t.shape[1], op, name, wanted, describe(other)
        )
    whole = chosen is None or (is_int(chosen) and chosen >= 0)
    require_argument(whole, op, what, "a whole number, at least 0", describe(chosen))
    kind = ("rows", "columns")[dim]
    each = [
        f"{name} with {v.shape[dim]} {kind} of {v.dtype}" for name, v in given.items()
    ]
    return ", ".join([op, *each, *([] if chosen is None else [f"a {what}"])])


def _exchange(sent: Tensor, give: list[int], take: list[int], group: Any) -> Tensor:
    """`give[k]` numbers to rank k, `take[k]` from it, as bytes: of any dtype."""
    received = sent.new_empty(sum(take)).view(torch.uint8)
    sizes = (
        [n * sent.element_size() for n in take],
        [n * sent.element_size() for n in give],
    )
    dist.all_to_all_single(received, sent.view(torch.uint8), *sizes, group)
    return received.view(sent.dtype)
