"""The search of a plan's grids: a choice at an edge is widened once.

A grid has the same number of candidates for every method. Where the best value of an
option is the least or the largest one that was tried, a better one may lie beyond. So
the next value beyond is tried, too, beside the values that were chosen. The table marks
what lies at an end even then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pflcore.lab.tuning import Candidate, Grid, Trial, Tuned, candidate_of

DIGITS = 2  # of a value beyond the grid


def values_beyond(values: Sequence[Any], chosen: float) -> list[float]:
    """Values to try one step beyond an end of a grid, the best one first.

    The step has the ratio of the chosen value to its neighbour. Where the grid has
    whole numbers alone, the nearest one follows, for an option that takes no others.
    There is none beyond 0.

    Args:
        values: the option's values, numbers of which `chosen` is the least or largest
        chosen: the value at the end
    """
    ordered = sorted(values)
    neighbour = ordered[1] if chosen == ordered[0] else ordered[-2]
    if not chosen or not neighbour:
        return []
    beyond: float = chosen * chosen / neighbour
    exponent = math.floor(math.log10(abs(beyond)))
    rounded = round(beyond, DIGITS - 1 - exponent)
    if not all(isinstance(value, int) for value in values):
        return [rounded]
    whole = round(beyond)
    wanted = [whole] if whole in (beyond, rounded) else [rounded, whole]
    return [value for value in wanted if value != chosen]


def grid_beyond(tuned: Tuned, grid: Grid) -> dict[str, list[Any]]:
    """The grid of the chosen values and of those beyond the edges at which they lie.

    The chosen candidate is one of it, so that a search of this grid has one that can be
    chosen, even if all beyond it diverge. A value that an option cannot have is left
    out.
    """
    best = tuned.best.candidate
    choices = {key: [value] for key, value in best.options.items()}
    for key in tuned.edges:
        beyond = values_beyond(grid[key], best.options[key])
        choices[key] += [value for value in beyond if can_have(best, key, value)][:1]
    return choices


def can_have(candidate: Candidate, key: str, value: Any) -> bool:
    """True where an option may have the value, beside the candidate's other ones."""
    try:
        candidate_of(candidate.algorithm, candidate.training, {key: value})
    except ValueError:
        return False
    return True


def merge_trials(searches: Sequence[Tuned]) -> Tuned:
    """One search of the same candidates on the data of several ones.

    A candidate that cannot be chosen in one of them cannot be chosen at all.
    """
    trials = []
    for same in zip(*(tuned.trials for tuned in searches), strict=True):
        values = [value for trial in same for value in trial.values]
        stopped = next((trial.stopped for trial in same if trial.stopped), None)
        trials.append(Trial(same[0].candidate, values, stopped))
    return replace(searches[0], trials=trials)


def add_trials(tuned: Tuned, more: Sequence[Trial]) -> Tuned:
    """The search with further trials; those of its own candidates are passed over."""
    known = [trial.candidate.options for trial in tuned.trials]
    new = [trial for trial in more if trial.candidate.options not in known]
    return replace(tuned, trials=[*tuned.trials, *new])
