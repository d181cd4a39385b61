"""`pflcore diff`: the differences of the runs in two records."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import takewhile

from pflcore.check import require
from pflcore.simulation import History
from pflcore.simulation.record import Runs, read


def diff(argv: Sequence[str]) -> int:
    """Says where the runs of two folders or records differ, and why.

    A folder with several runs is compared run by run: algorithm and seed tell which
    belong together. The exit code is 0 for equal bits in all rounds, and 1 otherwise.
    """
    places = [*takewhile(lambda word: not word.startswith("-"), argv)]
    rest = argv[len(places) :]
    if {"-h", "--help"} & {*rest}:
        print(f"usage: pflcore diff A B\n\n{inspect.getdoc(diff)}")
        return 0
    require(not rest, "diff", "no options", rest)
    words = "two folders or .jsonl files that hold a record"
    require(len(places) == 2, "diff", words, places)
    first, second = (read(place) for place in places)
    pairs, only_first, only_second = _pair_runs(first, second)
    texts = []
    are_equal = not only_first and not only_second
    for pair in pairs:
        comparison = pair[0].compare(pair[1])
        are_equal = are_equal and comparison.equal
        texts.append(str(comparison))
    for place, runs in zip(places, (only_first, only_second), strict=True):
        if runs:
            names = "; ".join(run.name for run in runs)
            texts.append(f"Only in {place}: {names}.")
    print("\n\n".join(texts))
    return 0 if are_equal else 1


def _pair_runs(
    first: Runs, second: Runs
) -> tuple[list[tuple[History, History]], list[History], list[History]]:
    """The runs that belong together, and the other runs of each record.

    A single run is compared with a single run, whatever they are.
    """
    if len(first) == len(second) == 1:
        return [(first[0], second[0])], [], []
    pairs = []
    only_first = []
    rest = [*second]
    for run in first:
        partner = next((other for other in rest if other.name == run.name), None)
        if partner is None:
            only_first.append(run)
            continue
        pairs.append((run, partner))
        # By identity: runs with equal records would be equal to `remove`.
        rest = [other for other in rest if other is not partner]
    return pairs, only_first, rest
