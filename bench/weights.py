"""Weights from distances: `feddwa_weights` and `waffle_weights` beside torch. Launch
cost is what counts at N = 10."""

import torch
import torch.nn.functional as F

from bench.problem import Calls, Problem, Size, Sizes, generator, relative
from pflcore import ops
from pflcore.ops import reference


def sizes(quick: bool) -> Sizes:
    for n in (10, 100) if quick else (10, 20, 100, 1000):
        yield {"rule": "feddwa", "N": n, "K": 5}
        yield {"rule": "waffle", "N": n}


def problem(size: Size) -> Problem:
    n = size["N"]
    sqdist = ops.pairwise_sqdist(torch.randn(n, 50, generator=generator()))
    if size["rule"] == "waffle":
        dist, target, omega, psi = sqdist[0].sqrt(), torch.tensor(0), 0.6, 0.7
        providers: Calls = {
            "pflcore": lambda: [ops.waffle_weights(dist, 0, omega, psi)],
            "reference": lambda: [
                reference.waffle_weights(dist, target, omega, psi, False)
            ],
        }
    else:
        k = size["K"]

        def plain() -> tuple[torch.Tensor, torch.Tensor]:
            near = sqdist.topk(k, 1, largest=False)
            return F.normalize(
                near.values.clamp(min=1e-12).reciprocal(), 1, 1
            ), near.indices

        providers = {
            "pflcore": lambda: ops.feddwa_weights(sqdist, k),
            "reference": lambda: reference.feddwa_weights(sqdist, k),
            "torch": plain,
        }

    return Problem(
        f"{size['rule']}_weights",
        size,
        providers,
        lambda got: relative(got[0], providers["reference"]()[0]),
    )
