"""Records of runs: JSON lines written as the run goes, and read back whatever happened to it.

A record file holds one or more runs. A run is a header line `{"header": {...}}`, one line per
round, and, if the run ended early, `{"stopped": "one sentence"}`. A number that is not finite is
stored as null (JSON has no NaN) and read back as NaN where it is one value per client. Files
without a side file can be concatenated.

Lists longer than 1,000 and matrices of more numbers than that are in a side file, `record.arrays`
beside `record.jsonl`: one block of numpy's .npy format after another, read without pickle. In the
line stands where: `{"array": ["record.arrays", 1234]}`, the block's first byte. The blocks of a
line are written before it, so a run that was killed leaves at most some that no line names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflcore import metrics
from pflcore.check import checked

__all__ = ["Record", "Run", "group", "read"]
LONG = 1000  # entries from which a list is no part of a line
OnRound = Callable[[int, dict[str, Any]], None]
PARTS = ("model_options", "training", "options")
# ends the note of a federation that was cut so
# times the cohort's median update: honest clients with many times the data of the others stay below
OUTLIER = 20.0
CUT = ("data_seed", "train_samples", "test_samples", "val")  # which of the data the run saw
SETTING = ("data", "partition", "model", "n")
# what seeds must share
CONDITIONS = (
    *SETTING,
    "clients",
    "eval_clients",
    "parameters",
    "rounds",
    "participation",
    "buffers",
    "criterion",
    "clip",
    "adversary",
    "eval_split",
    *CUT,
)


def plain(value: Any) -> Any:  # noqa: PLR0911 (a kind of value each)
    """`value` as JSON can hold it: dataclasses as dicts, tensors and tuples as lists, numbers that
    are not finite as None, the rest by its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor | np.generic | np.ndarray):
        return plain((value.detach().cpu() if isinstance(value, Tensor) else value).tolist())
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [plain(v) for v in value]
    return getattr(value, "__name__", None) or str(value)


