"""An algorithm as users name it."""

import sys
import types

from methods import Ditto
from parts.user import TRAINING, Mine, simulation
from small import images, tiny_model

from pflcore import cross_silo, for_everyone, tune
from pflcore.algorithms.lookup import algorithm_of, class_of, name_of


def test_an_algorithm_by_name_class_instance_or_place(monkeypatch):
    module = types.ModuleType("mine")
    module.Mine = Mine
    monkeypatch.setitem(sys.modules, "mine", module)
    mine = Mine()
    assert isinstance(algorithm_of("ditto"), Ditto) and algorithm_of(Ditto, lam=0.5).lam == 0.5
    assert algorithm_of(mine) is mine and class_of("mine:Mine") is Mine
    assert name_of("mine:Mine") == name_of(mine) == "Mine"
    assert name_of(Ditto) == name_of("ditto") == "ditto"
    for given in (Mine, mine, "mine:Mine"):
        assert simulation(given, rounds=1).run().header["algorithm"] == "Mine"
    data, grid = cross_silo(images((20, 30))), {"server_lr": [0.5, 1.0]}
    tuned = tune(data, tiny_model(), Mine, TRAINING, grid, rounds=1)
    assert type(tuned.best.candidate.algorithm) is Mine
    assert len(for_everyone("waffle", tiny_model(), images(), TRAINING, rounds=1).rounds) == 1
