"""The updates of clients that are far longer than those of the other clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

# An update is an outlier if its norm is more than this many times the cohort's median.
# Honest clients stay below it, also those with many times the data of the others.
OUTLIER_RATIO = 20.0


class RelativeUpdate(NamedTuple):
    """An update's norm, relative to its round.

    Attributes:
        ratio: The norm of the update over the median norm of its round.
        client: The id of the client.
        round: The round, from 1.
    """

    ratio: float
    client: int
    round: int


def longest_update(records: Iterable[Mapping[str, Any]]) -> RelativeUpdate | None:
    """The longest update in the records of rounds; None without updates."""
    updates = itertools.chain.from_iterable(map(updates_of_round, records))
    return max(updates, default=None)


def updates_of_round(record: Mapping[str, Any]) -> Iterator[RelativeUpdate]:
    """Yields each update of a round that has a relative norm."""
    ids = record.get("cohort") or []
    norms = record.get("relative_update_norm") or []
    for client, norm in zip(ids, norms, strict=False):
        if norm is not None:
            yield RelativeUpdate(norm, client, record["round"])
