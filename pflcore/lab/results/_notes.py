"""Notes on runs, in words: rows of a table have them, and the lines below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from pflcore.simulation._history import History

Groups = Mapping[str, list[History]]  # the runs of each group, by its label
SHOWN_OUTLIERS = 3  # the most clients that a footnote names


def notes_on(run: History) -> Iterator[str]:
    """Yields the notes for the last column of a run's row."""
    planned = run.header.get("rounds")
    if isinstance(planned, int) and run.rounds_played < planned:
        yield f"{run.rounds_played} of {planned} rounds"
    elif run.stopped:
        yield f"stopped after round {run.rounds_played}"
    yield from describe_incidents(run)
    yield from _missing_values(run)
    if run.held_out:
        yield run.held_out
    clipped: set[int] = set()
    for record in run.rounds:
        clipped.update(record.get("clipped") or [])
    if clipped:
        yield f"the updates of {_plural(len(clipped), 'client')} were clipped"
    adversary = run.header.get("adversary")
    if adversary:
        names = [str(run.client_name(client)) for client in adversary["clients"]]
        clients = "clients" if len(names) > 1 else "client"
        yield f"{adversary['attack']} by {clients} {', '.join(names)}"


def _missing_values(run: History) -> Iterator[str]:
    """Yields the numbers of clients without finite loss or a metric."""
    missing: dict[str, Tensor] = {}  # the mask [N] of the clients, by their lack
    if "loss" in run.last_evaluation:
        missing["no finite loss"] = run.last_values("loss").isinf()
    for name in run.extra_metrics:
        has_samples = run.last_values("size") > 0
        missing[f"no {name}"] = run.last_values(name).isnan() & has_samples
    for lack, clients in missing.items():
        count = int(clients.sum())
        if count:
            verb = "have" if count > 1 else "has"
            yield f"{_plural(count, 'client')} {verb} {lack}"


def _plural(count: int, noun: str) -> str:
    """The count and the noun, in the plural above 1."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


def describe_incidents(run: History) -> list[str]:
    """The numbers of void rounds and of dropped clients, in words."""
    void = sum(bool(record.get("void")) for record in run.rounds)
    dropped = sum(len(record.get("dropped") or []) for record in run.rounds)
    incidents = []
    if void:
        incidents.append(f"{void} void rounds")
    if dropped:
        incidents.append(f"{dropped} times a client was dropped")
    return incidents


def describe_outliers(run: History) -> str:
    """The text on clients with far longer updates, longest first.

    It is "" where there is no outlier.
    """
    outliers = sorted(run.outliers().items(), key=lambda item: -item[1][0])
    descriptions = []
    for client, (ratio, rounds) in outliers[:SHOWN_OUTLIERS]:
        times = _plural(rounds, "round")
        name = run.client_name(client)
        descriptions.append(
            f"client {name} by up to {ratio:.3g} times the median ({times})"
        )
    text = ", ".join(descriptions)
    if len(outliers) > SHOWN_OUTLIERS:
        text += f" and {len(outliers) - SHOWN_OUTLIERS} more"
    return text


def footnotes_on(
    groups: Groups, distinct_groups: Groups, delta: float | None = None
) -> Iterator[str]:
    """Yields the lines below the table.

    Args:
        groups: All runs of each group, by its label.
        distinct_groups: One run of each seed, by the label of its group.
        delta: See `History.privacy`.
    """
    yield from _target_footnotes(groups)
    yield from _privacy_footnotes(distinct_groups, delta)
    for algorithm, runs in distinct_groups.items():
        for run in runs:
            yield from _run_footnotes(algorithm, run, groups[algorithm])


def _privacy_footnotes(groups: Groups, delta: float | None) -> Iterator[str]:
    """Yields what noise on the sum of updates hides; once for runs of equal rounds."""
    for algorithm, runs in groups.items():
        values = dict.fromkeys(run.privacy(delta) for run in runs)
        for value in values:
            if value is not None:
                epsilon, of_delta = value
                yield f"{algorithm}: epsilon = {epsilon:.3g} at delta = {of_delta:.3g}."


def _target_footnotes(groups: Groups) -> Iterator[str]:
    """Yields the algorithms that made models for one client or each."""
    one_target = []
    each_target = []
    for label, runs in groups.items():
        target = runs[0].header.get("model_target")
        if isinstance(target, int):
            one_target.append(f"{label} for client {runs[0].client_name(target)}")
        elif target == "each client":
            each_target.append(label)
    if one_target:
        yield f"Made for one client, whose columns count: {', '.join(one_target)}."
    if each_target:
        yield f"Made for each client in a run of its own: {', '.join(each_target)}."


def _run_footnotes(algorithm: str, run: History, group: list[History]) -> Iterator[str]:
    """Yields the footnotes on one run.

    Args:
        algorithm: The label of the run's group.
        run: The run, which counts for its seed.
        group: All runs of the group.
    """
    name = f"{algorithm}, seed {run.header.get('seed', '?')}"
    outliers = describe_outliers(run)
    if outliers:
        yield f"{name}, moved far: {outliers}; look at the data or set clip."
    yield from _repeat_footnotes(name, run, group)
    if run.stopped:
        yield f"{name}, stopped: {run.stopped}"


def _repeat_footnotes(name: str, run: History, group: list[History]) -> Iterator[str]:
    """Yields footnotes on the other runs with a run's seed, which do not count."""
    seed = run.header.get("seed")
    if seed is None:
        return
    others = [o for o in group if o is not run and o.header.get("seed") == seed]
    # A run that was broken off is the same one up to there.
    equal = [other for other in others if run.compare(other).round is None]
    if equal:
        yield f"{name}: the same run is here {1 + len(equal)} times, and counts once."
    count = len(others) - len(equal)
    if count:
        runs = "another run has" if count == 1 else f"{count} other runs have"
        yield (
            f"{name}: {runs} this seed and other numbers, and "
            f"{'does' if count == 1 else 'do'} not count; `pflcore diff` says why."
        )
