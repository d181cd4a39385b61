"""The algorithms, by name. `ALGORITHMS` drives the command line, the contract tests, the docs' table and the benchmark."""

from __future__ import annotations

from pflcore.algorithms.adapt import LocalOnly
from pflcore.algorithms.base import Cohort, FedAvg, Outcome, Pool, State, Stop, begin, cohort_of, evaluate, sample, step
from pflcore.algorithms.cluster import Ensemble, HypCluster
from pflcore.algorithms.control import Scaffold, Waffle
from pflcore.algorithms.finetune import FineTune
from pflcore.algorithms.knn import KnnPer
from pflcore.algorithms.mixture import APFL
from pflcore.algorithms.multitask import MRMTL, Ditto, Mocha
from pflcore.algorithms.proximal import FedProx
from pflcore.algorithms.server_opt import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi, QFedAvg
from pflcore.algorithms.similarity import WeightErosion

ALGORITHMS: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    # server optimizers
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fedopt": FedOpt,
    "qfedavg": QFedAvg,
    # proximal
    "fedprox": FedProx,
    # multi-task
    "ditto": Ditto,
    "mrmtl": MRMTL,
    "mocha": Mocha,
    # control variates
    "scaffold": Scaffold,
    "waffle": Waffle,
    # similarity
    "weight_erosion": WeightErosion,
    # clusters
    "hypcluster": HypCluster,
    "ensemble": Ensemble,
    # mixture
    "apfl": APFL,
    # adaptation
    "local": LocalOnly,
    "finetune": FineTune,
    "knnper": KnnPer,
}

__all__ = ["ALGORITHMS", "APFL", "Cohort", "FedAvg", "Outcome", "Pool", "State", "Stop", "begin", "cohort_of", "evaluate", "sample", "step"]
