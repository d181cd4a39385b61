"""The uploads that a server accepts: finite ones, with updates of limited length.

An update is the upload "delta", or an uploaded model minus the model that it is
measured from: see `Traits.model_uploads`.

Symbols: S clients of the cohort; S' of them are accepted; P numbers of a model; b
numbers of batch norm's running statistics; K values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    BadUpload,
    Changes,
    Claim,
    Cohort,
    MixingWeights,
    Payload,
    RowUpdate,
    SharedRows,
    Tensors,
    Traits,
    squared_norms,
)
from pflcore.check import warn_caller
from pflcore.simulation._rows import CohortRows, take_rows


class CohortResult(NamedTuple):
    """The results of a cohort's training.

    Rows are in the order of `cohort.ids`.

    Attributes:
        cohort: The clients that were trained.
        down: The download of each client.
        states_before: The clients' own state before the round.
        rows: What the clients keep and what they upload, after their training.
    """

    cohort: Cohort
    down: Payload  # [S, ...]
    states_before: Tensors  # [S, ...]
    rows: CohortRows

    @property
    def up(self) -> Tensors:
        """The upload [S, ...] of each client."""
        return self.rows.up

    def with_rows(self, **changes: Any) -> CohortResult:
        """The results with other values of some rows."""
        return self._replace(rows=self.rows._replace(**changes))

    def take(self, mask: Tensor) -> CohortResult:
        """The results of the clients where `mask`, bool [S], is true."""
        positions = mask.nonzero()[:, 0]
        return CohortResult(
            self.cohort.take(mask),
            take_rows(self.down, positions),
            take_rows(self.states_before, positions),
            take_rows(self.rows, positions),
        )


@dataclass
class RoundOutcome:
    """The course of one round, for its record.

    Attributes:
        ids: The ids of the cohort.
        dropped: The ids of the clients that were left out, because their results were
            not finite or the algorithm could not use them.
        void: True where the round changed nothing.
        bytes_down: Bytes that the clients received.
        bytes_up: Bytes that the clients sent.
        train_loss: The mean over clients, weighted by samples, of the mean loss of
            their minibatches; None where no client is left.
        relative_update_norm: The norm of each client's update over the median norm;
            None for a dropped client.
        clipped: The ids of the clients whose update was shortened.
        clip_factor: The factor, at most 1, by which each accepted update was shortened.
        void_reason: The algorithm's reason why the round is void.
        non_finite_state: The names of the server's tensors that would not be finite.
        mix: The weights of the updates in each model that the server made.
        cohort: The accepted clients.
    """

    ids: list[int]
    dropped: list[int] = field(default_factory=list)
    void: bool = False
    bytes_down: int = 0
    bytes_up: int = 0
    train_loss: float | None = None
    relative_update_norm: list[float | None] | None = None
    clipped: list[int] = field(default_factory=list)
    clip_factor: Tensor | None = None  # [S'] float64
    void_reason: str | None = None
    non_finite_state: list[str] = field(default_factory=list)
    mix: MixingWeights | None = None
    cohort: Cohort | None = field(default=None, compare=False)


def warn_bad_upload(bad: BadUpload) -> None:
    """Warns of clients that are left out of a round."""
    warn_caller(f"left out of the round: {bad}", RuntimeWarning)


def accept(
    result: CohortResult,
    algorithm: Algorithm,
    server: Tensors,
    *,
    variances: Tensor,  # bool [b]
    clip: float | None = None,
    sends_buffers: bool = False,
    on_refused: Callable[[BadUpload], None] = warn_bad_upload,
) -> tuple[CohortResult, RoundOutcome]:
    """The results of the accepted clients, and the outcome so far.

    Clients whose results are not finite are left out, and so are those whose claims
    cannot be. Where no client is left, the outcome is void, its cohort is empty, and
    the result is of no use.

    Args:
        result: The results of the cohort.
        algorithm: The algorithm, which names its updates and claims.
        server: The server's state, which is only read.
        variances: The mask of the variances among batch norm's statistics.
        clip: The length to which longer updates are shortened; None for no limit.
        sends_buffers: Batch norm's statistics travel, from every client that answers.
        on_refused: Is called with the claims that cannot be.
    """
    traits = algorithm.traits
    ids = result.cohort.ids
    rows = result.rows
    buffer_bytes = rows.buffers.nbytes if sends_buffers else 0
    outcome = RoundOutcome(
        ids.tolist(),
        bytes_down=payload_bytes(result.down) + buffer_bytes,
        bytes_up=payload_bytes(result.up) + buffer_bytes,
        cohort=result.cohort,
    )
    expected = algorithm.uploads(server, result.down, result.cohort)
    claims = {
        name: claim
        for name, claim in expected.items()
        if isinstance(claim, Claim) and claim.is_bounded and name in rows.up
        if rows.up[name].numel()
    }
    # The server reads these numbers, so they come to the CPU in one copy.
    losses = [] if rows.loss is None else [rows.loss]
    seen = on_cpu([*(rows.up[name] for name in claims), *losses])
    if losses:
        result = result.with_rows(loss=seen.pop())
    outcome.train_loss = mean_train_loss(result)
    reasons: dict[int, str] = {}
    for (name, claim), values in zip(claims.items(), seen, strict=True):
        faults = faults_of(claim, values, rows.up, variances)
        for client, fault in zip(outcome.ids, faults, strict=True):
            if fault:
                reasons.setdefault(client, f"its {name!r} {fault}; leave it out.")
    tensors = [*rows.up.values(), *rows.client_states.values(), rows.buffers]
    is_finite = finite_rows(tensors, len(ids))
    if not is_finite.all():
        lost = set(ids[~is_finite].tolist())
        result = drop_clients(result, outcome, traits, lost)
        reasons = {i: text for i, text in reasons.items() if i not in lost}
    if outcome.void:
        return result, outcome
    if reasons:
        bad = BadUpload(reasons)
        on_refused(bad)
        result = drop_clients(result, outcome, traits, reasons)
        if outcome.void:
            outcome.void_reason = str(bad)
            return result, outcome
    origins = update_origins(result, traits, server)
    if not origins:
        return result, outcome
    norms = update_norms(result.up, origins)
    median = median_of(norms)
    if len(norms) > 2 and median > 0:
        accepted = result.cohort.ids.tolist()
        ratios = dict(zip(accepted, (norms / median).tolist(), strict=True))
        outcome.relative_update_norm = [ratios.get(i) for i in outcome.ids]
    if clip is not None:
        outcome.clip_factor = (clip / norms.clamp(min=1e-300)).clamp(max=1.0)
        outcome.clipped = result.cohort.ids[norms > clip].tolist()
        if outcome.clipped:
            result = clip_updates(result, traits, origins, outcome.clip_factor)
    return result, outcome


# The part of a bound by which a number may pass it, because of rounding in float32.
ROUNDING = 1e-5


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in float64 on the CPU.

    Those of one device come together, so that each device is waited for once.
    """
    copies = [tensor.double() if tensor.is_cpu else tensor for tensor in tensors]
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        index = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[i].double().flatten() for i in index]).cpu()
        parts = flat.split([tensors[i].numel() for i in index])
        for i, part in zip(index, parts, strict=True):
            copies[i] = part.view(tensors[i].shape)
    return copies


