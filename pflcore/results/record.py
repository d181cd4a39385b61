"""Records of runs: JSON lines that are written as a run goes on, and read back.

A record file holds one or more runs. A run is a header line `{"header": {...}}`, one
line per round, and, if the run ended early, `{"stopped": "one sentence"}`. A number
that is not finite is stored as null, because JSON has no NaN, and is read back as NaN
where it is one value per client. Files can be concatenated.

In shapes, N is the number of clients, E of evaluations and M of models.
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
# An update that is this many times longer than the cohort's median is an outlier.
# Honest clients with many times the data of the others stay below it.
OUTLIER_RATIO = 20.0
# The largest matrix of mixing weights that is made where no header counts the clients.
MAX_MATRIX_NUMBERS = 10**8
# Fields that say which part of the data the run saw.
DATA_FIELDS = ("data_seed", "train_samples", "test_samples", "val")
TABLE_FIELDS = ("data", "partition", "model", "n")
# Fields that are the same for all rows of a table, or else are shown in their labels.
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
    """`value` in the form that JSON can hold.

    Dataclasses become dicts, tensors and tuples become lists, and numbers that are not
    finite become None. Any other value becomes its name.
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

    Each line goes to the file at once, so an interrupted process leaves at most its
    last line cut off. The rest of a line that a full disk cut off is written before the
    next one.
    """

    def __init__(
        self, path: str | Path, overwrite: bool = False, goes_on: bool = False
    ) -> None:
        """Opens the file at `path`, and makes its folder.

        Args:
            overwrite: Whether lines that the file holds may be lost.
            goes_on: Whether the new lines are added behind those that the file holds.

        Raises ValueError where the file holds something and neither is allowed, and
        where the file cannot be written.
        """
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
        """Plays a run and writes its header, each round, and why it ended early.

        An error of `play` is written too, and then raised again.

        Args:
            play: Plays the run and calls its argument after each round, as
                `Simulation.run` does. What it returns is returned.
            on_round: Is called with each line before the line is written, and may add
                to it.
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
            # Where the disk is full, the error that is raised says so.
            with contextlib.suppress(OSError):
                self.write({"stopped": stopped, "unfinished": True})
            raise
        if history.stopped:
            unfinished = history.interrupted or history.failed
            self.write({"stopped": history.stopped, "unfinished": unfinished})
        return history

    def close(self) -> None:
        """Closes the file, which holds every line that `write` could write."""
        with contextlib.suppress(OSError):  # `write` has raised it before
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
    # The run was stopped by Ctrl-C, a lack of memory or an error, not by its method.
    unfinished: bool = False

    def lines(self) -> Iterator[Line]:
        """The run's lines, as `RecordWriter` writes them."""
        yield {"header": self.header}
        yield from self.rounds
        if self.stopped is not None:
            yield {"stopped": self.stopped, "unfinished": self.unfinished}

    @property
    def complete(self) -> bool:
        """Whether the run is over, and its record lacks nothing.

        Such a record has a header and either all rounds that were planned, or all
        rounds up to the one after which the method stopped the run.
        """
        numbers = [record["round"] for record in self.rounds]
        lacks_no_round = numbers == [*range(1, len(numbers) + 1)]
        if not self.header or self.unfinished or not lacks_no_round:
            return False
        return self.stopped is not None or len(numbers) == self.header.get("rounds")

    @property
    def algorithm(self) -> str:
        """The algorithm's name; "?" where no line has it."""
        for line in (self.header, *self.rounds):
            if "algorithm" in line:
                return str(line["algorithm"])
        return "?"

    @property
    def target(self) -> int | None:
        """The single client that the run personalizes for; None without one."""
        target = self.header.get("target")
        return target if isinstance(target, int) else None

    @property
    def held_out(self) -> str:
        """Note on the training samples that the method kept for its own validation.

        It is empty for a method that trains on all samples, as most do.
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
        """The name "accuracy", or "loss" where no client has an accuracy."""
        if not self.evaluations:
            return "accuracy"
        for record in self.evaluations:
            accuracies = record["eval"].get("accuracy") or []
            if any(value is not None for value in accuracies):
                return "accuracy"
        return "loss"  # as for regression

    @property
    def extra_metrics(self) -> list[str]:
        """The names of the metrics that were chosen beside accuracy and loss."""
        return sorted({*self.last_evaluation} - {"size", "clients", "loss", "accuracy"})

    def values(self, measure: str | None = None) -> tuple[list[int], Tensor]:
        """Rounds of the evaluations, and the clients' values in them, `[E, N]` float64.

        A client without samples has NaN. A loss that was not finite, which is null in
        the file, is infinite here, so that no mean leaves it out.
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
        """Rounds of the evaluations, and the value of each: a mean or one client's.

        Without `client` the value is the mean over clients. A client that was not
        evaluated has NaN.
        """
        rounds, values = self.values(measure)
        if client is None:
            return rounds, [metrics.mean(row) for row in values]
        index = self._client_index(client)
        if index is None:
            return rounds, [math.nan] * len(rounds)
        return rounds, [row[index].item() for row in values]

    def _client_index(self, client: int) -> int | None:
        """The position of a client in the lists of an evaluation, if it is there."""
        # A record names the clients that were evaluated where they are not all.
        ids = self.evaluations[0]["eval"].get("clients") if self.evaluations else None
        if ids is None:
            return client
        return ids.index(client) if client in ids else None

    def last_values(self, measure: str | None = None) -> Tensor:
        """Each client's value at the last evaluation, `[N]`."""
        values = self.values(measure)[1]
        return values[-1] if len(values) else values.reshape(0)

    @property
    def rounds_played(self) -> int:
        """The number of the last round in the record."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    def outliers(self) -> dict[int, tuple[float, int]]:
        """Clients whose update was many times longer than the cohort's median.

        For each client it gives the largest ratio to the median, and in how many rounds
        the ratio was above `OUTLIER_RATIO`.
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
        """Bytes sent down and up by all clients up to and including each round."""
        by_round = []
        for record in self.rounds:
            by_round.append(record.get("bytes_down", 0) + record.get("bytes_up", 0))
        return list(accumulate(by_round))

    def rounds_with_weights(self) -> list[int]:
        """Rounds that report mixing weights."""
        return [record["round"] for record in self.rounds if _has_weights(record)]

    def weights(
        self, rounds: Sequence[int] | None = None
    ) -> tuple[list[int], list[Tensor]]:
        """Rounds that report mixing weights, and these weights.

        The weights are `[N]` for a single model and `[M, N]` for several. With `rounds`
        only those rounds are looked at.
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


def dense_weights(report: Facts, n: int | None) -> Tensor:
    """The mixing weights of a report over all `n` clients, `[N]` or `[M, N]`.

    A sparse report has the `weight` of some clients, whose ids are in `index`. The
    others have weight 0.
    """
    if not _has_sparse_weights(report):
        return _tensor(report["weights"])
    weight = _tensor(report["weight"])
    index = _tensor(report["index"]).long()
    # Without "rows" there is a row of weights for each client.
    rows = _tensor(report.get("rows", range(len(weight)))).long()
    if n is None:
        # The header is lost, and an id in a damaged line must not ask for all memory.
        n = min_num_clients(report)
        fits = n ** min(2, index.ndim) <= MAX_MATRIX_NUMBERS
        words = f"numbers whose matrix has up to {MAX_MATRIX_NUMBERS:,} entries"
        require(fits, "report.index", words, n)
    if index.ndim < 2:
        return weight.new_zeros(n).index_copy_(0, index, weight)
    entries = rows[:, None].expand_as(index), index
    return weight.new_zeros(n, n).index_put_(entries, weight, accumulate=True)


def min_num_clients(report: Facts) -> int:
    """The number of clients that a report's weights need at least."""
    if not _has_sparse_weights(report):
        return 0
    last_row = torch.tensor([len(report["weight"]) - 1.0])
    index = _tensor(report["index"]).flatten()
    rows = _tensor(report.get("rows", [])).flatten()
    return int(torch.cat([index, rows, last_row]).max()) + 1


