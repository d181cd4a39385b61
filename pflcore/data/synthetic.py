"""Made-up federations whose answers are known: ``truth`` holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pflcore.data.federation import Federation


def synthetic_linear(  # noqa: PLR0913 (the recipe's options)
    n: int = 10,
    samples: int = 60,
    dim: int = 5,
    groups: int = 2,
    spread: float = 0.0,
    noise: float = 0.1,
    held_out: int = 200,
    seed: int = 0,
) -> Federation:
    """Linear regression: y = x . w_i + noise, x normal; clients of a group (i mod groups) share w
    up to ``spread``.

    Each client has ``samples`` to train on and ``held_out`` to test on.
    truth: "optimum" [N, dim] = w_i, "group" [N]. A client's best possible mean squared error is
    noise^2.
    """
    _at_least(n=n, samples=samples, dim=dim, groups=groups, held_out=held_out)
    gen = torch.Generator().manual_seed(seed)
    group = torch.arange(n) % groups
    # [N, D]
    w = torch.randn(groups, dim, generator=gen)[group] + spread * torch.randn(n, dim, generator=gen)
    clients = []
    for i in range(n):
        x = torch.randn(samples + held_out, dim, generator=gen)
        y = x @ w[i] + noise * torch.randn(len(x), generator=gen)
        clients.append({"train": (x[:samples], y[:samples]), "test": (x[samples:], y[samples:])})
    fed = Federation.from_arrays(clients, classes=None, name="synthetic_linear")
    return _known(fed, optimum=w, group=group)


def synthetic_quadratic(
    curvature: Sequence[Any] | Tensor = ((1.0,), (2.0,), (0.5,)),
    optimum: Sequence[Any] | Tensor = ((1.0,), (-2.0,), (0.5,)),
) -> Federation:
    """Client i's loss is exactly sum_j a_ij (w_j - b_ij)^2, as a squared-error regression without
    bias.

    curvature a and optimum b: [N, D]. Client i holds D samples x = sqrt(D a_ij) e_j, y = sqrt(D
    a_ij) b_ij, so that the mean of (x . w - y)^2 over them is that sum (half of it is the usual
    quadratic) and one full batch gives its exact gradient. float64. truth: "curvature", "optimum"
    [N, D]; the uniform average's optimum is sum_i a_i b_i / sum_i a_i. Tested on its own samples.
    """
    a, b = (
        torch.as_tensor(curvature, dtype=torch.float64),
        torch.as_tensor(optimum, dtype=torch.float64),
    )
    if a.dim() != 2 or a.shape != b.shape or not bool((a > 0).all()):
        raise ValueError(
            f"curvature (above 0) and optimum must be [N, D] alike, got shapes {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    root = (a * a.shape[1]).sqrt()
    clients = [
        {s: (torch.diag(r), r * v) for s in ("train", "test")} for r, v in zip(root, b, strict=True)
    ]
    fed = Federation.from_arrays(clients, classes=None, dtype=None, name="synthetic_quadratic")
    return _known(fed, curvature=a, optimum=b)


def synthetic_clusters(  # noqa: PLR0913 (the recipe's options)
    n: int = 10,
    groups: int = 2,
    samples: int = 60,
    classes: int = 4,
    dim: int = 8,
    separation: float = 3.0,
    held_out: int = 100,
    seed: int = 0,
) -> Federation:
    """Gaussian clouds, one per class, the same for all; the groups disagree on the clouds' names,
    so one model cannot serve two groups.

    Centres are drawn on a sphere of radius ``separation``, clouds have unit variance. Client i
    belongs to group i mod groups; group g calls cloud c ``(c + g) mod classes`` (``relabel``),
    hence groups <= classes. truth: "group" [N], "centre" [N, C, dim] (the same for all). A
    model that ignores the groups scores about 1/groups at best.
    """
    _at_least(n=n, samples=samples, classes=classes, dim=dim, groups=groups, held_out=held_out)
    if groups > classes:
        raise ValueError(f"groups must be at most classes ({classes}), got {groups}")
    gen = torch.Generator().manual_seed(seed)
    centre = (
        torch.nn.functional.normalize(torch.randn(classes, dim, generator=gen), dim=1) * separation
    )
    each = samples + held_out
    y = torch.arange(n * each) % classes
    x = centre[y] + torch.randn(n * each, dim, generator=gen)
    group = torch.arange(n) % groups
    start = [i * each for i in range(n)]
    index = {
        "train": [torch.arange(s, s + samples) for s in start],
        "test": [torch.arange(s + samples, s + each) for s in start],
    }
    relabel = (torch.arange(classes)[None] + group[:, None]) % classes
    return Federation(
        x,
        y,
        index,
        classes,
        relabel,
        "synthetic_clusters",
        [],
        {"group": group, "centre": centre.expand(n, -1, -1)},
    )


def _known(fed: Federation, **truth: Tensor) -> Federation:
    return replace(fed, truth=truth)


def _at_least(**numbers: float) -> None:
    for what, value in numbers.items():
        if not 1 <= value < math.inf:
            raise ValueError(f"{what} must be at least 1, got {value}")
