"""Checkpoints: what a run needs to continue, whole or not at all.

`checkpoint.safetensors` holds the tensors. Its metadata holds the header of the run,
its round, its records, and a digest of everything. The file is written under another
name, synced and renamed into its place: until then the earlier checkpoint stands.
Nothing is pickled, so reading a checkpoint runs no code of its writer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pflcore.check import NonNegativeFloat, NonNegativeInt, checked, warn_caller
from pflcore.simulation._describe import (
    Record,
    content_digest,
    difference_in_digits,
    explain_other_run,
)
from pflcore.simulation._files import atomic_write, remove_part_files
from pflcore.simulation._functions import warn_of_names
from pflcore.simulation._state import (
    RunConfig,
    State,
    initial_state,
    load_state_dict,
    state_dict,
)
from pflcore.simulation.record import to_json

__all__ = ["Checkpoint", "load"]
FORMAT_VERSION = 7
FILE_NAME = "checkpoint.safetensors"


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
def save(
    folder: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Writes a checkpoint into `folder`, in place of an earlier one.

    Raises OSError where it cannot be written. Then the earlier checkpoint stands.

    Args:
        folder: The folder of the checkpoint.
        tensors: Tensors [...] on any device.
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
    digest = content_digest([dict(tensors), text], sampled=False)
    metadata = {"facts": text, "digest": digest}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            write_tensors(part, tensors, metadata)
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or e
        raise OSError(
            f"checkpoint: it cannot be written into {folder} ({reason}); the one "
            "before it, if any, stands."
        ) from None
    remove_part_files(path)


def write_tensors(
    part: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes tensors [...] on any device into a new file, as readable as its folder.

    Raises TypeError for a dtype that the format lacks.
    """
    rows = {}
    storages = set()
    for name, tensor in tensors.items():
        row = tensor.detach().cpu().contiguous()
        storage = row.untyped_storage().data_ptr()
        # The package refuses tensors that share memory.
        rows[name] = row.clone() if storage in storages else row
        storages.add(storage)
    try:
        save_file(rows, part, metadata)
    except KeyError as e:
        raise TypeError(
            f"checkpoint: safetensors holds no {e}; keep the state in another dtype."
        ) from None
    # The package makes files that only their owner may read.
    part.chmod(part.parent.stat().st_mode & 0o666)


@checked
def load(folder: str | Path) -> tuple[dict[str, Tensor], Record]:
    """The tensors [...] and the facts of the checkpoint in `folder`.

    The tensors are on the CPU. Raises ValueError where there is no checkpoint, or where
    it holds something else than what was written.
    """
    path = Path(folder, FILE_NAME)
    if not path.is_file():
        raise ValueError(
            f"checkpoint: expected a folder that holds one, got {folder}, which has no "
            f"{FILE_NAME}; check the name."
        )
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            # A tensor may begin at any byte of the file; its clone is aligned.
            tensors = {name: file.get_tensor(name).clone() for name in names}
            metadata = file.metadata()
        text = metadata["facts"]
        if metadata["digest"] != content_digest([tensors, text], sampled=False):
            raise ValueError
        facts: Record = json.loads(text)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"checkpoint: {folder} holds one that is damaged (it was altered, cut off "
            "or exchanged); take a copy of it from before, or begin the run anew in "
            "another folder."
        ) from None
    version = facts["format"]
    if version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint: expected format {FORMAT_VERSION}, got {version} in {folder}; "
            "take the pflcore that wrote it."
        )
    return tensors, facts


# a run's ----------------------------------------------------------------------


def save_run(
    folder: str | Path,
    header: Record,
    config: RunConfig,
    state: State,
    records: Sequence[Record],
) -> None:
    """Writes the checkpoint of a run. Raises OSError as `save` does.

    Args:
        folder: The folder of the checkpoint.
        header: The header of the run.
        config: The options of the run.
        state: The state after the last round.
        records: The records of the rounds up to the state.
    """
    tensors = state_dict(config.algorithm, state)
    tensors["net.w0"] = config.net.w0
    tensors["net.b0"] = config.net.b0
    for record in records:
        for name, value in record["report"].items():
            if isinstance(value, Tensor):
                tensors[f"report.{record['round']}.{name}"] = value
    facts = {
        "header": header,
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
    folder: str | Path, header: Record, config: RunConfig
) -> tuple[RunConfig, State, list[Record]]:
    """The parts of a run that its checkpoint holds.

    Returns the options of the run with the model that it started from, the state, and
    the records. Raises ValueError for the checkpoint of another run; warns where it was
    made on another machine or by another version.
    """
    # The folder may be one that only the first rank sees.
    tensors, facts = config.ranks.from_first("the checkpoint", lambda: load(folder))
    check_run(folder, facts, header, config)
    records: list[Record] = facts["rounds"]
    report_of = {record["round"]: record["report"] for record in records}
    for name in [*tensors]:
        if name.startswith("report."):
            _, round, key = name.split(".", 2)
            report_of[int(round)][key] = tensors.pop(name)
    device = config.net.w0.device
    net = config.net.to(device)
    net.w0 = tensors.pop("net.w0").to(device)
    net.b0 = tensors.pop("net.b0").to(device)
    config = replace(config, net=net)
    alg = config.algorithm
    initial = initial_state(alg, net, config.data.n)
    state = load_state_dict(alg, initial, tensors, facts["round"], facts["void"])
    return config, state, records


def comparable_header(there: Record, here: Record) -> Record:
    """The header of a checkpoint, for the comparison with that of a run.

    Code has another digest in each version of Python, so between two versions the
    functions of this run stand in it. Warns where functions are compared by name alone.
    """
    functions = here.get("functions", {})
    warn_of_names("checkpoint", functions)
    versions = [run.get("functions", {}).get("python") for run in (there, here)]
    if None in versions or versions[0] == versions[1]:
        return there
    warn_caller(
        f"checkpoint: it was made with Python {versions[0]}, so that functions and "
        "classes were compared by name alone."
    )
    return {**there, "functions": functions}


def check_run(
    folder: str | Path, facts: Record, header: Record, config: RunConfig
) -> None:
    """Raises ValueError where the facts of a checkpoint are another run's.

    The run may have another number of rounds, see `explain_other_run`. Warns where the
    checkpoint was made with something else than this run.
    """
    there = comparable_header(facts.get("header", {}), header)
    difference = explain_other_run(there, header, config, facts.get("round", 0))
    if difference is not None:
        raise ValueError(
            f"checkpoint: {folder} holds that of another run: {difference}; give what "
            "it was made with, or another folder."
        )
    difference = difference_in_digits(there, header)
    if difference is not None:
        warn_caller(
            f"checkpoint: {difference}; numbers may differ in their last digits from "
            "an unbroken run's."
        )
