"""Rounds of FL-bench's servers, by its own code in a checkout.

FL-bench needs hydra-core, omegaconf, ray, rich, pynvml and torchvision.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bench.peer_rounds.problem import (
    LR,
    ROUNDS,
    SIZES,
    STEPS,
    client_samples,
    parts,
    row_of,
)


class Samples(TensorDataset):
    """Samples of all clients, with the modes of FL-bench's data sets."""

    def train(self) -> None:
        """Does nothing: the samples are the same in both modes."""

    def eval(self) -> None:
        """Does nothing: the samples are the same in both modes."""


def server_after(
    checkout: Path, place: str, weight_decay: float = 0.0, **options: Any
) -> Any:
    """A server of FL-bench after the rounds.

    Args:
        checkout: The folder of FL-bench.
        place: The server's class, "moon:MOONServer".
        weight_decay: The weight decay of the clients' SGD.
        options: Its own options, by the names of its command line.
    """
    folder = str(checkout)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name, class_name = place.split(":")
    server_class = getattr(importlib.import_module(f"src.server.{name}"), class_name)
    base_class = importlib.import_module("src.server.fedavg").FedAvgServer
    base_class.__init__ = _begin
    base_class.get_client_optimizer_cls = lambda _: partial(
        torch.optim.SGD, lr=LR, weight_decay=weight_decay
    )
    server = server_class(_arguments(name, options))
    for _ in range(ROUNDS):
        server.selected_clients = list(range(len(SIZES)))
        server.train_one_round()
        server.current_epoch += 1
    return server


def global_model(server: Any) -> Tensor:
    """The server's model [P]."""
    return row_of(server.public_model_params.values())


def _arguments(name: str, options: dict[str, Any]) -> SimpleNamespace:
    """The options of a run, in the groups of FL-bench's configuration."""
    client = SimpleNamespace(train=False, val=False, test=False, finetune_epoch=0)
    common = SimpleNamespace(
        buffers="global",
        batch_size=max(SIZES),
        local_epoch=STEPS,
        use_cuda=False,
        client_side_evaluation=False,
        reset_optimizer_on_global_epoch=True,
        test=SimpleNamespace(client=client),
    )
    model = SimpleNamespace(external_model_weights_path=None)
    parallel = SimpleNamespace(num_workers=0)
    return SimpleNamespace(
        mode="serial",
        common=common,
        model=model,
        parallel=parallel,
        **{name: SimpleNamespace(**options)},
    )


def _begin(
    self: Any, args: Any, init_trainer: bool = True, init_model: bool = True
) -> None:
    """A server before round 1, in place of one that reads files and writes a log."""
    pairs = client_samples()
    x = torch.cat([x for x, _ in pairs])
    y = torch.cat([y for _, y in pairs])
    self.args = args
    self.device = torch.device("cpu")
    self.dataset = Samples(x, y)
    self.client_num = len(SIZES)
    self.train_clients = list(range(len(SIZES)))
    self.client_local_epoches = [STEPS] * len(SIZES)
    places = [part.tolist() for part in torch.arange(sum(SIZES)).split(list(SIZES))]
    splits = [{"train": part, "val": [], "test": []} for part in places]
    self.client_data_indices = splits
    for attribute in ("client_optimizer_states", "client_lr_scheduler_states"):
        setattr(self, attribute, {i: {} for i in self.train_clients})
    self.client_metrics = {i: {} for i in self.train_clients}
    self.current_epoch = 0
    self.testing = False
    self.verbose = False
    self.trainer = None
    self.get_client_lr_scheduler_cls = lambda: None
    model = importlib.import_module("src.utils.models").DecoupledModel()
    model.base, model.classifier = parts()
    if init_model:
        self.init_model(model)
    if init_trainer:
        self.init_trainer()
