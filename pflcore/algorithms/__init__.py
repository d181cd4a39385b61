"""The algorithms by name, and the classes from which another one is made.

An algorithm derives from `Algorithm`. It has `Traits`, and hooks with the arguments and
results that are listed here.

`ALGORITHMS` drives the command line, the contract tests, the docs' table and the
benchmark. Users name an algorithm by an instance, a class, its name, or
"package.module:Class" for one of their own.
"""

import inspect
from collections.abc import Iterable
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pflcore._device import to_device
from pflcore.algorithms._adaptation import FineTune, KnnPer, PerFedAvg
from pflcore.algorithms._clusters import ClusteredFL, Ensemble, HypCluster
from pflcore.algorithms._factorized_waffle import FactorizedWaffle
from pflcore.algorithms._fedas import FedAS
from pflcore.algorithms._fedavg import FedAvg, QFedAvg, ServerStep
from pflcore.algorithms._fedcac import FedCAC
from pflcore.algorithms._feddbe import FedDBE
from pflcore.algorithms._feddwa import FedDWA, FedDWAQP
from pflcore.algorithms._feddyn import FedDyn
from pflcore.algorithms._fednova import FedNova
from pflcore.algorithms._fedopt import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi
from pflcore.algorithms._fedpac import FedPAC
from pflcore.algorithms._gpfl import GPFL
from pflcore.algorithms._local_losses import MOON, FedNTD
from pflcore.algorithms._mixtures import APFL, FedALA
from pflcore.algorithms._mocha import Mocha
from pflcore.algorithms._peers import L2C, FedFomo
from pflcore.algorithms._pfedgraph import PFedGraph, project_to_simplex
from pflcore.algorithms._pfedhn import PFedHN
from pflcore.algorithms._protocol import (
    Algorithm,
    BadUpload,
    Changes,
    Claim,
    Cohort,
    GradientFn,
    MixingWeights,
    Payload,
    RowUpdate,
    SharedRows,
    Stop,
    Tensors,
    TrainResult,
    Traits,
    UpdateResult,
    Uploads,
    VoidRound,
    algorithm_options,
    apply,
    lazy_zeros,
    map_rows,
    normalize_rows,
    squared_norms,
)
from pflcore.algorithms._prototypes import FedProto
from pflcore.algorithms._proximal import MRMTL, Ditto, FedProx, LocalOnly, PFedMe
from pflcore.algorithms._relations import SFL, FedAMP, HeurFedAMP
from pflcore.algorithms._split import (
    FedBABU,
    FedBN,
    FedPer,
    FedRep,
    FedRoD,
    LGFedAvg,
    SplitModel,
)
from pflcore.algorithms._waffle import Scaffold, Waffle, WeightErosion
from pflcore.check import import_object, require

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    # server optimizers
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fedopt": FedOpt,
    "qfedavg": QFedAvg,
    "fednova": FedNova,
    # proximal
    "fedprox": FedProx,
    "feddyn": FedDyn,
    "moon": MOON,
    "fedntd": FedNTD,
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
    "pfedgraph": PFedGraph,
    "sfl": SFL,
    "fedcac": FedCAC,
    "fedfomo": FedFomo,
    "l2c": L2C,
    # a network of models
    "pfedhn": PFedHN,
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
    "gpfl": GPFL,
    "factorized_waffle": FactorizedWaffle,
    # prototypes
    "fedproto": FedProto,
    "fedpac": FedPAC,
    "fedas": FedAS,
    "feddbe": FedDBE,
    # adaptation
    "local": LocalOnly,
    "finetune": FineTune,
    "knnper": KnnPer,
    "per_fedavg": PerFedAvg,
}

