"""Which methods differ from a baseline: a paired t test over seeds; it needs scipy.

Runs of one seed have the same data, weights, cohorts and batches, so they are pairs. Of
several methods in one table the p values are corrected by Holm (1979): where no method
differs, the chance that the line names any is at most `LEVEL`, for differences that are
normal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pflcore.check import import_optional

LEVEL = 0.05
MIN_SEEDS = 3  # with two, no difference that one meets is large enough


def verdict_lines(
    differences: Mapping[str, Sequence[float]], baseline: str, higher_is_better: bool
) -> list[str]:
    """A sentence on who is better and who is worse than the baseline.

    There is none where no method has `MIN_SEEDS` differences. A method with one that is
    infinite is left out.

    Args:
        differences: The differences to the baseline of each method, one for each seed.
        baseline: The name of the baseline.
        higher_is_better: The direction of the numbers.
    """
    pairs = {name: np.asarray(values, float) for name, values in differences.items()}
    # NaN is a seed without a pair. An infinite number is a model that diverged, and a
    # test of the other seeds alone would praise its method.
    pairs = {name: d[~np.isnan(d)] for name, d in pairs.items()}
    pairs = {
        name: d
        for name, d in pairs.items()
        if len(d) >= MIN_SEEDS and np.isfinite(d).all()
    }
    if not pairs:
        return []
    shown = shown_by_holm({name: p_value(d) for name, d in pairs.items()})
    names: dict[str, list[str]] = {"better": [], "worse": [], "no difference shown": []}
    for name, d in pairs.items():
        is_better = (d.mean() > 0) == higher_is_better
        word = "better" if is_better else "worse"
        names[word if name in shown else "no difference shown"].append(name)
    parts = [f"{word}: {', '.join(some)}" for word, some in names.items() if some]
    seeds = sorted({len(d) for d in pairs.values()})
    count = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    return [
        f"Against {baseline}, at the last evaluation: {'; '.join(parts)} (paired t "
        f"test over {count} seeds, corrected by Holm at {100 * LEVEL:g} %)."
    ]


def p_value(differences: np.ndarray) -> float:
    """The two-sided p value of paired differences [n], for a true mean of 0."""
    if np.ptp(differences) == 0:  # no spread: t is infinite, or 0 / 0
        return 0.0 if differences[0] else 1.0
    test = import_optional("scipy.stats").ttest_1samp(differences, 0.0)
    return float(test.pvalue)


def shown_by_holm(p_values: Mapping[str, float]) -> set[str]:
    """The names whose p value counts at `LEVEL` after Holm's correction."""
    shown: set[str] = set()
    for name in sorted(p_values, key=lambda name: p_values[name]):
        if p_values[name] > LEVEL / (len(p_values) - len(shown)):
            break
        shown.add(name)
    return shown
