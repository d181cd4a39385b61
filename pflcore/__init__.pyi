from pflcore.algorithms import ALGORITHMS, Algorithm, FedAvg, Stop, algorithm_of
from pflcore.data import Federation
from pflcore.data._protocols import cross_device, cross_silo
from pflcore.interop import Client, Server, pack, personalize, unpack
from pflcore.lab.tuning import tune
from pflcore.ops import __version__ as __version__
from pflcore.ops import (
    aggregate,
    backend,
    feddwa_weights,
    pairwise_sqdist,
    rank1_linear,
    waffle_weights,
)
from pflcore.simulation import (
    Adversary,
    Evaluation,
    Hardware,
    History,
    Robustness,
    Simulation,
    run_each_target,
)
from pflcore.simulation._evaluate import evaluate
from pflcore.simulation._models import Personalized
from pflcore.simulation.callbacks import EarlyStopping, MLflow, TensorBoard, Wandb
from pflcore.simulation.checkpoint import Checkpoint
from pflcore.simulation.round import step
from pflcore.train import Clients, Fit, Net, Objective, Training

__all__ = [
    "ALGORITHMS",
    "Adversary",
    "Algorithm",
    "Checkpoint",
    "Client",
    "Clients",
    "EarlyStopping",
    "Evaluation",
    "FedAvg",
    "Federation",
    "Fit",
    "Hardware",
    "History",
    "MLflow",
    "Net",
    "Objective",
    "Personalized",
    "Robustness",
    "Server",
    "Simulation",
    "Stop",
    "TensorBoard",
    "Training",
    "Wandb",
    "aggregate",
    "algorithm_of",
    "backend",
    "cross_device",
    "cross_silo",
    "evaluate",
    "feddwa_weights",
    "pack",
    "pairwise_sqdist",
    "personalize",
    "rank1_linear",
    "run_each_target",
    "step",
    "tune",
    "unpack",
    "waffle_weights",
]
