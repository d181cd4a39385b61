"""How much memory a round of split models needs is measured on a stand-in."""

import warnings

from methods import FedBN, FedPer, LGFedAvg

from pflcore import Training
from pflcore.simulation import footprint


def test_memory_is_measured_whatever_is_private() -> None:
    """The stand-in has other names than the model; it is not to be mistaken for it."""
    for alg, whole in ((FedPer(private="conv1.*"), False), (LGFedAvg(), True), (FedBN(), False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fixed, each, _ = footprint.rows_beside_state(alg, Training(lr=0.3, batch_size=64, epochs=2), "threads", False, whole)
        assert each > 0 and fixed >= 0
