"""The algorithms, by name. `ALGORITHMS` drives the command line, the contract tests, the docs' table and the benchmark."""

from __future__ import annotations

from pflcore.algorithms.base import Cohort, FedAvg, Outcome, Pool, State, begin, cohort_of, evaluate, sample, step

ALGORITHMS: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
}

__all__ = ["ALGORITHMS", "Cohort", "FedAvg", "Outcome", "Pool", "State", "begin", "cohort_of", "evaluate", "sample", "step"]
