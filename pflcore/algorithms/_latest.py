"""A server that keeps everybody's latest model [N, P] and the distances between them, of which a round renews the cohort's alone."""

from __future__ import annotations

import torch
from torch import Tensor

from pflcore import ops
from pflcore.algorithms.base import Cohort, Tensors
from pflcore.train.net import Net


def latest_models(net: Net, n: int) -> Tensors:
    """The fresh state of such a server: w [N, P], sqdist [N, N], norm2 [N], last [N] (the round of the upload, 0: none)."""
    norm2 = ops.pairwise_sqdist(net.w0[None], torch.zeros_like(net.w0)[None])[0].cpu()
    distance = torch.zeros(n, n, dtype=torch.float64)
    return {"w": net.w0.expand(n, -1), "sqdist": distance, "norm2": norm2.expand(n), "last": torch.zeros(n, dtype=torch.long)}


def with_uploads(g: Tensors, w: Tensor, cohort: Cohort) -> Tensors:
    """The state with new distances, norms and rounds, once the cohort's models `w` [S, P] have been written into g["w"]."""
    ids, rows = cohort.ids, ops.pairwise_sqdist(w, g["w"]).cpu()
    norm2 = ops.pairwise_sqdist(w, torch.zeros_like(w[:1]))[:, 0].cpu()
    return {
        **g,
        "sqdist": g["sqdist"].index_copy(0, ids, rows).index_copy_(1, ids, rows.T),
        "norm2": g["norm2"].index_copy(0, ids, norm2),
        "last": g["last"].index_fill(0, ids, cohort.round),
    }
