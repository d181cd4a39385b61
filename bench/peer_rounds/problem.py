"""Two rounds with full batches, which pflcore and other people's programs play.

Four clients of different sizes take three steps a round, each on all of their samples,
so that no shuffle plays a part. Everything is in float64. A model is a row [P] of its
parameters, in the order of `model.parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflcore import Federation, History, Simulation, Training
from pflcore.algorithms import algorithm_of

SIZES = (6, 10, 8, 12)
FEATURES = 5
HIDDEN = 6
CLASSES = 3
ROUNDS = 2
STEPS = 3
LR = 0.1
Pairs = list[tuple[Tensor, Tensor]]  # each client's samples x [n, FEATURES] and y [n]


class BaseAndHead(nn.Module):
    """A model of two parts, by the names that PFLlib gives them."""

    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Scores [B, CLASSES] of samples [B, FEATURES]."""
        return self.head(self.base(x))  # type: ignore[no-any-return]


def parts() -> tuple[nn.Module, nn.Module]:
    """The base and the head of the model, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        head = nn.Linear(HIDDEN, CLASSES)
    return base.double(), head.double()


def model() -> BaseAndHead:
    """The model before round 1, always with the same weights."""
    return BaseAndHead(*parts())


def client_samples() -> Pairs:
    """The training samples of each client; each client lacks no class."""
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for client, size in enumerate(SIZES):
        y = torch.arange(size) % CLASSES
        centers = torch.randn(CLASSES, FEATURES, generator=generator).double()
        noise = torch.randn(size, FEATURES, generator=generator).double()
        pairs.append((centers[y] + noise + client / 4, y))
    return pairs


def row_of(parameters: Any) -> Tensor:
    """A row [P] of a model, or of its parameters."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    return torch.cat([p.detach().reshape(-1) for p in parameters]).clone()


def our_history(
    method: str, options: Mapping[str, Any], training: Mapping[str, Any]
) -> History:
    """The rounds by pflcore."""
    entries = [{"train": pair, "test": pair} for pair in client_samples()]
    data = Federation.from_clients(entries, classes=CLASSES, dtype=None)
    run_options = {"lr": LR, "batch_size": max(SIZES), "epochs": STEPS, **training}
    algorithm = algorithm_of(method, **options)
    return Simulation(algorithm, model, data, Training(**run_options), ROUNDS).run()


def our_models(
    method: str, options: Mapping[str, Any], training: Mapping[str, Any]
) -> Tensor:
    """The clients' personalized models [N, P] after the rounds, by pflcore."""
    history = our_history(method, options, training)
    rows = [row_of(history.model(i).module()) for i in range(len(SIZES))]
    return torch.stack(rows)


# The comparison, by (checkout of the peer) -> models [P] or [N, P].
Play = Callable[[Path], Tensor]


@dataclass(frozen=True)
class Comparison:
    """A method that pflcore and a peer play.

    Args:
        method: The name in `pflcore.ALGORITHMS`.
        peer: The peer's name, a key of `bench.peer_rounds.PEERS`.
        theirs: A function that plays the peer's rounds, given its checkout, and returns
            one model [P] for all clients or a model for each [N, P].
        options: Options of pflcore's method.
        training: Options of `Training` beside the problem's own.
        ours: A function that plays pflcore's rounds where its personalized models are
            not what is compared. None compares these.
        reason: Why the two differ: the line and the formula of both sides; or, where
            they agree, what the peer must be given for it. "" where there is nothing to
            say.
    """

    method: str
    peer: str
    theirs: Play
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    ours: Callable[[], Tensor] | None = None
    reason: str = ""

    def difference(self, checkout: Path) -> float:
        """The largest difference between a number of ours and of theirs."""
        if self.ours is None:
            ours = our_models(self.method, self.options, self.training)
        else:
            ours = self.ours()
        return float((ours - self.theirs(checkout)).abs().max())
