"""Records of runs: JSON lines written as the run goes, and read back whatever happened
to it.

A record file holds one or more runs. A run is a header line `{"header": {...}}`, one
line per round, and, if the run ended early, `{"stopped": "one sentence"}`. A number
that is not finite is stored as null (JSON has no NaN) and read back as NaN where it is
one value per client. Files can be concatenated.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflcore import metrics
from pflcore.check import checked, require
from pflcore.results._validate import (
    EarlierFormatError,
    check_line,
    check_line_fits_run,
)

__all__ = ["Run", "read"]
Facts = Mapping[str, Any]
Line = dict[str, Any]
OnRound = Callable[[int, Line], None]
OPTION_GROUPS = ("model_options", "training", "options")
# times the cohort's median update: honest clients with many times the data of the
# others stay below
OUTLIER_RATIO = 20.0
MAX_MATRIX_NUMBERS = 10**8  # of weights whose clients no header counts
# which of the data the run saw
DATA_FIELDS = ("data_seed", "train_samples", "test_samples", "val")
TABLE_FIELDS = ("data", "partition", "model", "n")
# what all rows of a table must share
COMPARED_FIELDS = (
    *TABLE_FIELDS,
    "clients",
    "eval_clients",
    "rounds",
    "participation",
    "batch_norm",
    "loss",
    "clip",
    "adversary",
    "eval_split",
    "stream",
    *DATA_FIELDS,
)


def to_json(value: Any) -> Any:  # noqa: PLR0911 (a kind of value each)
    """`value` as JSON can hold it: dataclasses as dicts, tensors and tuples as lists,
    numbers that are not finite as None, the rest by its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [to_json(v) for v in value]
    return getattr(value, "__name__", None) or str(value)


