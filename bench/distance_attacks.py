"""Attacks by clients that know how a server weighs them.

They are played by `bench.hostile nearby`; docs/bad_clients.md has what they win.

Symbols: S clients of the cohort, of which B attack; P numbers of an update.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pflcore import Adversary, ops
from pflcore.algorithms._protocol import Tensors, Traits
from pflcore.simulation._uploads import CohortResult, update_origins

# Uploads whose weights a server finds by their distance from another upload of the
# client that receives the mix: FedDWA's models w from its guidance model g.
COMPARED_WITH = {"w": "g"}


@dataclass(frozen=True)
class DistanceAdversary(Adversary):
    """Clients that attack rules whose weights fall with distance.

    Letters: s is the `strength`, and m [P] the mean of the honest updates.

    - "nearby": they send c - s r m / |m|. c [P] is what the server compares all uploads
      with for their victim: FedDWA the uploaded guidance model, WAFFLE the target's
      update, and other rules the victim's own upload. r is the distance from c to the
      nearest honest upload that is not c itself. So no honest client has a larger
      weight in the victim's model, and no other upload that leads as far against m has
      a larger one.
    - "nearby_blind": the same by clients that know nothing of the honest ones. They
      take the attackers' honest work for theirs, and themselves for their victims.
      Where r is unknown, because one is alone, r is the length of its own update.
    - "control": they send their update honestly and s times their control variate, by
      which no rule weighs them.

    Args:
        victims: The ids of the honest clients that "nearby" aims at, shared out in
            turn. None, or a round without any of them, stands for the algorithm's
            target, or for all honest clients where it has none.
    """

    attack: Literal["nearby", "nearby_blind", "control"]  # type: ignore[assignment]
    victims: tuple[int, ...] | None = None

    def attack_uploads(
        self, result: CohortResult, traits: Traits, server: Tensors
    ) -> CohortResult:
        """The results of a cohort with the uploads that reach the server."""
        ids = result.cohort.ids
        bad = torch.isin(ids, torch.tensor(self.clients))
        if not bad.any():
            return result
        up = dict(result.up)
        if self.attack == "control":
            up["control"] = up["control"].clone()
            up["control"][bad] *= self.strength or 0.0
            return result.with_rows(up=up)
        victims = self._victim_rows(bad, ids, traits)
        knows = bad if self.attack == "nearby_blind" or bad.all() else ~bad
        origins = update_origins(result, traits, server)
        names = [*origins, *({"control"} & up.keys())]
        for name in names:
            if name in COMPARED_WITH.values():
                continue
            rows = up[name].flatten(1)
            origin = origins.get(name, rows.new_zeros(())).to(rows)
            origin = origin.flatten(1) if origin.dim() else origin
            compared = up.get(COMPARED_WITH.get(name, name), up[name]).flatten(1)
            sent = self._nearby_rows(rows, rows - origin, compared, knows, victims)
            up[name] = rows.index_put((bad,), sent).view_as(up[name])
        return result.with_rows(up=up)

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


def distance_adversary(
    attack: str,
    clients: tuple[int, ...],
    strength: float | None = None,
    victims: tuple[int, ...] | None = None,
) -> DistanceAdversary:
    """The adversary, with the strength that docs/bad_clients.md has measured."""
    default = 100.0 if attack == "control" else 1.0
    return DistanceAdversary(
        attack,  # type: ignore[arg-type]
        clients,
        strength or default,
        victims,
    )
