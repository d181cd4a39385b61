"""Comparison of a bench with an earlier one.

Times of two days do not compare: the machine may be busier, or another one. So each
time of pflcore is divided by that of the best peer in the same run, and these ratios
are compared. A peer is another way to compute the same, of whatever library; one whose
result is wrong does not count.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench import table
from bench.problem import Facts
from pflcore.check import Words, reject

MAX_GROWTH = 1.10  # of the ratio, before it counts as slower
# A peer with a larger relative error against float64 computes something else.
MAX_PEER_ERROR = 1e-3

Key = tuple[str, str]  # an op and its size in words


class Ratio(NamedTuple):
    """The time of pflcore at one op and size beside the best peer's, in one run.

    Attributes:
        ms: pflcore's median time, in milliseconds
        peer: the best peer's name
        value: pflcore's time over the peer's
    """

    ms: float
    peer: str
    value: float


@dataclass(frozen=True)
class Comparison:
    """Two runs of a bench, op by op and size by size.

    Attributes:
        pairs: the ratios before and now, by op and size
        slower: those of them whose ratio grew by more than a tenth
        unmatched: the ops and sizes that only one of the runs has a ratio of
    """

    pairs: dict[Key, tuple[Ratio, Ratio]]
    slower: list[Key]
    unmatched: list[Key]


def read(path: Path) -> Facts:
    """The measurements that `--json` wrote.

    Raises ValueError where the file holds none.
    """
    expected = "a file that `pflcore bench --json` wrote"
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        reject("against", expected, Words(f"{path} ({reason})"))
    rows = measured.get("rows") if isinstance(measured, dict) else None
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        reject("against", expected, Words(f"{path} without its rows"))
    if not ratios(measured):
        got = Words(f"{path} without a time of pflcore beside a peer's")
        reject("against", expected, got)
    return dict(measured)


def _is_row(row: Any) -> bool:
    """True for a measurement of one provider at one size."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("op"), str)
        and isinstance(row.get("size"), dict)
        and isinstance(row.get("provider"), str)
        and isinstance(row.get("ms"), float | int | None)
        and isinstance(row.get("error"), float | int | None)
    )


def ratios(measured: Facts) -> dict[Key, Ratio]:
    """The ratio of each op and size that has a time of pflcore and of a right peer."""
    by_key: dict[Key, list[Facts]] = {}
    for row in measured["rows"]:
        if row["ms"]:
            key = (row["op"], table.size_of(row["size"]))
            by_key.setdefault(key, []).append(row)
    found = {}
    for key, rows in by_key.items():
        ours = [row for row in rows if row["provider"] == "pflcore"]
        peers = [row for row in rows if _is_right_peer(row)]
        if ours and peers:
            best = min(peers, key=lambda row: float(row["ms"]))
            ms = float(ours[0]["ms"])
            found[key] = Ratio(ms, best["provider"], ms / best["ms"])
    return found


def _is_right_peer(row: Facts) -> bool:
    """True for another provider than pflcore whose result is not known to be wrong."""
    if row["provider"].startswith("pflcore"):
        return False
    error = row["error"]
    return error is None or error <= MAX_PEER_ERROR


def compare(before: Facts, now: Facts) -> Comparison:
    """The ratios of two runs side by side.

    Raises ValueError where no op and size is in both.
    """
    old = ratios(before)
    new = ratios(now)
    pairs = {key: (old[key], new[key]) for key in new if key in old}
    if not pairs:
        expected = "ops and sizes of this run, with a time of a peer"
        reject("against", expected, Words("none of them"))
    slower = []
    for key, (earlier, later) in pairs.items():
        if later.value > MAX_GROWTH * earlier.value:
            slower.append(key)
    unmatched = sorted(old.keys() ^ new.keys())
    return Comparison(pairs, slower, unmatched)


def show(before: Facts, now: Facts) -> int:
    """Prints both runs side by side; returns 1 where pflcore became slower, else 0."""
    result = compare(before, now)
    about = ["", "pflcore's time over the best peer's, before and now:"]
    if before.get("machine", {}).get("cpu") != now["machine"]["cpu"]:
        about.append("The file is of another machine: ratios differ between machines.")
    rows = table.Table("op", "size", "before", "now", "growth", "", about=about)
    for key, (earlier, later) in result.pairs.items():
        growth = f"{later.value / earlier.value - 1:+.0%}"
        verdict = "slower" if key in result.slower else ""
        cells = [f"{r.value:.3f} of {r.peer}" for r in (earlier, later)]
        rows.add(*key, *cells, growth, verdict)
    for op, size in result.unmatched:
        print(f"Not compared, as one run alone has it: {op} {size}")
    if not result.slower:
        print(f"No ratio grew by more than {MAX_GROWTH - 1:.0%}.")
        return 0
    named = ", ".join(" ".join(key) for key in result.slower)
    print(f"{len(result.slower)} of {len(result.pairs)} became slower: {named}")
    return 1
