"""Measurements of the harm that bad clients do.

They are the figures of docs/trust.md, docs/defences.md and docs/bad_clients.md.

`python -m bench.hostile [inputs] [attacks] [waffle] [nearby]` prints them:

- inputs (the default): bad uploads, messages and drop-outs are tried on every
  algorithm. It shows, by kind, how many of them harmed a run, and takes a minute.
- attacks: the accuracy under attack by defence, for 10 clients of MNIST's 5,000-image
  subset, 2 of which are bad. It takes some minutes.
- waffle: a target's accuracy with 1 to 4 bad agents of 10, under WAFFLE, FedAvg and
  SCAFFOLD. It takes some minutes.
- nearby: the weight that two bad clients of 10 win in a victim's model, and what it
  costs, where they know that FedDWA and WAFFLE weigh by distance. It takes some
  minutes.

The figures of the last three are means over `--seeds N` seeds of the split and the run
(by default one). Those of `attacks` and `nearby` have their deviations.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from tyro.conf import Positional

from bench.distance_attacks import distance_adversary
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
from pflcore.check import PositiveInt
from pflcore.lab.data import federation_of
from pflcore.nn.models import model_for
from pflcore.robust import (
    MEANS,
    ByzantineMean,
    CenteredClipping,
    FLTrust,
    Mean,
    NearestNeighborMixing,
    WeightedMean,
)
from pflcore.simulation._attacks import Attack
from pflcore.simulation.record import group_runs

RULE_ATTACKS = ("nearby", "nearby_blind")  # by clients that know the server's rule
ATTACKS = (*get_args(Attack), *RULE_ATTACKS)
# All but those that keep no client out, and the one that goes before another.
NO_DEFENCES = ("mean", "private", "nearest_neighbor_mixing")
DEFENCES = tuple(name for name in MEANS if name not in NO_DEFENCES)
# The rows of `attacks`: no defence, each of them, and two after neighbour mixing.
MIXING = "mixing_"
DEFENCE_ROWS = ("none", *DEFENCES, "mixing_krum", "mixing_trimmed_mean")
N = 10  # clients
ROUNDS = 20
TRAINING = Training(lr=0.1, batch_size=20)
BAD = (8, 9)  # the bad clients of `attacks`
# Those of `waffle` are the agents that share most classes with the target, the nearest
# first.
TARGET = 0
NEAREST = (1, 9, 2, 8)
# With this defence, the honest clients may lose at most POINTS of accuracy.
HOLDS = "multi_krum"
POINTS = 5.0
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
    """The accuracy of some clients and the bad clients' weights.

    Both are in percent.

    The accuracy is the mean over the clients `look`. The weights are the part of the
    server's weights that the bad clients had, as a mean over rounds.

    Args:
        absent: Whether the bad clients do not take part.
    """
    robustness = Robustness(clip)
    if attack:
        robustness = Robustness(clip, _adversary(attack, bad))
    eligible = None
    if absent:
        eligible = [client for client in range(N) if client not in bad]
    results = []
    for seed, federation in enumerate(data):
        evaluation = Evaluation(every=ROUNDS, clients=look)
        simulation = _simulation(
            algorithm, federation, seed, evaluation, robustness, eligible
        )
        (recorded,) = group_runs(simulation.run().lines())
        # An algorithm that reports no weights gives all clients the same.
        weights = recorded.weights()[1] or [torch.full((N,), 1 / N)]
        bad_weight = torch.stack(weights)[:, list(bad)].sum(1).mean()
        # A run that stopped before its evaluation has no value, and counts as 0.
        accuracy = recorded.last_values("accuracy").nanmean().nan_to_num()
        results.append([float(accuracy), float(bad_weight)])
    return 100 * torch.tensor(results, dtype=torch.float64)


def _adversary(
    attack: str, bad: tuple[int, ...], victims: tuple[int, ...] | None = None
) -> Adversary:
    """Clients that do the attack of this name."""
    if attack in (*RULE_ATTACKS, "control"):
        return distance_adversary(attack, bad, victims=victims)
    return Adversary(attack, bad)  # type: ignore[arg-type]


def _simulation(
    algorithm: Algorithm,
    federation: Federation,
    seed: int,
    evaluation: Evaluation,
    robustness: Robustness,
    eligible: list[int] | None = None,
) -> Simulation:
    """A run of these measurements."""
    return Simulation(
        algorithm,
        partial(model_for, "mlp", (1, 28, 28), 10, hidden=(64,)),
        federation,
        TRAINING,
        ROUNDS,
        clients=eligible,
        seed=seed,
        evaluation=evaluation,
        robustness=robustness,
        hardware=Hardware(workers=1),
    )


def attacks(seeds: int = 1, defences: Sequence[str] = DEFENCE_ROWS) -> int:
    """Prints the accuracy by defence and attack.

    Returns how often the defence that must hold did not: how often it lost too much of
    the first row's accuracy where nobody attacks.
    """
    data = [federation_of("mnist5k", "A", N, seed) for seed in range(seeds)]
    honest = [client for client in range(N) if client not in BAD]
    table = Table("defence", "nobody attacks", *ATTACKS)
    lost = 0
    clean = 0.0
    for name in defences:
        algorithm = FedAvg(mean=_mean_of_row(name))
        cells = []
        for attack in (None, *ATTACKS):
            accuracies = played(algorithm, data, attack, BAD, honest)[:, 0]
            mean = float(accuracies.mean())
            clean = clean or mean
            lost += name == HOLDS and mean < clean - POINTS
            cells.append(_mean_text(accuracies))
        f = getattr(algorithm.mean, "num_byzantine", len(BAD))
        table.add(f"{name}, f={f}" if f < len(BAD) else name, *cells)
    summary = f"{len(ATTACKS)} x {len(defences)}, lost with {HOLDS}: {lost}"
    print(f"\nattacks x defences: {summary}", flush=True)
    return lost


def _mean_text(values: torch.Tensor) -> str:
    """The mean of some seeds, and their deviation where there are several."""
    mean = f"{values.mean():.1f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {values.std(correction=0):.1f}"


def _mean_of_row(row: str) -> Mean:
    """The mean of a row, with what it must be told.

    A mean that N clients do not suffice for expects fewer bad ones than there are.
    """
    if row == "none":
        return WeightedMean()
    if row.startswith(MIXING):
        mean = _mean_of_row(row.removeprefix(MIXING))
        return NearestNeighborMixing(len(BAD), mean)
    cls = MEANS[row]
    if issubclass(cls, ByzantineMean):
        return cls(min(len(BAD), (N - cls.margin) // cls.factor))
    values = {"fltrust": FLTrust(0), "centered_clipping": CenteredClipping(1.0, 3)}
    return values.get(row) or cls()


def waffle(seeds: int = 1) -> int:
    """Prints the target's accuracy by attack, algorithm and number of bad agents.

    It prints WAFFLE's weights of the bad agents, too.
    """
    data = [federation_of("mnist5k", "C", N, seed) for seed in range(seeds)]
    names = ("waffle", "fedavg", "scaffold")
    counts = range(1, len(NEAREST) + 1)

    def mean(
        name: str, attack: str | None, bad: tuple[int, ...], **more: Any
    ) -> list[float]:
        results = played(ALGORITHMS[name](), data, attack, bad, [TARGET], **more)
        return results.mean(0).tolist()  # type: ignore[no-any-return]

    clean = {name: mean(name, None, ()) for name in names}
    headings = []
    for name in names:
        headings += [f"{name}, {count}" for count in (0, *counts)]
    table = Table("attack", *headings)
    shares = [" | ".join(["attack", *(f"{count} bad" for count in counts)])]
    cases = [(None, None), *((attack, None) for attack in ATTACKS), ("scale", CLIP)]
    for attack, clip in cases:
        label = f"{attack}, clip={clip:g}" if clip else attack
        more = {"absent": attack is None, "clip": clip}
        cells = []
        for name in names:
            results = [mean(name, attack, NEAREST[:count], **more) for count in counts]
            cells += [f"{accuracy:.0f}" for accuracy, _ in (clean[name], *results)]
            if name == "waffle":
                waffle_results = results
        table.add(label or "they are absent", *cells)
        if attack is None:  # absent agents have no weights, so honest ones are shown
            waffle_results = [mean("waffle", None, NEAREST[:c]) for c in counts]
        weights = " | ".join(f"{weight:.1f}" for _, weight in waffle_results)
        shares.append(f"{label or 'they are honest'} | {weights}")
    print("", *markdown(shares), sep="\n")
    return 0


# The rows of `nearby`: a method, and attacks on it, some of them clipped.
ABSENT = "they are absent"
DISTANCE_ATTACKS = (None, ABSENT, "sign_flip", "noise", "nearby_blind", "nearby")
DISTANCE_CASES: dict[str, tuple[tuple[str | None, float | None], ...]] = {
    "local": ((None, None),),
    "fedavg": tuple((attack, None) for attack in DISTANCE_ATTACKS),
    "feddwa": tuple((attack, None) for attack in DISTANCE_ATTACKS),
    "waffle": (
        *((attack, None) for attack in DISTANCE_ATTACKS),
        ("control", None),
        ("control", CLIP),
    ),
}


def nearby(seeds: int = 1) -> int:
    """Prints the bad clients' weight in a victim's model, and accuracies.

    The victim is the target, and the bad clients are those that share most classes with
    it.
    """
    data = [federation_of("mnist5k", "C", N, seed) for seed in range(seeds)]
    table = Table(
        "method",
        "attack",
        "weight, mean",
        "weight, most",
        "victim, mean of rounds",
        "victim, last",
        "others, last",
    )
    for name, cases in DISTANCE_CASES.items():
        for attack, clip in cases:
            values = torch.stack(
                [_aimed_at(name, attack, clip, d, s) for s, d in enumerate(data)]
            )
            cells = [_mean_text(column) for column in values.T]
            if name == "local" or attack == ABSENT:
                cells[:2] = ["", ""]
            if name == "waffle":
                cells[-1] = ""  # its only model is the target's
            label = f"{attack}, clip={clip:g}" if clip else attack
            table.add(name, label or "nobody attacks", *cells)
    return 0


def _aimed_at(
    name: str,
    attack: str | None,
    clip: float | None,
    federation: Federation,
    seed: int,
) -> torch.Tensor:  # [5], in percent
    """The row of `nearby` of one seed."""
    bad = NEAREST[:2]
    honest = [client for client in range(N) if client not in bad]
    adversary = None
    if attack and attack != ABSENT:
        victims = (TARGET,) if attack == "nearby" else None
        adversary = _adversary(attack, bad, victims)
    simulation = _simulation(
        ALGORITHMS[name](),
        federation,
        seed,
        Evaluation(clients=honest),
        Robustness(clip, adversary),
        honest if attack == ABSENT else None,
    )
    (recorded,) = group_runs(simulation.run().lines())
    weights = recorded.weights()[1] or [torch.full((N,), 1 / N)]
    rows = [w[TARGET] if w.dim() == 2 else w for w in weights]
    won = torch.stack(rows)[:, list(bad)].sum(1)
    accuracy = recorded.series("accuracy")[1].nan_to_num()  # [rounds, N]
    victim = accuracy[:, TARGET]
    others = [i for i in range(N) if i not in (TARGET, *bad)]
    figures = [
        won.mean(),
        won.max(),
        victim.mean(),
        victim[-1],
        accuracy[-1, others].mean(),
    ]
    return 100 * torch.stack([figure.double() for figure in figures])


def inputs(seeds: int = 1) -> int:
    """Prints how many bad inputs the tests tried, by kind.

    Returns how many tests found that something was lost.
    """

    class Seen:
        def pytest_sessionfinish(self, session: pytest.Session) -> None:
            self.lost = session.testsfailed
            self.tried = Counter[str]()
            for item in session.items:
                name = getattr(item, "originalname", "")
                self.tried[name.removeprefix("test_").replace("_", " ")] += 1

    seen = Seen()
    words = ["-q", "--no-header", "-p", "no:cacheprovider", "--suite", "all"]
    files = [str(TESTS / law) for law in LAWS]
    status = pytest.main([*words, *files], plugins=[seen])
    if status not in (0, 1):
        raise SystemExit(
            f"{TESTS}: its tests cannot be run, pytest ends with {status}."
        )
    kinds = ", ".join(f"{k} {v}" for k, v in seen.tried.items())
    print(f"bad inputs tried: {seen.tried.total()} ({kinds}), lost: {seen.lost}")
    return seen.lost


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Args:
        what: the figures that are measured
        seeds: seeds of the split and the run
        defences: the rows of `attacks`, names of defences and "none"; "mixing_" before
            a name puts neighbour mixing before it
    """

    what: Positional[tuple[Literal["inputs", "attacks", "waffle", "nearby"], ...]] = (
        "inputs",
    )
    seeds: PositiveInt = 1
    defences: tuple[str, ...] = DEFENCE_ROWS


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 1 where something was lost, else 0."""
    given = parsed(Options, "python -m bench.hostile", __doc__, argv)
    warnings.simplefilter("ignore")
    given_attacks = partial(attacks, defences=given.defences)
    parts: dict[str, Callable[[int], int]] = {
        "inputs": inputs,
        "attacks": given_attacks,
        "waffle": waffle,
        "nearby": nearby,
    }
    lost = sum(parts[what](given.seeds) for what in given.what)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
