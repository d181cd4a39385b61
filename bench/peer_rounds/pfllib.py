"""Rounds of PFLlib's servers, by its own code in a checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.peer_rounds.problem import (
    CLASSES,
    LR,
    ROUNDS,
    SIZES,
    STEPS,
    client_samples,
    model,
    row_of,
)

# The defaults of PFLlib's command line, where a server or a client reads them.
OPTIONS = {
    "dataset": "problem",
    "device": "cpu",
    "num_classes": CLASSES,
    "num_clients": len(SIZES),
    # Its servers play one round more.
    "global_rounds": ROUNDS - 1,
    "local_epochs": STEPS,
    "batch_size": max(SIZES),
    "local_learning_rate": LR,
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 1.0,
    "join_ratio": 1.0,
    "random_join_ratio": False,
    "few_shot": 0,
    "algorithm": "problem",
    "time_select": False,
    "goal": "test",
    "time_threthold": 1e9,
    "save_folder_name": "",
    "top_cnt": 100,
    "auto_break": False,
    "eval_gap": 10**6,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "dlg_eval": False,
    "dlg_gap": 10**6,
    "batch_num_per_client": 1,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 0,
}


def server_after(checkout: Path, place: str, **options: Any) -> Any:
    """A server of PFLlib after the rounds.

    Args:
        checkout: The folder of PFLlib.
        place: The server's class, "servermoon:MOON".
        options: Its options, by the names of PFLlib's command line.
    """
    name, class_name = place.split(":")
    server_class = getattr(_import(checkout, f"flcore.servers.{name}"), class_name)
    given = {**OPTIONS, "feature_dim": 0, "model": model(), **options}
    server = server_class(SimpleNamespace(**given), 0)
    for client in server.clients:
        client.batch_size = client.train_samples  # Each step sees all samples.
    # It evaluates, and writes files, which plays no part in its models.
    server.evaluate = lambda *_, **__: None
    server.save_results = server.save_global_model = lambda: None
    server.rs_test_acc = [0.0]
    server.train()
    return server


def global_model(server: Any) -> Tensor:
    """The server's model [P]."""
    return row_of(server.global_model)


def client_models(server: Any, name: str = "model") -> Tensor:
    """The clients' models [N, P], by their attribute."""
    return torch.stack([row_of(getattr(c, name)) for c in server.clients])


def _import(checkout: Path, name: str) -> ModuleType:
    """A module of PFLlib, whose clients read the problem's samples."""
    folder = str(checkout / "system")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # PFLlib imports these for files and pictures, which no round needs.
    for absent in ("h5py", "matplotlib.pyplot"):
        try:
            importlib.import_module(absent)
        except ImportError:
            sys.modules[absent] = ModuleType(absent)
    data_utils = importlib.import_module("utils.data_utils")
    data_utils.read_client_data = _read_client_data  # type: ignore[attr-defined]
    return importlib.import_module(name)


def _read_client_data(
    dataset: str, idx: int, is_train: bool = True, few_shot: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """The samples of a client, in the form of PFLlib's function of this name."""
    x, y = client_samples()[idx]
    return list(zip(x, y, strict=True))
