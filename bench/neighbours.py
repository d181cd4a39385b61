"""FedDWA's neighbours by exact distances and by a float32 Gram matrix.

`python -m bench.neighbours` shows in how many rounds the Gram matrix chooses other
neighbours, and the loss of accuracy. One run mixes by exact distances, and in
every round computes what the Gram matrix would choose. Another run mixes by the Gram
matrix.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bench.problem import Facts, gram, parsed
from bench.table import Table
from pflcore import Simulation, Training, metrics, ops
from pflcore.algorithms._feddwa import FedDWA
from pflcore.lab.data import federation_of
from pflcore.nn.models import model_for

CUTS: dict[str, tuple[str, Facts]] = {
    "pathological": ("pathological", {"k": 2}),
    "practical 1": ("practical1", {"groups": 4}),
    "iid": ("iid", {}),
}
HEAD = (
    "clients hold | rounds with other neighbours | clients with others | weight moved "
    "| distance off (median) | exact | Gram float32 | difference by seed"
)


@dataclass(frozen=True)
class Asked(FedDWA):
    """FedDWA by exact distances or a Gram matrix, with their differences.

    Args:
        by_gram: mixes by the Gram matrix
        seen: for each round the clients with other neighbours, the mean weight that
            moved, and the median relative error of a distance
    """

    by_gram: bool = False
    seen: list[tuple[int, float, float]] = field(default_factory=list)

    def mixing_weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        exact = ops.pairwise_sqdist(guide, w)
        near = gram(guide, w).clamp(min=0).double()
        k = min(self.k, len(w))
        a = ops.feddwa_weights(exact, k)
        b = ops.feddwa_weights(near, k)
        zeros = torch.zeros(len(w), len(w), dtype=torch.float64)
        mix_a = zeros.scatter(1, a.index, a.weight.double())
        mix_b = zeros.scatter(1, b.index, b.weight.double())
        others = (a.index.sort(1).values != b.index.sort(1).values).any(1)
        off = (near - exact).abs() / exact.clamp(min=1e-30)
        moved = (mix_a - mix_b).abs().sum(1).mean() / 2
        self.seen.append((int(others.sum()), float(moved), float(off.median())))
        chosen = b if self.by_gram else a
        return chosen.weight, chosen.index


ROUNDS = 30
LR = 0.01
SEEDS = 3


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Args:
        data: the data set
        samples: training samples of all clients together; None: all that there are
    """

    data: str = "mnist5k"
    samples: int | None = None


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a row for each way to cut the data."""
    got = parsed(Options, "python -m bench.neighbours", __doc__, argv)
    about = (
        f"{got.data}, LeNet-5, 20 clients, k = 5, lr {LR}, {ROUNDS} rounds, {SEEDS} "
        "seeds; accuracy: the last five rounds"
    )
    table = Table(HEAD, about=[about])
    for name, (cut, options) in CUTS.items():
        fed = federation_of(got.data, cut, 20, 0, train_samples=got.samples, **options)
        seen = []
        final = {False: list[float](), True: list[float]()}
        for seed, by_gram in itertools.product(range(SEEDS), final):
            alg = Asked(by_gram=by_gram)
            net = partial(model_for, "lenet5", fed.shape, fed.classes)
            run = Simulation(alg, net, fed, Training(LR, 20), ROUNDS, seed=seed)
            last_rounds = run.run().series()[1][-5:]
            final[by_gram].append(100 * float(last_rounds.nanmean()))
            if not by_gram:
                seen += alg.seen
        others, moved, off = torch.tensor(seen, dtype=torch.float64).unbind(1)
        pairs = zip(*final.values(), strict=True)
        gap = " ".join(f"{b - a:+.2f}" for a, b in pairs)
        table.add(
            f"{name} | {int((others > 0).sum())} of {len(seen)} | "
            f"{100 * others.mean() / 20:.1f} % | {100 * moved.mean():.1f} % | "
            f"{off.median():.1e} | {metrics.mean(final[False]):.2f} | "
            f"{metrics.mean(final[True]):.2f} | {gap}"
        )


if __name__ == "__main__":
    main()
