"""The algorithms, by name, and what an author of another one needs: `Algorithm` to derive from,
`Traits`, and the values that its hooks get and give.

`ALGORITHMS` drives the command line, the contract tests, the docs' table and the benchmark.
"""

from __future__ import annotations

from pflcore.algorithms.apfl import APFL
from pflcore.algorithms.clustered_fl import ClusteredFL
from pflcore.algorithms.ditto import MRMTL, Ditto
from pflcore.algorithms.factorized_waffle import FactorizedWaffle
from pflcore.algorithms.fedala import FedALA
from pflcore.algorithms.fedamp import FedAMP, HeurFedAMP
from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.feddwa import FedDWA, FedDWAQP
from pflcore.algorithms.fedfomo import FedFomo
from pflcore.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi
from pflcore.algorithms.fedprox import FedProx
from pflcore.algorithms.fedrod import FedRoD
from pflcore.algorithms.finetune import FineTune
from pflcore.algorithms.hypcluster import Ensemble, HypCluster
from pflcore.algorithms.knnper import KnnPer
from pflcore.algorithms.l2c import L2C
from pflcore.algorithms.local_only import LocalOnly
from pflcore.algorithms.mocha import Mocha
from pflcore.algorithms.per_fedavg import PerFedAvg
from pflcore.algorithms.pfedme import PFedMe
from pflcore.algorithms.protocol import (
    Algorithm,
    Changes,
    Cohort,
    Mix,
    Payload,
    Pool,
    Rows,
    ServerRule,
    Stop,
    Tensors,
    Traits,
    Void,
    apply,
)
from pflcore.algorithms.qfedavg import QFedAvg
from pflcore.algorithms.scaffold import Scaffold
from pflcore.algorithms.sfl import SFL
from pflcore.algorithms.split import FedBABU, FedBN, FedPer, FedRep, LGFedAvg
from pflcore.algorithms.waffle import Waffle
from pflcore.algorithms.weight_erosion import WeightErosion

ALGORITHMS: dict[str, type[Algorithm]] = {
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
    "fedala": FedALA,
    # split models
    "fedper": FedPer,
    "lg_fedavg": LGFedAvg,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedrod": FedRoD,
    "factorized_waffle": FactorizedWaffle,
    # adaptation
    "local": LocalOnly,
    "finetune": FineTune,
    "knnper": KnnPer,
    "per_fedavg": PerFedAvg,
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Changes",
    "Cohort",
    "FedAvg",
    "Mix",
    "Payload",
    "Pool",
    "Rows",
    "ServerRule",
    "Stop",
    "Tensors",
    "Traits",
    "Void",
    "apply",
]
