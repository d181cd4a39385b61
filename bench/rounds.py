"""Whole rounds of training for one algorithm of each family.

FedAvg is also timed as a plain torch loop, in Flower and in pfl; with a ResNet-18 as a
plain loop alone, since such a round takes a minute.
"""

import itertools

from bench import peers
from bench.problem import Calls, Problem, Size, Sizes
from bench.workload import Workload, plain_loop, simulation

RESNET = "resnet18, 16 wide"
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
    """Algorithms, models, N clients and the images of each.

    Images are made up, of 1 x 28 x 28; the ResNet-18 has those of CIFAR-10 where they
    are there. A round is one epoch in batches of 20.
    """
    clients = (10,) if quick else (10, 20, 100)
    for name, model, n in itertools.product(FAMILIES, ("lenet5", "mlp"), clients):
        images = 100 if quick or n > 20 else 1000
        yield {"algorithm": name, "model": model, "N": n, "images": images}
    if not quick:
        yield {"algorithm": "fedavg", "model": RESNET, "N": 20, "images": 500}


def problem(size: Size) -> Problem:
    """The problem of a size: rounds in which every client takes part.

    A tenth of a client's images is for testing.
    """
    n = size["N"]
    images = size["images"]
    w = Workload(
        name="rounds",
        model=size["model"],
        data="cifar10" if size["model"] == RESNET else "made up",
        n=n,
        cohort=n,
        samples=n * images * 9 // 10,
        tests=n,
    )
    rounds = simulation(size["algorithm"], w).iterate()
    providers: Calls = {"pflcore": lambda: next(rounds)}
    if size["algorithm"] == "fedavg":
        plain = plain_loop(w.build(), w)
        providers["plain loop"] = lambda: plain(range(n), [1 / n] * n)
    if size["algorithm"] == "fedavg" and size["model"] != RESNET:
        providers |= {
            "flwr": lambda: peers.flower(w),
            "pfl": lambda: peers.apple(w),
        }
    return Problem("round", size, providers)
