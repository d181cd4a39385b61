"""pFedGraph and FedCAC, compared with peers.

pFedGraph's authors publish a program; a checkout of it needs cvxpy. It has no licence,
so nothing of it stands here: its functions are taken out of the checkout and called.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import InspectLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.peer_rounds import pfllib
from bench.peer_rounds.problem import (
    LR,
    ROUNDS,
    SIZES,
    STEPS,
    Comparison,
    Play,
    client_samples,
    model,
    row_of,
)

MOMENTUM = 0.9  # The authors' program has no option for it.
GRAPH_OPTIONS = {"alpha": 0.3, "lam": 0.05}
CAC_OPTIONS = {"tau": 0.5, "beta": 10}


def pfedgraph_play(checkout: Path, sign: float) -> Tensor:
    """The clients' aggregated models [N, P], by the program of pFedGraph's authors.

    Args:
        checkout: The folder of the program.
        sign: Factor of `lam`.
    """
    folder = str(checkout / "pytorch")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    utils = importlib.import_module("pfedgraph_cosine.utils")
    solve = utils.cp.Problem.solve
    # Its default solver stops at 1e-5.
    exact = {"solver": "CLARABEL", "tol_gap_abs": 1e-14, "tol_gap_rel": 1e-14}
    utils.cp.Problem.solve = lambda problem: solve(problem, **exact, tol_feas=1e-14)
    cuda = torch.Tensor.cuda, nn.Module.cuda
    torch.Tensor.cuda = nn.Module.cuda = _stay  # type: ignore[assignment]
    try:
        return _pfedgraph_rounds(checkout, utils, sign * GRAPH_OPTIONS["lam"])
    finally:
        torch.Tensor.cuda, nn.Module.cuda = cuda  # type: ignore[method-assign]
        utils.cp.Problem.solve = solve


def _pfedgraph_rounds(checkout: Path, utils: Any, lam: float) -> Tensor:
    """The rounds of the authors' program, whose own loop reads files."""
    train = _local_training(checkout)
    args = SimpleNamespace(
        optimizer="sgd", lr=LR, reg=0.0, num_local_iterations=STEPS, lam=lam
    )
    start = model().state_dict()
    nets = {i: model() for i in range(len(SIZES))}
    updates = [{k: torch.zeros_like(v) for k, v in start.items()} for _ in SIZES]
    batches = {i: [pair] for i, pair in enumerate(client_samples())}
    shares = {i: size / sum(SIZES) for i, size in enumerate(SIZES)}
    graph = torch.zeros(len(SIZES), len(SIZES))
    directions: dict[int, Tensor] = {}
    nobody = np.array([], int)  # Whose accuracy is measured.
    for number in range(ROUNDS):
        train(args, number, nets, directions, batches, {}, None, SIZES, [], [0], nobody)
        graph = utils.update_graph_matrix_neighbor(
            graph, nets, start, updates, shares, GRAPH_OPTIONS["alpha"], "all"
        )
        directions = utils.aggregation_by_graph({}, graph, nets, start)
    return torch.stack([row_of(net) for net in nets.values()])


def _stay(self: Any) -> Any:
    """The tensor or module itself, in place of one on a card."""
    return self


class _TextLoader(InspectLoader):
    """Loads a module from its text, without a file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, fullname: str) -> str:
        return self.text


def _local_training(checkout: Path) -> Callable[..., Any]:
    """The function of the program's clients.

    It becomes a module of its own: the program would begin to work when it is imported.
    """
    text = (checkout / "pytorch" / "pfedgraph_cosine.py").read_text()
    name = "local_train_pfedgraph"
    source = "import numpy as np, torch, torch.optim as optim\n"
    for part in ast.parse(text).body:
        if isinstance(part, ast.FunctionDef) and part.name == name:
            source += str(ast.get_source_segment(text, part))
    loader = _TextLoader(source)
    module = ModuleType(name)
    loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


def fedcac_play(checkout: Path, corrected: bool) -> Tensor:
    """The models [N, P] that PFLlib's FedCAC sends after the rounds.

    Args:
        checkout: The folder of PFLlib.
        corrected: True averages models of collaborators in round 1, too.
    """
    place = "servercac:FedCAC"
    if corrected:
        # Imported by a server's first use.
        pfllib.server_after(checkout, place, **CAC_OPTIONS)
        module: Any = importlib.import_module("flcore.servers.servercac")
        module.Corrected = _corrected_server(module.FedCAC)
        place = "servercac:Corrected"
    return pfllib.client_models(pfllib.server_after(checkout, place, **CAC_OPTIONS))


def _corrected_server(fedcac: Any) -> Any:
    """The class of a server that sends customized models after each training."""

    class Corrected(fedcac):  # type: ignore[misc]
        def send_models(self) -> None:
            if self.selected_clients[0].critical_parameter is not None:
                self.get_customized_global_models()
            super(fedcac, self).send_models()

    return Corrected


def _play(function: Callable[..., Tensor], **options: Any) -> Play:
    return partial(function, **options)


COMPARISONS = [
    Comparison(
        "pfedgraph",
        "pfedgraph",
        _play(pfedgraph_play, sign=-1.0),
        GRAPH_OPTIONS,
        {"momentum": MOMENTUM},
        reason="with their `lam` negative",
    ),
    Comparison(
        "pfedgraph",
        "pfedgraph",
        _play(pfedgraph_play, sign=1.0),
        GRAPH_OPTIONS,
        {"momentum": MOMENTUM},
        reason=(
            "their `loss2 = args.lam * dot(cluster_model, w) / norm(w)` is added to "
            "the loss, ours subtracts `lam r . w / |w|`"
        ),
    ),
    Comparison(
        "fedcac",
        "pfllib",
        _play(fedcac_play, corrected=True),
        CAC_OPTIONS,
        reason="with customized models after round 1, too",
    ),
    Comparison(
        "fedcac",
        "pfllib",
        _play(fedcac_play, corrected=False),
        CAC_OPTIONS,
        reason=(
            "after round 1 their `if self.epoch != 0` in `send_models` leaves the "
            "customized models at the initial one, ours are means of collaborators"
        ),
    ),
]