def faults_of(
    claim: Claim,
    values: Tensor,  # [S, ...] float64, on the CPU
    up: Tensors,  # [S, ...]
    variances: Tensor,  # bool [b]
) -> list[str]:
    """A clause for each client, [S], on what its numbers cannot be; "" for none."""
    if claim.is_statistics:
        claim = claim._replace(low=torch.where(variances.cpu(), 0.0, -math.inf))
    count = len(values)
    faults = [""] * count
    # Cohorts are small, and numpy's calls take a fraction of torch's.
    bounds = [
        bound(up) if callable(bound) else bound
        for bound in (claim.low, claim.high, claim.most)
    ]
    on_host = iter(on_cpu([b.detach() for b in bounds if isinstance(b, Tensor)]))
    low, high, most = (
        next(on_host).numpy() if isinstance(bound, Tensor) else np.float64(bound)
        for bound in bounds
    )
    numbers = values.detach().numpy()
    total = numbers.reshape(count, -1).sum(1)
    is_wrong = (numbers < low - ROUNDING * np.abs(low)) | (
        numbers > high + ROUNDING * np.abs(high)
    )
    if claim.is_whole:
        is_wrong |= numbers != np.rint(numbers)
    most = np.broadcast_to(most, count)
    for i in np.flatnonzero(total > most + ROUNDING * np.abs(most)).tolist():
        faults[i] = f"sums to {total[i]:g}, expected at most {most[i]:g}"
    kind = "a whole number" if claim.is_whole else "a number"
    for i in np.flatnonzero(is_wrong.reshape(count, -1).any(1)).tolist():
        first = is_wrong[i].argmax()
        number, least, largest = (
            np.broadcast_to(value, numbers.shape)[i].flat[first]
            for value in (numbers, low, high)
        )
        upper = f" to {largest:g}" if np.isfinite(largest) else " on"
        faults[i] = f"holds {number:g}, expected {kind} from {least:g}{upper}"
    return faults


