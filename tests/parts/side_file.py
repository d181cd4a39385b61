"""What the tests of side file share."""

import math

import torch

from pflcore.results.record import Record


def lines(n=1500, k=3):
    index = torch.randint(n, (n, k), generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).repeat(n, 1)
    loss = [float(i) if i % 7 else math.nan for i in range(n)]
    report = {"rows": torch.arange(n), "index": index, "weight": weight}
    yield {"header": {"algorithm": "feddwa", "n": n, "size": [15] * n}}
    moved = [None if i == 3 else 1.5 for i in range(n)]
    line = {
        "cohort": list(range(n)),
        "moved": moved,
        "dropped": [3],
        "report": report,
        "eval": {"loss": loss, "size": [1] * n},
    }
    for r in (1, 2):
        yield {"round": r, **line}


def written(path, given):
    with Record(path) as record:
        for line in given:
            record.write(line)
    return path