def slug(text: str) -> str:
    """The text as a file's name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


@checked
class Record:
    """Writes one record file. Each line is one unbuffered write, so an interrupted process leaves
    at most its last line cut off."""

    def __init__(
        self, path: str | Path, overwrite: bool = False, mark: Mapping[str, Any] | None = None
    ) -> None:
        """Opens `path`, making its folder. A file that holds something is kept unless `overwrite`:
        ValueError.

        With `mark`, what `mark()` gave when the file was written before, it is cut back to there
        and goes on; ValueError where what stands before the mark is not what was written then.
        """
        self.path, self._torn, self._size, self._digest = Path(path), False, 0, hashlib.sha256()
        self.side, self._arrays = (
            self.path.with_name(self.path.name.removesuffix(".jsonl") + ".arrays"),
            None,
        )  # type: Path, Any
        if mark is None and self.path.is_file() and self.path.stat().st_size and not overwrite:
            raise ValueError(
                f"path: expected a new file, got {self.path}, which holds something; name another "
                "or allow overwriting it."
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "wb" if mark is None else "r+b", buffering=0)  # noqa: SIM115
            if mark is None:
                self.side.unlink(missing_ok=True)
            else:
                self._cut(mark)
        except OSError as e:
            raise ValueError(
                f"path: expected a file that can be written, got {self.path} ({e.strerror}); name "
                "another."
            ) from None

    def _cut(self, mark: Mapping[str, Any]) -> None:
        while piece := self._file.read(min(2**20, mark["bytes"] - self._size)):
            self._count(piece)
        aside = mark.get("arrays", 0)
        if (
            self.mark() | {"arrays": aside} != {**mark, "arrays": aside}
            or (self.side.stat().st_size if aside else 0) < aside
        ):
            self._file.close()
            raise ValueError(
                f"path: {self.path} is not the record that its checkpoint was made with; put that "
                "one back."
            )
        self._file.truncate()  # in one step, and no disk is too full for it
        if self.side.exists():
            os.truncate(self.side, aside)

    def mark(self) -> dict[str, Any]:
        """Where the record stands, once it is on the disk: how many bytes and their SHA-256, and
        how many bytes of long lists aside."""
        for file in filter(None, (self._file, self._arrays)):
            os.fsync(file.fileno())
        aside = self.side.stat().st_size if self.side.exists() else 0
        return {"bytes": self._size, "sha256": self._digest.hexdigest(), "arrays": aside}

    def _count(self, data: bytes | memoryview) -> None:
        self._size += len(data)
        self._digest.update(data)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line: a header, a round or a stop."""
        text = json.dumps(plain(self._aside(line)), allow_nan=False, separators=(",", ":"))
        data = memoryview((("\n" if self._torn else "") + text + "\n").encode())
        # until the whole line is written: Ctrl-C or a full disk may come in between
        self._torn = True
        while data:
            done = self._file.write(data) or 0
            self._count(data[:done])
            data = data[done:]
        self._torn = False

    def _aside(self, value: Any) -> Any:
        """`value` with its long lists and matrices in the side file."""
        if isinstance(value, Mapping):
            return {k: self._aside(v) for k, v in value.items()}
        numbers = _numbers(value)
        if numbers is None:
            return value
        if self._arrays is None:
            self._arrays = open(self.side, "ab")  # noqa: SIM115
        at = self._arrays.seek(0, os.SEEK_END)
        np.save(self._arrays, numbers, allow_pickle=False)
        self._arrays.flush()
        return {"array": [self.side.name, at]}

    def run(
        self,
        header: Mapping[str, Any] | None,
        play: Callable[[OnRound], Any],
        on_round: OnRound | None = None,
    ) -> Any:
        """Writes a whole run, as `play(on_round)`, a `Simulation.run`, plays it: the header (None:
        the run goes on), each round, and why it ended early.

        `on_round` sees each line first and may add to it. An error is written too, and goes on.
        Returns what `play` does.
        """

        def write(round: int, line: dict[str, Any]) -> None:
            try:
                if on_round:
                    on_round(round, line)
            finally:
                self.write(line)

        if header is not None:
            self.write({"header": header})
        try:
            history = play(write)
        except KeyboardInterrupt:  # `Simulation.run` answers it from its first round on
            self.write({"stopped": "Interrupted before the first round.", "unfinished": True})
            raise
        except Exception as e:
            with contextlib.suppress(OSError):  # a full disk, perhaps
                first = next(iter(str(e).strip().splitlines()), "")
                self.write({"stopped": f"{type(e).__name__}: {first}", "unfinished": True})
            raise
        if history.stopped:
            self.write(
                {"stopped": history.stopped, "unfinished": history.interrupted or history.failed}
            )
        return history

    def close(self) -> None:
        """Closes the file; what was written is on disk."""
        if self._arrays is not None and not self._arrays.closed:
            os.fsync(self._arrays.fileno())
            self._arrays.close()
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numbers(value: Any) -> np.ndarray[Any, Any] | None:
    """What goes to the side file: a long list or matrix of numbers, None in it as NaN."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy() if value.numel() > LONG else None
    if (
        not isinstance(value, list)
        or not value
        or len(value) * (len(value[0]) if isinstance(value[0], list) else 1) <= LONG
    ):
        return None
    try:
        array = np.array(value)
        array = array.astype(np.float64) if array.dtype == object else array
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "biuf" else None


@dataclass
class Run:
    """One run as it was recorded."""

    header: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None
    # stopped by Ctrl-C, for want of memory or by an error, and not by what the method does
    unfinished: bool = False

    @property
    def algorithm(self) -> str:
        """What the algorithm is called."""
        return str(
            self.header.get("algorithm")
            or next((r["algorithm"] for r in self.rounds if "algorithm" in r), "?")
        )

    @property
    def target(self) -> int | None:
        """The client that the run personalizes for, where it is a single one."""
        target = self.header.get("target")
        return target if isinstance(target, int) and not isinstance(target, bool) else None

    @property
    def held_out(self) -> str:
        """What the method kept from its own training for validation, in words; "" where it trains
        on all samples as others do."""
        share = (self.header.get("facts") or {}).get("held out for validation")
        return f"{share:.0%} of its training samples held out" if share else ""

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rounds that were evaluated."""
        return [r for r in self.rounds if r.get("eval")]

    @property
    def measure(self) -> str:
        """ "accuracy", or "loss" where the task has no accuracy (regression)."""
        has = any(
            any(v is not None for v in r["eval"].get("accuracy") or []) for r in self.evaluations
        )
        return "accuracy" if has or not self.evaluations else "loss"

    def values(self, measure: str | None = None) -> tuple[list[int], Tensor]:
        """Rounds of the evaluations and their values per client, `[E, N]` float64: NaN for a client
        without samples; a loss that was not finite, null in the file, is infinite, so that no mean
        leaves it out."""
        measure = measure or self.measure
        rows = [
            _worst(metrics.vector(r["eval"][measure]), r["eval"].get("size"), measure)
            for r in self.evaluations
        ]
        return [r["round"] for r in self.evaluations], torch.stack(rows) if rows else torch.empty(
            0, 0, dtype=torch.float64
        )

    def curve(
        self, client: int | None = None, measure: str | None = None
    ) -> tuple[list[int], list[float]]:
        """Rounds of the evaluations and one value each: the mean over clients, or one client's
        own."""
        rounds, values = self.values(measure)
        if client is None:
            return rounds, [metrics.mean(v) for v in values]
        # who was evaluated, where not all
        some = self.evaluations[0]["eval"].get("clients") if rounds else None
        at = client if some is None else some.index(client) if client in some else None
        return rounds, [math.nan if at is None else v[at].item() for v in values]

    def last(self, measure: str | None = None) -> Tensor:
        """Each client's value at the last evaluation, `[N]`."""
        values = self.values(measure)[1]
        return values[-1] if len(values) else values.reshape(0)

    @property
    def planned(self) -> int | None:
        """The rounds that the run was to have."""
        rounds = self.header.get("rounds")
        return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else None

    @property
    def played(self) -> int:
        """The number of the last round in the record."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    def outliers(self) -> dict[int, tuple[float, int]]:
        """Clients whose update was many times the cohort's median: the largest such number, and in
        how many rounds."""
        out: dict[int, tuple[float, int]] = {}
        for r in self.rounds:
            for client, ratio in zip(r.get("cohort") or [], r.get("moved") or [], strict=False):
                if ratio is not None and ratio > OUTLIER:
                    most, times = out.get(client, (0.0, 0))
                    out[client] = max(most, ratio), times + 1
        return out

    def sent(self) -> list[int]:
        """Bytes sent down and up by all clients up to and including each round."""
        total, out = 0, []
        for r in self.rounds:
            total += r.get("bytes_down", 0) + r.get("bytes_up", 0)
            out.append(total)
        return out

    def weighted(self) -> list[int]:
        """Rounds that report mixing weights."""
        return [r["round"] for r in self.rounds if _has_weights(r.get("report") or {})]

    def weights(
        self, rounds: Sequence[int] | None = None, most: int | None = None
    ) -> tuple[list[int], list[Tensor]]:
        """Rounds (of these; default: all) that report mixing weights, and the weights: `[N]` for
        one model, `[M, N]` for several.

        A matrix of more than `most` rows and columns comes as the means over rows, and sums over
        columns, of blocks of clients.
        """
        wanted = set(self.weighted() if rounds is None else rounds)
        have = [
            r for r in self.rounds if r["round"] in wanted and _has_weights(r.get("report") or {})
        ]
        return [r["round"] for r in have], [self._matrix(r["report"], most) for r in have]

    def _matrix(self, report: Mapping[str, Any], most: int | None) -> Tensor:
        if "index" not in report:
            dense = torch.as_tensor(_nan(report["weights"]), dtype=torch.float64)
            n = max(dense.shape)
            if dense.ndim < 2 or most is None or n <= most:
                return dense
            rows, index, weight = (
                torch.arange(len(dense)),
                torch.arange(dense.shape[1]).expand_as(dense),
                dense,
            )
        else:
            index = torch.as_tensor(report["index"], dtype=torch.int64)
            weight = torch.as_tensor(_nan(report["weight"]), dtype=torch.float64)
            # none: one model, or one for each client
            rows = torch.as_tensor(report.get("rows", range(len(index))), dtype=torch.int64)
            n = int(self.header.get("n") or max(int(rows.max()), int(index.max())) + 1)
            if index.ndim < 2:
                return weight.new_zeros(n).index_copy_(0, index, weight)
        block = 1 if most is None else -(-n // most)
        matrix = torch.zeros(-(-n // block), -(-n // block), dtype=torch.float64)
        matrix.index_put_(
            ((rows // block)[:, None].expand_as(index), index // block), weight, accumulate=True
        )
        # the last block may be smaller
        return matrix / torch.bincount(torch.arange(n) // block)[:, None]


def _has_weights(report: Mapping[str, Any]) -> bool:
    return any(k in report and len(report[k]) > 0 for k in ("weights", "weight"))


def _worst(values: Tensor, size: Sequence[int] | None, measure: str) -> Tensor:
    if not measure.endswith(("loss", "mae", "rmse")) or not size or len(size) != len(values):
        return values
    return torch.where(values.isnan() & (torch.tensor(size) > 0), math.inf, values)


def _nan(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    return (
        [_nan(v) for v in value]
        if isinstance(value, list)
        else math.nan
        if value is None
        else value
    )


@checked
def group(lines: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Lines (as written, or as dicts that may hold tensors) to runs: each header starts one, and so
    does a round that is not of the run before it, whose own header is lost."""
    return _grouped(map(plain, lines))


