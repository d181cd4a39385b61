"""Methods that share features, compared with PFLlib d832e76.

PFLlib's FedPAC needs cvxpy. Some of PFLlib's clients begin to train before a batch size
can be set, and FedAS has one of its own: `full_batches` gives each client its whole
training set as one minibatch, as in every comparison.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bench.peer_rounds import pfllib
from bench.peer_rounds.problem import (
    CLASSES,
    LR,
    ROUNDS,
    SIZES,
    STEPS,
    Comparison,
    client_samples,
    model,
    row_of,
)
from pflcore import Federation, Simulation, Training, algorithm_of

LAM = 2.0
FEDPAC = {"lam": LAM, "prototype_weighting": "uniform", "head_epochs": 1}
FEDPROTO = {"lam": LAM, "prototype_weighting": "uniform", "predict_by": "head"}
KAPPA = 3.0
MOMENTUM = 0.4


@contextlib.contextmanager
def full_batches(checkout: Path) -> Iterator[None]:
    """Clients of PFLlib, each with one minibatch."""
    base = pfllib._import(checkout, "flcore.clients.clientbase")

    def load(client: Any, batch_size: int | None = None) -> Any:
        data = base.read_client_data(client.dataset, client.id)
        return DataLoader(data, len(data))

    with patch.object(base.Client, "load_train_data", load):
        yield


def server_after(checkout: Path, place: str, **options: Any) -> Any:
    """A server of PFLlib after the rounds, of clients with full batches."""
    with full_batches(checkout):
        return pfllib.server_after(checkout, place, **options)


def personal_heads(checkout: Path) -> Tensor:
    """FedPAC's models [N, P]: the global body with each client's head."""
    server = server_after(checkout, "serverpac:FedPAC", lamda=LAM)
    body = row_of(server.global_model)
    rows = [torch.cat([body, row_of(c.model.head)]) for c in server.clients]
    return torch.stack(rows)


def personal_heads_mended(checkout: Path) -> Tensor:
    """The same where the heads are in the order of their weights, and are copies."""
    module = pfllib._import(checkout, "flcore.servers.serverpac")
    send = module.FedPAC.aggregate_and_send_heads

    def copy_and_send(server: Any) -> None:
        server.uploaded_heads = copy.deepcopy(server.uploaded_heads)
        send(server)

    with (
        patch.object(module.random, "sample", lambda chosen, count: chosen[:count]),
        patch.object(module.FedPAC, "aggregate_and_send_heads", copy_and_send),
    ):
        return personal_heads(checkout)


def local_models(place: str, **options: Any) -> Callable[[Path], Tensor]:
    """A function that returns the clients' own models [N, P] of PFLlib."""

    def play(checkout: Path) -> Tensor:
        base = pfllib._import(checkout, "flcore.servers.serverbase")
        # PFLlib's FedAS calls it after the last round, and it is not there.
        base.Server.avg_generalization_metrics = lambda _: 0.0
        return pfllib.client_models(server_after(checkout, place, **options))

    return play


def models_of_collected_prototypes(checkout: Path) -> Tensor:
    """FedProto's models [N, P] with prototypes of the trained models."""
    module = pfllib._import(checkout, "flcore.clients.clientproto")
    train = module.clientProto.train

    def train_and_collect(client: Any) -> None:
        train(client)
        client.collect_protos()

    with patch.object(module.clientProto, "train", train_and_collect):
        return local_models("serverproto:FedProto", lamda=LAM)(checkout)


def offset_models(checkout: Path) -> Tensor:
    """FedDBE's global model with each client's offset, [N, P + H]."""
    options = {"kl_weight": KAPPA, "momentum": MOMENTUM}
    server = server_after(checkout, "serverdbe:FedDBE", **options)
    x = row_of(server.global_model)
    rows = [torch.cat([x, c.client_mean.detach()]) for c in server.clients]
    return torch.stack(rows)


def state_after(method: str, rounds: int, options: Mapping[str, Any]) -> Any:
    """The state of a run of pflcore."""
    entries = [{"train": pair, "test": pair} for pair in client_samples()]
    data = Federation.from_clients(entries, classes=CLASSES, dtype=None)
    training = Training(lr=LR, batch_size=max(SIZES), epochs=STEPS)
    alg = algorithm_of(method, **options)
    return Simulation(alg, model, data, training, rounds).run().state


def our_local_models() -> Tensor:
    """FedProto's models [N, P] of pflcore."""
    models: Tensor = state_after("fedproto", ROUNDS, FEDPROTO).clients["w"]
    return models


def our_offset_models() -> Tensor:
    """FedDBE's models [N, P + H] of pflcore, whose round 1 is PFLlib's start."""
    options = {"kappa": KAPPA, "momentum": MOMENTUM}
    state = state_after("feddbe", ROUNDS + 1, options)
    x = state.server["x"].expand(len(SIZES), -1)
    return torch.cat([x, state.clients["v"]], 1)


COMPARISONS = [
    Comparison(
        "fedpac",
        "pfllib",
        personal_heads,
        FEDPAC,
        reason="here head_i = sum_j p_ij head_j of uploaded heads; serverpac.py:129 "
        "shuffles the heads, while p_ij is for the order of line 43, and line 164 "
        "overwrites head_i before head_i+1 is mixed of it",
    ),
    Comparison("fedpac", "pfllib", personal_heads_mended, FEDPAC),
    Comparison(
        "fedproto",
        "pfllib",
        local_models("serverproto:FedProto", lamda=LAM),
        ours=our_local_models,
        reason="clientproto.py:67 takes the mean feature over the models before each "
        "step; here it is that of the trained model: mean f(w_trained, x)",
    ),
    Comparison(
        "fedproto", "pfllib", models_of_collected_prototypes, ours=our_local_models
    ),
    Comparison("fedas", "pfllib", local_models("serveras:FedAS")),
    Comparison("feddbe", "pfllib", offset_models, ours=our_offset_models),
]
