"""What bad clients do: `python -m bench.hostile [inputs] [attacks] [waffle] [--seeds N]` prints the
figures of docs/trust.md.

inputs    (default) bad uploads, messages and drop-outs tried on every algorithm, by kind, and how
many were lost; a minute
attacks   accuracy under attack by defence: 10 clients of MNIST's 5,000-image subset, 2 of them bad;
some minutes
waffle    a target's accuracy with 1 to 4 bad agents of 10, under WAFFLE, Algorithm and SCAFFOLD;
some minutes

The last two are means over N seeds of the split and the run (default 1); the first of them with its
deviations.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from pflcore import ALGORITHMS, Algorithm, Evaluation, Hardware, Robustness, Simulation, Training
from pflcore.algorithms.defences import COUNTING, Defence
from pflcore.data import Federation, federation_of
from pflcore.simulation.attacks import Adversary, Attack

ATTACKS, DEFENCES = get_args(Attack), get_args(Defence)
N, ROUNDS, TRAINING = 10, 20, Training(lr=0.1, batch_size=20)
BAD = (8, 9)  # of the first table
# of the second: the agents who share most classes with the target, the nearest first
TARGET, NEAREST = 0, (1, 9, 2, 8)
# the defence that must keep what the honest clients have, but for so many points
HOLDS, POINTS = "multi_krum", 5.0
CLIP = 1.0
BAD_CLIENTS = Path(__file__).parent.parent / "tests" / "simulation" / "test_bad_clients.py"
Table = list[list[str]]


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def played(
    algorithm: Algorithm,
    data: list[Federation],  # one for each seed
    attack: str | None,
    bad: tuple[int, ...],
    absent: bool = False,
    clip: float | None = None,
) -> torch.Tensor:  # [seeds, 2]
    """The honest clients' mean accuracy in percent (the target's alone, where there is one to look
    at), and the share of the server's weights that the bad ones had, mean over rounds."""
    return torch.tensor(
        [_one(algorithm, d, seed, attack, bad, absent, clip) for seed, d in enumerate(data)],
        dtype=torch.float64,
    )


def _one(
    algorithm: Algorithm,
    data: Federation,
    seed: int,
    attack: str | None,
    bad: tuple[int, ...],
    absent: bool,
    clip: float | None,
) -> tuple[float, float]:
    honest = [i for i in range(N) if i not in bad]
    run = Simulation(
        algorithm,
        model,
        data,
        TRAINING,
        ROUNDS,
        clients=honest if absent else None,
        seed=seed,
        evaluation=Evaluation(
            every=ROUNDS, clients=[TARGET] if data.name.endswith(" C") else honest
        ),
        robustness=Robustness(clip=clip, adversary=Adversary(attack, bad) if attack else None),  # type: ignore[arg-type]
        hardware=Hardware(workers=1),
    )
    history = run.run()
    weights = torch.tensor([shares(r["report"]) for r in history.rounds], dtype=torch.float64)
    accuracy = history.series()[1]
    return 100 * float(accuracy[-1].nanmean()) if len(accuracy) else 0.0, 100 * float(
        weights[:, list(bad)].sum(1).mean()
    )


def shares(report: dict[str, list[float]]) -> list[float]:
    """The server's weights of all clients, absent ones included; even where a method has none."""
    few = dict(zip(report.get("index", []), report.get("weight", []), strict=True))
    return report.get("weights") or ([few.get(i, 0.0) for i in range(N)] if few else [1 / N] * N)


def attacks(seeds: int = 1, bad: tuple[int, ...] = BAD) -> tuple[Table, int]:
    """Accuracy by attack and defence, and how often the defence that must hold did not."""
    data = [federation_of("mnist5k", "A", N, seed) for seed in range(seeds)]
    beside: dict[str, dict[str, int]] = {
        **{d: {"hostile": len(bad)} for d in COUNTING},
        "fltrust": {"root": 0},
    }
    options = [{}, *({"defence": d, **beside.get(d, {})} for d in DEFENCES)]
    table, lost, clean = [["attack", "none", *DEFENCES]], 0, 0.0
    for attack in (None, *ATTACKS):
        row = [played(Algorithm(**o), data, attack, bad)[:, 0] for o in options]
        clean = clean or float(row[0].mean())
        lost += float(row[1 + DEFENCES.index(HOLDS)].mean()) < clean - POINTS
        spread = [f" ± {v.std(correction=0):.1f}" if seeds > 1 else "" for v in row]
        table.append(
            [
                attack or "nobody attacks",
                *(f"{v.mean():.1f}{s}" for v, s in zip(row, spread, strict=True)),
            ]
        )
        print(table[-1], file=sys.stderr, flush=True)
    return table, lost


