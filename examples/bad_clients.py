"""Measures the effect of one bad client on the others.

It compares all algorithms.

It writes the page docs/bad_clients.md in some minutes, but for the section about
clients that know the rule:
    python examples/bad_clients.py [FILE] [ALGORITHM ...]
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from pflcore.lab.data import federation_of

N = 8  # clients
BAD = 5  # the bad client's number
ROUNDS = 10
CLIP = 2.0  # the largest norm of an update where updates are clipped
OUTLIER = 20  # a relative update norm above this is an outlier
# The values that the bad client uploads, by the name in the table.
UPLOADS = {"NaN": torch.nan, "Inf": torch.inf, "zeros": 0.0, "1e30": 1e30}
INPUTS = "inputs of 1e10"
# The page's part from this heading on is not made here, and stays.
KNOWN_RULE = "## Clients that know the rule"
TRAINING = Training(lr=0.1, batch_size=10)
# Algorithms that treat the layers of a model differently. They need several layers.
DEEP = (
    "fedala",
    "fedper",
    "lg_fedavg",
    "fedrep",
    "fedbabu",
    "fedbn",
    "gpfl",
    "factorized_waffle",
    "fedproto",
    "fedpac",
    "fedas",
    "feddbe",
)
ABOUT = f"""# Bad clients
What one bad client does to the others, for each algorithm. What to do about it:

- A client that uploads NaN or Inf is left out of the round. You need to do nothing.
- Finite lies are not found without a defence: `clip`, which the table below shows, or a [robust mean](defences.md).

## One bad client of {N}
`python examples/bad_clients.py` makes this table. All clients take part in {ROUNDS} rounds and have the same Gaussian clouds. The model is logistic
regression; for methods that treat the layers of a model differently ({", ".join(DEEP)})
it has two layers with a batch norm between.

- **NaN, Inf, zeros, 1e30**: every number that the bad client uploads has this value.
- **inputs of 1e10**: the bad client trains honestly on inputs of that size.

A cell is the honest clients' mean test accuracy in percent after the last round, or *not finite* where two layers of large finite numbers
overflow. The letters after it:

- **d**: the bad client was dropped
- **o**: it was reported as an outlier, with an update of more than {OUTLIER} times the median
- **c**: its update was clipped
- **s**: the run stopped with a message

`clip` bounds updates and nothing else: batch norm's statistics of inputs of 1e10 are averaged. `local` uploads nothing."""  # noqa: E501


def linear() -> torch.nn.Module:
    """The model of most algorithms, logistic regression."""
    return torch.nn.Linear(8, 4)


def deep() -> torch.nn.Module:
    """The model for DEEP, two layers with a batch norm between."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 4),
    )


def spoil(algorithm: Algorithm, value: float) -> Algorithm:
    """The algorithm with a bad client that uploads only `value`."""
    honest_class = type(algorithm)

    def train(
        self: Algorithm, down: Payload, client_state: Tensors, clients: Clients
    ) -> TrainResult:
        new, up, fit = honest_class.train(self, down, client_state, clients)
        is_bad = clients.ids == BAD
        for key, upload in up.items():
            if upload.is_floating_point():
                up[key] = upload.clone()
                up[key][is_bad.to(upload.device)] = value
        return new, up, fit

    # A class of the same name, so that messages and records name the algorithm.
    spoilt_class: type[Algorithm] = type(
        honest_class.__name__, (honest_class,), {"train": train}
    )
    return spoilt_class(**vars(algorithm))


def is_outlier(record: dict[str, Any]) -> bool:
    """True where the bad client's update was reported as an outlier."""
    norms = record["relative_update_norm"] or []
    norm_by_client = dict(zip(record["cohort"], norms, strict=False))
    return (norm_by_client.get(BAD) or 0) > OUTLIER


def play(name: str, kind: str | None, clip: float | None) -> str:
    """A cell of the table: the honest clients' accuracy, and marks.

    `kind` is the behaviour of the bad client, one of UPLOADS or INPUTS. With
    None the client is honest, too.
    """
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
    if kind == INPUTS:
        x = data.x.clone()
        rows = data.index["train"][BAD]
        x[rows] = x[rows] * 1e10
        data = replace(data, x=x)
    elif kind is not None:
        algorithm = spoil(algorithm, UPLOADS[kind])
    model = deep if name in DEEP else linear
    run = Simulation(
        algorithm,
        model,
        data,
        TRAINING,
        rounds=ROUNDS,
        evaluation=Evaluation(every=ROUNDS),
        robustness=Robustness(clip=clip),
        hardware=Hardware(workers=1),
    )
    history = run.run()
    scores = run.evaluate("test")
    honest = torch.arange(N) != BAD
    marks = ""
    if any(BAD in record["dropped"] for record in history.rounds):
        marks += "d"
    if any(is_outlier(record) for record in history.rounds):
        marks += "o"
    if any(BAD in record["clipped"] for record in history.rounds):
        marks += "c"
    if history.stopped is not None:
        marks += "s"
    accuracy = "not finite"
    if scores["loss"][honest].isfinite().all():
        accuracy = f"{100 * scores['accuracy'][honest].mean():.0f}"
    return f"{accuracy} {marks}".strip()


def row(name: str) -> list[str]:
    """The cells of an algorithm; NaN and Inf share one if they do the same."""
    nan, inf = play(name, "NaN", None), play(name, "Inf", None)
    cells = [play(name, None, None), nan if nan == inf else f"{nan}, {inf}"]
    cells.append(play(name, "zeros", None))
    for kind in ("1e30", INPUTS):
        cells += [play(name, kind, None), play(name, kind, CLIP)]
    return cells


def main(path: str, names: Sequence[str]) -> None:
    """Plays all runs and writes the page to `path`."""
    columns = [
        "all honest",
        "NaN, Inf",
        "zeros",
        "1e30",
        f"1e30, clip={CLIP:g}",
        INPUTS,
        f"{INPUTS}, clip={CLIP:g}",
    ]
    lines = [ABOUT, "", f"| algorithm | {' | '.join(columns)} |"]
    lines.append("|:---|" + "---:|" * len(columns))
    for name in names:
        lines.append(f"| `{name}` | {' | '.join(row(name))} |")
        print(lines[-1], flush=True)
    page = Path(path)
    text = "\n".join(lines) + "\n"
    if page.exists():
        _, heading, rest = page.read_text(encoding="utf-8").partition(KNOWN_RULE)
        text += f"\n{heading}{rest}" if heading else ""
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    path, *names = sys.argv[1:] or ["docs/bad_clients.md"]
    main(path, names or list(ALGORITHMS))
