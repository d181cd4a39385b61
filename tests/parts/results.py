"""Shared records of the tests of results."""

import math

import torch

from pflcore.simulation import record as records

N = 4


def line(r, accuracy, **more):
    return {
        "round": r,
        "algorithm": "waffle",
        "seed": 0,
        "cohort": torch.arange(N),
        "dropped": [],
        "bytes_down": 600,
        "bytes_up": 424,
        "report": {},
        "eval": {
            "accuracy": accuracy,
            "loss": [1.0] * N,
            "size": torch.tensor([10, 20, 30, 40]),
        },
        **more,
    }


def a_run(algorithm="waffle", seed=0, rounds=12, shift=0.0, target=1, **header):
    """Lines of a record of a short run.

    The accuracy of client c in round r is shift + r/100 + c/10.
    """
    head = {
        "algorithm": algorithm,
        "data": "digits",
        "n": N,
        "target": target,
        "seed": seed,
    }
    lines = [{"header": {**head, **header}}]
    for r in range(1, rounds + 1):
        weights = torch.full((N,), 1 / N) if target is not None else torch.eye(N)
        accuracy = shift + r / 100 + torch.arange(N) / 10
        lines.append(
            line(
                r, accuracy, algorithm=algorithm, seed=seed, report={"weights": weights}
            )
        )
    return lines


def a_long_run(n=1500, k=3):
    """Lines of a record with long lists and a sparse matrix."""
    index = torch.randint(n, (n, k), generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).repeat(n, 1)
    moved = [None if i == 3 else 1.5 for i in range(n)]
    loss = [float(i) if i % 7 else math.nan for i in range(n)]
    report = {"rows": torch.arange(n), "index": index, "weight": weight}
    seen = {"loss": loss, "size": [1] * n}
    one = {
        "cohort": list(range(n)),
        "relative_update_norm": moved,
        "dropped": [3],
        "report": report,
        "eval": seen,
    }
    header = {"algorithm": "feddwa", "n": n, "size": [15] * n}
    return [{"header": header}, {"round": 1, **one}, {"round": 2, **one}]


def write(path, lines):
    with records.RecordWriter(path) as record:
        for one in lines:
            record.write(one)
    return path


def cells(text, algorithm):
    rows = []
    for row_text in text.splitlines():
        if row_text.startswith("| "):
            row = [cell.strip() for cell in row_text.strip("|").split("|")]
            # The best of a column is bold.
            rows.append([cell.removeprefix("**").removesuffix("**") for cell in row])
    values = next(row for row in rows if row[0] == algorithm)
    return dict(zip(rows[0], values, strict=True))
