"""Two rounds of a method beside the same rounds by other people's programs.

    python -m bench.peer_rounds --pfllib CHECKOUT --flbench CHECKOUT [METHOD ...]

Each row is a method and a peer, with the largest difference between two numbers of
their models after the rounds, and the reason where the formulas differ. Peers without a
checkout are left out. `problem` says what is played; a module of `methods` holds the
comparisons of one family of methods.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from bench.peer_rounds.methods import all_comparisons
from bench.peer_rounds.problem import Comparison

# Peers by the name of their option, with the name that the table shows.
PEERS = {
    "pfllib": "PFLlib",
    "flbench": "FL-bench",
    "fluke": "fluke",
    "fedlab": "FedLab",
    "pfedgraph": "its authors",
}
LARGEST_EQUAL = 1e-6
HEAD = "| method | peer | largest difference | verdict |\n|:--|:--|--:|:--|"


def measured_difference(comparison: Comparison, checkout: Path) -> float:
    """The largest difference, without what the peer prints on its way."""
    with contextlib.redirect_stdout(io.StringIO()):
        return comparison.difference(checkout)


def row(comparison: Comparison, difference: float) -> str:
    """A line of the table: method, peer, largest difference, and what it means."""
    verdict = "equal" if difference <= LARGEST_EQUAL else "differs"
    if comparison.reason:
        verdict += f": {comparison.reason}"
    peer = PEERS[comparison.peer]
    return f"| {comparison.method} | {peer} | {difference:.1e} | {verdict} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 where a difference has no reason, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.peer_rounds")
    for name, title in PEERS.items():
        parser.add_argument(f"--{name}", type=Path, help=f"a checkout of {title}")
    parser.add_argument("method", nargs="*", help="methods by name; none means all")
    given = parser.parse_args(arguments)
    checkouts = {name: getattr(given, name) for name in PEERS}
    print(HEAD)
    status = 0
    for comparison in all_comparisons():
        checkout = checkouts[comparison.peer]
        wanted = not given.method or comparison.method in given.method
        if checkout is None or not wanted:
            continue
        difference = measured_difference(comparison, checkout)
        print(row(comparison, difference), flush=True)
        if difference > LARGEST_EQUAL and not comparison.reason:
            status = 1
    return status
