"""FedAvg: the mean of the clients' updates, or what a defence puts in its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from pflcore.algorithms import defences
from pflcore.algorithms.protocol import Algorithm, Changes, Cohort, Mix, Tensors, Traits, Void
from pflcore.check import NonNegative, Weighting, Whole, refuse
from pflcore.data.ragged import onto


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """McMahan et al. 2017, Algorithm 1.

    server: x [P] · client: nothing · down: x [S, P] · up: delta [S, P] (1 model).
    `x <- x + server_lr * sum_i share_i delta_i`; `weighting` is "samples" (the paper's n_i / n) or
    "uniform".

    `defence` takes something else than the mean, with `hostile` = f bad clients in a
    round of S; d_i are the updates. All but "clip" give every client one voice, since the number of
    its samples is its own word.
    "clip": sum_i share_i d_i min(1, M / |d_i|), M the median of the norms (Sun et al. 2019 with M
    for the fixed bound, which is `clip` of the run) · "median": coordinate by coordinate, of an
    even number the mean of the two in the middle (Yin et al. 2018, Definition 1) · "trimmed_mean":
    coordinate by coordinate without the f least and f largest (Definition 2) · "krum",
    "multi_krum": the update, or the mean of the S - f updates, of the least Krum score (Blanchard
    et al. 2017), by exact distances · "fltrust": sum_i t_i (|r| / |d_i|) d_i / sum_i t_i with
    t_i = max(0, cos(d_i, r)) and r the update of the trusted client `root`, who joins every round
    (Cao et al. 2021, eqs. 2 to 4, where r is trained by the server on data of its own and is not
    part of the sum).
    Running statistics of batch norm stay each client's own then: they would be a way around the
    defence.
    """

    server_lr: NonNegative = 1.0  # step size of the server
    weighting: Weighting = "samples"  # or uniform
    defence: defences.Defence | None = field(default=None, kw_only=True)  # in the mean's place
    hostile: Whole = field(default=1, kw_only=True)  # bad clients a round: krum's, trimmed_mean's
    root: Whole | None = field(default=None, kw_only=True)  # the client that fltrust trusts

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.defence == "fltrust") != (self.root is not None):
            refuse("root", "a client's number with defence='fltrust', None without it", self.root)
        if self.hostile != 1 and self.defence not in defences.COUNTING:
            refuse("hostile", "its default beside this defence, which counts nobody", self.hostile)

    @property
    def traits(self) -> Traits:
        required = () if self.root is None else (self.root,)
        policies = ("average", "local") if self.defence is None else ("local",)
        return Traits(batch_norm=policies, required=required)

    def update(self, state: Tensors, up: Tensors, cohort: Cohort) -> tuple[Changes, Mix | None]:
        rows, mix = self.defended(up["delta"], cohort)
        return {"x": mix.of(rows, state["x"], self.server_lr)[0]}, mix

    def defended(self, delta: Tensor, cohort: Cohort) -> tuple[Tensor, Mix]:
        """Rows and their mix: the updates [S, P] in their shares, or what the defence makes of
        them. Void where the cohort is too small for it."""
        mean = cohort.mean(self.weighting)
        if self.defence is None:
            return delta, mean
        hostile = defences.fewer(self.defence, self.hostile, len(delta), cohort.lost)
        if hostile is None:
            least = 2 * self.hostile + (1 if self.defence == "trimmed_mean" else 3)
            raise Void(
                f"defence: {self.defence} against {self.hostile} hostile clients needs {least} in "
                f"a round, and round {cohort.round} has {len(delta)}; lower hostile, or raise "
                "participation."
            )
        root = 0 if self.root is None else int((cohort.ids == self.root).nonzero())
        share = onto(mean.weight, delta.device)
        rows, weight = defences.defended(self.defence, delta, share, hostile, root)
        return rows, Mix(weight)


@dataclass(frozen=True)
class Undefended:
    """Narrows FedAvg's options for who takes no step along the mean of the updates."""

    defence: None = field(default=None, kw_only=True)
    hostile: Literal[1] = field(default=1, kw_only=True)
    root: None = field(default=None, kw_only=True)