@checked
class RecordWriter:
    """Writes one record file, each line at once, so that an interrupted process leaves
    at most its last line cut off; a line that a full disk cut off is finished before
    the next one."""

    def __init__(
        self, path: str | Path, overwrite: bool = False, goes_on: bool = False
    ) -> None:
        """Opens `path`, making its folder. A file that holds something is kept unless
        `overwrite`: ValueError. One that `goes_on` has more lines behind its own."""
        self.path = Path(path)
        if (
            self.path.is_file()
            and self.path.stat().st_size
            and not (overwrite or goes_on)
        ):
            raise ValueError(
                f"path: expected a new file, got {self.path}, which holds something; "
                "name another "
                "or allow overwriting it."
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab" if goes_on else "wb")  # noqa: SIM115
        except OSError as e:
            raise ValueError(
                f"path: expected a file that can be written, got {self.path} "
                f"({e.strerror}); name "
                "another."
            ) from None

    def write(self, line: Facts) -> None:
        """Appends one line: a header, a round or a stop."""
        text = json.dumps(to_json(line), allow_nan=False, separators=(",", ":"))
        self._file.write((text + "\n").encode())
        self._file.flush()

    def run(
        self,
        header: Facts,
        play: Callable[[OnRound], Any],
        on_round: OnRound | None = None,
    ) -> Any:
        """Writes a whole run, as `play(on_round)`, a `Simulation.run`, plays it: the
        header, each round, and why it ended early.

        `on_round` sees each line first and may add to it. An error is written too, and
        goes on. Returns what `play` does.
        """

        def write(round: int, line: Line) -> None:
            try:
                if on_round:
                    on_round(round, line)
            finally:
                self.write(line)

        self.write({"header": header})
        try:
            history = play(write)
        except BaseException as e:
            said = f"{type(e).__name__}: {next(iter(str(e).strip().splitlines()), '')}"
            with contextlib.suppress(OSError):  # a full disk, perhaps
                self.write({"stopped": said, "unfinished": True})
            raise
        if history.stopped:
            unfinished = history.interrupted or history.failed
            self.write({"stopped": history.stopped, "unfinished": unfinished})
        return history

    def close(self) -> None:
        """Closes the file; what was written is on disk."""
        with contextlib.suppress(OSError):  # `write` has said it
            self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Run:
    """One run as it was recorded."""

    header: Line = field(default_factory=dict)
    rounds: list[Line] = field(default_factory=list)
    stopped: str | None = None
    # stopped by Ctrl-C, for want of memory or by an error, and not by what the method
    # does
    unfinished: bool = False

    def lines(self) -> Iterator[Line]:
        """Its lines, as `RecordWriter` writes them."""
        yield {"header": self.header}
        yield from self.rounds
        if self.stopped is not None:
            yield {"stopped": self.stopped, "unfinished": self.unfinished}

    @property
    def complete(self) -> bool:
        """Whether it is over, and nothing of it is lost: it has a header and all its
        rounds, or was stopped by what the method does."""
        numbers = [r["round"] for r in self.rounds]
        if (
            not self.header
            or self.unfinished
            or numbers != [*range(1, len(numbers) + 1)]
        ):
            return False
        return self.stopped is not None or len(numbers) == self.header.get("rounds")

    @property
    def algorithm(self) -> str:
        """What the algorithm is called."""
        named = (
            r["algorithm"] for r in (self.header, *self.rounds) if "algorithm" in r
        )
        return str(next(named, "?"))

    @property
    def target(self) -> int | None:
        """The client that the run personalizes for, where it is a single one."""
        target = self.header.get("target")
        return target if isinstance(target, int) else None

    @property
    def held_out(self) -> str:
        """What the method kept from its own training for validation, in words; "" where
        it trains on all samples as others do."""
        share = (self.header.get("facts") or {}).get("held out for validation")
        return f"{share:.0%} of its training samples held out" if share else ""

    @property
    def evaluations(self) -> list[Line]:
        """The rounds that were evaluated."""
        return [r for r in self.rounds if r.get("eval")]

    @property
    def last_evaluation(self) -> Line:
        """The last evaluation; {} where there is none."""
        return {**self.evaluations[-1]["eval"]} if self.evaluations else {}

    @property
    def main_metric(self) -> str:
        """ "accuracy", or "loss" where the task has no accuracy (regression)."""
        seen = [r["eval"].get("accuracy") or [] for r in self.evaluations]
        return (
            "loss"
            if seen and all(v is None for values in seen for v in values)
            else "accuracy"
        )

    @property
    def extra_metrics(self) -> list[str]:
        """The metrics that were asked for beside accuracy and loss."""
        return sorted({*self.last_evaluation} - {"size", "clients", "loss", "accuracy"})

    def values(self, measure: str | None = None) -> tuple[list[int], Tensor]:
        """Rounds of the evaluations and their values per client, `[E, N]` float64: NaN
        for a client without samples; a loss that was not finite, null in the file, is
        infinite, so that no mean leaves it out."""
        measure = measure or self.main_metric
        rows = [_with_lost_clients(r["eval"], measure) for r in self.evaluations]
        rounds = [r["round"] for r in self.evaluations]
        return rounds, torch.stack(rows) if rows else torch.empty(
            0, 0, dtype=torch.float64
        )

    def curve(
        self, client: int | None = None, measure: str | None = None
    ) -> tuple[list[int], list[float]]:
        """Rounds of the evaluations and one value each: the mean over clients, or one
        client's own."""
        rounds, values = self.values(measure)
        if client is None:
            return rounds, [metrics.mean(v) for v in values]
        # who was evaluated, where not all
        some = self.evaluations[0]["eval"].get("clients") if rounds else None
        at = client if some is None else some.index(client) if client in some else None
        return rounds, [math.nan if at is None else v[at].item() for v in values]

    def last_values(self, measure: str | None = None) -> Tensor:
        """Each client's value at the last evaluation, `[N]`."""
        values = self.values(measure)[1]
        return values[-1] if len(values) else values.reshape(0)

    @property
    def rounds_played(self) -> int:
        """The number of the last round in the record."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    def outliers(self) -> dict[int, tuple[float, int]]:
        """Clients whose update was many times the cohort's median: the largest such
        number, and in how many rounds."""
        out: dict[int, tuple[float, int]] = {}
        for r in self.rounds:
            for client, ratio in zip(
                r.get("cohort") or [], r.get("relative_update_norm") or [], strict=False
            ):
                if ratio is not None and ratio > OUTLIER_RATIO:
                    most, times = out.get(client, (0.0, 0))
                    out[client] = max(most, ratio), times + 1
        return out

    def cumulative_bytes(self) -> list[int]:
        """Bytes sent down and up by all clients up to and including each round."""
        return list(
            accumulate(
                r.get("bytes_down", 0) + r.get("bytes_up", 0) for r in self.rounds
            )
        )

    def rounds_with_weights(self) -> list[int]:
        """Rounds that report mixing weights."""
        return [r["round"] for r in self.rounds if _has_weights(r)]

    def weights(
        self, rounds: Sequence[int] | None = None
    ) -> tuple[list[int], list[Tensor]]:
        """Rounds (of these; default: all) that report mixing weights, and the weights:
        `[N]` for one model, `[M, N]` for several."""
        wanted = (
            self.rounds
            if rounds is None
            else [r for r in self.rounds if r["round"] in rounds]
        )
        have = [r for r in wanted if _has_weights(r)]
        n = self.header.get("n")
        return [r["round"] for r in have], [dense_weights(r["report"], n) for r in have]


def dense_weights(report: Facts, n: int | None) -> Tensor:
    """The weights of a report, where it says `index` those of some of `n` clients
    alone."""
    if not _has_sparse_weights(report):
        return _tensor(report["weights"])
    weight = _tensor(report["weight"])
    index = _tensor(report["index"]).long()
    # none: of each client
    rows = _tensor(report.get("rows", range(len(weight)))).long()
    if n is None:  # the header is lost: a number in a line must not ask for all memory
        n = min_num_clients(report)
        fits = n ** min(2, index.ndim) <= MAX_MATRIX_NUMBERS
        require(
            fits,
            "report.index",
            f"numbers whose matrix has up to {MAX_MATRIX_NUMBERS:,} entries",
            n,
        )
    if index.ndim < 2:
        return weight.new_zeros(n).index_copy_(0, index, weight)
    at = rows[:, None].expand_as(index), index
    return weight.new_zeros(n, n).index_put_(at, weight, accumulate=True)


def min_num_clients(report: Facts) -> int:
    """The number of clients that a report's weights need at least."""
    if not _has_sparse_weights(report):
        return 0
    index, rows = (_tensor(report.get(k, [])).flatten() for k in ("index", "rows"))
    found = torch.cat([index, rows, torch.tensor([len(report["weight"]) - 1.0])])
    return int(found.max()) + 1


def _has_weights(line: Facts) -> bool:
    report = line.get("report") or {}
    found = report.get("weight" if _has_sparse_weights(report) else "weights")
    return isinstance(found, list) and len(found) > 0


def _has_sparse_weights(report: Facts) -> bool:
    return all(isinstance(report.get(k), list | Tensor) for k in ("index", "weight"))


def _with_lost_clients(seen: Facts, measure: str) -> Tensor:
    """One value per client [N]; infinite for one that was lost, NaN where nothing
    was measured."""
    size = seen.get("size") or []
    values = seen.get(measure)
    if values is None:
        values = [None] * len(next(v for v in seen.values() if v is not None))
    values = metrics.vector(values)
    if not measure.endswith(("loss", "mae", "rmse")) or len(size) != len(values):
        return values
    return torch.where(values.isnan() & (metrics.vector(size) > 0), math.inf, values)


def _tensor(value: Any) -> Tensor:
    """Numbers as a line holds them, float64; None is NaN."""
    return torch.as_tensor(np.asarray(value, dtype=np.float64))


@checked
def group_runs(lines: Iterable[Facts]) -> list[Run]:
    """Lines (as written, or as dicts that may hold tensors) to runs: each header starts
    one, and so does a round that is not of the run before it, whose own header is lost.
    """
    out: list[Run] = []
    for line in map(to_json, lines):
        _add_line(out, line, _run_of_line(out, line))
    return out


def _run_of_line(runs: Sequence[Run], line: Facts) -> Run:
    """The run that a line is of: the last one, or a new one."""
    if "header" in line:
        return Run(line["header"])
    return runs[-1] if runs and _follows(line, runs[-1].rounds[-1:]) else Run()


def _add_line(runs: list[Run], line: Line, run: Run) -> None:
    """Adds a line to its run, and a new run to the others."""
    if not {"header", "round", "stopped"} & {*line}:
        return
    if not runs or run is not runs[-1]:
        runs.append(run)
    if "stopped" in line:
        run.stopped, run.unfinished = line["stopped"], bool(line.get("unfinished"))
    if "round" in line:
        run.rounds.append(line)


def _follows(line: Facts, before: Sequence[Facts]) -> bool:
    """Whether a line is one of the run whose last round, if any, is given."""
    return "round" not in line or all(
        line["round"] > last["round"]
        and all(line.get(k) == last.get(k) for k in ("algorithm", "seed"))
        for last in before
    )


@checked
def read(path: str | Path) -> list[Run]:
    """The runs in a record file, or in all `*.jsonl` files below a folder. A damaged
    line is left out, with a warning where it is not the last, which a run may be
    writing; so is a file of a folder that cannot be read."""
    path = Path(path)
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    files = [file for file in files if file.is_file()]
    if not files:
        raise ValueError(
            f"path: expected a record (.jsonl) or a folder that holds one, got {path}, "
            "which is "
            "neither; check the name."
        )
    runs: list[Run] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            why = f"expected a record that can be read, got {file} ({e.strerror})"
            if file == path:
                raise ValueError(f"path: {why}; name another.") from None
            warnings.warn(f"path: {why}; it is left out.", stacklevel=3)
            continue
        found, said = _parse_runs(text.splitlines())
        runs += found
        for what in said:
            warnings.warn(f"{file}: {what}", stacklevel=3)
    return runs


def _parse_runs(texts: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs of a file's lines, and what is to be said of the lines that are left
    out."""
    runs, flaws, earlier = list[Run](), dict[int, str](), list[int]()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text or "{}")
        except (ValueError, RecursionError):
            if number < len(texts):  # the last one may be half written
                flaws[number] = "expected JSON."
            continue
        try:
            check_line(line)
            run = _run_of_line(runs, line)
            check_line_fits_run(
                line,
                run.header,
                next((r["eval"] for r in run.rounds if r.get("eval")), None),
            )
        except EarlierFormatError:
            earlier.append(number)
            continue
        except ValueError as e:
            flaws[number] = str(e)
            continue
        _add_line(runs, line, run)
    said = []
    if flaws:
        first, why = next(iter(flaws.items()))
        said.append(
            f"{len(flaws)} damaged line(s) are left out ({_join_numbers(flaws)}); take "
            "a copy of it from "
            f"before. Line {first}: {why}"
        )
    if earlier:
        said.append(
            f"{len(earlier)} line(s) of an earlier format, whose long lists stand in "
            "another file, "
            f"are left out ({_join_numbers(earlier)}); read it with the pflcore that "
            "wrote it."
        )
    return runs, said


def _join_numbers(numbers: Iterable[int]) -> str:
    """The first five numbers in words."""
    first = list(numbers)
    return ", ".join(map(str, first[:5])) + (", ..." if len(first) > 5 else "")


Runs = Sequence[Run]


def label_runs(runs: Runs) -> dict[str, list[Run]]:
    """Runs that differ in nothing but the seed under one name: the algorithm, with the
    options in which it differs from a namesake."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.algorithm, run_options(run)], sort_keys=True)
        by_key.setdefault(key, []).append(run)
    firsts = [(m[0].algorithm, run_options(m[0])) for m in by_key.values()]
    out: dict[str, list[Run]] = {}
    for (algorithm, mine), members in zip(firsts, by_key.values(), strict=True):
        differ = [
            f"{k}={v}"
            for k, v in mine.items()
            if any(
                (
                    name == algorithm
                    or k in COMPARED_FIELDS
                    or k.startswith("partition.")
                )
                and (k not in other or other[k] != v)
                for name, other in firsts
            )
        ]
        name = f"{algorithm} ({', '.join(differ)})" if differ else algorithm
        out.setdefault(name, []).extend(members)
    return out


def find_runs(groups: dict[str, list[Run]], name: str) -> list[Run] | None:
    """The group with this label, or the first one of this algorithm."""
    return groups.get(name) or next(
        (m for m in groups.values() if m[0].algorithm == name), None
    )


def run_options(run: Run) -> Line:
    """All that was chosen for the run but its seed and its setting, the algorithm's own
    hyper-parameters last."""
    head = run.header
    # a method may have an "alpha", too
    cut = {
        f"partition.{k}": v for k, v in (head.get("partition_options") or {}).items()
    }
    shared = {k: head[k] for k in (*COMPARED_FIELDS, "parameters") if k in head}
    parts = [shared, cut, *(head.get(k) or {} for k in OPTION_GROUPS)]
    return {k: v for part in parts for k, v in part.items() if (k, v) != ("clip", None)}
