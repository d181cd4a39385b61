"""What a server accepts of a cohort's uploads: finite rows, and updates that are not
too long.

An update is the upload "delta", or an uploaded model minus what it is measured from:
see `Traits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms._protocol import (
    BadUpload,
    Cohort,
    MixingWeights,
    Payload,
    SharedRows,
    Tensors,
    Traits,
    squared_norms,
)
from pflcore.data._ragged import to_device


class CohortResult(NamedTuple):
    """What a cohort's training leaves; rows in the order of `cohort.ids`."""

    cohort: Cohort
    down: Payload  # [S, ...] what the clients received
    up: Tensors  # [S, ...] what they upload
    states_before: Tensors  # [S, ...] their own state before the round
    client_states: Tensors  # [S, ...] and after it
    buffers: Tensor  # [S, b]
    loss: Tensor  # [S] mean of the minibatches' losses

    def take(self, mask: Tensor) -> CohortResult:
        """The clients where `mask`, bool [S], is true, alone."""

        def select_rows(rows: Any) -> Any:
            if isinstance(rows, dict):
                return {k: select_rows(v) for k, v in rows.items()}
            return (
                rows[to_device(mask, rows.device)] if isinstance(rows, Tensor) else rows
            )

        return CohortResult(self.cohort.take(mask), *map(select_rows, self[1:]))


@dataclass
class RoundOutcome:
    """What one round did."""

    ids: list[int]
    # something of them was not finite, or the algorithm could not use it
    dropped: list[int] = field(default_factory=list)
    void: bool = False  # nothing changed
    bytes_down: int = 0
    bytes_up: int = 0
    # mean of the minibatches' losses over clients, by samples
    train_loss: float | None = None
    relative_update_norm: list[float | None] | None = (
        None  # each update's norm over the median; None: dropped
    )
    # clients whose update was shortened
    clipped: list[int] = field(default_factory=list)
    # [S'] how much of each accepted update `clip` left, float64
    clip_factor: Tensor | None = None
    # the round is void for this reason of the algorithm's
    void_reason: str | None = None
    non_finite_state: list[str] = field(
        default_factory=list
    )  # what the server would hold, not finite
    mix: MixingWeights | None = None  # whose updates went into which model
    cohort: Cohort | None = None  # those who were accepted


def accept(
    trained: CohortResult, traits: Traits, server: Tensors, clip: float | None = None
) -> tuple[CohortResult, RoundOutcome]:
    """The clients whose rows are finite, with updates of at most `clip`; and what
    was done."""
    ids = trained.cohort.ids
    tensors = (*trained.up.values(), *trained.client_states.values())
    outcome = RoundOutcome(
        ids.tolist(),
        bytes_down=payload_bytes(trained.down),
        bytes_up=payload_bytes(trained.up),
    )
    finite = finite_rows([*tensors, trained.buffers], len(ids))
    outcome.dropped = ids[~finite].tolist()
    outcome.void = not finite.any() or bool(
        set(traits.required_clients) & set(outcome.dropped)
    )
    if finite.any():
        trained = trained.take(finite) if outcome.dropped else trained
        share = trained.cohort.mean_weights().weight[0]
        outcome.train_loss = float(share @ trained.loss.double().cpu())
    outcome.cohort = trained.cohort
    norm = None if outcome.void else update_norms(trained, traits, server)
    if norm is None:
        return trained, outcome
    middle = norm.quantile(0.5)
    if len(norm) > 2 and middle > 0:
        each = iter((norm / middle).tolist())
        outcome.relative_update_norm = [
            next(each) if one else None for one in finite.tolist()
        ]
    if clip is not None:
        outcome.clip_factor = (clip / norm.clamp(min=1e-300)).clamp(max=1.0)
        outcome.clipped = trained.cohort.ids[norm > clip].tolist()
        if outcome.clipped:
            trained = clip_updates(trained, traits, server, outcome.clip_factor)
    return trained, outcome


def drop_clients(
    trained: CohortResult, outcome: RoundOutcome, traits: Traits, bad: BadUpload
) -> CohortResult:
    """The clients but those whose uploads are `bad`: they are dropped, as if not
    finite."""
    ids = trained.cohort.ids
    kept = torch.tensor([i not in bad.reasons for i in ids.tolist()])
    if outcome.relative_update_norm is not None:
        each = zip(outcome.ids, outcome.relative_update_norm, strict=True)
        outcome.relative_update_norm = [
            None if i in bad.reasons else ratio for i, ratio in each
        ]
    if outcome.clip_factor is not None:
        outcome.clip_factor = outcome.clip_factor[kept]
    outcome.clipped = [i for i in outcome.clipped if i not in bad.reasons]
    outcome.dropped = sorted([*outcome.dropped, *ids[~kept].tolist()])
    if not kept.any() or set(traits.required_clients) & set(outcome.dropped):
        outcome.void, outcome.void_reason = True, str(bad)
        return trained
    trained = trained.take(kept)
    outcome.cohort = trained.cohort
    outcome.train_loss = float(
        trained.cohort.mean_weights().weight[0] @ trained.loss.double().cpu()
    )
    return trained


