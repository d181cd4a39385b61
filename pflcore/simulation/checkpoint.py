"""Checkpoints: what a run needs to continue, whole or not at all.

`checkpoint.safetensors` holds the tensors. Its metadata holds the identity of the run,
its round, its records, and a digest of the whole file. The file is written under
another name, synced and renamed into its place: until then the earlier checkpoint
stands. Nothing is pickled, so reading a checkpoint runs no code of its writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pflcore.algorithms._protocol import Algorithm
from pflcore.check import (
    NonNegativeFloat,
    NonNegativeInt,
    checked,
    reject,
    require,
    summarize,
    summarize_kind,
    warn_caller,
)
from pflcore.results._files import atomic_write, remove_part_files
from pflcore.results.record import to_json
from pflcore.simulation._describe import Record, RunDescription
from pflcore.simulation._safetensors import (
    DIGEST_KEY,
    DIGEST_PLACEHOLDER,
    write_safetensors,
)
from pflcore.simulation._state import (
    RunConfig,
    State,
    check_state,
    client_row_names,
    flatten_state,
    initial_state,
    load_state_dict,
    state_dict,
    unflatten_state,
)
from pflcore.simulation._uploads import non_finite_names
from pflcore.train import Net, Training

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Checkpoint", "load"]
FORMAT_VERSION = 4
# Fields that are read of a record, with the types that they may have.
RECORD_FIELD_TYPES = {
    "round": (int,),
    "cohort": (list,),
    "dropped": (list,),
    "relative_update_norm": (list, type(None)),
    "report": (dict,),
    "eval": (dict, type(None)),
}
FILE_NAME = "checkpoint.safetensors"
DAMAGED_TEXT = (
    "checkpoint: {} holds one that is damaged (it was altered, cut off or exchanged); "
    "take a copy of it from before, or begin the run anew."
)


@checked
@dataclass
class Checkpoint:
    """The folder and the times of a run's checkpoints.

    A checkpoint is written after every `every` rounds or `minutes`, whichever comes
    first. In both numbers 0 means never.

    Args:
        folder: The folder of the checkpoint.
        every: The number of rounds from one checkpoint to the next.
        minutes: The minutes from one checkpoint to the next.

    >>> simulation.run(checkpoint=Checkpoint("runs/mine", every=10))   # doctest: +SKIP
    """

    folder: str | Path
    every: NonNegativeInt = 0
    minutes: NonNegativeFloat = 10.0
    _since: float = field(default_factory=time.monotonic, init=False, repr=False)

    @property
    def exists(self) -> bool:
        """True where the folder holds a checkpoint."""
        return (Path(self.folder) / FILE_NAME).exists()

    def due(self, round: int) -> bool:
        """True where it is time for a checkpoint after `round`.

        The minutes count from the last call that returned True.
        """
        minutes = (time.monotonic() - self._since) / 60
        is_due = 0 < self.minutes <= minutes
        if self.every and round % self.every == 0:
            is_due = True
        if is_due:
            self._since = time.monotonic()
        return is_due


@checked
@contextlib.contextmanager
def lock(folder: str | Path, name: str = "out") -> Iterator[None]:
    """Keeps other runs out of `folder` during the block.

    The lock also ends with the process. The folder is made. Raises ValueError, which
    begins with `name`, where another run is in it, or where it cannot be written.
    """
    path = Path(folder) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 (closed below)
    except OSError:
        reject(name, "a folder that can be written", str(folder))
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{name}: another run is writing into {folder}; wait until it has "
                "ended, or name another folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


@checked
def save(
    folder: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Writes a checkpoint into `folder`, in place of an earlier one.

    Raises OSError where it cannot be written. Then the earlier checkpoint stands.

    Args:
        folder: The folder of the checkpoint.
        tensors: Tensors [...] on any device, of which no copy is made.
        facts: Values that JSON can hold, and NaN.
    """
    path = Path(folder, FILE_NAME)
    try:
        text = json.dumps({**facts, "format": FORMAT_VERSION}, default=to_json)
    except (TypeError, ValueError, RecursionError) as e:
        # A callback may put any value into a record.
        raise OSError(
            f"checkpoint: it cannot be written into {folder}, because a record holds "
            f"what JSON does not ({e}); the one before it, if any, stands."
        ) from None
    metadata = {DIGEST_KEY: DIGEST_PLACEHOLDER, "facts": text}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            write_safetensors(part, tensors, metadata)
    except OSError as e:
        raise OSError(
            f"checkpoint: it cannot be written into {folder} ({e.strerror or e}); the "
            "one before it, if any, stands."
        ) from None
    remove_part_files(path)