def mean_train_loss(result: CohortResult) -> float | None:
    """The mean of the clients' training losses, weighted by samples.

    None where the losses are unknown.
    """
    loss = result.rows.loss
    if loss is None:
        return None
    weight = result.cohort.mean_weights().weight[0]
    return float(weight @ loss.double().cpu())


def drop_clients(
    result: CohortResult,
    outcome: RoundOutcome,
    traits: Traits,
    left_out: Collection[int],
) -> CohortResult:
    """The results without the clients of these ids.

    `outcome` is written to: the clients count as dropped. Where a required client is
    among them, or no client is left, it is void.
    """
    ids = result.cohort.ids
    usable = torch.tensor([i not in left_out for i in ids.tolist()])
    if outcome.relative_update_norm is not None:
        for position, client in enumerate(outcome.ids):
            if client in left_out:
                outcome.relative_update_norm[position] = None
    if outcome.clip_factor is not None:
        outcome.clip_factor = outcome.clip_factor[usable]
    outcome.clipped = [i for i in outcome.clipped if i not in left_out]
    outcome.dropped = sorted([*outcome.dropped, *ids[~usable].tolist()])
    lacks_required = not set(traits.required_clients).isdisjoint(outcome.dropped)
    outcome.void = lacks_required or not usable.any()
    outcome.cohort = result.cohort.take(usable)
    if not usable.any():
        outcome.train_loss = None
        return result
    result = result.take(usable)
    outcome.train_loss = mean_train_loss(result)
    return result


def finite_rows(tensors: Iterable[Tensor], count: int) -> Tensor:
    """Mask [count] of the clients whose rows [count, ...] are all finite.

    One sum in float64 shows whether all numbers of a row are finite: of float64 rows
    the plain sum, else that of the squares, by the fast kernel for distances. A row of
    float64 whose sum overflows counts as not finite.
    """
    sums = [torch.zeros(count)]
    for tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        rows = tensor.reshape(count, -1)
        if tensor.dtype == torch.float64:
            sums.append(rows.sum(1))
        else:
            sums.append(squared_norms(rows))
    return are_finite(sums).all(0)


def are_finite(values: Sequence[Tensor]) -> Tensor:
    """Mask [K, ...] of the finite ones of K values [...], on the CPU."""
    return torch.stack(on_cpu(values)).isfinite()


