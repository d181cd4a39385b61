"""Does FedDWA need exact distances? `python -m bench.neighbours`: in how many rounds a
float32 Gram matrix chooses other neighbours, and what that costs in accuracy.

One run mixes by exact distances and asks a Gram matrix the same question in every
round; another mixes by what the Gram matrix says.
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
from pflcore.data import federation_of
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
    """FedDWA that mixes by exact distances or by a Gram matrix, and notes what the
    other would have said."""

    by_gram: bool = False
    # a round: clients with other neighbours, weight and distance off
    seen: list[tuple[int, float, float]] = field(default_factory=list)

    def mixing_weights(self, guide: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        exact, near = (
            ops.pairwise_sqdist(guide, w),
            gram(guide, w).clamp(min=0).double(),
        )
        a, b = (ops.feddwa_weights(d, min(self.k, len(w))) for d in (exact, near))
        none = torch.zeros(len(w), len(w), dtype=torch.float64)
        mixes = [none.scatter(1, t.index, t.weight.double()) for t in (a, b)]
        others = (a.index.sort(1).values != b.index.sort(1).values).any(1)
        off = (near - exact).abs() / exact.clamp(min=1e-30)
        moved = (mixes[0] - mixes[1]).abs().sum(1).mean() / 2
        self.seen.append((int(others.sum()), float(moved), float(off.median())))
        return (b if self.by_gram else a)[:2]


ROUNDS, LR, SEEDS = 30, 0.01, 3


@dataclass(frozen=True)
class Options:
    data: str = "mnist5k"
    # training samples of all clients together; default: all there are
    samples: int | None = None


def main(argv: Sequence[str] | None = None) -> None:
    got = parsed(Options, "python -m bench.neighbours", __doc__, argv)
    about = (
        f"{got.data}, LeNet-5, 20 clients, k = 5, lr {LR}, {ROUNDS} rounds, {SEEDS} "
        "seeds; accuracy: the last five rounds"
    )
    table = Table(HEAD, about=[about])
    for name, (cut, options) in CUTS.items():
        fed = federation_of(got.data, cut, 20, 0, train_samples=got.samples, **options)
        seen, final = [], {False: list[float](), True: list[float]()}
        for seed, by_gram in itertools.product(range(SEEDS), final):
            alg = Asked(by_gram=by_gram)
            net = partial(model_for, "lenet5", fed.shape, fed.classes)
            run = Simulation(alg, net, fed, Training(LR, 20), ROUNDS, seed=seed)
            final[by_gram].append(100 * float(run.run().series()[1][-5:].nanmean()))
            seen += [] if by_gram else alg.seen
        others, moved, off = torch.tensor(seen, dtype=torch.float64).unbind(1)
        gap = " ".join(f"{b - a:+.2f}" for a, b in zip(*final.values(), strict=True))
        table.add(
            f"{name} | {int((others > 0).sum())} of {len(seen)} | "
            f"{100 * others.mean() / 20:.1f} % | {100 * moved.mean():.1f} % | "
            f"{off.median():.1e} | {metrics.mean(final[False]):.2f} | "
            f"{metrics.mean(final[True]):.2f} | {gap}"
        )


if __name__ == "__main__":
    main()
