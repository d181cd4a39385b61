"""The line below a table that says which methods differ from a baseline."""

import numpy as np
import pytest
from parts.user import simulation

from pflcore import History
from pflcore.lab.results.table import table

pytest.importorskip("scipy")
pytest.importorskip("pandas")
NAMES = ("fedavg", "ditto", "finetune", "local", "apfl", "fedrep")


def runs(accuracies):
    """Runs with the accuracies [methods, seeds], the first of them the baseline's."""
    played = simulation("fedavg", rounds=1).run()
    made = []
    for name, of_seeds in zip(NAMES, accuracies, strict=False):
        for seed, accuracy in enumerate(of_seeds):
            header = {**played.header, "algorithm": name, "seed": seed}
            run = History(header, [dict(played.rounds[0])])
            evaluation = dict(run.rounds[0]["eval"])
            count = len(evaluation["accuracy"])
            run.rounds[0]["eval"] = {
                **evaluation,
                "accuracy": [float(accuracy)] * count,
            }
            made.append(run)
    return made


def line(accuracies):
    text = table(runs(accuracies), baseline="fedavg")
    lines = [line for line in text.splitlines() if line.startswith("Against fedavg")]
    return lines[0] if lines else None


def test_differences_that_seeds_share_are_shown():
    spread = np.array([0.3, 0.1, 0.2, 0.4, 0.05])  # of cuts, far larger than the rest
    small = np.array([1e-3, 2e-3, 1.5e-3, 1e-3, 2e-3])
    noise = np.array([0.01, -0.02, 0.015, -0.01, 0.004])
    methods = [spread, spread + small, spread - 0.01, spread + noise]
    assert line(methods) == (
        "Against fedavg, at the last evaluation: better: ditto; worse: finetune; no "
        "difference shown: local (paired t test over 5 seeds, corrected by Holm at "
        "5 %)."
    )


def test_a_method_that_diverged_with_one_seed_is_not_judged_by_the_others():
    from_seeds = [[0.1, 0.2, 0.3, 0.25], [0.4, 0.5, 0.6, 0.56]]
    assert "better: ditto" in line(from_seeds)
    from_seeds[1][2] = float("inf")
    assert line(from_seeds) is None


def test_two_seeds_show_nothing():
    assert line([[0.1, 0.2], [0.4, 0.5]]) is None
