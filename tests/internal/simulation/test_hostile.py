"""Bad clients, bad numbers, bad arguments: nothing of it improves a table, and each is said in one
sentence."""

import math

import pytest
import torch
from doors import synthetic_clusters
from torch import nn

from pflcore import ALGORITHMS, Training, cross_silo, tune
from pflcore.algorithms import Cohort, Traits
from pflcore.results.record import Record, read
from pflcore.results.table import table
from pflcore.simulation.accept import Trained, update_norms
from pflcore.tuning import candidates


@pytest.fixture(scope="module")
def data():
    return synthetic_clusters(n=4, groups=1, samples=20, classes=3, dim=5, held_out=20)


def model():
    return nn.Linear(5, 3)


def sentence(error):
    text = str(error.value)
    assert text.count(". ") == 0 and "\n" not in text
    return text


def test_a_diverged_client_never_improves_a_table(tmp_path):
    with Record(tmp_path / "r.jsonl") as record:
        record.write({"header": {"algorithm": "fedavg", "n": 3, "rounds": 2, "seed": 0}})
        record.write({"round": 1, "eval": {"loss": [1.0, 3.0, math.nan], "size": [5, 5, 0]}})
        record.write({"round": 2, "eval": {"loss": [1.0, math.inf, math.nan], "size": [5, 5, 0]}})
    (got,) = read(tmp_path / "r.jsonl")
    assert got.curve() == ([1, 2], [2.0, math.inf])  # the client without samples is left out
    row = next(line for line in table([got]).splitlines() if line.startswith("| fedavg"))
    cells = [c.strip() for c in row.split("|")]
    assert (
        cells[2:7] == ["2.00000", "-", "-", "-", "-"] and cells[-2] == "1 client has no finite loss"
    )
    from pflcore.results import pictures

    pytest.importorskip("matplotlib")
    assert len(pictures.draw([got], tmp_path)) == 2


def test_tuning_takes_names_and_functions_and_refuses_what_changes_nothing(data):
    p = cross_silo(data, {"train": 0.6, "val": 0.2, "test": 0.2})
    tuned = tune(p, model, "fedavg", Training(batch_size=10), {"training.lr": [0.1, 1e-6]}, 2)
    assert tuned.best.candidate.training.lr == 0.1
    with pytest.raises(TypeError, match=r"^protocol: .*cross_silo") as e:
        tune(data, model, "fedavg", Training(), {}, 2)
    sentence(e)
    for key, word in (("server_lr", "is no option of LocalOnly"), ("lr", "training.lr")):
        with pytest.raises(ValueError, match=word) as e:
            candidates(ALGORITHMS["local"](), Training(), {key: [0.1, 0.2]})
        sentence(e)


def test_an_uploaded_model_is_measured_from_its_own_clients_last_one():
    held = torch.tensor([[0.0, 0.0], [9.0, 9.0], [3.0, 4.0], [50.0, 0.0]])
    up = {"w": torch.tensor([[0.0, 2.0], [3.0, 5.0], [50.0, 7.0]])}
    cohort = Cohort(torch.tensor([0, 2, 3]), torch.ones(3, dtype=torch.long), 4)
    trained = Trained(cohort, {}, up, {}, {}, torch.empty(3, 0), torch.zeros(3))
    assert update_norms(trained, Traits(models={"w": "server.w"}), {"w": held}).tolist() == [
        2.0,
        1.0,
        7.0,
    ]
