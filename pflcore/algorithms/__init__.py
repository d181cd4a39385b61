"""The algorithms, by name, and what an author of another one needs: `Algorithm` to derive from,
`Traits`, and the values that its hooks get and give.

`ALGORITHMS` drives the command line, the contract tests, the docs' table and the benchmark.
"""

from __future__ import annotations

from pflcore.algorithms.adaptation import (
    FedBABU,
    FedBN,
    FedPer,
    FedRep,
    FedRoD,
    FineTune,
    KnnPer,
    LGFedAvg,
    PerFedAvg,
)
from pflcore.algorithms.clusters import ClusteredFL, Ensemble, HypCluster
from pflcore.algorithms.factorized_waffle import FactorizedWaffle
from pflcore.algorithms.fedavg import (
    MRMTL,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedOpt,
    FedProx,
    FedYogi,
    LocalOnly,
    PFedMe,
    QFedAvg,
)
from pflcore.algorithms.mixtures import APFL, L2C, FedALA, FedFomo
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
from pflcore.algorithms.relations import SFL, FedAMP, FedDWA, FedDWAQP, HeurFedAMP, Mocha
from pflcore.algorithms.waffle import Scaffold, Waffle, WeightErosion

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
