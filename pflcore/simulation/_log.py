"""Lines for the logger "pflcore", by which users follow a run.

A line of level INFO describes a round, and one of level DEBUG the engine of a run.
Nothing is printed unless the user configures logging, and nothing is computed for a
level that is off. No line changes a number of the run.
"""

from __future__ import annotations

import logging
from typing import Any

from pflcore.algorithms import name_of
from pflcore.metrics import mean
from pflcore.simulation._state import RunConfig
from pflcore.simulation._uploads import RoundOutcome

LOGGER = logging.getLogger("pflcore")
# Without this handler Python would print warnings of the logger by itself.
LOGGER.addHandler(logging.NullHandler())
# Entries of an evaluation that are no values of clients.
NO_VALUES = ("size", "clients")


def log_engine(config: RunConfig) -> None:
    """Logs the engine of a run, with the reason for it."""
    if not LOGGER.isEnabledFor(logging.DEBUG):
        return
    engine = config.engine
    LOGGER.debug(
        "%s, seed %d: %s (%s)",
        name_of(config.algorithm),
        config.seed,
        engine.words,
        engine.reason,
    )


def log_round(record: dict[str, Any], rounds: int, outcome: RoundOutcome) -> None:
    """Logs one round by its record.

    Args:
        record: The record of the round.
        rounds: The number of rounds of the run.
        outcome: The outcome of the round, with the reason why it is void.
    """
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    words = [f"{len(record['cohort'])} clients"]
    if record["dropped"]:
        words.append(f"dropped {record['dropped']}")
    if record["void"]:
        words.append(f"void ({outcome.void_reason or 'not finite'})")
    if record["train_loss"] is not None:
        words.append(f"mean training loss {record['train_loss']:.4g}")
    words.append(f"{record['seconds']:.3g} s")
    for name, values in (record["eval"] or {}).items():
        if name not in NO_VALUES:
            words.append(f"{name} {mean(values):.4g}")
    LOGGER.info(
        "%s, seed %d, round %d of %d: %s",
        record["algorithm"],
        record["seed"],
        record["round"],
        rounds,
        ", ".join(words),
    )
