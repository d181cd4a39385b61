"""The algorithms, by name. `ALGORITHMS` drives the command line, the contract tests, the docs' table and the benchmark."""

from __future__ import annotations

from pflcore.algorithms.adapt import LocalOnly
from pflcore.algorithms.base import Cohort, FedAvg, Outcome, Pool, State, Stop, begin, cohort_of, evaluate, sample, step
from pflcore.algorithms.cluster import Ensemble, HypCluster
from pflcore.algorithms.clustered import ClusteredFL
from pflcore.algorithms.control import Scaffold, Waffle
from pflcore.algorithms.factorized_waffle import FactorizedWaffle
from pflcore.algorithms.feddwa import FedDWA, FedDWAQP
from pflcore.algorithms.finetune import FineTune
from pflcore.algorithms.gallery import SFL, FedAMP, HeurFedAMP
from pflcore.algorithms.knn import KnnPer
from pflcore.algorithms.meta import PerFedAvg, PFedMe
from pflcore.algorithms.mixture import APFL
from pflcore.algorithms.multitask import MRMTL, Ditto, Mocha
from pflcore.algorithms.proximal import FedProx
from pflcore.algorithms.server_opt import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi, QFedAvg
from pflcore.algorithms.similarity import WeightErosion
from pflcore.algorithms.split import FedRoD
from pflcore.algorithms.validation import L2C, FedFomo

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
    "pfedme": PFedMe,
    # multi-task
    "ditto": Ditto,
    "mrmtl": MRMTL,
    "mocha": Mocha,
    # control variates
    "scaffold": Scaffold,
    "waffle": Waffle,
    # similarity
    "weight_erosion": WeightErosion,
    "feddwa": FedDWA,
    "feddwa_qp": FedDWAQP,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "sfl": SFL,
    "fedfomo": FedFomo,
    "l2c": L2C,
    # clusters
    "hypcluster": HypCluster,
    "ensemble": Ensemble,
    "clustered_fl": ClusteredFL,
    # mixture
    "apfl": APFL,
    # split models
    "fedrod": FedRoD,
    "factorized_waffle": FactorizedWaffle,
    # adaptation
    "local": LocalOnly,
    "finetune": FineTune,
    "knnper": KnnPer,
    "per_fedavg": PerFedAvg,
}

__all__ = ["ALGORITHMS", "APFL", "Cohort", "FedAvg", "Outcome", "Pool", "State", "Stop", "begin", "cohort_of", "evaluate", "sample", "step"]
