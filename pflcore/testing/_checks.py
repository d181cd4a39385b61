"""The checks of an algorithm's contract, one function per property.

A check takes a `Case`, and compares its recorded play with another play, in which one
thing is different. It raises a Fault where the property does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from pflcore.algorithms import algorithm_of
from pflcore.algorithms._fedavg import FedAvg
from pflcore.algorithms._protocol import Algorithm, Claim, Tensors, Uploads
from pflcore.check import checked, summarize
from pflcore.data._federation import Federation
from pflcore.testing._case import ALL, COHORTS, TRAINING, Case
from pflcore.testing._faults import (
    CLOSE,
    EXACT,
    Fault,
    Tolerance,
    errors_as_faults,
    first_difference,
    non_finite_keys,
    require_same,
)
from pflcore.testing._members import names_are_known
from pflcore.train._engines import Engine
from pflcore.train._workers import Workers


def stays_finite(case: Case) -> None:
    """On well-behaved data all numbers stay finite, and no client is dropped."""
    flaw = "is not finite on well-behaved data"
    for round, outcome in enumerate(case.recorded.done, 1):
        for client in outcome.dropped:
            raise Fault(
                f"train: the upload or new state of client {client} {flaw}, in round "
                f"{round}."
            )
    for key, round in case.recorded.unfit:
        raise Fault(f"update: {key} {flaw}, after round {round}.")
    for key in non_finite_keys(case.evaluate(case.recorded.last, case.config())):
        raise Fault(f"model or predict: {key} {flaw}.")


def runs_repeat(case: Case) -> None:
    """One seed gives the same bits, for any number of threads."""
    again = case.left(case.config())
    fault = (
        "{} differs between two runs of one seed: something draws from the global "
        "generator, or the algorithm remembers something between rounds outside its "
        "state."
    )
    require_same(case.found, again, fault)
    with_threads = case.left(case.config(workers=Workers(3)))
    fault = (
        "{} differs between 1 and 3 worker threads; hooks and losses must not share "
        "what they change."
    )
    require_same(case.found, with_threads, fault)


def nobody_trains_on_test(case: Case) -> None:
    """The trained state does not depend on the split "test"."""
    fault = (
        "train or update: {} depends on the split 'test', which is there for the "
        "evaluation; choose by 'val'."
    )
    require_same(case.found, case.left(case.otherwise_tested()), fault)


def engines_agree(case: Case) -> None:
    """The engines "loop" and "vmap" give the same results up to rounding."""
    fault = (
        "{} differs between the engines 'loop' and 'vmap': a loss or an update mixes "
        "clients or branches on values."
    )
    by_vmap = case.left(case.config(engine=Engine("vmap")))
    require_same(case.found, by_vmap, fault, Tolerance(1e-6, 1e-8))


def numbers_of_clients_play_no_part(case: Case) -> None:
    """Renumbered clients have the same results under their new numbers.

    A client's random draws depend on its number. So here each epoch is one batch of all
    samples, which shuffling cannot change. If the results still change with the seed,
    the algorithm draws other random numbers, and the property is not checked.
    """
    # Required clients keep their numbers, unless the option `target` names them.
    if case.given.traits.required_clients and not hasattr(case.given, "target"):
        return
    order = [2, 0, 3, 1]
    first = _renumbered_results(case, ALL)
    got = _renumbered_results(case, order)
    want = {key: value[order] for key, value in first.items()}
    for key, value in want.items():
        has_columns = value.shape[1:] == (len(ALL),)
        if has_columns and first_difference({key: value}, {key: got[key]}, CLOSE):
            # The tensor also has a column for each client.
            want[key] = value[:, order]
    if first_difference(want, got, CLOSE) is None:
        return
    other_seed = _renumbered_results(case, ALL, seed=1)
    if first_difference(first, other_seed, CLOSE) is None:
        fault = (
            "update: {} depends on the clients' numbers: renumbered clients give other "
            "results than the same ones renumbered."
        )
        require_same(want, got, fault, CLOSE)


def _renumbered_results(case: Case, numbers: Sequence[int], seed: int = 0) -> Tensors:
    """The clients' states and evaluation, where client `numbers[i]` has the number i.

    Each tensor has a row for each client.
    """
    size = int(case.data.size("train").max())
    training = replace(TRAINING, batch_size=size, epochs=2)
    config = case.renumbered(numbers, training=training, seed=seed)
    cohorts = []
    for ids in COHORTS:
        cohorts.append([numbers.index(client) for client in ids])
    last = case.play(config, cohorts).last
    states = {f"clients.{key}": value for key, value in last.clients.items()}
    return states | case.evaluate(last, config)


def rounds_play_no_part(case: Case) -> None:
    """A round's results depend on the length of the run only where traits say so."""
    if case.given.traits.rounds_reason:
        return
    fault = (
        "update or train: {} depends on the number of rounds of the run, so that a "
        "finished run cannot go on; say why in traits, as rounds_reason."
    )
    longer = case.left(case.config(rounds=2 * case.config().rounds))
    require_same(case.found, longer, fault)


def seeds_differ(case: Case) -> None:
    """Another seed gives another trained state."""
    other_seed = case.play(case.config(seed=1))
    last = case.recorded.states[-1]
    if first_difference(other_seed.states[-1], last, EXACT) is None:
        raise Fault(
            "train: another seed gives the same run, so nothing that is trained on "
            "shuffled batches is kept or sent."
        )


def one_client_suffices(case: Case) -> None:
    """A federation of one client is trained and evaluated with finite results."""
    config = case.renumbered([2], target=2)
    play = case.play(config, [[0], [0]])
    is_void = any(outcome.void for outcome in play.done)
    if is_void or non_finite_keys(case.evaluate(play.last, config)):
        raise Fault(
            "update or model: a federation of one client gives results that are not "
            "finite."
        )


