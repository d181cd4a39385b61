"""What one bad client does to the others, by algorithm: writes the tables of
docs/bad_clients.md (some minutes).

python examples/bad_clients.py [FILE] [ALGORITHM ...]
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pflcore import (
    ALGORITHMS,
    Algorithm,
    Clients,
    Evaluation,
    Hardware,
    Robustness,
    Simulation,
    Training,
)
from pflcore.algorithms import Payload, Tensors, TrainResult
from pflcore.data import federation_of

N, BAD, ROUNDS, CLIP = 8, 5, 10, 2.0
UPLOADS = {"NaN": torch.nan, "Inf": torch.inf, "1e30": 1e30, "zeros": 0.0}
KINDS = (*UPLOADS, "inputs of 1e10")
TRAINING = Training(lr=0.1, batch_size=10)
# they treat a model's parts apart
DEEP = (
    "fedala",
    "fedper",
    "lg_fedavg",
    "fedrep",
    "fedbabu",
    "fedbn",
    "factorized_waffle",
)
ABOUT = f"""# Bad clients

One of {N} clients, number {BAD}, is bad; all take part in {ROUNDS} rounds of logistic regression on
Gaussian clouds, the same for everybody (`examples/bad_clients.py` makes this page); methods that
treat a model's parts apart ({", ".join(DEEP)})
train two layers with a batch norm between.
NaN, Inf, 1e30, zeros: that is all it uploads; inputs of 1e10: it trains honestly on such data.
The numbers are the honest clients' mean test accuracy in percent after the last round, or *not
finite* where two layers of large finite numbers overflow. **d**: the bad client was dropped; **o**:
it was reported as an outlier (an update of more than 20 times the median); **c**: its update was
clipped; **s**: the run stopped with a sentence. `local` uploads nothing. Clipping bounds updates,
not what else is uploaded: a loss of 1e30 still rules q-FedAvg's weights, and batch norm's
statistics of inputs of 1e10 are averaged (LG-FedAvg, FedBN and FedALA keep them at home). MOCHA
leaves out a client whose step size is larger than the others', where that would be unstable."""  # noqa: E501


def deep() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 4),
    )


def spoil(algorithm: Algorithm, value: float) -> Algorithm:
    """The algorithm, with a client whose uploads hold nothing but `value`."""

    def train(
        self: Algorithm, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        new, up, fit = kind.train(self, down, client_state, clients)
        bad = clients.ids == BAD
        for key, sent in up.items():
            if sent.is_floating_point():
                up[key] = sent.clone()
                up[key][bad.to(sent.device)] = value
        return new, up, fit

    kind = type(algorithm)
    spoilt: type[Algorithm] = type(kind.__name__, (kind,), {"train": train})
    return spoilt(**vars(algorithm))


def play(name: str, kind: str | None, clip: float | None) -> str:
    """The honest clients' mean accuracy, with the marks of what was done."""
    data = federation_of(
        "synthetic_clusters",
        n=N,
        groups=1,
        samples=40,
        classes=4,
        dim=8,
        held_out=50,
    )
    algorithm = ALGORITHMS[name]()
    if kind == "inputs of 1e10":
        x, rows = data.x.clone(), data.index["train"][BAD]
        x[rows] = x[rows] * 1e10
        data = replace(data, x=x)
    elif kind is not None:
        algorithm = spoil(algorithm, UPLOADS[kind])
    run = Simulation(
        algorithm,
        deep if name in DEEP else lambda: torch.nn.Linear(8, 4),
        data,
        TRAINING,
        rounds=ROUNDS,
        evaluation=Evaluation(every=ROUNDS),
        robustness=Robustness(clip=clip),
        hardware=Hardware(workers=1),
    )
    history = run.run()
    seen = run.evaluate("test")
    honest = torch.arange(N) != BAD
    fine = bool(seen["loss"][honest].isfinite().all())
    far = any(
        (
            dict(zip(r["cohort"], r["relative_update_norm"] or [], strict=False)).get(
                BAD
            )
            or 0
        )
        > 20
        for r in history.rounds
    )
    done = {
        "d": any(BAD in r["dropped"] for r in history.rounds),
        "o": far,
        "c": any(BAD in r["clipped"] for r in history.rounds),
        "s": history.stopped is not None,
    }
    accuracy = f"{100 * seen['accuracy'][honest].mean():.0f}" if fine else "not finite"
    return f"{accuracy} {''.join(mark for mark, on in done.items() if on)}".strip()


def main(path: str, names: Sequence[str]) -> None:
    lines = [ABOUT]
    for clip in (None, CLIP):
        lines += [
            "",
            f"## {'Without clipping' if clip is None else f'With clip={clip:g}'}",
            "",
        ]
        lines.append(f"| algorithm | nobody bad | {' | '.join(KINDS)} |")
        lines.append("|:---|" + "---:|" * (len(KINDS) + 1))
        for name in names:
            cells = [play(name, kind, clip) for kind in (None, *KINDS)]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(
        sys.argv[1] if len(sys.argv) > 1 else "docs/bad_clients.md",
        sys.argv[2:] or list(ALGORITHMS),
    )
