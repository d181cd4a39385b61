"""What a federation keeps of how it was made: clients' names, and what features were scaled by."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from pflcore import Federation, Simulation, Training


def federation(seed):
    gen = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randn(12, 3, generator=gen), torch.randint(0, 2, (12,), generator=gen))
        for _ in range(3)
    ]
    return Federation.from_arrays(parts, test=parts, classes=2)


def test_what_standardized_data_were_scaled_by_is_kept():
    data = federation(0).standardized()
    x = federation(0).client(0)[0]
    scaling = data.scaling
    torch.testing.assert_close(
        ((x - scaling.mean[0]) / scaling.deviation[0]).float(), data.client(0)[0]
    )
    assert torch.equal(data.subset([2, 0]).scaling.mean, scaling.mean[[2, 0]])


def test_clients_keep_their_names():
    data = Federation.from_table(
        np.eye(4, dtype=np.float32), np.arange(4) % 2, ["north", "south", "north", "south"]
    )
    assert data.names == ("north", "south") and data.subset([1]).names == ("south",)


def test_names_and_scaling_are_exported(tmp_path):
    pytest.importorskip("safetensors")
    data = replace(federation(0).standardized(), names=("a", "b", "c"))
    Simulation("fedavg", nn.Linear(3, 2), data, Training(), rounds=1).run().export(tmp_path)
    told = json.loads((tmp_path / "manifest.json").read_text())["clients"][1]
    assert (
        told["name"] == "b"
        and told["mean"] == data.scaling.mean[1].tolist()
        and len(told["deviation"]) == 3
    )


def test_a_name_for_each_client():
    with pytest.raises(
        ValueError, match=r"^names must be a string for each client \(3\), got \('a',\)$"
    ):
        replace(federation(0), names=("a",))
