"""Local training of a cohort: models as rows, the clients' steps, and what an
algorithm's hook may do with its clients' data."""

from pflcore.train._clients import Clients, Fit
from pflcore.train._engines import Objective
from pflcore.train._net import Net
from pflcore.train._training import Training

__all__ = ["Clients", "Fit", "Net", "Objective", "Training"]