def _digest(data: bytes) -> str:
    """The SHA-256 of a file that has a placeholder in its place."""
    return hashlib.sha256(data).hexdigest()


@checked
def load(folder: str | Path) -> tuple[dict[str, Tensor], Record]:
    """The tensors [...] and the facts of the checkpoint in `folder`.

    The tensors are on the CPU.
    Raises ValueError where there is no checkpoint, or where a byte differs from those
    that were written.
    """
    try:
        data = Path(folder, FILE_NAME).read_bytes()
    except OSError as e:
        raise ValueError(
            f"checkpoint: expected a folder that holds one, got {folder}, which has no "
            f"{FILE_NAME} that can be read ({e.strerror}); check the name."
        ) from None
    try:
        tensors, facts = _parse_checkpoint(data)
        version = facts["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(DAMAGED_TEXT.format(folder)) from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint: expected format {FORMAT_VERSION}, got "
            f"{summarize(version)} in {folder}; take the pflcore that wrote it."
        )
    # The parser's tensors may begin at any byte of the file; clones are aligned.
    return {name: tensor.clone() for name, tensor in tensors.items()}, facts


def _parse_checkpoint(data: bytes) -> tuple[dict[str, Tensor], Record]:
    """The tensors and facts of a checkpoint's bytes.

    Raises an error of any kind where they are no checkpoint, or where they differ from
    those that were written.
    """
    import safetensors.torch

    # A safetensors file: 8 bytes for the length of the header, the header, the numbers.
    header_end = 8 + int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8:header_end])["__metadata__"]
    digest = metadata[DIGEST_KEY]
    unsigned = data.replace(digest.encode(), DIGEST_PLACEHOLDER.encode(), 1)
    if _digest(unsigned) != digest:
        raise ValueError
    facts: Record = json.loads(metadata["facts"])
    return safetensors.torch.load(data), facts


# a run's ----------------------------------------------------------------------


def save_run(
    folder: str | Path, run: RunDescription, state: State, records: Sequence[Record]
) -> None:
    """Writes the checkpoint of a run. Raises OSError as `save` does.

    Args:
        folder: The folder of the checkpoint.
        run: The description of the run.
        state: The state after the last round.
        records: The records of the rounds up to the state.
    """
    net = run.context.net
    tensors = state_dict(run.config.algorithm, state)
    tensors["net.w0"] = net.w0
    tensors["net.b0"] = net.b0
    for record in records:
        for name, value in record["report"].items():
            if isinstance(value, Tensor):
                tensors[f"report.{record['round']}.{name}"] = value
    facts = {
        "run": run.identity(),
        "round": state.round,
        "void": state.void_rounds,
        "rounds": [_without_tensors(record) for record in records],
    }
    save(folder, tensors, facts)


def _without_tensors(record: Record) -> Record:
    """A copy of a record whose report has None in place of tensors.

    None keeps the place of a name among the others.
    """
    report = dict(record["report"])
    for name, value in report.items():
        if isinstance(value, Tensor):
            report[name] = None
    return {**record, "report": report}


def restore_run(
    folder: str | Path, run: RunDescription
) -> tuple[RunConfig, State, list[Record]]:
    """The parts of a run that its checkpoint holds.

    Returns the options of the run with the model that it started from, the state, and
    the records. Raises ValueError for the checkpoint of another run; warns where it was
    made on another machine or by another version.
    """
    alg = run.config.algorithm
    # The folder may be one that only the first rank sees.
    ranks = run.config.ranks
    tensors, facts = ranks.from_first("the checkpoint", lambda: load(folder))
    check_identity(folder, facts, run)
    try:
        reports = {
            name: tensors.pop(name) for name in [*tensors] if name.startswith("report.")
        }
        records = _restore_records(facts, reports, run.context.rounds)
        net = _restore_net(tensors, run.context.net)
        training = run.context.training
        n = run.context.data.n
        initial = initial_state(alg, net, n, run.config.folder, training=training)
        _check_state(tensors, initial, alg, net, training)
    except ValueError as e:
        raise ValueError(
            f"checkpoint: {folder} holds one that this run did not write "
            f"({str(e).rstrip('.')}); take a copy of it from before, or begin the run "
            "anew."
        ) from None
    config = run.config._replace(context=run.context._replace(net=net))
    state = load_state_dict(alg, initial, tensors, facts["round"], facts["void"])
    return config, state, records


