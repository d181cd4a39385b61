"""What Motley asks of a trained state beside the mean: who is hurt, other distributions, less data, one option varied (section 4).

Everything here is evaluation: nothing is trained on the server, and nothing is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from pflcore import metrics
from pflcore.algorithms.base import FedAvg, State
from pflcore.data.roles import Protocol
from pflcore.local import Setting
from pflcore.round import evaluate


class Point(NamedTuple):
    """Results with one value of an option, [N] each: accuracy, or loss where there is none; NaN for clients that are not reported."""

    value: Any
    own: Tensor  # in distribution: the client's own test samples
    others: Tensor  # out of distribution: the sample of everybody's


def results(alg: FedAvg, state: State, setting: Setting, protocol: Protocol, split: str = "test") -> Tensor:
    """Each reported client's accuracy, or loss where there is none, on its test samples (for "val": each choosing client's): [N]."""
    data, who = (protocol.blind, protocol.choose) if split == "val" else (protocol.data, protocol.report)
    found = evaluate(alg, state, setting._replace(data=data.to(setting.data.device)), split, who)
    return found.get("accuracy", found["loss"])


def vary(alg: FedAvg, state: State, setting: Setting, protocol: Protocol, option: str, choices: Sequence[Any]) -> list[Point]:
    """One trained state personalized with several values of a `late` option (Motley, Fig. 4, 5 and 7), for instance
    `vary(FineTune(), ..., "finetune_epochs", (1, 3, 5, 10, 15))` or `vary(KnnPer(), ..., "lam", (0, 0.5, 1))`."""
    if option not in alg.late:
        raise ValueError(f"option: expected one that can be varied after training ({', '.join(alg.late) or 'none'}), got {option!r}.")
    other = replace(protocol, data=protocol.out_of_distribution())
    made = [(c, replace(alg, **{option: c})) for c in choices]
    return [Point(c, results(a, state, setting, protocol), results(a, state, setting, other)) for c, a in made]


def by_size(
    alg: FedAvg, state: State, setting: Setting, protocol: Protocol, fractions: Sequence[float] = (1.0, 0.5, 0.25)
) -> dict[float, Tensor]:
    """Results with the first part of each reported client's personalization set, its test samples unchanged (Motley, Fig. 7c)."""
    return {f: results(alg, state, setting, protocol.keep(f)) for f in fractions}


def summary(after: Tensor, before: Tensor | None = None, higher_is_better: bool = True) -> dict[str, float]:
    """Mean and deviation over clients, worst decile, tenth percentile (ninetieth of a loss), and the percent hurt against `before`."""
    out = {
        "mean": metrics.mean(after),
        "std": metrics.std(after),
        "worst_decile": metrics.worst_decile(after, higher_is_better=higher_is_better),
        "percentile": metrics.percentile(after[~after.isnan()], 10 if higher_is_better else 90),
    }
    return out if before is None else {**out, "hurt": metrics.hurt(after, before, higher_is_better)}