def waffle(seeds: int = 1) -> tuple[Table, Table]:
    """The target's accuracy by attack, algorithm and number of bad agents; WAFFLE's weights of the
    bad agents."""
    data, names = (
        [federation_of("mnist5k", "C", N, seed) for seed in range(seeds)],
        ("waffle", "fedavg", "scaffold"),
    )
    counts = range(1, len(NEAREST) + 1)
    table = [["attack", *(f"{name}, {b}" for name in names for b in (0, *counts))]]
    share = [["attack", *(f"{b} bad" for b in counts)]]
    clean = {name: played(ALGORITHMS[name](), data, None, ()).mean(0)[0] for name in names}
    for attack, clip in ((None, None), *((a, None) for a in ATTACKS), ("scale", CLIP)):
        label = f"{attack}, clip={clip:g}" if clip else attack
        row, weights = [label or "they are absent"], [label or "they are honest"]
        for name in names:
            row.append(f"{clean[name]:.0f}")
            for b in counts:
                accuracy, weight = played(
                    ALGORITHMS[name](), data, attack, NEAREST[:b], absent=attack is None, clip=clip
                ).mean(0)
                row.append(f"{accuracy:.0f}")
                if name == "waffle":
                    weight = (
                        weight
                        if attack
                        else played(ALGORITHMS[name](), data, None, NEAREST[:b]).mean(0)[1]
                    )
                    weights.append(f"{weight:.1f}")
        table.append(row)
        share.append(weights)
        print(row, weights, file=sys.stderr, flush=True)
    return table, share


def inputs() -> tuple[dict[str, int], int]:
    """Bad inputs tried by the tests, by kind, and how many tests found that something was lost."""
    import pytest

    class Lost:
        count = 0
        tried: dict[str, int]

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.count += report.failed

        def pytest_sessionfinish(self, session: pytest.Session) -> None:
            self.tried = dict(session.items[0].module.TRIED)  # type: ignore[attr-defined]

    lost = Lost()
    if (
        status := pytest.main(
            ["-q", "--no-header", "-p", "no:cacheprovider", str(BAD_CLIENTS)], plugins=[lost]
        )
    ) not in (0, 1):
        raise SystemExit(f"{BAD_CLIENTS}: its tests cannot be run, pytest ends with {status}.")
    return lost.tried, lost.count


def markdown(table: Table) -> str:
    head, *rows = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([head, "|:---|" + "---:|" * (len(table[0]) - 1), *rows])


def main(argv: list[str]) -> int:
    warnings.simplefilter("ignore")
    failures = 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["inputs"], help="inputs, attacks, waffle")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args(argv)
    if given.seeds < 1:
        parser.error(f"--seeds: expected a number of at least 1, got {given.seeds}.")
    for what in given.what:
        if what == "inputs":
            tried, lost = inputs()
            print(
                f"bad inputs tried: {sum(tried.values())} "
                f"({', '.join(f'{k} {v}' for k, v in tried.items())}), lost: {lost}"
            )
        elif what == "attacks":
            table, lost = attacks(given.seeds)
            print(
                f"{markdown(table)}\n\nattacks x defences: {len(ATTACKS)} x {len(DEFENCES)}, lost "
                f"with {HOLDS}: {lost}"
            )
        elif what == "waffle":
            print("\n\n".join(map(markdown, waffle(given.seeds))))
            lost = 0
        else:
            raise SystemExit(f"expected inputs, attacks or waffle, got {what!r}.")
        failures += lost
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
