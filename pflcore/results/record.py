"""Records of runs: JSON lines, written during a run.

A record file holds one or more runs. A run is a header line `{"header": {...}}`, one
line per round, and, if the run ended early, `{"stopped": "one sentence"}`. A number
that is not finite is stored as null, because JSON has no NaN. Where it is the value of
a client, it is read back as NaN. Record files can be concatenated.

Symbols: N clients; E evaluations; M models.
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
# An update is an outlier if its norm is more than this many times the cohort's median.
# Honest clients stay below it, also those with many times the data of the others.
OUTLIER_RATIO = 20.0
# The most numbers of a matrix of mixing weights where no header has the number of
# clients.
MAX_MATRIX_NUMBERS = 10**8
# Fields of a header that tell which samples the run used.
DATA_FIELDS = ("data_seed", "train_samples", "test_samples", "val")


def to_json(value: Any) -> Any:  # noqa: PLR0911 (a kind of value each)
    """A copy of `value` that JSON can represent.

    Dataclasses become dicts, tensors and tuples become lists, and numbers that are not
    finite become None. Functions and classes become their names, and any other value
    becomes its text.
    """
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
    """Writes one record file, line by line.

    Each line is written at once, so an interrupted process leaves at most its last line
    incomplete. The rest of a line that a full disk cut off is written before the next
    line.

    Args:
        path: The file. Its folder is made where it does not exist.
        overwrite: True allows a file with lines, and replaces them.
        goes_on: True allows a file with lines, and adds the new lines behind them.

    Raises ValueError for a file with lines where neither is allowed, and where the file
    cannot be written.
    """

    def __init__(
        self, path: str | Path, overwrite: bool = False, goes_on: bool = False
    ) -> None:
        """Opens the file for the class's arguments."""
        self.path = Path(path)
        may_have_lines = overwrite or goes_on
        has_lines = self.path.is_file() and self.path.stat().st_size > 0
        if has_lines and not may_have_lines:
            raise ValueError(
                f"path: expected a new file, got {self.path}, which holds something; "
                "name another or allow overwriting it."
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab" if goes_on else "wb")  # noqa: SIM115
        except OSError as e:
            raise ValueError(
                f"path: expected a file that can be written, got {self.path} "
                f"({e.strerror}); name another."
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
        """Plays a run, writes its lines, and returns the result of `play`.

        The lines are the header, the rounds and the reason for an early end. An error
        of `play` is written as the reason, and then raised again.

        Args:
            header: The header of the run.
            play: Plays the run and calls its argument after each round, as
                `Simulation.run` does.
            on_round: Is called with the number and the line of each round before the
                line is written, and may add to the line.
        """

        def write_round(round: int, line: Line) -> None:
            try:
                if on_round:
                    on_round(round, line)
            finally:
                self.write(line)

        self.write({"header": header})
        try:
            history = play(write_round)
        except BaseException as e:
            reason = next(iter(str(e).strip().splitlines()), "")
            stopped = f"{type(e).__name__}: {reason}"
            # Where the disk is full, the caller sees the error that is raised below.
            with contextlib.suppress(OSError):
                self.write({"stopped": stopped, "unfinished": True})
            raise
        if history.stopped:
            unfinished = history.interrupted or history.failed
            self.write({"stopped": history.stopped, "unfinished": unfinished})
        return history

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):  # `write` has raised the same error before
            self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Run:
    """One run of a record.

    Attributes:
        header: The facts about the whole run: algorithm, options, data, seed; {} where
            the header line is lost.
        rounds: The line of each round, in order.
        stopped: The reason for an early end, one sentence; None for a run that played
            all its rounds.
        unfinished: True where Ctrl-C, a lack of memory or an error stopped the run.
            False where the run was complete or the algorithm stopped it.
    """

    header: Line = field(default_factory=dict)
    rounds: list[Line] = field(default_factory=list)
    stopped: str | None = None
    unfinished: bool = False

    def lines(self) -> Iterator[Line]:
        """Yields the lines of the run that `RecordWriter` writes."""
        yield {"header": self.header}
        yield from self.rounds
        if self.stopped is not None:
            yield {"stopped": self.stopped, "unfinished": self.unfinished}

    @property
    def complete(self) -> bool:
        """True where the run is over, and its record lacks no line.

        Such a record has a header. It has all planned rounds, or all rounds up to the
        one after which the algorithm stopped the run.
        """
        numbers = [record["round"] for record in self.rounds]
        lacks_no_round = numbers == [*range(1, len(numbers) + 1)]
        if not self.header or self.unfinished or not lacks_no_round:
            return False
        return self.stopped is not None or len(numbers) == self.header.get("rounds")

    @property
    def algorithm(self) -> str:
        """The name of the algorithm; "?" where no line has it."""
        for line in (self.header, *self.rounds):
            if "algorithm" in line:
                return str(line["algorithm"])
        return "?"

    @property
    def target(self) -> int | None:
        """The only client with a personalized model; None for all clients."""
        target = self.header.get("target")
        return target if isinstance(target, int) else None

    @property
    def held_out(self) -> str:
        """A note on training samples that the algorithm held out.

        It is "" for an algorithm that trains on all samples, as most do.
        """
        share = (self.header.get("facts") or {}).get("held out for validation")
        return f"{share:.0%} of its training samples held out" if share else ""

    @property
    def evaluations(self) -> list[Line]:
        """The records of the rounds that were evaluated."""
        return [record for record in self.rounds if record.get("eval")]

    @property
    def last_evaluation(self) -> Line:
        """The last evaluation; {} where there is none."""
        return {**self.evaluations[-1]["eval"]} if self.evaluations else {}

    @property
    def main_metric(self) -> str:
        """The metric "accuracy", or "loss" where no client has an accuracy."""
        if not self.evaluations:
            return "accuracy"
        for record in self.evaluations:
            accuracies = record["eval"].get("accuracy") or []
            if any(value is not None for value in accuracies):
                return "accuracy"
        return "loss"  # as for regression

    @property
    def extra_metrics(self) -> list[str]:
        """The names of the chosen metrics other than accuracy and loss."""
        return sorted({*self.last_evaluation} - {"size", "clients", "loss", "accuracy"})

    def values(self, measure: str | None = None) -> tuple[list[int], Tensor]:
        """The evaluated rounds, and the clients' values in them `[E, N]` float64.

        A client without samples has NaN. A loss that was not finite is null in the file
        and infinite here, so that no mean leaves it out.

        Args:
            measure: The name of a metric; by default `main_metric`.
        """
        measure = measure or self.main_metric
        rounds = [record["round"] for record in self.evaluations]
        if not rounds:
            return rounds, torch.empty(0, 0, dtype=torch.float64)
        rows = [_client_values(record["eval"], measure) for record in self.evaluations]
        return rounds, torch.stack(rows)

    def curve(
        self, client: int | None = None, measure: str | None = None
    ) -> tuple[list[int], list[float]]:
        """The evaluated rounds, and one client's value or the mean.

        Args:
            client: The id of the client; None gives the mean over clients. A client
                that was not evaluated has NaN.
            measure: The name of a metric; by default `main_metric`.
        """
        rounds, values = self.values(measure)
        if client is None:
            return rounds, [metrics.mean(row) for row in values]
        index = self._client_index(client)
        if index is None:
            return rounds, [math.nan] * len(rounds)
        return rounds, [row[index].item() for row in values]

    def _client_index(self, client: int) -> int | None:
        """The position of a client in an evaluation's lists, or None."""
        # A record has the ids of the evaluated clients only where some clients are not
        # evaluated.
        ids = self.evaluations[0]["eval"].get("clients") if self.evaluations else None
        if ids is None:
            return client
        return ids.index(client) if client in ids else None

    def last_values(self, measure: str | None = None) -> Tensor:
        """The clients' values at the last evaluation `[N]`, see `values`."""
        values = self.values(measure)[1]
        return values[-1] if len(values) else values.reshape(0)

    @property
    def rounds_played(self) -> int:
        """The number of the last round in the record."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    def outliers(self) -> dict[int, tuple[float, int]]:
        """The clients with an update many times longer than the cohort's median.

        The value of a client has the largest ratio to the median, and the number of
        rounds with a ratio above `OUTLIER_RATIO`.
        """
        outliers: dict[int, tuple[float, int]] = {}
        for record in self.rounds:
            ids = record.get("cohort") or []
            ratios = record.get("relative_update_norm") or []
            for client, ratio in zip(ids, ratios, strict=False):
                if ratio is not None and ratio > OUTLIER_RATIO:
                    largest, times = outliers.get(client, (0.0, 0))
                    outliers[client] = max(largest, ratio), times + 1
        return outliers

    def cumulative_bytes(self) -> list[int]:
        """The bytes that were sent up to the end of each round."""
        by_round = []
        for record in self.rounds:
            by_round.append(record.get("bytes_down", 0) + record.get("bytes_up", 0))
        return list(accumulate(by_round))

    def rounds_with_weights(self) -> list[int]:
        """The numbers of the rounds that report mixing weights."""
        return [record["round"] for record in self.rounds if _has_weights(record)]

    def weights(
        self, rounds: Sequence[int] | None = None
    ) -> tuple[list[int], list[Tensor]]:
        """The rounds that report mixing weights, and these weights.

        The weights are `[N]` for a single model and `[M, N]` for several models.

        Args:
            rounds: The rounds to look at; by default all.
        """
        n = self.header.get("n")
        reporting = []
        weights = []
        for record in self.rounds:
            is_chosen = rounds is None or record["round"] in rounds
            if is_chosen and _has_weights(record):
                reporting.append(record["round"])
                weights.append(dense_weights(record["report"], n))
        return reporting, weights


Runs = Sequence[Run]


def dense_weights(report: Facts, n: int | None) -> Tensor:
    """The mixing weights of a report, `[N]` or `[M, N]`.

    A sparse report has the weights of some clients as `weight`, and the clients' ids as
    `index`. The other clients have weight 0.

    Args:
        n: The number of clients; None where the header is lost.
    """
    if not _has_sparse_weights(report):
        return _tensor(report["weights"])
    weight = _tensor(report["weight"])
    index = _tensor(report["index"]).long()
    # Without "rows" there is a row of weights for each client.
    rows = _tensor(report.get("rows", range(len(weight)))).long()
    if n is None:
        # An id in a damaged line must not make a matrix that fills the memory.
        n = min_num_clients(report)
        fits = n ** min(2, index.ndim) <= MAX_MATRIX_NUMBERS
        words = f"numbers whose matrix has up to {MAX_MATRIX_NUMBERS:,} entries"
        require(fits, "report.index", words, n)
    if index.ndim < 2:
        return weight.new_zeros(n).index_copy_(0, index, weight)
    entries = rows[:, None].expand_as(index), index
    return weight.new_zeros(n, n).index_put_(entries, weight, accumulate=True)


def min_num_clients(report: Facts) -> int:
    """The smallest number of clients that fits a report's mixing weights."""
    if not _has_sparse_weights(report):
        return 0
    last_row = torch.tensor([len(report["weight"]) - 1.0])
    index = _tensor(report["index"]).flatten()
    rows = _tensor(report.get("rows", [])).flatten()
    return int(torch.cat([index, rows, last_row]).max()) + 1


def _has_weights(line: Facts) -> bool:
    """True where a round reports mixing weights."""
    report = line.get("report") or {}
    key = "weight" if _has_sparse_weights(report) else "weights"
    weights = report.get(key)
    return isinstance(weights, list) and len(weights) > 0


def _has_sparse_weights(report: Facts) -> bool:
    """True where a report has the weights of some clients only."""
    return all(isinstance(report.get(k), list | Tensor) for k in ("index", "weight"))


def _client_values(evaluation: Facts, measure: str) -> Tensor:
    """The value of each client in an evaluation, [N] float64.

    A client without a value has NaN. A loss or another error is infinite for a client
    with samples but without a finite value, because its model diverged.
    """
    size = evaluation.get("size") or []
    values = evaluation.get(measure)
    if values is None:
        count = len(next(v for v in evaluation.values() if v is not None))
        values = [None] * count
    values = metrics.vector(values)
    is_error = measure.endswith(("loss", "mae", "rmse"))
    if not is_error or len(size) != len(values):
        return values
    diverged = values.isnan() & (metrics.vector(size) > 0)
    return torch.where(diverged, math.inf, values)


def _tensor(value: Any) -> Tensor:
    """A line's numbers as a float64 tensor, where None becomes NaN."""
    return torch.as_tensor(np.asarray(value, dtype=np.float64))


@checked
def group_runs(lines: Iterable[Facts]) -> list[Run]:
    """The runs of these lines, which may contain tensors.

    Each header starts a run. A round that does not follow the round before it starts a
    run, too, the header of which is lost.
    """
    runs: list[Run] = []
    for line in map(to_json, lines):
        _add_line(runs, line, _run_of_line(runs, line))
    return runs


def _run_of_line(runs: Sequence[Run], line: Facts) -> Run:
    """The run of a line: the last run, or a new one."""
    if "header" in line:
        return Run(line["header"])
    if runs and _follows(line, runs[-1]):
        return runs[-1]
    return Run()


def _add_line(runs: list[Run], line: Line, run: Run) -> None:
    """Adds a line to its run, and a new run to `runs`."""
    if not {"header", "round", "stopped"} & {*line}:
        return
    if not runs or run is not runs[-1]:
        runs.append(run)
    if "stopped" in line:
        run.stopped = line["stopped"]
        run.unfinished = bool(line.get("unfinished"))
    if "round" in line:
        run.rounds.append(line)


def _follows(line: Facts, run: Run) -> bool:
    """True where a line can be the next line of a run."""
    if "round" not in line or not run.rounds:
        return True
    last = run.rounds[-1]
    same_run = all(line.get(k) == last.get(k) for k in ("algorithm", "seed"))
    return bool(line["round"] > last["round"]) and same_run


@checked
def read(path: str | Path) -> list[Run]:
    """The runs in a record file, or in a folder's `*.jsonl` files.

    A damaged line is left out with a warning. The last line of a file is left out
    without a warning if it is incomplete, because a run may be writing it. A file in a
    folder that cannot be read is left out with a warning.

    Raises ValueError where there is no record at `path`, or it cannot be read.
    """
    path = Path(path)
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    files = [file for file in files if file.is_file()]
    if not files:
        raise ValueError(
            f"path: expected a record (.jsonl) or a folder that holds one, got {path}, "
            "which is neither; check the name."
        )
    runs: list[Run] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            reason = f"expected a record that can be read, got {file} ({e.strerror})"
            if file == path:
                raise ValueError(f"path: {reason}; name another.") from None
            warnings.warn(f"path: {reason}; it is left out.", stacklevel=3)
            continue
        file_runs, remarks = _parse_runs(text.splitlines())
        runs += file_runs
        for remark in remarks:
            warnings.warn(f"{file}: {remark}", stacklevel=3)
    return runs


def _parse_runs(texts: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs of a file's lines, and remarks on damaged lines."""
    runs: list[Run] = []
    flaws: dict[int, str] = {}  # a sentence for each damaged line, by its number
    earlier: list[int] = []  # the numbers of lines in an earlier format
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text or "{}")
        except (ValueError, RecursionError):
            if number < len(texts):  # the last line may be incomplete
                flaws[number] = "expected JSON."
            continue
        try:
            check_line(line)
            run = _run_of_line(runs, line)
            first = next((r["eval"] for r in run.rounds if r.get("eval")), None)
            check_line_fits_run(line, run.header, first)
        except EarlierFormatError:
            earlier.append(number)
            continue
        except ValueError as e:
            flaws[number] = str(e)
            continue
        _add_line(runs, line, run)
    return runs, _remarks(flaws, earlier)


def _remarks(flaws: Mapping[int, str], earlier: Sequence[int]) -> list[str]:
    """Sentences on the lines that are left out.

    Args:
        flaws: A sentence for each damaged line, by the line's number.
        earlier: The numbers of lines in an earlier format.
    """
    remarks = []
    if flaws:
        first, flaw = next(iter(flaws.items()))
        remarks.append(
            f"{len(flaws)} damaged line(s) are left out ({_join_numbers(flaws)}); take "
            f"a copy of it from before. Line {first}: {flaw}"
        )
    if earlier:
        remarks.append(
            f"{len(earlier)} line(s) of an earlier format, whose long lists stand in "
            f"another file, are left out ({_join_numbers(earlier)}); read it with the "
            "pflcore that wrote it."
        )
    return remarks


def _join_numbers(numbers: Iterable[int]) -> str:
    """The first five numbers, with commas between them."""
    words = [str(number) for number in numbers]
    if len(words) > 5:
        words = [*words[:5], "..."]
    return ", ".join(words)
