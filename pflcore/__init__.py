"""pflcore: a compact algorithm core for personalized federated learning."""

__version__ = "0.1.0"

from pflcore.algorithms import ALGORITHMS
from pflcore.algorithms.base import FedAvg, Stop
from pflcore.attacks import Adversary
from pflcore.callbacks import EarlyStopping, TensorBoard
from pflcore.checkpoint import Checkpoint
from pflcore.data import Federation
from pflcore.data.roles import cross_device, cross_silo
from pflcore.interop import Client, Server, pack, personalize, unpack
from pflcore.local import Local, Net, Training
from pflcore.ops import (
    Backend,
    TopK,
    aggregate,
    backend,
    feddwa_weights,
    pairwise_sqdist,
    rank1_linear,
    waffle_weights,
)
from pflcore.personal import Personalized
from pflcore.round import evaluate, step
from pflcore.simulation import History, Simulation, for_everyone
from pflcore.tuning import tune

__all__ = [
    "ALGORITHMS",
    "Adversary",
    "Backend",
    "Checkpoint",
    "Client",
    "EarlyStopping",
    "FedAvg",
    "Federation",
    "History",
    "Local",
    "Net",
    "Personalized",
    "Server",
    "Simulation",
    "Stop",
    "TensorBoard",
    "TopK",
    "Training",
    "aggregate",
    "backend",
    "cross_device",
    "cross_silo",
    "evaluate",
    "feddwa_weights",
    "for_everyone",
    "pack",
    "pairwise_sqdist",
    "personalize",
    "rank1_linear",
    "step",
    "tune",
    "unpack",
    "waffle_weights",
]
