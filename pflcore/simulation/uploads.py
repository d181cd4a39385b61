"""How far clients moved in a round: the norms of their updates, who stands out, and how far an update may go at most.

An update is what the upload "delta" says, or an uploaded model ("w", "g") minus the model that the server had of the client before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pflcore import ops
from pflcore.data.ragged import onto
from pflcore.results.record import OUTLIER
from pflcore.train import memory

Tensors = Mapping[str, Tensor]


def updates(up: Tensors, g: Tensors, n: int) -> dict[str, Tensor | None]:
    """The uploads that are updates, and for those that are models the server's matrix [N, P] of the clients' last ones."""
    held = next((g[k] for k in ("w", "x") if k in g and g[k].dim() == 2 and len(g[k]) == n), None)
    models: dict[str, Tensor | None] = {k: held for k in ("w", "g") if k in up and held is not None and held.shape[1] == up[k].shape[1]}
    return {"delta": None, **models} if "delta" in up else models


def norms(up: Tensors, g: Tensors, ids: Tensor, n: int) -> Tensor | None:
    """Each client's largest update norm [S], float64 on the CPU; None where nothing that is uploaded is an update."""
    norms: list[Tensor] = []
    for key, held in updates(up, g, n).items():
        rows = up[key].reshape(len(ids), -1)
        if held is None:
            square = ops.pairwise_sqdist(rows, rows.new_zeros(1, rows.shape[1]))
        else:
            square = ops.pairwise_sqdist(rows, held.to(rows.dtype), onto(ids[:, None], held.device))
        norms.append(square[:, 0].sqrt().cpu())
    return torch.stack(norms).amax(0) if norms else None


def shortened(up: Tensors, g: Tensors, ids: Tensor, n: int, norm: Tensor, limit: float) -> tuple[dict[str, Tensor], Tensor]:
    """`up` with every update [S, P] longer than `limit` cut down to it: one factor per client, for its control variate too; and these
    factors [S]."""
    factor = (limit / norm.clamp(min=1e-300)).clamp(max=1.0)
    long = (factor < 1).nonzero()[:, 0]
    if not len(long):
        return dict(up), factor
    which, out = updates(up, g, n), dict(up)
    for key in [*which, *(["control"] if "control" in up else [])]:
        rows, held = up[key].clone(), which.get(key)
        for i in long.tolist():
            base = torch.zeros_like(rows[i]) if held is None else held[int(ids[i])].to(rows)
            rows[i] = (base.double() + (rows[i].double() - base.double()) * float(factor[i])).to(rows)
        out[key] = rows
    return out, factor


def ratios(norm: Tensor) -> Tensor | None:
    """Norms [S] over their median; None for fewer than three, or where most are 0."""
    if len(norm) < 3:
        return None
    middle = norm.quantile(0.5)
    return norm / middle if middle > 0 else None


def not_finite(old: Tensors, new: Tensors) -> list[str]:
    """What the server holds that was finite and is not any more; what it wrote row by row came from checked uploads.

    Where there is no memory left to look, nothing: the server has written already, so the round must not end here."""
    try:
        made = {k: v for k, v in new.items() if v is not old.get(k)}
        spoilt = _spoilt(made)
        return [k for k in spoilt if k not in old or not _spoilt({k: old[k]})]
    except (MemoryError, RuntimeError) as error:
        if not memory.ran_out(error):
            raise
        return []


def _spoilt(tensors: Tensors) -> list[str]:
    """The names of those that are not finite throughout, with one look at each device."""
    sums = {k: v.sum(dtype=torch.float64) for k, v in tensors.items() if v.is_floating_point()}
    out: list[str] = []
    for device in {s.device for s in sums.values()}:
        names = [k for k, s in sums.items() if s.device == device]
        fine = torch.stack([sums[k] for k in names]).isfinite().cpu().tolist()
        out += [k for k, one in zip(names, fine, strict=True) if not one]
    return out


def farthest(cohort: Sequence[int], relative: Sequence[float | None] | None) -> tuple[int, float] | None:
    """The client that moved farthest and how many times the median, where that makes it an outlier."""
    far = np.array(relative or [], np.float64) > OUTLIER  # None is NaN, and no outlier
    pairs = [((relative or [])[i], cohort[i]) for i in far.nonzero()[0].tolist()]
    if not pairs:
        return None
    ratio, client = max(pairs)  # type: ignore[type-var]
    return client, ratio  # type: ignore[return-value]