def finite_rows(tensors: Iterable[Tensor], count: int) -> Tensor:
    """Bool [count]: whose rows are finite in every tensor [count, ...]. A float64 sum
    tells: of float32 of the squares, by the kernel for distances."""
    sums = [torch.zeros(count)]
    for v in tensors:
        if v.is_floating_point() and v.numel():
            rows = v.reshape(count, -1)
            sums.append(
                rows.sum(1) if v.dtype == torch.float64 else squared_norms(rows)
            )
    return are_finite(sums).all(0)


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """Which of the values [...] are finite, bool [K, ...] on the CPU, with one look at
    each device."""
    found = torch.ones(len(values), *values[0].shape, dtype=torch.bool)
    for device in {v.device for v in values}:
        at = [i for i, v in enumerate(values) if v.device == device]
        found[at] = torch.stack([values[i].double() for i in at]).isfinite().cpu()
    return found


def update_origins(trained: CohortResult, traits: Traits, server: Tensors) -> Tensors:
    """The uploads that are updates, each with what it is measured from: [S, ...], or
    zero []."""
    up = trained.up
    found = {"delta": up["delta"].new_zeros(())} if "delta" in up else {}
    for key, place in traits.model_uploads.items():
        part, _, name = place.partition(".")
        if key in up and part == "down":
            found[key] = trained.down[name]
        elif key in up:
            found[key] = server[name][
                to_device(trained.cohort.ids, server[name].device)
            ]
    return found


def update_norms(
    trained: CohortResult, traits: Traits, server: Tensors
) -> Tensor | None:
    """The length of each client's longest update, float64 [S]; None where nobody
    uploads one."""
    lengths = []
    each = torch.arange(len(trained.cohort.ids))[:, None]
    for key, origin in update_origins(trained, traits, server).items():
        rows = trained.up[key].flatten(1)
        if origin.dim():
            square = ops.pairwise_sqdist(
                rows, origin.to(rows), to_device(each, rows.device)
            )[:, 0]
        else:
            square = squared_norms(rows)
        lengths.append(square.sqrt().cpu())
    return torch.stack(lengths).amax(0) if lengths else None


def clip_updates(
    trained: CohortResult, traits: Traits, server: Tensors, factor: Tensor
) -> CohortResult:
    """Every update by its client's `factor` [S], and what follows it, such as
    control variates."""
    up = dict(trained.up)
    own = dict(trained.client_states)
    origin = update_origins(trained, traits, server)
    for key in up.keys() & {*origin, *traits.clipped_with_update}:
        up[key] = shrink_towards(
            up[key], origin.get(key, up[key].new_zeros(())), factor
        )
    for key in own.keys() & set(traits.clipped_with_update):
        own[key] = shrink_towards(own[key], trained.states_before[key], factor)
    return trained._replace(up=up, client_states=own)


def shrink_towards(rows: Tensor, origin: Tensor, factor: Tensor) -> Tensor:
    """`rows` [S, ...] at `factor` [S] of their distance from `origin`; where that is 1
    as they are."""
    rows, some = rows.clone(), to_device(factor < 1, rows.device)
    start = origin.expand_as(rows)[some].double()
    scale = to_device(factor, rows.device)[some].view(-1, *[1] * (rows.dim() - 1))
    rows[some] = (start + scale * (rows[some].double() - start)).to(rows)
    return rows


def non_finite_names(made: Tensors) -> list[str]:
    """The names of those that are not finite throughout."""
    sums = {
        k: v.sum(dtype=torch.float64) for k, v in made.items() if v.is_floating_point()
    }
    found = are_finite([*sums.values()]).tolist() if sums else []
    return [k for k, fine in zip(sums, found, strict=True) if not fine]


def payload_bytes(payload: Payload) -> int:
    """Bytes that travel: every client's slice, a pooled row as often as it is sent."""
    return sum(
        int((v.index >= 0).sum()) * v.rows[:1].nbytes
        if isinstance(v, SharedRows)
        else getattr(v, "nbytes", 0)
        for v in payload.values()
    )
