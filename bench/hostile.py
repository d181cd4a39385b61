"""What bad clients do: `python -m bench.hostile [inputs] [attacks] [waffle] [--seeds N]` prints the
figures of docs/trust.md.

inputs    (default) bad uploads, messages and drop-outs tried on every algorithm, by kind, and how
many were lost; a minute
attacks   accuracy under attack by defence: 10 clients of MNIST's 5,000-image subset, 2 of them bad;
some minutes
waffle    a target's accuracy with 1 to 4 bad agents of 10, under WAFFLE, FedAvg and SCAFFOLD;
some minutes

The last two are means over N seeds of the split and the run (default 1); the first of them with its
deviations.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from bench.table import Table, markdown
from pflcore import (
    ALGORITHMS,
    Algorithm,
    Evaluation,
    FedAvg,
    Hardware,
    Robustness,
    Simulation,
    Training,
)
from pflcore.algorithms.fedavg import COUNTING, Defence
from pflcore.data import Federation, federation_of
from pflcore.results.record import group
from pflcore.simulation.settings import Adversary, Attack

ATTACKS, DEFENCES = get_args(Attack), get_args(Defence)
N, ROUNDS, TRAINING = 10, 20, Training(lr=0.1, batch_size=20)
BAD = (8, 9)  # of the first table
# of the second: the agents who share most classes with the target, the nearest first
TARGET, NEAREST = 0, (1, 9, 2, 8)
# the defence that must keep what the honest clients have, but for so many points
HOLDS, POINTS = "multi_krum", 5.0
CLIP = 1.0
BAD_CLIENTS = Path(__file__).parent.parent / "tests" / "simulation" / "test_bad_clients.py"


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def played(
    algorithm: Algorithm,
    data: list[Federation],  # one for each seed
    attack: str | None,
    bad: tuple[int, ...],
    look: list[int],
    absent: bool = False,
    clip: float | None = None,
) -> torch.Tensor:  # [seeds, 2]
    """The mean accuracy in percent of the clients `look`, and the share of the server's weights
    that the bad ones had, mean over rounds."""
    out = []
    for seed, federation in enumerate(data):
        run = Simulation(
            algorithm,
            model,
            federation,
            TRAINING,
            ROUNDS,
            clients=[i for i in range(N) if i not in bad] if absent else None,
            seed=seed,
            evaluation=Evaluation(every=ROUNDS, clients=look),
            robustness=Robustness(clip, Adversary(attack, bad) if attack else None),  # type: ignore
            hardware=Hardware(workers=1),
        )
        history = run.run()
        found = group(history.lines())[0].weights()[1] or [torch.full((N,), 1 / N)]
        weights = torch.stack(found)[:, list(bad)]
        accuracy = history.series()[1]
        last = float(accuracy[-1].nanmean()) if len(accuracy) else 0.0
        out.append([100 * last, 100 * float(weights.sum(1).mean())])
    return torch.tensor(out, dtype=torch.float64)


def cuts(cut: str, seeds: int) -> list[Federation]:
    return [federation_of("mnist5k", cut, N, seed) for seed in range(seeds)]


def attacks(seeds: int = 1) -> int:
    """Accuracy by attack and defence; gives how often the defence that must hold did not."""
    data, lost, clean = cuts("A", seeds), 0, 0.0
    honest = [i for i in range(N) if i not in BAD]
    beside = {**{d: {"hostile": len(BAD)} for d in COUNTING}, "fltrust": {"root": 0}}
    options = [{}, *({"defence": d, **beside.get(d, {})} for d in DEFENCES)]
    table = Table("attack", "none", *DEFENCES)
    for attack in (None, *ATTACKS):
        row = [played(FedAvg(**o), data, attack, BAD, honest)[:, 0] for o in options]
        clean = clean or float(row[0].mean())
        lost += float(row[1 + DEFENCES.index(HOLDS)].mean()) < clean - POINTS
        cells = [f"{v.mean():.1f}" for v in row]
        if seeds > 1:
            cells = [f"{c} ± {v.std(correction=0):.1f}" for c, v in zip(cells, row, strict=True)]
        table.add(attack or "nobody attacks", *cells)
    tried = f"{len(ATTACKS)} x {len(DEFENCES)}, lost with {HOLDS}: {lost}"
    print(f"\nattacks x defences: {tried}", flush=True)
    return lost


def waffle(seeds: int = 1) -> int:
    """The target's accuracy by attack, algorithm and number of bad agents; and WAFFLE's weights of
    the bad agents."""
    data, names = cuts("C", seeds), ("waffle", "fedavg", "scaffold")
    counts = range(1, len(NEAREST) + 1)

    def mean(name: str, attack: str | None, bad: tuple[int, ...], **more: Any) -> list[float]:
        found = played(ALGORITHMS[name](), data, attack, bad, [TARGET], **more)
        return found.mean(0).tolist()  # type: ignore[no-any-return]

    clean = {name: f"{mean(name, None, ())[0]:.0f}" for name in names}
    table = Table("attack", *(f"{name}, {b}" for name in names for b in (0, *counts)))
    shares = [" | ".join(["attack", *(f"{b} bad" for b in counts)])]
    for attack, clip in ((None, None), *((a, None) for a in ATTACKS), ("scale", CLIP)):
        label = f"{attack}, clip={clip:g}" if clip else attack
        cells, weights = [], []
        for name in names:
            cells.append(clean[name])
            for b in counts:
                absent = attack is None
                found = mean(name, attack, NEAREST[:b], absent=absent, clip=clip)
                cells.append(f"{found[0]:.0f}")
                if name == "waffle":
                    seen = mean(name, None, NEAREST[:b]) if absent else found
                    weights.append(f"{seen[1]:.1f}")
        table.add(label or "they are absent", *cells)
        shares.append(" | ".join([label or "they are honest", *weights]))
    print("", *markdown(shares), sep="\n")
    return 0


def inputs(seeds: int = 1) -> int:
    """Bad inputs tried by the tests, by kind, and how many tests found that something was lost."""

    class Lost:
        count = 0
        tried: dict[str, int]

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.count += report.failed

        def pytest_sessionfinish(self, session: pytest.Session) -> None:
            self.tried = dict(session.items[0].module.TRIED)  # type: ignore[attr-defined]

    lost, words = Lost(), ["-q", "--no-header", "-p", "no:cacheprovider", str(BAD_CLIENTS)]
    status = pytest.main(words, plugins=[lost])
    if status not in (0, 1):
        raise SystemExit(f"{BAD_CLIENTS}: its tests cannot be run, pytest ends with {status}.")
    kinds = ", ".join(f"{k} {v}" for k, v in lost.tried.items())
    print(f"bad inputs tried: {sum(lost.tried.values())} ({kinds}), lost: {lost.count}")
    return lost.count


def main(argv: list[str]) -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["inputs"], help="inputs, attacks, waffle")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args(argv)
    if given.seeds < 1:
        parser.error(f"--seeds: expected a number of at least 1, got {given.seeds}.")
    parts = {"inputs": inputs, "attacks": attacks, "waffle": waffle}
    if unknown := [w for w in given.what if w not in parts]:
        raise SystemExit(f"expected inputs, attacks or waffle, got {unknown[0]!r}.")
    return int(sum(parts[what](given.seeds) for what in given.what) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