def check_identity(folder: str | Path, facts: Record, run: RunDescription) -> None:
    """Raises ValueError where the facts of a checkpoint are another run's.

    The run may have another number of rounds, see `RunDescription.compare`. Warns where
    the checkpoint was made with something else than this run.
    """
    there: Any = facts.get("run")
    there = there if isinstance(there, dict) else {}
    played: Any = facts.get("round")
    difference = run.compare(there, played if type(played) is int else 0)
    if difference is not None:
        raise ValueError(
            f"checkpoint: {folder} holds that of another run: {difference}; give what "
            "it was made with, or another folder."
        )
    difference = run.compare_made_with(there)
    if difference is not None:
        warn_caller(
            f"checkpoint: {difference}; numbers may differ in their last digits from "
            "an unbroken run's."
        )


def _restore_records(
    facts: Record, reports: Mapping[str, Tensor], rounds: int
) -> list[Record]:
    """The records of the rounds, with the tensors of their reports.

    Raises ValueError where the facts are not those of a run of `rounds` rounds.
    """
    played: Any = facts.get("round")
    void: Any = facts.get("void")
    records: Any = facts.get("rounds")
    _require_count("round", played, rounds)
    _require_count("void", void, played)
    require(isinstance(records, list), "rounds", "a list of records", records)
    wanted = f"records with {', '.join(RECORD_FIELD_TYPES)}"
    for record in records:
        require(_is_record(record), "rounds", wanted, record)
    report_of = {record["round"]: record["report"] for record in records}
    has_each_once = len(report_of) == len(records)
    fits = has_each_once and all(0 < round <= played for round in report_of)
    require(fits, "rounds", f"each round up to {played} once", [*report_of])
    for name, tensor in reports.items():
        _, round, key = [*name.split(".", 2), ""][:3]  # of "report.ROUND.KEY"
        is_known = round.isdecimal() and int(round) in report_of
        require(is_known, name, "a round's report", tensor)
        report_of[int(round)][key] = tensor
    return list(records)


def _require_count(name: str, value: Any, most: int) -> None:
    """Raises ValueError unless a value is an int from 0 to `most`."""
    fits = type(value) is int and 0 <= value <= most
    require(fits, name, f"at most {most}", value)


def _is_record(record: Any) -> bool:
    """True for a dict with the fields of `RECORD_FIELD_TYPES`."""
    return isinstance(record, dict) and all(
        type(record.get(name)) in types for name, types in RECORD_FIELD_TYPES.items()
    )


def _restore_net(tensors: dict[str, Tensor], template: Net) -> Net:
    """A copy of the model with the first weights of the run.

    Its tensors are removed from `tensors`. Raises ValueError where they do not fit.
    """
    device = template.w0.device
    net = template.to(device)
    for name in ("w0", "b0"):
        like = getattr(template, name)
        tensor = tensors.pop(f"net.{name}", None)
        _require_like(f"net.{name}", tensor, like)
        setattr(net, name, tensor.to(device))  # type: ignore[union-attr]
    return net


def _require_like(name: str, tensor: Tensor | None, like: Tensor) -> None:
    """Raises ValueError for a tensor that is missing or has another form.

    The form is the dtype and the shape.
    """
    fits = tensor is not None
    if tensor is not None:
        fits = tensor.dtype == like.dtype and tensor.shape == like.shape
    require(fits, name, summarize_kind(like), tensor)


def _check_state(
    tensors: Mapping[str, Tensor],
    initial: State,
    alg: Algorithm,
    net: Net,
    training: Training,
) -> None:
    """Raises ValueError for tensors that are no `state_dict` of such a run.

    `initial` is the state before the run. Dtypes and shapes must be those of a state
    that is set, and numbers must be finite, as every round leaves them.
    """
    n = len(initial.participated)
    sparse_names = client_row_names(alg, initial)
    seen = tensors.get("seen")
    _require_like("seen", seen, initial.participated)
    count = int(seen.sum())  # type: ignore[union-attr]
    dense = dict(tensors)
    for name in sparse_names & {*tensors}:
        rows = tensors[name]
        fits = rows.dim() and len(rows) == count
        require(fits, name, f"rows of {count} clients", rows)
        # It has the shape of the rows of all clients, without their memory.
        dense[name] = rows.new_zeros(()).expand(n, *rows.shape[1:])
    for name in ("batch_norm", *(f"clients.{key}" for key in initial.clients)):
        require(name in tensors, name, "a tensor of clients' rows", None)
    check_state(unflatten_state(dense, 0), alg, net, n, training)
    before = flatten_state(initial)
    to_check = {}
    for name, tensor in tensors.items():
        # A tensor that is not finite from the start may stay so. A tensor that is new
        # in the run is made of the initial model.
        is_finite_at_start = not non_finite_names({name: before.get(name, net.w0)})
        if name in sparse_names or is_finite_at_start:
            to_check[name] = tensor
    for name in non_finite_names(to_check):
        reject(name, "finite numbers", tensors[name])