def _grouped(lines: Iterable[dict[str, Any]]) -> list[Run]:
    out: list[Run] = []
    for line in lines:
        if "header" in line:
            out.append(Run(line["header"]))
            continue
        if not out and ("stopped" in line or "round" in line):
            out.append(Run())
        if "round" in line and out[-1].rounds:
            before = out[-1].rounds[-1]
            if line["round"] <= before["round"] or any(
                line.get(k) != before.get(k) for k in ("algorithm", "seed")
            ):
                out.append(Run())
        if "stopped" in line:
            out[-1].stopped, out[-1].unfinished = line["stopped"], bool(line.get("unfinished"))
        if "round" in line:
            out[-1].rounds.append(line)
    return out


@checked
def read(path: str | Path) -> list[Run]:
    """The runs in a record file, or in all `*.jsonl` files below a folder. A damaged line is left
    out, with a warning where it is not the last, which a run may be writing."""
    path = Path(path)
    files = (
        sorted(p for p in path.rglob("*.jsonl") if p.name != "tuning.jsonl")
        if path.is_dir()
        else [path]
    )
    if not files or not files[0].is_file():
        raise ValueError(
            f"path: expected a record (.jsonl) or a folder that holds one, got {path}, which is "
            "neither; check the name."
        )
    runs: list[Run] = []
    for file in files:
        lines: list[Any] = []
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text or "{}")
                lines.append(_whole(line, file.parent) if '{"array":[' in text else line)
            except FileNotFoundError:
                raise
            except Exception:  # numpy's reader raises many kinds
                lines.append(None)
        damaged = [i for i, line in enumerate(lines, 1) if not _is_line(line)]
        if damaged and damaged != [len(lines)]:
            said = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
            warnings.warn(
                f"{file}: {len(damaged)} damaged line(s) are left out ({said}); take a copy of it "
                "from before.",
                stacklevel=3,
            )
        runs += _grouped(filter(_is_line, lines))
    return runs


