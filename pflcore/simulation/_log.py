"""Lines for the logger "pflcore", by which users follow a run.

A line of level INFO describes a round, one of level DEBUG a client's work in a round.
Nothing is printed unless the user configures logging, and nothing is computed for a
level that is off. No line changes a number of the run.

Symbols: S clients of the cohort.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from torch import Tensor

from pflcore.algorithms import name_of
from pflcore.algorithms._protocol import Algorithm, Tensors
from pflcore.metrics import human_bytes, mean
from pflcore.simulation._uploads import (
    CohortResult,
    RoundOutcome,
    payload_bytes,
    update_norms,
)
from pflcore.train._context import TrainContext

LOGGER = logging.getLogger("pflcore")
# Without this handler Python would print warnings of the logger by itself.
LOGGER.addHandler(logging.NullHandler())
# Entries of an evaluation that are no values of clients.
NO_VALUES = ("size", "clients")


class ClientWork(NamedTuple):
    """The numbers of a cohort's work that its log lines need.

    Attributes:
        ids: The ids of the clients.
        norms: The norm of each client's longest update; None where clients upload no
            update.
        loss: The mean of each client's losses over its minibatches.
        bytes_up: The bytes of the upload of one client.
    """

    ids: list[int]
    norms: Tensor | None  # [S]
    loss: Tensor  # [S]
    bytes_up: int


def log_engine(algorithm: Algorithm, context: TrainContext) -> None:
    """Logs the engine of a run, with the reason for it."""
    if not LOGGER.isEnabledFor(logging.DEBUG):
        return
    engine = context.engine
    LOGGER.debug(
        "%s, seed %d: engine %s (%s): %s",
        name_of(algorithm),
        context.seed,
        engine.name,
        engine.form,
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


def observe_clients(
    result: CohortResult, algorithm: Algorithm, server: Tensors
) -> ClientWork | None:
    """The numbers of a cohort's work; None where DEBUG is off.

    Args:
        result: The results of the cohort, as they reach the server.
        algorithm: The algorithm, whose traits name the uploaded models.
        server: The server's state before the round, which is only read.
    """
    if not LOGGER.isEnabledFor(logging.DEBUG):
        return None
    ids = result.cohort.ids.tolist()
    norms = update_norms(result, algorithm.traits, server)
    bytes_up = payload_bytes(result.up) // max(1, len(ids))
    return ClientWork(ids, norms, result.loss, bytes_up)


def log_clients(
    work: ClientWork | None, algorithm: Algorithm, round: int, outcome: RoundOutcome
) -> None:
    """Logs each client's work, and the reason of a drop.

    Args:
        work: The result of `observe_clients`.
        algorithm: The algorithm.
        round: The round, from 1.
        outcome: The outcome of the round.
    """
    if work is None:
        return
    name = name_of(algorithm)
    losses = work.loss.tolist()
    # Nine digits tell two numbers of float32 apart, so that runs can be compared.
    norms = [None] * len(losses)
    if work.norms is not None:
        norms = work.norms.tolist()
    for client, norm, loss in zip(work.ids, norms, losses, strict=True):
        words = [f"loss {loss:.9g}", f"{human_bytes(work.bytes_up)} sent"]
        if norm is not None:
            words.insert(0, f"update norm {norm:.9g}")
        if client in outcome.clipped:
            words.append("clipped")
        if client in outcome.drop_reasons:
            words.append(f"dropped: {outcome.drop_reasons[client]}")
        text = ", ".join(words)
        LOGGER.debug("%s, round %d, client %d: %s", name, round, client, text)