__all__ = [
    "ALGORITHMS",
    "APFL",
    "GPFL",
    "L2C",
    "MOON",
    "MRMTL",
    "SFL",
    "Algorithm",
    "BadUpload",
    "Changes",
    "Claim",
    "ClusteredFL",
    "Cohort",
    "Ditto",
    "Ensemble",
    "FactorizedWaffle",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedCAC",
    "FedDBE",
    "FedDWA",
    "FedDWAQP",
    "FedDyn",
    "FedFomo",
    "FedNTD",
    "FedNova",
    "FedOpt",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedYogi",
    "FineTune",
    "GradientFn",
    "HeurFedAMP",
    "HypCluster",
    "KnnPer",
    "LGFedAvg",
    "LocalOnly",
    "MixingWeights",
    "Mocha",
    "PFedGraph",
    "PFedHN",
    "PFedMe",
    "Payload",
    "PerFedAvg",
    "QFedAvg",
    "RowUpdate",
    "Scaffold",
    "ServerStep",
    "SharedRows",
    "SplitModel",
    "Stop",
    "Tensors",
    "TrainResult",
    "Traits",
    "UpdateResult",
    "Uploads",
    "VoidRound",
    "Waffle",
    "WeightErosion",
    "algorithm_of",
    "algorithm_options",
    "apply",
    "lazy_zeros",
    "map_rows",
    "normalize_rows",
    "project_to_simplex",
    "squared_norms",
    "to_device",
]
BASE_CLASS_TEXT = "a class derived from pflcore.Algorithm"


def class_of(algorithm: str | type[Algorithm]) -> type[Algorithm]:
    """The class of a name, in any case, or of "package.module:Class".

    Raises ValueError for an unknown name, and TypeError for what is no class of an
    algorithm.

    >>> class_of("ditto").__name__
    'Ditto'
    """
    thing: Any = algorithm
    if isinstance(algorithm, str):
        if ":" in algorithm:
            thing = import_object(algorithm, "algorithm")
        else:
            thing = ALGORITHMS.get(_canonical_name(algorithm))
        own = "or 'package.module:Class' for one of your own"
        words = f"one of {', '.join(ALGORITHMS)}, {own}"
        require(thing is not None, "algorithm", words, algorithm, ALGORITHMS)
    if inspect.isclass(thing) and issubclass(thing, Algorithm):
        return thing
    got = thing.__name__ if inspect.isclass(thing) else type(thing).__name__
    raise TypeError(
        f"algorithm: expected a name, {BASE_CLASS_TEXT} or an instance of one, got "
        f"{got}."
    )


def algorithm_of(
    algorithm: Algorithm | type[Algorithm] | str, **options: Any
) -> Algorithm:
    """The algorithm of a name, with these options.

    >>> algorithm_of("feddwa", k=3).k
    3

    A type checker knows no options of a class that is looked up by its name, as in
    `ALGORITHMS["feddwa"](k=3)`. Here they are checked when the program runs.

    Raises ValueError for an unknown name or option, for a value that does not fit, and
    for options with an instance. Raises TypeError for what is no algorithm.

    Args:
        algorithm: A name in `ALGORITHMS`, in any case; a class; "package.module:Class"
            for one of your own; or an instance, which is returned as it is.
        options: Options of the class. `pflcore run NAME --help` explains each.
    """
    if isinstance(algorithm, Algorithm):
        words = "none beside an instance, which has its own"
        require(not options, "options", words, options)
        return algorithm
    cls = class_of(algorithm)
    check_options(cls, options)
    return cls(**options)


def check_options(cls: type, options: Iterable[str]) -> None:
    """Raises ValueError for options that the dataclass does not have."""
    known = [f.name for f in fields(cls)]
    unknown = [name for name in options if name not in known]
    words = f"options among {', '.join(known) or 'none'}"
    require(not unknown, cls.__name__, words, unknown, known)


def name_of(algorithm: Algorithm | type[Algorithm] | str) -> str:
    """The name of an algorithm in records and tables.

    It is the name in `ALGORITHMS`, else that of the class.
    """
    if isinstance(algorithm, str):
        if ":" in algorithm:
            return algorithm.rpartition(":")[2]
        return _canonical_name(algorithm)
    cls = algorithm if inspect.isclass(algorithm) else type(algorithm)
    return next((k for k, v in ALGORITHMS.items() if v is cls), cls.__name__)


def _canonical_name(name: str) -> str:
    """A name as `ALGORITHMS` writes it; an unknown name as it is."""
    plain = name.lower().replace("-", "").replace("_", "")
    return next((k for k in ALGORITHMS if k.replace("_", "") == plain), name)


def fixed_options(cls: type[Algorithm]) -> list[str]:
    """The options of which a preset leaves one choice."""
    names = []
    for name, hint in get_type_hints(cls).items():
        is_single = get_origin(hint) is Literal and len(get_args(hint)) == 1
        if hint is NoneType or is_single:
            names.append(name)
    return names