def _has_weights(line: Facts) -> bool:
    report = line.get("report") or {}
    key = "weight" if _has_sparse_weights(report) else "weights"
    weights = report.get(key)
    return isinstance(weights, list) and len(weights) > 0


def _has_sparse_weights(report: Facts) -> bool:
    return all(isinstance(report.get(k), list | Tensor) for k in ("index", "weight"))


def _client_values(evaluation: Facts, measure: str) -> Tensor:
    """One value per client, [N] float64.

    NaN is a client without a value. An error, such as a loss, is infinite for a client
    that has samples but no finite value, because its model diverged.
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
    """A line's numbers as float64, where None becomes NaN."""
    return torch.as_tensor(np.asarray(value, dtype=np.float64))


@checked
def group_runs(lines: Iterable[Facts]) -> list[Run]:
    """The runs that these lines are of; lines may hold tensors.

    Each header starts a run. So does a round that does not follow the round before it:
    it is of another run, whose header is lost.
    """
    runs: list[Run] = []
    for line in map(to_json, lines):
        _add_line(runs, line, _run_of_line(runs, line))
    return runs


def _run_of_line(runs: Sequence[Run], line: Facts) -> Run:
    """The run that a line belongs to: the last one, or a new one."""
    if "header" in line:
        return Run(line["header"])
    if runs and _follows(line, runs[-1]):
        return runs[-1]
    return Run()


