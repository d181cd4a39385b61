"""One round of federated learning: train, accept, serve, commit.

- `train_cohort` trains the clients of the cohort on their own data.
- `receive_uploads` lets an adversary replace the uploads of its clients, where a run
  has one. Then it leaves out clients whose results are not finite, and clips long
  updates, by `accept`.
- `serve` computes what the round changes, the server's new state above all.
- `commit` writes the changes.

Only `commit` writes to the run's state, once everything that it writes is computed. The
steps before it read the state, and note in a `RoundOutcome` what happened.

Symbols: N clients of the federation; S of them in the cohort; b numbers of batch norm's
running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pflcore._cohort import cohort_size
from pflcore._device import to_device
from pflcore.algorithms._protocol import (
    Algorithm,
    BadUpload,
    Changes,
    Cohort,
    MixingWeights,
    RowUpdate,
    VoidRound,
    apply,
    check_training,
    normalize_rows,
)
from pflcore.check import Fraction, PositiveInt, checked, require
from pflcore.simulation._rows import CohortRows, take_rows
from pflcore.simulation._sampling import (
    draw_clients,
    sampling_kind,
    with_required,
)
from pflcore.simulation._signals import defer_signals
from pflcore.simulation._state import (
    RunConfig,
    State,
    check_client_states,
    check_server_changes,
    client_rows,
    flatten_state,
    initial_state,
    unflatten_state,
)
from pflcore.simulation._uploads import (
    CohortResult,
    RoundOutcome,
    accept,
    drop_clients,
    non_finite_names,
    warn_bad_upload,
)
from pflcore.train import Clients
from pflcore.train._gpu_flags import REPEATABLE_FLAGS
from pflcore.train._workers import single_threaded

__all__ = ["RunConfig", "initial_state", "step"]


@checked
def step(config: RunConfig, state: State, ids: Tensor) -> tuple[State, RoundOutcome]:
    """Plays one round with the clients `ids` [S], in any order.

    There may be none: then the server alone acts, if at all. A client whose upload or
    new state is not finite is left out of the round and keeps its old state. The round
    is void where a required client is left out, where no client is left and the server
    does not act alone, or where the server's new state is not finite. A void round
    changes nothing but the counters of rounds.

    Do not use `state` afterwards: its rows are updated in place. Raises ValueError for
    a repeated client, or where a required client is missing.
    """
    alg = config.algorithm
    check_training(alg, config.training)
    ids = _check_cohort(alg, ids)
    with single_threaded(config.fits_one_thread(len(ids))):
        if len(ids):
            result = train_cohort(config, state, ids)
            result, outcome = receive_uploads(config, state, result)
            changes = serve(alg, state, result, outcome, config.averages)
        else:
            cohort = config.cohort(ids, state.round + 1, state.participated)
            outcome = RoundOutcome([], cohort=cohort)
            changes = serve_without_clients(alg, state, outcome)
        # No rank commits a round in which another has failed.
        config.ranks.exchange(f"the commit of round {state.round + 1}")
        return commit(state, changes, outcome), outcome


def _check_cohort(alg: Algorithm, ids: Tensor) -> Tensor:
    """The ids [S] in ascending order.

    Raises ValueError for a repeated client, or where a required client is missing.
    """
    ascending: Tensor = ids.unique()
    require(len(ascending) == len(ids), "ids", "each client once", ids.tolist())
    required = alg.traits.required_clients
    absent = set(required) - set(ascending.tolist())
    wanted = f"the clients {required} in every round"
    require(not absent, "ids", wanted, ascending.tolist())
    return ascending


def train_cohort(config: RunConfig, state: State, ids: Tensor) -> CohortResult:
    """Trains the clients `ids` [S] on their own data.

    The ranks of a run share the clients.
    """
    ranks = config.ranks
    with REPEATABLE_FLAGS.set_for(config.net.w0.device):
        cohort = config.cohort(ids, state.round + 1, state.participated)
        # An algorithm may draw here for the whole cohort, so every rank does it.
        down = config.algorithm.send(state.server, cohort)
        buffers = state.buffers[to_device(ids, state.buffers.device)]
        before = CohortRows(client_rows(config, state, ids, down), buffers)
        clients = Clients(config, ids, cohort.round, buffers)
        blocks = clients.block_numbers if ranks.count > 1 else None
        by_largest = config.engine.autograd == "vmap"
        shares = ranks.share(cohort.num_samples, blocks, by_largest=by_largest)
        own = shares[ranks.rank]
        place = f"the training of round {cohort.round}"
        rows = None
        with ranks.own_work(place):
            if len(own):
                part = take_rows(before, own)
                client_states, up, fit = config.algorithm.train(
                    take_rows(down, own), part.client_states, clients.at(own)
                )
                check_client_states(part.client_states, client_states)
                rows = CohortRows(client_states, fit.buffers, up, fit.loss)
        rows = ranks.gather(place, rows, shares)
    return CohortResult(cohort, down, before.client_states, rows)


def receive_uploads(
    config: RunConfig, state: State, result: CohortResult
) -> tuple[CohortResult, RoundOutcome]:
    """The results that the server accepts, and the outcome so far.

    An adversary, where the run has one, replaces the uploads of its clients before.
    """
    algorithm = config.algorithm
    robustness = config.robustness
    if robustness.adversary is not None:
        result = robustness.adversary.attack_uploads(
            result, algorithm.traits, state.server
        )
    return accept(
        result,
        algorithm,
        state.server,
        variances=config.net.variances,
        clip=robustness.clip,
        sends_buffers=config.averages,
    )


def serve(
    alg: Algorithm,
    state: State,
    result: CohortResult,
    outcome: RoundOutcome,
    averages: bool,
    on_refused: Callable[[BadUpload], None] = warn_bad_upload,
) -> Changes:
    """The changes of a round, named as in `flatten_state`.

    They are empty where the round is void. The server computes its new state from the
    uploads. `outcome` is written to: it receives the mixing weights, or the reason why
    the round is void. Where the algorithm cannot use some uploads, the round is served
    again without their clients.

    Args:
        alg: The algorithm.
        state: The state before the round, which is only read.
        result: The accepted results of the cohort.
        outcome: The outcome of the round so far.
        averages: Mix batch norm's statistics as the models are mixed.
        on_refused: Is called with the uploads that the algorithm cannot use.
    """
    if outcome.void:
        is_alone = outcome.cohort is not None and not len(outcome.cohort.ids)
        if alg.traits.required_clients or not is_alone:
            return {}
        return serve_without_clients(alg, state, outcome)
    try:
        new, mixing = alg.update(state.server, result.up, result.cohort)
    except VoidRound as reason:
        outcome.void = True
        outcome.void_reason = str(reason)
        return {}
    except BadUpload as bad:
        _check_named(bad, result.cohort)
        on_refused(bad)
        result = drop_clients(result, outcome, alg.traits, bad.reasons)
        if outcome.void:
            outcome.void_reason = str(bad)
        return serve(alg, state, result, outcome, averages, on_refused)
    changes = server_changes(alg, state, new, outcome)
    if outcome.void:
        return {}
    outcome.mix = mixing
    changes |= client_changes(result)
    buffers = result.rows.buffers
    if averages and mixing is not None and buffers.numel():
        changes["batch_norm"] = mixed_buffers(buffers, mixing, result.cohort.n)
    return changes


def serve_without_clients(
    alg: Algorithm, state: State, outcome: RoundOutcome
) -> Changes:
    """The changes of a round in which no client is left: the server acts, if at all.

    `outcome` is written to: a round whose clients were all left out is void only where
    the server does nothing.
    """
    assert outcome.cohort is not None
    new = alg.update_without_clients(state.server, outcome.cohort)
    if new:
        outcome.void = False
        outcome.void_reason = None
    return server_changes(alg, state, new, outcome)


def _check_named(bad: BadUpload, cohort: Cohort) -> None:
    """Raises ValueError where `update` refuses the upload of no client of the round."""
    ids = cohort.ids.tolist()
    expected = f"numbers of clients of the round, such as {ids[0]}"
    is_named = not bad.reasons.keys().isdisjoint(ids)
    require(is_named, "update: BadUpload", expected, [*bad.reasons])


def server_changes(
    alg: Algorithm, state: State, new: Changes, outcome: RoundOutcome
) -> Changes:
    """The changes of the server's state, named as in `flatten_state`.

    Where some are not finite, the round is void: `outcome` says so, and the result is
    empty.

    Args:
        alg: The algorithm.
        state: The state before the round.
        new: The changes that a hook of the server returned.
        outcome: The outcome of the round so far.
    """
    check_server_changes(alg, state.server, new)
    outcome.non_finite_state = non_finite_names(state.server, new)
    outcome.void |= bool(outcome.non_finite_state)
    return {} if outcome.void else {f"server.{name}": t for name, t in new.items()}


def client_changes(result: CohortResult) -> Changes:
    """The changes of the state of the cohort's clients by training."""
    ids = result.cohort.ids
    rows = result.rows
    changes: Changes = {
        f"clients.{name}": RowUpdate(ids, new)
        for name, new in rows.client_states.items()
    }
    changes["batch_norm"] = RowUpdate(ids, rows.buffers)
    changes["seen"] = RowUpdate(ids, torch.ones_like(ids, dtype=torch.bool))
    return changes


