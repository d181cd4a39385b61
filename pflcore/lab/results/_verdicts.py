"""Which methods differ from a baseline: a paired t test over seeds; it needs scipy.

Runs of one seed have the same data, weights, cohorts and batches, so they are pairs. Of
several methods in one table the p values are corrected by Holm (1979): where no method
differs, the chance that the line names any is at most `LEVEL`, for differences that are
normal.

`compare_with_baseline` is the one comparison: the line below a table and the column of
a leaderboard are made of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from pflcore.check import import_optional

LEVEL = 0.05
MIN_SEEDS = 3  # with two, no difference that one meets is large enough

Word = Literal["better", "worse", "no difference shown"]


class Verdict(NamedTuple):
    """The comparison of a method with a baseline.

    The interval is that of this method alone. The word is corrected for the number of
    methods, so an interval without 0 may stand beside "no difference shown".

    Attributes:
        word: "better", "worse" or "no difference shown".
        difference: The mean of the differences to the baseline.
        low: The lower end of its 95 % interval.
        high: The upper end of its 95 % interval.
        seeds: The number of pairs.
    """

    word: Word
    difference: float
    low: float
    high: float
    seeds: int


def compare_with_baseline(
    differences: Mapping[str, Sequence[float]],
    higher_is_better: bool,
    planned: int = 0,
) -> dict[str, Verdict]:
    """The verdict on each method of a table.

    A method with fewer than `MIN_SEEDS` differences has none, and neither has one with
    a difference that is infinite.

    Args:
        differences: The differences to the baseline of each method, one for each seed;
            NaN for a seed without a pair.
        higher_is_better: The direction of the numbers.
        planned: The number of comparisons for which p values are corrected, where it is
            more than those that are there.
    """
    pairs = {name: np.asarray(values, float) for name, values in differences.items()}
    # An infinite number is a model that diverged, and a test of the other seeds alone
    # would praise its method.
    pairs = {name: d[~np.isnan(d)] for name, d in pairs.items()}
    pairs = {
        name: d
        for name, d in pairs.items()
        if len(d) >= MIN_SEEDS and np.isfinite(d).all()
    }
    shown = shown_by_holm({name: p_value(d) for name, d in pairs.items()}, planned)
    verdicts = {}
    for name, d in pairs.items():
        word: Word = "no difference shown"
        if name in shown:
            word = "better" if (d.mean() > 0) == higher_is_better else "worse"
        mean = float(d.mean())
        half = half_width(d)
        verdicts[name] = Verdict(word, mean, mean - half, mean + half, len(d))
    return verdicts


def verdict_lines(
    differences: Mapping[str, Sequence[float]], baseline: str, higher_is_better: bool
) -> list[str]:
    """A sentence on who is better and who is worse than the baseline.

    There is none where no method has a verdict, see `compare_with_baseline`.

    Args:
        differences: The differences to the baseline of each method, one for each seed.
        baseline: The name of the baseline.
        higher_is_better: The direction of the numbers.
    """
    verdicts = compare_with_baseline(differences, higher_is_better)
    if not verdicts:
        return []
    names: dict[str, list[str]] = {"better": [], "worse": [], "no difference shown": []}
    for name, verdict in verdicts.items():
        names[verdict.word].append(name)
    parts = [f"{word}: {', '.join(some)}" for word, some in names.items() if some]
    seeds = sorted({verdict.seeds for verdict in verdicts.values()})
    count = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    return [
        f"Against {baseline}, at the last evaluation: {'; '.join(parts)} (paired t "
        f"test over {count} seeds, corrected by Holm at {100 * LEVEL:g} %)."
    ]


def half_width(differences: np.ndarray) -> float:
    """Half the width of the 95 % interval for the mean of paired differences [n]."""
    n = len(differences)
    quantile = import_optional("scipy.stats").t.ppf(1 - LEVEL / 2, n - 1)
    return float(quantile * differences.std(ddof=1) / math.sqrt(n))


def p_value(differences: np.ndarray) -> float:
    """The two-sided p value of paired differences [n], for a true mean of 0."""
    if np.ptp(differences) == 0:  # no spread: t is infinite, or 0 / 0
        return 0.0 if differences[0] else 1.0
    test = import_optional("scipy.stats").ttest_1samp(differences, 0.0)
    return float(test.pvalue)


def shown_by_holm(p_values: Mapping[str, float], planned: int = 0) -> set[str]:
    """The names whose p value counts at `LEVEL` after Holm's correction.

    Args:
        p_values: The p value of each comparison, by its name.
        planned: The number of comparisons, where it is more than those that are there.
    """
    count = max(planned, len(p_values))
    shown: set[str] = set()
    for name in sorted(p_values, key=lambda name: p_values[name]):
        if p_values[name] > LEVEL / (count - len(shown)):
            break
        shown.add(name)
    return shown
