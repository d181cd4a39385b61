"""What looks like an input and is none: row numbers, padding, columns of the record."""

import csv

import numpy as np
import pytest
import torch
from torch import nn

from pflcore import Evaluation, Federation, Simulation, Training
from pflcore.data import federation_of


def test_row_numbers_of_pandas_are_no_inputs(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {"noise": np.arange(8.0), "y": [0, 1] * 4, "client": [0] * 4 + [1] * 4}
    ).sample(frac=1, random_state=0)
    frame.to_parquet(tmp_path / "t.parquet")
    assert Federation.from_table(tmp_path / "t.parquet").x.shape[1:] == (1,)


@pytest.mark.parametrize("first", ["", "Unnamed: 0"])
def test_a_column_of_row_numbers_in_a_csv_file_is_refused(tmp_path, first):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([[first, "x", "y"], [0, 1.5, 0], [1, 2.5, 1]])
    with pytest.raises(ValueError, match="index=False"):
        federation_of(f"folder:{tmp_path}")


def test_no_engine_trains_an_embedding_on_its_padding():
    gen = torch.Generator().manual_seed(0)

    def client():
        x, length = (
            torch.randint(1, 30, (24, 9), generator=gen),
            torch.randint(2, 9, (24,), generator=gen),
        )
        length[:4] = 9  # the first texts happen to be full
        x[torch.arange(9) >= length[:, None]] = 0
        return x, torch.randint(0, 2, (24,), generator=gen)

    def model():
        return nn.Sequential(nn.Embedding(30, 8, padding_idx=0), nn.Flatten(), nn.Linear(72, 2))

    data = Federation.from_arrays(
        [{"train": client(), "test": client()} for _ in range(6)], classes=2
    )
    history = Simulation("fedavg", model, data, Training(lr=0.5, batch_size=5), rounds=2).run()
    assert history.model(0).module()[0].weight[0].norm() == 0


@pytest.mark.parametrize("name", ["client", "clients", "round", "seed"])
def test_a_metric_is_not_called_like_a_column_of_the_record(name):
    data = Federation.from_arrays(
        [(torch.randn(4, 2), torch.arange(4) % 2)] * 2,
        test=[(torch.randn(4, 2), torch.arange(4) % 2)] * 2,
    )
    with pytest.raises(ValueError, match=f"metrics: '{name}' is recorded anyway"):
        Simulation(
            "fedavg",
            nn.Linear(2, 2),
            data,
            evaluation=Evaluation(metrics={name: lambda scores, y: 0.0}),
        )


def test_one_token_a_sample_and_a_padding_row():
    gen = torch.Generator().manual_seed(0)
    parts = [
        (torch.randint(0, 5, (12,), generator=gen), torch.randint(0, 2, (12,), generator=gen))
        for _ in range(3)
    ]
    data = Federation.from_arrays(parts, test=parts, classes=2)
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 2))
    assert (
        Simulation("fedavg", model, data, Training(lr=0.1), rounds=1)
        .run()
        .series("loss")[1]
        .isfinite()
        .all()
    )
