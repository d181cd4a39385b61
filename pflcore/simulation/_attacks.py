"""Clients that attack a run: their poisoned labels, and the uploads that they send.

Symbols: N clients of the federation; S of the cohort; B of them attack, H are honest;
P numbers of an update; C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pflcore._device import to_device
from pflcore.algorithms._protocol import Tensors, Traits
from pflcore.check import (
    Ids,
    PositiveFloat,
    check_fields,
    ids_of,
    known_id,
    reject,
    require,
)
from pflcore.data._federation import Federation
from pflcore.simulation._uploads import CohortResult, update_origins
from pflcore.train._random import generator_of

Attack = Literal[
    "label_flip",
    "sign_flip",
    "scale",
    "noise",
    "little",
    "inner_product",
]
# The strength of each attack where a user gives none.
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

    Letters: s is the `strength` and d [P] a client's honest update. m and v [P] are the
    mean and the standard deviation of the honest clients' updates, coordinate by
    coordinate.

    - "label_flip": the clients train honestly, on labels C - 1 - y.
    - "sign_flip": they send -s d (default: s = 1).
    - "scale": they send s d (default: s = 100).
    - "noise": they send d + s r z, where z is standard normal and r the root mean
      square of d (default: s = 10).
    - "little": they send m - s v, "a little is enough" (Baruch et al. 2019, Algorithm
      3; default: s = 1.5).
    - "inner_product": they send -s m, inner product manipulation (Xie et al. 2020,
      section 4; default: s = 10).
    Clients with "little" and "inner_product" know all honest uploads of the round, and
    send the same.

    An update is the upload "delta", or an uploaded model minus the one that the server
    has of the client. A control variate that is uploaded with it is treated the same
    way, apart from it. Other uploads (losses, choices of a cluster) stay honest. Raises
    ValueError for an unknown attack, client or strength.

    Args:
        attack: The name of the attack.
        clients: The ids of the clients that attack, each a whole number from 0 to N -
            1, or their names.
        strength: The factor s of the attack; None for its default. "label_flip" has
            none.
    """

    attack: Attack
    clients: Ids
    strength: PositiveFloat | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        fits = self.strength is None or self.attack != "label_flip"
        require(fits, "strength", "None, as labels are flipped or not", self.strength)
        object.__setattr__(self, "clients", _plain_ids(self.clients))

    @property
    def factor(self) -> float | None:
        """The factor s: the `strength`, or the attack's default; None for no factor."""
        return self.strength or DEFAULT_STRENGTH.get(self.attack)

    def with_ids(self, data: Federation) -> Adversary:
        """The adversary with the ids of its clients in place of their names."""
        if not any(isinstance(client, str) for client in self.clients):
            return self
        ids = ids_of("adversary", self.clients, data.n, data.names)
        return replace(self, clients=ids.tolist())

    def check_target(self, target: Any) -> None:
        """Raises ValueError where the client that a model is made for attacks.

        Args:
            target: The id of the client; None for an algorithm without a target.
        """
        words = "clients other than the target, which the model is made for"
        require(target not in self.clients, "adversary", words, self.clients)

    def honest_clients(self, n: int) -> Tensor:
        """The ids [H] of the honest clients of n, ascending.

        Raises ValueError where an attacking client does not exist, or where no client
        is honest.
        """
        bad = ids_of("adversary", self.clients, n)
        ids = torch.arange(n)
        honest = ids[~torch.isin(ids, bad)]
        require(len(honest), "adversary", "at least one honest client", self.clients)
        return honest

    def poison_data(self, data: Federation) -> Federation:
        """The federation that the clients train on.

        With "label_flip" the attacking clients have other labels, in every split.
        Raises ValueError where the targets are numbers, which cannot be flipped.
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
        bad = [known_id("adversary", client) for client in self.clients]
        flipped[bad] = data.classes - 1 - flipped[bad]
        return replace(data, relabel=flipped)

    def attack_uploads(
        self, result: CohortResult, traits: Traits, server: Tensors
    ) -> CohortResult:
        """The results of a cohort with the uploads that reach the server.

        Args:
            result: The results of honest work.
            traits: The traits of the algorithm, which name the uploaded models.
            server: The server's state, which has the models that updates start from.
        """
        cohort = result.cohort
        generator = generator_of(cohort.seed, cohort.round, "transport")
        bad = torch.isin(cohort.ids, torch.tensor(self.clients))
        if self.attack == "label_flip" or not bad.any():
            return result
        up = dict(result.up)
        origins = update_origins(result, traits, server)
        # What belongs to an update, as a control variate does, is attacked as one.
        follows = [key for key in traits.clipped_with_update if key in up]
        for key in dict.fromkeys([*origins, *follows]):
            rows = up[key].flatten(1)
            is_bad = to_device(bad, rows.device)
            origin = origins.get(key, rows.new_zeros(())).to(rows)
            if origin.dim():
                origin = origin.flatten(1)
            origin = origin.expand_as(rows)
            # Without honest clients the attackers take their own updates for honest.
            is_honest = is_bad if bad.all() else ~is_bad
            updates = rows - origin
            attack = self._attacked_rows(updates[is_bad], updates[is_honest], generator)
            sent = origin[is_bad] + attack
            up[key] = rows.index_put((is_bad,), sent).view_as(up[key])
        return result.with_rows(up=up)

    def _attacked_rows(
        self,
        bad_updates: Tensor,  # [B, P] honest work of the attacking clients
        honest_updates: Tensor,  # [H, P]
        generator: torch.Generator,
    ) -> Tensor:
        """The updates [B, P] that the attacking clients send.

        The letters are those of the class.
        """
        s = self.factor or 0.0
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


def _plain_ids(clients: Ids) -> tuple[int | str, ...]:
    """Ids as whole numbers, and names as they are."""
    return tuple(i if isinstance(i, str) else int(i) for i in clients)