def _add_line(runs: list[Run], line: Line, run: Run) -> None:
    """Adds a line to its run, and a new run to the others."""
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
    """Whether a line can be the next one of a run."""
    if "round" not in line or not run.rounds:
        return True
    last = run.rounds[-1]
    same_run = all(line.get(k) == last.get(k) for k in ("algorithm", "seed"))
    return bool(line["round"] > last["round"]) and same_run


@checked
def read(path: str | Path) -> list[Run]:
    """The runs in a record file, or in all `*.jsonl` files below a folder.

    A damaged line is left out with a warning. The last line of a file may be damaged
    without one, because a run may be writing it. A file below a folder that cannot be
    read is left out with a warning, too.

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
    """The runs of a file's lines, and remarks on the lines that are left out."""
    runs: list[Run] = []
    flaws: dict[int, str] = {}  # what is wrong, by the number of the line
    earlier: list[int] = []  # numbers of lines of an earlier format
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text or "{}")
        except (ValueError, RecursionError):
            if number < len(texts):  # the last line may be half written
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
        flaws: What is wrong with a damaged line, by the line's number.
        earlier: The numbers of lines of an earlier format.
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


Runs = Sequence[Run]


def label_runs(runs: Runs) -> dict[str, list[Run]]:
    """Runs in groups that differ in nothing but the seed, by the group's label.

    A label is the algorithm's name, followed by the options in which the group differs
    from others of the same algorithm, and by what a table's rows should share.
    """
    by_options: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.algorithm, run_options(run)], sort_keys=True)
        by_options.setdefault(key, []).append(run)
    groups = list(by_options.values())
    options = [run_options(members[0]) for members in groups]
    by_label: dict[str, list[Run]] = {}
    for members, own_options in zip(groups, options, strict=True):
        algorithm = members[0].algorithm
        namesakes = []
        for others, other_options in zip(groups, options, strict=True):
            if others[0].algorithm == algorithm:
                namesakes.append(other_options)
        words = _distinctive_options(own_options, options, namesakes)
        label = f"{algorithm} ({', '.join(words)})" if words else algorithm
        by_label.setdefault(label, []).extend(members)
    return by_label


def _distinctive_options(
    options: Line, all_options: Sequence[Line], namesakes: Sequence[Line]
) -> list[str]:
    """Options of a group that another group has not, or has otherwise, as "name=value".

    Args:
        options: The options of the group.
        all_options: The options of all groups, with which fields that a table's rows
            should share are compared.
        namesakes: The options of the groups of the same algorithm, with which its own
            options are compared.
    """
    distinctive = []
    for name, value in options.items():
        is_shared = name in COMPARED_FIELDS or name.startswith("partition.")
        peers = all_options if is_shared else namesakes
        if any(name not in peer or peer[name] != value for peer in peers):
            distinctive.append(f"{name}={value}")
    return distinctive


def find_runs(groups: Mapping[str, list[Run]], name: str) -> list[Run] | None:
    """The group with this label, or the first group of the algorithm of this name."""
    if name in groups:
        return groups[name]
    return next((runs for runs in groups.values() if runs[0].algorithm == name), None)


def run_options(run: Run) -> Line:
    """All that was chosen for a run except its seed, its algorithm's options last."""
    header = run.header
    shared_names = [*COMPARED_FIELDS, "parameters"]
    groups = [{name: header[name] for name in shared_names if name in header}]
    partition = header.get("partition_options") or {}
    # The prefix is there because an algorithm may have an option "alpha", too.
    groups.append({f"partition.{name}": value for name, value in partition.items()})
    groups += [header.get(group) or {} for group in OPTION_GROUPS]
    options = {}
    for group in groups:
        for name, value in group.items():
            if name != "clip" or value is not None:  # no clip is not worth a word
                options[name] = value
    return options
