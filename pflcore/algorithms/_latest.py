"""A server that keeps everybody's latest model [N, P] and the distances between them."""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.protocol import Changes, Cohort, Rows, Tensors


def latest_models(x0: Tensor, n: int) -> Tensors:
    """The first state of such a server: w [N, P], sqdist [N, N], norm2 [N], last [N] (the round of
    the upload, 0: none)."""
    norm2 = ops.pairwise_sqdist(x0[None], torch.zeros_like(x0)[None])[0].cpu()
    distance = torch.zeros(n, n, dtype=torch.float64)
    last = torch.zeros(n, dtype=torch.long)
    return {"w": x0.repeat(n, 1), "sqdist": distance, "norm2": norm2.expand(n), "last": last}


def with_uploads(state: Tensors, w: Tensor, cohort: Cohort) -> tuple[Changes, Tensors]:
    """The cohort's models `w` [S, P] as rows to be written, and the new distances, norms and
    rounds:
    those of the cohort alone are taken anew."""
    ids = cohort.ids
    distances = [ops.pairwise_sqdist(w, to) for to in (state["w"], w, torch.zeros_like(w[:1]))]
    # looked at once
    rows, among, norm2 = torch.cat(distances, 1).cpu().split([cohort.n, len(ids), 1], 1)
    rows = rows.index_copy(1, ids, among)
    new = {
        "sqdist": state["sqdist"].index_copy(0, ids, rows).index_copy_(1, ids, rows.T),
        "norm2": state["norm2"].index_copy(0, ids, norm2[:, 0]),
        "last": state["last"].index_fill(0, ids, cohort.round),
    }
    return {"w": Rows(ids, w), **new}, new
