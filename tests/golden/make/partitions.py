"""Golden numbers of the partitions of the WAFFLE and FedDWA papers."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor

from cases import Result, load, main

AGENTS = 10
CLASSES = 10
GROUPS = 4  # of FedDWA's practical setting 1


def class_counts(base: list[int], available: list[int]) -> list[list[int]]:
    """Samples of each class of each agent (WAFFLE, Table 2).

    Agent i asks for class t with the weight base[(t + i) mod 10]. A class of n_t
    samples is cut in the order of the agents: the first i of them have `floor(n_t c_i /
    c)` samples, c_i being the sum of their weights and c that of all.
    """
    counts = [[0] * CLASSES for _ in range(AGENTS)]
    for t in range(CLASSES):
        weights = [base[(t + i) % CLASSES] for i in range(AGENTS)]
        before = 0
        for i in range(AGENTS):
            after = available[t] * sum(weights[: i + 1]) // sum(weights)
            counts[i][t] = after - before
            before = after
    return counts


def dominant_classes() -> list[list[int]]:
    """The dominant classes of each group of clients, as FedDWA's code chooses them.

    Group g has the classes that its quarter of the range from 0 to 10 touches.
    """
    width = CLASSES / GROUPS
    ranges = [(floor(g * width), ceil((g + 1) * width)) for g in range(GROUPS)]
    return [list(range(*ends)) for ends in ranges]


def results() -> Iterator[Result]:
    """The entries "sizes", "first" and "dominant" of partitions.json."""
    stored = load("partitions")
    for name, base in stored["bases"].items():
        counts = class_counts(base, stored["mnist"])
        sizes = [sum(row) for row in counts]
        yield Result("partitions", ("sizes", name), sizes, 0, 0)
        yield Result("partitions", ("first", name), counts[0], 0, 0)
    yield Result("partitions", ("dominant",), dominant_classes(), 0, 0)


if __name__ == "__main__":
    main(results())
