"""Clients that attack a run: their poisoned labels, and the uploads that they send.

Symbols: N clients of the federation; S of the cohort; B of them attack, H are honest;
P numbers of an update; C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pflcore import ops
from pflcore._device import to_device
from pflcore.algorithms._protocol import Algorithm, Tensors, Traits
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
    "nearby",
    "nearby_blind",
    "control",
]
# The strength of each attack where a user gives none.
DEFAULT_STRENGTH = {
    "sign_flip": 1.0,
    "scale": 100.0,
    "noise": 10.0,
    "little": 1.5,
    "inner_product": 10.0,
    "nearby": 1.0,
    "nearby_blind": 1.0,
    "control": 100.0,
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
    - "nearby": they send c - s r m / |m|, against rules whose weights fall with
      distance (default: s = 1). c [P] is what the server compares all uploads with for
      their victim: FedDWA the uploaded guidance model, WAFFLE the target's update, and
      other rules the victim's own upload (`Traits.compared_with`). r is the distance
      from c to the nearest honest upload that is not c itself. So no honest
      client has a larger weight in the victim's model, and no other upload that leads
      as far against m has a larger one.
    - "nearby_blind": the same by a client that knows nothing of the honest clients, and
      takes the attackers' honest work for theirs, and itself for its victim. Where r is
      unknown, because it is alone, r is the length of its own update.
    - "control": they send their update honestly and s times their control variate, by
      which no rule weighs them (default: s = 100).

    Clients with "little", "inner_product" and "nearby" know all honest uploads of the
    round. Those with "little" or "inner_product" send the same; those with "nearby"
    share out the victims in turn, the first attacker for the first victim.

    An update is the upload "delta", or an uploaded model minus the one that the server
    has of the client. A control variate that is uploaded with it is treated the same
    way, apart from it. Other uploads (losses, choices of a cluster) stay honest, and so
    does the guidance model with "nearby". Raises ValueError for an unknown attack,
    client or strength, and a run does for "control" where no client uploads a control
    variate.

    Args:
        attack: The name of the attack.
        clients: The ids of the clients that attack, each a whole number from 0 to N -
            1, or their names.
        strength: The factor s of the attack; None for its default. "label_flip" has
            none.
        victims: The honest clients that "nearby" aims at, by id or name. None for the
            algorithm's target, or all honest clients where it has none. In a round
            without any of them it aims at all honest clients of the round.
    """

    attack: Attack
    clients: Ids
    strength: PositiveFloat | None = None
    victims: Ids | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.victims is not None:
            if self.attack != "nearby":
                words = f"None, as {self.attack!r} aims at nobody"
                reject("victims", words, self.victims)
            require(len(self.victims), "victims", "at least one client", self.victims)
            object.__setattr__(self, "victims", _plain_ids(self.victims))
        fits = self.strength is None or self.attack != "label_flip"
        require(fits, "strength", "None, as labels are flipped or not", self.strength)
        object.__setattr__(self, "clients", _plain_ids(self.clients))
        strength = self.strength or DEFAULT_STRENGTH.get(self.attack)
        object.__setattr__(self, "strength", strength)

    def with_ids(self, data: Federation) -> Adversary:
        """The adversary with the ids of its clients in place of their names."""
        fields: dict[str, Any] = {}
        for name in ("clients", "victims"):
            clients = getattr(self, name)
            if clients and any(isinstance(client, str) for client in clients):
                argument = "adversary" if name == "clients" else name
                ids = ids_of(argument, clients, data.n, data.names)
                fields[name] = ids.tolist()
        return replace(self, **fields) if fields else self

    def check_target(self, target: Any) -> None:
        """Raises ValueError where the client that a model is made for attacks.

        Args:
            target: The id of the client; None for an algorithm without a target.
        """
        words = "clients other than the target, which the model is made for"
        require(target not in self.clients, "adversary", words, self.clients)

    def check_uploads(self, alg: Algorithm) -> None:
        """Raises ValueError where the attack is on uploads that the algorithm lacks.

        A control variate belongs to an update, so the traits of an algorithm name it
        in `clipped_with_update`.
        """
        has_control = "control" in alg.traits.clipped_with_update
        require(
            has_control or self.attack != "control",
            "adversary",
            f"an attack on what {type(alg).__name__} uploads",
            self.attack,
            remedy="only clients with control variates, as Scaffold's, can send false "
            "ones; take another algorithm or attack",
        )

    def honest_clients(self, n: int) -> Tensor:
        """The ids [H] of the honest clients of n, ascending.

        Raises ValueError where an attacking client does not exist, where no client is
        honest, or where a victim is not.
        """
        bad = ids_of("adversary", self.clients, n)
        ids = torch.arange(n)
        honest = ids[~torch.isin(ids, bad)]
        require(len(honest), "adversary", "at least one honest client", self.clients)
        if self.victims is not None:
            victims = ids_of("victims", self.victims, n)
            are_honest = not torch.isin(victims, bad).any()
            require(are_honest, "victims", "honest clients", self.victims)
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
        is_nearby = self.attack in ("nearby", "nearby_blind")
        up = dict(result.up)
        origins = update_origins(result, traits, server)
        for key in self._attacked_keys(up, origins, traits):
            rows = up[key].flatten(1)
            is_bad = to_device(bad, rows.device)
            origin = origins.get(key, rows.new_zeros(())).to(rows)
            if origin.dim():
                origin = origin.flatten(1)
            origin = origin.expand_as(rows)
            # Without honest clients the attackers take their own updates for honest.
            is_honest = is_bad if bad.all() else ~is_bad
            updates = rows - origin
            if is_nearby:
                compared = result.up[traits.compared_with.get(key, key)].flatten(1)
                victims = self._victim_rows(bad, cohort.ids, traits)
                known = is_bad if self.attack == "nearby_blind" else is_honest
                sent = self._nearby_rows(rows, updates, compared, known, victims)
            else:
                attack = self._attacked_rows(
                    updates[is_bad], updates[is_honest], generator
                )
                sent = origin[is_bad] + attack
            up[key] = rows.index_put((is_bad,), sent).view_as(up[key])
        return result.with_rows(up=up)

    def _attacked_keys(
        self, up: Tensors, origins: Tensors, traits: Traits
    ) -> list[str]:
        """The names of the uploads that the attackers replace."""
        control = [name for name in ("control",) if name in up]
        if self.attack == "control":
            return control
        keys = [*origins, *control]
        if self.attack in ("nearby", "nearby_blind"):
            return [key for key in keys if key not in traits.compared_with.values()]
        return keys

    def _victim_rows(
        self,
        bad: Tensor,  # bool [S]
        ids: Tensor,  # [S]
        traits: Traits,
    ) -> list[int]:
        """The row of the victim of each of the B attackers of a cohort."""
        attackers: list[int] = bad.nonzero()[:, 0].tolist()
        if self.attack == "nearby_blind" or bad.all():
            return attackers
        aims = self.victims or traits.required_clients
        is_victim = torch.isin(ids, torch.tensor(aims, dtype=torch.int64)) & ~bad
        if not is_victim.any():
            is_victim = ~bad
        victims: list[int] = is_victim.nonzero()[:, 0].tolist()
        return [victims[i % len(victims)] for i in range(len(attackers))]

    def _nearby_rows(
        self,
        rows: Tensor,  # [S, P] honest uploads
        updates: Tensor,  # [S, P] the same, less their origins
        compared: Tensor,  # [S, P] what a client's distances are measured from
        known: Tensor,  # bool [S] mask of the clients whose work the attackers know
        victims: list[int],  # B rows
    ) -> Tensor:
        """The uploads [B, P] as near to their victims as the nearest honest one."""
        m = updates[known].mean(0)
        length = torch.linalg.vector_norm(m, dtype=torch.float64)
        harm = -(m / length.clamp(min=1e-300)).to(m)
        sent = []
        for victim in victims:
            center = compared[victim : victim + 1]
            distance = ops.pairwise_sqdist(center, rows[known])[0].sqrt()
            distance = distance[distance > 0]
            if len(distance):
                radius = distance.min()
            else:
                radius = torch.linalg.vector_norm(updates[victim])
            sent.append(center[0] + (self.strength or 0.0) * radius.to(m) * harm)
        return torch.stack(sent)

    def _attacked_rows(
        self,
        bad_updates: Tensor,  # [B, P] honest work of the attacking clients
        honest_updates: Tensor,  # [H, P]
        generator: torch.Generator,
    ) -> Tensor:
        """The updates [B, P] that the attacking clients send.

        The letters are those of the class.
        """
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


def _plain_ids(clients: Ids) -> tuple[int | str, ...]:
    """Ids as whole numbers, and names as they are."""
    return tuple(i if isinstance(i, str) else int(i) for i in clients)
