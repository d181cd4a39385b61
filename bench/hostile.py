"""Measures what bad clients do: the figures of docs/trust.md.

`python -m bench.hostile [inputs] [attacks] [waffle] [--seeds N]` prints them:

- inputs (the default): bad uploads, messages and drop-outs are tried on every
  algorithm. It shows, by kind, how many of them harmed a run, and takes a minute.
- attacks: the accuracy under attack by defence, for 10 clients of MNIST's 5,000-image
  subset, 2 of which are bad. It takes some minutes.
- waffle: a target's accuracy with 1 to 4 bad agents of 10, under WAFFLE, FedAvg and
  SCAFFOLD. It takes some minutes.

The figures of `attacks` and `waffle` are means over N seeds of the split and the run
(by default one). Those of `attacks` have their deviations.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from tyro.conf import Positional

from bench.problem import parsed
from bench.table import Table, markdown
from pflcore import (
    ALGORITHMS,
    Adversary,
    Algorithm,
    Evaluation,
    FedAvg,
    Federation,
    Hardware,
    Robustness,
    Simulation,
    Training,
)
from pflcore.algorithms._fedavg import BYZANTINE_MARGIN, Defence
from pflcore.check import PositiveInt
from pflcore.data import federation_of
from pflcore.nn.models import model_for
from pflcore.results.record import group_runs
from pflcore.simulation._settings import Attack

ATTACKS, DEFENCES = get_args(Attack), get_args(Defence)
N, ROUNDS, TRAINING = 10, 20, Training(lr=0.1, batch_size=20)
BAD = (8, 9)  # of the first table
# of the second: the agents who share most classes with the target, the nearest first
TARGET, NEAREST = 0, (1, 9, 2, 8)
# the defence that must keep what the honest clients have, but for so many points
HOLDS, POINTS = "multi_krum", 5.0
CLIP = 1.0
TESTS = Path(__file__).parent.parent / "tests"
UPLOAD = "test_an_upload_that_does_not_fit_is_named_and_a_round_goes_on_without_it"
LAWS = ("simulation/test_bad_clients.py", f"interop/test_server.py::{UPLOAD}")


def played(
    algorithm: Algorithm,
    data: list[Federation],  # one for each seed
    attack: str | None,
    bad: tuple[int, ...],
    look: list[int],
    absent: bool = False,
    clip: float | None = None,
) -> torch.Tensor:  # [seeds, 2]
    """The mean accuracy in percent of the clients `look`, and the share of the server's
    weights that the bad ones had, mean over rounds."""
    out = []
    for seed, federation in enumerate(data):
        run = Simulation(
            algorithm,
            partial(model_for, "mlp", (1, 28, 28), 10, hidden=(64,)),
            federation,
            TRAINING,
            ROUNDS,
            clients=[i for i in range(N) if i not in bad] if absent else None,
            seed=seed,
            evaluation=Evaluation(every=ROUNDS, clients=look),
            robustness=Robustness(clip, Adversary(attack, bad) if attack else None),  # type: ignore
            hardware=Hardware(workers=1),
        )
        (seen,) = group_runs(run.run().lines())
        weights = torch.stack(seen.weights()[1] or [torch.full((N,), 1 / N)])[
            :, list(bad)
        ]
        # NaN: it stopped before
        last = seen.last_values("accuracy").nanmean().nan_to_num()
        out.append([float(last), float(weights.sum(1).mean())])
    return 100 * torch.tensor(out, dtype=torch.float64)


def attacks(seeds: int = 1) -> int:
    """Accuracy by attack and defence; gives how often the defence that must hold did
    not."""
    data, lost, clean = (
        [federation_of("mnist5k", "A", N, s) for s in range(seeds)],
        0,
        0.0,
    )
    honest = [i for i in range(N) if i not in BAD]
    beside = {
        **{d: {"num_byzantine": len(BAD)} for d in BYZANTINE_MARGIN},
        "fltrust": {"trusted_client": 0},
    }
    options = [{}, *({"defence": d, **beside.get(d, {})} for d in DEFENCES)]
    table = Table("attack", "none", *DEFENCES)
    for attack in (None, *ATTACKS):
        row = [played(FedAvg(**o), data, attack, BAD, honest)[:, 0] for o in options]
        clean = clean or float(row[0].mean())
        lost += float(row[1 + DEFENCES.index(HOLDS)].mean()) < clean - POINTS
        cells = [f"{v.mean():.1f} ± {v.std(correction=0):.1f}" for v in row]
        cells = cells if seeds > 1 else [f"{v.mean():.1f}" for v in row]
        table.add(attack or "nobody attacks", *cells)
    tried = f"{len(ATTACKS)} x {len(DEFENCES)}, lost with {HOLDS}: {lost}"
    print(f"\nattacks x defences: {tried}", flush=True)
    return lost


def waffle(seeds: int = 1) -> int:
    """The target's accuracy by attack, algorithm and number of bad agents; and WAFFLE's
    weights of the bad agents."""
    data = [federation_of("mnist5k", "C", N, seed) for seed in range(seeds)]
    names = ("waffle", "fedavg", "scaffold")
    counts = range(1, len(NEAREST) + 1)

    def mean(
        name: str, attack: str | None, bad: tuple[int, ...], **more: Any
    ) -> list[float]:
        found = played(ALGORITHMS[name](), data, attack, bad, [TARGET], **more)
        return found.mean(0).tolist()  # type: ignore[no-any-return]

    clean = {name: mean(name, None, ()) for name in names}
    table = Table("attack", *(f"{name}, {b}" for name in names for b in (0, *counts)))
    shares = [" | ".join(["attack", *(f"{b} bad" for b in counts)])]
    for attack, clip in ((None, None), *((a, None) for a in ATTACKS), ("scale", CLIP)):
        label, absent = f"{attack}, clip={clip:g}" if clip else attack, attack is None
        found = {
            name: [
                mean(name, attack, NEAREST[:b], absent=absent, clip=clip)
                for b in counts
            ]
            for name in names
        }
        cells = [f"{v:.0f}" for name in names for v, _ in (clean[name], *found[name])]
        table.add(label or "they are absent", *cells)
        honest = (
            found["waffle"]
            if attack
            else [mean("waffle", None, NEAREST[:b]) for b in counts]
        )
        weights = " | ".join(f"{share:.1f}" for _, share in honest)
        shares.append(f"{label or 'they are honest'} | {weights}")
    print("", *markdown(shares), sep="\n")
    return 0


def inputs(seeds: int = 1) -> int:
    """Bad inputs tried by the tests, by kind, and how many tests found that
    something was lost."""

    class Seen:
        def pytest_sessionfinish(self, session: pytest.Session) -> None:
            self.lost = session.testsfailed
            names: Any = (getattr(item, "originalname", "") for item in session.items)
            self.tried = Counter(
                name.removeprefix("test_").replace("_", " ") for name in names
            )

    seen, words = (
        Seen(),
        ["-q", "--no-header", "-p", "no:cacheprovider", "--suite", "all"],
    )
    status = pytest.main([*words, *(str(TESTS / law) for law in LAWS)], plugins=[seen])
    if status not in (0, 1):
        raise SystemExit(
            f"{TESTS}: its tests cannot be run, pytest ends with {status}."
        )
    kinds = ", ".join(f"{k} {v}" for k, v in seen.tried.items())
    print(f"bad inputs tried: {seen.tried.total()} ({kinds}), lost: {seen.lost}")
    return seen.lost


@dataclass(frozen=True)
class Options:
    what: Positional[tuple[Literal["inputs", "attacks", "waffle"], ...]] = ("inputs",)
    seeds: PositiveInt = 1  # of the split and the run


def main(argv: Sequence[str]) -> int:
    given = parsed(Options, "python -m bench.hostile", __doc__, argv)
    warnings.simplefilter("ignore")
    parts = {"inputs": inputs, "attacks": attacks, "waffle": waffle}
    return int(sum(parts[what](given.seeds) for what in given.what) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