def float32_runs(case: Case) -> None:
    """The algorithm also runs in float32."""
    case = replace(case, dtype=torch.float32)
    config = case.config()
    try:
        play = case.play(config, COHORTS[:2])
        case.evaluate(play.last, config)
    except Fault as fault:
        raise Fault(f"in float32, as runs are by default, {fault}") from fault


def broken_clients_are_absent(case: Case) -> None:
    """A client whose training overflows counts as absent."""
    broken = 1
    required = case.given.traits.required_clients
    # Whole numbers as features do not overflow, and a round needs its required clients.
    if not case.data.x.is_floating_point() or broken in required:
        return
    config = case.breaking([broken])
    cohorts = COHORTS[:2]
    play = case.play(config, cohorts)
    for key, _ in play.unfit:
        raise Fault(
            f"update: {key} is not finite after a client's update overflowed; nothing "
            "but checked uploads may reach it."
        )
    if all(outcome.dropped for outcome in play.done):
        others = []
        for ids in cohorts:
            others.append([client for client in ids if client != broken])
        without = case.play(config, others)
        fault = "train or update: {} depends on a client whose update was not finite."
        require_same(
            play.states[-1], without.states[-1], fault, Tolerance(1e-12, 1e-14)
        )


def bytes_are_counted(case: Case) -> None:
    """No column of an upload is always zero.

    A column's bytes count as sent, also those of zeros. The columns of parameters that
    FedAvg does not change may be zero.
    """
    uploads = case.recorded.uploads
    # The parameters that training moves at all are those that FedAvg moves.
    plain = replace(case, given=FedAvg())
    movement = plain.play(plain.config(), [ALL]).uploads[0]["delta"].abs()
    for key, first in uploads[0].items():
        if first.shape[1:] != (case.net.size,):
            continue  # the columns are not the parameters of the model
        for name, columns in case.net.slices.items():
            is_sent = any(upload[key][:, columns].any() for upload in uploads)
            if not is_sent and movement[:, columns].max() > 1e-9:
                raise Fault(
                    f"train: the columns of {name!r} in the upload {key!r} are always "
                    "zero, but are counted as sent; send the shared columns only, by "
                    "net.split and net.join."
                )


def uploads_are_declared(case: Case) -> None:
    """The hook `uploads` names all uploads, with their shapes and dtypes.

    Each is an update, whose length a run can bound, or a `Claim`.
    """
    alg = case.given
    config = case.config(alg)
    play = case.recorded
    for number, (tensors, up) in enumerate(
        zip(play.states, play.uploads, strict=False)
    ):
        state = {
            key.removeprefix("server."): value
            for key, value in tensors.items()
            if key.startswith("server.")
        }
        cohort = config.cohort(
            torch.tensor(play.done[number].ids), number + 1, tensors["seen"]
        )
        with errors_as_faults("uploads", f" in round {number + 1}"):
            expected = alg.uploads(state, alg.send(state, cohort), cohort)
        _require_declared(expected, up, {"delta", *alg.traits.model_uploads})


def _require_declared(expected: Uploads, up: Tensors, updates: set[str]) -> None:
    """Raises Fault unless the uploads [S, ...] are those that the server expects.

    Args:
        expected: The result of the hook `uploads`.
        up: The uploads by name.
        updates: The names of those that may be updates.
    """
    for key in {**expected, **up}:
        if key not in up or key not in expected:
            raise Fault(
                f"uploads: expected the uploads of train, {', '.join(up) or 'none'}, "
                f"got {', '.join(expected) or 'none'}; give the shape and dtype of "
                f"{key!r}, as a Claim with the numbers that it may hold."
            )
        value = expected[key]
        if not isinstance(value, Claim) and key not in updates:
            raise Fault(
                f"uploads: expected a Claim as {key!r}, which is no update, got a "
                "tensor; say which numbers it may hold, or name it in "
                "traits.model_uploads."
            )
        like = value.like if isinstance(value, Claim) else value
        if (like.shape, like.dtype) != (up[key].shape[1:], up[key].dtype):
            raise Fault(
                f"uploads: expected {summarize(up[key][0])} as {key!r}, which train "
                f"uploads for one client, got {summarize(like)}."
            )


# The checks by name, in their order. Each raises Fault where its property fails.
CHECKS: dict[str, Callable[[Case], None]] = {
    f.__name__: f
    for f in (
        names_are_known,
        stays_finite,
        runs_repeat,
        nobody_trains_on_test,
        engines_agree,
        numbers_of_clients_play_no_part,
        rounds_play_no_part,
        seeds_differ,
        one_client_suffices,
        float32_runs,
        bytes_are_counted,
        broken_clients_are_absent,
        uploads_are_declared,
    )
}


@checked
def check(
    algorithm: Algorithm | type[Algorithm] | str,
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Federation | None = None,
    skip: Collection[str] = (),
) -> None:
    """Raises Fault where an algorithm does not keep its contract.

    Fault is an AssertionError with one sentence about the first property of `CHECKS`
    that does not hold.

    Args:
        algorithm: An instance, a class, a name or "package.module:Class".
        model: A function that makes the model, for an algorithm that cannot train the
            default, a small MLP.
        data: A federation, for an algorithm that cannot use the default, samples of
            three Gaussian classes. Its first four clients are used, in float64.
        skip: The names of the checks to leave out.

    Raises ValueError for a federation of fewer than four clients.
    """
    case = Case(algorithm_of(algorithm), model, data)
    for name, run_check in CHECKS.items():
        if name not in skip:
            run_check(case)
