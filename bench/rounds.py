"""One round of training, end to end: an algorithm of every family; for FedAvg a plain
torch loop, Flower and pfl beside it."""

import itertools

from bench import peers
from bench.problem import Calls, Problem, Size, Sizes
from bench.workload import Workload, plain_loop, simulation

FAMILIES = (
    "fedavg",
    "fedadam",
    "fedprox",
    "scaffold",
    "waffle",
    "weight_erosion",
    "feddwa",
    "hypcluster",
    "apfl",
    "per_fedavg",
)


def sizes(quick: bool) -> Sizes:
    """N clients of `images` made-up images of 1 x 28 x 28, batches of 20, one epoch."""
    for name, model, n in itertools.product(
        FAMILIES, ("lenet5", "mlp"), (10,) if quick else (10, 20, 100)
    ):
        images = 100 if quick or n > 20 else 1000
        yield {"algorithm": name, "model": model, "N": n, "images": images}


def problem(size: Size) -> Problem:
    """Of a client's images a tenth is for testing; everybody takes part in every
    round."""
    n, images = size["N"], size["images"]
    w = Workload("rounds", size["model"], "made up", n, n, n * images * 9 // 10, n)
    rounds = simulation(size["algorithm"], w).iterate()
    providers: Calls = {"pflcore": lambda: next(rounds)}
    if size["algorithm"] == "fedavg":
        plain = plain_loop(w.build(), w)
        providers |= {
            "plain loop": lambda: plain(range(n), [1 / n] * n),
            "flwr": lambda: peers.flower(w),
            "pfl": lambda: peers.apple(w),
        }
    return Problem("round", size, providers)