def _is_line(line: Any) -> bool:
    """Whether it has the form of what `Record` writes: somebody may have altered it."""
    if not isinstance(line, dict):
        return False
    kinds_of = {"header": dict, "stopped": str, "round": int, "eval": dict | None}
    measured = line.get("eval")
    plain_values = not isinstance(measured, dict) or not any(
        isinstance(v, dict) for v in measured.values()
    )
    return plain_values and all(
        isinstance(line[k], kind) for k, kind in kinds_of.items() if k in line
    )  # type: ignore[arg-type]


def _whole(value: Any, folder: Path) -> Any:
    """`value` with what is in side files: lists as lists, matrices as tensors. An error of any kind
    where a block was altered."""
    if not isinstance(value, dict):
        return value
    if set(value) != {"array"}:
        return {k: _whole(v, folder) for k, v in value.items()}
    name, at = value["array"]
    file = folder / Path(name).name
    if not file.is_file():
        raise FileNotFoundError(
            f"path: expected {file} beside the record, which holds its long lists; keep the two "
            "together."
        )
    with open(file, "rb") as blocks:
        blocks.seek(at)
        array = np.load(blocks, allow_pickle=False)
    if array.ndim > 1:
        return torch.from_numpy(array)
    return (
        [None if v != v else v for v in array.tolist()]
        if array.dtype.kind == "f"
        else array.tolist()
    )


def label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but the seed under one name: the algorithm, with the options in
    which it differs from a namesake."""
    by_key: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_key.setdefault((run.algorithm, json.dumps(options(run), sort_keys=True)), []).append(run)
    out: dict[str, list[Run]] = {}
    for (algorithm, _), members in by_key.items():
        others = [(other == algorithm, options(m[0])) for (other, _), m in by_key.items()]
        mine = options(members[0])
        # what all rows of a table must share, the cut with it
        shared = {*CONDITIONS} - {"parameters"}
        differ = [
            k
            for k in mine
            if any(
                (same or k in shared or k.startswith("partition."))
                and (k not in o or o[k] != mine[k])
                for same, o in others
            )
        ]
        name = (
            f"{algorithm} ({', '.join(f'{k}={mine[k]}' for k in differ)})" if differ else algorithm
        )
        out.setdefault(name, []).extend(members)
    return out


def find(groups: dict[str, list[Run]], name: str) -> list[Run] | None:
    """The group with this label, or the first one of this algorithm."""
    return groups.get(name) or next((m for m in groups.values() if m[0].algorithm == name), None)


def options(run: Run) -> dict[str, Any]:
    """All that was chosen for the run but its seed and its setting, the algorithm's own
    hyper-parameters last."""
    head = run.header
    # a method may have an "alpha", too
    cut = {f"partition.{k}": v for k, v in (head.get("partition_options") or {}).items()}
    parts = [{k: head[k] for k in CONDITIONS if k in head}, cut] + [
        head.get(k) or {} for k in PARTS
    ]
    return {k: v for part in parts for k, v in part.items() if (k, v) != ("clip", None)}
