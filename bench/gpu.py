"""Times the CUDA kernels beside the best torch call and beside what the card can do,
measured in the same run: the problems of `pflcore bench` on the card, and those that a
card alone is for.

The limits: bytes that must move, over the bandwidth of a copy of 2 GiB; float32
instructions, over the rate of a large float32 matrix product (no TF32). A kernel's
limit is the larger of the two times. Times are medians over CUDA events. Run
`python -m bench.gpu`; `--quick` for small sizes only.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import bench
from bench import card_rounds, table
from bench.problem import Call, Problem, Size, fits, models
from pflcore import ops

CARD = "cuda"
OPS = ("sqdist", "aggregate", "weights", "sgd", "rank1")
LARGE: list[tuple[str, Size]] = [  # beside the sizes of `pflcore bench`
    ("sgd", {"S": 100, "Q": 10**7, "corrected": full}) for full in (0, 1)
]
# a few results of all rows
for n, p in itertools.product((20, 100), (62_006, 10**6, 10**7)):
    LARGE.append(("aggregate", {"N": n, "P": p, "M": 4, "K": n}))
for n, i, f, o in ((20, 800, 120, 500), (100, 1600, 200, 384)):
    many = {"N": n, "B": 32, "I": i, "F": f, "O": o, "active": 3 * f // 10}
    LARGE += [("rank1", many | {"backward": back}) for back in (0, 1)]
ASIDE = {"gb_per_s", "gflop_per_s", "published"}  # columns that are not shown


def timed(call: Call, budget: float) -> tuple[list[float], Any]:
    """Seconds of each call on the card, after one that warms it, within about `budget`
    seconds; and its result."""

    def finished() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    torch.cuda.empty_cache()
    result = finished()
    repeats = int(max(5, min(50, budget / max(table.clock(finished)[0], 1e-5))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)], result


def problems(quick: bool) -> Iterator[Problem]:
    """Those of `pflcore bench` and their large sizes, FedDWA's server step, and
    whole rounds."""
    yield from bench.problems(
        [*bench.sizes(OPS, quick), *([] if quick else LARGE)], CARD
    )
    n, p = 100, 10**6 if quick else 10**7
    with torch.device(CARD):
        rows = [models(n, p, seed=seed) for seed in range(2)] if fits(4 * n * p) else []
    if rows:
        (w, g), out = rows, torch.empty_like(rows[0])

        def server() -> Any:
            return ops.aggregate(
                w, *ops.feddwa_weights(ops.pairwise_sqdist(g, w), 5), out=out
            )

        size = {"S": n, "P": p, "goal in ms": 15}
        yield Problem("FedDWA server step", size, {"pflcore": server})
    for size in card_rounds.sizes(quick):
        yield card_rounds.problem(size, CARD)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit(
            f"bench.gpu: torch {torch.__version__} sees no GPU here; nothing was "
            "measured."
        )
    if not ops.backend().cuda:
        sys.exit(
            f"bench.gpu: {ops.backend()}; see .ci/cuda_build. Nothing was measured."
        )
    # what this card does, measured now: bytes that a copy reads and writes, and float32
    # additions and multiplications in the instructions of `Problem.mix`
    torch.backends.cuda.matmul.allow_tf32 = False
    size = min(2 << 30, torch.cuda.mem_get_info()[0] // 8)
    a = torch.empty(size // 4, device=CARD)
    b = torch.empty_like(a)
    moved = 2 * size / min(timed(lambda: b.copy_(a), 0.5)[0])
    m = torch.randn(8192, 8192, device=CARD)
    done = 8192.0**3 / min(timed(lambda: m @ m, 0.5)[0])
    limits = {"read": moved, "write": moved, "fma": 2 * done, "sub_fma": 1.5 * done}
    machine = replace(
        table.Machine.measure(1), cpu=torch.cuda.get_device_name(), limits=limits
    )
    table.play(problems("--quick" in sys.argv), machine, ASIDE, 0.5, 20.0, timer=timed)


if __name__ == "__main__":
    main()