def update_origins(result: CohortResult, traits: Traits, server: Tensors) -> Tensors:
    """The origins [S, ...] of updates, by the names of their uploads.

    The origin of "delta" is zero, of shape [].
    """
    up = result.up
    origins = {}
    if "delta" in up:
        origins["delta"] = up["delta"].new_zeros(())
    for key, place in traits.model_uploads.items():
        if key not in up:
            continue
        side, _, name = place.partition(".")
        if side == "down":
            origins[key] = result.down[name]
        else:
            models = server[name]
            origins[key] = models[to_device(result.cohort.ids, models.device)]
    return origins


def update_norms(up: Tensors, origins: Tensors) -> Tensor:
    """The norm of each client's longest update, float64 [S].

    Args:
        up: The uploads [S, ...].
        origins: The origins of the updates among them, at least one.
    """
    norms = []
    for key, origin in origins.items():
        rows = up[key].flatten(1)
        if origin.dim():
            own_row = torch.arange(len(rows), device=rows.device)[:, None]
            starts = origin.to(rows).flatten(1)
            sqdist = ops.pairwise_sqdist(rows, starts, own_row)[:, 0]
        else:
            sqdist = squared_norms(rows)
        norms.append(sqdist.sqrt())
    return torch.stack(norms).amax(0).cpu()


def median_of(values: Tensor) -> Tensor:
    """The median of some numbers [S], between the middle two where S is even.

    It has the bits of `values.quantile(0.5)`, which calls far more of torch.
    """
    ascending = values.sort().values
    middle = (len(values) - 1) // 2
    return torch.lerp(ascending[middle], ascending[len(values) // 2], 0.5)


def clip_updates(
    result: CohortResult, traits: Traits, origins: Tensors, factor: Tensor
) -> CohortResult:
    """The results with every update times its client's `factor` [S].

    `origins` are those of the updates, from `update_origins`.

    Uploads and client state that go with an update, such as control variates, are
    shortened by the same factor: see `Traits.clipped_with_update`.
    """
    up = dict(result.up)
    client_states = dict(result.rows.client_states)
    follows = set(traits.clipped_with_update)
    for key in up.keys() & {*origins, *follows}:
        zero = up[key].new_zeros(())
        up[key] = shrink_towards(up[key], origins.get(key, zero), factor)
    for key in client_states.keys() & follows:
        before = result.states_before[key]
        client_states[key] = shrink_towards(client_states[key], before, factor)
    return result.with_rows(up=up, client_states=client_states)


def shrink_towards(rows: Tensor, origin: Tensor, factor: Tensor) -> Tensor:
    """A copy of `rows` [S, ...], moved towards `origin`.

    `factor` [S] is the part of the distance that is left.

    Rows whose factor is 1 keep their bits.
    """
    shrunk = rows.clone()
    shrinks = to_device(factor < 1, rows.device)
    start = origin.expand_as(rows)[shrinks].double()
    scale = to_device(factor, rows.device)[shrinks]
    scale = scale.view(-1, *[1] * (rows.dim() - 1))
    shrunk[shrinks] = (start + scale * (rows[shrinks].double() - start)).to(rows)
    return shrunk


def non_finite_names(server: Tensors, changes: Changes) -> list[str]:
    """The names of the changes of the server's state that are not finite.

    A tensor that an update passed through was finite before the round.
    """
    sums = {}
    for name, change in changes.items():
        tensor = change.rows if isinstance(change, RowUpdate) else change
        if tensor is not server.get(name) and tensor.is_floating_point():
            sums[name] = tensor.sum(dtype=torch.float64)
    if not sums:
        return []
    finite = are_finite([*sums.values()]).tolist()
    return [name for name, is_finite in zip(sums, finite, strict=True) if not is_finite]


def payload_bytes(payload: Payload) -> int:
    """Bytes that travel to or from the clients of a cohort.

    A shared row counts as often as it is sent.
    """
    total = 0
    for value in payload.values():
        if isinstance(value, SharedRows):
            sent = int((value.index >= 0).sum())
            total += sent * value.rows[:1].nbytes
        else:
            total += getattr(value, "nbytes", 0)
    return total
