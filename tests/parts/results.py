"""What the tests of results share."""

import torch

from pflcore.results.record import Record

N = 4


def line(r, accuracy, **more):
    return {
        "round": r,
        "algorithm": "waffle",
        "engine": "loop",
        "seed": 0,
        "seconds": 0.1,
        "cohort": torch.arange(N),
        "dropped": [],
        "void": False,
        "bytes_down": 600,
        "bytes_up": 424,
        "train_loss": 0.5,
        "report": {},
        "eval": {"accuracy": accuracy, "loss": [1.0] * N, "size": torch.tensor([10, 20, 30, 40])},
        **more,
    }


def a_run(algorithm="waffle", seed=0, rounds=12, shift=0.0, target=1, **header):
    """Client c's accuracy in round r is shift + r/100 + c/10."""
    lines = [
        {
            "header": {
                "algorithm": algorithm,
                "data": "digits",
                "n": N,
                "target": target,
                "seed": seed,
                **header,
            }
        }
    ]
    for r in range(1, rounds + 1):
        weights = torch.full((N,), 1 / N) if target is not None else torch.eye(N)
        accuracy = shift + r / 100 + torch.arange(N) / 10
        lines.append(line(r, accuracy, algorithm=algorithm, seed=seed, report={"weights": weights}))
    return lines


def write(path, lines):
    with Record(path) as record:
        for one in lines:
            record.write(one)
    return path


def cells(text, algorithm):
    rows = [
        [c.strip() for c in row.strip("|").split("|")]
        for row in text.splitlines()
        if row.startswith("| ")
    ]
    return dict(zip(rows[0], next(r for r in rows if r[0] == algorithm), strict=True))
