"""The algorithms, by name. `ALGORITHMS` drives the command line, the contract tests, the docs' table and the benchmark."""

from __future__ import annotations

from pflcore.algorithms.adapt import LocalOnly
from pflcore.algorithms.base import Cohort, FedAvg, Outcome, Pool, State, begin, cohort_of, evaluate, sample, step
from pflcore.algorithms.control import Scaffold, Waffle
from pflcore.algorithms.mixture import APFL
from pflcore.algorithms.proximal import FedProx
from pflcore.algorithms.similarity import WeightErosion

ALGORITHMS: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    # proximal
    "fedprox": FedProx,
    # control variates
    "scaffold": Scaffold,
    "waffle": Waffle,
    # similarity
    "weight_erosion": WeightErosion,
    # mixture
    "apfl": APFL,
    # adaptation
    "local": LocalOnly,
}

__all__ = ["ALGORITHMS", "APFL", "Cohort", "FedAvg", "Outcome", "Pool", "State", "begin", "cohort_of", "evaluate", "sample", "step"]
