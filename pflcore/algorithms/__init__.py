"""The algorithms, by name. `ALGORITHMS` drives the command line, the contract tests, the docs' table and the benchmark."""

from __future__ import annotations

import importlib  # (temporary: until every algorithm is moved)

from pflcore.algorithms.fedavg import FedAvg
from pflcore.algorithms.protocol import Algorithm, Cohort, Mix, Pool, Rows, Stop, apply


class _Missing: pass
def _get(module, *names):
    for name in names:
        try:
            globals()[name] = getattr(importlib.import_module(module), name)
        except ImportError:
            globals()[name] = None
_get('pflcore.algorithms.apfl', 'APFL')
_get('pflcore.algorithms.clustered_fl', 'ClusteredFL')
_get('pflcore.algorithms.ditto', 'MRMTL', 'Ditto')
_get('pflcore.algorithms.factorized_waffle', 'FactorizedWaffle')
_get('pflcore.algorithms.fedala', 'FedALA')
_get('pflcore.algorithms.fedamp', 'FedAMP', 'HeurFedAMP')
_get('pflcore.algorithms.feddwa', 'FedDWA', 'FedDWAQP')
_get('pflcore.algorithms.fedfomo', 'FedFomo')
_get('pflcore.algorithms.fedopt', 'FedAdagrad', 'FedAdam', 'FedAvgM', 'FedOpt', 'FedYogi')
_get('pflcore.algorithms.fedprox', 'FedProx')
_get('pflcore.algorithms.fedrod', 'FedRoD')
_get('pflcore.algorithms.finetune', 'FineTune')
_get('pflcore.algorithms.hypcluster', 'Ensemble', 'HypCluster')
_get('pflcore.algorithms.knnper', 'KnnPer')
_get('pflcore.algorithms.l2c', 'L2C')
_get('pflcore.algorithms.local_only', 'LocalOnly')
_get('pflcore.algorithms.mocha', 'Mocha')
_get('pflcore.algorithms.per_fedavg', 'PerFedAvg')
_get('pflcore.algorithms.pfedme', 'PFedMe')
_get('pflcore.algorithms.qfedavg', 'QFedAvg')
_get('pflcore.algorithms.scaffold', 'Scaffold')
_get('pflcore.algorithms.sfl', 'SFL')
_get('pflcore.algorithms.split', 'FedBABU', 'FedBN', 'FedPer', 'FedRep', 'LGFedAvg')
_get('pflcore.algorithms.waffle', 'Waffle')
_get('pflcore.algorithms.weight_erosion', 'WeightErosion')

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

ALGORITHMS = {k: v for k, v in ALGORITHMS.items() if v is not None}
__all__ = ["ALGORITHMS", "Cohort", "FedAvg", "Pool", "Stop"]
