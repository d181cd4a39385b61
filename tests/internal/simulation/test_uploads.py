"""How far an upload goes."""

import torch

from pflcore.simulation.uploads import norms


def test_an_uploaded_model_is_measured_from_its_own_clients_last_one() -> None:
    held = torch.tensor([[0.0, 0.0], [9.0, 9.0], [3.0, 4.0], [50.0, 0.0]])
    up = {"w": torch.tensor([[0.0, 2.0], [3.0, 5.0], [50.0, 7.0]])}
    assert norms(up, {"w": held}, torch.tensor([0, 2, 3]), 4).tolist() == [2.0, 1.0, 7.0]
