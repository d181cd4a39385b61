"""Records of runs: JSON lines, written during a run.

A record file holds one or more runs. A run is a header line `{"header": {...}}`, one
line per round, and, if the run ended early, `{"stopped": "one sentence"}`. A number
that is not finite is stored as null, because JSON has no NaN. Where it is the value of
a client, it is read back as NaN. Record files can be concatenated.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pflcore.check import checked
from pflcore.simulation._history import History, RunEnd
from pflcore.simulation._json import to_json as to_json

__all__ = ["read"]
Facts = Mapping[str, Any]
Line = dict[str, Any]
OnRound = Callable[[int, Line], None]
# Fields of a header that tell which samples the run used.
DATA_FIELDS = ("data_seed", "train_samples", "test_samples", "val")


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
        play: Callable[[OnRound], History],
        on_round: OnRound | None = None,
    ) -> History:
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
            # Where the disk is full, the caller sees the error that is raised below.
            with contextlib.suppress(OSError):
                self.write(_history_of_error(e).last_line())
            raise
        if history.stopped is not None:
            self.write(history.last_line())
        return history

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):  # `write` has raised the same error before
            self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Runs = Sequence[History]


def _history_of_error(error: BaseException) -> History:
    """The history, without rounds, of a run that an error has ended."""
    reason = next(iter(str(error).strip().splitlines()), "")
    is_interrupt = isinstance(error, KeyboardInterrupt)
    kind: Any = "interrupted" if is_interrupt else "failed"
    return History(end=RunEnd(kind, f"{type(error).__name__}: {reason}"))


@checked
def group_runs(lines: Iterable[Facts]) -> list[History]:
    """The runs of these lines, which may contain tensors.

    Each header starts a run. A round that does not follow the round before it starts a
    run, too, the header of which is lost.
    """
    runs: list[History] = []
    for line in map(to_json, lines):
        _add_line(runs, line, _run_of_line(runs, line))
    return runs


def _run_of_line(runs: Sequence[History], line: Facts) -> History:
    """The run of a line: the last run, or a new one."""
    if "header" in line:
        return History(line["header"])
    if runs and _follows(line, runs[-1]):
        return runs[-1]
    return History()


def _add_line(runs: list[History], line: Line, run: History) -> None:
    """Adds a line to its run, and a new run to `runs`."""
    if not {"header", "round", "stopped", "samples"} & {*line}:
        return
    if not runs or run is not runs[-1]:
        runs.append(run)
    if "stopped" in line:
        run.end = _end_of_line(line)
    if "samples" in line:
        run.samples = line["samples"]
    if "round" in line:
        run.rounds.append(line)


def _end_of_line(line: Line) -> RunEnd:
    """The end of a run by the line that says why it ended early."""
    if line.get("interrupted"):
        return RunEnd("interrupted", line["stopped"])
    if line.get("unfinished"):
        return RunEnd("failed", line["stopped"])
    return RunEnd("stopped", line["stopped"])


def _follows(line: Facts, run: History) -> bool:
    """True where a line can be the next line of a run."""
    if "round" not in line or not run.rounds:
        return True
    last = run.rounds[-1]
    same_run = all(line.get(k) == last.get(k) for k in ("algorithm", "seed"))
    return bool(line["round"] > last["round"]) and same_run


@checked
def read(path: str | Path) -> list[History]:
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
    runs: list[History] = []
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


def _parse_runs(texts: Sequence[str]) -> tuple[list[History], list[str]]:
    """The runs of a file's lines, and a remark where lines are damaged."""
    runs: list[History] = []
    damaged: list[int] = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text or "{}")
        except (ValueError, RecursionError):
            if number < len(texts):  # the last line may be incomplete
                damaged.append(number)
            continue
        if _is_line(line):
            _add_line(runs, line, _run_of_line(runs, line))
        else:
            damaged.append(number)
    if not damaged:
        return runs, []
    remark = (
        f"{len(damaged)} damaged line(s) are left out ({_join_numbers(damaged)}); take "
        "a copy of it from before."
    )
    return runs, [remark]


def _is_line(line: Any) -> bool:
    """True for a JSON object that has what every reader needs of its kind of line."""
    if not isinstance(line, dict):
        return False
    if "round" in line:
        evaluation = line.get("eval")
        is_evaluation = evaluation is None or isinstance(evaluation, dict)
        return isinstance(line["round"], int) and is_evaluation
    has_reason = isinstance(line.get("stopped", ""), str)
    parts = (line.get("header", {}), line.get("samples", {}))
    return has_reason and all(isinstance(part, dict) for part in parts)


def _join_numbers(numbers: Iterable[int]) -> str:
    """The first five numbers, with commas between them."""
    words = [str(number) for number in numbers]
    if len(words) > 5:
        words = [*words[:5], "..."]
    return ", ".join(words)