def mixed_buffers(
    buffers: Tensor,  # [S, b] of the cohort
    mixing: MixingWeights,
    n: int,
) -> RowUpdate:
    """Batch norm's statistics after the round, mixed as the models are.

    A client whose model took nothing of the cohort keeps the statistics from before the
    round, as it keeps its model: the statistics that it trained go only where its
    update goes.
    """
    weight = mixing.weight.double()
    mixed = mixing._replace(weight=normalize_rows(weight)).aggregate(buffers)
    if mixing.receivers is None:  # all clients share one model
        return RowUpdate(torch.arange(n), mixed.expand(n, -1))
    has_weights = (weight.sum(1) > 0).cpu()
    rows = mixed[to_device(has_weights, mixed.device)]
    return RowUpdate(mixing.receivers[has_weights], rows)


def commit(state: State, changes: Changes, outcome: RoundOutcome) -> State:
    """The state after the round.

    A void round moves the counters of rounds alone. A round in which no client is left,
    or none was, leaves the number of void rounds in a row as it is.

    Do not use `state` afterwards: its rows are updated in place.
    """
    round = state.round + 1
    if outcome.void:
        return replace(state, round=round, void_rounds=state.void_rounds + 1)
    has_clients = len(outcome.ids) > len(outcome.dropped)
    void_rounds = 0 if has_clients else state.void_rounds
    # A signal that ends the program between two rows would leave half a round.
    with defer_signals():
        tensors = apply(flatten_state(state), changes)
        return unflatten_state(tensors, round, void_rounds)


@checked
def sample_cohort(
    config: RunConfig,
    round: PositiveInt,
    participation: Fraction = 1.0,
    clients: Tensor | None = None,
    sampling: Any = "uniform",
) -> Tensor:
    """Draws the cohort of a round: client ids [S], int64, ascending.

    S is `cohort_size` of the clients that may take part; by "poisson" it is any number
    from 0. Required clients always take part.

    Raises ValueError where a function returns no ids, or some that may not take part.

    Args:
        config: The options of the run.
        round: The round, from 1.
        participation: The fraction of clients that take part.
        clients: The ids of the clients that may take part, ascending; None for all.
        sampling: The rule by which they are drawn, as a `Simulation` holds it once it
            is made: "uniform", "poisson", "size", a tensor of weights [N], or a
            function.
    """
    if clients is None:
        clients = torch.arange(config.data.n)
    count = cohort_size(participation, len(clients))
    drawn = draw_clients(config, round, count, clients, sampling, participation)
    required = config.algorithm.traits.required_clients
    # By these rules any number may be drawn, and the required clients join them.
    is_free = sampling_kind(sampling) in ("function", "poisson")
    return with_required(drawn, required, clients, None if is_free else count)
