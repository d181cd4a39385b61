"""Made-up federations whose answers are known: ``truth`` holds them."""

from typing import Any

import torch
from torch import Tensor

from pflcore.check import NonNegativeFloat, PositiveInt, Seed, checked, require
from pflcore.data._federation import Federation


@checked
def synthetic_linear(  # noqa: PLR0913 (the recipe's options)
    n: PositiveInt = 10,
    samples: PositiveInt = 60,
    dim: PositiveInt = 5,
    groups: PositiveInt = 2,
    spread: NonNegativeFloat = 0.0,
    noise: NonNegativeFloat = 0.1,
    held_out: PositiveInt = 200,
    seed: Seed = 0,
) -> Federation:
    """Linear regression: y = x . w_i + noise, x normal; clients of a group (i mod
    groups) share w up to ``spread``.

    Each client has ``samples`` to train on and ``held_out`` to test on. truth:
    "optimum" [N, dim] = w_i, "group" [N]. A client's best possible mean squared error
    is noise^2.
    """
    gen = torch.Generator().manual_seed(seed)
    group = torch.arange(n) % groups
    each = samples + held_out
    w = torch.randn(groups, dim, generator=gen)[group]
    w = w + spread * torch.randn(n, dim, generator=gen)  # [N, D]
    x = torch.empty(n, each, dim)
    y = torch.empty(n, each)
    for i in range(n):
        x[i] = torch.randn(each, dim, generator=gen)
        y[i] = x[i] @ w[i] + noise * torch.randn(each, generator=gen)
    truth = {"optimum": w, "group": group}
    return _equal(
        x.flatten(0, 1), y.flatten(), n, samples, name="synthetic_linear", truth=truth
    )


def synthetic_quadratic(
    curvature: Any = ((1.0,), (2.0,), (0.5,)), optimum: Any = ((1.0,), (-2.0,), (0.5,))
) -> Federation:
    """Client i's loss is exactly sum_j a_ij (w_j - b_ij)^2, as a squared-error
    regression without bias.

    curvature a and optimum b: [N, D]. Client i holds D samples x = sqrt(D a_ij) e_j,
    y = sqrt(D a_ij) b_ij, so that the mean of (x . w - y)^2 over them is that sum (half
    of it is the usual quadratic) and one full batch gives its exact gradient. float64.
    truth: "curvature", "optimum" [N, D]; the uniform average's optimum is sum_i a_i
    b_i / sum_i a_i. Tested on its own samples.
    """
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (curvature, optimum))
    fits = a.dim() == 2 and a.shape == b.shape and bool((a > 0).all())
    require(
        fits, "curvature", f"numbers above 0 [N, D] as the optimum, {list(b.shape)}", a
    )
    root = (a * a.shape[1]).sqrt()
    x = torch.diag_embed(root)[:, None]
    y = (root * b)[:, None]  # [N, 1, D, D], [N, 1, D]
    x, y = (torch.cat([v, v], 1).flatten(0, 2) for v in (x, y))
    truth = {"curvature": a, "optimum": b}
    return _equal(x, y, len(a), a.shape[1], name="synthetic_quadratic", truth=truth)


@checked
def synthetic_clusters(  # noqa: PLR0913 (the recipe's options)
    n: PositiveInt = 10,
    groups: PositiveInt = 2,
    samples: PositiveInt = 60,
    classes: PositiveInt = 4,
    dim: PositiveInt = 8,
    separation: NonNegativeFloat = 3.0,
    held_out: PositiveInt = 100,
    seed: Seed = 0,
) -> Federation:
    """Gaussian clouds, one per class, the same for all; the groups disagree on the
    clouds' names, so one model cannot serve two groups.

    Centres are drawn on a sphere of radius ``separation``, clouds have unit variance.
    Client i belongs to group i mod groups; group g calls cloud c
    ``(c + g) mod classes`` (``relabel``), hence groups <= classes. truth: "group" [N],
    "centre" [N, C, dim] (the same for all). A model that ignores the groups scores
    about 1/groups at best.
    """
    require(groups <= classes, "groups", f"at most the {classes} classes", groups)
    gen = torch.Generator().manual_seed(seed)
    centre = torch.randn(classes, dim, generator=gen)
    centre = torch.nn.functional.normalize(centre, dim=1) * separation
    y = torch.arange(n * (samples + held_out)) % classes
    x = centre[y] + torch.randn(len(y), dim, generator=gen)
    group = torch.arange(n) % groups
    relabel = (torch.arange(classes)[None] + group[:, None]) % classes
    truth = {"group": group, "centre": centre.expand(n, -1, -1)}
    more: dict[str, Any] = {"classes": classes, "relabel": relabel, "truth": truth}
    return _equal(x, y, n, samples, name="synthetic_clusters", **more)


def _equal(x: Tensor, y: Tensor, n: int, train: int, **options: Any) -> Federation:
    """The same number of samples of each client in turn, the first `train` of them
    to train on."""
    rows = torch.arange(len(x)).view(n, -1)
    index = {"train": list(rows[:, :train]), "test": list(rows[:, train:])}
    return Federation(x, y, index, **options)
