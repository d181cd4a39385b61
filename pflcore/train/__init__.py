"""Local training of a cohort, as an algorithm's hooks see it.

Models are rows of a matrix (`Net`). A hook trains its clients (`Clients.fit`) on the
loss of the run or on an `Objective`, by the options of `Training`.
"""

from pflcore.train._clients import Clients, Fit
from pflcore.train._engines import Objective
from pflcore.train._net import Net
from pflcore.train._training import Training

__all__ = ["Clients", "Fit", "Net", "Objective", "Training"]
