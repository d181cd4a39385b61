"""Does FedDWA need exact distances? `python -m bench.neighbours`: in how many rounds a float32 Gram
matrix chooses other neighbours, and what that costs in accuracy.

One run mixes by exact distances and asks a Gram matrix the same question in every round; another
mixes by what the Gram matrix says.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pflcore import metrics, ops
from pflcore.algorithms.feddwa import FedDWA
from pflcore.data import federation_of
from pflcore.nn.models import model_for
from pflcore.simulation import Simulation
from pflcore.train import Training

CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pathological": ("pathological", {"k": 2}),
    "practical 1": ("practical1", {"groups": 4}),
    "iid": ("iid", {}),
}


def gram(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances [N, M] as |a|^2 + |b|^2 - 2 a b in float32, as one would write it; no
    smaller than 0."""
    return ((a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T).clamp(min=0).double()


@dataclass(frozen=True)
class Asked(FedDWA):
    """FedDWA that mixes by exact distances or by a Gram matrix, and notes what the other would have
    said."""

    by_gram: bool = False
    # a round: clients with other neighbours, weight and distance off
    seen: list[tuple[int, float, float]] = field(default_factory=list)

    def weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        exact, near = ops.pairwise_sqdist(guide, w), gram(guide, w)
        a, b = (ops.feddwa_weights(d, min(self.k, len(w))) for d in (exact, near))
        mixes = [
            torch.zeros(len(w), len(w), dtype=torch.float64).scatter_(1, t.index, t.weight.double())
            for t in (a, b)
        ]
        others = (a.index.sort(1).values != b.index.sort(1).values).any(1)
        off = (near - exact).abs() / exact.clamp(min=1e-30)
        self.seen.append(
            (
                int(others.sum()),
                float((mixes[0] - mixes[1]).abs().sum(1).mean() / 2),
                float(off.median()),
            )
        )
        return (b if self.by_gram else a)[:2]


def rows(
    data: str, rounds: int, lr: float, seeds: int, samples: int | None, model: str
) -> list[list[str]]:
    """A row for each cut of the data."""
    out = []
    for name, (cut, options) in CUTS.items():
        fed = federation_of(data, cut, 20, 0, train_samples=samples, **options)
        seen: list[tuple[int, float, float]] = []
        final: dict[bool, list[float]] = {False: [], True: []}
        for seed in range(seeds):
            for by_gram in (False, True):
                alg = Asked(by_gram=by_gram)
                net = partial(model_for, model, fed.shape, fed.classes)
                run = Simulation(alg, net, fed, Training(lr, 20), rounds=rounds, seed=seed)
                values = [
                    metrics.mean(torch.tensor(r["eval"]["accuracy"]))
                    for r in run.run().rounds
                    if r["eval"]
                ]
                final[by_gram].append(100 * sum(values[-5:]) / len(values[-5:]))
                seen += [] if by_gram else alg.seen
        others, moved, off = (torch.tensor(v, dtype=torch.float64) for v in zip(*seen, strict=True))
        gap = [b - a for a, b in zip(final[False], final[True], strict=True)]
        out.append(
            [
                name,
                f"{int((others > 0).sum())} of {len(seen)}",
                f"{100 * others.mean() / 20:.1f} %",
                f"{100 * moved.mean():.1f} %",
                f"{off.median():.1e}",
                f"{metrics.mean(final[False]):.2f}",
                f"{metrics.mean(final[True]):.2f}",
                " ".join(f"{g:+.2f}" for g in gap),
            ]
        )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.neighbours",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", default="mnist5k")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--samples",
        type=int,
        help="training samples of all clients together; default: all there are",
    )
    got = parser.parse_args(argv)
    head = [
        "clients hold",
        "rounds with other neighbours",
        "clients with others",
        "weight moved",
        "distance off (median)",
    ]
    head += ["exact", "Gram float32", "difference by seed"]
    print(
        f"{got.data}, {got.model}, 20 clients, k = 5, lr {got.lr}, {got.rounds} rounds, "
        f"{got.seeds} seeds; accuracy: the last five rounds\n"
    )
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows(got.data, got.rounds, got.lr, got.seeds, got.samples, got.model):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
