"""Groups of a run's options, among them the clients that attack it.

Each group is one frozen value. An `Adversary` also tells what its clients send instead
of their honest updates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import annotated_types as at
import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import Tensors, Traits
from pflcore.check import (
    Ids,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_fields,
    checked,
    ids_of,
    reject,
    require,
)
from pflcore.data._federation import Federation
from pflcore.metrics import Metric
from pflcore.simulation._uploads import CohortResult, update_origins
from pflcore.train._random import generator_of

# A larger number of threads is a slip.
ThreadCount = Annotated[
    int, at.Interval(ge=1, le=1024), at.doc("a whole number, from 1 to 1024")
]
Attack = Literal["label_flip", "sign_flip", "scale", "noise", "little", "inner_product"]
DEFAULT_STRENGTH = {
    "sign_flip": 1.0,
    "scale": 100.0,
    "noise": 10.0,
    "little": 1.5,
    "inner_product": 10.0,
}


@dataclass(frozen=True)
class Adversary:
    """Clients that attack in every round in which they take part.

    s is the `strength`, d [P] a client's honest update, m and v [P] the mean and the
    standard deviation of the honest clients' updates, coordinate by coordinate.

    - "label_flip": the clients train honestly, on labels C - 1 - y.
    - "sign_flip": they send -s d (default: s = 1).
    - "scale": they send s d (100).
    - "noise": d + s r z, z standard normal and r the root mean square of d (10).
    - "little": m - s v, "a little is enough" (Baruch et al. 2019, Algorithm 3; 1.5).
    - "inner_product": -s m, inner product manipulation (Xie et al. 2020, section 4;
      10).

    The last two attackers know all honest updates of the round, and send the same.

    An update is the upload "delta", or an uploaded model minus the one that the server
    has of the client. A control variate that is uploaded beside it is treated alike, by
    itself. What else an algorithm uploads (losses, choices of a cluster) stays honest.
    Raises ValueError for an unknown attack, client or strength.
    """

    attack: Attack
    clients: Ids
    strength: PositiveFloat | None = None  # see above

    def __post_init__(self) -> None:
        check_fields(self)
        fits = self.strength is None or self.attack != "label_flip"
        require(fits, "strength", "None, as labels are flipped or not", self.strength)
        object.__setattr__(self, "clients", tuple(map(int, self.clients)))
        strength = self.strength or DEFAULT_STRENGTH.get(self.attack)
        object.__setattr__(self, "strength", strength)

    def honest_clients(self, n: int) -> Tensor:
        """The ids [H] of the other clients of n, ascending.

        Raises ValueError where an attacking client does not exist, or no other does.
        """
        bad = ids_of("adversary", self.clients, n)
        ids = torch.arange(n)
        honest = ids[~torch.isin(ids, bad)]
        require(len(honest), "adversary", "at least one honest client", self.clients)
        return honest

    def poison_data(self, data: Federation) -> Federation:
        """The data that the clients train on.

        With "label_flip" the attacking clients have other labels, in every split.
        """
        if self.attack != "label_flip":
            return data
        if data.classes is None:
            reject("adversary", "an attack on numbers as targets", self.attack)
        relabel = data.relabel
        if relabel is None:
            labels = torch.arange(data.classes, device=data.device)
            relabel = labels.expand(data.n, -1)
        flipped = relabel.clone()
        bad = list(self.clients)
        flipped[bad] = data.classes - 1 - flipped[bad]
        return replace(data, relabel=flipped)

    def attack_uploads(
        self, result: CohortResult, traits: Traits, server: Tensors
    ) -> CohortResult:
        """The results of a cohort with the uploads that reach the server."""
        cohort = result.cohort
        generator = generator_of(cohort.seed, cohort.round, "transport")
        bad = torch.isin(cohort.ids, torch.tensor(self.clients))
        if self.attack == "label_flip" or not bad.any():
            return result
        up = dict(result.up)
        origins = update_origins(result, traits, server)
        for key in [*origins, *up.keys() & {"control"}]:
            rows = up[key].flatten(1)
            is_bad = to_device(bad, rows.device)
            origin = origins.get(key, rows.new_zeros(1)).to(rows).expand_as(rows)
            # Without honest clients the attackers take their own updates for honest.
            is_honest = is_bad if bad.all() else ~is_bad
            updates = rows - origin
            attack = self._attacked_rows(updates[is_bad], updates[is_honest], generator)
            sent = origin[is_bad] + attack
            up[key] = rows.index_put((is_bad,), sent).view_as(up[key])
        return result._replace(up=up)

    def _attacked_rows(
        self,
        bad_updates: Tensor,  # [B, P]: honest work of the attacking clients
        honest_updates: Tensor,  # [H, P]
        generator: torch.Generator,
    ) -> Tensor:
        """The updates [B, P] that the attacking clients send; letters as above."""
        s = self.strength or 0.0
        m = honest_updates.mean(0)
        if self.attack == "little":
            sent = m - s * honest_updates.std(0, correction=0)
        elif self.attack == "inner_product":
            sent = -s * m
        elif self.attack == "noise":
            z = torch.randn(
                bad_updates.shape, generator=generator, dtype=bad_updates.dtype
            )
            r = bad_updates.square().mean(1, keepdim=True).sqrt()
            sent = bad_updates + s * r * z.to(bad_updates.device)
        elif self.attack == "sign_flip":
            sent = -s * bad_updates
        else:
            sent = s * bad_updates
        return sent.expand_as(bad_updates)


@checked
@dataclass(frozen=True)
class Evaluation:
    """When, on what and for whom the personalized models are evaluated."""

    # rounds; the last one in any case; 0: never, and of no split
    every: NonNegativeInt = 1
    split: str = "test"
    # ids, or so many, drawn once; None: all
    clients: Tensor | Ids | PositiveInt | None = None
    train_loss: bool = False  # the loss on every client's training data, too
    # "auc", "f1", "mae", "r2", ..., or functions of one client's (scores, labels)
    metrics: Sequence[str | Metric] | Mapping[str, Metric] = ()

    def due(self, round: int, rounds: int) -> bool:
        """True where `round`, from 1, is evaluated in a run of `rounds` rounds."""
        return self.every > 0 and (round % self.every == 0 or round == rounds)


@checked
@dataclass(frozen=True)
class Robustness:
    """What a run does about long updates, and the clients that attack it."""

    # no update is longer (Euclidean norm), before the server sees it
    clip: PositiveFloat | None = None
    adversary: Adversary | None = None  # clients that attack; the others are evaluated


@checked
@dataclass(frozen=True)
class Hardware:
    """Where a run is computed; never changes a result beyond rounding.

    Under engine "vmap" clients train in blocks of at most `clients_per_block`,
    neighbours by size. Blocks are made of the whole cohort, so a run's bits are the
    same for any number of workers, and others for another `clients_per_block`. Larger
    blocks are faster, smaller ones take less memory: on a CPU, with 100 clients of an
    MLP, blocks of 64 take about 1.1 times as long as one of all, of 32 1.4 times, of 16
    twice, of 8 three times. A GPU computes one block after another.

    On a GPU the gradients of local steps are captured as CUDA graphs, which changes no
    bit. A model whose steps cannot be captured is trained without; the record says why.
    A captured step repeats what Python decided when it was captured: take graphs=False
    where attributes of the model change between rounds.
    """

    # auto: the fastest that fits
    engine: Literal["auto", "chain", "loop", "vmap"] = "auto"
    # never changes a result; None: one for each core; a GPU has one
    workers: ThreadCount | None = None
    device: str = "cpu"
    # the clients' rows: "memory", a folder, or by what fits
    storage: str | Path = "auto"
    # clients of a block under vmap: it changes last digits; None: 64 on a CPU, 128 on a
    # GPU
    clients_per_block: PositiveInt | None = None
    graphs: bool = True  # on a GPU: capture local steps as CUDA graphs
