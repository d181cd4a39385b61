"""Times of the CUDA kernels and of torch, and the GPU's limits.

These are the problems of `pflcore bench` on the card, and others that are too large for
a CPU. Run `python -m bench.gpu`; `--quick` takes small sizes only.

The limit is measured in the same run. It is the longer one of two times: the bytes that
must move over the bandwidth of a copy of 2 GiB, and the float32 instructions over the
rate of a large float32 matrix product (no TF32). Times are medians over CUDA events.
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
OPS = ("sqdist", "aggregate", "weights", "robust", "sgd", "rank1")
# Sizes in addition to those of `pflcore bench`.
LARGE: list[tuple[str, Size]] = []
for full in (0, 1):
    LARGE.append(("sgd", {"S": 100, "Q": 10**7, "corrected": full}))
# Four results, each a mixture of all rows.
for n, p in itertools.product((20, 100), (62_006, 10**6, 10**7)):
    LARGE.append(("aggregate", {"N": n, "P": p, "M": 4, "K": n}))
for n, i, f, o in ((20, 800, 120, 500), (100, 1600, 200, 384)):
    many = {"N": n, "B": 32, "I": i, "F": f, "O": o, "active": 3 * f // 10}
    for back in (0, 1):
        LARGE.append(("rank1", many | {"backward": back}))
ASIDE = {"gb_per_s", "gflop_per_s", "published"}  # columns that are not shown


def timed(call: Call, budget: float) -> tuple[list[float], Any]:
    """Seconds of each call on the card, and its result.

    One call warms the card first. The others take about `budget` seconds together.
    """

    def finished() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    torch.cuda.empty_cache()
    result = finished()
    seconds, _ = table.clock(finished)
    fitting = budget / max(seconds, 1e-5)
    repeats = int(max(5, min(50, fitting)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)], result


def problems(quick: bool) -> Iterator[Problem]:
    """The problems of `pflcore bench`, their large sizes, and the card's own.

    The card's own are FedDWA's server step and whole rounds.
    """
    todo = [*bench.sizes(OPS, quick)]
    if not quick:
        todo += LARGE
    yield from bench.problems(todo, CARD)
    yield from server_problems(quick)
    for size in card_rounds.sizes(quick):
        yield card_rounds.problem(size, CARD)


def server_problems(quick: bool) -> Iterator[Problem]:
    """FedDWA's server step for S models, if the memory suffices.

    A model has P parameters.
    """
    n = 100
    p = 10**6 if quick else 10**7
    with torch.device(CARD):
        if not fits(4 * n * p):
            return
        w = models(n, p, seed=0)
        g = models(n, p, seed=1)
    out = torch.empty_like(w)

    def server() -> Any:
        weight, index = ops.feddwa_weights(ops.pairwise_sqdist(g, w), 5)
        return ops.aggregate(w, weight, index, out=out)

    size = {"S": n, "P": p, "goal in ms": 15}
    yield Problem("FedDWA server step", size, {"pflcore": server})


def main() -> None:
    """Prints the table; without a GPU it ends the program."""
    if not torch.cuda.is_available():
        sys.exit(
            f"bench.gpu: torch {torch.__version__} sees no GPU here; nothing was "
            "measured."
        )
    if not ops.backend().cuda:
        sys.exit(
            f"bench.gpu: {ops.backend()}; see .ci/cuda_build. Nothing was measured."
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    card = torch.cuda.get_device_name()
    machine = replace(table.Machine.measure(1), cpu=card, limits=card_limits())
    quick = "--quick" in sys.argv
    table.play(problems(quick), machine, ASIDE, 0.5, 20.0, timer=timed)


def card_limits() -> dict[str, float]:
    """The card's limits, as numbers a second.

    They are bytes that a copy reads and writes, and float32 additions and
    multiplications in the instructions of `Problem.mix`.
    """
    size = min(2 << 30, torch.cuda.mem_get_info()[0] // 8)
    a = torch.empty(size // 4, device=CARD)
    b = torch.empty_like(a)
    moved = 2 * size / min(timed(lambda: b.copy_(a), 0.5)[0])
    m = torch.randn(8192, 8192, device=CARD)
    done = 8192.0**3 / min(timed(lambda: m @ m, 0.5)[0])
    return {"read": moved, "write": moved, "fma": 2 * done, "sub_fma": 1.5 * done}


if __name__ == "__main__":
    main()
